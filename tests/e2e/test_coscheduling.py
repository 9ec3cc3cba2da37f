"""On the live server: requests start in time beside training, tokens do not change, memory moves and comes back."""

from __future__ import annotations

import statistics
import threading
import time

import pytest

from .conftest import LiveServer, chat_rows, live_server
from .test_crash_and_resume import loss_trace, wait_step

pytestmark = pytest.mark.e2e
alone = pytest.mark.alone


def start_training(server: LiveServer, epochs: int = 50, suffix: str = "busy", **settings) -> str:
    body = {
        "model": server.base_model,
        "training_file": server.upload(chat_rows(64)),
        "suffix": suffix,
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 16, **settings}},
        },
    }
    response = server.http.post("/v1/fine_tuning/jobs", json=body)
    assert response.status_code == 200, response.text
    job_id = response.json()["id"]
    wait_step(server, job_id, 2)
    return job_id


def waits(server: LiveServer, count: int) -> list[float]:
    """Seconds each request waited in the engine until its first slice, one request at a time."""
    before_sum, before_count = (
        server.metric("request_queue_time_seconds_sum"),
        server.metric("request_queue_time_seconds_count"),
    )
    collected = []
    for _ in range(count):
        server.http.post("/v1/completions", json={"model": server.base_model, "prompt": "hi", "max_tokens": 2})
        total, number = (
            server.metric("request_queue_time_seconds_sum"),
            server.metric("request_queue_time_seconds_count"),
        )
        assert number == before_count + 1
        collected.append(total - before_sum)
        before_sum, before_count = total, number
        time.sleep(0.37)
    return collected


def longest_mean_slice(server: LiveServer) -> float:
    """Seconds of the slowest kind of training unit, on average."""
    lines = server.http.get("/metrics").text.splitlines()
    kinds = ("forward", "backward", "recompute", "head", "optimizer", "embed")
    return max(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("fineinfer:slice_time_seconds") and any(f'kind="{kind}"' in line for kind in kinds)
    )


@pytest.fixture(scope="module")
def inference_first(tiny_model, tmp_path_factory):
    """Of a server that trains when no request is there: (waits, mean slice, tokens trained in 4 s of constant load)."""
    flags = ("--policy", "inference-first", "--served-model-name", "tiny")
    with live_server(tmp_path_factory.mktemp("inference-first"), str(tiny_model), *flags) as server:
        start_training(server, epochs=1000, gradient_accumulation_steps=1, save_steps=100_000)
        return waits(server, 8), longest_mean_slice(server), trained_under_load(server, 4.0)


@alone
def test_a_request_in_mid_training_starts_after_a_slice(inference_first, capsys):
    measured, slice_s, _ = inference_first
    check_waits(measured, slice_s, "inference-first", 0.0, capsys)


@alone
def test_a_deferred_request_starts_within_the_bound(tiny_model, tmp_path, capsys):
    flags = ("--policy", "deferred", "--deferral-bound-s", "0.8", "--served-model-name", "tiny")
    with live_server(tmp_path, str(tiny_model), *flags) as server:
        start_training(server, gradient_accumulation_steps=1, save_steps=100_000)
        measured, slice_s = waits(server, 8), longest_mean_slice(server)
    check_waits(measured, slice_s, "deferred", 0.8, capsys)
    assert max(measured) > 0.1, "nothing was deferred, so the bound was not tested"


def check_waits(measured: list[float], slice_s: float, policy: str, bound_s: float, capsys) -> None:
    # one slice is in flight when a request comes; a busy machine may hold one up for several times its mean
    limit = bound_s + 0.05 + 4 * slice_s
    with capsys.disabled():
        print(
            f"\n{policy} bound {bound_s} s: waited {statistics.median(measured):.3f} s median, "
            f"{max(measured):.3f} max, limit {limit:.3f}"
        )
    assert sorted(measured)[-2] <= limit, "the slowest may have met a hiccup of the machine"


def trained_under_load(server: LiveServer, seconds: float) -> float:
    """Tokens trained while three clients ask without a pause."""
    ask = {"model": server.base_model, "prompt": "The quick brown fox", "max_tokens": 60, "ignore_eos": True}
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            server.http.post("/v1/completions", json=ask)

    clients = [threading.Thread(target=traffic) for _ in range(3)]
    for client in clients:
        client.start()
    time.sleep(1.0)
    before = server.metric("train_tokens_total")
    time.sleep(seconds)
    trained = server.metric("train_tokens_total") - before
    stop.set()
    for client in clients:
        client.join()
    return trained


@alone
def test_slo_trains_under_constant_load(tiny_model, inference_first, tmp_path, capsys):
    trained = {"inference-first": inference_first[2]}
    with live_server(tmp_path, str(tiny_model), "--policy", "slo", "--served-model-name", "tiny") as server:
        start_training(server, epochs=1000, save_steps=100_000)
        trained["slo"] = trained_under_load(server, 4.0)
        told = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 60}).json()
        # what training can have cost a request is told to it, and counted
        assert 0 < told["training_ms"] < 60_000
        assert server.metric("request_training_time_seconds_sum") > 0
    with capsys.disabled():
        print(f"\ntokens trained in 4 s of constant load: {trained}")
    assert trained["slo"] > 3 * trained["inference-first"] and trained["slo"] > 0


def test_coserved_equals_alone(tiny_model, tmp_path):
    """Training beside requests gives the loss trace of training alone, and requests the tokens of a quiet engine."""
    flags = (str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32", "--deterministic")
    ask = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with live_server(tmp_path, *flags) as server:
        quiet_answer = server.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        alone = loss_trace(server, server.wait_job(start_training(server, epochs=3)))
        beside, answers = train_beside_requests(server, start_training(server, epochs=3, suffix="beside"), ask)
    assert beside == alone
    assert len(answers) > 1 and set(answers) == {quiet_answer}


def train_beside_requests(server: LiveServer, job_id: str, ask: dict[str, object]) -> tuple[object, list[str]]:
    """The loss trace of a job, and the answers that a client had meanwhile."""
    answers: list[str] = []
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            answers.append(server.http.post("/v1/completions", json=ask).json()["choices"][0]["text"])
            time.sleep(0.05)

    client = threading.Thread(target=traffic)
    client.start()
    try:
        return loss_trace(server, server.wait_job(job_id)), answers
    finally:
        stop.set()
        client.join()
