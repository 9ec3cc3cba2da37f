"""Layer inputs in host memory, smaller micro-batches, deterministic mode: what they free and which bits they change."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fineinfer.messages import TrainingSettings
from fineinfer.training import offload
from fineinfer.training.dataset import MicroBatch
from fineinfer.training.errors import TrainingError
from fineinfer.training.layers import AutogradLayers
from fineinfer.training.offload import HostStore
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps
from fineinfer.training.trainer import Trainer

from .engine_harness import Harness
from .test_training_step import SETTINGS, run_updates, start_job, tiny_decoder

NUM_LAYERS, INPUT_BYTES = 4, 32 * 4  # of a layer's input, for one token


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as memory of its own here too."""
    monkeypatch.setattr(offload, "OFFLOADING_DEVICES", ("cpu",))


def make(folder: Path, keep: bool = False, ops: TrainingOps | None = None, **changed: object) -> Trainer:
    own = {name: getattr(SETTINGS, name) for name in ("lora", "batch_size", "n_epochs", "learning_rate")}
    own |= {"gradient_accumulation_steps": 2}
    deterministic = bool(changed.pop("deterministic", False))
    folder.mkdir(exist_ok=True)
    decoder = tiny_decoder(folder / "model", str(changed.pop("dtype", "float32")))
    job = start_job(folder / "job", TrainingSettings(**(own | changed)))
    return Trainer(decoder, job, lambda _t, _i: keep, head_chunk_tokens=5, ops=ops, deterministic=deterministic)


def result(trainer: Trainer, before_unit: Callable[[int], object] = id) -> tuple[list[torch.Tensor], torch.Tensor]:
    gradients = run_updates(trainer, trainer.total_steps, before_unit)
    return gradients, trainer._state.masters.flat.clone()


# ---------------------------------------------------------------- layer inputs in host memory


@pytest.mark.parametrize("ops", [None, REFERENCE_OPS], ids=["autograd", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_that_went_to_the_host_and_back_change_no_bit(
    tmp_path: Path, dtype: str, ops: TrainingOps | None, offloading: None
) -> None:
    quiet = make(tmp_path / "quiet", keep=True, ops=ops, dtype=dtype)
    gradients, masters = result(quiet)
    rng, moved = random.Random(3), []
    trainer = make(tmp_path / "moved", keep=True, ops=ops, dtype=dtype)

    def disturb(unit: int) -> None:
        if rng.random() < 0.3:
            trainer.drop_kept(rng.choice([None, 1]))
        if rng.random() < 0.3:
            moved.append(trainer.offload_inputs()[0])

    others, other_masters = result(trainer, disturb)
    assert sum(moved) > 8 and 0 in moved
    assert torch.equal(masters, other_masters) and quiet.log_history == trainer.log_history
    assert all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True))


def test_offloading_frees_what_it_says_and_goes_on_to_the_micro_batch_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloading: None
) -> None:
    trainer = make(tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []
    forward = type(trainer._context.layers).forward

    def spy(self: object, layer: int, x: torch.Tensor, *rest: object) -> object:
        alive.append(weakref.ref(x))
        return forward(self, layer, x, *rest)

    monkeypatch.setattr(type(trainer._context.layers), "forward", spy)
    gc.disable()  # nothing may wait for the cycle collector
    try:
        for _ in range(3):  # embed, two layers
            trainer.advance()
        one = INPUT_BYTES * trainer.micro_batch_tokens
        assert trainer.held_bytes() == 2 * one == sum(ref() is not None for ref in alive) * one
        assert trainer.offload_inputs() == (2, 2 * one)
        assert trainer.held_bytes() == 0 and [ref() for ref in alive] == [None, None]
        assert trainer.offload_inputs() == (0, 0)
        trainer.advance()
        trainer.advance()  # the forward of the last layers: their inputs go at once
        assert trainer.held_bytes() == 0 and [ref() for ref in alive] == [None] * 4
        assert set(trainer._update.current.backward_kinds()) == {"recompute"}
        while trainer.advance().kind == "head":
            pass
        held = []
        while trainer.micro_batch_open:  # one backward has run: its input is gone, that of the next is here
            held.append(trainer.held_bytes() // one)
            trainer.advance()
        assert held == [1, 1, 1] and trainer.held_bytes() == 0
        trainer.advance()
        trainer.advance()
        assert trainer.held_bytes() == INPUT_BYTES * trainer.micro_batch_tokens  # the next one stays on the device
    finally:
        gc.enable()


def test_inputs_come_back_one_layer_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloading: None
) -> None:
    events: list[str] = []
    trainer = make(tmp_path)
    layers, fetch, back = type(trainer._context.layers), HostStore.fetch, type(trainer._context.layers).backward
    monkeypatch.setattr(HostStore, "fetch", lambda self, host: events.append("fetch") or fetch(self, host))
    monkeypatch.setattr(
        layers, "backward", lambda self, layer, *rest: events.append(f"back {layer}") or back(self, layer, *rest)
    )
    trainer.offload_inputs()  # between two: holds for the next
    trainer.advance()
    while trainer.micro_batch_open:
        trainer.advance()
    assert events == ["fetch", "fetch", "back 3", "fetch", "back 2", "fetch", "back 1", "back 0"]


def test_a_micro_batch_can_begin_in_host_memory(tmp_path: Path, offloading: None) -> None:
    trainer = make(tmp_path)
    assert trainer.offload_inputs() == (0, 0)
    for _ in range(NUM_LAYERS + 1):
        trainer.advance()
        assert trainer.held_bytes() == 0
    assert trainer.micro_batch_open
    trainer.abandon_update()
    for _ in range(2):
        trainer.advance()
    assert trainer.held_bytes() > 0, "it held for that one only"


def test_kept_graphs_hold_their_inputs_and_come_first(tmp_path: Path, offloading: None) -> None:
    trainer = make(tmp_path, keep=True)
    for _ in range(4):
        trainer.advance()
    assert trainer.offload_inputs() == (0, 0)
    assert trainer.drop_kept()[0] == 3 and trainer.offload_inputs()[0] == 3 and trainer.held_bytes() == 0
    trainer.advance()  # the last layer is kept, and so is its input
    tokens, sizes = trainer.micro_batch_tokens, trainer._context.sizes
    assert (
        trainer.num_kept_layers() == 1
        and trainer.held_bytes() == trainer._update.current._graph_bytes + sizes.inputs(tokens)
    )


@pytest.mark.parametrize(("recompute", "patched"), [("never", True), ("auto", False)])
def test_nothing_is_offloaded_where_it_would_free_nothing(
    tmp_path: Path, recompute: str, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if patched:
        monkeypatch.setattr(offload, "OFFLOADING_DEVICES", ("cpu",))
    trainer = make(tmp_path, recompute=recompute)
    assert not trainer.can_offload and trainer.offload_inputs() == (0, 0)
    for _ in range(3):
        trainer.advance()
    held = trainer.held_bytes()
    assert trainer.offload_inputs() == (0, 0) and trainer.held_bytes() == held > 0


def test_the_plan_of_an_offloaded_micro_batch_grows_by_no_layer(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    spared = trainer.bytes_if_recomputed(1000) - trainer.bytes_if_offloaded(1000)
    assert spared == (NUM_LAYERS - 3) * 1000 * INPUT_BYTES


# ---------------------------------------------------------------- smaller micro-batches


def test_a_split_micro_batch_is_the_same_update(tmp_path: Path) -> None:
    whole, parts = make(tmp_path / "whole"), make(tmp_path / "parts")
    gradients, _ = result(whole)
    sizes: list[int] = []

    def split(unit: int) -> None:
        if parts.begins_micro_batch:
            before = parts.next_micro_batch_tokens()
            after = parts.split_next_micro_batch(before - 1)
            sizes.append(before - after)
            assert after == parts.next_micro_batch_tokens()

    others, _ = result(parts, split)
    assert sum(size > 0 for size in sizes) > 3 and 0 in sizes, "a single sequence is never cut"
    for ours, theirs in zip(others, gradients, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    for mine, other in zip(parts.log_history, whole.log_history, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        exact = ("mean_token_accuracy", "num_tokens", "trained_tokens", "learning_rate")
        assert [mine[key] for key in exact] == [other[key] for key in exact]


def test_a_split_keeps_plans_honest(tmp_path: Path) -> None:
    trainer = make(tmp_path, gradient_accumulation_steps=1)  # all three sequences in one micro-batch
    tokens, before = trainer.next_micro_batch_tokens(), trainer.next_update_units()
    small = trainer.split_next_micro_batch(1)
    planned = trainer.next_update_units()
    assert 0 < small < tokens and before != planned
    assert planned["embed", small] == 1 and planned["optimizer", tokens] == 1
    ran, splits = planned - planned, 0
    while trainer.step == 0:
        if trainer._update is not None and trainer.begins_micro_batch:
            splits += trainer.next_micro_batch_tokens() > trainer.split_next_micro_batch(1)
            planned = ran + trainer.remaining_units()
        report = trainer.advance()
        ran[report.kind.replace("recompute", "backward"), report.num_tokens] += 1
    assert splits == 1 and ran == planned, "the rest was split once more"
    assert trainer.cursor.processed_tokens == tokens


def test_nothing_is_split_in_mid_flight_or_in_deterministic_mode(tmp_path: Path) -> None:
    trainer = make(tmp_path / "a", gradient_accumulation_steps=1)
    trainer.advance()
    units = trainer.remaining_units()
    trainer.split_next_micro_batch(1)
    assert trainer.remaining_units() == units
    fixed = make(tmp_path / "b", gradient_accumulation_steps=1, deterministic=True)
    tokens = fixed.next_micro_batch_tokens()
    assert trainer.can_split and not fixed.can_split
    assert fixed.split_next_micro_batch(1) == tokens == fixed.next_micro_batch_tokens()


def test_the_largest_micro_batch_within_some_bytes(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    most = trainer.max_micro_batch_tokens
    assert trainer.tokens_within(trainer.bytes_if_recomputed(17)) == 17
    assert trainer.tokens_within(trainer.bytes_if_recomputed(17) - 1) == 16
    assert trainer.tokens_within(trainer.bytes_if_offloaded(17), offloaded=True) == 17
    assert trainer.tokens_within(0) == 0 and trainer.tokens_within(1 << 40) == most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(0, 60), st.randoms(use_true_random=False))
def test_the_parts_of_a_micro_batch_are_all_of_it(lengths: list[int], max_tokens: int, rng: random.Random) -> None:
    rows = [sorted(rng.sample(range(n), rng.randint(1, n))) for n in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    targets = [start + row for start, own in zip(starts, rows, strict=False) for row in own]
    batch = MicroBatch(
        input_ids=torch.arange(starts[-1]) + 100,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        rope_lengths=torch.cat([torch.full((n,), n) for n in lengths]),
        cu_seqlens=starts,
        target_rows=torch.tensor(targets),
        target_ids=torch.tensor(targets) + 500,
        target_bounds=[sum(map(len, rows[:i])) for i in range(len(lengths) + 1)],
    )
    first, *rest = batch.split(max_tokens)
    assert first.num_tokens <= max_tokens or len(first.cu_seqlens) == 2
    assert not rest or first.num_tokens + rest[0].cu_seqlens[1] > max_tokens, "more would have fitted"
    parts = [first, *rest]
    for part in parts:
        assert torch.equal(part.target_ids - 500, part.target_rows + part.input_ids[0] - 100)
        assert part.cu_seqlens[0] == part.target_bounds[0] == 0 and part.target_bounds[-1] == part.num_targets
        assert len(part.cu_seqlens) == len(part.target_bounds)
        for name in ("input_ids", "positions", "rope_lengths"):
            assert len(getattr(part, name)) == part.num_tokens
    for name in ("input_ids", "positions", "rope_lengths", "target_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))


# ---------------------------------------------------------------- deterministic mode


def test_units_run_in_torch_s_deterministic_mode_and_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    backward = AutogradLayers.backward

    def spy(self: AutogradLayers, *args: Any) -> object:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        seen.append((torch.are_deterministic_algorithms_enabled(), fills))
        return backward(self, *args)

    monkeypatch.setattr(AutogradLayers, "backward", spy)
    for wanted in (True, False):
        run_updates(make(tmp_path / str(wanted), deterministic=wanted), 1)
        assert seen == [(wanted, not wanted)] * 2 * NUM_LAYERS
        seen.clear()
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def test_a_unit_that_fails_leaves_the_mode_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, deterministic=True)
    for _ in range(3):
        while sum(trainer.remaining_units().values()) != 1:
            trainer.advance()
        trainer._state.grads.flat[3] = float("nan")
        if trainer.step < 2:
            trainer.advance()
            while trainer.checkpoint_due:
                trainer.advance()
    with pytest.raises(TrainingError, match="3 updates in a row"):
        trainer.advance()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_engine_s_flag_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for wanted in (False, True):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        harness = Harness(folder, deterministic=wanted)
        harness.parts.training.start(start_job(folder / "job", SETTINGS))
        assert harness.parts.training.trainer.can_split != wanted
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == wanted
        harness.close()


def test_deterministic_mode_gives_the_bits_of_any_other(tmp_path: Path) -> None:
    """On a CPU, where nothing adds in any other order anyway."""
    results = [result(make(tmp_path / str(on), deterministic=on))[1] for on in (True, False)]
    assert torch.equal(*results)
