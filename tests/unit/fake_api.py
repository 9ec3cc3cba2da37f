"""A fake OpenAI-compatible server for the commands: answers from a table over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

JOB = {
    "id": "ftjob-1",
    "object": "fine_tuning.job",
    "created_at": 1_700_000_000,
    "finished_at": None,
    "model": "base",
    "fine_tuned_model": None,
    "status": "running",
    "error": None,
    "hyperparameters": {"n_epochs": 3},
    "organization_id": "",
    "result_files": [],
    "seed": 1,
    "trained_tokens": 12,
    "device_seconds": 3.5,
    "training_file": "file-1",
    "validation_file": None,
    "progress": {"step": 3, "total_steps": 9, "loss": 1.25},
}
METRICS = {
    "object": "fine_tuning.job.metrics",
    "columns": {
        "step": [1, 2, 3],
        "train_loss": [2.0, 1.5, 1.25],
        "valid_loss": [None, None, 1.75],
        "learning_rate": [1e-4, 2e-4, 1e-4],
        "grad_norm": [None, None, None],
    },
}
FILE = {"id": "file-1", "object": "file", "bytes": 3, "created_at": 1_700_000_000, "filename": "a.jsonl",
        "purpose": "fine-tune", "status": "processed"}  # fmt: skip


def event(number: int, message: str) -> dict[str, Any]:
    return {"id": f"ftevent-{number}", "object": "fine_tuning.job.event", "created_at": 1_700_000_000 + number,
            "level": "info", "message": message, "type": "message"}  # fmt: skip


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(items), "has_more": False}


def streamed(*items: dict[str, Any], whole: bool = True) -> bytes:
    """Events as a stream; one that is not whole breaks off."""
    parts = [f"id: {item['id']}\ndata: {json.dumps(item)}\n\n" for item in items]
    return "".join([*parts, "data: [DONE]\n\n" * whole]).encode()


class FakeServer:
    """Answers from a table; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.queries: list[str] = []
        self.streams: list[tuple[int, Any]] = []  # the next answers to `stream=true`
        self.answers: dict[str, tuple[int, Any]] = {
            "GET /v1/models": (200, listed(*({"id": name, "object": "model", "created": 1, "owned_by": "x"} | extra
                                             for name, extra in (("my-lora", {"parent": "base"}), ("base", {}))))),
            "GET /v1/models/my-lora": (200, {"id": "my-lora", "object": "model", "created": 1, "owned_by": "x"}),
            "POST /v1/files": (200, FILE),
            "GET /v1/files": (200, listed(FILE)),
            "GET /v1/files/file-1": (200, FILE),
            "GET /v1/files/file-1/content": (200, b"abc"),
            "DELETE /v1/files/file-1": (200, {"id": "file-1", "object": "file", "deleted": True}),
            "POST /v1/fine_tuning/jobs": (200, JOB),
            "GET /v1/fine_tuning/jobs": (200, listed(JOB)),
            "GET /v1/fine_tuning/jobs/ftjob-1": (200, JOB),
            "POST /v1/fine_tuning/jobs/ftjob-1/cancel": (200, JOB | {"status": "cancelled"}),
            "POST /v1/fine_tuning/jobs/ftjob-1/pause": (200, JOB | {"status": "pausing"}),
            "POST /v1/fine_tuning/jobs/ftjob-1/resume": (200, JOB | {"status": "queued"}),
            "GET /v1/fine_tuning/jobs/ftjob-1/metrics": (200, METRICS),
            "GET /v1/fine_tuning/jobs/ftjob-1/events": (200, listed(event(2, "later"), event(1, "earlier"))),
            "GET /v1/fine_tuning/jobs/ftjob-1/checkpoints": (200, listed({
                "id": "ftckpt-1", "object": "fine_tuning.job.checkpoint", "created_at": 1_700_000_000,
                "fine_tuned_model_checkpoint": "my-lora@3", "fine_tuning_job_id": "ftjob-1", "step_number": 3,
                "metrics": {"step": 3, "train_loss": 1.25}})),
        }  # fmt: skip
        self.chat_status = 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                path, _, query = self.path.partition("?")
                server.queries.append(query)
                is_json = "json" in (self.headers.get("content-type") or "")
                server.requests.append((f"{self.command} {path}", json.loads(body) if is_json and body else body))
                if path == "/v1/chat/completions" and server.chat_status == 200:
                    return self._stream(server.requests[-1][1])
                missing = (404, {"error": {"message": f"no {path}", "type": "invalid_request_error", "code": "x"}})
                if path == "/v1/chat/completions":
                    missing = (server.chat_status, {"error": {"message": "engine is\nrestarting"}})
                streams = server.streams if "stream=true" in query else []
                self._send(*(streams.pop(0) if streams else server.answers.get(f"{self.command} {path}", missing)))

            def _send(self, status: int, answer: Any) -> None:
                raw = isinstance(answer, bytes)
                data = answer if raw else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/octet-stream" if raw else "application/json")
                self.send_header("x-should-retry", "false")
                # a stream that does not end as one: more was promised than comes
                cut = raw and data.startswith(b"id: ") and b"[DONE]" not in data
                self.send_header("content-length", str(len(data) + cut))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = self.close_connection or cut

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
                question = body["messages"][-1]["content"]
                for piece in (f"{body['model']} says ", f"“{question}” 🙂"):
                    chunk = head | {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
                self.wfile.write(f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def bodies(self, route: str) -> list[Any]:
        return [body for where, body in self.requests if where == route]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeServer()
    monkeypatch.setenv("FINEINFER_URL", fake.url)
    yield fake
    fake.close()
