"""The scheduler: owner of queues and requests. It plans turns and commits their results; it never sees a tensor."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import FinishReason
from fineinfer.scheduler.admission import MAX_PREEMPTIONS, LengthPredictor, PeakCheck, expected_peak
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.plan import Chunk, PlanDraft, StepPlan
from fineinfer.scheduler.policy import LoadState, Policy, TokenClock
from fineinfer.scheduler.rows import SequenceRows
from fineinfer.scheduler.sequence import Sequence
from fineinfer.scheduler.slo import LoadFree, SloPolicy
from fineinfer.scheduler.waiting import AGED_S, WaitingQueue

BACKLOG_STEPS = 4  # a backlog of prompt tokens is spread over at least so many forwards
MIN_PREFILL_ROWS = 256  # beside however many decode rows: fewer would starve the prompts


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one forward.

    Attributes:
        max_num_seqs: Most requests that hold KV at once.
        max_num_batched_tokens: Most rows of one forward.
        max_mixed_tokens: Rows that a forward with decode rows among them has as a rule, so that their next tokens are
            not held up; more when there are many of them or the prompts would wait for more than ``BACKLOG_STEPS``
            such forwards. None is no such rule.
        deferral_bound_s: Longest a waiting request may be held back for training.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    deferral_bound_s: float
    max_mixed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What the scheduler knows of training: counts and seconds, no tensors.

    Attributes:
        ready: A unit could run now.
        update_started: An optimizer update is under way.
        update_left_s: Estimated seconds of its rest, or of a whole one.
        unit_s: Of a unit.
        slots_withheld: Slots that no further request may be admitted to.
        beside: Units can run beside steps.
        max_share: Part of the time that the job may take.
    """

    ready: bool = False
    update_started: bool = False
    update_left_s: float = 0.0
    unit_s: float = 0.0
    slots_withheld: int = 0
    beside: bool = False
    max_share: float = 1.0


class Scheduler:
    """By priority, in order of arrival, per request; chunked prefill beside decode; preempt and recompute as backstop.

    Args:
        kv_cache: The slot accounting (and pool) that requests draw from.
        limits: Bounds of one forward.
        policy: Co-scheduling policy.
        latency: Slice times; None for one of its own that knows nothing.

    Attributes:
        reachable_slots: Slots that the pool could have under the budget of the moment.
    """

    def __init__(
        self, kv_cache: KVCache, limits: SchedulerLimits, policy: Policy, latency: LatencyModel | None = None
    ) -> None:
        self._kv = kv_cache
        self._limits = limits
        self._policy = policy
        self._latency = LatencyModel() if latency is None else latency
        self._last_unit_s = self._last_step_s = 0.0
        self.reachable_slots: Callable[[], int] = lambda: kv_cache.max_slots
        self._asked = False  # the last plan asked for a larger pool
        self.rows = SequenceRows(kv_cache)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by rank: who is last gives way first
        self.predictor = LengthPredictor()
        self._peak = PeakCheck()
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request. It has been checked to fit the pool's maximum."""
        sequence.delayed_before_s = self._latency.delayed_s
        self.waiting.add(sequence)

    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.running and not self.waiting

    def reserved_slots(self) -> int:
        """Peak of the admitted requests: a lease training cannot take."""
        return expected_peak(self.running, self.predictor)

    def plan(self, now_s: float, training: TrainingState) -> StepPlan:
        """Decide one turn.

        Args:
            now_s: ``time.monotonic()``.
            training: Whether and how long training could run.
        """
        turn = self._policy(self._load(now_s, training))
        draft = PlanDraft()
        if turn.admit:
            self._admit(now_s, draft, self._kv.num_slots - training.slots_withheld)
        if turn.infer:
            self._fill(now_s, draft)
        self._asked = draft.slots_wanted > 0
        # nothing could be admitted and nothing runs: memory is elsewhere, so training may use the turn unless it
        # holds that memory (then the ladder takes it back before the next turn)
        elsewhere = bool(self.waiting) and not draft.chunks and turn.admit and not self._asked
        train = turn.train or (elsewhere and training.ready)
        if train:
            self._last_unit_s = now_s
        idle = not draft.chunks and not any(sequence.num_in_flight for sequence in self.running)
        stuck = self._asked and idle and (turn.infer or not self.running)
        chunks, preempted, hopeless = tuple(draft.chunks.values()), tuple(draft.preempted), tuple(draft.hopeless)
        plan = StepPlan(chunks, train, preempted, draft.slots_wanted, stuck, hopeless)
        if plan.chunks:
            kind = "decode" if plan.num_rows == len(plan.chunks) else "prefill"
            self._last_step_s = self._latency.estimate(kind, plan.num_rows)
        return plan

    def _load(self, now_s: float, training: TrainingState) -> LoadState:
        """What the policy may look at."""
        oldest_s, estimate = self.waiting.oldest_arrival_s(), self._latency.estimate
        prompts = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        prefill_tokens = sum(sequence.num_uncomputed for sequence in prompts)
        num_prompt = prefill_tokens + self.waiting.num_tokens
        return LoadState(
            oldest_wait_s=None if oldest_s is None else now_s - oldest_s,
            num_running=len(self.running),
            training_ready=training.ready,
            update_started=training.update_started,
            update_left_s=training.update_left_s,
            deferral_bound_s=self._limits.deferral_bound_s,
            now_s=now_s,
            prefill_tokens=prefill_tokens,
            prefilled_tokens=sum(sequence.num_computed - sequence.num_cached for sequence in prompts),
            queued_tokens=self.waiting.num_tokens,
            clocks=tuple(
                TokenClock(sequence.first_token_s, sequence.num_generated - 1)
                for sequence in (self.running if training.beside and training.ready else ())
                if sequence.first_token_s is not None
            ),
            in_flight_s=self._last_step_s if any(s.num_in_flight for s in self.running) else 0.0,
            step_s=estimate("decode", len(self.running)),
            unit_s=training.unit_s,
            trained_s=self._latency.trained_s,
            last_unit_s=self._last_unit_s,
            beside=training.beside,
            step_beside_s=estimate("decode", len(self.running), beside=True),
            prefill_s=estimate("prefill", num_prompt) if num_prompt else 0.0,
            prefill_beside_s=estimate("prefill", num_prompt, beside=True) if num_prompt else 0.0,
            max_share=training.max_share,
        )

    def _admit(self, now_s: float, draft: PlanDraft, num_slots: int) -> None:
        """Move waiting requests that fit to the running list, up to the first that does not."""
        while (candidate := self.waiting.next(now_s)) is not None and not candidate.num_in_flight:
            full = len(self.running) >= self._limits.max_num_seqs
            peak = 0 if full else self._peak([*self.running, candidate], self.predictor, num_slots)
            if full or peak > num_slots:
                if expected_peak([candidate], self.predictor) > self.reachable_slots():
                    draft.hopeless.append(candidate)  # it would let nobody past for ever
                    return
                if not full and self._ask(peak, draft):
                    return
                victims = self._giving_way(candidate, num_slots)
                if not victims:
                    return
                for victim in victims:
                    self._preempt(victim, draft)
            if not self.rows.open(candidate, self.predictor.predict(candidate)[1]):
                return
            candidate.admitted_s = now_s
            if candidate.first_scheduled_s is None:
                candidate.first_scheduled_s = now_s
            self.waiting.admitted(candidate)
            bisect.insort(self.running, candidate, key=_rank)

    def _ask(self, num_slots: int, draft: PlanDraft) -> bool:
        """Ask for a pool of so many slots; False if it cannot grow, or was asked to last turn and did not suffice."""
        missing = min(num_slots, self._kv.max_slots) - self._kv.num_slots
        draft.slots_wanted = max(draft.slots_wanted, missing)
        return missing > 0 and not self._asked

    def _giving_way(self, candidate: Sequence, num_slots: int) -> list[Sequence]:
        """Fewest requests of worse priority whose going lets a candidate in, last of rank first; none if not all do."""
        keep, victims = list(self.running), list[Sequence]()
        while keep and keep[-1].num_preemptions < MAX_PREEMPTIONS and keep[-1].priority > candidate.priority:
            victims.append(keep.pop())
            if expected_peak([*keep, candidate], self.predictor) <= num_slots:
                return victims
        return []

    def _fill(self, now_s: float, draft: PlanDraft) -> None:
        """Decode rows of all, then prefill chunks, within the row budget and the pool."""
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.num_uncomputed == 1 else prompts).append(sequence)
        # better priorities first, each in order of admission; but one that has waited for rows too long goes before
        prompts.sort(key=lambda s: (s.priority if now_s - s.admitted_s < AGED_S else -math.inf, s.admitted_s))
        budget = self._limits.max_num_batched_tokens
        for group in (decoding, prompts):
            if group is prompts:
                budget = self._prefill_budget(len(draft.chunks), prompts)
            for sequence in group:
                if budget == 0:
                    break
                if sequence.row is None:  # preempted for one of those before it
                    continue
                if sequence.num_in_flight and sequence.max_output_left <= 0:  # its last token is on the way
                    continue
                uncomputed = sequence.num_uncomputed
                length = min(uncomputed, budget)
                if self._append(sequence, sequence.row, length, draft):
                    draft.chunks[sequence] = Chunk(sequence, sequence.num_computed, length, length == uncomputed)
                    budget -= length

    def _append(self, sequence: Sequence, row: int, length: int, draft: PlanDraft) -> bool:
        """Give a running request slots, at the cost of those of lower rank if the pool cannot grow.

        Returns:
            False if it must wait: for the pool to grow, or, being last, for another to end.
        """
        while not self._kv.append(row, length):
            if self._ask(max(self.reserved_slots(), self._kv.num_slots + length), draft):
                return False
            if self.running[-1] is sequence:
                if len(self.running) == 1 and sequence.num_computed + length > self.reachable_slots():
                    draft.hopeless.append(sequence)
                return False
            self._preempt(self.running[-1], draft)
        return True

    def _prefill_budget(self, num_decodes: int, prompts: list[Sequence]) -> int:
        """Rows left for prompts beside the decode rows of a forward."""
        limit, most = self._limits.max_mixed_tokens, self._limits.max_num_batched_tokens
        if limit is not None and num_decodes and prompts:
            backlog = sum(sequence.num_uncomputed for sequence in prompts if sequence.row is not None)
            most = min(most, max(limit, num_decodes + max(MIN_PREFILL_ROWS, backlog // BACKLOG_STEPS)))
        return max(0, most - num_decodes)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Give up a request's KV, planned rows included; it keeps its place in the queue and is recomputed later."""
        draft.chunks.pop(sequence, None)
        draft.preempted.append(sequence)
        self.rows.close(sequence)
        self.running.remove(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def launched(self, chunk: Chunk) -> None:
        """Record that a chunk's step is on its way to the device; the next plan builds on it."""
        chunk.sequence.num_computed = chunk.start + chunk.length
        chunk.sequence.num_in_flight += chunk.samples

    def training_s(self, sequence: Sequence) -> float:
        """Seconds by which training can have held up a request since it was queued."""
        return self._latency.delayed_s - sequence.delayed_before_s

    def commit(self, chunk: Chunk, token_id: int | None, now_s: float | None = None) -> None:
        """Record that a launched chunk ran, which token its last row chose, and when that was known."""
        sequence = chunk.sequence
        sequence.num_in_flight -= chunk.samples
        # of a row that it has lost since, nothing counts: then num_computed is 0 or counts from anew
        sequence.num_proven = min(max(sequence.num_proven, chunk.start + chunk.length), sequence.num_computed)
        if token_id is not None:
            sequence.output.append(token_id)
            sequence.last_token_s = now_s
            sequence.first_token_s = now_s if sequence.first_token_s is None else sequence.first_token_s

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request in whatever state it is and free all it holds; safe to call twice."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        (self.waiting if sequence.row is None else self.running).remove(sequence)
        (self.rows.discard if reason is FinishReason.ERROR else self.rows.close)(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.predictor.record(sequence.adapter_name, len(sequence.output))
            self._observe(sequence)

    def _observe(self, sequence: Sequence) -> None:
        """Tell a policy that adapts how a finished interactive request fared."""
        first_s, last_s = sequence.first_token_s, sequence.last_token_s
        if not isinstance(self._policy, SloPolicy) or sequence.priority > 0 or first_s is None or last_s is None:
            return
        gaps = len(sequence.output) - 1
        alone = LoadFree(
            self._latency.estimate("decode", max(1, len(self.running))),
            self._latency.estimate("prefill", len(sequence.prompt)),
        )
        tpot_s = (last_s - first_s) / gaps if gaps > 0 else None
        self._policy.observe_request(first_s - sequence.arrival_s, tpot_s, alone, self.training_s(sequence))


def _rank(sequence: Sequence) -> tuple[bool, int, float]:
    """Order in which requests keep their slots: often preempted ones first, then by priority and arrival."""
    return sequence.num_preemptions < MAX_PREEMPTIONS, sequence.priority, sequence.arrival_s
