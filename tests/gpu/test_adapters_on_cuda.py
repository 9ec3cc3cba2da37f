"""Adapters on a GPU: folders read on a thread, and weights copied from training's stream while requests run."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch

from fineinfer.engine import adapter_traffic

from ..unit.engine_harness import Harness, publish
from ..unit.training_job import SETTINGS, write_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["inference-first", "slo"])
def test_live_weights_are_those_of_the_update_they_are_named_after(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(adapter_traffic, "LIVE_COST", 1.0)
    harness = Harness(
        tmp_path, model=str(embedded_model), load_format="auto", device="cuda", memory_budget=8 << 30, policy=policy,
        max_model_len=1024, max_loras=3, max_lora_rank=16,
    )  # fmt: skip
    adapters, training = harness.parts.adapters, harness.parts.training
    publish(harness, "other", tmp_path / "other", 1)
    job = write_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, n_epochs=4, save_steps=100))
    training.start(msgspec.structs.replace(job, serve="live"))
    for step in range(1, 9):
        harness.outputs.clear()
        harness.add(f"r{step}", [5, 9, 2, 33], "other", max_tokens=6)
        harness.run()
        deadline = time.monotonic() + 60
        while training.trainer is not None and training.trainer.step < step and time.monotonic() < deadline:
            harness.loop.step()
        trainer = training.trainer
        assert trainer is not None
        while adapters.current().get("lora") != f"live-job-{trainer.step}" and time.monotonic() < deadline:
            harness.parts.adapter_traffic.turn(training)  # no unit runs meanwhile
        slot = adapters.acquire(f"live-job-{trainer.step}")
        assert slot is not None
        torch.cuda.synchronize()
        weights = trainer.serving_weights
        for module in weights.layout.modules():
            a = adapters.stacks.a(module.layer, module.name)[slot, : module.rank]
            b = adapters.stacks.b(module.layer, module.name)[slot, :, : module.rank]
            assert torch.equal(a, weights.a(module)) and torch.equal(b, weights.b(module))
        adapters.release(f"live-job-{trainer.step}")
    assert adapters.reader.versions(), "what was read on the thread is kept in host memory"
    harness.close()
