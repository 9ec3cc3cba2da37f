"""``fineinfer models`` against a fake server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fineinfer.cli.app import main

from .fake_api import FakeServer, listed, server  # noqa: F401 - a fixture

LORA = {"id": "my-lora", "object": "model", "created": 1, "owned_by": "fineinfer", "parent": "base",
        "fineinfer": {"kind": "adapter", "state": "cpu", "rank": 16, "step": 3, "version": "0123456789abcdef",
                      "job_id": "ftjob-1"}}  # fmt: skip


def test_list_shows_where_weights_are(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    base: dict[str, Any] = {"id": "base", "object": "model", "created": 1, "owned_by": "x"}
    server.answers["GET /v1/models"] = (200, listed(base, LORA))
    assert main(["models", "list"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["name", "kind", "state", "rank", "step", "version", "job"],
        ["base", "", "", "", "", "", ""],
        ["my-lora", "adapter", "cpu", "16", "3", "0123456789ab", "ftjob-1"],
    ]
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["fineinfer"]["state"] == "cpu"


def test_actions_send_what_vllm_s_routes_take(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    server.answers["POST /v1/load_lora_adapter"] = (200, "Success: LoRA adapter 'a' added successfully.")
    server.answers["POST /v1/unload_lora_adapter"] = (200, "Success: LoRA adapter 'a' removed successfully.")
    server.answers["DELETE /v1/models/a"] = (200, {"id": "a", "object": "model", "deleted": True})
    server.answers["POST /v1/models/ft%3Aa%2Fb/rollback"] = (200, LORA)
    assert main(["models", "load", "a", "some/path", "--inplace", "--pinned"]) == 0
    assert main(["models", "unload", "a", "--json"]) == 0
    assert main(["models", "rm", "a"]) == 0
    assert main(["models", "rollback", "ft:a/b@3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "added successfully." in said[0] and "removed" in json.loads(said[1])["message"]
    assert said[2:] == ["a deleted", "ft:a/b is ft:a/b@3 now"]
    assert server.bodies("POST /v1/load_lora_adapter") == [
        {"lora_name": "a", "lora_path": "some/path", "load_inplace": True, "pinned": True}
    ]
    assert server.bodies("POST /v1/models/ft%3Aa%2Fb/rollback") == [{"step": 3}]


def test_errors_are_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    error = {"error": {"message": "The lora adapter 'a' cannot be found.", "type": "x", "code": "adapter_not_found"}}
    server.answers["POST /v1/unload_lora_adapter"] = (404, error)
    assert main(["models", "unload", "a"]) == 1
    assert main(["models", "rollback", "a"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "fineinfer: error: The lora adapter 'a' cannot be found. (HTTP 404)",
        "fineinfer: error: expected NAME@STEP, got a",
    ]
