"""A device or a host that has no memory to give, whatever the leases say: jobs wait, try again, pause; none fails."""

# ruff: noqa: F811 (fixtures of another file)

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fineinfer.engine import job_memory, memory_ladder, rungs
from fineinfer.engine.job_memory import MAX_RETRIES, JobNeed, is_out_of_memory
from fineinfer.engine.memory_ladder import ACTIVATIONS, STATE
from fineinfer.engine.rungs import ABORT, OFFLOAD, PARK, REFUSED
from fineinfer.messages import CancelJob, Drain, JobEnded, JobProgress, JobStarted, LoraSpec, PauseJob, SetBudget
from fineinfer.training import offload, parking
from fineinfer.training.checkpoint import newest_step
from fineinfer.training.ops import REFERENCE_OPS
from fineinfer.training.parking import ParkableTrainer
from fineinfer.training.state import AdapterState
from fineinfer.training.trainer import Trainer

from ..waiting import LIMIT_S
from .engine_harness import BYTES_PER_SLOT, Harness
from .test_engine_ladder import finish_job, make, train, undisturbed, units_run  # noqa: F401
from .test_training_step import start_job, tiny_decoder
from .training_job import SETTINGS, Told, trained, write_job

pytestmark = pytest.mark.usefixtures("one_thread")
CUDA_TEXT = "CUDA out of memory. Tried to allocate 98.00 MiB.\nGPU 0 has a total capacity of"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_memory, "RETRY_S", 0.01)


@pytest.fixture
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are parked as on a GPU."""
    monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",))


def no_host_memory(*_args: Any) -> Any:
    raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")


class Failing:
    """A method that finds no memory the first few times."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, times: int, after: bool = False) -> None:
        self.left, real = times, getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left <= 0:
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            self.left -= 1
            raise torch.OutOfMemoryError(CUDA_TEXT)

        patch.setattr(owner, name, call)


def has_nothing(harness: Harness) -> bool:
    governor = harness.parts.ladder._governor
    return governor.leased(STATE) == governor.leased(ACTIVATIONS) == 0


def lower_budget(harness: Harness) -> None:
    """So far that there is room for the smallest pool alone."""
    governor = harness.parts.ladder._governor
    fixed = sum(governor.leased(owner) for owner in ("weights", "workspace", "adapters"))
    harness.send(SetBudget(num_bytes=fixed + 64 * BYTES_PER_SLOT))
    harness.loop.step()


# ---------------------------------------------------------------- rungs that cannot be taken


@pytest.mark.parametrize("asked_by", ["budget", "requests"])
def test_a_job_that_cannot_be_parked_for_want_of_host_memory_goes_on(
    make: Callable[..., Harness], undisturbed: dict[str, object], in_host_memory: None, asked_by: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    harness, job = make(0), write_job(tmp_path / "job")
    told, ladder = Told(harness), harness.parts.ladder
    harness.parts.training.start(job)
    train(harness, units_run(harness, "embed", "forward"))
    to_host, budget = parking._to_host, ladder._governor.budget_bytes
    monkeypatch.setattr(parking, "_to_host", no_host_memory)
    if asked_by == "budget":
        lower_budget(harness)
    else:
        for i in range(7):
            harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
        harness.run()
    assert ladder.steps_taken[REFUSED] == 1 and not ladder._rungs.available(PARK, time.monotonic())
    assert any("cudaHostAlloc" in note for note in told.notes())
    monkeypatch.setattr(parking, "_to_host", to_host)
    monkeypatch.setattr(rungs, "RUNG_RETRY_S", 0.0)
    ladder._rungs._missing_until_s.clear()
    if asked_by == "budget":
        harness.loop.step()
        assert harness.parts.training.trainer.parked, "it is tried again"
        harness.send(SetBudget(num_bytes=budget))
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_inputs_that_the_host_has_no_memory_for_are_given_up(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "OFFLOADING_DEVICES", ("cpu",))
    monkeypatch.setattr(memory_ladder, "cheapest", lambda all_, _: next((r for r in all_ if r.name == OFFLOAD), None))
    harness, job = make(8 << 20), write_job(tmp_path / "job")
    harness.parts.training.start(job)
    trainer, ladder = harness.parts.training.trainer, harness.parts.ladder
    train(harness, units_run(harness, "forward", "forward"))
    Failing(monkeypatch, offload.HostStore, "put", 10**9)
    ladder._descend(trainer, 1, 0.0, 0)
    assert not trainer.micro_batch_open and ladder._governor.leased(ACTIVATIONS) == 0
    assert ladder.steps_taken[REFUSED] == ladder.steps_taken[ABORT] == 1 and not ladder.steps_taken[OFFLOAD]
    finish_job(harness)
    assert trained(job) == undisturbed


@pytest.mark.parametrize("beside", [False, True])
def test_a_job_is_paused_although_the_host_has_no_memory_for_it(
    make: Callable[..., Harness], in_host_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    if beside:
        begin = Trainer._begin_checkpoints
        monkeypatch.setattr(Trainer, "_begin_checkpoints", lambda self: (begin(self), self._write_beside()))
    harness, job = make(1 << 30), write_job(tmp_path / "job")
    told, host = Told(harness), harness.parts.training
    host.start(job)
    train(harness, lambda: host.trainer.step == 1)
    monkeypatch.setattr(parking, "_to_host", no_host_memory)
    host.pause("job")
    host.end_pause(wait=True)
    assert told.end() == JobEnded(job_id="job", status="paused") and newest_step(Path(job.job_dir)) == 1


def test_a_pause_that_finds_no_memory_at_all_is_a_pause(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(1 << 30)
    told, host = Told(harness), harness.parts.training
    host.start(write_job(tmp_path / "job"))
    train(harness, lambda: host.trainer.step == 1)
    Failing(monkeypatch, Trainer, "_save", 10**9)
    host.pause("job")
    assert told.end() == JobEnded(job_id="job", status="paused") and "run again" in told.notes()[-1]


# ---------------------------------------------------------------- no memory for a unit, a job that begins or goes on


UNITS = {"unit": (ParkableTrainer, "advance"), "going on": (AdapterState, "restore"), "making": (Trainer, "__init__")}


@pytest.mark.parametrize("place", ["disk", "host"])
@pytest.mark.parametrize("what", [*UNITS, "optimizer", "half an optimizer step"])
def test_a_job_that_finds_no_memory_gives_all_back_and_tries_again(
    make: Callable[..., Harness], undisturbed: dict[str, object], what: str, place: str, tmp_path: Path,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if place == "host":
        request.getfixturevalue("in_host_memory")
    harness, job = make(1 << 30), write_job(tmp_path / "job")
    told, host, ladder = Told(harness), harness.parts.training, harness.parts.ladder
    if what != "making":
        host.start(job)
        train(harness, units_run(harness, "embed", "forward"))
        if what == "going on":
            ladder._descend(host.trainer, 1 << 40, 0.0, floor=0, forced=True)
            assert host.trainer.parked
    if "optimizer" in what:
        failing = Failing(monkeypatch, AdapterState, "apply", 2, after=what.startswith("half"))
    else:
        failing = Failing(monkeypatch, *UNITS[what], 2)
    ends = time.monotonic() + 30
    while failing.left == 2:
        assert time.monotonic() < ends
        if what == "making":
            host.start(job)
        elif not host.run_unit():
            harness.loop.step()
    assert has_nothing(harness) and host.job is not None and not told.of(JobEnded)
    assert "tried again in 0 s: CUDA out of memory. Tried to allocate 98.00 MiB." in told.notes()[-1]
    if host.trainer is not None:
        assert host.trainer.parked and host.trainer._state.masters.flat.untyped_storage().nbytes() == 0
    finish_job(harness)
    assert failing.left == 0 and told.end().status == "succeeded" and trained(job) == undisturbed


def test_a_job_goes_on_from_a_checkpoint_that_was_being_written(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, save, begin = threading.Event(), Trainer._save, Trainer._begin_checkpoints

    def gated(*args: Any) -> None:
        assert may_write.wait(LIMIT_S)
        save(*args)

    monkeypatch.setattr(Trainer, "_save", gated)
    monkeypatch.setattr(Trainer, "_begin_checkpoints", lambda self: (begin(self), self._write_beside()))
    harness, job = make(1 << 30), write_job(tmp_path / "job")
    told, host = Told(harness), harness.parts.training
    host.start(job)
    train(harness, lambda: host.trainer.step == 2 and host.trainer.micro_batch_open)
    Failing(monkeypatch, AdapterState, "apply", 1, after=True)
    timer = threading.Timer(0.2, may_write.set)
    timer.start()
    train(harness, lambda: True if host.trainer is None else host.trainer.step > 2)
    assert host.trainer is None and host.job is not None and newest_step(Path(job.job_dir)) == 2
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


@pytest.mark.parametrize("what", UNITS)
def test_in_the_end_it_is_paused_and_can_be_resumed(
    make: Callable[..., Harness], undisturbed: dict[str, object], what: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    harness, job = make(1 << 30), write_job(tmp_path / "job")
    told, host = Told(harness), harness.parts.training
    if what != "making":
        host.start(job)
        train(harness, lambda: host.trainer.step == 1)
        if what == "going on":
            host.trainer.park()
            harness.parts.ladder.let_go()
    with monkeypatch.context() as patch:
        failing = Failing(patch, *UNITS[what], 10**9)
        host.start(job)
        finish_job(harness)
    assert 10**9 - failing.left == MAX_RETRIES + 1 and has_nothing(harness)
    ended = told.end()
    assert (ended.status, ended.error_code) == ("paused", "out_of_memory")
    assert f"{MAX_RETRIES + 1} times: CUDA out of memory" in ended.error_message
    assert newest_step(Path(job.job_dir)) == (what != "making")
    told.messages.clear()
    host.start(job)
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_tries_count_from_the_last_update_on(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(1 << 30)
    told, host, advance, failed = Told(harness), harness.parts.training, ParkableTrainer.advance, set()

    def once_an_update(trainer: ParkableTrainer) -> Any:
        if trainer.step not in failed and not trainer.at_update_boundary:
            failed.add(trainer.step)
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return advance(trainer)

    monkeypatch.setattr(ParkableTrainer, "advance", once_an_update)
    host.start(write_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, n_epochs=MAX_RETRIES)))
    finish_job(harness)
    assert len(failed) > MAX_RETRIES and told.end().status == "succeeded"
    assert [progress.step for progress in told.of(JobProgress)] == list(range(1, 3 * MAX_RETRIES + 1))


def test_what_counts_as_no_memory() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError(CUDA_TEXT), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error)
    for other in (RuntimeError("device-side assert triggered"), ValueError("out of memory"), OSError("disk")):
        assert not is_out_of_memory(other)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


# ---------------------------------------------------------------- a budget that is too small for a while


@pytest.mark.parametrize("progress", [False, True])
def test_a_job_resumed_under_a_lowered_budget_is_paused(
    make: Callable[..., Harness], undisturbed: dict[str, object], progress: bool, tmp_path: Path
) -> None:
    harness, job = make(1 << 20), write_job(tmp_path / "job")
    told, host, budget = Told(harness), harness.parts.training, harness.parts.ladder._governor.budget_bytes
    if progress:
        host.start(job)
        train(harness, lambda: host.trainer.step == 2)
        host.pause("job")
        told.messages.clear()
    lower_budget(harness)
    host.start(job)
    ended = told.end()
    assert (ended.status, ended.error_code) == ("paused", "out_of_memory") and has_nothing(harness)
    assert "the job needs 0.1 MiB" in ended.error_message and "lower lora.r" not in ended.error_message
    told.messages.clear()
    harness.send(SetBudget(num_bytes=budget))
    harness.loop.step()
    host.start(job)
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_a_job_with_checkpoints_is_paused_in_an_engine_that_is_smaller(
    make: Callable[..., Harness], tmp_path: Path
) -> None:
    large, job = make(1 << 20), write_job(tmp_path / "job")
    large.parts.training.start(job)
    train(large, lambda: large.parts.training.trainer.step == 1)
    large.parts.training.pause("job")
    small = make(0)
    told, ladder = Told(small), small.parts.ladder
    shares = ladder.shares()
    ladder._largest_budget_bytes = sum(shares.values()) - shares["budget"] + 100_000  # enough for the state alone
    ladder._governor.set_budget(ladder._largest_budget_bytes)
    small.parts.training.start(job)
    assert (told.end().status, told.end().error_code) == ("paused", "out_of_memory")
    assert "largest micro-batch" in told.end().error_message and has_nothing(small)


# ---------------------------------------------------------------- leased before it is used


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_a_trainer_will_hold_is_known_before_it_is_made(tmp_path: Path, dtype: str, fused: bool) -> None:
    decoder, job = tiny_decoder(tmp_path / "model", dtype), start_job(tmp_path / "job", SETTINGS)
    trainer = Trainer(decoder, job, lambda _t, _i: True, ops=REFERENCE_OPS if fused else None)
    assert JobNeed.of_state(job, decoder, fused) == JobNeed(trainer.state_bytes)


def test_an_adapter_that_cannot_be_is_refused_by_the_trainer(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(1 << 20)
    told, lora = Told(harness), LoraSpec(r=4, lora_alpha=8, target_modules=("nothing",))
    harness.parts.training.start(write_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, lora=lora)))
    assert (told.end().status, told.end().error_code) == ("failed", "invalid_hyperparameters")


def test_memory_is_leased_before_a_job_takes_it(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, job = make(0), write_job(tmp_path / "job")
    host, governor, seen, init = harness.parts.training, harness.parts.ladder._governor, [], AdapterState.__init__

    def looking(state: AdapterState, *args: Any, **kwargs: Any) -> None:
        init(state, *args, **kwargs)
        seen.append(governor.leased(STATE) >= state.num_bytes and governor.free_bytes >= 0)

    monkeypatch.setattr(AdapterState, "__init__", looking)
    host.start(job)
    train(harness, lambda: host.trainer.step == 1)
    host.pause("job")
    host.start(job)
    assert seen == [True, True]


@pytest.fixture
def waiting(make: Callable[..., Harness], tmp_path: Path) -> Iterator[Harness]:
    """An engine whose requests have all memory when a job comes, so that nothing of it is made."""
    harness = make(0)
    for i in range(7):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    while len(harness.parts.scheduler.running) < 7:
        harness.loop.step()
    harness.parts.training.start(write_job(tmp_path / "job"))
    assert harness.parts.training.job is not None and harness.parts.training.trainer is None and has_nothing(harness)
    yield harness
    harness.run()
    assert harness.parts.training.job is None


def test_a_job_that_waits_unmade_can_be_cancelled(waiting: Harness) -> None:
    told = Told(waiting)
    waiting.loop._handle([(b"s", CancelJob(job_id="job"))])
    assert told.end() == JobEnded(job_id="job", status="cancelled")


def test_a_job_that_waits_unmade_can_be_paused(waiting: Harness) -> None:
    told = Told(waiting)
    waiting.loop._handle([(b"s", PauseJob(job_id="other")), (b"s", PauseJob(job_id="job"))])
    assert told.of(JobEnded) == [JobEnded(job_id=name, status="paused") for name in ("other", "job")]


def test_a_job_that_waits_unmade_goes_on_later_after_a_drain(waiting: Harness) -> None:
    told = Told(waiting)
    waiting.loop._handle([(b"s", Drain(timeout_s=60.0))])
    assert not told.of(JobEnded) and waiting.parts.training.job is None


def test_no_other_job_comes_before_one_that_waits_unmade(
    waiting: Harness, undisturbed: dict[str, object], tmp_path: Path
) -> None:  # fmt: skip
    told, host = Told(waiting), waiting.parts.training
    host.start(msgspec.structs.replace(host.job, job_id="other"))
    assert told.end().error_code == "job_state_conflict"
    job = host.job
    host.start(job)
    told.messages.clear()
    waiting.run()
    finish_job(waiting)
    assert len(told.of(JobStarted)) == 1 and told.end().status == "succeeded" and trained(job) == undisturbed


# ---------------------------------------------------------------- while requests wait for memory


def test_only_a_micro_batch_that_begins_waits_for_requests(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(1 << 20)
    host, ladder, waited = harness.parts.training, harness.parts.ladder, set()
    host.start(write_job(tmp_path / "job"))
    while host.trainer is not None:
        trainer, ladder._hold_until_s = host.trainer, 1e12
        begins, boundary = trainer.begins_micro_batch, trainer.at_update_boundary
        assert host.state(time.monotonic()).ready != begins
        waited.add((begins, boundary, trainer.micro_batch_open))
        ladder._hold_until_s = 0.0
        host.run_unit()
    begin = {(True, True, False), (True, False, False)}  # the first micro-batch of an update, the others
    goes_on = {(False, False, True), (False, False, False), (False, True, False)}  # in one, optimizer, checkpoint
    assert waited == begin | goes_on


def test_a_parked_job_waits_for_requests_whatever_its_next_unit(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(1 << 20)
    host, ladder = harness.parts.training, harness.parts.ladder
    host.start(write_job(tmp_path / "job"))
    train(harness, lambda: host.trainer.checkpoint_due and host.trainer.at_update_boundary)
    host.trainer.park()
    ladder.let_go()
    ladder._hold_until_s = 1e12
    assert not host.state(time.monotonic()).ready and not host.feed()
    ladder._hold_until_s = 0.0
    assert host.state(time.monotonic()).ready
