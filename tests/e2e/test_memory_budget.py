"""The memory budget of a running server, over HTTP and by command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..waiting import until
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


def test_a_conversation_is_not_computed_again(tiny_model, tmp_path):
    with live_server(tmp_path, str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32") as server:
        messages = [{"role": "user", "content": "Tell me of the quick brown fox and of the lazy dog."}]
        ask = {"model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        first = server.http.post("/v1/chat/completions", json=ask | {"messages": messages}).json()
        again = server.http.post("/v1/chat/completions", json=ask | {"messages": messages}).json()
        assert first["choices"][0]["message"] == again["choices"][0]["message"]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)]
        assert cached == [0, first["usage"]["prompt_tokens"] - 1]
        other = server.http.post("/v1/chat/completions", json=ask | {"messages": messages, "cache_salt": "b"}).json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["choices"][0]["message"] == first["choices"][0]["message"]
        until(lambda: server.metric("prefix_cache_hits_total") == cached[1])  # numbers come every second
        bad = server.http.post("/v1/chat/completions", json=ask | {"messages": messages, "cache_salt": ""})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "cache_salt"
