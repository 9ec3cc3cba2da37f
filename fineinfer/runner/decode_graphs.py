"""Captured decode steps, one CUDA graph a batch bucket: a replay costs the host one launch."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from typing import Any

import torch

# Matrix products of 1 to 256 rows differ little (5.4 to 7.8 ms of an 8B model on an H100), so few buckets lose little.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, 513, 32), *range(576, 4097, 64))


def buckets_up_to(max_rows: int) -> list[int]:
    """Batch sizes to capture so that every batch up to ``max_rows`` has one; the last is ``max_rows`` itself."""
    return [*(bucket for bucket in _BUCKETS if bucket < max_rows), max_rows]


class DecodeGraphs:
    """Graphs by (bucket, with adapters); all share one memory pool, since only one runs at a time.

    Args:
        forward: (bucket, with adapters) -> logits; reads its inputs at fixed addresses and never waits.
        max_rows: Largest batch.

    Attributes:
        capture_s: Seconds spent capturing.
        pool_bytes: Device memory the graphs hold.
    """

    def __init__(self, forward: Callable[[int, bool], torch.Tensor], max_rows: int) -> None:
        self._forward = forward
        self._buckets = buckets_up_to(max_rows)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None  # the handle the first capture makes
        self.capture_s = 0.0
        self.pool_bytes = 0

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def bucket(self, num_rows: int) -> int:
        """Smallest bucket that holds ``num_rows``.

        Raises:
            ValueError: More rows than the largest bucket.
        """
        index = bisect.bisect_left(self._buckets, num_rows)
        if index == len(self._buckets):
            raise ValueError(f"{num_rows} rows exceed the largest decode batch of {self._buckets[-1]}")
        return self._buckets[index]

    def capture(self, variants: tuple[bool, ...], num_buckets: int | None = None) -> None:
        """Capture buckets without (False) and with (True) adapters as asked, the ``num_buckets`` largest or all.

        Each runs once before it is captured, so that kernels are compiled and libraries have their workspaces.
        """
        started_s, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        for bucket in list(reversed(self._buckets))[:num_buckets]:
            for with_adapters in variants:
                self._forward(bucket, with_adapters)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    logits = self._forward(bucket, with_adapters)
                self._pool = self._pool or graph.pool()
                self._graphs[bucket, with_adapters] = graph, logits
        torch.cuda.synchronize()
        self.capture_s += time.perf_counter() - started_s
        self.pool_bytes += max(0, torch.cuda.memory_reserved() - reserved)

    def replay(self, bucket: int, with_adapters: bool) -> torch.Tensor:
        """Run a captured step on the inputs as they are now; its logits, overwritten by the next replay."""
        graph, logits = self._graphs[bucket, with_adapters]
        graph.replay()
        return logits
