"""The scheduler: owner of queues and requests. It plans turns and commits their results; it never sees a tensor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import FinishReason
from fineinfer.scheduler.admission import LengthPredictor, peak_tokens
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.plan import Chunk, StepPlan
from fineinfer.scheduler.policy import LoadState, Policy
from fineinfer.scheduler.rows import SequenceRows
from fineinfer.scheduler.sequence import Sequence
from fineinfer.scheduler.slo import LoadFree, SloPolicy

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
    """What the scheduler knows of training: counts and seconds, no tensors."""

    ready: bool = False
    update_started: bool = False
    update_left_s: float = 0.0
    unit_s: float = 0.0


class Scheduler:
    """First come, first served, per request; chunked prefill beside decode; preempt and recompute as backstop.

    Args:
        kv_cache: The slot accounting (and pool) that requests draw from.
        limits: Bounds of one forward.
        policy: Co-scheduling policy.
        latency: Slice times; None for one of its own that knows nothing.
    """

    def __init__(
        self, kv_cache: KVCache, limits: SchedulerLimits, policy: Policy, latency: LatencyModel | None = None
    ) -> None:
        self._kv = kv_cache
        self._limits = limits
        self._policy = policy
        self._latency = LatencyModel() if latency is None else latency
        self._last_unit_s = 0.0
        self.rows = SequenceRows(kv_cache)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.predictor = LengthPredictor()
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request. It has been checked to fit the pool's maximum."""
        sequence.trained_before_s = self._latency.trained_s
        self.waiting.append(sequence)

    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.running and not self.waiting

    def reserved_slots(self) -> int:
        """Peak of the admitted requests: a lease training cannot take."""
        return peak_tokens((s.num_tokens for s in self.running), (self.predictor.predict_left(s) for s in self.running))

    def plan(self, now_s: float, training: TrainingState) -> StepPlan:
        """Decide one turn.

        Args:
            now_s: ``time.monotonic()``.
            training: Whether and how long training could run.
        """
        oldest = now_s - self.waiting[0].arrival_s if self.waiting else None
        turn = self._policy(
            LoadState(
                oldest_wait_s=oldest,
                num_running=len(self.running),
                training_ready=training.ready,
                update_started=training.update_started,
                update_left_s=training.update_left_s,
                deferral_bound_s=self._limits.deferral_bound_s,
                now_s=now_s,
                prefill_tokens=sum(s.num_uncomputed for s in self.running if s.num_uncomputed > 1),
                step_s=self._latency.estimate("decode", len(self.running)),
                unit_s=training.unit_s,
                trained_s=self._latency.trained_s,
                last_unit_s=self._last_unit_s,
            )
        )
        slots_wanted = self._admit(now_s) if turn.admit else 0
        chunks, preempted = self._fill() if turn.infer else ([], [])
        # nothing could be admitted and nothing runs: memory is elsewhere, so training may use the turn unless it
        # holds that memory (then the ladder takes it back before the next turn)
        stuck = bool(self.waiting) and not chunks and turn.admit and slots_wanted == 0
        train = turn.train or (stuck and training.ready)
        if train:
            self._last_unit_s = now_s
        return StepPlan(tuple(chunks), train, tuple(preempted), slots_wanted)

    def _admit(self, now_s: float) -> int:
        """Move waiting requests that fit to the running list; slots missing for the first that does not."""
        while self.waiting and len(self.running) < self._limits.max_num_seqs:
            candidate = self.waiting[0]
            if candidate.num_in_flight:  # preempted behind a launched step: its newest token is not known yet
                return 0
            members = [*self.running, candidate]
            peak = peak_tokens((s.num_tokens for s in members), (self.predictor.predict_left(s) for s in members))
            if peak > self._kv.num_slots:
                return min(peak, self._kv.max_slots) - self._kv.num_slots
            if not self.rows.open(candidate, self.predictor.predict_left(candidate)):
                return 0
            if candidate.first_scheduled_s is None:
                candidate.first_scheduled_s = now_s
            self.running.append(self.waiting.popleft())
        return 0

    def _fill(self) -> tuple[list[Chunk], list[Sequence]]:
        """Decode rows of all, then prefill chunks in order of admission, within the row budget and the pool."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.num_uncomputed == 1 else prompts).append(sequence)
        budget = self._limits.max_num_batched_tokens
        for group in (decoding, prompts):
            if group is prompts:
                budget = self._prefill_budget(len(chunks), prompts)
            for sequence in group:
                if budget == 0:
                    break
                if sequence.row is None:  # preempted for one of those before it
                    continue
                if sequence.num_in_flight and sequence.max_output_left <= 0:  # its last token is on the way
                    continue
                uncomputed = sequence.num_uncomputed
                length = min(uncomputed, budget)
                while sequence.row is not None and not self._kv.append(sequence.row, length):
                    victim = self._pick_victim(planned={chunk.sequence.request_id for chunk in chunks})
                    if victim is None:
                        break
                    self._preempt(victim)
                    preempted.append(victim)
                else:
                    if sequence.row is not None:
                        chunks.append(Chunk(sequence, sequence.num_computed, length, length == uncomputed))
                        budget -= length
        return chunks, preempted

    def _prefill_budget(self, num_decodes: int, prompts: list[Sequence]) -> int:
        """Rows left for prompts beside the decode rows of a forward."""
        limit, most = self._limits.max_mixed_tokens, self._limits.max_num_batched_tokens
        if limit is not None and num_decodes and prompts:
            backlog = sum(sequence.num_uncomputed for sequence in prompts if sequence.row is not None)
            most = min(most, max(limit, num_decodes + max(MIN_PREFILL_ROWS, backlog // BACKLOG_STEPS)))
        return max(0, most - num_decodes)

    def _pick_victim(self, planned: set[str]) -> Sequence | None:
        """The latest admitted request that has no rows in this turn yet."""
        return next((s for s in reversed(self.running) if s.request_id not in planned), None)

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a request's KV; it keeps its place at the head of the queue and is recomputed later."""
        self.rows.close(sequence)
        self.running.remove(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        position = sum(1 for other in self.waiting if other.arrival_s <= sequence.arrival_s)
        self.waiting.insert(position, sequence)

    def launched(self, chunk: Chunk) -> None:
        """Record that a chunk's step is on its way to the device; the next plan builds on it."""
        chunk.sequence.num_computed = chunk.start + chunk.length
        chunk.sequence.num_in_flight += chunk.samples

    def training_s(self, sequence: Sequence) -> float:
        """Seconds of training since a request was queued."""
        return self._latency.trained_s - sequence.trained_before_s

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
        """Tell a policy that adapts how a finished request fared."""
        first_s, last_s = sequence.first_token_s, sequence.last_token_s
        if not isinstance(self._policy, SloPolicy) or first_s is None or last_s is None:
            return
        gaps = len(sequence.output) - 1
        alone = LoadFree(
            self._latency.estimate("decode", max(1, len(self.running))),
            self._latency.estimate("prefill", len(sequence.prompt)),
        )
        tpot_s = (last_s - first_s) / gaps if gaps > 0 else None
        self._policy.observe_request(first_s - sequence.arrival_s, tpot_s, alone, self.training_s(sequence))
