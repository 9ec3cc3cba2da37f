"""Adapters from outside and live from training on a real server, across a restart."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from fineinfer.hashing import adapter_hash

from ..waiting import until
from .conftest import LiveServer, chat_rows, live_server, start_server

pytestmark = pytest.mark.e2e
QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 6, "temperature": 0}


def make_adapter(base: Path, folder: Path, seed: int, r: int = 4) -> str:
    """A PEFT adapter with random weights; its version."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=r, target_modules="all-linear"))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return adapter_hash(folder)


def ask(server: LiveServer, model: str) -> dict[str, Any]:
    answer = server.http.post("/v1/chat/completions", json=QUESTION | {"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_adapters_are_loaded_moved_and_kept_over_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, two = make_adapter(tiny_model, root / "one", 1), make_adapter(tiny_model, root / "two", 2)
    make_adapter(tiny_model, root / "wide", 3, r=16)
    flags = (
        str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32", "--max-loras", "2", "--max-lora-rank",
        "8", "--adapter-root", str(root), "--lora-modules", f"module={root / 'one'}",
    )  # fmt: skip
    with live_server(tmp_path / "state", *flags) as server:
        assert ask(server, "module")["adapter_version"] == one
        load = {"lora_name": "sql", "lora_path": "one"}
        done = server.http.post("/v1/load_lora_adapter", json=load)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert ask(server, "sql")["adapter_version"] == one
        changed = server.http.post("/v1/load_lora_adapter", json=load | {"lora_path": "two", "load_inplace": True})
        assert changed.status_code == 200, changed.text
        assert ask(server, "sql")["adapter_version"] == two, "new requests get it at once"
        wide = server.http.post("/v1/load_lora_adapter", json={"lora_name": "wide", "lora_path": "wide"})
        assert wide.status_code == 400 and "--max-lora-rank" in wide.json()["error"]["message"]
        back = server.http.post("/v1/models/sql/rollback", json={"step": 1}).json()["fineinfer"]
        assert (back["version"], back["step"], back["rank"]) == (one, 1, 4)
        assert ask(server, "sql")["adapter_version"] == one and ask(server, "sql@2")["adapter_version"] == two
        assert server.stop() == 0
    (root / "two/adapter_model.safetensors").write_bytes(b"gone")
    with live_server(tmp_path / "state", *flags) as server:
        assert ask(server, "sql")["adapter_version"] == one and ask(server, "sql@2")["adapter_version"] == two
        gone = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
        assert server.http.post("/v1/chat/completions", json=QUESTION | {"model": "sql"}).status_code == 404
        serves_live(server)
    bad = start_server(tmp_path / "state", *flags, "--lora-modules", f"bad={root / 'wide'}")
    assert bad.process.wait(60) == 1
    assert "error: --lora-modules bad" in bad.log.read_text().splitlines()[-1]
    bad.http.close()


def serves_live(server: LiveServer) -> None:
    """A job's name answers before its first checkpoint, with newer and newer steps, and with its result at the end."""
    settings = {"n_epochs": 6, "batch_size": 4, "learning_rate": 1e-3, "lora": {"r": 4}}
    body = {
        "model": "tiny", "training_file": server.upload(chat_rows(48)), "suffix": "learning",
        "method": {"type": "supervised", "supervised": {"hyperparameters": settings}}, "serve_while_training": "live",
    }  # fmt: skip
    job = server.http.post("/v1/fine_tuning/jobs", json=body)
    assert job.status_code == 200, job.text
    seen: list[tuple[str, int]] = []

    def saw_the_last_checkpoint() -> bool:
        answer = server.http.post("/v1/chat/completions", json=QUESTION | {"model": "learning", "max_tokens": 1})
        if answer.status_code == 200:
            seen.append((answer.json()["adapter_version"], answer.json()["adapter_step"]))
        return bool(seen) and seen[-1][1] == 72 and not seen[-1][0].startswith("live-")

    until(saw_the_last_checkpoint)
    assert seen[0][0].startswith("live-ftjob-") and len({step for _, step in seen}) > 3, seen
    assert [step for _, step in seen] == sorted(step for _, step in seen)
    result = server.wait_job(job.json()["id"])
    assert result["status"] == "succeeded" and seen[-1] == (ask(server, "learning")["adapter_version"], 72)
    assert server.http.get("/v1/models/learning").json()["fineinfer"]["state"] == "loaded"
