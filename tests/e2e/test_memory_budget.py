"""The memory budget of a running server, over HTTP and by command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import live_server

pytestmark = pytest.mark.e2e


def test_the_budget_changes_while_requests_are_served(tiny_model, tmp_path):
    flags = (str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32", "--max-num-seqs", "16")
    ask = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with live_server(tmp_path, *flags) as server:

        def answer() -> str:
            return server.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]

        want, before = answer(), server.http.get("/v1/memory").json()
        fixed = before["budget_bytes"] - before["free_bytes"] - before["leases"]["kv"]
        slot_bytes = before["leases"]["kv"] // before["kv_slots"]["now"]
        refused = server.http.post("/v1/memory", json={"budget_bytes": fixed})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "budget_bytes"
        assert server.http.post("/v1/memory", json={}).status_code == 400

        small = server.http.post("/v1/memory", json={"budget_bytes": fixed + 200 * slot_bytes}).json()
        assert small["kv_slots"]["now"] == 200 and small["free_bytes"] < slot_bytes
        assert answer() == want

        command = [sys.executable, "-m", "fineinfer.cli", "memory", "--url", str(server.http.base_url)]
        done = subprocess.run([*command, "--budget", str(before["budget_bytes"])], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "budget" in done.stdout and "kv" in done.stdout
        assert server.http.get("/v1/memory").json()["kv_slots"]["now"] == before["kv_slots"]["now"]
        bad = subprocess.run([*command, "--budget", "much"], capture_output=True, text=True)
        assert bad.returncode == 1 and "size" in bad.stderr
        assert answer() == want
