"""Schedules, optimizer, data order and packing, each against its reference."""

from __future__ import annotations

import hashlib
from pathlib import Path

import hypothesis
import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fineinfer.data.packed import DATASET_FILE, write_dataset
from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.training.dataset import PackedDataset, Schedule
from fineinfer.training.errors import TrainingError
from fineinfer.training.optimizer import AdamW, clip_factor, gradient_norm
from fineinfer.training.schedule import check_settings, lr_factor, warmup_steps

DEVICE = torch.device("cpu")


def dataset_of(folder: Path, rows: list[tuple[list[int], list[int]]]) -> PackedDataset:
    return PackedDataset(folder / DATASET_FILE, write_dataset(folder, rows))


def lengths_dataset(folder: Path, lengths: list[int]) -> PackedDataset:
    return dataset_of(folder, [(list(range(n)), [1] * n) for n in lengths])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("total", "ratio"), [(20, 0.03), (7, 0.5), (1, 0.0), (13, 0.0)])
def test_schedules_equal_transformers(kind: str, total: int, ratio: float) -> None:
    warmup = warmup_steps(total, ratio)
    assert warmup - 1 < total * ratio <= warmup  # rounded up, as transformers' TrainingArguments does
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    name = "constant_with_warmup" if kind == "constant" else kind
    schedule = transformers.get_scheduler(name, optimizer, warmup, total)
    for step in range(total):
        assert 0.5 * lr_factor(kind, step, total, warmup) == pytest.approx(schedule.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("total", "warmup"), [(20, 3), (7, 0), (1, 0)])
def test_schedules_that_do_not_fall_to_zero(total: int, warmup: int, ratio: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    options = {"min_lr_rate": ratio} if ratio else {"min_lr": 0.0}  # transformers takes 0 for none given
    schedule = transformers.get_scheduler("cosine_with_min_lr", optimizer, warmup, total, options)
    for step in range(total):
        assert 0.5 * lr_factor("cosine", step, total, warmup, ratio) == pytest.approx(
            schedule.get_last_lr()[0], abs=1e-15
        )
        plain = lr_factor("linear", step, total, warmup)
        expected = plain if step < warmup else ratio + (1 - ratio) * plain  # transformers has no linear one
        assert lr_factor("linear", step, total, warmup, ratio) == pytest.approx(expected, abs=1e-15)
        optimizer.step()
        schedule.step()
    for kind in ("cosine", "linear"):
        factors = [lr_factor(kind, step, 1000, 0, ratio) for step in range(1001)]
        assert factors == sorted(factors, reverse=True) and factors[0] == 1.0
        assert factors[-1] == pytest.approx(ratio, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr_scheduler": "wsd"}, "lr_scheduler"),
        ({"recompute": "maybe"}, "recompute"),
        ({"batch_size": 0}, "batch_size"),
        ({"save_steps": -2}, "save_steps"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"min_lr_ratio": 0.1, "lr_scheduler": "constant"}, "min_lr_ratio"),
        ({"lora": LoraSpec(lora_dropout=1.0)}, "lora_dropout"),
        ({"lora": LoraSpec(lora_dropout=float("nan"))}, "lora_dropout"),
    ],
)
def test_unknown_values_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(TrainingError, match=named) as error:
        check_settings(msgspec.structs.replace(TrainingSettings(), **change))
    assert error.value.code == "invalid_hyperparameters"


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_and_clipping_equal_torch(weight_decay: float) -> None:
    settings = TrainingSettings(adam_betas=(0.8, 0.95), adam_eps=1e-6, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(700, generator=generator)
    theirs = [torch.nn.Parameter(part.clone()) for part in flat.split([100, 350, 250])]
    reference = torch.optim.AdamW(theirs, betas=settings.adam_betas, eps=1e-6, weight_decay=weight_decay, foreach=False)
    ours = AdamW(flat, settings)
    for step in range(12):
        rate, scale = 1e-2 / (step + 1), 10.0 ** (step % 3 - 1)
        grads = torch.randn(700, generator=generator) * scale
        for parameter, part in zip(theirs, grads.split([100, 350, 250]), strict=True):
            parameter.grad = part.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        norm = float(gradient_norm(grads))
        assert norm == pytest.approx(float(expected_norm), rel=1e-6)
        grads *= clip_factor(norm, 2.0)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        ours.update(grads, rate)
        torch.testing.assert_close(ours.params, torch.cat([p.detach() for p in theirs]), rtol=1e-6, atol=1e-7)
    assert clip_factor(5.0, 0.0) == 1.0 and clip_factor(0.1, 1.0) == 1.0


def test_targets_are_predicted_from_the_token_before_in_the_same_sequence(tmp_path: Path) -> None:
    rows = [
        ([7, 8, 9], [1, 0, 1]),
        ([4, 5], [1, 1]),
        ([6], [1]),
        ([1, 2, 3], [0, 0, 0]),
        ([10, 11, 12, 13], [0, 1, 1, 0]),
    ]
    dataset = dataset_of(tmp_path, rows)
    assert (dataset.num_examples, dataset.num_skipped) == (3, 2)  # one token, or nothing trained: left out
    batch = dataset.micro_batch([0, 1, 4], DEVICE)
    assert batch.input_ids.tolist() == [7, 8, 9, 4, 5, 10, 11, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.rope_lengths.tolist() == [3, 3, 3, 2, 2, 4, 4, 4, 4]
    assert batch.cu_seqlens == [0, 3, 5, 9]
    # the first token of a sequence has nothing before it, whatever its mask says
    assert list(zip(batch.target_rows.tolist(), batch.target_ids.tolist(), strict=True)) == [
        (1, 9),
        (3, 5),
        (5, 11),
        (6, 12),
    ]


def test_order_is_a_permutation_fixed_by_seed_and_epoch(tmp_path: Path) -> None:
    dataset = lengths_dataset(tmp_path, [3] * 200)
    orders = {
        (seed, epoch): dataset.order(seed, epoch).tolist() for seed in (0, 1, -5, 2**64 - 1) for epoch in range(3)
    }
    assert all(sorted(order) == list(range(200)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    assert dataset.order(1, 2).tolist() == orders[1, 2]
    # kept for good: a job resumed by a later release must read the same batches
    for (seed, epoch), order in orders.items():
        key = splitmix64(splitmix64(seed % 2**64) ^ epoch)
        assert order == sorted(range(200), key=lambda example: splitmix64(example ^ key))
    positions = np.mean([np.argsort(order)[:20] for order in orders.values()])
    assert abs(positions - 99.5) < 20  # early examples are not early in the order


def splitmix64(value: int) -> int:
    """As published by Steele, Lea and Flood."""
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(lengths=st.lists(st.integers(2, 90), min_size=1, max_size=60), limit=st.integers(8, 120))
@hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packing_is_best_fit_decreasing(tmp_path: Path, lengths: list[int], limit: int) -> None:
    dataset = lengths_dataset(tmp_path, lengths)
    settings = TrainingSettings(batch_size=len(lengths), micro_batch_tokens=limit)
    packed = Schedule(dataset, settings).micro_batches(0)
    order = dataset.order(settings.seed, 0).tolist()
    assert sorted(example for part in packed for example in part) == sorted(order)  # nothing lost, nothing cut
    # the textbook's way: the longest first, into the fullest bin that takes it, else a new one
    bins: list[list[int]] = []
    for example in sorted(order, key=lambda e: -lengths[e]):
        rooms = [limit - sum(lengths[e] for e in part) for part in bins]
        fitting = [index for index, room in enumerate(rooms) if room >= lengths[example]]
        if fitting:
            bins[min(fitting, key=lambda index: rooms[index])].append(example)
        else:
            bins.append([example])
    assert packed == [sorted(part, key=order.index) for part in bins]
    for part in packed:
        batch = dataset.micro_batch(part, DEVICE)  # boundaries are kept and positions begin anew
        assert np.diff(batch.cu_seqlens).tolist() == [lengths[e] for e in part]
        assert batch.positions.tolist() == [p for e in part for p in range(lengths[e])]
        assert len(part) == 1 or batch.num_tokens <= limit


@pytest.mark.parametrize("accumulation", [0, 1, 3])
def test_every_epoch_reads_each_example_once_in_whole_updates(tmp_path: Path, accumulation: int) -> None:
    random = np.random.default_rng(0)
    dataset = lengths_dataset(tmp_path, random.integers(2, 60, 50).tolist())
    settings = TrainingSettings(
        batch_size=8, gradient_accumulation_steps=accumulation, micro_batch_tokens=64, n_epochs=2
    )
    schedule = Schedule(dataset, settings)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (7, 14)
    again = Schedule(dataset, settings)
    for epoch in range(2):
        seen = []
        for step in range(7 * epoch, 7 * epoch + 7):
            parts = schedule.micro_batches(step)
            seen += [example for part in parts for example in part]
            sizes = [sum(dataset.length(example) for example in part) for part in parts]
            assert max(sizes) <= schedule.max_micro_batch_tokens
            if accumulation:
                assert len(parts) == min(accumulation, sum(len(part) for part in parts))
            else:
                assert max(sizes) <= 64
                assert len(parts) <= 2 * -(-sum(sizes) // 64)
        assert sorted(seen) == list(range(50))
    assert [again.micro_batches(step) for step in (13, 0, 7)] == [schedule.micro_batches(step) for step in (13, 0, 7)]
    assert schedule.load(14, DEVICE) == []


def test_an_example_over_the_limit_has_a_micro_batch_of_its_own(tmp_path: Path) -> None:
    dataset = lengths_dataset(tmp_path, [90, 10, 20, 30])
    schedule = Schedule(dataset, TrainingSettings(batch_size=4, micro_batch_tokens=60, n_epochs=1))
    assert sorted(sorted(part) for part in schedule.micro_batches(0)) == [[0], [1, 2, 3]]
    assert schedule.max_micro_batch_tokens == 90


def test_another_file_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset.safetensors"
    with pytest.raises(TrainingError, match="cannot be read"):
        PackedDataset(path, "0")
    lengths_dataset(tmp_path, [3, 4])
    with pytest.raises(TrainingError, match="expected 00") as error:
        PackedDataset(path, "00")
    assert error.value.code == "dataset_changed"
    for tensors in (
        {"input_ids": np.zeros(3, np.int32), "loss_mask": np.ones(4, np.uint8), "offsets": np.array([0, 4])},
        {"input_ids": np.zeros(4, np.int32), "loss_mask": np.ones(4, np.uint8), "offsets": np.array([0, 4, 2])},
        {"input_ids": np.zeros(4, np.int32), "loss_mask": np.ones(4, np.uint8)},
    ):
        save_file(tensors, path)
        with pytest.raises(TrainingError) as error:
            PackedDataset(path, hashlib.sha256(path.read_bytes()).hexdigest())
        assert error.value.code == "dataset_unreadable"
    dataset = lengths_dataset(tmp_path, [3, 4])
    dataset.check_token_ids(4)
    with pytest.raises(TrainingError, match="outside 0 to 2"):
        dataset.check_token_ids(3)
    with pytest.raises(TrainingError, match="no example has a trained token") as error:
        dataset_of(tmp_path, [([1, 2, 3], [1, 0, 0])])
    assert error.value.code == "no_trained_tokens"
