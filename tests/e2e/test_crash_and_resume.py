"""kill -9 of the engine in mid-job: clients learn at once, the server recovers, the job ends as if undisturbed."""

from __future__ import annotations

import csv
import io
import threading
import time

import httpx
import openai
import pytest

from ..waiting import LIMIT_S, until
from .conftest import LiveServer, chat_rows, live_server

pytestmark = pytest.mark.e2e
SETTINGS = {"n_epochs": 3, "batch_size": 4, "save_steps": 5, "learning_rate": 1e-3}


def start_job(server: LiveServer, name: str) -> str:
    file_id = server.upload(chat_rows(64))
    body = {
        "model": server.base_model,
        "training_file": file_id,
        "suffix": name,
        "seed": 3,
        "method": {"type": "supervised", "supervised": {"hyperparameters": SETTINGS}},
    }
    response = server.http.post("/v1/fine_tuning/jobs", json=body)
    assert response.status_code == 200, response.text
    return response.json()["id"]


def loss_trace(server: LiveServer, job: dict) -> dict[int, float]:
    text = server.http.get(f"/v1/files/{job['result_files'][0]}/content").text
    return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(io.StringIO(text))}


def wait_step(server: LiveServer, job_id: str, step: int) -> None:
    def reached() -> bool:
        job = server.http.get(f"/v1/fine_tuning/jobs/{job_id}").json()
        assert job["status"] not in ("failed", "cancelled"), job
        return (job.get("progress") or {}).get("step", 0) >= step

    until(reached, f"the job never reached step {step}")


FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--deterministic")


@pytest.fixture(scope="module")
def want(tiny_model, tmp_path_factory) -> dict[int, float]:
    """The loss trace of the job undisturbed."""
    with live_server(tmp_path_factory.mktemp("quiet"), str(tiny_model), *FLAGS) as server:
        return loss_trace(server, server.wait_job(start_job(server, "probe")))


def test_killed_engine_comes_back_and_the_loss_trace_is_the_same(tiny_model, tmp_path, want, capsys):
    with live_server(tmp_path / "killed", str(tiny_model), *FLAGS) as server:
        job_id = start_job(server, "probe")
        outcomes: list[str] = []
        started = threading.Semaphore(0)

        def long_stream() -> None:
            try:
                stream = server.openai.completions.create(
                    model="tiny", prompt="hello", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in stream:
                    started.release()
                outcomes.append("complete")
            except (openai.APIError, httpx.HTTPError) as error:
                outcomes.append(type(error).__name__)

        wait_step(server, job_id, 8)
        clients = [threading.Thread(target=long_stream) for _ in range(4)]
        for client in clients:
            client.start()
        assert all(started.acquire(timeout=LIMIT_S) for _ in range(40)), "the streams never got going"
        killed = server.child("fineinfer.engine.process")
        killed_at = time.monotonic()
        killed.kill()
        for client in clients:
            client.join(LIMIT_S)
        told_after = time.monotonic() - killed_at
        assert not any(client.is_alive() for client in clients), "a client was never told"
        # mid-stream the error comes in-band, before the first token it is a 503
        assert len(outcomes) == 4 and set(outcomes) <= {"APIError", "InternalServerError"}
        server.wait_ready()
        back_after = time.monotonic() - killed_at
        assert server.child("fineinfer.engine.process").pid != killed.pid
        job = server.wait_job(job_id)
        assert job["status"] == "succeeded", job
        got = loss_trace(server, job)
        answer = server.openai.completions.create(model="probe", prompt="hello", max_tokens=4)
        assert answer.usage.completion_tokens >= 1
    with capsys.disabled():
        difference = max(abs(got[step] - want[step]) for step in want)
        print(
            f"\nkill -9: clients told after {told_after:.2f} s, ready after {back_after:.1f} s, loss trace of "
            f"{len(want)} steps differs by {difference}"
        )
    assert got == want


def test_ctrl_c_checkpoints_and_a_restart_goes_on(tiny_model, tmp_path, want):
    flags, state = (str(tiny_model), *FLAGS), tmp_path / "state"
    with live_server(state, *flags) as server:
        job_id = start_job(server, "probe")
        wait_step(server, job_id, 7)
        assert server.stop() == 0
    with live_server(state, *flags) as server:
        job = server.wait_job(job_id)
        assert job["status"] == "succeeded"
        steps = loss_trace(server, job)
        assert sorted(steps) == list(range(1, 49))
    assert steps == want
