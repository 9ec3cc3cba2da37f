"""Memory taken from a running job by requests and by the budget: cheapest rung first, told, and no bit changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fineinfer.engine import memory_ladder
from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, STATE
from fineinfer.engine.rungs import ABORT, DROP, FINISH, PARK, WAIT_WEIGHT, Rung, Rungs, cheapest
from fineinfer.messages import CancelJob, Drain, JobNote, JobProgress, JobStarted, JobUsage
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.training import parking
from fineinfer.training.checkpoint import CheckpointError

from .engine_harness import BYTES_PER_SLOT, Harness
from .training_job import SETTINGS, Told, trained, write_job

SLOTS = 3000


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    monkeypatch.setattr(memory_ladder, "HOLD_S", 0.05)
    monkeypatch.setattr(memory_ladder, "MAX_HOLD_S", 0.2)
    monkeypatch.setattr(memory_ladder, "FOLLOW_EVERY_S", 0.0)
    made: list[Harness] = []

    def build(spare_bytes: int, **settings: object) -> Harness:
        """An engine whose budget leaves so much beside a pool of ``SLOTS``."""
        own = {
            "kv_cache_memory_bytes": SLOTS * BYTES_PER_SLOT,
            "max_loras": 2,
            "max_lora_rank": 4,
            "max_model_len": 512,
            "deterministic": True,
        }
        harness = Harness(tmp_path_factory.mktemp("e"), **(own | settings))
        governor = harness.parts.ladder._governor
        governor.set_budget(governor.budget_bytes - governor.free_bytes + spare_bytes)
        made.append(harness)
        return harness

    yield build
    for harness in made:
        harness.close()


def train(harness: Harness, until: Callable[[], bool] = lambda: False) -> None:
    """Units of the job, and nothing else, until it ends or something holds."""
    while harness.parts.training.trainer is not None and not until():
        if not harness.parts.training.run_unit():
            harness.loop.step()


def finish_job(harness: Harness) -> None:
    deadline = time.monotonic() + 60
    while harness.parts.training.job is not None:
        assert time.monotonic() < deadline, "the job does not go on"
        harness.loop.step()


def units_run(harness: Harness, *kinds: str) -> Callable[[], bool]:
    """Whether the newest units of the update under way, not the job's first, are these."""

    def reached() -> bool:
        trainer = harness.parts.training.trainer
        if trainer.step == 0 or trainer.at_update_boundary:  # the first update shows what units take
            return False
        return tuple(kind for kind, _ in trainer._update.finished())[-len(kinds) :] == kinds

    return reached


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("quiet")
    harness, job = Harness(folder, max_loras=2, max_lora_rank=4), write_job(folder / "job")
    told = Told(harness)
    harness.parts.training.start(job)
    finish_job(harness)
    harness.close()
    assert told.end().status == "succeeded"
    return trained(job)


def test_the_cheapest_rung_that_suffices() -> None:
    rungs = [Rung(DROP, 100, 2.0), Rung(FINISH, 300, 5.0), Rung(ABORT, 300, 3.0), Rung(PARK, 400, 4.0)]
    names = [getattr(cheapest(rungs, num_bytes), "name", None) for num_bytes in (1, 100, 101, 300, 301, 401)]
    assert names == [DROP, DROP, ABORT, ABORT, PARK, None]


def test_rungs_are_priced_by_the_work_that_they_cost(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(1 << 30)
    harness.parts.training.start(write_job(tmp_path / "job"))
    trainer, latency = harness.parts.training.trainer, LatencyModel()
    for kind, seconds in (("embed", 1.0), ("forward", 10.0), ("head", 100.0), ("backward", 1000.0)):
        latency.observe(kind, 1, seconds)
        latency.observe(kind, 1000, seconds)
    rungs = Rungs(latency, "cpu")
    held = trainer.bytes_if_all_kept(128)
    between = rungs.of(trainer, 0, 500)
    assert [(rung.name, rung.num_bytes) for rung in between] == [(PARK, 500)] and between[0].cost_s < 1.0
    train(harness, units_run(harness, "embed", "forward"))
    by_name = {rung.name: rung for rung in rungs.of(trainer, held, 500)}
    num_heads = sum(kind == "head" for kind, _ in trainer.left_of_micro_batch().elements())
    assert by_name[DROP].cost_s == pytest.approx(20.0, rel=0.2), "both layers run forward again"
    assert by_name[ABORT].cost_s == pytest.approx(11.0) and by_name[ABORT].num_bytes == held
    assert by_name[FINISH].cost_s == pytest.approx(WAIT_WEIGHT * (10.0 + 100.0 * num_heads + 2000.0))
    assert by_name[PARK].cost_s == pytest.approx(11.0, abs=0.1) and by_name[PARK].num_bytes == held + 500
    train(harness, units_run(harness, "backward"))
    by_name = {rung.name: rung for rung in rungs.of(trainer, held, 500)}
    assert by_name[FINISH].cost_s == pytest.approx(WAIT_WEIGHT * 1000.0)
    assert 1000.0 < by_name[ABORT].cost_s < by_name[FINISH].cost_s, (
        "requests do not wait for a micro-batch's second half"
    )
    rungs.observe_move(trainer.state_bytes, 7.0)
    slower = {rung.name: rung for rung in rungs.of(trainer, held, 500)}
    assert slower[PARK].cost_s > by_name[PARK].cost_s


@pytest.mark.parametrize(("num_prompts", "rung"), [(1, "drop_kept"), (4, "abort"), (7, "park")])
def test_requests_get_the_memory_of_a_job_and_it_ends_as_if_they_had_not(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path, num_prompts: int, rung: str
) -> None:
    harness, job = make(0), write_job(tmp_path / "job")
    told, ladder = Told(harness), harness.parts.ladder
    harness.parts.training.start(job)
    train(harness, units_run(harness, "forward", "forward"))
    assert ladder._kv.num_slots == 64 and harness.parts.training.trainer.num_kept_layers() == 1
    for kind in ("head", "backward", "recompute"):  # what is left would take long, so it is not waited for
        harness.parts.latency.observe(kind, 128, 100.0)
    for i in range(num_prompts):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    harness.run()
    assert ladder.steps_taken[rung] == 1 and ladder.steps_taken["hold"] >= 1
    assert all(len(harness.tokens(f"r{i}")) == 20 for i in range(num_prompts))
    note = told.of(JobNote)[-1]
    assert note.data["bytes"] > 0 and note.data["ms"] > 0 and (note.data["layers"] > 0) == (rung == "drop_kept")
    kinds = [event.kind for event in ladder._governor.events]
    assert rung in kinds and "hold" in kinds
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed
    assert ladder.steps_taken["unpark"] == (rung == "park")
    assert ladder._kv.num_slots == SLOTS and not ladder._governor.leased(STATE), "the pool has climbed back"


def test_a_parked_job_holds_nothing_says_so_and_waits_for_calm(
    make: Callable[..., Harness], undisturbed: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOLD_S", "MAX_HOLD_S"):
        monkeypatch.setattr(memory_ladder, name, 3600.0)
    harness, job = make(0, max_num_seqs=16), write_job(tmp_path / "job")
    told, ladder = Told(harness), harness.parts.ladder
    harness.parts.training.start(job)
    train(harness, units_run(harness, "embed", "forward"))
    for i in range(7):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    seen = []

    def look(turn: int) -> None:
        trainer = harness.parts.training.trainer
        if trainer.parked:
            seen.append((ladder._governor.leased(STATE), ladder._governor.leased(ACTIVATIONS)))
            assert not told.messages or harness.parts.training.job is not None, "it is still the running job"

    harness.run(look)
    assert seen and set(seen) == {(0, 0)} and ladder._governor.leased(KV) <= SLOTS * BYTES_PER_SLOT
    for _ in range(20):
        harness.loop.step()
    assert harness.parts.training.trainer.parked, "no earlier than a while after the last request waited"
    ladder._hold_until_s = 0.0
    finish_job(harness)
    story = told.notes()
    parked = next(i for i, message in enumerate(story) if message.startswith("parked: "))
    assert any(message.startswith("goes on: ") for message in story[parked:])
    assert trained(job) == undisturbed


def test_under_slo_a_job_keeps_the_memory_of_its_share(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    """Requests wait for memory all the time, and training goes on all the same."""
    harness, job = make(0, policy="slo", train_share_min=0.2, max_num_seqs=16), write_job(tmp_path / "job")
    told, ladder = Told(harness), harness.parts.ladder
    harness.parts.training.start(job)
    floor = harness.parts.training.trainer.bytes_if_recomputed(128)
    assert ladder._governor.leased(ACTIVATIONS) == floor
    for i in range(7):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    waited = 0

    def more(turn: int) -> None:
        nonlocal waited
        if harness.parts.training.trainer is None:
            return
        waited += bool(harness.parts.scheduler.waiting)
        assert ladder._governor.leased(ACTIVATIONS) >= floor
        if turn % 10 == 9 and turn < 2000:
            harness.add(f"t{turn}", [turn % 90 + 3] * 380, max_tokens=20)

    harness.run(more)
    finish_job(harness)
    assert waited > 50 and ladder.steps_taken["park"] == 0
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_under_slo_a_request_that_could_not_start_even_alone_gets_the_floor(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    # a pool of 600 slots, of which the job needs 200
    spare = 526_336 + 74_240 - 200 * BYTES_PER_SLOT
    harness = make(spare, policy="slo", kv_cache_memory_bytes=600 * BYTES_PER_SLOT)
    job, told = write_job(tmp_path / "job"), Told(harness)
    harness.parts.training.start(job)
    assert harness.parts.ladder._kv.num_slots == 400
    harness.add("huge", [5] * 480, max_tokens=20)
    harness.run()
    taken = harness.parts.ladder.steps_taken
    assert len(harness.tokens("huge")) == 20 and sum(taken.values()) > taken["hold"]
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_a_smaller_budget_parks_a_job_and_a_larger_one_lets_it_go_on(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    harness, job = make(1 << 20), write_job(tmp_path / "job")
    told, ladder, governor = Told(harness), harness.parts.ladder, harness.parts.ladder._governor
    harness.parts.training.start(job)
    train(harness, units_run(harness, "embed", "forward"))
    budget = governor.budget_bytes
    fixed = sum(governor.leased(owner) for owner in ("weights", "workspace", "adapters"))
    ladder.set_budget(fixed + 64 * BYTES_PER_SLOT, harness.parts.training.trainer, time.monotonic())
    assert harness.parts.training.trainer.parked and governor.free_bytes == 0
    for _ in range(5):
        harness.loop.step()
    time.sleep(0.2)
    for _ in range(5):
        harness.loop.step()
    assert harness.parts.training.trainer.parked, "there is no memory for it"
    ladder.set_budget(budget, harness.parts.training.trainer, time.monotonic())
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed


def test_a_job_that_cannot_be_parked_goes_on_and_is_not_asked_again_at_once(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    harness, job = make(0), write_job(tmp_path / "job")
    told, asked = Told(harness), []

    def full(trainer: parking.ParkableTrainer) -> None:
        asked.append(trainer.step)
        raise CheckpointError("disk full")

    monkeypatch.setattr(parking.ParkableTrainer, "park", full)
    harness.parts.training.start(job)
    train(harness, units_run(harness, "embed", "forward"))
    for i in range(7):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    harness.run()
    finish_job(harness)
    assert len(asked) == 1 and told.end().status == "succeeded"


def test_a_job_that_is_cancelled_or_drained_while_parked_leaves_nothing(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    harness, job = make(0), write_job(tmp_path / "job")
    told, governor = Told(harness), harness.parts.ladder._governor
    for message in (CancelJob(job_id="job"), Drain(timeout_s=0.0)):
        harness.parts.training.start(job)
        train(harness, lambda: harness.parts.training.trainer.step > 0)
        harness.parts.training.trainer.park()
        harness.loop._handle([(b"supervisor", message)])
        assert harness.parts.training.trainer is None and governor.leased(STATE) == governor.leased(ACTIVATIONS) == 0
    assert told.end().status == "cancelled", "a drained job goes on later"
    again = make(0)
    told = Told(again)
    again.parts.training.start(job)
    assert told.of(JobStarted)[0].step > 0
    finish_job(again)
    assert trained(job)["log"] == undisturbed["log"]


def test_device_seconds_add_up_over_engines(make: Callable[..., Harness], tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, save_steps=1))
    harness = make(1 << 30)
    told, latency = Told(harness), harness.parts.latency
    harness.parts.training.start(job)
    train(harness, lambda: harness.parts.training.trainer.step == 2)
    harness.loop._handle([(b"supervisor", Drain(timeout_s=0.0))])
    used = told.of(JobUsage)[-1].device_s
    assert used >= latency.trained_s > 0  # the model of slice times clips outliers
    again = make(1 << 30)
    told = Told(again)
    again.parts.training.start(msgspec.structs.replace(job, device_s=used))
    assert again.parts.training.job_device_s == used
    finish_job(again)
    reports = [usage.device_s for usage in told.of(JobUsage)]
    assert reports == sorted(reports) and reports[-1] >= used + again.parts.latency.trained_s
    assert told.messages.index(told.of(JobUsage)[-1]) < told.messages.index(told.end())
    assert len(told.of(JobProgress)) >= 1


def test_a_job_that_comes_while_requests_have_the_memory_waits_for_it(
    make: Callable[..., Harness], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    harness, job = make(0), write_job(tmp_path / "job")
    told = Told(harness)
    for i in range(7):
        harness.add(f"r{i}", [5 + i] * 380, max_tokens=20)
    while len(harness.parts.scheduler.running) < 7:
        harness.loop.step()
    harness.parts.training.start(job)
    governor = harness.parts.ladder._governor
    assert harness.parts.training.trainer is None and not governor.leased(STATE), "it would have to be made on theirs"
    assert not told.of(JobStarted) and told.notes() == ["waits for memory that requests have now"]
    harness.run()
    finish_job(harness)
    assert told.end().status == "succeeded" and trained(job) == undisturbed
    tiny = make(0, kv_cache_memory_bytes=200 * BYTES_PER_SLOT)
    told = Told(tiny)
    tiny.parts.training.start(job)
    assert told.end().error_code == "out_of_memory"
