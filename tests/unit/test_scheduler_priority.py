"""Interactive before batch before training, and nobody for ever; who keeps slots when there are too few."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import FinishReason, SamplingParams
from fineinfer.scheduler.admission import MAX_PREEMPTIONS
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.plan import StepPlan
from fineinfer.scheduler.policy import POLICIES
from fineinfer.scheduler.scheduler import Scheduler, SchedulerLimits, TrainingState
from fineinfer.scheduler.sequence import Sequence
from fineinfer.scheduler.slo import SloTargets, make_policy
from fineinfer.scheduler.waiting import AGED_EVERY, AGED_S, WaitingQueue

INTERACTIVE, BATCH = 0, 1


def request(name: str, num_prompt: int, num_output: int | None, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    total = num_prompt + (80 if num_output is None else num_output)
    params = SamplingParams(max_tokens=num_output)
    return Sequence(name, b"api", [1] * num_prompt, params, total, arrival_s, priority=priority)


def make(num_slots: int = 100, max_slots: int | None = None, **limits: int) -> Scheduler:
    kv = KVCache(num_slots, 16, max_slots or num_slots, max_slots=max_slots)
    bounds = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | limits
    return Scheduler(kv, SchedulerLimits(deferral_bound_s=1.0, **bounds), POLICIES["inference-first"])


def turn(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now_s, TrainingState())
    for chunk in plan.chunks:
        scheduler.launched(chunk)
        scheduler.commit(chunk, 7 if chunk.samples else None, now_s)
        if chunk.samples and chunk.sequence.max_output_left <= 0:
            scheduler.finish(chunk.sequence, FinishReason.LENGTH)
    return plan


def names(plan: StepPlan) -> list[str]:
    return [chunk.sequence.request_id for chunk in plan.chunks]


def drain(queue: WaitingQueue, now_s: float) -> list[str]:
    order = []
    while (sequence := queue.next(now_s)) is not None:
        queue.admitted(sequence)
        order.append(sequence.request_id)
    return order


def test_better_priorities_first_each_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for name, priority, arrival_s in (("b1", 1, 0.0), ("a2", 0, 2.0), ("c1", 2, 0.5), ("a1", 0, 1.0), ("b2", 1, 3.0)):
        queue.add(request(name, 1, 1, priority, arrival_s))
    assert len(queue) == 5 and queue.oldest_arrival_s() == 0.0
    assert [s.request_id for s in queue] == drain(queue, 5.0) == ["a1", "a2", "b1", "b2", "c1"]
    assert len(queue) == 0 and queue.oldest_arrival_s() is None and queue.next(9.0) is None


def test_one_admission_in_eight_is_for_the_oldest_that_has_aged() -> None:
    queue = WaitingQueue()
    for i in range(3):
        queue.add(request(f"b{i}", 1, 1, BATCH, 0.1 * i))
    for i in range(20):
        queue.add(request(f"a{i}", 1, 1, INTERACTIVE, 1.0 + i))
    order = drain(queue, 2 * AGED_S + 20)
    assert [name for name in order if name[0] == "a"] == [f"a{i}" for i in range(20)]
    assert [order.index(f"b{i}") for i in range(3)] == [AGED_EVERY - 1, 2 * AGED_EVERY - 1, 22]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.01, 2.0))
def test_a_request_that_has_aged_is_admitted_in_bounded_time(seed: int, num_levels: int, rate: float) -> None:
    """Whatever keeps coming with better priority: at most AGED_EVERY admissions for each older request, and itself."""
    rng, queue, now_s, num_admitted = random.Random(seed), WaitingQueue(), 0.0, 0
    aged_at: dict[Sequence, tuple[int, int]] = {}  # admissions until it had aged, and how many were older then
    for i in range(600):
        now_s += rng.expovariate(rate)
        queue.add(request(str(i), 1, 1, min(rng.randrange(num_levels), rng.randrange(num_levels)), now_s))
        for sequence in queue:
            if sequence not in aged_at and now_s - sequence.arrival_s > AGED_S:
                aged_at[sequence] = num_admitted, sum(s.arrival_s < sequence.arrival_s for s in queue)
        for _ in range(rng.choice((0, 1, 1, 2))):
            if (sequence := queue.next(now_s)) is not None:
                queue.admitted(sequence)
                num_admitted += 1
                before, num_older = aged_at.get(sequence, (num_admitted, 0))
                assert num_admitted - before <= AGED_EVERY * (num_older + 1)
    for sequence in queue:
        before, num_older = aged_at.get(sequence, (num_admitted, 0))
        assert num_admitted - before < AGED_EVERY * (num_older + 1)


def test_batch_gives_way_when_an_interactive_request_finds_no_slots() -> None:
    scheduler = make(num_slots=100)
    batch = [request(f"b{i}", 20, 20, BATCH, 0.1 * i) for i in range(2)]
    for sequence in batch:
        scheduler.add(sequence)
    assert names(turn(scheduler)) == ["b0", "b1"]
    scheduler.add(request("a", 30, 10, INTERACTIVE, 1.0))
    plan = turn(scheduler)
    assert list(plan.preempted) == [batch[1]] and names(plan) == ["b0", "a"]  # one is enough: the later one
    while not scheduler.is_idle():
        turn(scheduler)
    assert all(len(sequence.output) == 20 for sequence in batch) and scheduler.num_preemptions == 1


def test_batch_gives_way_for_a_place_among_those_that_run_but_not_in_vain() -> None:
    scheduler = make(num_slots=100, max_num_seqs=2)
    scheduler.add(request("a0", 30, 30, INTERACTIVE))
    scheduler.add(request("b", 10, 10, BATCH, 0.1))
    turn(scheduler)
    scheduler.add(request("a1", 50, 10, INTERACTIVE, 0.2))  # does not fit even without it
    plan = turn(scheduler)
    assert names(plan) == ["a0", "b"] and not plan.preempted
    scheduler = make(num_slots=100, max_num_seqs=2)
    for name in ("b0", "b1", "b2"):
        scheduler.add(request(name, 5, 5, BATCH))
    turn(scheduler)
    scheduler.add(request("a", 5, 5, INTERACTIVE, 0.2))
    plan = turn(scheduler)
    assert [s.request_id for s in plan.preempted] == ["b1"] and set(names(plan)) == {"b0", "a"}


def test_a_batch_request_that_gave_way_often_runs_to_its_end() -> None:
    scheduler = make(num_slots=60)
    batch = request("b", 20, 20, BATCH)
    scheduler.add(batch)
    for i in range(40):
        scheduler.add(request(f"a{i}", 30, 4, INTERACTIVE, 1.0 + i))
        for _ in range(6):
            turn(scheduler, 20.0 + i)
        if batch.finish_reason is not None:
            break
    assert batch.num_preemptions == MAX_PREEMPTIONS and len(batch.output) == 20
    assert scheduler.waiting.oldest_arrival_s() > 3.0, "others came and went before it"


def test_slots_are_lost_to_better_rank_only_and_the_pool_is_asked_first() -> None:
    scheduler = make(num_slots=64, max_slots=128)
    for _ in range(20):
        scheduler.predictor.record(None, 2)  # outputs were short, so more are admitted than fit
    for name, priority in (("b", BATCH), ("a0", INTERACTIVE), ("a1", INTERACTIVE)):
        scheduler.add(request(name, 18, None, priority, float(len(name))))
    assert set(names(turn(scheduler))) == {"b", "a0", "a1"}
    while not (plan := turn(scheduler)).slots_wanted:
        assert not plan.preempted
    assert len(plan.chunks) < 3 and not plan.preempted, "first it waits for the pool to grow"
    plan = turn(scheduler)  # it did not
    assert [s.request_id for s in plan.preempted] == ["b"] and names(plan) == ["a0", "a1"]
    while not (plan := turn(scheduler)).preempted:
        assert "a0" in names(plan)
    assert [s.request_id for s in plan.preempted] == ["a1"] and names(plan) == ["a0"]
    while (plan := turn(scheduler)).chunks:
        assert not plan.preempted
    assert plan.slots_wanted, "alone, it waits rather than losing its own"
    scheduler._kv.grow_to(64 + plan.slots_wanted)
    assert "a0" in names(turn(scheduler))


def test_prompts_of_better_priority_get_their_rows_first_until_the_other_has_waited_long() -> None:
    scheduler = make(num_slots=1000, max_num_batched_tokens=16)
    scheduler.add(request("b", 100, 5, BATCH, 0.0))
    turn(scheduler, 0.0)
    scheduler.add(request("a", 100, 5, INTERACTIVE, 1.0))
    assert names(turn(scheduler, 1.0)) == ["a"]
    assert names(turn(scheduler, AGED_S - 0.1)) == ["a"]
    assert names(turn(scheduler, AGED_S)) == ["b"]


def simulate(batch_rate: float, interactive_rate: float, seconds: float = 240.0) -> dict[int, list[float]]:
    """Waits for the first token by priority, on a virtual clock of 50 ms a step that serves about 40 requests/s."""
    scheduler, rng, now_s, first = make(num_slots=400, max_num_seqs=8), random.Random(5), 0.0, dict[Sequence, float]()
    due = {p: rng.expovariate(rate) for p, rate in ((INTERACTIVE, interactive_rate), (BATCH, batch_rate))}
    added: list[Sequence] = []
    while now_s < seconds:
        for priority, rate in ((INTERACTIVE, interactive_rate), (BATCH, batch_rate)):
            while due[priority] <= now_s:
                added.append(request(str(len(added)), 4, 4, priority, due[priority]))
                scheduler.add(added[-1])
                due[priority] += rng.expovariate(rate)
        for chunk in turn(scheduler, now_s).chunks:
            if chunk.samples:
                first.setdefault(chunk.sequence, now_s)
        now_s += 0.05
    return {p: [first.get(s, now_s) - s.arrival_s for s in added if s.priority == p] for p in (INTERACTIVE, BATCH)}


def test_a_backlog_of_batch_requests_costs_interactive_ones_little() -> None:
    waits = simulate(batch_rate=60.0, interactive_rate=20.0)  # together twice what can be served
    assert max(waits[INTERACTIVE]) < 0.5, "interactive requests fit alone, so they hardly wait"
    assert max(waits[BATCH]) > AGED_S


def test_interactive_load_at_and_beyond_capacity_starves_no_batch_request() -> None:
    waits = simulate(batch_rate=0.5, interactive_rate=39.0)
    assert AGED_S / 2 < max(waits[BATCH]) < AGED_S + 4.0
    waits = simulate(batch_rate=0.5, interactive_rate=80.0)  # twice: then all wait alike
    assert max(waits[BATCH]) < max(waits[INTERACTIVE]) + AGED_S


def test_slo_adapts_to_interactive_requests_only() -> None:
    policy = make_policy("slo", SloTargets(ttft_s=1.0, tpot_s=1.0))
    scheduler = Scheduler(KVCache(100, 4, 100), SchedulerLimits(4, 64, 1.0), policy, LatencyModel())
    for priority in (BATCH, INTERACTIVE):
        scheduler.add(request("r", 4, 2, priority))
        before = policy._until_look
        while not scheduler.is_idle():
            turn(scheduler, 5.0)
        assert before - policy._until_look == (priority == INTERACTIVE)
