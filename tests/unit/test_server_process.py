"""The api worker as a process: inherited socket, SIGTERM, and never outliving its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ..waiting import LIMIT_S, until

ORPHAN = """
import subprocess, sys, time
child = (
    "import os, time; from fineinfer.parent_death import die_with_parent;"
    "die_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)"
)
subprocess.run([sys.executable, "-c", child])
"""


@pytest.fixture
def worker(tmp_path: Path, tiny_tokenizer: Any, fake_engine: Any) -> Iterator[Any]:
    from fineinfer.server.api_process import ApiSettings

    tiny_tokenizer.save_pretrained(tmp_path / "model")
    listener = socket.create_server(("127.0.0.1", 0))
    settings = ApiSettings(
        engine_address=fake_engine.addresses[0],
        control_address=fake_engine.addresses[1],
        state_dir=str(tmp_path / "state"),
        served_model_name="base",
        model=str(tmp_path / "model"),
        socket_fd=listener.fileno(),
        shutdown_timeout_s=1.0,
    )
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    environment = {**os.environ, "FINEINFER_IPC_TOKEN": (b"t" * 32).hex(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fineinfer.server.api_process", str(path)]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),), env=environment)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    until(lambda: httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200)
    yield process, url
    listener.close()
    process.kill()
    process.wait()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sigterm_drains_and_exits_0(worker: Any, fake_engine: Any) -> None:
    process, url = worker
    endless = [5] * 250
    fake_engine.tick_s, fake_engine.script = 0.05, lambda request: endless
    body = {"model": "base", "prompt": "a", "max_tokens": 250, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "error" in rest[-2] and rest[-1] == "data: [DONE]"
    assert process.wait(LIMIT_S) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.kill()
        until(lambda: not _alive(pid))


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    settings = {name: "x" for name in ("engine_address", "control_address", "served_model_name")}
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode({**settings, "state_dir": str(tmp_path), "model": str(tmp_path / "nope")}))
    command = [sys.executable, "-m", "fineinfer.server.api_process", str(path)]
    environment = {**os.environ, "FINEINFER_IPC_TOKEN": "00"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line][-1].startswith("error: ")
    assert "Traceback" not in done.stderr
