"""The commands against a fake OpenAI-compatible server over real HTTP, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fineinfer
from fineinfer.cli import chat as chat_command
from fineinfer.cli import main
from fineinfer.cli.client import CliError, base_url
from fineinfer.cli.serve import find_preset
from fineinfer.config import SETTINGS, Config, ConfigError

from .fake_api import FILE, JOB, FakeServer, event, listed, server

__all__ = ["server"]  # a fixture


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
    assert "device seconds    3.5\n" in out
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
