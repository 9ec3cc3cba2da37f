"""Training beside steps: fed while a step is on the device, bounded, and without a trace in tokens or adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fineinfer.engine.training_host import MAX_BESIDE, TrainingHost
from fineinfer.engine.unit_times import LaunchedUnit
from fineinfer.kernels import attention_decode
from fineinfer.runner.device_runner import DeviceStep
from fineinfer.scheduler.plan import StepPlan
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer

from .engine_harness import BYTES_PER_SLOT, Harness
from .training_job import Told, trained, write_job

PROMPTS = {f"r{n}": [5 + (7 * n + i) % 90 for i in range(9 + 3 * n)] for n in range(5)}
POLLS = 3  # looks at a step before it is done


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    monkeypatch.setattr(attention_decode, "TARGET_PROGRAMS", 8)
    made: list[Harness] = []

    def build(**settings: object) -> Harness:
        own = {"attention_backend": "triton", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_loras": 1}
        made.append(Harness(tmp_path_factory.mktemp("e"), **(own | {"max_lora_rank": 4, "policy": "slo"} | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


class Event:
    """Of a unit that is done when told."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        assert self.done, "waited for the device"

    def elapsed_time(self, end: Event) -> float:
        return 4.0


def pending(host: TrainingHost, count: int) -> list[Event]:
    events = [Event() for _ in range(count)]
    host._times._pending.extend(LaunchedUnit("forward", 128, events[0], event, -1) for event in events)
    return events


def test_units_run_while_a_step_does_and_neither_shows_in_the_other(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, tokens = make(attention_backend="reference"), {}
    for name, prompt in PROMPTS.items():
        quiet.outputs.clear()
        quiet.add(name, prompt, max_tokens=12)
        quiet.run()
        tokens[name] = quiet.tokens(name)
    job = write_job(tmp_path / "quiet")
    quiet.parts.training.start(job)
    while quiet.parts.training.trainer is not None:
        quiet.loop.step()
    alone = trained(job)

    polls: dict[int, int] = {}

    def is_done(step: DeviceStep) -> bool:
        polls[id(step)] = polls.get(id(step), 0) + 1
        return polls[id(step)] > POLLS

    monkeypatch.setattr(DeviceStep, "is_done", property(is_done))
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    harness, job = make(slo_tpot_ms=1e6, slo_ttft_ms=1e6), write_job(tmp_path / "busy")
    host, beside, most = harness.parts.training, 0, 0
    feed = host.feed

    def counted() -> bool:
        nonlocal beside, most
        fed = feed()
        beside += fed and bool(harness.loop._in_flight)
        most = max(most, len(harness.loop._in_flight))
        return fed

    host.feed = counted
    told = Told(harness)
    host.start(job)
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, max_tokens=12)
    harness.run()
    assert beside > 12 and most == 1, "a step with training beside it is waited for"
    assert {name: harness.tokens(name) for name in PROMPTS} == tokens
    while host.trainer is not None:
        harness.loop.step()
    assert told.end().status == "succeeded"
    assert trained(job) == alone
    kinds = set(harness.parts.latency.averages_ms())
    assert {"prefill_beside", "decode_beside", "forward_beside", "backward_beside"} <= kinds, kinds


def test_no_unit_is_launched_while_a_prompt_waits_for_the_step_s_end(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    polls = 0

    def is_done(step: DeviceStep) -> bool:
        nonlocal polls
        polls += 1
        return polls % 40 == 0

    monkeypatch.setattr(DeviceStep, "is_done", property(is_done))
    harness = make(slo_tpot_ms=1e6, slo_ttft_ms=1e6)
    host, fed = harness.parts.training, []
    host.start(write_job(tmp_path / "job"))
    feed = host.feed

    def counted() -> bool:
        fed.append(polls)
        if len(fed) == 3:
            harness.add("second", [7, 8, 9], max_tokens=2)
        return feed()

    host.feed = counted
    harness.add("first", [5, 6], max_tokens=2)
    harness.loop.step()
    assert polls == 40 and len(fed) == 3, "the step was waited for, without a unit after the letter came"
    harness.run()
    assert len(harness.tokens("second")) == 2 and len(fed) > 3


def test_a_first_token_does_not_wait_for_the_step_behind_its_own(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    harness, seen = make(slo_tpot_ms=1e6, slo_ttft_ms=1e6), []

    def is_done(step: DeviceStep) -> bool:
        harness.read()
        seen.append(len(harness.tokens("a")))
        return True

    monkeypatch.setattr(DeviceStep, "is_done", property(is_done))
    harness.parts.scheduler._policy.prompt_beside = 0  # the prompt runs alone
    harness.parts.training.start(write_job(tmp_path / "job"))
    harness.add("a", [5, 6, 7], max_tokens=3)
    harness.loop.step()
    assert len(harness.loop._in_flight) == 1 and not seen, "the step without training stays in flight"
    harness.loop.step()
    assert seen[0] == 1, "the first token was sent while the step behind it ran"
    harness.run()
    assert len(harness.tokens("a")) == 3


def test_no_more_units_are_launched_than_the_bound_and_none_is_waited_for(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    harness = make()
    host = harness.parts.training
    assert not host.feed(), "no job"
    host.start(write_job(tmp_path / "job"))
    events = pending(host, MAX_BESIDE)
    assert not host.feed() and host.step_begins()
    events[0].done = True
    assert host.feed() and len(host._times._pending) == MAX_BESIDE - 1, "the CPU's unit is done at once"
    assert harness.parts.latency.averages_ms() == {"forward_beside": 4.0, "embed_beside": pytest.approx(0, abs=1e3)}
    for event in events:
        event.done = True
    assert not host.step_begins()
    while not host.trainer.next_unit_waits:
        assert host.feed()
    (event,) = pending(host, 1)
    assert not host.feed() and host.trainer.step == 0, "an optimizer step would wait for the units before it"
    event.done = True
    assert host.feed() and host.trainer.step == 1


def test_a_unit_that_a_step_joined_counts_as_beside(make: Callable[..., Harness], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    host = make().parts.training
    host.start(write_job(tmp_path / "job"))
    first, second = Event(), Event()
    host._times._pending.append(LaunchedUnit("forward", 128, first, first, host._times._num_steps))
    assert host.step_begins()
    host._times._pending.append(LaunchedUnit("backward", 128, second, second, host._times._num_steps))
    first.done = second.done = True
    host._times.take_finished()
    assert set(host._latency.averages_ms()) == {"forward_beside", "backward"}


@pytest.mark.parametrize("how", ["succeeded", "failed"])
def test_slots_are_asked_for_in_the_turn_that_ends_the_job(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", True)
    harness = make(slo_tpot_ms=1e6, slo_ttft_ms=1e6)
    host, ladder, told, asked = harness.parts.training, harness.parts.ladder, Told(harness), []
    host.start(write_job(tmp_path / "job"))
    while not (host.trainer.at_end and set(host.trainer.next_update_units()) == {("publish", 0)}):
        assert host.run_unit()
    plan, make_room, kv = harness.parts.scheduler.plan, ladder.make_room, ladder._kv
    governor = ladder._governor
    leased = governor.budget_bytes - governor.free_bytes
    ladder.set_budget(leased - (kv.num_slots - 512) * BYTES_PER_SLOT, host.trainer, 0.0)  # with the job a full one

    def asking(now_s: float, training: Any) -> StepPlan:
        return dataclasses.replace(plan(now_s, training), train=True, slots_wanted=kv.max_slots - kv.num_slots)

    def counted(slots_wanted: int, trainer: ParkableTrainer | None, *rest: Any) -> bool:
        asked.append(trainer)
        return make_room(slots_wanted, trainer, *rest)

    def broken(trainer: ParkableTrainer) -> None:
        raise TrainingError("broken")

    monkeypatch.setattr(harness.parts.scheduler, "plan", asking)
    monkeypatch.setattr(ladder, "make_room", counted)
    if how == "failed":
        monkeypatch.setattr(ParkableTrainer, "advance", broken)
    harness.add("r", [5, 6, 7], max_tokens=1)
    harness.loop.step()
    assert asked == [None] and told.end().status == how
    monkeypatch.undo()
    harness.run()
    assert len(harness.tokens("r")) == 1
