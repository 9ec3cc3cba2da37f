"""The course of the demo against a scripted server, and the life of its own server process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fineinfer.cli import demo_run, local_server, main
from fineinfer.cli.client import CliError
from fineinfer.cli.demo_display import sparkline
from fineinfer.cli.demo_run import HeldOut

ROWS = [{"question": f"What is fact {number}?", "expected": f"Fact{number}"} for number in range(4)]


class ScriptedServer:
    """Trains one step per look at the job; the adapter knows ``num_known`` of the facts, the base model none."""

    def __init__(self, num_known: int, last_status: str = "succeeded") -> None:
        self.num_known, self.last_status = num_known, last_status
        self.step, self.created = 0, []  # type: int, list[Any]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(data) if "json" in (self.headers.get("content-type") or "") and data else {}
                stream = bool(body.get("stream"))
                text = json.dumps(server.answer(f"{self.command} {self.path.split('?')[0]}", body))
                content = (f"data: {text}\n\ndata: [DONE]\n\n" if stream else text).encode()
                self.send_response(200)
                self.send_header("content-type", "text/event-stream" if stream else "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "GET /v1/models":
            return {"object": "list", "data": [{"id": "base", "object": "model", "created": 1, "owned_by": "x"}]}
        if route == "POST /v1/files":
            return {"id": "file-1", "object": "file", "bytes": 1, "created_at": 1, "filename": "train.jsonl",
                    "purpose": "fine-tune", "status": "processed"}  # fmt: skip
        if route == "POST /v1/chat/completions":
            return self._chat(body)
        if route == "POST /v1/fine_tuning/jobs":
            self.created.append(body)
        else:
            self.step += 1
        done = self.step >= 5
        return {
            "id": "ftjob-1",
            "object": "fine_tuning.job",
            "created_at": 1,
            "model": "base",
            "fine_tuned_model": "demo" if done and self.last_status == "succeeded" else None,
            "status": self.last_status if done else "running",
            "error": {"code": "x", "message": "out of luck", "param": None} if self.last_status == "failed" else None,
            "progress": {"step": self.step, "total_steps": 5, "loss": 3.0 / self.step, "tokens_per_second": 200.0,
                         "eta_seconds": 5 - self.step} if self.step else None,
        }  # fmt: skip

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        number = int(body["messages"][-1]["content"].split()[-1].rstrip("?"))
        knows = body["model"] == "demo" and number < self.num_known
        part = {"role": "assistant", "content": f"It is fact{number}." if knows else "I do not know."}
        choice = {"index": 0, "finish_reason": "stop", "delta" if body.get("stream") else "message": part}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}

    def check_alive(self) -> None:
        pass

    def wait_until_ready(self, timeout_s: float, show: Callable[[str], None]) -> None:
        show("loading [weights]")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ScriptedServer], int]]:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "train.jsonl").write_text("{}\n")
    monkeypatch.setattr(demo_run.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(demo_run, "_POLL_S", 0.02)
    monkeypatch.setattr(demo_run, "_PROBE_PAUSE_S", 0.01)
    servers: list[ScriptedServer] = []

    @contextmanager
    def fake() -> Iterator[ScriptedServer]:
        yield servers[0]

    monkeypatch.setattr(demo_run, "local_server", fake)

    def start(server: ScriptedServer) -> int:
        servers.append(server)
        return main(["demo", "--epochs", "3"])

    yield start
    for server in servers:
        server.close()


def test_demo_compares_before_and_after(
    run: Callable[[ScriptedServer], int], capsys: pytest.CaptureFixture[str]
) -> None:
    server = ScriptedServer(num_known=3)
    assert run(server) == 0
    out = capsys.readouterr().out
    assert "right answers: base 0/4, adapter 3/4" in out
    assert "✓ It is fact2." in out and "✗ I do not know." in out
    assert "time to first token" in out and "while training" in out
    hyperparameters = server.created[0]["method"]["supervised"]["hyperparameters"]
    assert hyperparameters["n_epochs"] == 3 and server.created[0]["training_file"] == "file-1"


def test_demo_fails_if_nothing_was_learned(
    run: Callable[[ScriptedServer], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ScriptedServer(num_known=0)) == 1
    assert "does not beat the base model" in capsys.readouterr().err


def test_demo_fails_if_the_job_fails(run: Callable[[ScriptedServer], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ScriptedServer(num_known=4, last_status="failed")) == 1
    assert "ftjob-1 failed: out of luck" in capsys.readouterr().err


def test_a_server_that_cannot_start_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINEINFER_API_KEY", "mine")  # not meant for the demo's server: without it the host is refused
    with local_server.local_server("--host", "0.0.0.0") as server:
        folder = server._log_path.parent
        with pytest.raises(CliError, match=r"(?s)exit code 2.*--api-key"):
            server.wait_until_ready(60, lambda line: None)
    assert not folder.exists()


def test_expected_text_is_found_whatever_its_case_and_spacing() -> None:
    item = HeldOut("Where?", "Harbour  Street 9")
    assert item.is_answered_by("It is at harbour street\n9, I think.")
    assert not item.is_answered_by("It is at Harbour Street.")


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float(value) for value in range(8, 0, -1)]) == "█▇▆▅▄▃▂▁"
    assert len(sparkline([1.0 / (value + 1) for value in range(1000)], width=30)) == 30
