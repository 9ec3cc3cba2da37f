"""The commands against a fake OpenAI-compatible server over real HTTP, and their exit codes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fineinfer
from fineinfer.cli import chat as chat_command
from fineinfer.cli import ft_watch, main
from fineinfer.cli.client import CliError, base_url
from fineinfer.cli.serve import find_preset
from fineinfer.config import SETTINGS, Config, ConfigError

from .fake_api import FILE, JOB, FakeServer, event, server, streamed

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


def test_a_files_content_goes_to_standard_output_or_a_file(
    server: FakeServer, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["files", "content", "file-1"]) == 0
    assert capfdbinary.readouterr().out == b"abc"
    path = tmp_path / "out.csv"
    path.write_text("older")
    assert main(["files", "content", "file-1", "-o", str(path)]) == 0
    assert path.read_bytes() == b"abc"
    server.answers["GET /v1/files/file-1/content"] = (200, b"ab")  # cut short: 3 bytes were promised
    assert main(["files", "content", "file-1", "-o", str(path)]) == 1
    assert main(["files", "content", "file-2", "-o", str(path)]) == 1
    assert path.read_bytes() == b"abc" and [item.name for item in tmp_path.iterdir()] == ["out.csv"]
    errors = capfdbinary.readouterr().err.decode().splitlines()
    assert "2 bytes came, expected 3" in errors[0] and "(HTTP 404)" in errors[1] and len(errors) == 2
    assert main(["files", "content", "file-1", "-o", str(tmp_path / "none" / "x")]) == 1


def test_transfers_show_a_bar_on_a_terminal_only(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 300_000)
    arguments = ["files", "content", "file-1", "-o", str(tmp_path / "out")]
    assert main(["files", "upload", str(path)]) == 0 and main(arguments) == 0
    assert capsys.readouterr() == ("file-1\n", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert main(["files", "upload", str(path)]) == 0 and main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out == "file-1\n" and "a.jsonl" in shown.err and "300.0/300.0 kB" in shown.err
    assert "content" in shown.err and "3/3 bytes" in shown.err


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


def test_every_field_of_the_request_can_be_given(server: FakeServer, tmp_path: Path) -> None:
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text(f'{{"in": "{name}"}}\n')
    flags = "--priority high --max-gpu-share 0.5 --from-checkpoint a@3 --serve-while-training off --publish if_better"
    flags += " --eval-steps 5 --early-stopping-patience 2 --load-best-model-at-end --min-lr-ratio 0 --lora-dropout 0.1"
    flags += " --metadata team=a --metadata note=b=c --validation-split 0.1"
    extra = ["--extra-body", '{"integrations": [{"type": "wandb"}], "priority": -3}']
    files = [str(tmp_path / "train.jsonl"), "--validation-file", str(tmp_path / "eval.jsonl")]
    assert main(["ft", "create", *files, *flags.split(), *extra]) == 0
    assert server.bodies("POST /v1/fine_tuning/jobs") == [
        {
            "model": "base",
            "training_file": "file-1",
            "validation_file": "file-1",
            "metadata": {"team": "a", "note": "b=c"},
            "priority": -3,
            "max_gpu_share": 0.5,
            "integrations": [{"type": "wandb"}],
            "method": {
                "type": "supervised",
                "supervised": {
                    "hyperparameters": {
                        "eval_steps": 5,
                        "early_stopping": {"patience": 2},
                        "load_best_model_at_end": True,
                        "from_checkpoint": "a@3",
                        "serve_while_training": "off",
                        "publish": "if_better",
                        "min_lr_ratio": 0.0,
                        "validation_split": 0.1,
                        "lora": {"dropout": 0.1},
                    }
                },
            },
        }
    ]
    first, second = server.bodies("POST /v1/files")
    assert b"train.jsonl" in first and b"eval.jsonl" in second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metadata", "team"], "--metadata: expected KEY=VALUE"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--extra-body", "[1]"], "--extra-body: expected a JSON object"),
        (["--validation-split", "0.7"], "--validation-split: must be"),
        (["--publish", "never"], "--publish: expected one of"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(
    arguments: list[str], words: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ft", "create", "file-1", *arguments]) == 2
    assert words in capsys.readouterr().err and server.requests == []


def test_create_from_an_uploaded_file(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fine-tuning", "create", "file-1", "--model", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "ftjob-1"
    assert server.bodies("POST /v1/files") == []
    assert server.bodies("POST /v1/fine_tuning/jobs") == [{"model": "other", "training_file": "file-1"}]


def test_job_views(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    commands = ("list", "get ftjob-1", "checkpoints ftjob-1", "pause ftjob-1", "resume ftjob-1", "cancel ftjob-1")
    for command in commands:
        assert main(["ft", *command.split()]) == 0
    out = capsys.readouterr().out
    assert "ftjob-1\trunning\t3/9" in out and "1.2500" in out and "my-lora@3" in out
    assert "device seconds    3.5\n" in out
    assert out.endswith("ftjob-1 pausing\nftjob-1 queued\nftjob-1 cancelled\n")
    for command in (*commands, "metrics ftjob-1"):
        assert main(["ft", *command.split(), "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_events_are_oldest_first(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ft", "events", "ftjob-1"]) == 0
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == ["earlier", "later"]


def test_events_follow_to_the_end_over_a_broken_connection(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ft_watch, "_PAUSE_S", 0.0)
    server.streams = [
        (200, streamed(event(1, "earlier"), event(2, "later"), whole=False)),
        (200, streamed(event(3, "done"))),
    ]
    server.answers["GET /v1/fine_tuning/jobs/ftjob-1"] = (200, JOB | {"status": "succeeded"})
    assert main(["ft", "events", "ftjob-1", "-f"]) == 0
    messages = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert messages == ["earlier", "later", "done"]
    assert "after" not in server.queries[0] and "after=ftevent-2" in server.queries[1]


def test_events_of_a_failed_job_exit_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"status": "failed", "error": {"code": "invalid_training_file", "message": "line 3: bad", "param": None}}
    server.answers["GET /v1/fine_tuning/jobs/ftjob-1"] = (200, JOB | failed)
    server.streams = [(200, streamed(event(1, "earlier"), event(2, "later")))]
    assert main(["ft", "events", "ftjob-1", "--follow", "--json"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["message"] for line in captured.out.splitlines()] == ["earlier", "later"]
    assert captured.err == "fineinfer: error: ftjob-1 failed: line 3: bad\n"


def test_a_terminal_shows_a_bar_and_no_metrics_lines(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what rich asks for
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    state = {"step": 8, "total_steps": 9, "train_loss": 1.25, "tokens_per_second": 7.0, "eta_seconds": 3671}
    step = event(3, "Step 8/9: training loss=1.25") | {"type": "metrics", "data": state}
    judged = event(4, "Evaluation [red]") | {"data": {"valid_loss": 1.5}}
    last = event(5, "Step 9/9") | {"type": "metrics", "data": state | {"step": 9}}
    server.streams = [(200, streamed(step, judged, last))]
    server.answers["GET /v1/fine_tuning/jobs/ftjob-1"] = (200, JOB | {"status": "succeeded"})
    assert main(["ft", "events", "ftjob-1", "-f"]) == 0
    shown = capsys.readouterr().out
    assert "Evaluation [red]" in shown and "training loss" not in shown
    assert "9/9" in shown and "loss 1.2500 · eval 1.5000 · 7 tok/s · 1:01:11 left" in shown


def test_metrics_are_a_chart_a_table_or_csv(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ft", "metrics", "ftjob-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train_loss  █▃▁  2.0000 to 1.2500, lowest 1.2500"
    assert lines[1] == "valid_loss  ▁  1.7500 to 1.7500, lowest 1.7500"
    assert lines[2:] == [
        "step\ttrain_loss\tvalid_loss\tlearning_rate", "1\t2\t\t0.0001", "2\t1.5\t\t0.0002", "3\t1.25\t1.75\t0.0001"
    ]  # fmt: skip
    assert main(["ft", "metrics", "ftjob-1", "--csv", "--max-points", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step,train_loss,valid_loss,learning_rate,grad_norm" and lines[3] == "3,1.25,1.75,0.0001,"
    assert main(["ft", "metrics", "ftjob-1", "--csv"]) == 0
    assert server.queries == ["max_points=1000", "max_points=2", "max_points=100000"]
    server.answers["GET /v1/fine_tuning/jobs/ftjob-1/metrics"] = (200, {"columns": {"step": [], "train_loss": []}})
    assert main(["ft", "metrics", "ftjob-1"]) == 0


# ---------------------------------------------------------------- adapters


ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 700_000, "chat_template.jinja": b"t"}


def serve_adapter(server: FakeServer, files: dict[str, bytes] = ADAPTER, model: str = "my-lora@3") -> None:
    digest = hashlib.sha256()
    for name in ADAPTER:
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    route = "GET /v1/fine_tuning/jobs/ftjob-1/adapter"
    listing = [{"name": name, "bytes": len(content)} for name, content in files.items()][::-1]
    facts = {"model": model, "step_number": 3, "adapter_version": digest.hexdigest(), "files": listing}
    server.answers[route] = (200, facts)
    server.answers |= {f"{route}/{name}": (200, content) for name, content in files.items()}


def test_download_makes_a_verified_folder(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    serve_adapter(server)
    assert main(["ft", "download", "ftjob-1"]) == 0
    assert capsys.readouterr().out == "my-lora@3\n"
    folder = tmp_path / "my-lora@3"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ADAPTER
    assert main(["ft", "download", "ftjob-1"]) == 1  # the folder is not empty
    assert capsys.readouterr().err == "fineinfer: error: my-lora@3 exists already\n"
    (tmp_path / "deep" / "empty").mkdir(parents=True)
    assert main(["ft", "download", "ftjob-1", "-o", "deep/empty", "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directory"] == "deep/empty"


def test_a_download_that_is_not_right_leaves_nothing(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    serve_adapter(server)
    weights = "GET /v1/fine_tuning/jobs/ftjob-1/adapter/adapter_model.safetensors"
    cases: list[tuple[tuple[int, Any], str]] = [
        ((200, b"v" + b"w" * 699_999), "what came has the hash"),
        ((200, b"w"), "1 bytes came, expected 700000"),
        ((404, {"error": {"message": "gone"}}), "gone (HTTP 404)"),
    ]
    for answer, words in cases:
        server.answers[weights] = answer
        assert main(["ft", "download", "ftjob-1", "-o", str(target)]) == 1
        assert words in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    serve_adapter(server, ADAPTER | {"../evil": b"x"})
    assert main(["ft", "download", "ftjob-1", "-o", str(target)]) == 1
    assert "'../evil'" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert main(["ft", "download", "ftjob-2", "-o", str(target)]) == 1
