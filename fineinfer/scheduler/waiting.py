"""Who waits, and who is next: by priority, in order of arrival, and nobody for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fineinfer.scheduler.sequence import Sequence

AGED_S = 10.0  # a request that has waited so long takes its turn among those of better priority
AGED_EVERY = 8  # one admission in so many is for the oldest request that has aged


class WaitingQueue:
    """First come, first served within a priority (a lower number is better); better priorities first.

    One admission in ``AGED_EVERY`` is for whoever has waited longest, once that is more than ``AGED_S``: behind n older
    requests a request is admitted after at most ``AGED_EVERY * (n + 1)`` admissions from then on, whatever comes later.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[Sequence]] = {}  # none is empty
        self._since_aged = 0
        self._length = self._num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return self._num_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a request at its place; one that was preempted comes back to where it was."""
        level = self._levels.setdefault(sequence.priority, deque())
        position = len(level)
        if level and level[-1].arrival_s > sequence.arrival_s:
            position = next(i for i, other in enumerate(level) if other.arrival_s > sequence.arrival_s)
        level.insert(position, sequence)
        self._length += 1
        self._num_tokens += len(sequence.prompt)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is. Raises ValueError if it does not wait."""
        level = self._levels.get(sequence.priority, deque())
        level.remove(sequence)
        self._length -= 1
        self._num_tokens -= len(sequence.prompt)
        if not level:
            del self._levels[sequence.priority]

    def oldest_arrival_s(self) -> float | None:
        """When the request that has waited longest came; None if none waits."""
        return min((level[0].arrival_s for level in self._levels.values()), default=None)

    def next(self, now_s: float) -> Sequence | None:
        """Who is to be admitted next; None if none waits."""
        if not self._levels:
            return None
        if self._since_aged >= AGED_EVERY - 1:
            oldest = min((level[0] for level in self._levels.values()), key=lambda s: s.arrival_s)
            if now_s - oldest.arrival_s > AGED_S:
                return oldest
        return self._levels[min(self._levels)][0]

    def admitted(self, sequence: Sequence) -> None:
        """``next`` has joined: out of the queue."""
        passed_over = sequence.arrival_s > (self.oldest_arrival_s() or 0.0)
        self._since_aged = self._since_aged + 1 if passed_over else 0
        self.remove(sequence)
