"""Captured steps, one CUDA graph a bucket of rows: a replay costs the host one launch."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# Matrix products of 1 to 256 rows differ little (5.4 to 7.8 ms of an 8B model on an H100) and above that go by tiles of
# 64 rows, so few buckets lose little.
_DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, 513, 32), *range(576, 4097, 64))
SERVING_PRIORITY = -1  # above the default stream's, where training runs; captured kernels keep that of their stream
# A step of more rows takes the device longer than the host needs to launch it kernel by kernel.
_MIXED_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024)

TIMED_FROM = 256  # smaller steps read weights most of the time, which takes as long for every number of rows
TIMED_RUNS = 3


class Results(NamedTuple):
    """What a step leaves on the device.

    Attributes:
        logits: [num_samples, vocab_size] in the model's dtype.
        greedy: [2, num_samples] int32: the most likely token, and 1 where the logits were usable.
    """

    logits: torch.Tensor
    greedy: torch.Tensor


class GraphKey(NamedTuple):
    """Which captured step.

    Attributes:
        num_rows: Rows of the forward, padding included.
        mixed: Whether prefill spans may be among them; else every row is a decode row.
        adapted: Whether rows may have adapters.
    """

    num_rows: int
    mixed: bool
    adapted: bool


def decode_buckets(max_rows: int) -> list[int]:
    """Sizes of decode steps, so that every batch up to ``max_rows`` has one; the last is ``max_rows`` itself."""
    return [*(bucket for bucket in _DECODE_BUCKETS if bucket < max_rows), max_rows]


def mixed_buckets(max_rows: int) -> list[int]:
    """Sizes of mixed steps that are captured, none above ``max_rows``."""
    return [bucket for bucket in _MIXED_BUCKETS if bucket <= max_rows]


class StepGraphs:
    """Graphs by key; all share one memory pool, since only one runs at a time.

    Args:
        prepare: Puts padding into the inputs of a key's step, for the runs before it is used.
        forward: Runs the step of a key and returns logits and greedy choices; reads its inputs at fixed addresses and
            never waits.
        num_decode_rows: Largest decode step.
        num_mixed_rows: Largest mixed step.

    Attributes:
        capture_s: Seconds spent capturing.
        pool_bytes: Device memory the graphs hold.
    """

    def __init__(
        self,
        prepare: Callable[[GraphKey], None],
        forward: Callable[[GraphKey], Results],
        num_decode_rows: int,
        num_mixed_rows: int,
    ) -> None:
        self._prepare, self._forward = prepare, forward
        self._decode, self._mixed = decode_buckets(num_decode_rows), mixed_buckets(num_mixed_rows)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Results]] = {}
        self._pool: Any = None  # the handle the first capture makes
        self.capture_s = 0.0
        self.pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def find(self, num_rows: int, mixed: bool, adapted: bool) -> GraphKey | None:
        """The smallest captured step that holds the rows; None if there is none."""
        buckets = self._mixed if mixed else self._decode
        index = bisect.bisect_left(buckets, num_rows)
        if index == len(buckets):
            return None
        key = GraphKey(buckets[index], mixed, adapted)
        return key if key in self._graphs else None

    def keys(self) -> list[GraphKey]:
        """Every step worth capturing, the largest first, so that the smaller ones fit the pool it left."""
        buckets = [(rows, True) for rows in self._mixed] + [(rows, False) for rows in self._decode]
        return [GraphKey(rows, mixed, adapted) for rows, mixed in sorted(buckets)[::-1] for adapted in (True, False)]

    def capture(self, keys: Sequence[GraphKey]) -> None:
        """Capture steps; each runs once before, so that kernels are compiled and libraries have their workspaces."""
        started_s, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        stream = torch.cuda.Stream(priority=SERVING_PRIORITY)
        for key in keys:
            self._prepare(key)
            self._forward(key)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                results = self._forward(key)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = graph, results
        torch.cuda.synchronize()
        self.capture_s += time.perf_counter() - started_s
        self.pool_bytes += max(0, torch.cuda.memory_reserved() - reserved)

    def drop_slower(self, seconds: Callable[[GraphKey], float] | None = None) -> None:
        """Forget steps that take longer than a larger one, which then runs their rows.

        Libraries choose another kernel for each number of rows, and not always a good one: 448 rows of an 8B model took
        19.4 ms on an H100, 512 rows 15.1 ms.

        Args:
            seconds: What a step takes; measured if not given.
        """
        started_s, seconds = time.perf_counter(), seconds or self._seconds
        for mixed, buckets in ((False, self._decode), (True, self._mixed)):
            fastest_s = float("inf")
            for rows in [rows for rows in reversed(buckets) if rows >= TIMED_FROM]:
                took_s = seconds(GraphKey(rows, mixed, adapted=False))
                if took_s > fastest_s:
                    buckets.remove(rows)
                    for adapted in (False, True):
                        self._graphs.pop(GraphKey(rows, mixed, adapted), None)
                fastest_s = min(fastest_s, took_s)
        self.capture_s += time.perf_counter() - started_s

    def _seconds(self, key: GraphKey) -> float:
        """The fastest of a few runs of a captured step."""
        took_ms = []
        for _ in range(TIMED_RUNS):
            self._prepare(key)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.replay(key)
            end.record()
            end.synchronize()
            took_ms.append(begin.elapsed_time(end))
        return 1e-3 * min(took_ms)

    def replay(self, key: GraphKey) -> Results:
        """Run a captured step on the inputs as they are now; its results, overwritten by the next replay."""
        graph, results = self._graphs[key]
        graph.replay()
        return results
