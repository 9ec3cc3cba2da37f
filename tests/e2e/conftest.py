"""A real `fineinfer serve` in a temporary state directory, and small clients for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

START_TIMEOUT_S = 180.0


class LiveServer:
    """One running server; `stop()` is a Ctrl-C that waits for the clean end."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, state_dir: Path, log: Path) -> None:
        self.process, self.port, self.state_dir, self.log = process, port, state_dir, log
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120.0)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", timeout=120.0, max_retries=0)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"not ready in {START_TIMEOUT_S} s: {self.log.read_text()[-2000:]}")

    @property
    def base_model(self) -> str:
        return self.http.get("/v1/models").json()["data"][0]["id"]

    def child(self, module: str) -> psutil.Process:
        """The child process that runs a module, such as ``fineinfer.engine.process``."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline():
                    return process
        raise RuntimeError(f"no child runs {module}")

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        total, found = 0.0, False
        for line in self.http.get("/metrics").text.splitlines():
            if line.split("{")[0].split(" ")[0] == f"fineinfer:{name}":
                total, found = total + float(line.rsplit(" ", 1)[1]), True
        if not found:
            raise KeyError(name)
        return total

    def wait_job(self, job_id: str, timeout_s: float = 400.0) -> dict:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                job = self.http.get(f"/v1/fine_tuning/jobs/{job_id}").json()
                if job["status"] in ("succeeded", "failed", "cancelled"):
                    return job
            time.sleep(0.1)
        raise TimeoutError(f"job {job_id}: {job}")

    def upload(self, rows: list[dict]) -> str:
        body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files = {"file": ("train.jsonl", body.encode())}
        return self.http.post("/v1/files", files=files, data={"purpose": "fine-tune"}).json()["id"]

    def stop(self, timeout_s: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)


def start_server(state_dir: Path, *flags: str, env: dict[str, str] | None = None) -> LiveServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir / "server.log"
    command = [
        sys.executable,
        "-m",
        "fineinfer.cli",
        "serve",
        "--port",
        str(port),
        "--state-dir",
        str(state_dir),
        *flags,
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **(env or {})}
        )
    return LiveServer(process, port, state_dir, log)


@contextlib.contextmanager
def live_server(state_dir: Path, *flags: str) -> Iterator[LiveServer]:
    server = start_server(state_dir, *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(40)
            except subprocess.TimeoutExpired:
                server.process.kill()
        server.http.close()


@pytest.fixture(scope="session")
def embedded_server(embedded_model, tmp_path_factory) -> Iterator[LiveServer]:
    """The embedded model in fp32, shared by the tests that do not harm it."""
    with live_server(tmp_path_factory.mktemp("embedded"), "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(embedded_model, tmp_path_factory) -> Path:
    """A random 4-layer Llama with the embedded model's tokenizer: starts and trains in a moment."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def chat_rows(count: int) -> list[dict]:
    """Small training rows with characters that broke older servers."""
    return [
        {
            "messages": [
                {"role": "user", "content": f'What is the code of locker {i}? 你好 😀 "quoted"'},
                {"role": "assistant", "content": f"The code of locker {i} is {i * 37 % 101}-{i * 11 % 89}."},
            ]
        }
        for i in range(count)
    ]
