"""Requests for the simulator: Poisson, traces of real servers, and mixes that try to starve someone."""

from __future__ import annotations

import csv
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it comes.

    Attributes:
        due_s: When.
        num_prompt: Prompt tokens.
        num_output: Output tokens.
        has_max_tokens: Whether it says how long its output may be.
        adapter: Its model; None is the base model.
        priority: 0 is interactive, above is batch.
    """

    due_s: float
    num_prompt: int
    num_output: int
    has_max_tokens: bool = True
    adapter: str | None = None
    priority: int = 0


def poisson(rate: float, seconds: float, lengths: list[tuple[int, int]], seed: int) -> Iterator[Arrival]:
    """Arrivals at ``rate`` a second with lengths drawn from those given."""
    rng, now = random.Random(seed), 0.0
    while rate > 0 and (now := now + rng.expovariate(rate)) < seconds:
        yield Arrival(now, *rng.choice(lengths))


def read_trace(path: Path, speed: float = 1.0, seconds: float | None = None, repeat: int = 1) -> list[Arrival]:
    """Arrivals of a trace CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens; the first comes at 0.

    Args:
        path: The file; rows in any order.
        speed: The time between arrivals is divided by this.
        seconds: Only arrivals before this time on the divided clock.
        repeat: The trace so many times, one after the other.

    Raises:
        ValueError: A column is missing or a value is none.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        found = [
            (datetime.fromisoformat(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: needs the columns TIMESTAMP, ContextTokens, GeneratedTokens") from error
    found.sort(key=lambda row: row[0])
    once = [
        Arrival((when - found[0][0]).total_seconds() / speed, max(1, num_prompt), max(1, num_output))
        for when, num_prompt, num_output in found
    ]
    length_s = once[-1].due_s if once else 0.0
    arrivals = [dataclasses.replace(a, due_s=a.due_s + i * length_s) for i in range(repeat) for a in once]
    return [arrival for arrival in arrivals if seconds is None or arrival.due_s < seconds]


def hostile(count: int, longest: int, seed: int) -> list[Arrival]:
    """Mixes that try to starve someone, in random order and overlapping.

    Prompts of nearly the longest length all at once; floods of one-token requests; requests without max_tokens, short
    ones first, so that those behind them are predicted short and are not; batch requests under a flood of interactive
    ones.
    """
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while len(arrivals) < count:
        mix = rng.randrange(4)
        if mix == 0:
            sizes = [longest - 64 - rng.randrange(longest // 4) for _ in range(rng.randint(2, 16))]
            arrivals += [Arrival(now, max(1, size), rng.randint(1, 64)) for size in sizes]
        elif mix == 1:
            arrivals += [Arrival(now + i * 1e-3, rng.randint(1, 64), 1) for i in range(200)]
        elif mix == 2:
            arrivals += [Arrival(now, rng.randint(1, 256), rng.randint(1, 8), False) for _ in range(16)]
            outputs = [rng.randint(longest // 8, longest // 3) for _ in range(16)]
            arrivals += [Arrival(now + 0.5, rng.randint(1, 256), output, False) for output in outputs]
        else:
            arrivals += [Arrival(now, rng.randint(1, 256), rng.randint(1, 64), priority=1) for _ in range(8)]
            arrivals += [Arrival(now + i * 0.02, rng.randint(1, 256), rng.randint(1, 32)) for i in range(100)]
        now += rng.expovariate(0.5)
    return sorted(arrivals[:count], key=lambda arrival: arrival.due_s)


def in_bursts(arrivals: list[Arrival], rate: float, burst_s: float, pause_s: float) -> list[Arrival]:
    """The same requests at ``rate`` a second on the mean while a burst lasts, none in the pauses between bursts."""
    scale = len(arrivals) / rate / max(1e-9, arrivals[-1].due_s)
    due_s = [arrival.due_s * scale for arrival in arrivals]
    return [
        dataclasses.replace(arrival, due_s=s + pause_s * (s // burst_s))
        for arrival, s in zip(arrivals, due_s, strict=True)
    ]
