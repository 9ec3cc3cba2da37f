"""Layer inputs in pinned host memory and smaller micro-batches on a GPU: same bits, free memory, hidden copies."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from fineinfer.memory.freed_memory import return_freed_memory
from fineinfer.training.determinism import prepare_determinism
from fineinfer.training.ops import TrainingOps, pick_ops
from fineinfer.training.trainer import Trainer

from .test_training_on_cuda import CUDA, MIDDLE, TINY, WIDE, decoder_of, gradients, run, trainer_of

pytestmark = pytest.mark.gpu
NUM_LAYERS = 8
DEEP = WIDE | {"num_hidden_layers": NUM_LAYERS}
LENGTHS = [300, 17, 200, 129]


@pytest.fixture
def kernels() -> TrainingOps:
    ops = pick_ops("triton", CUDA)
    assert ops is not None
    return ops


def advance(trainer: Trainer) -> str:
    """One unit, waited for: the engine lets no more than two be under way."""
    kind = trainer.advance().kind
    torch.cuda.synchronize()
    return kind


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inputs_that_went_to_the_host_and_back_change_no_bit(
    tmp_path: Path, dtype: str, kernels: TrainingOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    prepare_determinism()
    decoder = decoder_of(tmp_path / "model", MIDDLE | {"num_hidden_layers": NUM_LAYERS}, dtype)
    quiet = trainer_of(tmp_path / "quiet", decoder, LENGTHS, kernels, recompute="always", deterministic=True)
    run(quiet, 3)
    trainer = trainer_of(tmp_path / "moved", decoder, LENGTHS, kernels, deterministic=True)
    rng, moved = random.Random(5), 0
    while trainer.step < 3:  # nothing waits here: copies and units are all under way together
        if rng.random() < 0.3:
            trainer.drop_kept()
            moved += trainer.offload_inputs()[0]
        trainer.advance()
    assert moved > NUM_LAYERS
    assert torch.equal(trainer._state.masters.flat, quiet._state.masters.flat)
    assert [entry["loss"] for entry in trainer.log_history] == [entry["loss"] for entry in quiet.log_history]


def test_abandoned_copies_hurt_nobody(tmp_path: Path, kernels: TrainingOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    prepare_determinism()
    decoder = decoder_of(tmp_path / "model", DEEP, "bfloat16")
    quiet, other = (
        trainer_of(tmp_path / name, decoder, [512] * 4, kernels, recompute="always", deterministic=True)
        for name in ("quiet", "other")
    )
    run(quiet, 2)
    for num_units in (5, NUM_LAYERS + 1, NUM_LAYERS + 7):  # in the forward, before the head, in the backward
        other.offload_inputs()
        for _ in range(num_units):
            other.advance()
        other.abandon_update()
    run(other, 2)
    assert torch.equal(other._state.masters.flat, quiet._state.masters.flat)


def test_offloading_frees_the_device_s_memory_and_the_plan_bounds_the_peak(
    tmp_path: Path, kernels: TrainingOps
) -> None:
    trainer = trainer_of(
        tmp_path / "job", decoder_of(tmp_path / "model", DEEP, "bfloat16"), [1024] * 4, kernels, recompute="always"
    )
    run(trainer, 1)  # compiles, and the libraries take their workspaces
    for _ in range(1 + NUM_LAYERS):
        advance(trainer)
    before, started_s = torch.cuda.memory_allocated(), time.perf_counter()
    num_layers, num_bytes = trainer.offload_inputs()
    return_freed_memory(CUDA)
    print(
        f"{num_bytes / 2**20:.0f} MiB to the host in {1e3 * (time.perf_counter() - started_s):.1f} ms, the first time"
    )
    assert num_layers == NUM_LAYERS
    assert before - torch.cuda.memory_allocated() == pytest.approx(num_bytes, rel=0.05)
    while trainer.step < 2:
        advance(trainer)
    trainer.offload_inputs()  # the next one begins so
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    while trainer.step < 3:
        advance(trainer)
    peak, plan = torch.cuda.max_memory_allocated() - before, trainer.bytes_if_offloaded(4096)
    print(f"offloaded: peak {peak / 2**20:.0f} MiB, plan {plan / 2**20:.0f} MiB")
    assert 0.5 * plan < peak <= plan < trainer.bytes_if_recomputed(4096)


def test_copies_hide_behind_the_units(tmp_path: Path, kernels: TrainingOps) -> None:
    trainer = trainer_of(
        tmp_path / "job", decoder_of(tmp_path / "model", DEEP, "bfloat16"), [1024] * 4, kernels, recompute="always"
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(7):
        offloaded = step % 2 == 1
        if offloaded:
            trainer.offload_inputs()
        started_s = time.perf_counter()
        run(trainer, step + 1)
        seconds[offloaded].append(time.perf_counter() - started_s)
    plain, moved = min(seconds[False]), min(seconds[True])
    print(f"an update on the device {1e3 * plain:.1f} ms, with inputs on the host {1e3 * moved:.1f} ms")
    assert moved < 1.2 * plain


def test_a_split_micro_batch_has_the_same_gradient(tmp_path: Path, kernels: TrainingOps) -> None:
    decoder = decoder_of(tmp_path / "model", TINY, "float32")
    whole, parts = (trainer_of(tmp_path / name, decoder, LENGTHS, kernels) for name in ("whole", "parts"))
    assert 0 < parts.split_next_micro_batch(450) <= 450 < whole.next_micro_batch_tokens() == sum(LENGTHS)
    expected = gradients(whole)
    for name, own in gradients(parts).items():
        assert float((own - expected[name]).norm() / expected[name].norm()) < 1e-5, name
