"""Aborting micro-batches and parking the whole job change no bit of what is trained, wherever it happens."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fineinfer.messages import StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.training import checkpoint as checkpoint_module
from fineinfer.training import parking
from fineinfer.training.checkpoint import CheckpointError
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer
from fineinfer.training.trainer import Trainer

from ..waiting import LIMIT_S
from .test_training_checkpoint import SETTINGS, decoder, run, start_job, state_of, uninterrupted

__all__ = ["decoder", "uninterrupted"]  # fixtures


def parkable(decoder: Decoder, job: StartJob) -> ParkableTrainer:
    return ParkableTrainer(decoder, job, lambda _t, i: i == 0)


@pytest.fixture(params=["disk", "host"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "host":  # as on a GPU
        monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",))
    return str(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_and_parks_change_no_bit(
    decoder: Decoder, uninterrupted: dict[str, Any], place: str, seed: int, tmp_path: Path
) -> None:
    rng, trainer = random.Random(seed), parkable(decoder, start_job(tmp_path / "job"))
    num_aborts = num_parks = 0
    while not trainer.finished:
        if rng.random() < 0.05:
            trainer.abort_micro_batch()
            num_aborts += 1
        elif rng.random() < 0.03:
            trainer.park()
            trainer.park()
            assert trainer.parked and all(t.untyped_storage().nbytes() == 0 for t in trainer._tensors())
            trainer.unpark()
            trainer.unpark()
            num_parks += 1
        trainer.advance()
    assert state_of(trainer) == uninterrupted and num_aborts > 5 and num_parks > 3
    assert not trainer.parked


def test_only_the_micro_batch_is_lost_before_it_adds_to_the_gradient(decoder: Decoder, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, batch_size=3, gradient_accumulation_steps=3)
    trainer = parkable(decoder, start_job(tmp_path / "job", settings))
    while len(trainer._update._begun if trainer._update else []) < 2:
        trainer.advance()
    first, _ = trainer._update._begun
    trainer.advance()
    assert [kind for kind, _ in trainer.lost_by_abort().elements()] == ["embed", "forward"]
    assert trainer.lost_by_park().total() == trainer.lost_by_abort().total() + len(trainer._update._units_of(first))
    left = trainer.remaining_units().total()
    trainer.abort_micro_batch()
    assert trainer.remaining_units().total() == left + 2 and not trainer.micro_batch_open and trainer.begins_micro_batch
    assert trainer.lost_by_abort() == trainer.lost_by_park(), "what is done stays done until the job is parked"
    while trainer.advance().kind != "recompute":
        pass
    assert trainer.left_of_micro_batch().total() == decoder.spec.num_layers - 1
    assert trainer.lost_by_abort() == trainer.lost_by_park()
    trainer.abort_micro_batch()
    assert trainer.at_update_boundary and not trainer.lost_by_park()


def test_a_job_parked_in_host_memory_can_be_written_from_there(
    decoder: Decoder, uninterrupted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",))
    job = start_job(tmp_path / "job")
    trainer = parkable(decoder, job)
    run(trainer, 5)
    trainer.park()
    trainer.save_resume_point()  # as at the end of the server
    resumed = Trainer(decoder, job, lambda _t, _i: True)
    assert resumed.step == 5
    run(resumed, resumed.total_steps)
    assert state_of(resumed) == uninterrupted


def test_a_job_that_cannot_be_written_goes_on_unparked(
    decoder: Decoder, uninterrupted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = parkable(decoder, start_job(tmp_path / "job"))
    run(trainer, 3)
    trainer.advance()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(CheckpointError, match="disk full"):
            trainer.park()
    assert not trainer.parked
    run(trainer, trainer.total_steps)
    assert state_of(trainer) == uninterrupted


def test_a_checkpoint_that_vanished_is_an_error_and_not_a_fresh_start(decoder: Decoder, tmp_path: Path) -> None:
    trainer = parkable(decoder, start_job(tmp_path / "job"))
    run(trainer, 3)
    trainer.park()
    shutil.rmtree(tmp_path / "job/checkpoints")
    with pytest.raises(TrainingError, match="update 3 is gone"):
        trainer.unpark()


def test_an_older_checkpoint_is_gone_on_from(decoder: Decoder, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    trainer = parkable(decoder, start_job(tmp_path / "job"))
    run(trainer, 3)
    trainer.park()
    shutil.rmtree(tmp_path / "job/checkpoints/step-00000003")
    trainer.unpark()
    assert trainer.step == 2
    run(trainer, trainer.total_steps)
    assert state_of(trainer) == uninterrupted


# In a process of its own: which freed pages the C library can give back depends on all that was allocated before.
# Each tensor is larger than any threshold of glibc, so it is mapped alone and its pages leave with it.
MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
import msgspec, torch
sys.path.append(sys.argv[2])  # at the end: kernels/ there is no package
from fineinfer.memory.host import rss_anon_bytes, set_malloc_thresholds, trim_heap
from fineinfer.messages import LoraSpec
from tests.unit.test_training_checkpoint import SETTINGS, load_tiny_decoder, run, start_job
from tests.unit.test_training_parking import parkable

set_malloc_thresholds()
torch.set_num_threads(1)
folder = Path(sys.argv[1])
settings = msgspec.structs.replace(SETTINGS, lora=LoraSpec(r=12288, lora_alpha=1), save_steps=0)
trainer = parkable(load_tiny_decoder(folder), start_job(folder / "job", settings))
run(trainer, 1)
sizes, moved = [tensor.nbytes for tensor in trainer._tensors()], []
for move in (trainer.park, trainer.unpark, trainer.park):
    trim_heap()
    before = rss_anon_bytes()
    move()
    trim_heap()
    moved.append((rss_anon_bytes() - before) / sum(sizes))
json.dump([sizes, moved], sys.stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_the_memory_of_a_parked_job_leaves_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    sizes, moved = json.loads(done.stdout)
    assert len(sizes) == 4 and min(sizes) > 32 << 20
    # of the four tensors that came back the gradient is touched first by the next update
    assert moved == pytest.approx([-1.0, 0.75, -0.75], abs=0.05)
