"""A fine-tuning job from the command line alone, against a real server: create, pause, resume, follow, fetch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import until
from .conftest import LiveServer, chat_rows, live_server

pytestmark = pytest.mark.e2e


class Cli:
    """``fineinfer …`` as a process, for one server."""

    def __init__(self, url: str) -> None:
        self._env = os.environ | {"FINEINFER_URL": url, "PYTHONSAFEPATH": "1"}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "fineinfer.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=self._env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr


def wait_for(server: LiveServer, job: str, *statuses: str) -> None:
    until(lambda: server.http.get(f"/v1/fine_tuning/jobs/{job}").json()["status"] in statuses)


def test_jobs_from_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(24)))
    with live_server(tmp_path / "state", str(tiny_model), "--dtype", "float32") as server:
        cli = Cli(server.url)
        endless = cli("ft", "create", str(data), "--epochs", "1000", "--batch-size", "1", "--suffix", "endless").strip()
        wait_for(server, endless, "running")
        assert cli("ft", "pause", endless).split()[1] in ("pausing", "paused")
        wait_for(server, endless, "paused")
        flags = "--suffix mine --epochs 5 --batch-size 4 --save-steps 12 --lora-r 4 --metadata team=a"
        job = cli("ft", "create", str(data), *flags.split()).strip()
        events = cli("ft", "events", job, "-f").splitlines()
        assert "Step 30/30" in " ".join(events) and "successfully completed" in events[-1]
        assert cli("ft", "resume", endless).split()[0] == endless
        assert cli("ft", "cancel", endless).split() == [endless, "cancelled"]
        shown = json.loads(cli("ft", "get", job, "--json"))
        assert shown["status"] == "succeeded" and shown["metadata"] == {"team": "a"} and shown["lora"]["r"] == 4
        metrics = cli("ft", "metrics", job, "--csv").splitlines()
        assert len(metrics) == 31 and metrics[0].startswith("step,") and metrics[-1].startswith("30,")
        versions = [line.split("\t")[:2] for line in cli("ft", "checkpoints", job).splitlines()[1:]]
        assert versions == [["30", "mine@30"], ["24", "mine@24"], ["12", "mine@12"]]
        folder = tmp_path / "adapter"
        assert cli("ft", "download", job, "--step", "24", "-o", str(folder)).strip() == str(folder)
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        assert cli("files", "content", shown["result_files"][0]).count("\n") == 31
        assert "already succeeded" in cli("ft", "cancel", job, code=1)
