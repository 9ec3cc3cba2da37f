"""Starts that cannot work end in one clear line; clients that leave or ask the impossible cost nobody anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import LIMIT_S, until
from .conftest import LiveServer, live_server

pytestmark = pytest.mark.e2e


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fineinfer.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode in (1, 2), result
    assert len(lines) == 1, result.stderr
    assert all(word in lines[0] for word in words), lines


def test_wrong_model_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = serve(str(tmp_path / "empty"), "--port", str(free_port()), "--state-dir", str(tmp_path / "s"))
    assert_one_line(result, "config.json", "empty")


def test_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    result = serve(str(tmp_path), "--port", str(free_port()), "--state-dir", str(tmp_path / "s"))
    assert_one_line(result, "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert_one_line(serve("--port", port, "--state-dir", str(tmp_path)), port)


def test_unknown_flag_and_config_key(tmp_path: Path) -> None:
    assert serve("--max-modle-len", "5").returncode == 2
    (tmp_path / "c.yaml").write_text("max-modle-len: 5\n")
    assert_one_line(serve("--config", str(tmp_path / "c.yaml")), "max-modle-len", "max-model-len")


def test_a_program_that_is_terminated_leaves_no_server_behind() -> None:
    code = "import time; from fineinfer.cli.local_server import local_server\n"
    code += "with local_server() as server: print(server._process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        os.killpg(pid, 0)
        program.terminate()
        assert program.wait(LIMIT_S) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_state_folder_serves_one_server(tiny_model, tmp_path: Path) -> None:
    with live_server(tmp_path, str(tiny_model)):
        assert_one_line(serve(str(tiny_model), "--port", str(free_port()), "--state-dir", str(tmp_path)), "in use")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def small_pool(tiny_model, tmp_path_factory) -> LiveServer:
    """A pool of 1,000 tokens (1 KiB each) for a model that could take 2,048."""
    flags = ("--kv-cache-memory-bytes", str(1000 * 1024), "--served-model-name", "tiny")
    with live_server(tmp_path_factory.mktemp("small"), str(tiny_model), *flags) as server:
        yield server


def wait_until_no_slot_is_used(server: LiveServer) -> None:
    """By statistics from now on, which come about once a second: the first that comes may be older."""
    for _ in range(2):
        seen = server.metric("engine_clock_seconds")
        until(lambda seen=seen: server.metric("engine_clock_seconds") != seen)
    until(lambda: server.metric("kv_slots_used") == 0, "slots leaked")


def test_what_can_never_fit_is_refused_and_blocks_nobody(small_pool) -> None:
    refused = small_pool.http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 1500, "max_tokens": 5})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    for _ in range(10):
        answer = small_pool.http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 10, "max_tokens": 3})
        assert answer.status_code == 200
    wait_until_no_slot_is_used(small_pool)


def test_clients_that_leave_free_their_slots(small_pool) -> None:
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(40):
        with small_pool.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(3):
                next(lines)
    wait_until_no_slot_is_used(small_pool)
    answer = small_pool.http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 10, "max_tokens": 3})
    assert answer.status_code == 200
