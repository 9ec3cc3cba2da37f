"""The scheduler with steps in flight: tokens are planned before the host knows the ones that come before them."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest

from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import FinishReason, SamplingParams
from fineinfer.scheduler import scheduler as scheduler_module
from fineinfer.scheduler.admission import LengthPredictor
from fineinfer.scheduler.plan import Chunk, PlanDraft, StepPlan
from fineinfer.scheduler.policy import POLICIES, LoadState, Turn
from fineinfer.scheduler.scheduler import BACKLOG_STEPS, Scheduler, SchedulerLimits, TrainingState
from fineinfer.scheduler.sequence import Sequence

MOST_PROMPT, MOST_OUTPUT = 40, 20
MIN_PREFILL_ROWS = 3  # as small as the steps here, so that the rule for mixed steps binds
NUM_SEEDS, NUM_TURNS = 20, 150


class Hopeful(LengthPredictor):
    """Expects the next two tokens to be the last."""

    def predict(self, sequence: Sequence) -> tuple[int, int]:
        median, most = super().predict(sequence)
        return min(2, median), min(2, most)


def token_of(sequence: Sequence, index: int) -> int:
    """The token a model would choose as number ``index`` of the output: another for every place."""
    return 1000 * int(sequence.request_id) + index


class Traffic:
    """Random requests, a scheduler, and a device that runs what was launched ``depth`` steps ago.

    ``rows_run`` and ``chosen`` are the device's own account of K and V in the pool, and of the tokens in its table.
    """

    def __init__(self, seed: int, depth: int) -> None:
        self.rng, self.depth = random.Random(seed), depth
        self.kv = KVCache(self.rng.randint(MOST_PROMPT + MOST_OUTPUT, 130), 8, MOST_PROMPT + MOST_OUTPUT)
        most = self.rng.choice([8, 24, 64])
        self.limits = SchedulerLimits(self.rng.choice([1, 4, 8, 8]), most, 1.0, self.rng.choice([None, 4, most // 2]))
        self.scheduler = Scheduler(self.kv, self.limits, POLICIES["inference-first"])
        if self.rng.random() < 0.8:
            self.scheduler.predictor = Hopeful()
        self.in_flight: deque[list[tuple[Chunk, int | None]]] = deque()
        self.open: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.stops_at: dict[Sequence, int] = {}  # index of the output token that ends a request early
        self.rows_run: Counter[Sequence] = Counter()
        self.chosen: Counter[Sequence] = Counter()
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------ a turn, in the order of EngineLoop.step

    def turn(self, arrivals: bool) -> None:
        if arrivals and self.rng.random() < 0.4:
            self.arrive()
        if self.open and arrivals and self.rng.random() < 0.04:
            victim = self.rng.choice(self.open)
            self.seen["aborted in flight"] += victim.num_in_flight > 0
            self.end(victim, FinishReason.ABORT)
        before = {sequence: sequence.num_uncomputed for sequence in self.scheduler.running}
        waiting = {sequence for sequence in self.scheduler.waiting if sequence.num_in_flight}
        plan = self.scheduler.plan(0.0, TrainingState())
        self.check_admission(waiting)
        self.check_rows(plan, before)
        self.launch(plan)
        self.check_counts()
        while self.in_flight and (not plan.chunks or len(self.in_flight) > self.depth):
            self.collect()
        self.check_counts()

    def arrive(self) -> None:
        num_prompt, most = self.rng.randint(1, MOST_PROMPT), self.rng.randint(1, MOST_OUTPUT)
        name = str(len(self.open) + len(self.ended))
        params = SamplingParams(max_tokens=most if self.rng.random() < 0.5 else None)
        made = Sequence(name, b"api", [1] * num_prompt, params, num_prompt + most, float(name))
        if self.rng.random() < 0.3:
            self.stops_at[made] = self.rng.randrange(most)
        self.open.append(made)
        self.scheduler.add(made)

    def launch(self, plan: StepPlan) -> None:
        for sequence in plan.preempted:
            self.rows_run[sequence] = 0
            self.seen["preempted"] += 1
            self.seen["preempted in flight"] += sequence.num_in_flight > 0
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        step = [(chunk, self.run(chunk)) for chunk in plan.chunks]
        if step:
            self.in_flight.append(step)
        for chunk in plan.chunks:
            self.scheduler.launched(chunk)

    def run(self, chunk: Chunk) -> int | None:
        """What the device does with a chunk; the token that it chooses."""
        sequence, stop = chunk.sequence, chunk.start + chunk.length
        there = len(sequence.prompt) + self.chosen[sequence]
        assert chunk.length > 0 and sequence.row is not None and sequence.finish_reason is None
        assert chunk.start == self.rows_run[sequence], "rows are run in order, each once"
        assert stop <= there, "a row needs a token that exists"
        assert chunk.length == 1 or len(sequence.tokens(chunk.start, stop)) == chunk.length, "only decode rows go blind"
        assert self.kv.length(sequence.row) == stop, "every row has its slot"
        assert there < sequence.max_total_tokens, "its last token is on the way"
        assert chunk.samples == (stop == there)
        self.seen["decode rows of an unknown token"] += not sequence.tokens(chunk.start, stop)
        self.rows_run[sequence] = stop
        if not chunk.samples:
            return None
        self.chosen[sequence] += 1
        return token_of(sequence, self.chosen[sequence] - 1)

    def collect(self) -> None:
        for chunk, token in self.in_flight.popleft():
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                continue
            self.scheduler.commit(chunk, token)
            if token is None:
                continue
            index = len(sequence.output) - 1
            assert sequence.output[index] == token_of(sequence, index), "tokens arrive in order, each once"
            if index == self.stops_at.get(sequence):
                self.seen["stopped with another in flight"] += sequence.num_in_flight > 0
                self.end(sequence, FinishReason.STOP)
            elif len(sequence.prompt) + len(sequence.output) >= sequence.max_total_tokens:
                self.seen["ended while it waited"] += sequence.row is None
                self.end(sequence, FinishReason.LENGTH)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self.open.remove(sequence)
        self.ended.append(sequence)

    # ------------------------------------------------------------ what must hold

    def check_admission(self, waited_for_a_token: set[Sequence]) -> None:
        assert not waited_for_a_token & set(self.scheduler.running), "its newest token is not known yet"
        self.seen["held back for a token in flight"] += len(waited_for_a_token)

    def check_rows(self, plan: StepPlan, before: dict[Sequence, int]) -> None:
        assert plan.num_rows <= self.limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        num_decodes = sum(chunk.sequence.num_uncomputed == 1 for chunk in plan.chunks)
        if self.limits.max_mixed_tokens is None or not num_decodes:
            return
        # one preempted in this plan may have counted with what it had left before
        left = [sequence.num_uncomputed for sequence in self.scheduler.running]
        left += [before.get(sequence, sequence.num_uncomputed) for sequence in plan.preempted]
        backlog = sum(number for number in left if number > 1)
        beside = max(MIN_PREFILL_ROWS, backlog // BACKLOG_STEPS)
        most = max(self.limits.max_mixed_tokens, num_decodes + beside)
        assert plan.num_rows <= most
        self.seen["mixed step at its limit"] += num_decodes < plan.num_rows == most < self.limits.max_num_batched_tokens

    def check_counts(self) -> None:
        launched = Counter(chunk.sequence for step in self.in_flight for chunk, _ in step if chunk.samples)
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert Counter([*running, *waiting]) == Counter(self.open)
        for sequence in self.open:
            assert sequence.num_in_flight == launched[sequence] <= self.depth + 1
            assert 0 <= sequence.num_computed == self.rows_run[sequence] <= sequence.num_tokens
            assert sequence.num_tokens <= sequence.max_total_tokens
            assert self.chosen[sequence] == sequence.num_generated
        assert all(sequence.row is None and sequence.num_computed == 0 for sequence in waiting)
        assert all(self.kv.length(sequence.row) == sequence.num_computed for sequence in running)
        self.kv.check_integrity()
        assert self.kv.num_used == sum(sequence.num_computed for sequence in running)

    def check_end(self) -> None:
        assert self.scheduler.is_idle() and not self.in_flight and not self.open
        assert self.kv.num_used == 0 and self.kv.num_free_rows == 8
        for sequence in self.ended:
            most = sequence.max_total_tokens - len(sequence.prompt)
            wanted = {
                FinishReason.LENGTH: most,
                FinishReason.STOP: self.stops_at.get(sequence, most) + 1,
                FinishReason.ABORT: len(sequence.output),
            }[sequence.finish_reason]
            assert sequence.output == [token_of(sequence, index) for index in range(wanted)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_traffic_with_steps_in_flight(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MIN_PREFILL_ROWS", MIN_PREFILL_ROWS)
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        traffic = Traffic(seed, depth)
        for _ in range(NUM_TURNS):
            traffic.turn(arrivals=True)
        for _ in range(3000):
            if traffic.scheduler.is_idle() and not traffic.in_flight:
                break
            traffic.turn(arrivals=False)
        traffic.check_end()
        assert {FinishReason.LENGTH, FinishReason.STOP} <= {sequence.finish_reason for sequence in traffic.ended}
        seen += traffic.seen
    happened = {"preempted", "mixed step at its limit"}
    if depth:  # or else these tests show nothing
        happened |= {"aborted in flight", "stopped with another in flight", "decode rows of an unknown token"}
        happened |= {"preempted in flight", "ended while it waited"}
    if depth > 1:
        happened |= {"held back for a token in flight"}
    assert set(seen) == happened


def make(num_slots: int = 100, **limits: int) -> tuple[Scheduler, KVCache]:
    kv = KVCache(num_slots, 8, num_slots)
    bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    return Scheduler(kv, SchedulerLimits(deferral_bound_s=1.0, **bounds), POLICIES["inference-first"]), kv


def add(scheduler: Scheduler, name: str, num_prompt: int, most: int) -> Sequence:
    made = Sequence(name, b"api", [1] * num_prompt, SamplingParams(max_tokens=most), num_prompt + most, float(name))
    scheduler.add(made)
    return made


def launch(scheduler: Scheduler) -> tuple[Chunk, ...]:
    chunks = scheduler.plan(0.0, TrainingState()).chunks
    for chunk in chunks:
        scheduler.launched(chunk)
    return chunks


def test_a_decode_row_follows_while_its_token_is_in_flight() -> None:
    scheduler, _ = make()
    sequence = add(scheduler, "0", 5, 3)
    steps = [launch(scheduler) for _ in range(3)]
    assert [(c.start, c.length, c.samples) for (c,) in steps] == [(0, 5, True), (5, 1, True), (6, 1, True)]
    assert sequence.num_in_flight == 3 and not sequence.output
    assert launch(scheduler) == () and sequence.row is not None  # the third is its last
    for index, (chunk,) in enumerate(steps):
        scheduler.commit(chunk, 10 + index)
    assert sequence.output == [10, 11, 12] and sequence.num_in_flight == 0


def test_a_chunk_that_chooses_nothing_leaves_no_token_in_flight() -> None:
    scheduler, _ = make(max_num_batched_tokens=4)
    sequence = add(scheduler, "0", 6, 3)
    (first,) = launch(scheduler)
    assert not first.samples and sequence.num_in_flight == 0
    (second,) = launch(scheduler)
    assert (second.start, second.length, second.samples) == (4, 2, True) and sequence.num_in_flight == 1
    scheduler.commit(first, None)
    assert sequence.num_in_flight == 1 and not sequence.output
    scheduler.commit(second, 9)
    assert sequence.num_in_flight == 0 and sequence.output == [9]


def test_a_preempted_request_waits_for_its_tokens_and_is_computed_with_them() -> None:
    scheduler, kv = make(num_slots=24)
    scheduler.predictor = Hopeful()
    old, young = add(scheduler, "0", 10, 12), add(scheduler, "1", 8, 12)
    steps = [launch(scheduler), launch(scheduler)]
    while young.row is not None:  # two steps in flight all the time
        steps.append(launch(scheduler))
        for chunk in steps.pop(0):
            scheduler.commit(chunk, 7)
    assert young.num_preemptions == 1 and young.num_computed == 0 and young.num_in_flight == 1
    scheduler.finish(old, FinishReason.ABORT)
    assert kv.num_used == 0 and launch(scheduler) == () and young.row is None  # there is room, but no token
    for chunk in [chunk for step in steps for chunk in step if chunk.sequence is young]:
        scheduler.commit(chunk, 8)
    assert young.output == [7] * (len(young.output) - 1) + [8]
    (chunk,) = launch(scheduler)
    assert (chunk.sequence, chunk.start, chunk.length, chunk.samples) == (young, 0, 8 + len(young.output), True)


def test_rows_beside_decode_rows_are_bounded_but_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MIN_PREFILL_ROWS", MIN_PREFILL_ROWS)
    scheduler, _ = make(1000, max_mixed_tokens=8)
    add(scheduler, "0", 64, 20)
    assert [chunk.length for chunk in launch(scheduler)] == [64]  # nobody waits for a next token
    add(scheduler, "1", 20, 4)
    assert [chunk.length for chunk in launch(scheduler)] == [1, 7]
    add(scheduler, "2", 200, 4)
    assert [chunk.length for chunk in launch(scheduler)] == [1, 13, 40]  # a quarter of the 213 that wait


def test_a_request_that_ends_in_flight_frees_its_slots_at_once() -> None:
    scheduler, kv = make()
    sequence = add(scheduler, "0", 5, 9)
    launch(scheduler)
    launch(scheduler)
    scheduler.finish(sequence, FinishReason.ABORT)
    assert scheduler.is_idle() and kv.num_used == 0 and launch(scheduler) == ()
    kv.check_integrity()


def cached(kv: KVCache, sequence: Sequence) -> int:
    """Tokens of a request that a later one like it would find."""
    assert kv.prefixes is not None
    return len(kv.prefixes.match((None, None), np.array(sequence.tokens(0, sequence.num_tokens), dtype=np.int32)))


def make_caching(num_slots: int = 24) -> tuple[Scheduler, KVCache]:
    kv = KVCache(num_slots, 8, num_slots, keep_prefixes=True)
    scheduler = Scheduler(kv, SchedulerLimits(8, 64, 1.0), POLICIES["inference-first"])
    scheduler.predictor = Hopeful()
    return scheduler, kv


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.ABORT])
def test_what_a_step_in_flight_computes_is_not_shared(end: FinishReason) -> None:
    scheduler, kv = make_caching()
    sequence = add(scheduler, "0", 5, 9)
    steps = [launch(scheduler), launch(scheduler)]
    scheduler.commit(steps[0][0], 7)
    assert (sequence.num_computed, sequence.num_proven) == (6, 5)
    scheduler.finish(sequence, end)
    assert cached(kv, sequence) == kv.num_used == 5


def test_a_request_preempted_behind_a_step_that_fails_leaves_nothing() -> None:
    scheduler, kv = make_caching()
    old, young = add(scheduler, "0", 10, 12), add(scheduler, "1", 8, 12)
    young.prompt = [2] * 8
    steps = [launch(scheduler), launch(scheduler)]
    while young.row is not None:  # two steps in flight all the time
        proven = young.num_proven
        steps.append(launch(scheduler))
        for chunk in steps.pop(0):
            scheduler.commit(chunk, 7)
    assert young.num_in_flight and young.num_proven == 0
    assert 8 <= cached(kv, young) <= proven < len(young.prompt) + len(young.output), "its last step is not known"
    scheduler.finish(young, FinishReason.ERROR)
    assert cached(kv, young) == 0 and kv.num_cached == 0
    scheduler.finish(old, FinishReason.STOP)
    assert cached(kv, old) > 10, "what ends well later is known again"
    kv.check_integrity()


def test_a_policy_is_told_what_of_a_long_prompt_earlier_steps_computed_but_not_what_was_cached() -> None:
    scheduler, _ = make_caching(400)
    loads: list[LoadState] = []

    def watch(load: LoadState) -> Turn:
        loads.append(load)
        return POLICIES["inference-first"](load)

    scheduler._policy = watch
    first = add(scheduler, "0", 40, 1)
    for _ in range(2):
        for chunk in launch(scheduler):
            scheduler.commit(chunk, 7 if chunk.samples else None)
    scheduler.finish(first, FinishReason.STOP)
    loads.clear()
    second = add(scheduler, "1", 200, 5)  # its first 40 tokens are those of the other
    for _ in range(4):
        for chunk in launch(scheduler):
            scheduler.commit(chunk, 7 if chunk.samples else None)
    assert second.num_cached == 40 and second.output
    assert [(load.prefill_tokens, load.prefilled_tokens) for load in loads] == [(0, 0), (96, 64), (32, 128), (0, 0)]


def test_a_request_preempted_in_its_prompt_says_of_what_it_finds_later_nothing() -> None:
    scheduler, kv = make_caching(150)
    old, young = add(scheduler, "0", 20, 60), add(scheduler, "1", 66, 2)
    young.prompt = [2] * 66
    for chunk in launch(scheduler):
        scheduler.commit(chunk, 7 if chunk.samples else None)
    assert old.output and young.num_computed == 44
    scheduler._preempt(young, PlanDraft())
    scheduler.finish(old, FinishReason.STOP)
    while not young.output:
        for chunk in launch(scheduler):
            scheduler.commit(chunk, 7 if chunk.samples else None)
    assert young.num_cached == 44 and young.num_found == 0
    assert scheduler.rows.num_hits == 0 and scheduler.rows.num_queries == 86
    scheduler.finish(young, FinishReason.LENGTH)
    kv.check_integrity()
