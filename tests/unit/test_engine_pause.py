"""Pausing a job in mid-step, by a user or a full disk: all memory back, and bit-equal when it goes on."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fineinfer.adapters import peft_io
from fineinfer.adapters.peft_io import content_hash
from fineinfer.engine.memory_ladder import ACTIVATIONS, STATE
from fineinfer.messages import CancelJob, Drain, JobCheckpoint, JobEnded, JobNote, PauseJob, StartJob
from fineinfer.training import checkpoint as checkpoint_module
from fineinfer.training import parking
from fineinfer.training.checkpoint import newest_step, read_newest
from fineinfer.training.trainer_checkpoints import TrainerCheckpoints

from ..waiting import LIMIT_S
from .engine_harness import Harness
from .training_job import SETTINGS, Told, trained, write_job

pytestmark = pytest.mark.usefixtures("one_thread")
LONGER = msgspec.structs.replace(SETTINGS, n_epochs=2)  # 6 updates, a checkpoint after each second one


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("e"), max_loras=2, max_lora_rank=4)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def undisturbed(engine: Harness, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job, told = write_job(tmp_path_factory.mktemp("quiet") / "job", LONGER), Told(engine)
    engine.parts.training.start(job)
    run(engine)
    assert told.end().status == "succeeded" and [m.step for m in told.of(JobCheckpoint)] == [2, 4, 6]
    return trained(job)


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """As on a GPU: jobs are parked in host memory, and written from there by a thread, while the event is set."""
    event, save, begin = threading.Event(), TrainerCheckpoints._save, TrainerCheckpoints._begin_checkpoints

    def gated(self: Any, *args: Any) -> None:
        assert event.wait(LIMIT_S)
        save(self, *args)

    monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",))
    monkeypatch.setattr(TrainerCheckpoints, "_save", gated)
    monkeypatch.setattr(TrainerCheckpoints, "_begin_checkpoints", lambda self: (begin(self), self._write_beside()))
    event.set()
    yield event
    event.set()


def run(engine: Harness, units: int = 10**9) -> None:
    """Units of the job and nothing else."""
    host = engine.parts.training
    while host.trainer is not None and units > 0:
        host.run_unit()
        units -= 1


def send(engine: Harness, message: Any) -> None:
    engine.loop._handle([(b"supervisor", message)])


def has_nothing(engine: Harness) -> bool:
    governor = engine.parts.ladder._governor
    return engine.parts.training.trainer is None and governor.leased(STATE) == governor.leased(ACTIVATIONS) == 0


@pytest.mark.parametrize("place", ["disk", "host"])
def test_random_pauses_change_no_bit(
    engine: Harness, undisturbed: dict[str, Any], place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if place == "host":
        request.getfixturevalue("may_write")
    rng, job, told = random.Random(5), write_job(tmp_path / "job", LONGER), Told(engine)
    host, num_pauses, announced = engine.parts.training, 0, set()
    while True:
        host.start(job)
        run(engine, rng.randrange(1, 40))
        if host.trainer is None:
            break
        num_pauses += 1
        if num_pauses % 2:
            host.trainer.park()
        step, told.messages[:] = host.trainer.step, [m for m in told.messages if not isinstance(m, JobEnded)]
        send(engine, PauseJob(job_id="job"))
        assert has_nothing(engine)
        host.end_pause(wait=True)
        assert told.end() == JobEnded(job_id="job", status="paused")
        assert newest_step(Path(job.job_dir)) == step
        announced |= {message.step for message in told.of(JobCheckpoint)}
    assert told.messages[-1].status == "succeeded" and trained(job) == undisturbed
    assert num_pauses > 4 and announced | {m.step for m in told.of(JobCheckpoint)} == {2, 4, 6}


def test_before_the_first_update_there_is_nothing_to_write(engine: Harness, tmp_path: Path) -> None:
    job, told = write_job(tmp_path / "job", LONGER), Told(engine)
    engine.parts.training.start(job)
    run(engine, 3)
    before = sorted(tmp_path.rglob("*"))
    engine.send(PauseJob(job_id="job"))
    engine.loop.step()
    assert told.end().status == "paused" and has_nothing(engine) and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("how", ["pause", "drain"])
def test_a_live_job_leaves_the_version_that_its_name_meant(engine: Harness, tmp_path: Path, how: str) -> None:
    for serve, steps in (("live", [1]), ("checkpoint", [])):
        job = msgspec.structs.replace(write_job(tmp_path / serve, LONGER), serve=serve)
        host, told = engine.parts.training, Told(engine)
        host.start(job)
        while host.trainer.step < 1:
            run(engine, 1)
        run(engine, 2)
        if how == "pause":
            send(engine, PauseJob(job_id="job"))
            host.end_pause(wait=True)
        else:
            host.park()
        left = told.of(JobCheckpoint)
        assert has_nothing(engine) and [checkpoint.step for checkpoint in left] == steps
        assert all(content_hash(Path(checkpoint.directory)) == checkpoint.version for checkpoint in left)


def test_a_job_that_does_not_run_is_paused_and_the_one_that_does_goes_on(engine: Harness, tmp_path: Path) -> None:
    told = Told(engine)
    engine.parts.training.start(write_job(tmp_path / "job"))
    send(engine, PauseJob(job_id="other"))
    assert told.end() == JobEnded(job_id="other", status="paused")
    assert engine.parts.training.trainer is not None
    send(engine, CancelJob(job_id="job"))
    assert has_nothing(engine)


def test_a_resume_point_is_written_beside_requests(
    engine: Harness, undisturbed: dict[str, Any], may_write: threading.Event, tmp_path: Path
) -> None:
    job, told, host = write_job(tmp_path / "job", LONGER), Told(engine), engine.parts.training
    host.start(job)
    while host.trainer.step < 3 or host.trainer.checkpoint_due:
        run(engine, 1)
    may_write.clear()
    while not (host.trainer.step == 4 and host.trainer._write):
        run(engine, 1)
    while host.trainer.step < 5:
        run(engine, 1)
    send(engine, PauseJob(job_id="job"))
    send(engine, PauseJob(job_id="job"))
    assert has_nothing(engine) and not told.of(JobEnded) and newest_step(Path(job.job_dir)) == 2
    engine.add("r", [5] * 20, max_tokens=5)
    engine.run()
    assert len(engine.tokens("r")) == 5 and not told.of(JobEnded)
    may_write.set()
    host._pausing.written.result()
    engine.loop.step()
    assert told.end().status == "paused" and newest_step(Path(job.job_dir)) == 5
    assert [message.step for message in told.of(JobCheckpoint)] == [2, 4], "the one on its way came to its end"
    engine.outputs.clear()
    host.start(job)
    run(engine)
    assert trained(job) == undisturbed


@pytest.mark.parametrize(
    "message", [CancelJob(job_id="job"), Drain(timeout_s=0.0), None], ids=["cancel", "drain", "start"]
)
def test_what_comes_while_the_resume_point_is_written(
    engine: Harness, may_write: threading.Event, message: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.loop, "_drain_until_s", None)
    monkeypatch.setattr(engine.parts.desk, "draining", False)
    job, told, host = write_job(tmp_path / "job", LONGER), Told(engine), engine.parts.training
    host.start(job)
    while host.trainer.step < 3:
        run(engine, 1)
    may_write.clear()
    send(engine, PauseJob(job_id="job"))
    if not isinstance(message, CancelJob):
        threading.Timer(0.05, may_write.set).start()
    send(engine, message or job)
    if message is None:
        assert told.end().status == "paused" and host.trainer.step == 3
        send(engine, CancelJob(job_id="job"))
    else:
        assert told.end().status == ("cancelled" if isinstance(message, CancelJob) else "paused")
    may_write.set()
    host.end_pause(wait=True)
    assert len(told.of(JobEnded)) == 1 + (message is None) and has_nothing(engine)


# ---------------------------------------------------------------- a full disk


class Disk:
    """The process's disk, which is full from a write on: what adds to it fails, what takes away does not."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
        self._patch, self._number, self.num_writes, self.room = patch, number, 0, 10**9
        for owner, name in (
            (os, "fsync"), (os, "mkdir"), (Path, "write_text"), (shutil, "copyfile"), (checkpoint_module, "save_file"),
            (peft_io, "save_file"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._limited(name, getattr(owner, name)))

    def _limited(self, name: str, real: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_writes += 1
            if self.num_writes <= self.room:
                return real(*args, **kwargs)
            if name in ("write_text", "copyfile"):  # some of it is there
                Path(args[name == "copyfile"]).write_bytes(b"{")
            if name == "save_file":  # as safetensors says it
                raise checkpoint_module.SafetensorError(
                    f"Error while serializing: I/O error: No space left on device (os error {self._number})"
                )
            raise OSError(self._number, os.strerror(self._number), str(args[0]))

        return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_at_any_write_pauses_the_job(
    engine: Harness, undisturbed: dict[str, Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, told, host = write_job(tmp_path / "base/job", LONGER), Told(engine), engine.parts.training
    host.start(base)
    while host.trainer.step < 5:
        run(engine, 1)
    send(engine, PauseJob(job_id="job"))  # 4 and 5 are there; 6, the last, comes in the place of 4
    shape = host._decoder.spec
    for room in range(1000):
        folder = tmp_path / str(room)
        shutil.copytree(tmp_path / "base", folder)
        job = msgspec.structs.replace(base, job_dir=str(folder / "job"), adapters_dir=str(folder / "adapters"))
        told.messages.clear()
        with monkeypatch.context() as patch:
            disk = Disk(patch, number)
            host.start(job)
            disk.num_writes, disk.room = 0, room
            run(engine)
        if told.end().status == "succeeded":
            break
        assert has_nothing(engine)
        ended = told.end()
        assert (ended.status, ended.error_code) == ("paused", "disk_full")
        assert os.strerror(number) in ended.error_message
        assert str(tmp_path) not in ended.error_message
        saved = read_newest(Path(job.job_dir), shape, 4)
        assert saved is not None and saved.step in (5, 6)
        assert "make room and resume the job, it goes on from the checkpoint of update" in ended.error_message
        for version in Path(job.adapters_dir).glob("[!.]*"):
            assert content_hash(version) == version.name
        if room % 3 == 0:  # space is back
            host.start(job)
            run(engine)
            assert told.messages[-1].status == "succeeded" and trained(job) == undisturbed
    assert trained(job) == undisturbed and room > 15, "that many writes could fail"


def test_a_job_that_cannot_be_written_is_paused_all_the_same(
    engine: Harness, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, told, host = write_job(tmp_path / "job", LONGER), Told(engine), engine.parts.training
    host.start(job)
    while host.trainer.step < 3:
        run(engine, 1)
    run(engine, 2)
    with monkeypatch.context() as patch:
        Disk(patch).room = 3
        send(engine, PauseJob(job_id="job"))
    assert told.end() == JobEnded(job_id="job", status="paused") and has_nothing(engine)
    note = told.of(JobNote)[-1]
    assert note.level == "error" and "No space left" in note.message and "run again" in note.message
    host.start(job)
    assert host.trainer.step == 2
    run(engine)
    assert trained(job) == undisturbed


def test_a_broken_adapter_fails_the_job_that_is_to_pause(engine: Harness, tmp_path: Path) -> None:
    told, host = Told(engine), engine.parts.training
    host.start(write_job(tmp_path / "job"))
    while host.trainer.step < 1:
        run(engine, 1)
    host.trainer._state.masters.flat.fill_(float("nan"))
    send(engine, PauseJob(job_id="job"))
    assert (told.end().status, told.end().error_code) == ("failed", "non_finite") and has_nothing(engine)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_disk_space_is_asked_for_before_the_first_update(
    engine: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"bytes": 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, free["bytes"]))
    settings = msgspec.structs.replace(LONGER, lora=msgspec.structs.replace(LONGER.lora, r=64))
    job: StartJob = write_job(tmp_path / "job", settings)
    told, host, before = Told(engine), engine.parts.training, sorted(tmp_path.rglob("*"))
    host.start(job)
    ended = told.end()
    assert (ended.status, ended.error_code) == ("paused", "disk_full") and has_nothing(engine)
    assert sorted(tmp_path.rglob("*")) == before
    assert "3 x checkpoint 0.7 MiB (adapter 0.2 MiB + optimizer 0.5 MiB + loss trace 0.0 MiB)" in ended.error_message
    assert "3 x adapter version 0.2 MiB + 64.0 MiB to spare" in ended.error_message
    needed = next(n for n in range(64 << 20, 1 << 30, 1 << 12) if enough(host, job, free, n))
    told.messages.clear()
    host.start(job)
    most = checkpoints = 0
    while host.trainer is not None:
        run(engine, 1)
        checkpoints = size_of(tmp_path / "job/checkpoints")
        most = max(most, checkpoints + size_of(tmp_path / "adapters"))
    assert told.messages[-1].status == "succeeded"
    used = most + checkpoints // 2 + (64 << 20)  # a third checkpoint while it is written
    assert needed == pytest.approx(used, rel=1e-3)


def enough(host: Any, job: StartJob, free: dict[str, int], num_bytes: int) -> bool:
    free["bytes"] = num_bytes
    host.start(job)
    started = host.trainer is not None
    host.cancel(job.job_id)
    return started


def test_a_resumed_job_asks_for_what_it_still_writes(
    engine: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, told, host = write_job(tmp_path / "job", LONGER), Told(engine), engine.parts.training
    host.start(job)
    while host.trainer.step < 5:
        run(engine, 1)
    send(engine, PauseJob(job_id="job"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    host.start(job)
    assert (
        "1 x checkpoint" in told.messages[-1].error_message and "1 x adapter version" in told.messages[-1].error_message
    )
