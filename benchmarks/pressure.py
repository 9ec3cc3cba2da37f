"""Peak load beside a job, and bursts that need the memory it holds; on the engine process of `fineinfer serve`."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness import make_job, read_lengths
from load import Row
from serving import Engine, parse_engine_flags, serve

from fineinfer.messages import (
    AbortRequest,
    AddRequest,
    EngineStats,
    Hello,
    JobEnded,
    JobProgress,
    Outputs,
    SetBudget,
)
from fineinfer.request import SamplingParams
from fineinfer.server.start_checks import runtime_dir

GIB = 1 << 30
SHARE_WINDOW_S = 10.0  # the policy's own: a minimum share is a share of the last ten seconds
# Time per token that the peak's own steps exceed: no slack is left, so a job lives on its minimum share alone.
PEAK_TPOT_MS = 10.0
BURST_PROMPT, WARM_UP_OUTPUT = 128, 32
WAIT_S, ASK_S = 60.0, 0.1
STEADY = 0.98  # of what training held before: it has its memory back


@dataclass(frozen=True)
class Outcome:
    """A measured row, and the flags of the engine that gave it."""

    row: Row
    flags: list[str]


@contextmanager
def engine_with(model: str | None, flags: Sequence[str], profile: Path | None) -> Iterator[Engine]:
    """The engine process; ``flags`` are those of `fineinfer serve` that are the engine's."""
    with runtime_dir() as folder:
        engine = Engine(parse_engine_flags(flags, model), folder, profile)
        try:
            print(f"{engine.info.device} {engine.info.dtype}: engine ready after {engine.start_s:.1f} s", flush=True)
            yield engine
        finally:
            engine.stop()


class Session:
    """What is open on an engine, and what it said last.

    Args:
        engine: With no request open.

    Attributes:
        stats: Its newest statistics.
        step: Finished updates of the job.
        first: By request, seconds until it was scheduled, and until its first token was here.
        open: Requests that have not ended.
        tokens: By request, those of its prompt and those that it has had.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats: EngineStats = engine.greet()[1]
        self.step = 0
        self.first: dict[str, tuple[float, float]] = {}
        self.open: set[str] = set()
        self.tokens: dict[str, int] = {}
        self._sent: dict[str, float] = {}
        self._stopping: set[str] = set()

    def leased(self, owner: str) -> int:
        """Bytes an owner held when the newest statistics were made."""
        return self.stats.memory_bytes.get(f"lease:{owner}", 0)

    def add(self, names: Sequence[str], prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Send requests at once."""
        now_s = time.monotonic()
        for name, prompt in zip(names, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.open.add(name)
            self.tokens[name] = len(prompt)
            self._sent[name] = now_s
            self.engine.send(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=now_s))

    def abort_all(self) -> None:
        """End what is open, and wait for it."""
        self._stopping |= self.open
        self.engine.send(*(AbortRequest(request_id=name) for name in sorted(self.open)))
        self.until(lambda: not self.open, "the requests end")

    def until(self, reached: Callable[[], bool], what: str, ask: bool = False) -> None:
        """Take in messages until something is so; ``ask`` for statistics more often than they come."""
        begin = asked = time.monotonic()
        while not reached():
            now = time.monotonic()
            if now > begin + WAIT_S:
                self.engine.fail(f"waited {WAIT_S:.0f} s until {what}; the engine's numbers: {self.stats}")
            if ask and now > asked + ASK_S:
                self.engine.send(Hello())
                asked = now
            self._take()

    def refresh(self) -> None:
        """New statistics."""
        before = self.stats.time_s
        self.engine.send(Hello())
        self.until(lambda: self.stats.time_s > before, "the engine answers")

    def _take(self) -> None:
        message = self.engine.receive()
        if isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, JobProgress):
            self.step = message.step
        elif isinstance(message, JobEnded):
            self.engine.fail(f"the job ended as {message.status}: {message.error_message}")
        elif isinstance(message, Outputs):
            for output in message.outputs:
                name, now_s = output.request_id, time.monotonic()
                self.tokens[name] += len(output.token_ids)
                if output.token_ids and name not in self.first:
                    self.first[name] = (output.queue_s or 0.0, now_s - self._sent[name])
                if output.finish_reason is not None:
                    self.open.discard(name)
                    if output.finish_reason != "length" and name not in self._stopping:
                        self.engine.fail(f"{name} ended with {output.finish_reason}: {output.error_message}")


def begin_job(session: Session, folder: Path, args: argparse.Namespace) -> None:
    """Start a job and wait until two updates are done."""
    vocab_size = session.engine.info.vocab_size
    session.engine.send(make_job(folder / "job", args.rows, args.row_tokens, vocab_size))
    session.until(lambda: session.step >= 2, "the job made two updates")


# ---------------------------------------------------------------- peak load (P6)


def peak(model: str | None, base: Sequence[str], args: argparse.Namespace) -> Outcome:
    """All of --num-prompts at once, as P1, without and with a job that may have little more than its minimum share."""
    flags = [*base, "--policy", "slo", "--slo-tpot-ms", f"{PEAK_TPOT_MS:g}", "--slo-ttft-ms", f"{args.slo_ttft_ms:g}"]
    flags += ["--train-share-min", f"{args.peak_share:g}", *args.serve_flags]
    lengths, rng = read_lengths(args.lengths)[: args.num_prompts], random.Random(1)
    with engine_with(model, flags, args.profile) as engine, tempfile.TemporaryDirectory() as folder:
        serve(engine, rng, [(a, min(b, WARM_UP_OUTPUT)) for a, b in lengths[:8]])
        alone = serve(engine, rng, lengths)
        begin_job(Session(engine), Path(folder), args)
        engine.seen.clear()
        both = serve(engine, rng, lengths)
        shares = [(stats.time_s, stats.train_device_s_total) for stats in engine.seen]
    rates = [float(str(row["out_tok_s"])) for row in (alone, both)]
    row: Row = {
        "requests": len(lengths),
        "output_tok_s": rates[1],
        "alone_tok_s": rates[0],
        "slower_percent": 100.0 * (1.0 - rates[1] / rates[0]),
        "share_percent": 100.0 * least_share(shares, float("inf")),
        "least_share_percent": 100.0 * least_share(shares, SHARE_WINDOW_S),
    }
    columns = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "preemptions")
    return Outcome(row | {name: both[name] for name in columns}, flags)


def least_share(samples: Sequence[tuple[float, float]], window_s: float) -> float:
    """Smallest part of the time in any window of at least so many seconds; of all of it if it is shorter.

    Args:
        samples: (time, seconds trained so far), ascending.
        window_s: Seconds.
    """
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return float("nan")
    least = (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
    for i, (begin_s, trained_s) in enumerate(samples):
        for end_s, until_s in samples[i + 1 :]:
            if end_s - begin_s >= window_s:
                least = min(least, (until_s - trained_s) / (end_s - begin_s))
                break
    return least


# ---------------------------------------------------------------- a burst (P8)


@dataclass
class Rounds:
    """What the rounds of a burst gave; times in milliseconds after it was sent."""

    first_start: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    all_started: list[float] = field(default_factory=list)
    moved_gib: list[float] = field(default_factory=list)
    kv_wasted: list[int] = field(default_factory=list)
    kv_usable: list[float] = field(default_factory=list)


def burst(model: str | None, base: Sequence[str], args: argparse.Namespace) -> Outcome:
    """A full pool of decoding requests, a job that holds the rest of the budget, and requests that need some of it.

    The budget is cut so that the pool has --pool-gib once training holds all it can use; each request's peak is the
    longest that the model takes, and as many run as fill the pool, so the burst's first one needs new slots already.
    """
    targets = ["--slo-tpot-ms", f"{args.slo_tpot_ms:g}", "--slo-ttft-ms", f"{args.slo_ttft_ms:g}"]
    flags = [*base, "--policy", "slo", *targets, *args.serve_flags]
    with engine_with(model, flags, args.profile) as engine, tempfile.TemporaryDirectory() as folder:
        return Outcome(run_bursts(Session(engine), Path(folder), args), flags)


def run_bursts(session: Session, folder: Path, args: argparse.Namespace) -> Row:
    """The rounds, on an engine without requests; ``folder`` is for the job's files."""
    rounds, engine = Rounds(), session.engine
    begin_job(session, folder, args)
    session.refresh()
    held, pool = session.leased("training_activations"), int(args.pool_gib * GIB)
    if held < args.burst_gib * GIB:
        engine.fail(f"training holds {held / GIB:.2f} GiB only: --rows, --row-tokens or --burst-gib must change")
    fixed = sum(session.leased(owner) for owner in ("weights", "workspace", "adapters", "training_state"))
    engine.send(SetBudget(num_bytes=fixed + held + pool))
    for number in range(args.repeats + 1):
        one_burst(session, number, (held, pool, int(args.burst_gib * GIB)), rounds if number else Rounds())
    return {
        "requests": args.repeats,
        "first_start_p50_ms": median(rounds.first_start),
        "first_start_worst_ms": max(rounds.first_start),
        "first_token_worst_ms": max(rounds.first_token),
        "all_started_worst_ms": max(rounds.all_started),
        "moved_gib": min(rounds.moved_gib),
        "activations_gib": held / GIB,
        "kv_wasted_tokens": max(rounds.kv_wasted),
        "kv_usable_percent": 100.0 * min(rounds.kv_usable),
        "dropped_layers": session.stats.kept_layers_dropped_total,
    }


def one_burst(session: Session, number: int, sizes: tuple[int, int, int], rounds: Rounds) -> None:
    """Fill the pool, wait until training holds its memory, send the burst, end everything.

    Args:
        session: With no request open.
        number: Of the round; the first one also waits for the budget.
        sizes: Bytes that training holds when it can, of the pool then, and that the burst needs.
        rounds: Gets the times.
    """
    held, pool, wanted = sizes
    info, rng = session.engine.info, random.Random(number)
    each = info.max_request_tokens

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randint(5, info.vocab_size - 1) for _ in range(BURST_PROMPT)] for _ in range(count)]

    def steady() -> bool:
        return session.leased("training_activations") >= STEADY * held and session.leased("kv") <= pool / STEADY

    session.until(steady, "training holds its memory", ask=True)
    slot_bytes = session.leased("kv") / session.stats.kv_slots_now
    running = [f"running-{number}-{i}" for i in range(session.stats.kv_slots_now // each)]
    if not running:
        session.engine.fail(f"the pool holds no request of {each} tokens: --pool-gib must be larger")
    session.add(running, prompts(len(running)), each - BURST_PROMPT)
    session.until(lambda: all(name in session.first for name in running), "the pool is full")
    session.until(steady, "training holds its memory again", ask=True)
    before = session.leased("kv")
    left_over = session.stats.kv_slots_now - len(running) * each
    count = -int(-(wanted / slot_bytes + left_over) // each)
    names = [f"burst-{number}-{i}" for i in range(count)]
    session.add(names, prompts(count), each - BURST_PROMPT)
    session.until(lambda: all(name in session.first for name in names), "all of the burst runs")
    session.refresh()
    starts = [1e3 * session.first[name][0] for name in names]
    rounds.first_start.append(min(starts))
    rounds.all_started.append(max(starts))
    rounds.first_token.append(1e3 * min(session.first[name][1] for name in names))
    rounds.moved_gib.append((session.leased("kv") - before) / GIB)
    # slots that hold no token of anybody; the statistics come after the tokens of the turns before
    stats, token_bytes = session.stats, info.memory_plan["kv_max"] / session.stats.kv_slots_max
    rounds.kv_wasted.append(max(0, stats.kv_slots_used - sum(session.tokens[name] for name in session.open)))
    rounds.kv_usable.append(stats.kv_slots_now * token_bytes / session.leased("kv"))
    print(
        f"burst {number}: {count} requests beside {len(running)}, first start {min(starts):.1f} ms, last "
        f"{max(starts):.1f} ms, {rounds.moved_gib[-1]:.3f} GiB moved",
        flush=True,
    )
    session.abort_all()
