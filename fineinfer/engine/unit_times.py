"""What units of training take: measured at once on a CPU, by events and behind the host's back on a GPU."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.training.parking import ParkableTrainer

LAUNCH_AHEAD = 2  # units in flight on a GPU: a host wait after every unit costs 0.5 ms of a 1.4 to 2.7 ms unit


class LaunchedUnit(NamedTuple):
    """A unit on its way; ``steps`` is the number of steps launched until then, -1 if one ran at that time."""

    kind: str
    num_tokens: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    steps: int


class UnitTimes:
    """Runs units and tells the latency model what they took.

    Args:
        latency: Slice times.
        device: The model's.
        can_run_beside: Whether units run beside steps of requests.

    Attributes:
        used_s: Seconds of the device that the job has used.
    """

    def __init__(self, latency: LatencyModel, device: torch.device, can_run_beside: bool) -> None:
        self._latency, self._device, self._can_run_beside = latency, device, can_run_beside
        self._pending: deque[LaunchedUnit] = deque()
        self._num_steps = 0  # of requests, launched so far
        self.used_s = 0.0

    @property
    def num_pending(self) -> int:
        """Units on their way, as far as the host knows."""
        return len(self._pending)

    @property
    def pending_s(self) -> float:
        """Estimated seconds of the units on their way, were they alone."""
        return sum(self._latency.estimate(unit.kind, unit.num_tokens) for unit in self._pending)

    def step_begins(self) -> bool:
        """Note that a step of requests is launched now; whether the device still runs units then."""
        self.take_finished()
        self._num_steps += 1
        return bool(self._pending)

    def advance(self, trainer: ParkableTrainer, beside: bool) -> None:
        """Run one unit of the trainer, and wait for earlier ones unless requests run ``beside``."""
        if self._device.type == "cpu":
            begin_s = time.perf_counter()
            report = trainer.advance()
            self._took(report.kind, report.num_tokens, time.perf_counter() - begin_s, beside)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(trainer.stream)
        report = trainer.advance()
        end.record(trainer.stream)
        steps = -1 if beside else self._num_steps
        self._pending.append(LaunchedUnit(report.kind, report.num_tokens, begin, end, steps))
        if not beside:
            self.wait(LAUNCH_AHEAD)

    def take_finished(self) -> None:
        """Count the units that are done; never waits."""
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            self.wait(len(self._pending) - 1)

    def wait(self, num_left: int) -> None:
        """Wait until at most so many units are on their way."""
        while len(self._pending) > num_left:
            unit = self._pending.popleft()
            unit.end.synchronize()
            beside = self._can_run_beside and unit.steps != self._num_steps
            self._took(unit.kind, unit.num_tokens, 1e-3 * unit.begin.elapsed_time(unit.end), beside)

    def forget(self) -> None:
        """What is on its way is of no interest any more."""
        self._pending.clear()

    def _took(self, kind: str, num_tokens: int, seconds: float, beside: bool) -> None:
        self.used_s += self._latency.observe(kind, num_tokens, seconds, beside)
