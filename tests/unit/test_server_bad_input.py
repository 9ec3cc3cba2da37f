"""Every bad request gets the right status, code and param, in the one error shape; nothing reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {name: value}, name)
    for name, value in {
        "tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "audio": {"voice": "x"},
        "structured_outputs": {"regex": "a"}, "guided_json": {"a": 1}, "guided_regex": "a",
        "guided_choice": ["a"], "guided_grammar": "a",
        "best_of": 3, "use_beam_search": True, "functions": [{}], "tool_choice": "required",
        "modalities": ["audio"], "web_search_options": {"a": 1}, "reasoning_effort": "high", "store": True,
        "echo": True, "chat_template": "x", "continue_final_message": True, "documents": [{}],
        "bad_words": ["a"], "allowed_token_ids": [1], "length_penalty": 2.0, "truncate_prompt_tokens": 5,
    }.items()
] + [(COMPLETION, {"suffix": "x"}, "suffix")]  # fmt: skip
INVALID: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"n": 9}, "n"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"stop": ["a"] * 9}, "stop"),
    (CHAT, {"stop": ["a" * 129]}, "stop"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": [1]}, "stop[0]"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [999999]}, "stop_token_ids"),
    (CHAT, {"seed": 2**70}, "seed"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": None}, "prompt"),
    (COMPLETION, {"prompt": [[]]}, "prompt"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETION, {"prompt": [-1]}, "prompt"),
    (COMPLETION, {"prompt": [[1, 999999]]}, "prompt"),
    (COMPLETION, {"prompt": [2**40]}, "prompt"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETION, {"prompt": [[1]] * 1025}, "prompt"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
]
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {"prompt": [5] * 256}, "prompt"),
    (COMPLETION, {"prompt": [5] * 200, "max_tokens": 57}, "max_tokens"),
    (CHAT, {"max_tokens": 256}, "max_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "漢" * 5000}]}, "prompt"),
]
RAW: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (b'{"model": "base", "messages": [{"role": "user", "content": "\xff"}]}', 400),
    (b'{"model": "base", "messages": [{"role": "user", "content": "a"}], "other": "\xff"}', 400),
    (b'{"model": "base", "messages": [], "temperature": NaN}', 400),
    (b'{"model": "base", "messages": [], "temperature": Infinity}', 400),
    (b'{"model": "base", "messages": [], "temperature": 1e999}', 400),
    (b'{"model": "base", "x": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
    (b"[" * 100_000, 400),
    (b'{"x": "' + b"a" * (8 << 20) + b'"}', 413),
]


def _error(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["code"], str) and error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


def _post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    base = {"model": "base", "messages": MESSAGES} if path == CHAT else {"model": "base", "prompt": "a"}
    return server.http.post(path, json={**base, **body})


def test_bad_fields(server: Any) -> None:
    for path, body, param in UNSUPPORTED:
        response = _post(server, path, body)
        error = _error(response)
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param), body
    for path, body, param in INVALID:
        response = _post(server, path, body)
        error = _error(response)
        assert (response.status_code, error["code"]) == (400, "invalid_request_error"), (body, error)
        assert error["param"] == param, (body, error)
    for path, body, param in TOO_LONG:
        response = _post(server, path, body)
        assert (response.status_code, _error(response)["code"]) == (400, "context_length_exceeded"), body
        assert _error(response)["param"] == param
    for raw, status in RAW:
        response = server.http.post(CHAT, content=raw)
        assert response.status_code == status, (raw[:80], response.text)
        _error(response)
    for role, extra in (("tool", {}), ("assistant", {"tool_calls": [{}]})):
        response = _post(server, CHAT, {"messages": [{"role": role, "content": "x", **extra}]})
        assert _error(response)["code"] == "unsupported_parameter"
    image = [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]
    response = _post(server, CHAT, {"messages": [{"role": "user", "content": image}]})
    assert _error(response)["param"] == "messages[0].content[0].type"
    assert server.engine.added == [] and server.client.num_open == 0


def test_neutral_and_unknown_fields_pass(server: Any) -> None:
    neutral = {
        "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "best_of": 1, "priority": 0, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto",
        "unheard_of": {"x": []}, "store": False,
        "stop": None, "logit_bias": {"5": 1}, "top_k": -1, "parallel_tool_calls": True, "stream_options": None,
    }  # fmt: skip
    assert _post(server, CHAT, neutral).status_code == 200
    assert server.engine.added[0].sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_priority_and_service_tier(server: Any, path: str) -> None:
    asked = [{}, {"service_tier": "flex"}, {"service_tier": "priority"}, {"priority": -3}, {"priority": 7}]
    tiers = [_post(server, path, body).json().get("service_tier") for body in asked]
    assert tiers == [None, "flex", "default", None, None]
    assert [request.priority for request in server.engine.added] == [0, 1, 0, -3, 7]
    for wrong in ({"priority": 101}, {"priority": "high"}, {"priority": 1.5}, {"service_tier": "gold"}):
        response = _post(server, path, wrong)
        assert response.status_code == 400 and _error(response)["param"] == next(iter(wrong))


def test_unknown_models_routes_and_methods(server: Any) -> None:
    response = _post(server, CHAT, {"model": "nope"})
    assert (response.status_code, _error(response)["code"]) == (404, "model_not_found")
    response = server.http.get("/v1/nothing")
    assert (response.status_code, _error(response)["code"]) == (404, "not_found")
    response = server.http.get(CHAT)
    assert (response.status_code, _error(response)["code"]) == (405, "method_not_allowed")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="base", messages=MESSAGES, temperature=9)
    assert (caught.value.code, caught.value.param) == ("invalid_request_error", "temperature")
    assert caught.value.request_id.startswith("req_")


def test_request_id_is_only_echoed(server: Any) -> None:
    for given in ("client-id-1", "client-id-1"):
        response = server.http.get("/version", headers={"x-request-id": given})
        assert response.headers["x-request-id"] == given
        body = {"model": "base", "prompt": "a"}
        assert server.http.post(COMPLETION, json=body, headers={"x-request-id": given}).status_code == 200
    assert len({request.request_id for request in server.engine.added}) == 2
    odd = server.http.get("/version", headers={"x-request-id": "a b" + "c" * 300})
    assert odd.headers["x-request-id"].startswith("req_")
    many = server.http.get("/version", headers={f"h{index}": "x" for index in range(80)})
    assert many.status_code == 431 and _error(many)


def test_an_error_inside_is_a_500_that_says_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(name: str) -> None:
        raise RuntimeError("secret /path")

    monkeypatch.setattr(server.app.state.store.adapters, "resolve", explode)
    response = _post(server, CHAT, {"model": "other"})
    assert response.status_code == 500 and _error(response)["code"] == "server_error" and "secret" not in response.text


def test_keys(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["key-one", "key-two"])
    for path in ("/v1/models", CHAT, "/metrics", "/version", "/nothing", "/v1/files", "/openapi.json"):
        for given in (None, b"Bearer wrong", b"Basic key-one", b"\xe9", b"Bearer", b"Bearer key-one key-two"):
            response = server.http.get(path, headers={} if given is None else {b"authorization": given})
            assert (response.status_code, _error(response)["code"]) == (401, "invalid_api_key")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ping").status_code == 200
    for key in ("key-one", "key-two"):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data[0].id == "base"
