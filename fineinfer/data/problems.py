"""What is wrong with a training file: one item a problem, the first ones kept, all counted by code."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import msgspec

MAX_SHOWN = 20
MAX_NOTES = 50


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


class RowError(ValueError):
    """A row that cannot be trained on; ``problems`` says why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class RowCheck:
    """Collects what is wrong with one row.

    Args:
        line: Its line number.
        notes: Where oddities are counted that are accepted, by their text.
    """

    def __init__(self, line: int, notes: Counter[str]) -> None:
        self._line = line
        self._notes = notes
        self.problems: list[Problem] = []

    def note(self, text: str) -> None:
        """Count an oddity; the first MAX_NOTES kinds are kept apart."""
        if text in self._notes or len(self._notes) < MAX_NOTES:
            self._notes[text] += 1

    def wrong(self, code: str, where: str, text: str) -> None:
        """Note that the value at ``where`` is wrong and look on."""
        self.problems.append(Problem(line=self._line, code=code, message=f"{where} {text}", param=where))

    def refuse(self, code: str, message: str, param: str | None = None) -> NoReturn:
        """Raise a RowError: nothing more can be said about this row."""
        raise RowError([*self.problems, Problem(line=self._line, code=code, message=message, param=param)])

    def convert(self, value: Any, kind: Any, where: str) -> Any:
        """The value at ``where`` as a type that msgspec knows; refuses the row if it is of another."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$")
            param = (where + path.rstrip("`")).removeprefix(".") or None
            self.refuse("invalid_type", f"{param or 'the row'}: {reason[0].lower()}{reason[1:]}", param)

    def decode(self, text: str, where: str) -> Any:
        """The JSON text at ``where`` as a value; refuses the row if it is none."""
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            self.refuse("invalid_json", f"{where} must be JSON text: {error}", where)


class ProblemReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a file.

    Attributes:
        first: The first problems.
        counts: All of them by code.
        rows: Rows of the file.
        bad_rows: Rows with a problem.
        format: Format of the rows, if it was found.
        warnings: What is odd and accepted, for the user.
        file: Field of the request that named the file.
    """

    first: list[Problem]
    counts: dict[str, int]
    rows: int = 0
    bad_rows: int = 0
    format: str | None = None
    warnings: list[str] = []
    file: str = "training_file"

    @property
    def total(self) -> int:
        """Number of problems, the ones not shown included."""
        return sum(self.counts.values())


class ProblemLog:
    """Collects problems in constant memory."""

    def __init__(self) -> None:
        self.first: list[Problem] = []
        self.counts: Counter[str] = Counter()

    def add(self, problem: Problem) -> None:
        """Count one more problem and keep it if it is among the first."""
        self.counts[problem.code] += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(problem)
