"""The commands against a fake OpenAI-compatible server over real HTTP, and their exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import fineinfer
from fineinfer.cli import chat as chat_command
from fineinfer.cli import main
from fineinfer.cli.client import CliError, base_url
from fineinfer.cli.demo_display import sparkline
from fineinfer.cli.demo_run import HeldOut
from fineinfer.cli.serve import find_preset
from fineinfer.config import SETTINGS, Config, ConfigError

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
    "training_file": "file-1",
    "validation_file": None,
    "progress": {"step": 3, "total_steps": 9, "loss": 1.25},
}
FILE = {"id": "file-1", "object": "file", "bytes": 3, "created_at": 1_700_000_000, "filename": "a.jsonl",
        "purpose": "fine-tune", "status": "processed"}  # fmt: skip


def event(number: int, message: str) -> dict[str, Any]:
    return {"id": f"ftevent-{number}", "object": "fine_tuning.job.event", "created_at": 1_700_000_000 + number,
            "level": "info", "message": message, "type": "message"}  # fmt: skip


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(items), "has_more": False}


class FakeServer:
    """Answers from a table; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "GET /v1/models": (200, listed(*({"id": name, "object": "model", "created": 1, "owned_by": "x"} | extra
                                             for name, extra in (("my-lora", {"parent": "base"}), ("base", {}))))),
            "GET /v1/models/my-lora": (200, {"id": "my-lora", "object": "model", "created": 1, "owned_by": "x"}),
            "POST /v1/files": (200, FILE),
            "GET /v1/files": (200, listed(FILE)),
            "GET /v1/files/file-1": (200, FILE),
            "DELETE /v1/files/file-1": (200, {"id": "file-1", "object": "file", "deleted": True}),
            "POST /v1/fine_tuning/jobs": (200, JOB),
            "GET /v1/fine_tuning/jobs": (200, listed(JOB)),
            "GET /v1/fine_tuning/jobs/ftjob-1": (200, JOB),
            "POST /v1/fine_tuning/jobs/ftjob-1/cancel": (200, JOB | {"status": "cancelled"}),
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
                path = self.path.split("?")[0]
                is_json = "json" in (self.headers.get("content-type") or "")
                server.requests.append((f"{self.command} {path}", json.loads(body) if is_json and body else body))
                if path == "/v1/chat/completions" and server.chat_status == 200:
                    return self._stream(server.requests[-1][1])
                missing = (404, {"error": {"message": f"no {path}", "type": "invalid_request_error", "code": "x"}})
                if path == "/v1/chat/completions":
                    missing = (server.chat_status, {"error": {"message": "engine is\nrestarting"}})
                self._send(*server.answers.get(f"{self.command} {path}", missing))

            def _send(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("x-should-retry", "false")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

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


# ---------------------------------------------------------------- the tree


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fineinfer {fineinfer.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "serve"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--port", "x"], "--port: expected a whole number"),
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "--config", "no-such-preset"], "embedded-cpu"),
        (["ft", "create"], "FILE"),
        (["ft", "create", "x.jsonl", "--epochs", "0"], "--epochs: must be at least 1"),
        (["ft", "get"], "JOB_ID"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(f"FINEINFER_{setting.upper()}", raising=False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("fineinfer: error: ") and error.count("\n") == 1 and words in error


def test_help_is_quick() -> None:
    def seconds() -> float:
        start_s = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "fineinfer.cli", "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "serve" in done.stdout
        return time.monotonic() - start_s

    def bare_s() -> float:
        start_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import typer"], check=True)
        return time.monotonic() - start_s

    # In units of the time that typer alone needs, so that a busy machine does not decide; alone it is 0.3 s.
    assert min(seconds() for _ in range(3)) < 6 * min(bare_s() for _ in range(3))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, fineinfer.cli\n"
        "fineinfer.cli.main(['serve', '--help'])\n"
        "heavy = {'torch', 'transformers', 'openai', 'fastapi', 'zmq', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for setting in SETTINGS.values():
        assert setting.flag in done.stdout or setting.name == "model"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "first_model", interrupted)
    assert main(["chat", "-q", "hi"]) == 130


def test_serve_hands_over_the_resolved_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    class Supervisor:
        @staticmethod
        def run(config: Config) -> int:
            seen.append(config)
            return 3

    monkeypatch.setitem(sys.modules, "fineinfer.server.supervisor", Supervisor)
    monkeypatch.setenv("FINEINFER_MAX_LORAS", "2")
    arguments = ["serve", "some/model", "--config", "embedded-cpu", "--port", "9", "--state-dir", str(tmp_path)]
    assert main([*arguments, "--api-key", "a", "--api-key", "b", "--lora-target-modules", "q_proj,o_proj"]) == 3
    config = seen[0]
    assert config.model.model == "some/model" and config.server.port == 9 and config.server.state_dir == tmp_path
    assert config.server.api_key == ("a", "b") and config.train.lora_target_modules == ("q_proj", "o_proj")
    assert config.model.dtype == "float32" and config.memory.max_loras == 4  # the preset, above the environment


def test_presets_are_found_by_name(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("port: 1\n")
    assert find_preset(str(own)) == own
    assert find_preset("llama-8b-h100").is_file()
    with pytest.raises(ConfigError, match="llama-8b-h100"):
        find_preset("llama")


# ---------------------------------------------------------------- addresses and errors


def test_server_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FINEINFER_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert base_url(None) == "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://b/v1/")
    assert base_url(None) == "http://b/v1"
    monkeypatch.setenv("FINEINFER_URL", "http://a:1")
    assert base_url(None) == "http://a:1/v1"
    assert base_url("https://c/openai/v1") == "https://c/openai/v1"
    with pytest.raises(CliError, match="not a server address"):
        base_url("127.0.0.1:8000")


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["files", "list", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "cannot reach http://127.0.0.1:1" in error and error.count("\n") == 1


def test_server_errors_are_shown_in_its_words(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ft", "get", "ftjob-9"]) == 1
    assert capsys.readouterr().err == "fineinfer: error: no /v1/fine_tuning/jobs/ftjob-9 (HTTP 404)\n"


# ---------------------------------------------------------------- files and jobs


def test_files(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"é": 1}\n'.encode())
    assert main(["files", "upload", str(path)]) == 0
    assert main(["files", "list"]) == 0
    assert main(["files", "get", "file-1", "--json"]) == 0
    assert main(["files", "delete", "file-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "file-1" and lines[2].startswith("file-1\ta.jsonl\t3\tfine-tune")
    assert json.loads("\n".join(lines[3:-1])) == FILE and lines[-1] == "file-1 deleted"
    (uploaded,) = server.bodies("POST /v1/files")
    assert path.read_bytes() in uploaded and b"fine-tune" in uploaded
    assert main(["files", "upload", str(tmp_path / "none")]) == 1


def test_create_uploads_a_local_file(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    flags = ["--epochs", "2", "--learning-rate", "1e-3", "--lora-r", "128", "--suffix", "mine", "--seed", "7"]
    assert main(["ft", "create", str(path), *flags]) == 0
    assert capsys.readouterr().out == "ftjob-1\n"
    assert server.bodies("POST /v1/fine_tuning/jobs") == [
        {
            "model": "base",
            "training_file": "file-1",
            "suffix": "mine",
            "seed": 7,
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate": 1e-3, "lora": {"r": 128}}},
            },
        }
    ]


def test_create_from_an_uploaded_file(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fine-tuning", "create", "file-1", "--model", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "ftjob-1"
    assert server.bodies("POST /v1/files") == []
    assert server.bodies("POST /v1/fine_tuning/jobs") == [{"model": "other", "training_file": "file-1"}]


def test_job_views(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "get ftjob-1", "checkpoints ftjob-1", "cancel ftjob-1"):
        assert main(["ft", *command.split()]) == 0
    out = capsys.readouterr().out
    assert "ftjob-1\trunning\t3/9" in out and "1.2500" in out and "my-lora@3" in out
    assert out.endswith("ftjob-1 cancelled\n")
    for command in ("list", "get ftjob-1", "checkpoints ftjob-1", "cancel ftjob-1"):
        assert main(["ft", *command.split(), "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_events_follow_to_the_end(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def finish() -> None:
        server.answers["GET /v1/fine_tuning/jobs/ftjob-1/events"] = (
            200,
            listed(event(3, "done"), event(2, "later"), event(1, "earlier")),
        )
        server.answers["GET /v1/fine_tuning/jobs/ftjob-1"] = (200, JOB | {"status": "succeeded"})

    timer = threading.Timer(0.3, finish)
    timer.start()
    assert main(["ft", "events", "ftjob-1", "-f"]) == 0
    timer.join()
    messages = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert messages == ["earlier", "later", "done"]


def test_events_of_a_failed_job_exit_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"status": "failed", "error": {"code": "invalid_training_file", "message": "line 3: bad", "param": None}}
    server.answers["GET /v1/fine_tuning/jobs/ftjob-1"] = (200, JOB | failed)
    assert main(["ft", "events", "ftjob-1", "--follow", "--json"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["message"] for line in captured.out.splitlines()] == ["earlier", "later"]
    assert captured.err == "fineinfer: error: ftjob-1 failed: line 3: bad\n"


# ---------------------------------------------------------------- chat


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *flags])


def test_quick_chat(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--system-prompt", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--stats"]
    assert main(["chat", "-q", "Hé 🙂?", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "base says “Hé 🙂?” 🙂\n"
    assert "TTFT" in captured.err and "5 tokens" in captured.err
    (body,) = server.bodies("POST /v1/chat/completions")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 🙂?"}]
    assert body["temperature"] == 0 and body["max_tokens"] == 9 and body["stream"] is True


def test_conversation_keeps_its_history(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "one", "two", "/retry", "/clear", "three", "/bye", "never sent") == 0
    sent = [[item["content"] for item in body["messages"]] for body in server.bodies("POST /v1/chat/completions")]
    answer = "base says “one” 🙂"
    assert sent == [["one"], ["one", answer, "two"], ["one", answer, "two"], ["three"]]


def test_chat_settings(server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/models",
        "/model my-lora",
        "/system Rhyme.",
        "/set temperature 0.5",
        "/set max_tokens=4",
        "/stats",
        "/help",
    ]
    assert talk(monkeypatch, *lines, "hi") == 0
    (body,) = server.bodies("POST /v1/chat/completions")
    assert body["model"] == "my-lora" and body["temperature"] == 0.5 and body["max_tokens"] == 4
    assert body["messages"][0] == {"role": "system", "content": "Rhyme."}
    out = capsys.readouterr().out
    assert "* base" in out and "/retry" in out and "model: my-lora" in out


def test_ab_asks_both_and_changes_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "hi", "/ab base my-lora", "/ab base my-lora what now", "next") == 0
    bodies = server.bodies("POST /v1/chat/completions")
    assert [body["model"] for body in bodies] == ["base", "base", "my-lora", "base", "my-lora", "base"]
    assert [body["messages"][-1]["content"] for body in bodies] == ["hi", "hi", "hi", "what now", "what now", "next"]
    assert len(bodies[-1]["messages"]) == 3
    assert "my-lora says “hi”" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["/nope", "/set colour red", "/set temperature hot", "/retry", "/ab base", "/ab a b"])
def test_bad_chat_commands_end_a_script(
    line: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, line) == 1
    assert capsys.readouterr().err.startswith("fineinfer: error: ")


def test_a_failed_message_can_be_retried(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # a person at a terminal: errors are shown and the session goes on
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    typed = iter(["hi", "/retry", KeyboardInterrupt(), "/bye"])

    def read(prompt: str) -> str:
        line = next(typed)
        server.chat_status = 503 if line == "hi" else 200
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert "engine is restarting (HTTP 503)" in captured.err
    assert "base says “hi” 🙂" in captured.out


# ---------------------------------------------------------------- parts of the demo


def test_expected_text_is_found_whatever_its_case_and_spacing() -> None:
    item = HeldOut("Where?", "Harbour  Street 9")
    assert item.is_answered_by("It is at harbour street\n9, I think.")
    assert not item.is_answered_by("It is at Harbour Street.")


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float(value) for value in range(8, 0, -1)]) == "█▇▆▅▄▃▂▁"
    assert len(sparkline([1.0 / (value + 1) for value in range(1000)], width=30)) == 30
