"""Slots that are withheld from requests so that a parked job gets its memory, and only then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fineinfer.engine.memory_ladder import STATE
from fineinfer.messages import SetBudget
from fineinfer.scheduler.scheduler import TrainingState

from .engine_harness import BYTES_PER_SLOT
from .tagged_engine import Clock, TaggedHarness, on_clock, one_thread
from .training_job import SETTINGS, Told, write_job

__all__ = ["one_thread"]  # a fixture

SLOTS = 3000  # of which the job takes about 2,400


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TaggedHarness]]:
    """An engine whose requests hold nearly all memory when a job comes, which therefore begins parked."""
    made: list[TaggedHarness] = []

    def build(**settings: object) -> TaggedHarness:
        clock = Clock()
        on_clock(monkeypatch, clock)
        own = {
            "kv_cache_memory_bytes": SLOTS * BYTES_PER_SLOT, "max_loras": 2, "max_lora_rank": 4, "max_model_len": 512,
            "max_num_seqs": 16, "policy": "slo", "train_share_min": 0.2,
        }  # fmt: skip
        harness = TaggedHarness(tmp_path, clock, **(own | settings))
        made.append(harness)
        governor = harness.parts.ladder._governor
        governor.set_budget(governor.budget_bytes - governor.free_bytes)
        keep_busy(harness)
        while len(harness.parts.scheduler.running) < 7:
            harness.loop.step()
        harness.parts.training.start(write_job(tmp_path / "job", SETTINGS))
        assert harness.parts.training.trainer.parked and not governor.leased(STATE)
        return harness

    yield build
    for harness in made:
        harness.close()


def keep_busy(harness: TaggedHarness) -> None:
    """Twice as many requests as the pool holds."""
    while len(harness.parts.desk.open) < 14:
        number = len(harness.outputs)
        harness.add(f"r{number}", [5 + number % 80] * 280, max_tokens=100)
        harness.loop.step()


def finish(harness: TaggedHarness) -> None:
    """Until the job ends, beside requests that never stop coming."""
    while harness.parts.training.trainer is not None:
        keep_busy(harness)
        harness.loop.step()
        assert len(harness.outputs) < 1000, "the job does not go on"


def set_slots(harness: TaggedHarness, num_slots: int) -> None:
    """The budget, so that the pool has so many slots at most."""
    budget = harness.parts.ladder._governor.budget_bytes
    harness.send(SetBudget(num_bytes=budget - (SLOTS - num_slots) * BYTES_PER_SLOT))
    harness.loop.step()


@pytest.mark.parametrize("slots", [SLOTS, 2800])
def test_a_parked_job_comes_back_although_requests_keep_coming(full: Callable[..., TaggedHarness], slots: int) -> None:
    harness = full()
    told, training, ladder = Told(harness), harness.parts.training, harness.parts.ladder
    set_slots(harness, slots)
    while training.trainer.parked:
        keep_busy(harness)
        assert harness.loop.step(), "a turn for nothing, after which the loop sleeps"
        withheld = training.state(harness.clock()).slots_withheld
        assert withheld == 0 or withheld == ladder.slots_withheld < ladder._kv.num_slots
        assert len(harness.outputs) < 200, "requests keep it out"
    assert harness.parts.scheduler.waiting and ladder.slots_withheld == 0
    finish(harness)
    assert told.end().status == "succeeded" and ladder.steps_taken["park"] == 0


def test_without_withholding_it_would_not(full: Callable[..., TaggedHarness], monkeypatch: pytest.MonkeyPatch) -> None:
    harness = full()
    training, state_of = harness.parts.training, harness.parts.training.state

    def state(now_s: float) -> TrainingState:
        return dataclasses.replace(state_of(now_s), slots_withheld=0)

    monkeypatch.setattr(training, "state", state)
    while len(harness.outputs) < 200:
        keep_busy(harness)
        harness.loop.step()
    assert training.trainer.parked


def test_nothing_is_withheld_for_a_job_that_the_budget_has_no_room_for(full: Callable[..., TaggedHarness]) -> None:
    harness = full()
    training, ladder = harness.parts.training, harness.parts.ladder
    set_slots(harness, 2000)
    for _ in range(1500):
        keep_busy(harness)
        assert harness.loop.step()
        assert ladder.slots_withheld == 0 or not training.trainer.parked
    assert training.trainer.parked and len(harness.outputs) > 40, "requests are not served"
    set_slots(harness, SLOTS + 1000)
    finish(harness)
