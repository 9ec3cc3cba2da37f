"""Adapters on a GPU: folders read on a thread, and weights copied from training's stream while requests run."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch

from fineinfer.adapters.stacks import AdapterStacks
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.engine import adapter_traffic
from fineinfer.messages import LoraSpec
from fineinfer.model.loader import read_spec

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


def test_fills_of_one_slot_from_two_streams_keep_their_order(embedded_model: Path) -> None:
    """The first is queued behind a step on the serving stream; the second, of training's stream, must not pass it."""
    device, (_, spec) = torch.device("cuda"), read_spec(embedded_model)
    stacks = AdapterStacks(spec, 2, 8, torch.bfloat16, device)
    layout = LoraLayout.uniform(spec, LoraSpec(r=8))
    older, newer = (LoraWeights.init(layout, torch.bfloat16, device, seed) for seed in (1, 2))
    stacks.fill(1, older)  # so that both below have nothing to do but to copy
    training = torch.cuda.Stream()
    training.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(200_000_000)  # 0.1 s
    stacks.fill(1, older)
    with torch.cuda.stream(training):
        stacks.fill(1, newer)
    torch.cuda.synchronize()
    for module in layout.modules():
        assert torch.equal(stacks.a(module.layer, module.name)[1, : module.rank], newer.a(module))
        assert torch.equal(stacks.b(module.layer, module.name)[1, :, : module.rank], newer.b(module))


def test_a_fill_of_another_layout_does_not_wait_for_the_device(embedded_model: Path) -> None:
    device, (_, spec) = torch.device("cuda"), read_spec(embedded_model)
    stacks = AdapterStacks(spec, 2, 8, torch.bfloat16, device)
    weights = [LoraWeights.init(LoraLayout.uniform(spec, LoraSpec(r=r)), torch.bfloat16, device, r) for r in (4, 8)]
    stacks.fill(0, weights[0])  # pinned memory is there from now on
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # 1 s
    busy = torch.cuda.Event()
    busy.record()
    stacks.fill(0, weights[1])
    assert not busy.query(), "the host waited for what ran before"
    torch.cuda.synchronize()
