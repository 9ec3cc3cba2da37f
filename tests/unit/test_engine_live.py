"""A job's name served live from training, in a whole engine: after each update, at its end, and over pauses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fineinfer.engine import adapter_traffic, inbox
from fineinfer.messages import CancelJob, JobCheckpoint, JobEnded, PauseJob, RemoveAdapter, SetAdapter, StartJob
from fineinfer.training import parking
from fineinfer.training.checkpoint import CheckpointError
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer
from fineinfer.training.trainer_checkpoints import TrainerCheckpoints

from .engine_harness import Harness
from .tagged_engine import one_thread  # noqa: F401 - a fixture
from .test_engine_adapters import PROMPT, make_engines  # noqa: F401 - a fixture
from .training_job import SETTINGS, Told, write_job


@pytest.fixture
def every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_traffic, "LIVE_COST", 1.0)


def live_job(tmp_path: Path, **changes: Any) -> StartJob:
    settings = msgspec.structs.replace(SETTINGS, n_epochs=2, **changes)
    return msgspec.structs.replace(write_job(tmp_path / "job", settings), serve="live")


def train_live(make: Callable[..., Harness], tmp_path: Path) -> tuple[Harness, Told]:
    """An engine that begins a live job, and what it tells the supervisor."""
    harness = make()
    told = Told(harness)
    harness.parts.training.start(live_job(tmp_path))
    return harness, told


def train_until(harness: Harness, step: int) -> None:
    """Until the job has finished so many updates and the engine has had a turn after."""
    trainer = harness.parts.training.trainer
    while trainer is not None and harness.parts.training.trainer is trainer and trainer.step < step:
        harness.loop.step()
    harness.loop.step()


def serving(harness: Harness) -> str | None:
    return harness.parts.adapters.current().get("lora")


def test_what_is_trained_is_served_after_each_update_and_requests_keep_theirs(
    make: Callable[..., Harness], tmp_path: Path, every_update: None
) -> None:
    harness, told = train_live(make, tmp_path)
    harness.loop.step()
    assert serving(harness) == "live-job-0", "the name is there before the first update"
    train_until(harness, 2)
    harness.add("early", PROMPT, "lora", max_tokens=40)

    def train_beside(turn: int) -> None:
        trainer = harness.parts.training.trainer
        for _ in range(40):
            if trainer is not None and trainer.step < 4:
                harness.parts.training.run_unit()
        if turn == 25:
            harness.add("late", PROMPT, "lora", max_tokens=8)

    harness.run(train_beside)
    (early,), (late,) = ({o.adapter_step for o in harness.outputs[name]} for name in ("early", "late"))
    assert early == 2 and late is not None and late > 2
    assert harness.outputs["early"][0].adapter_version == "live-job-2"
    train_until(harness, 99)
    checkpoints = {message.step: message for message in told.of(JobCheckpoint)}
    assert [ended.status for ended in told.of(JobEnded)] == ["succeeded"]
    last = max(checkpoints)
    assert serving(harness) == f"live-job-{last}", "until the result is registered"
    for step in (2, last):
        c = checkpoints[step]
        harness.send(SetAdapter(name="lora", version=c.version, step=step, directory=c.directory))
    harness.add("again", PROMPT, "lora@2", max_tokens=40)
    harness.run()
    assert serving(harness) == checkpoints[last].version
    assert harness.tokens("again") == harness.tokens("early"), "live weights are those of the checkpoint"
    assert len({o.adapter_version for o in harness.outputs["early"]}) == 1


def test_a_result_that_is_registered_in_the_turn_of_the_job_s_end_takes_the_name(
    make: Callable[..., Harness], tmp_path: Path, every_update: None
) -> None:
    harness, told = train_live(make, tmp_path)
    harness.loop.step()
    while harness.parts.training.trainer is not None:
        harness.loop.step()
    assert told.of(JobEnded)[0].status == "succeeded"
    result = told.of(JobCheckpoint)[-1]
    harness.send(SetAdapter(name="lora", version=result.version, step=result.step, directory=result.directory))
    for _ in range(5):  # its folder may be read meanwhile
        harness.loop.step()
    assert serving(harness) == result.version


def test_an_older_checkpoint_does_not_move_a_live_name_back_and_a_cancelled_job_does(
    make: Callable[..., Harness], tmp_path: Path, every_update: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "ADAPTER_GRACE_S", 0.0)
    harness, told = train_live(make, tmp_path)
    train_until(harness, 3)
    (checkpoint,) = told.of(JobCheckpoint)
    message = SetAdapter(name="lora", version=checkpoint.version, step=2, directory=checkpoint.directory)
    harness.send(message)
    harness.loop.step()
    assert serving(harness) == "live-job-3"
    harness.send(CancelJob(job_id="job"))
    harness.loop.step()
    harness.loop.step()
    assert serving(harness) == checkpoint.version
    harness.send(RemoveAdapter(name="lora"))
    harness.loop.step()
    harness.add("gone", PROMPT, "lora", max_tokens=2)
    harness.run()
    assert harness.outputs["gone"][-1].error_code == "model_not_found"


@pytest.mark.parametrize("step", [0, 2])
def test_a_live_job_that_pauses_and_goes_on_is_served_again(
    make: Callable[..., Harness], tmp_path: Path, every_update: None, step: int
) -> None:
    harness, job = make(), live_job(tmp_path)
    told, training = Told(harness), harness.parts.training
    training.start(job)
    train_until(harness, step)
    held = serving(harness)
    harness.add("early", PROMPT, "lora", max_tokens=60)
    seen: list[str | None] = []

    def pause_and_resume(turn: int) -> None:
        if turn in (5, 15, 25):  # the same step is placed again while a request still uses its first copy
            harness.send(PauseJob(job_id="job"))
        elif turn in (10, 20, 30):
            training.start(job)
        seen.append(serving(harness))

    harness.run(pause_and_resume)
    assert held == f"live-job-{step}" and {o.adapter_version for o in harness.outputs["early"]} == {held}
    assert f"live-job-{step}.1" in seen
    if step == 0:  # else the name keeps what the pause has written, in the slot that the request leaves
        assert f"live-job-{step}.3" in seen
    train_until(harness, 99)
    assert [ended.status for ended in told.of(JobEnded)] == ["paused"] * 3 + ["succeeded"]
    assert harness.parts.adapters.num_pinned() == 0


@pytest.fixture(params=["at once", "beside requests"])
def pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pause is written: in the engine's turn, or, as on a GPU, from host memory by a thread."""
    if request.param == "beside requests":
        monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",))
        begin = TrainerCheckpoints._begin_checkpoints
        monkeypatch.setattr(TrainerCheckpoints, "_begin_checkpoints", lambda self: (begin(self), self._write_beside()))


def turns_until_paused(harness: Harness, told: Told) -> list[str | None]:
    """What the name means after each turn until the job has ended, and after two more."""
    seen, left = [], 2
    while left:
        harness.loop.step()
        seen.append(serving(harness))
        left -= bool(told.of(JobEnded))
    return seen


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_live_name_waits_for_what_a_pause_writes(
    make: Callable[..., Harness], tmp_path: Path, every_update: None, pauses: None, step: int
) -> None:
    harness, told = train_live(make, tmp_path)
    train_until(harness, step)
    harness.send(PauseJob(job_id="job"))
    seen = turns_until_paused(harness, told)
    assert [ended.status for ended in told.of(JobEnded)] == ["paused"]
    if step == 0:  # nothing was learnt, nothing is written
        assert seen[-1] is None and not told.of(JobCheckpoint)
        return
    assert set(seen) == {f"live-job-{step}"}
    result = told.of(JobCheckpoint)[-1]
    assert result.step == step
    harness.send(SetAdapter(name="lora", version=result.version, step=step, directory=result.directory))
    for _ in range(5):
        harness.loop.step()
    assert serving(harness) == result.version


@pytest.mark.parametrize(
    ("error", "status"), [(CheckpointError("full"), "paused"), (TrainingError("nan", "non_finite"), "failed")]
)
def test_a_live_name_goes_back_if_a_pause_cannot_be_written(
    make: Callable[..., Harness], tmp_path: Path, every_update: None, pauses: None, monkeypatch: pytest.MonkeyPatch,
    error: TrainingError, status: str,
) -> None:  # fmt: skip
    harness, told = train_live(make, tmp_path)
    while not told.of(JobCheckpoint):  # a thread may write it
        harness.loop.step()
    (checkpoint,) = told.of(JobCheckpoint)
    harness.send(SetAdapter(name="lora", version=checkpoint.version, step=2, directory=checkpoint.directory))
    train_until(harness, 3)
    assert serving(harness) in ("live-job-3", "live-job-4")

    def fail(self: ParkableTrainer) -> None:
        raise error

    monkeypatch.setattr(ParkableTrainer, "save_and_leave", fail)
    harness.send(PauseJob(job_id="job"))
    turns_until_paused(harness, told)
    assert told.of(JobEnded)[-1].status == status and serving(harness) == checkpoint.version


@pytest.mark.parametrize("where", ["norm", "place", "end"])
def test_live_serving_that_breaks_leaves_the_engine_and_the_job_alone(
    make: Callable[..., Harness], tmp_path: Path, every_update: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    harness, told = train_live(make, tmp_path)
    train_until(harness, 1)

    def broken(*_: Any) -> bool:
        raise RuntimeError("a copy that breaks")

    parts = {
        "norm": (adapter_traffic, "_send_largest"),
        "place": (harness.parts.adapters, "place"),
        "end": (adapter_traffic.LiveAdapter, "_end"),
    }
    monkeypatch.setattr(*parts[where], broken)
    train_until(harness, 99)
    assert harness.parts.adapters.num_pinned() == 0
    assert [ended.status for ended in told.of(JobEnded)] == ["succeeded"] and serving(harness) is None
    assert len(told.of(JobCheckpoint)) > 1


def test_a_job_that_serves_no_more_than_checkpoints_is_not_served_live(
    make: Callable[..., Harness], tmp_path: Path, every_update: None
) -> None:
    harness = make()
    harness.parts.training.start(msgspec.structs.replace(live_job(tmp_path), serve="checkpoint"))
    train_until(harness, 3)
    assert serving(harness) is None and harness.parts.adapters.num_used == 0


def test_weights_that_are_not_finite_are_not_served(
    make: Callable[..., Harness], tmp_path: Path, every_update: None
) -> None:
    harness, _ = train_live(make, tmp_path)
    train_until(harness, 1)
    assert serving(harness) == "live-job-1"
    trainer = harness.parts.training.trainer
    assert trainer is not None
    trainer.serving_weights.flat[3] = float("nan")
    trainer.cursor.step += 1
    harness.parts.adapter_traffic.turn(harness.parts.training)
    assert serving(harness) == "live-job-1" and harness.parts.adapters.num_pinned() == 0


def test_copies_take_a_small_part_of_the_time(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_traffic, "LIVE_COST", 1e-9)
    harness, _ = train_live(make, tmp_path)
    train_until(harness, 4)
    assert serving(harness) == "live-job-0", "the next copy is not due for ages"
