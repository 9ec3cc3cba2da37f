"""A job parked from a GPU: its bytes really leave the device, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fineinfer.data.packed import write_dataset
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.loader import load_model
from fineinfer.training.checkpoint import read_newest
from fineinfer.training.parking import ParkableTrainer

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1024,
    "max_position_embeddings": 512, "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip


def make_trainer(folder: Path) -> ParkableTrainer:
    free_bytes()  # as the ladder does before a job: its tensors must not share a cached block with what stays
    (folder / "config.json").write_text(json.dumps(CONFIG))
    decoder = load_model(folder, dtype="bfloat16", device="cuda", load_format="dummy").decoder
    job_dir = folder / "job"
    job_dir.mkdir()
    random = np.random.default_rng(2)
    rows = [(random.integers(3, 1024, 64).tolist(), [1] * 64) for _ in range(8)]
    job = StartJob(
        job_id="job", name="lora", base_model="base", job_dir=str(job_dir), adapters_dir=str(folder / "adapters"),
        settings=TrainingSettings(lora=LoraSpec(r=64, lora_alpha=64), batch_size=2, n_epochs=2, save_steps=99),
        dataset_sha256=write_dataset(job_dir, rows),
    )  # fmt: skip
    return ParkableTrainer(decoder, job, lambda _t, _layer: True)


def durable(trainer: ParkableTrainer) -> list[torch.Tensor]:
    state = trainer._state
    return [t.cpu().clone() for t in (state.masters.flat, state.optimizer.exp_avg, state.optimizer.exp_avg_sq)]


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def test_the_driver_has_the_bytes_while_the_job_is_parked_and_no_bit_changes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    while trainer.step < 2:
        trainer.advance()
    trainer.advance()
    trainer.abandon_update()
    before, compute = durable(trainer), trainer._state.compute.flat.cpu().clone()
    held = sum(tensor.numel() * tensor.element_size() for tensor in trainer._tensors())
    assert held > 200 << 20, "too small to be seen in what the driver counts"
    free = free_bytes()
    for _ in range(2):
        trainer.advance()
        trainer.park()
        assert free_bytes() - free == pytest.approx(held, rel=0.05)
        assert all(
            tensor.is_pinned() for tensor in vars(trainer._host_copy).values() if isinstance(tensor, torch.Tensor)
        )
        trainer.unpark()
        assert abs(free_bytes() - free) <= 0.05 * held
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(durable(trainer), before, strict=True))
    assert torch.equal(trainer._state.compute.flat.cpu(), compute)
    while not trainer.finished:
        trainer.advance()
    assert trainer.log_history[-1]["loss"] is not None and not trainer.log_history[-1]["skipped"]
    assert not torch.equal(durable(trainer)[0], before[0])


def test_a_job_parked_in_host_memory_is_written_from_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    while trainer.step < 1:
        trainer.advance()
    before = durable(trainer)
    trainer.park()
    trainer.save_resume_point()
    again = ParkableTrainer(trainer._context.decoder, trainer._job, lambda _t, _layer: True)
    assert again.step == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(durable(again), before, strict=True))


def test_a_paused_job_leaves_the_device_at_once_and_is_written_from_host_memory(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    while trainer.step < 3:
        trainer.advance()
    trainer.advance()
    before, held = durable(trainer), sum(tensor.numel() * tensor.element_size() for tensor in trainer._tensors())
    free = free_bytes()
    written = trainer.leave()
    assert free_bytes() - free > 0.9 * held
    assert written.result() is None
    saved = read_newest(tmp_path / "job", trainer._context.decoder.spec, 64)
    assert saved is not None and saved.step == 3
    after = [saved.weights.flat, saved.moments["exp_avg"], saved.moments["exp_avg_sq"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trainer.close()
