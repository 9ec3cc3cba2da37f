"""Request table: request row x position -> slot (no torch)."""

from __future__ import annotations

import heapq

import numpy as np


class RequestTable:
    """One row per running sequence; entry ``[row, position]`` is the slot of that token.

    Args:
        max_rows: Most sequences at once.
        max_len: Most positions of one sequence.

    Attributes:
        slots: int32 ``[max_rows, max_len]``; only ``slots[row, :lengths[row]]`` means anything.
        lengths: Positions in use of each row, None for a closed row.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        if max_rows <= 0 or max_len <= 0:
            raise ValueError(f"max_rows and max_len must be positive, got {max_rows} and {max_len}.")
        self.max_rows, self.max_len = max_rows, max_len
        self.slots = np.zeros((max_rows, max_len), dtype=np.int32)
        self.lengths: list[int | None] = [None] * max_rows
        self._free_rows = list(range(max_rows))  # a heap: lowest row first

    @property
    def num_free_rows(self) -> int:
        """Rows that can still be opened."""
        return len(self._free_rows)

    def open(self) -> int | None:
        """Open the lowest closed row, with length 0; None if all are open."""
        if not self._free_rows:
            return None
        row = heapq.heappop(self._free_rows)
        self.lengths[row] = 0
        return row

    def close(self, row: int) -> None:
        """Close a row; closing a closed one does nothing."""
        if self.lengths[row] is not None:
            self.lengths[row] = None
            heapq.heappush(self._free_rows, row)

    def open_rows(self) -> list[int]:
        """The open rows, ascending."""
        return [row for row, length in enumerate(self.lengths) if length is not None]

    def length(self, row: int) -> int:
        """Positions in use of an open row. Raises ValueError if the row is closed."""
        length = self.lengths[row]
        if length is None:
            raise ValueError(f"row {row} is closed")
        return length
