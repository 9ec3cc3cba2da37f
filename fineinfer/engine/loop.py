"""The engine loop: drain the inbox, plan, run, commit, send; one slice of training between two looks at the inbox."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.engine.adapter_traffic import AdapterTraffic
from fineinfer.engine.inbox import Inbox, RequestDesk, now_s
from fineinfer.engine.memory_ladder import MemoryLadder
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.statistics import Counters
from fineinfer.engine.training_host import TrainingHost
from fineinfer.messages import (
    CancelJob,
    CheckAdapter,
    Drain,
    Drained,
    PauseJob,
    RemoveAdapter,
    RequestOutput,
    ResizeKV,
    SetAdapter,
    SetBudget,
    StartJob,
    ToEngine,
)
from fineinfer.request import FinishReason
from fineinfer.runner.results import ChunkResult, Launched, Runner
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.plan import Chunk, StepPlan
from fineinfer.scheduler.scheduler import Scheduler
from fineinfer.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1
BUSY_WAIT_S = 2e-3  # while an adapter is being read
POLL_S = 1e-4  # between two looks at the device while a step runs beside training
STATS_PERIOD_S = 1.0
TOO_LARGE_NOW = "The memory budget has been lowered and has no room for a request this long; try again later."


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine, wired once in process.py; every part owns its own state."""

    inbox: Inbox
    outbox: Outbox
    desk: RequestDesk
    scheduler: Scheduler
    runner: Runner
    training: TrainingHost
    ladder: MemoryLadder
    adapters: AdapterRegistry
    adapter_traffic: AdapterTraffic
    latency: LatencyModel
    counters: Counters


class _InFlight(NamedTuple):
    """A launched step; whether training is to run beside it, and whether some does in any case."""

    launched: Launched
    train: bool
    beside: bool


class EngineLoop:
    """Owns nothing but the order of things.

    Args:
        parts: What it drives.
        eos_token_ids: The model's end tokens.

    Attributes:
        parts: As given; for tests and benchmarks that drive the loop turn by turn.
        stopped: Drained; the process may end.
    """

    def __init__(self, parts: EngineParts, eos_token_ids: tuple[int, ...]) -> None:
        self.parts = parts
        self._eos = frozenset(eos_token_ids)
        self._drain_until_s: float | None = None
        self._stats_at_s = 0.0
        self._in_flight: deque[_InFlight] = deque()
        self.stopped = False

    def run(self) -> None:
        """Step until drained."""
        while not self.stopped:
            if not self.step():
                self.parts.inbox.wait(BUSY_WAIT_S if self.parts.adapter_traffic.busy else IDLE_WAIT_S)

    def step(self) -> bool:
        """One turn.

        Returns:
            False if there was nothing to do.
        """
        self._handle(self.parts.inbox.drain())
        if self.parts.adapter_traffic.turn(self.parts.training):
            self._stats_at_s = 0.0  # whoever waits for the new version hears of it at the end of this turn
        self.parts.ladder.follow_budget(self.parts.training.trainer, now_s())
        plan = self.parts.scheduler.plan(now_s(), self.parts.training.state(now_s()))
        for sequence in plan.hopeless:
            self.parts.desk.end(sequence, FinishReason.ERROR, "engine_overloaded", TOO_LARGE_NOW)
        worked, num_resizes = self._run_inference(plan), self.parts.ladder.num_resizes
        waits_for_training = plan.slots_wanted > 0 and not self._make_room(plan)
        waits_for_training = waits_for_training or self.parts.ladder.exceeds_budget
        worked = worked or self.parts.ladder.num_resizes != num_resizes  # whoever wanted slots may begin now
        beside = bool(plan.chunks) and self.parts.training.can_run_beside
        # what requests are being given now is not for a job that has nothing yet
        trains = plan.train and not beside and not (plan.slots_wanted > 0 and self.parts.training.stands_by)
        if trains or (waits_for_training and self.parts.training.should_finish(idle=not plan.chunks)):
            trained = (self.parts.training.feed if beside else self.parts.training.run_unit)()
            self.parts.counters.training_units += 1
            worked = worked or trained or bool(self.parts.scheduler.running)  # which waited for the unit
        self._finish_turn()
        return worked

    def _make_room(self, plan: StepPlan) -> bool:
        """Ask the ladder for slots; of the job as it is now: a unit beside the step may just have ended it."""
        return self.parts.ladder.make_room(plan.slots_wanted, self.parts.training.trainer, now_s(), plan.stuck)

    def _finish_turn(self) -> None:
        self.parts.training.tell(self.parts.ladder.take_steps())
        self.parts.training.end_pause()
        self.parts.outbox.flush()
        if now_s() - self._stats_at_s >= STATS_PERIOD_S:
            self._stats_at_s = now_s()
            self.parts.outbox.broadcast_stats()
        if self._drain_until_s is not None and (not self.parts.desk.open or now_s() > self._drain_until_s):
            self._stop()

    # ------------------------------------------------------------ inference

    def _run_inference(self, plan: StepPlan) -> bool:
        """Launch the plan, then take in what is due: while the device runs a step, the host commits the one before.

        A step with training beside it is waited for: training fills the gap behind it, and prompts that come meanwhile
        join the next step instead of the one after it.
        """
        beside = plan.train and self.parts.training.can_run_beside
        if plan.chunks:
            try:
                self._launch(plan.chunks, beside)
            except Exception:
                logger.exception("a forward of %d requests failed; running them one by one", len(plan.chunks))
                self._run_one_by_one(plan.chunks)
        worked = bool(plan.chunks)
        most = self.parts.runner.max_in_flight if plan.chunks and not beside else 0
        while len(self._in_flight) > most:
            if self._in_flight[0].train:
                self._train_until_done(self._in_flight[0].launched)
            self._collect()
            worked = True
            if len(self._in_flight) > most:  # its tokens are not to wait for the step behind it
                self.parts.outbox.flush()
        return worked

    def _launch(self, chunks: tuple[Chunk, ...], train: bool = False) -> None:
        beside = self.parts.training.step_begins() or train
        self._in_flight.append(_InFlight(self.parts.runner.launch(chunks), train, beside))
        for chunk in chunks:
            self.parts.scheduler.launched(chunk)

    def _train_until_done(self, step: Launched) -> None:
        """Keep training's stream busy while the device runs a step; one unit at least, however short that is.

        No more once somebody writes: a prompt's step should find few units on their way.
        """
        goes_on = True
        while True:
            fed = goes_on and self.parts.training.feed()
            self.parts.counters.training_units += fed
            if step.is_done:
                return
            goes_on = goes_on and not self.parts.inbox.has_mail
            if not fed:
                time.sleep(POLL_S)

    def _collect(self) -> None:
        step, _, beside = self._in_flight.popleft()
        results, seconds = step.collect()
        self.parts.latency.observe("decode" if step.is_decode else "prefill", step.num_rows, seconds, beside)
        for result in results:
            self._commit(result)

    def _run_one_by_one(self, chunks: tuple[Chunk, ...]) -> None:
        """Find the request that breaks the forward; the others go on."""
        while self._in_flight:
            self._collect()
        for chunk in chunks:
            if chunk.sequence.finish_reason is not None:
                continue
            try:
                self._launch((chunk,))
            except Exception as error:
                logger.warning("request %s failed: %s", chunk.sequence.request_id, error)
                self._fail(chunk.sequence)
            else:
                self._collect()

    def _fail(self, sequence: Sequence) -> None:
        self.parts.desk.end(sequence, FinishReason.ERROR, "server_error", "The model produced no usable output.")

    def _commit(self, result: ChunkResult) -> None:
        """Record what a chunk produced, send its token, end the request if it is done."""
        sequence, first = result.chunk.sequence, not result.chunk.sequence.output
        if sequence.finish_reason is not None:  # it ended while this step was in flight
            return
        if result.failed:
            self._fail(sequence)
            return
        self.parts.scheduler.commit(result.chunk, result.token_id, now_s())
        if sequence.num_preemptions == 0:
            stop = min(result.chunk.start + result.chunk.length, len(sequence.prompt))
            self.parts.counters.prompt_tokens += max(0, stop - result.chunk.start)
        if result.token_id is None:
            return
        self.parts.counters.generation_tokens += 1
        reason, stop_token_id = self._end_of(sequence, result.token_id)
        self.parts.outbox.put(
            sequence.peer,
            RequestOutput(
                request_id=sequence.request_id,
                token_ids=[result.token_id],
                logprobs=None if result.logprob is None else [result.logprob],
                prompt_logprobs=sequence.prompt_logprobs or None if first else None,
                finish_reason=reason,
                stop_token_id=stop_token_id,
                adapter_version=sequence.adapter_version,
                adapter_step=sequence.adapter_step,
                queue_s=(sequence.first_scheduled_s or now_s()) - sequence.arrival_s if first else None,
                cached_tokens=sequence.num_found if first else 0,
                training_s=self.parts.scheduler.training_s(sequence),
            ),
        )
        if reason is not None:
            self.parts.desk.release(sequence, reason)

    def _end_of(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        if len(sequence.output) >= sequence.sampling.min_tokens:
            if token_id in sequence.sampling.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos and not sequence.sampling.ignore_eos:
                return FinishReason.STOP, None
        ended = len(sequence.prompt) + len(sequence.output) >= sequence.max_total_tokens  # in flight does not count
        return (FinishReason.LENGTH, None) if ended else (None, None)

    # ------------------------------------------------------------ everything else

    def _handle(self, messages: list[tuple[bytes, ToEngine]]) -> None:
        for peer, message in messages:
            if isinstance(message, StartJob):
                if self._drain_until_s is None:
                    self.parts.training.start(message)
            elif isinstance(message, PauseJob):
                self.parts.training.pause(message.job_id)
            elif isinstance(message, CancelJob):
                self.parts.training.cancel(message.job_id)
            elif isinstance(message, (SetAdapter, RemoveAdapter, CheckAdapter)):
                self.parts.adapter_traffic.take(peer, message)
            elif isinstance(message, ResizeKV):
                self.parts.ladder.resize_kv(message.num_slots)
            elif isinstance(message, SetBudget):
                self.parts.ladder.set_budget(message.num_bytes, self.parts.training.trainer, now_s())
            elif isinstance(message, Drain):
                self.parts.desk.draining = True
                self._drain_until_s = now_s() + message.timeout_s
                self.parts.training.park()

    def _stop(self) -> None:
        """Requests that did not finish in time get their terminal message, then the process may exit."""
        for sequence in list(self.parts.desk.open.values()):
            self.parts.desk.end(sequence, FinishReason.ERROR, "engine_overloaded", "The server is shutting down.")
        self.parts.outbox.notify(Drained())
        self.parts.outbox.flush()
        self.stopped = True
