"""/v1/chat/completions with the stock SDK and on the wire, against a fake engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from ..waiting import LIMIT_S, until

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = 'Hello wörld 🎉 "quoted" 漢字\n\ttab'


def _sdk(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0, timeout=LIMIT_S)


def _events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def _post(server: Any, **body: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"model": "base", "messages": MESSAGES, **body})


def test_whole_and_streamed_with_the_sdk(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script(TEXT)
    with _sdk(server) as client:
        whole = client.chat.completions.create(model="base", messages=MESSAGES, max_completion_tokens=200, seed=1)
        assert whole.choices[0].message.content == TEXT
        assert (whole.choices[0].finish_reason, whole.object) == ("stop", "chat.completion")
        assert whole.id.startswith("chatcmpl-")
        sent = server.engine.added[0]
        assert sent.prompt_token_ids == server.tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=False
        )
        assert (sent.sampling.max_tokens, sent.sampling.seed, sent.adapter) == (200, 1, None)
        ids = server.tokenizer.encode(TEXT)
        assert whole.usage.completion_tokens == len(ids) + 1  # the end token counts
        assert whole.usage.prompt_tokens == len(sent.prompt_token_ids)
        assert whole._request_id.startswith("req_")

        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(model="base", messages=MESSAGES, stream=True, stream_options=options)
        )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.model_dump(exclude_none=True) == {"role": "assistant", "content": ""}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].choices[0].delta.model_dump(exclude_none=True) == {}
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert server.client.num_open == 0 and not server.engine.aborted


def test_stream_options_on_the_wire(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script("one two")
    plain = _events(_post(server, stream=True))
    assert all("usage" not in chunk for chunk in plain)
    both = _events(_post(server, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in both]
    assert counts == sorted(counts) and counts[-1] == len(server.tokenizer.encode("one two")) + 1
    assert both[-1]["choices"] == []
    # guidellm's request
    ignore = _events(
        _post(server, stream=True, stop=None, ignore_eos=True, max_tokens=3, stream_options={"include_usage": True})
    )
    assert ignore[-2]["choices"][0]["finish_reason"] == "length"
    assert ignore[-1]["usage"]["completion_tokens"] == 3


def test_n_choices_are_separate_and_seeded(serve: Callable[..., Any]) -> None:
    server = serve()
    ids = {seed: [*server.tokenizer.encode(f"answer {seed}"), server.engine.eos] for seed in (7, 8, 9)}
    server.engine.script = lambda request: ids[request.sampling.seed]
    answer = _post(server, n=3, seed=7).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["answer 7", "answer 8", "answer 9"]
    assert answer["usage"]["prompt_tokens"] == len(server.engine.added[0].prompt_token_ids)
    texts = ["", "", ""]
    for chunk in _events(_post(server, n=3, seed=7, stream=True)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["answer 7", "answer 8", "answer 9"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_text_and_usage(serve: Callable[..., Any], stream: bool) -> None:
    server = serve(tick_s=0.003)
    server.script("hello world, stop here and more and more and more", end=False)

    def run(**body: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
        response = _post(server, stream=stream, stream_options={"include_usage": True} if stream else None, **body)
        if not stream:
            choice = response.json()["choices"][0]
            return choice["message"]["content"], choice, response.json()["usage"]
        events = _events(response)
        return (
            "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]),
            events[-2]["choices"][0],
            events[-1]["usage"],
        )

    text, choice, usage = run(stop=["stop here", "never"])
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("hello world, ", "stop", "stop here")
    ids = server.tokenizer.encode("hello world, stop here and more and more and more")
    cut = next(n for n in range(len(ids)) if "stop here" in server.tokenizer.decode(ids[:n]))
    assert usage["completion_tokens"] == cut
    until(lambda: server.engine.finished)
    assert [message.num_tokens for message in server.engine.finished] == [cut]
    assert server.client.num_open == 0

    assert run(stop="stop here", include_stop_str_in_output=True)[0] == "hello world, stop here"
    text, choice, _ = run(stop=["and more!"], max_tokens=cut + 3)  # begins like a stop string at the end of the stream
    assert text == server.tokenizer.decode(ids[: cut + 3]) and choice["finish_reason"] == "length"
    assert run(stop=["hello"], min_tokens=10, max_tokens=12)[0].startswith("hello")
    comma = server.tokenizer.convert_tokens_to_ids(",")
    text, choice, _ = run(stop_token_ids=[comma])
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("hello world", "stop", comma)


def test_logprobs_and_token_ids(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script("é!")
    answer = _post(server, logprobs=True, top_logprobs=2, return_token_ids=True, prompt_logprobs=0).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content][:3] == [[0xC3], [0xA9], [ord("!")]]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert answer["choices"][0]["token_ids"] == [*server.tokenizer.encode("é!"), server.engine.eos]
    assert answer["prompt_token_ids"] == server.engine.added[0].prompt_token_ids
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    streamed = _events(_post(server, logprobs=True, stream=True))
    entries = [entry for c in streamed for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in content]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_messages_in_all_their_forms(serve: Callable[..., Any]) -> None:
    server = serve()
    messages = [
        {"role": "developer", "content": "rules"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b"}],
            "name": "x",
        },
    ]
    assert _post(server, messages=messages).status_code == 200
    ids = server.engine.added[0].prompt_token_ids
    text = "<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert server.tokenizer.decode(ids) == text
    assert ids.count(server.engine.eos) == 2  # not the one that the user typed


def test_model_without_chat_template(serve: Callable[..., Any], tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    server = serve(tokenizer=tokenizer)
    response = _post(server)
    assert response.status_code == 400 and "'base'" in response.json()["error"]["message"]
    server.script("fine")
    body = {"model": "base", "prompt": "works"}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "fine"


def test_an_adapter_is_asked_in_the_template_it_was_trained_in(serve: Callable[..., Any], tmp_path: Any) -> None:
    server = serve()
    other = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    for name, template in (("own", other), ("bare", None)):
        folder = tmp_path / name
        folder.mkdir()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        server.app.state.store.adapters.publish(name, 1, name * 8, str(folder), None)
    expected = {"own": server.tokenizer.encode("[user] hi\n", add_special_tokens=False)}
    expected["base"] = expected["bare"] = server.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    for name, ids in expected.items():
        assert _post(server, model=name).status_code == 200
        assert server.engine.added[-1].prompt_token_ids == ids, name
        asked = server.http.post("/tokenize", json={"model": name, "messages": MESSAGES}).json()
        assert asked["tokens"] == ids, name
