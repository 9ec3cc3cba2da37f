"""What is wrong with a training file: one item a problem, the first ones kept, all counted by code."""

from __future__ import annotations

from collections import Counter

import msgspec

MAX_SHOWN = 20


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One reason to refuse a file.

    Attributes:
        line: 1-based line number in the file; None for the file as a whole.
        code: Short stable name of the kind of problem.
        message: One sentence for the user.
        param: Path inside the row, such as ``messages[2].role``.
    """

    line: int | None
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class ProblemReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a file as it crosses from the data child to the supervisor."""

    first: list[Problem]
    counts: dict[str, int]

    @property
    def total(self) -> int:
        """Number of problems, the ones not shown included."""
        return sum(self.counts.values())


class ProblemLog:
    """Collects problems in constant memory."""

    def __init__(self, max_shown: int = MAX_SHOWN) -> None:
        self._max_shown = max_shown
        self._first: list[Problem] = []
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, problem: Problem) -> None:
        """Count one more problem and keep it if it is among the first."""
        self._counts[problem.code] += 1
        if len(self._first) < self._max_shown:
            self._first.append(problem)

    def report(self) -> ProblemReport:
        """Everything so far."""
        return ProblemReport(first=list(self._first), counts=dict(self._counts))
