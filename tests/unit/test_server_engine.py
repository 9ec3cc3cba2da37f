"""What happens to requests when clients leave, the engine dies, refuses or is stuck; health and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from fineinfer.messages import RequestOutput
from fineinfer.server import engine_client

from ..waiting import LIMIT_S, until

CHAT = "/v1/chat/completions"
BODY = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


def _idle(server: Any) -> bool:
    return server.client.num_open == 0 and not server.engine.open


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_leave_nothing_behind(serve: Callable[..., Any], stream: bool) -> None:
    server = serve(tick_s=0.005)
    server.script("x" * 200, end=False)

    async def leave_after(delay_s: float, client: httpx.AsyncClient) -> None:
        try:
            await asyncio.wait_for(client.post(server.url + CHAT, json={**BODY, "stream": stream, "n": 2}), delay_s)
        except TimeoutError:
            pass

    async def run() -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            await asyncio.gather(*(leave_after(0.02 * index, client) for index in range(60)))

    asyncio.run(run())
    until(lambda: _idle(server), "a request leaked")
    assert len(server.engine.aborted) > 10
    server.script("still well")
    assert server.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == "still well"
    state = server.app.state.services
    assert state.engine._open == {}


def test_leaving_in_mid_stream_aborts_at_once(serve: Callable[..., Any]) -> None:
    server = serve(tick_s=0.002)
    server.script("x" * 200, end=False)
    with server.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
    until(lambda: server.engine.aborted != [], "no abort")
    until(lambda: _idle(server), "a request leaked")


def test_engine_death(serve: Callable[..., Any]) -> None:
    server = serve(tick_s=0.01)
    server.script("y" * 200, end=False)
    results: dict[str, Any] = {}

    def whole() -> None:
        results["whole"] = server.http.post(CHAT, json=BODY, timeout=LIMIT_S)

    def streamed() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            try:
                for _ in client.chat.completions.create(stream=True, **BODY):
                    pass
            except openai.APIError as error:
                results["sdk"] = error

    def raw() -> None:
        results["raw"] = server.http.post(CHAT, json={**BODY, "stream": True}, timeout=LIMIT_S).text

    threads = [threading.Thread(target=target) for target in (whole, streamed, raw)]
    for thread in threads:
        thread.start()
    until(lambda: len(server.engine.open) == 3, "not all started")
    time.sleep(0.1)
    server.engine.die()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a request hangs"
    assert results["whole"].status_code == 503 and int(results["whole"].headers["retry-after"]) <= 30
    assert results["whole"].json()["error"]["code"] == "engine_overloaded"
    assert results["sdk"].code == "engine_overloaded"
    events = results["raw"].split("\n\n")
    assert events[-2] == "data: [DONE]" and set(json.loads(events[-3].removeprefix("data: "))) == {"error"}

    refused = server.http.post(CHAT, json=BODY)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    health = server.http.get("/health")
    assert health.status_code == 503 and "retry-after" in health.headers
    assert server.http.get("/v1/models").status_code == 200

    sent = len(server.engine.added)
    server.engine.come_back()
    until(lambda: server.client.unavailable_reason() is None, "the new engine was not noticed")
    assert len(server.engine.added) == sent, "a request for the dead engine reached the new one"
    server.script("back")
    assert server.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == "back"


def test_engine_refusals_become_statuses(serve: Callable[..., Any]) -> None:
    server = serve()
    for code, status in (
        ("model_not_found", 404), ("context_length_exceeded", 400), ("engine_overloaded", 503), ("server_error", 500),
        ("rate_limit_exceeded", 429), ("adapter_not_found", 404),
    ):  # fmt: skip
        server.engine.refuse = RequestOutput(request_id="", error_code=code, error_message="No.", error_param="x")
        for stream in (False, True):
            response = server.http.post(CHAT, json={**BODY, "stream": stream})
            assert response.status_code == status
            error = response.json()["error"]
            assert (error["code"], error["message"], error["param"]) == (code, "No.", "x")
            assert ("retry-after" in response.headers) == (status in (429, 503))
    assert _idle(server)


def test_health_sees_a_stuck_engine(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(tick_s=0.02)
    assert server.http.get("/health").status_code == 200
    monkeypatch.setattr(engine_client, "MAX_SILENCE_S", 1.5)
    server.engine.answer_pings = False
    until(lambda: server.http.get("/health").status_code == 503, "silence was not noticed")
    server.engine.answer_pings = True
    until(lambda: server.http.get("/health").status_code == 200, "the answer was not noticed")
    server.engine.progress_moves = False
    time.sleep(2.6)
    until(lambda: server.http.get("/health").status_code == 200, "nothing waits, so nothing is late")
    server.script("z" * 240, end=False)
    with server.http.stream("POST", CHAT, json={**BODY, "stream": True}):
        until(lambda: server.http.get("/health").status_code == 503, "no progress was not noticed")
    until(lambda: server.http.get("/health").status_code == 200, "an idle engine is well")


def test_models_and_adapters(serve: Callable[..., Any]) -> None:
    server = serve()
    store = server.app.state.store
    store.adapters.publish("ft:base:org:x:1", 4, "v4", "/d4", None)
    store.adapters.publish("ft:base:org:x:1", 8, "v8", "/d8", None)
    store.adapters.publish("tone", 1, "v1", "/d1", None)
    server.script("ok")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        ids = {model.id for model in client.models.list()}
        assert ids == {"base", "ft:base:org:x:1", "ft:base:org:x:1@4", "ft:base:org:x:1@8", "tone", "tone@1"}
        model = client.models.retrieve("ft:base:org:x:1@4")
        assert model.parent == "base" and model.fineinfer["step"] == 4 and model.max_model_len == 256
        for name, adapter in (("ft:base:org:x:1", "ft:base:org:x:1"), ("base:tone", "tone"), ("tone@1", "tone@1")):
            answer = client.chat.completions.create(model=name, messages=BODY["messages"])
            assert (server.engine.added[-1].adapter, answer.model) == (adapter, name)
            assert (answer.adapter_version, answer.adapter_step) == ("sha", 4)
        for name in ("tone@2", "base:nope", "base:", "tone@", ""):
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model=name, messages=BODY["messages"])
        with pytest.raises(openai.PermissionDeniedError):
            client.models.delete("base")
        assert client.models.delete("tone").deleted is True
        until(lambda: server.engine.store_changes == 1, "the supervisor was not told")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("tone")


def test_an_adapter_in_training_is_not_deleted(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    store = server.app.state.store
    store.adapters.publish("tone", 1, "v1", "/d1", "ftjob-1")
    asked: list[str] = []

    def running(job_id: str) -> SimpleNamespace:
        asked.append(job_id)
        return SimpleNamespace(id=job_id, finished_at=None)

    monkeypatch.setattr(store.jobs, "get", running)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=2) as client,
        pytest.raises(openai.ConflictError) as caught,
    ):
        client.models.delete("tone")
    assert caught.value.code == "job_state_conflict"
    assert asked == ["ftjob-1"]  # the SDK did not try again


def test_metrics(serve: Callable[..., Any]) -> None:
    server = serve(metrics_prefix="vllm:")
    server.script("hello")
    assert server.http.post(CHAT, json=BODY).status_code == 200
    text = server.http.get("/metrics").text
    labels = '{engine="0",model_name="base"}'
    for line in (
        f"vllm:time_to_first_token_seconds_count{labels} 1.0",
        f"vllm:e2e_request_latency_seconds_count{labels} 1.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="base"} 1.0',
        f"vllm:prompt_tokens_total{labels} 7.0",
        f"vllm:kv_cache_usage_perc{labels} 0.5",
        f"vllm:train_loss{labels} 1.5",
        'vllm:train_job_device_seconds{engine="0",job_id="ftjob-1",model_name="base"} 2.5',
        'vllm:memory_bytes{engine="0",model_name="base",owner="weights"} 100.0',
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1.0',
    ):
        assert line in text, line
