"""Co-serving on a virtual clock: the engine's scheduler, policies and KV accounting over a cost model, without a GPU.

    python benchmarks/simulate.py --rate 16 --seconds 60 --lengths sharegpt_lengths.csv --policy slo inference-first
    python benchmarks/simulate.py --trace azure_llm_trace_conv.csv --speed 2 --policy slo --slo-tpot-ms 20
    python benchmarks/simulate.py --rate 24 --lengths chat.csv code.csv --admission known predicted pooled strict
    python benchmarks/simulate.py --adversarial 1000000 --overload 2 --max-model-len 1024 --policy slo

Real are Scheduler, policies, LatencyModel, LengthPredictor and KVCache; simulated is the time of every step and unit
of training (``CostModel``). A job that never ends trains beside the requests. Tokens are known when their step ends:
there is no launch-ahead, no HTTP, no host time beyond ``host_s``. Prints a row a policy and appends to
benchmarks/results/simulation.csv. Exits with 1 if a request starves, if the policy ``slo`` trains less than its
guaranteed share, or if the KV accounting breaks.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrivals import Arrival, hostile, in_bursts, poisson, read_trace
from harness import percentile, read_lengths, write_csv

from fineinfer.config import SETTINGS
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.slot_allocator import IntegrityError
from fineinfer.request import FinishReason, SamplingParams
from fineinfer.scheduler.admission import MAX_PREEMPTIONS, LengthPredictor
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.plan import StepPlan
from fineinfer.scheduler.policy import SHARE_WINDOW_S
from fineinfer.scheduler.scheduler import MIN_PREFILL_ROWS, Scheduler, SchedulerLimits, TrainingState
from fineinfer.scheduler.sequence import Sequence
from fineinfer.scheduler.slo import SloPolicy, SloTargets, make_policy
from fineinfer.scheduler.waiting import AGED_EVERY, AGED_S

RESULTS = Path(__file__).parent / "results" / "simulation.csv"
POLICIES = ("deferred", "inference-first", "train-first", "slo")
# Lengths of requests without max_tokens: from their adapter's history; from one history of all; the longest that there
# can be; and, as a bound, told by the client after all.
ADMISSIONS = ("predicted", "pooled", "strict", "known")
POLL_S = 1e-3  # the engine's loop asks the policy again so soon when neither requests nor training may run
STALL_S = 60.0  # no step for so long although a request waits: hundreds of updates, nothing legitimate takes it
MAX_MIXED_TOKENS = 512  # the engine's own on CUDA
BURST_S, MEAN_LOAD = 120.0, 0.7  # an overload lasts so long, then a pause brings the mean down to so much of capacity
CAPACITY_SAMPLE = 3000  # requests, all at once
SHARE_TOLERANCE = 0.01  # a unit or a forward over the end of a window


@dataclass(frozen=True)
class CostModel:
    """Seconds of a device's work; the defaults are the 8B shape in bf16 on one H100 80GB, as measured on 2026-11-27.

    Attributes:
        name: Written into every result.
        gemm_rows: Rows of a forward for which all its GEMMs were timed, ascending.
        gemm_s: Their seconds; linear between the points, and beyond the last with its slope.
        kv_bytes_per_token: K and V of one token in all layers.
        kv_bytes_per_s: Rate at which attention reads them.
        attention_flop_per_pair: Floating point operations of one query row on one key, all layers.
        attention_flops: Rate of prefill attention, an estimate: it is not in the measurements.
        head_s: Output head and sampling of a step.
        host_s: Host time of a turn that the device does not hide.
        train_rows: Rows of a training unit, one micro-batch an update.
        train_unit_s: Seconds of a unit.
        train_units: Units of an update besides the optimizer: forward and backward of 32 layers and the head.
        optimizer_s: Seconds of the update of the adapter, an estimate.
        beside_rows: Rows of a step with training beside it, ascending: those of 53 and 128 rows are measured (on
            2026-11-28, 16 requests a second, micro-batches of 4,096 tokens), the others estimates.
        beside_more_s: Seconds that such a step takes more than alone.
        beside_share: Part of its speed that training keeps meanwhile.
        beside_host_s: Host time between two such steps, in which training has the device for itself.
        beside_tail_s: Seconds, alone, of the units on their way when a step without training beside it begins.
    """

    name: str = "8b-h100"
    gemm_rows: tuple[int, ...] = (1, 16, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
    gemm_s: tuple[float, ...] = (5.4e-3, 5.8e-3, 5.9e-3, 6.4e-3, 6.9e-3, 7.8e-3, 0.0102, 0.0131, 0.0252, 0.0493, 0.0974)
    kv_bytes_per_token: int = 131_072
    kv_bytes_per_s: float = 2.8e12
    attention_flop_per_pair: float = 4.0 * 4096 * 32
    attention_flops: float = 300e12
    head_s: float = 0.4e-3
    host_s: float = 0.0
    train_rows: int = 2048
    train_unit_s: float = 2.0e-3
    train_units: int = 66
    optimizer_s: float = 2.0e-3
    beside_rows: tuple[int, ...] = (16, 53, 128, 256, 512, 1024, 2048)
    beside_more_s: tuple[float, ...] = (9.0e-3, 10.0e-3, 11.3e-3, 12.5e-3, 16.0e-3, 27.0e-3, 50.0e-3)
    beside_share: tuple[float, ...] = (0.7, 0.68, 0.66, 0.62, 0.55, 0.5, 0.5)
    beside_host_s: float = 2.0e-3
    beside_tail_s: float = 6.0e-3

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read a JSON of any of the fields; the rest keep their defaults.

        Raises:
            ValueError: An unknown field, or tables that are not ascending pairs.
        """
        raw = json.loads(path.read_text())
        unknown = sorted(raw.keys() - {item.name for item in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"{path}: unknown fields {', '.join(unknown)}")
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        cost = cls(**fields)
        ascending = all(a < b for a, b in itertools.pairwise(cost.gemm_rows))
        if len(cost.gemm_rows) != len(cost.gemm_s) or len(cost.gemm_rows) < 2 or not ascending:
            raise ValueError(f"{path}: gemm_rows and gemm_s must be two or more pairs with ascending rows")
        return cost

    def save(self, path: Path) -> None:
        """Write all fields as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def gemm(self, num_rows: int) -> float:
        """Seconds of all GEMMs of a forward of so many rows."""
        rows, seconds = self.gemm_rows, self.gemm_s
        i = min(max(1, bisect.bisect_left(rows, num_rows)), len(rows) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (rows[i] - rows[i - 1])
        return max(seconds[0], seconds[i] + slope * (num_rows - rows[i]))

    def beside(self, num_rows: int) -> tuple[float, float]:
        """Seconds that a step takes more with training beside it, and the part of its speed that training keeps."""
        return _linear(self.beside_rows, self.beside_more_s, num_rows), _linear(
            self.beside_rows, self.beside_share, num_rows
        )

    def prefill_pairs_s(self, start: int, length: int) -> float:
        """Arithmetic of attention of a chunk of ``length`` rows from position ``start`` on."""
        return length * (start + length / 2) * self.attention_flop_per_pair / self.attention_flops

    def alone_s(self, num_prompt: int) -> tuple[float, float]:
        """Seconds of a prompt's prefill, and of one of its output tokens, were it alone on the device."""
        token_s = self.gemm(1) + self.head_s + num_prompt * self.kv_bytes_per_token / self.kv_bytes_per_s
        return self.gemm(num_prompt) + self.head_s + self.prefill_pairs_s(0, num_prompt), token_s


def _linear(points: tuple[int, ...], values: tuple[float, ...], at: float) -> float:
    """Linear between the points, constant beyond them."""
    i = bisect.bisect_left(points, at)
    if i in (0, len(points)):
        return values[min(i, len(points) - 1)]
    part = (at - points[i - 1]) / (points[i] - points[i - 1])
    return values[i - 1] + part * (values[i] - values[i - 1])


@dataclass(frozen=True)
class Setup:
    """The engine's side, with the meaning of the flags of ``fineinfer serve``; times in seconds, sizes in tokens."""

    policy: str = "slo"
    admission: str = "predicted"
    targets: SloTargets = field(default_factory=SloTargets)
    deferral_bound_s: float = 1.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    max_model_len: int = 16_384
    kv_slots: int = 200_000
    training: bool = True
    beside: bool = False


@dataclass(slots=True)
class Request:
    """A request under way.

    Attributes:
        arrival: What came.
        prefill_s: Seconds of its prompt, alone on the device.
        token_s: Seconds of one of its output tokens, likewise.
        work_s: What was left of the requests ahead when it came, each alone, one after the other.
        held_s: Seconds trained until it came; from its first token on, those while it waited.
        rows_ahead: Prompt tokens of requests without a first token when it came, its own among them.
        first_token_s: When its first token came.
        num_older: Requests that waited when it came.
        num_preempted: Preemptions until it came.
    """

    arrival: Arrival
    prefill_s: float
    token_s: float
    work_s: float
    held_s: float
    rows_ahead: int
    first_token_s: float = 0.0
    num_older: int = 0
    num_preempted: int = 0


@dataclass
class Outcome:
    """What a run gave; latencies in seconds, tokens as counts."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    num_refused: int = 0
    num_unfinished: int = 0
    tokens_asked: int = 0
    tokens_out: int = 0
    tokens_good: int = 0  # of requests that kept the targets
    last_token_s: float = 0.0
    trained_s: float = 0.0  # until the horizon
    horizon_s: float = 0.0
    train_tok_s: float = 0.0
    num_preemptions: int = 0
    pace: float = 1.0
    full_forward_s: float = 0.0  # the longest forward that there can be
    longest_pause_s: float = 0.0  # of a preempted request, until its next token
    passed_over: float = 0.0  # most admissions past an aged request, over as many as WaitingQueue allows
    windows_s: list[float] = field(default_factory=list)  # trained in each window of the guarantee; ``slo`` only
    broken: str | None = None
    run_s: float = 0.0
    end_s: float = 0.0

    @property
    def train_share(self) -> float:
        """Part of the time until the horizon that was trained."""
        return self.trained_s / self.horizon_s

    @property
    def least_share(self) -> float | None:
        """Least part of two windows one after the other that was trained; None where nothing is guaranteed.

        Two, because what was trained while there was nothing else to do counts for the window after it.
        """
        whole = self.windows_s[: int(self.horizon_s // SHARE_WINDOW_S)]
        return min(map(sum, itertools.pairwise(whole))) / (2 * SHARE_WINDOW_S) if len(whole) > 1 else None

    def longest_wait_s(self, batch: bool = False) -> float:
        """Longest time to a first token of all requests, or of those of worse priority."""
        waits = (r.first_token_s - r.arrival.due_s for r in self.done if r.arrival.priority > 0 or not batch)
        return max(waits, default=0.0)

    def wait_ratio(self) -> float:
        """Largest wait for a first token over what the requests ahead, its own prompt and one full forward take.

        The requests ahead each alone, one after the other: batching only shortens that. Arrivals behind share its
        forward at most. Training while it waited is taken off: that is the policy's, in the latencies. So in order of
        arrival and without idling this is at most about 1, but for what is computed again after a preemption.
        """
        waits = (
            (r.first_token_s - r.arrival.due_s - r.held_s) / (r.work_s + r.prefill_s + self.full_forward_s)
            for r in self.done
            if r.arrival.priority == 0
        )
        return max(waits, default=0.0)

    def overtaken(self) -> Iterator[tuple[Request, int, int]]:
        """Each request with how many later arrivals had their first token before it, newest first.

        Yields:
            The request, the prompts of two tokens and more that overtook it, and those of one token: these ride along
            with the decode rows, one row each, before any longer prompt.
        """
        # Negative first tokens of all that arrived later, ascending: those of earlier arrivals mostly go to the end.
        prompts, riders = list[float](), list[float]()
        newest_first = sorted(self.done, key=lambda r: -r.arrival.due_s)
        for _, group in itertools.groupby(newest_first, key=lambda r: r.arrival.due_s):
            together = list(group)
            for r in together:
                first_s = -r.first_token_s
                yield (
                    r,
                    len(prompts) - bisect.bisect_right(prompts, first_s),
                    len(riders) - bisect.bisect_right(riders, first_s),
                )
            for r in together:
                bisect.insort(prompts if r.arrival.num_prompt > 1 else riders, -r.first_token_s)


class _Strict(LengthPredictor):
    """Every request may be as long as there can be."""

    def predict(self, sequence: Sequence) -> tuple[int, int]:
        left = max(1, sequence.max_output_left)
        return left, left


class Simulation:
    """One engine on a virtual clock.

    Args:
        setup: Policy and bounds.
        cost: Times of the device.
    """

    def __init__(self, setup: Setup, cost: CostModel) -> None:
        self._setup, self._cost = setup, cost
        self._limit = min(setup.max_model_len, setup.kv_slots)
        self._policy = make_policy(setup.policy, setup.targets)
        self._kv = KVCache(setup.kv_slots, setup.max_num_seqs, self._limit)
        limits = SchedulerLimits(
            setup.max_num_seqs, setup.max_num_batched_tokens, setup.deferral_bound_s, MAX_MIXED_TOKENS
        )
        self._latency = LatencyModel()
        self._scheduler = Scheduler(self._kv, limits, self._policy, self._latency)
        if setup.admission == "strict":
            self._scheduler.predictor = _Strict()
        self._pass_on, self._admitted_s = self._scheduler.waiting.admitted, list[float]()
        self._scheduler.waiting.admitted = self._admitted  # type: ignore[method-assign]
        self._gemm_s = [cost.gemm(rows) + cost.head_s + cost.host_s for rows in range(setup.max_num_batched_tokens + 1)]
        # a training unit's kind and seconds, and what the scheduler is told before it; the estimates are exact
        half = cost.train_units // 2
        units = [("forward", cost.train_unit_s)] * half + [("backward", cost.train_unit_s)] * (cost.train_units - half)
        self._units = [(kind, took + cost.host_s) for kind, took in [*units, ("optimizer", cost.optimizer_s)]]
        left = [sum(took for _, took in self._units[i:]) for i in range(len(self._units))]
        self._states = [
            TrainingState(True, i > 0, s, s / (len(left) - i), beside=setup.beside) for i, s in enumerate(left)
        ]
        self._tail = False  # units are on their way
        self._ahead_s = 0.0  # of the next unit, trained beside steps
        self._update_s, self._unit = left[0], 0
        self._now_s = self._work_s = self._trained_s = 0.0
        self._rows = 0
        self._requests: dict[str, Request] = {}
        self._paused: dict[str, tuple[Sequence, int, float]] = {}
        rows = setup.max_num_batched_tokens
        pairs_s = cost.prefill_pairs_s(max(0, self._limit - rows), rows)
        self.outcome = Outcome(full_forward_s=self._gemm_s[rows] + pairs_s)

    def run(self, arrivals: Iterable[Arrival], seconds: float) -> Outcome:
        """Let the requests come, train for ``seconds``, and go on until every request has ended."""
        begin, outcome, setup = time.perf_counter(), self.outcome, self._setup
        outcome.horizon_s = seconds
        scheduler, no_training, pure = self._scheduler, TrainingState(), not isinstance(self._policy, SloPolicy)
        source = iter(arrivals)
        following, stepped_s = next(source, None), 0.0
        while True:
            while following is not None and following.due_s <= self._now_s:
                self._add(following)
                following = next(source, None)
            due_s = following.due_s if following is not None else max(seconds, self._now_s + POLL_S)
            if scheduler.is_idle():
                if following is None and self._now_s >= seconds:
                    break
                stepped_s = self._now_s
                if not setup.training:
                    self._now_s = due_s
                    continue
                if pure:  # trains whenever nothing waits or runs, whatever the time, so it need not be asked
                    self._train_until(due_s)
                    continue
            plan = scheduler.plan(self._now_s, self._states[self._unit] if setup.training else no_training)
            if plan.chunks:
                self._step(plan)
                stepped_s = self._now_s
            if plan.train and not (setup.beside and plan.chunks):
                self._train_one()
                self._tail = setup.beside
            elif not plan.chunks:
                self._now_s = min(due_s, self._now_s + POLL_S)
            if self._now_s - stepped_s > STALL_S + setup.deferral_bound_s:
                break
        outcome.num_unfinished = len(self._requests)
        outcome.num_preemptions, outcome.pace = scheduler.num_preemptions, getattr(self._policy, "pace", 1.0)
        outcome.train_tok_s = outcome.train_share * self._cost.train_rows / self._update_s
        try:
            self._kv.check_integrity()
            if self._kv.num_used and not self._requests:
                raise IntegrityError(f"{self._kv.num_used} slots are live without a request")
        except IntegrityError as error:
            outcome.broken = str(error)
        outcome.end_s, outcome.run_s = self._now_s, time.perf_counter() - begin
        return outcome

    def _add(self, arrival: Arrival) -> None:
        """A request comes; one that could never fit is refused, as at the server's door."""
        asked = arrival.num_prompt + arrival.num_output
        if asked > self._limit:
            self.outcome.num_refused += 1
            return
        self._rows += arrival.num_prompt
        alone_s = self._cost.alone_s(arrival.num_prompt)
        request = Request(
            arrival, *alone_s, self._work_s, self._trained_s, self._rows,
            num_older=len(self._scheduler.waiting), num_preempted=self._scheduler.num_preemptions,
        )  # fmt: skip
        self._work_s += request.prefill_s + arrival.num_output * request.token_s
        name = str(len(self._requests) + len(self.outcome.done))
        self._requests[name] = request
        self.outcome.tokens_asked += arrival.num_output
        told = arrival.has_max_tokens or self._setup.admission == "known"
        sequence = Sequence(
            name, b"", [1] * arrival.num_prompt, _sampling(arrival.num_output if told else None),
            asked if told else self._limit, arrival.due_s, priority=arrival.priority,
            adapter_name=None if self._setup.admission == "pooled" else arrival.adapter,
        )  # fmt: skip
        self._scheduler.add(sequence)

    def _admitted(self, sequence: Sequence) -> None:
        """A request joins: how many others did since it had waited for long, and how many WaitingQueue allows.

        Ahead of it may be whoever waited when it came, and whoever was preempted since.
        """
        self._pass_on(sequence)
        if sequence.num_preemptions == 0:
            request = self._requests[sequence.request_id]
            passed = len(self._admitted_s) - bisect.bisect_right(self._admitted_s, sequence.arrival_s + AGED_S)
            returned = self._scheduler.num_preemptions - request.num_preempted
            allowed = AGED_EVERY * (request.num_older + returned + 1)
            self.outcome.passed_over = max(self.outcome.passed_over, passed / allowed)
        self._admitted_s.append(self._now_s)

    def _step(self, plan: StepPlan) -> None:
        """One forward: its time, then what it changes."""
        cost, chunks, scheduler, requests = self._cost, plan.chunks, self._scheduler, self._requests
        for victim in plan.preempted:
            self._paused.setdefault(victim.request_id, (victim, len(victim.output), self._now_s))
        num_rows = plan.num_rows
        took = self._gemm_s[num_rows]
        context = 0  # tokens whose K and V are read
        for chunk in chunks:
            context += chunk.start + chunk.length
            if chunk.length > 1:
                took += cost.prefill_pairs_s(chunk.start, chunk.length)
        took += context * cost.kv_bytes_per_token / cost.kv_bytes_per_s
        beside_s = (
            self._train_beside(num_rows, took, plan.train) if self._setup.beside and self._setup.training else 0.0
        )
        now = self._now_s = self._now_s + took + beside_s
        self._latency.observe(
            "decode" if num_rows == len(chunks) else "prefill", num_rows, took + beside_s, beside_s > 0
        )
        for chunk in chunks:
            scheduler.launched(chunk)
            if not chunk.samples:
                scheduler.commit(chunk, None, now)
                continue
            sequence = chunk.sequence
            scheduler.commit(chunk, 5, now)
            request, count = requests[sequence.request_id], len(sequence.output)
            self._work_s -= request.token_s
            if count == 1:
                self._work_s -= request.prefill_s
                self._rows -= request.arrival.num_prompt
                request.first_token_s, request.held_s = now, self._trained_s - request.held_s
            if count >= request.arrival.num_output:
                self._finish(sequence, request)
        if self._paused:
            self._look_at_paused()

    def _finish(self, sequence: Sequence, request: Request) -> None:
        outcome, count = self.outcome, len(sequence.output)
        self._scheduler.finish(sequence, FinishReason.LENGTH if request.arrival.has_max_tokens else FinishReason.STOP)
        del self._requests[sequence.request_id]
        outcome.done.append(request)
        outcome.tokens_out += count
        outcome.last_token_s = self._now_s
        ttft_s, tpot_s = request.first_token_s - request.arrival.due_s, 0.0
        outcome.ttft.append(ttft_s)
        if count > 1:
            tpot_s = (self._now_s - request.first_token_s) / (count - 1)
            outcome.tpot.append(tpot_s)
        targets = self._setup.targets
        if ttft_s <= (targets.ttft_s or math.inf) and tpot_s <= (targets.tpot_s or math.inf):
            outcome.tokens_good += count

    def _look_at_paused(self) -> None:
        """Note how long preempted requests that have a new token went without one."""
        for name, (sequence, count, since_s) in list(self._paused.items()):
            if len(sequence.output) > count:
                self.outcome.longest_pause_s = max(self.outcome.longest_pause_s, self._now_s - since_s)
                del self._paused[name]

    def _train_beside(self, num_rows: int, step_s: float, train: bool) -> float:
        """Train while a step runs; seconds that it takes more."""
        more_s, share = self._cost.beside(num_rows)
        if train:
            self._ahead_s += share * (step_s + more_s) + self._cost.beside_host_s
            self._tail = True
            more_s += self._cost.beside_host_s
        elif self._tail:  # units on their way
            part = min(1.0, self._cost.beside_tail_s / (share * (step_s + more_s)))
            self._ahead_s += part * share * (step_s + more_s)
            more_s *= part
            self._tail = False
        else:
            return 0.0
        while self._ahead_s >= self._units[self._unit][1]:
            self._ahead_s -= self._units[self._unit][1]
            self._count_unit(*self._units[self._unit])
        return more_s

    def _count_unit(self, kind: str, took: float) -> None:
        self._unit = (self._unit + 1) % len(self._units)
        if self._now_s < self.outcome.horizon_s:
            self.outcome.trained_s += took
        if self._setup.policy == "slo":
            windows, index = self.outcome.windows_s, int(self._now_s // SHARE_WINDOW_S)
            windows += [0.0] * (index + 1 - len(windows))
            windows[index] += took
        self._trained_s += took
        self._latency.observe(kind, self._cost.train_rows, took)

    def _train_one(self) -> None:
        kind, took = self._units[self._unit]
        self._count_unit(kind, took)
        self._now_s += took

    def _train_until(self, due_s: float) -> None:
        """Units one after the other; what LatencyModel would learn of them only ``slo`` looks at."""
        now, unit, units, horizon_s = self._now_s, self._unit, self._units, self.outcome.horizon_s
        trained, total = self.outcome.trained_s, self._trained_s
        while now < due_s:
            took = units[unit][1]
            unit = (unit + 1) % len(units)
            if now < horizon_s:
                trained += took
            now += took
            total += took
        self._now_s, self._unit, self.outcome.trained_s, self._trained_s = now, unit, trained, total


@functools.cache
def _sampling(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


# ---------------------------------------------------------------- verdicts


def starved(outcome: Outcome, setup: Setup) -> str | None:
    """Why a run counts as one in which a request starved, else None.

    Requests join in order of arrival, and a preempted one goes back to its place. So a later prompt can be done earlier
    only if it held one of the ``max_num_seqs`` rows when the other lost its own: ``MAX_PREEMPTIONS`` times before a
    request is admitted on its strict peak. Prompts of one token pass in every forward, as many as there are rows, but
    each forward also computes ``MIN_PREFILL_ROWS`` of the prompts ahead, once more after a preemption. The work ahead
    is done once more then as well, which bounds the wait.
    Those of worse priority let all others pass for ``AGED_S`` and then seven of eight, which ``passed_over`` checks.
    """
    if outcome.num_unfinished:
        return f"{outcome.num_unfinished} requests wait although nothing ran for {STALL_S:.0f} s"
    seqs = setup.max_num_seqs
    for request, num_prompts, num_riders in outcome.overtaken():
        if request.arrival.priority > 0:
            continue
        num_forwards = (2 + request.rows_ahead // MIN_PREFILL_ROWS) * (1 + MAX_PREEMPTIONS)
        kinds = (("", num_prompts, seqs * MAX_PREEMPTIONS), ("one-token ", num_riders, seqs * num_forwards))
        for what, num, bound in kinds:
            if num > bound:
                return f"a request was overtaken by {num} later {what}prompts, more than {bound}"
    ratio = outcome.wait_ratio()
    if ratio > 1 + MAX_PREEMPTIONS:
        return f"a request waited {ratio:.1f} times as long as all the work ahead of it takes, one after the other"
    if outcome.passed_over > 1:
        return f"{outcome.passed_over:.1f} times as many requests as may passed one that had waited {AGED_S:.0f} s"
    share, least = outcome.least_share, setup.targets.train_share_min - SHARE_TOLERANCE
    if share is not None and setup.policy == "slo" and share < least:
        return f"in some {2 * SHARE_WINDOW_S:.0f} s only {share:.1%} of the time was trained"
    return None


# ---------------------------------------------------------------- command


def row_of(case: str, setup: Setup, cost: CostModel, outcome: Outcome) -> dict[str, object]:
    """A result as a row of the table and the CSV."""
    targets = setup.targets
    return {
        "case": case,
        "policy": setup.policy,
        "training": str(setup.training).lower(),
        "admission": setup.admission,
        "kv_slots": setup.kv_slots,
        "slo_ttft_ms": "" if targets.ttft_s is None else round(1e3 * targets.ttft_s, 3),
        "slo_tpot_ms": "" if targets.tpot_s is None else round(1e3 * targets.tpot_s, 3),
        "requests": len(outcome.done),
        "refused": outcome.num_refused,
        "unfinished": outcome.num_unfinished,
        "ttft_p50_ms": round(1e3 * percentile(outcome.ttft, 0.5), 2),
        "ttft_p99_ms": round(1e3 * percentile(outcome.ttft, 0.99), 2),
        "tpot_p50_ms": round(1e3 * percentile(outcome.tpot, 0.5), 2),
        "tpot_p99_ms": round(1e3 * percentile(outcome.tpot, 0.99), 2),
        "output_tok_s": round(outcome.tokens_out / max(outcome.last_token_s, 1e-9), 1),
        "goodput_tok_s": round(outcome.tokens_good / max(outcome.last_token_s, 1e-9), 1),
        "train_share": round(outcome.train_share, 4),
        "least_train_share": "" if outcome.least_share is None else round(outcome.least_share, 4),
        "train_tok_s": round(outcome.train_tok_s, 1),
        "preemptions": outcome.num_preemptions,
        "pace": round(outcome.pace, 3),
        "longest_wait_s": round(outcome.longest_wait_s(), 3),
        "longest_batch_wait_s": round(outcome.longest_wait_s(batch=True), 3),
        "longest_pause_s": round(outcome.longest_pause_s, 3),
        "wait_ratio": round(outcome.wait_ratio(), 3),
        "overtaken": max((p + r for who, p, r in outcome.overtaken() if who.arrival.priority == 0), default=0),
        "passed_over": round(outcome.passed_over, 3),
        "simulated_s_per_s": round(outcome.end_s / max(outcome.run_s, 1e-9), 1),
        "simulated": "true",
        "cost_model": cost.name,
    }


def print_table(rows: list[dict[str, object]]) -> None:
    """The rows, aligned, without the columns that say the same everywhere."""
    names = [name for name in rows[0] if name not in ("simulated", "cost_model")]
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    print(f"simulated, cost model {rows[0]['cost_model']}")
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; flags of ``fineinfer serve`` keep their names and parsers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, nargs="+", help="Poisson arrivals a second, one run each; needs --lengths")
    load.add_argument("--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    load.add_argument("--adversarial", type=int, metavar="N", help="N arrivals of hostile mixes")
    parser.add_argument("--seconds", type=float, help="of arrivals and training; default: 60, or the whole trace")
    parser.add_argument("--lengths", type=Path, nargs="+", help="CSV of prompt and output tokens; several: by adapter")
    parser.add_argument("--overload", type=float, metavar="X", help=f"X times the capacity, for {BURST_S:.0f} s a time")
    parser.add_argument("--repeat", type=int, default=1, help="the trace so many times")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--without-max-tokens", type=float, default=0.0, help="part of the requests that set none")
    parser.add_argument("--beside", action="store_true", help="training units run beside steps, as on a GPU")
    parser.add_argument("--no-training", action="store_true", help="requests alone")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--admission", nargs="+", choices=ADMISSIONS, default=["predicted"])
    numbers = ("deferral_bound_s", "slo_ttft_ms", "slo_tpot_ms", "train_share_min", "train_share_max", "max_model_len")
    for name in (*numbers, "max_num_seqs", "max_num_batched_tokens"):
        setting = SETTINGS[name]
        default = setting.default if setting.default is not None else getattr(Setup, name, None)
        parser.add_argument(
            setting.flag, type=setting.parse, default=default, metavar=setting.metavar, help=setting.help
        )
    parser.add_argument("--kv-slots", type=int, help=f"default: {Setup.kv_slots}; --adversarial: 4 x --max-model-len")
    parser.add_argument("--cost-model", type=Path, help="JSON of CostModel's fields; default: 8B on an H100")
    parser.add_argument("--write-cost-model", type=Path, help="write the cost model here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV that the rows are appended to")
    args = parser.parse_args(argv)
    if not (args.trace or args.adversarial or (args.lengths and bool(args.rate) != bool(args.overload))):
        parser.error("--trace, --adversarial, or --lengths with --rate or --overload is needed")
    if args.train_share_min > args.train_share_max:
        parser.error("--train-share-min is above --train-share-max")
    return args


def make_setup(args: argparse.Namespace, policy: str, admission: str) -> Setup:
    """The engine's side of the command line."""
    ttft_s, tpot_s = (None if ms is None else 1e-3 * ms for ms in (args.slo_ttft_ms, args.slo_tpot_ms))
    return Setup(
        policy=policy,
        admission=admission,
        targets=SloTargets(ttft_s, tpot_s, args.train_share_min, args.train_share_max),
        deferral_bound_s=args.deferral_bound_s,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        kv_slots=args.kv_slots or (4 * args.max_model_len if args.adversarial else Setup.kv_slots),
        training=not args.no_training,
        beside=args.beside,
    )


def capacity(arrivals: list[Arrival], setup: Setup, cost: CostModel) -> float:
    """Requests a second of such a mix, were they all there at once and nothing trained."""
    at_once = [dataclasses.replace(arrival, due_s=0.0) for arrival in arrivals[:CAPACITY_SAMPLE]]
    alone = dataclasses.replace(setup, policy="inference-first", training=False)
    outcome = Simulation(alone, cost).run(at_once, 1.0)
    return len(outcome.done) / outcome.last_token_s


def mixed(rate: float, seconds: float, files: list[Path], seed: int) -> list[Arrival]:
    """Poisson arrivals with the lengths of the files; if there are several, each is an adapter's, at equal rates."""
    arrivals = list[Arrival]()
    for i, path in enumerate(files):
        adapter = path.stem if len(files) > 1 else None
        own = poisson(rate / len(files), seconds, read_lengths(path), seed + i)
        arrivals += [dataclasses.replace(arrival, adapter=adapter) for arrival in own]
    return sorted(arrivals, key=lambda arrival: arrival.due_s)


def make_loads(
    args: argparse.Namespace, setup: Setup, cost: CostModel
) -> Iterator[tuple[str, list[Arrival], float | None]]:
    """What to run: the case's name, its arrivals, and the seconds that count for training (None: until the last)."""
    longest, seconds = min(setup.max_model_len, setup.kv_slots), args.seconds or 60.0
    if args.trace is not None:
        case = f"{args.trace.stem} x{args.speed:g}" + (f", {args.repeat} times" if args.repeat > 1 else "")
        yield case, read_trace(args.trace, args.speed, args.seconds, args.repeat), args.seconds
    elif args.adversarial is not None:
        case, arrivals = f"adversarial {args.adversarial}", hostile(args.adversarial, longest, args.seed)
        if args.overload:
            rate = args.overload * capacity(arrivals, setup, cost)
            arrivals = in_bursts(arrivals, rate, BURST_S, BURST_S * (args.overload / MEAN_LOAD - 1))
            case += f", bursts of {rate:.1f}/s, {args.overload:g} times capacity"
        yield case, arrivals, args.seconds
    elif args.overload:
        rate = args.overload * capacity(mixed(100.0, CAPACITY_SAMPLE / 100, args.lengths, args.seed), setup, cost)
        case = f"poisson {rate:.1f}/s, {args.overload:g} times capacity"
        yield case, mixed(rate, BURST_S, args.lengths, args.seed), BURST_S
    else:
        for rate in args.rate:
            yield f"poisson {rate:g}/s", mixed(rate, seconds, args.lengths, args.seed), seconds


def main(argv: list[str]) -> int:
    """Run every load under every policy; 1 if a hostile load starved a request, or the books of the KV cache broke."""
    args = parse_args(argv)
    cost = CostModel() if args.cost_model is None else CostModel.load(args.cost_model)
    if args.write_cost_model is not None:
        cost.save(args.write_cost_model)
    command = " ".join(["benchmarks/simulate.py", *(Path(word).name if "/" in word else word for word in argv)])
    rows, failed = list[dict[str, object]](), False
    rng, hidden = random.Random(args.seed), args.without_max_tokens
    setups = [make_setup(args, policy, admission) for policy in args.policy for admission in args.admission]
    for case, given, given_s in make_loads(args, setups[0], cost):
        arrivals = [dataclasses.replace(a, has_max_tokens=False) if rng.random() < hidden else a for a in given]
        seconds = given_s or max(1.0, arrivals[-1].due_s if arrivals else 0.0)
        for setup in setups:
            outcome = Simulation(setup, cost).run(arrivals, seconds)
            rows.append(row_of(case, setup, cost, outcome))
            for complaint in filter(None, (starved(outcome, setup), outcome.broken)):
                print(f"{case}, {setup.policy}: {complaint}", file=sys.stderr)
                failed = True
    print_table(rows)
    write_csv(args.results, [row | {"command": command} for row in rows])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
