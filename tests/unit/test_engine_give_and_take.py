"""Requests that need what is kept for training: they get it, training gets it back, neither stands still for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fineinfer.engine.memory_ladder import ACTIVATIONS, KV
from fineinfer.engine.training_host import TrainingHost
from fineinfer.messages import CancelJob, JobProgress, SetBudget

from . import engine_harness
from .engine_harness import BYTES_PER_SLOT
from .tagged_engine import Clock, TaggedHarness, on_clock, one_thread
from .training_job import SETTINGS, Told, write_job

__all__ = ["one_thread"]  # a fixture

MANY = msgspec.structs.replace(SETTINGS, n_epochs=400)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TaggedHarness]]:
    """An engine whose budget holds so many slots and no more, and a job that has begun."""
    made: list[TaggedHarness] = []
    monkeypatch.setitem(engine_harness.CONFIG, "max_position_embeddings", 4096)

    def build(slots: int, settings: object = MANY, **own: object) -> TaggedHarness:
        clock = Clock()
        on_clock(monkeypatch, clock)
        usual = {
            "kv_cache_memory_bytes": slots * BYTES_PER_SLOT, "max_loras": 2, "max_lora_rank": 4, "max_model_len": 4096,
            "max_num_seqs": 16, "max_num_batched_tokens": 256, "policy": "slo",
        }  # fmt: skip
        harness = TaggedHarness(tmp_path, clock, **(usual | own))
        made.append(harness)
        governor = harness.parts.ladder._governor
        governor.set_budget(governor.budget_bytes - governor.free_bytes)
        harness.parts.training.start(write_job(tmp_path / "job", settings))
        return harness

    yield build
    for harness in made:
        harness.close()


@pytest.mark.parametrize(("beside", "share"), [(True, 0.05), (False, 0.5)])
def test_requests_that_fit_only_without_the_job_and_the_job_take_turns(
    make: Callable[..., TaggedHarness], monkeypatch: pytest.MonkeyPatch, beside: bool, share: float
) -> None:
    """A parked job once took its memory back in the turn that had given it to the request, and so on for ever."""
    monkeypatch.setattr(TrainingHost, "can_run_beside", beside)
    harness = make(2600, train_share_min=share)
    training, steps_taken = harness.parts.training, harness.parts.ladder.steps_taken
    for _ in range(50):
        harness.loop.step()
    while training.trainer.micro_batch_open:
        harness.loop.step()
    first, asked = training.trainer.step, 0
    for _ in range(20_000):
        if asked < 8 and len(harness.parts.desk.open) < 2:
            harness.add(f"r{asked}", [5 + asked] * 1500, max_tokens=700)
            asked += 1
        harness.loop.step()
        if asked == 8 and not harness.parts.desk.open:
            break
    assert all(len(harness.tokens(f"r{n}")) == 700 for n in range(8))
    assert 2 <= steps_taken["park"] < 9 and training.trainer.step - first >= steps_taken["unpark"] > 0


@pytest.mark.parametrize("beside", [True, False])
def test_a_request_that_becomes_longer_than_predicted_gets_what_is_kept_for_training(
    make: Callable[..., TaggedHarness], monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(TrainingHost, "can_run_beside", beside)
    harness = make(2600, max_model_len=512, max_num_batched_tokens=512, train_share_min=0.05)
    for _ in range(20):
        harness.parts.scheduler.predictor.record(None, 20)
    for _ in range(50):
        harness.loop.step()
    assert harness.parts.ladder._kv.num_slots < 300
    harness.add("long", [9] * 150)  # no max_tokens: up to 512 in all
    for n in range(3):
        harness.add(f"later{n}", [20 + n] * 60, max_tokens=20)
    for _ in range(2000):
        harness.loop.step()
        if not harness.parts.desk.open:
            break
    assert len(harness.tokens("long")) == 362 and all(len(harness.tokens(f"later{n}")) == 20 for n in range(3))


@pytest.mark.parametrize("taken_by", ["a request", "a smaller budget"])
def test_training_gets_its_floor_back_under_load(make: Callable[..., TaggedHarness], taken_by: str) -> None:
    harness = make(3500, train_share_min=0.2)
    ladder, trainer = harness.parts.ladder, harness.parts.training.trainer
    governor, latency, clock = ladder._governor, harness.parts.latency, harness.clock

    def busy(num_turns: int) -> None:
        for _ in range(num_turns):
            while len(harness.parts.desk.open) < 20:
                number = len(harness.outputs)
                harness.add(f"r{number}", [5 + number % 80] * 280, max_tokens=100)
                harness.loop.step()
            harness.loop.step()

    for _ in range(50):
        harness.loop.step()
    if taken_by == "a request":
        while not trainer.micro_batch_open:
            harness.loop.step()
        harness.add("huge", [7] * 2000, max_tokens=300)
        while not harness.tokens("huge"):
            harness.loop.step()
    else:
        busy(30)
        while not trainer.micro_batch_open:
            busy(1)
        budget = governor.budget_bytes
        harness.send(SetBudget(num_bytes=budget - 400 * BYTES_PER_SLOT))
        busy(100)
        harness.send(SetBudget(num_bytes=budget))
        harness.loop.step()
    assert governor.leased(ACTIVATIONS) < ladder._floor or taken_by == "a smaller budget"
    busy(2500)
    trained_s, now_s, num_resizes = latency.trained_s, clock.now_s, ladder.num_resizes
    busy(1500)
    assert (latency.trained_s - trained_s) / (clock.now_s - now_s) > 0.15
    assert ladder.num_resizes - num_resizes < 50, "the pool moves to and fro"


@pytest.mark.parametrize(("policy", "share"), [("inference-first", 0.05), ("slo", 0.0)])
def test_a_smaller_budget_is_followed_when_ending_the_micro_batch_is_cheapest(
    make: Callable[..., TaggedHarness], policy: str, share: float
) -> None:
    settings = msgspec.structs.replace(MANY, batch_size=12)
    harness = make(2800, settings, max_model_len=512, policy=policy, train_share_min=share)
    ladder, trainer = harness.parts.ladder, harness.parts.training.trainer
    governor = ladder._governor
    while trainer.step < 3 or not trainer.micro_batch_open or trainer.left_of_micro_batch().total() > 1:
        harness.loop.step()
    for n in range(2):
        harness.add(f"r{n}", [5 + n] * 30, max_tokens=200)
    for _ in range(4):
        harness.loop.step()
    least = ladder._pool.bytes_for(max(64, ladder._reserved_slots()))
    too_much = governor.leased(KV) - least + max(0, governor.free_bytes) + 100_000
    harness.send(SetBudget(num_bytes=governor.budget_bytes - too_much))
    until_s = harness.clock.now_s + 4.0
    while harness.clock.now_s < until_s:
        if len(harness.parts.desk.open) < 2:
            number = len(harness.outputs)
            harness.add(f"r{number}", [5 + number % 80] * 30, max_tokens=200)
        harness.clock(0.01)
        harness.loop.step()
    assert governor.free_bytes >= 0


@pytest.mark.parametrize("grows", [False, True])
def test_a_request_that_a_lowered_budget_has_no_room_for_ends_and_blocks_nobody(
    make: Callable[..., TaggedHarness], grows: bool
) -> None:
    harness = make(1000, max_model_len=512, max_num_batched_tokens=512, train_share_min=0.05)
    governor = harness.parts.ladder._governor
    harness.send(CancelJob(job_id="job"))
    for _ in range(20):
        harness.parts.scheduler.predictor.record(None, 20)
    fixed = sum(governor.leased(owner) for owner in ("weights", "workspace", "adapters"))
    harness.send(SetBudget(num_bytes=fixed + 200 * BYTES_PER_SLOT))
    harness.loop.step()
    harness.add("large", [9] * (100 if grows else 300), **({} if grows else {"max_tokens": 20}))
    for n in range(3):
        harness.add(f"small{n}", [20 + n] * 60, max_tokens=20)
    for _ in range(1000):
        harness.clock(0.01)
        harness.loop.step()
    assert harness.outputs["large"][-1].error_code == "engine_overloaded"
    assert (len(harness.tokens("large")) > 20) == grows
    assert all(len(harness.tokens(f"small{n}")) == 20 for n in range(3)) and not harness.parts.desk.open


def test_a_turn_that_makes_room_is_followed_by_the_next_at_once(make: Callable[..., TaggedHarness]) -> None:
    """The loop sleeps for a tenth of a second after a turn in which there was nothing to do."""
    harness = make(2600, train_share_min=0.05)
    for _ in range(50):
        harness.loop.step()
    while harness.parts.training.trainer.micro_batch_open:
        harness.loop.step()
    harness.add("r", [5] * 1500, max_tokens=700)
    while not harness.tokens("r"):
        assert harness.loop.step()


def test_updates_that_a_resumed_job_repeats_are_counted_once_and_have_no_rates(
    make: Callable[..., TaggedHarness],
) -> None:
    settings = msgspec.structs.replace(SETTINGS, n_epochs=40, save_steps=10)
    harness = make(3000, settings, policy="inference-first")
    training = harness.parts.training
    while training.trainer.step < 12:
        harness.loop.step()
    job = training.job
    training.pause("job")
    told, total = Told(harness), training.reports.total_tokens
    training.start(job)
    step, tokens = training.trainer.step, training.trainer.cursor.processed_tokens
    assert step == 12 and training.reports.last_progress is None
    while training.trainer.step < 15:
        harness.loop.step()
    updates = told.of(JobProgress)
    assert [update.step for update in updates][-3:] == [13, 14, 15] and len(updates) > 3
    assert all((update.tokens_per_s > 0) == (update.step > 12) for update in updates)
    assert training.reports.total_tokens - total == training.trainer.cursor.processed_tokens - tokens
