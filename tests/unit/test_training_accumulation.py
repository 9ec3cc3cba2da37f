"""However an update is cut it is the same update, and every epoch reads all examples in an order of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fineinfer.data.packed import write_dataset
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.training.dataset import Schedule
from fineinfer.training.trainer import Trainer

from .test_training_step import CONFIG, tiny_decoder

BATCH, ROWS = 16, 37  # the last update of an epoch has 5
SETTINGS = TrainingSettings(
    lora=LoraSpec(r=4, lora_alpha=8, lora_dropout=0.1), batch_size=BATCH, gradient_accumulation_steps=1, n_epochs=1,
    learning_rate=1e-2, warmup_ratio=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("model"), "float64")


def start_job(folder: Path, settings: TrainingSettings) -> StartJob:
    folder.mkdir()
    random = np.random.default_rng(6)
    lengths = random.integers(2, 12, ROWS)
    rows = [
        (random.integers(0, CONFIG["vocab_size"], n).tolist(), [int(t >= n // 3) for t in range(n)]) for n in lengths
    ]
    return StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder / "adapters"), dataset_sha256=write_dataset(folder, rows),
    )  # fmt: skip


def updates(trainer: Trainer) -> list[torch.Tensor]:
    """Gradient of each update, before clipping."""
    gradients = []
    while trainer.step < trainer.total_steps:
        if trainer.remaining_units().total() == 1:
            gradients.append(trainer._state.grads.flat.clone())
        trainer.advance()
    return gradients


@pytest.fixture(scope="module")
def whole(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], Trainer]:
    trainer = Trainer(decoder, start_job(tmp_path_factory.mktemp("whole") / "job", SETTINGS), lambda _t, _i: True, 64)
    return updates(trainer), trainer


@pytest.mark.parametrize("accumulation", range(2, 17))
def test_accumulated_micro_batches_equal_one_large_batch(
    decoder: Decoder, whole: tuple[list[torch.Tensor], Trainer], accumulation: int, tmp_path: Path
) -> None:
    expected, reference = whole
    settings = msgspec.structs.replace(SETTINGS, gradient_accumulation_steps=accumulation)
    trainer = Trainer(decoder, start_job(tmp_path / "job", settings), lambda _t, _i: True, 64)
    assert [len(trainer.schedule.micro_batches(step)) for step in range(3)] == [accumulation] * 2 + [
        min(5, accumulation)
    ]
    gradients = updates(trainer)
    assert len(gradients) == 3
    for one, other in zip(expected, gradients, strict=True):
        assert float(one.abs().max()) > 1e-4
        assert float((one - other).abs().max()) <= 1e-9 * float(one.abs().max())
    for entry, other_entry in zip(reference.log_history, trainer.log_history, strict=True):
        assert other_entry["loss"] == pytest.approx(entry["loss"], rel=1e-9)
        assert other_entry["mean_token_accuracy"] == entry["mean_token_accuracy"]
        assert other_entry["trained_tokens"] == entry["trained_tokens"]
    drift = (reference._state.masters.flat - trainer._state.masters.flat).abs().max()
    assert float(drift) <= 1e-6 * float(reference._state.masters.flat.abs().max())  # Adam divides by small roots


def read_examples(schedule: Schedule, step: int) -> list[int]:
    return [example for part in schedule.micro_batches(step) for example in part]


def test_epochs_are_permutations_that_differ_also_after_a_resume(decoder: Decoder, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, n_epochs=3, gradient_accumulation_steps=0, save_steps=4)
    job = start_job(tmp_path / "job", settings)
    trainer = Trainer(decoder, job, lambda _t, _i: False, 64)
    read: list[list[int]] = []
    load = Schedule.micro_batches
    order = [example for step in range(9) for example in read_examples(trainer.schedule, step)]
    epochs = [order[begin : begin + ROWS] for begin in range(0, 3 * ROWS, ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    while trainer.step < 5:  # in the second epoch
        trainer.advance()
    trainer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "micro_batches", lambda self, step: read.append([step]) or load(self, step))
        resumed = Trainer(decoder, job, lambda _t, _i: False, 64)
        assert resumed.step == 4
        while not resumed.finished:
            resumed.advance()
    assert sorted({step for (step,) in read}) == list(range(4, 9))  # nothing again, nothing left out
    assert [example for step in range(9) for example in read_examples(resumed.schedule, step)] == order
