"""KV cache as the scheduler and the runner see it: rows of slots over a pool that grows and shrinks (no torch)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from fineinfer.memory.prefix_cache import PrefixCache, Tokens
from fineinfer.memory.request_table import RequestTable
from fineinfer.memory.slot_allocator import IntegrityError, SlotAllocator, SlotIds, Slots

if TYPE_CHECKING:
    from fineinfer.memory.kv_pool import KVPool


class KVCache:
    """Owns the slot allocator, the request table and (outside scheduler tests) the KV pool.

    A row holds the slots of one sequence in position order. Slots of a new row are one contiguous run where possible,
    with ``room`` claimed behind it for its later tokens.

    Args:
        num_slots: Slots usable at first.
        max_rows: Most open rows.
        max_len: Most slots of one row.
        max_slots: Most slots the cache can ever have; None means the pool's maximum, or ``num_slots`` without a pool.
        pool: The tensors; None keeps counts only.
        keep_prefixes: Keep the slots of closed rows for later ones that begin alike, as long as nobody needs them.

    Attributes:
        epoch: Rises with every move of live slots; slot ids read at an earlier epoch are stale.
    """

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        max_len: int,
        max_slots: int | None = None,
        pool: KVPool | None = None,
        *,
        keep_prefixes: bool = False,
    ) -> None:
        if pool is not None:
            max_slots = pool.max_slots if max_slots is None else min(max_slots, pool.max_slots)
            num_slots = pool.resize(num_slots)
        self.max_slots = num_slots if max_slots is None else max_slots
        self.allocator = SlotAllocator(self.max_slots, num_slots)
        self.table = RequestTable(max_rows, max_len)
        self.pool = pool
        self.prefixes = PrefixCache(self.allocator) if keep_prefixes else None
        self.epoch = 0
        self._run_starts: list[int | None] = [None] * max_rows  # first slot of a row that is one run, else None
        self._expected: list[int] = [0] * max_rows  # length a row was opened for: prompt + room

    @property
    def num_slots(self) -> int:
        """Slots the cache has now."""
        return self.allocator.limit

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return self.allocator.num_free

    @property
    def num_used(self) -> int:
        """Live slots; a shared slot counts once."""
        return self.allocator.num_used

    @property
    def num_cached(self) -> int:
        """Slots that only the prefix cache holds."""
        return self.allocator.num_cached

    @property
    def num_free_rows(self) -> int:
        """Rows that can still be opened."""
        return self.table.num_free_rows

    # ---------------------------------------------------------------- rows

    def open_row(self, prompt_len: int, room: int = 0) -> int | None:
        """Open a row of ``prompt_len`` slots (0 is allowed) and softly claim ``room`` more behind them.

        Returns:
            The row, or None (and no change) if no row or too few slots are free.

        Raises:
            ValueError: A negative argument, or a prompt longer than ``max_len``.
        """
        if prompt_len < 0 or room < 0 or prompt_len > self.table.max_len:
            raise ValueError(f"prompt_len must be in [0, {self.table.max_len}], room >= 0: got {prompt_len}, {room}.")
        if prompt_len > self.num_free:
            return None
        row = self.table.open()
        if row is None:
            return None
        self._run_starts[row] = None
        self._expected[row] = min(prompt_len + room, self.table.max_len)
        self._append(row, 0, prompt_len)
        return row

    def open_row_from(self, key: Hashable, tokens: Tokens, room: int = 0) -> tuple[int, int] | None:
        """Open a row that begins with the slots of the longest kept prefix of ``tokens``, and claim room behind it.

        Args:
            key: Whose prefixes: (adapter version, salt).
            tokens: [n] int32; the last one is never taken from the cache, as its logits are needed.
            room: Slots softly claimed.

        Returns:
            The row and how many tokens of it are there already; None (and no change) if no row is free.
        """
        found = None if self.prefixes is None else self.prefixes.match(key, tokens[:-1])
        if found is None or len(found) == 0:
            row = self.open_row(0, room)
            return None if row is None else (row, 0)
        row = self.table.open()
        if row is None:
            return None
        self.allocator.share(found)
        self.table.slots[row, : len(found)] = found
        self.table.lengths[row] = len(found)
        self._expected[row] = min(room, self.table.max_len)
        self._find_run(row)
        return row, len(found)

    def can_append(self, row: int, n: int) -> bool:
        """Whether ``append(row, n)`` would succeed now."""
        return 0 <= n <= self.num_free + self.num_cached and self.table.length(row) + n <= self.table.max_len

    def append(self, row: int, n: int) -> bool:
        """Give the row n more slots, next to its last one if possible; all of them, or False and no change.

        Raises:
            ValueError: The row is closed, n is negative, or the row would exceed ``max_len``.
        """
        length = self.table.lengths[row]
        if length is None or n < 0 or length + n > self.table.max_len:
            raise ValueError(f"row {row} is closed or cannot take {n} slots (length {length})")
        if n == 1 and length:  # the decode path: 64 of these run between two steps
            start = self._run_starts[row]
            slot: int | None
            if start is None:
                slot = self.allocator.alloc_one()
            else:
                slot = start + length if self.allocator.extend(start + length, 1) else None
            if slot is not None:
                self.table.slots[row, length] = slot
                self.table.lengths[row] = length + 1
                return True
        if not self._make_free(n):
            return False
        self._append(row, length, n)
        return True

    def _make_free(self, n: int) -> bool:
        """Whether n slots are free, if need be after giving up prefixes that nobody uses."""
        if n > self.num_free and self.prefixes is not None:
            self.prefixes.evict(n - self.num_free)
        return n <= self.num_free

    def fork_row(self, row: int, length: int) -> int | None:
        """Open a row that shares the first ``length`` slots of another; None if no row is free.

        A shared slot must not be rewritten by either row.
        """
        if not 0 <= length <= self.table.length(row):
            raise ValueError(f"cannot share {length} of {self.table.length(row)} slots")
        fork = self.table.open()
        if fork is None:
            return None
        self.allocator.share(self.table.slots[row, :length])
        self.table.slots[fork, :length] = self.table.slots[row, :length]
        self.table.lengths[fork] = self._expected[fork] = length
        self._run_starts[fork] = self._run_starts[row] if length else None
        if self._run_starts[fork] is None:
            self._find_run(fork)
        return fork

    def close_row(self, row: int, key: Hashable = None, tokens: Tokens | None = None) -> None:
        """Release a row, its slots and its claim; closing a closed row does nothing.

        Args:
            row: Which.
            key: As for ``open_row_from``.
            tokens: [n] int32: the row's first n tokens, whose keys and values later rows may use; None keeps none.
        """
        length = self.table.lengths[row]
        if length is None:
            return
        if tokens is not None and self.prefixes is not None:
            self.prefixes.insert(key, tokens, self.table.slots[row, : len(tokens)])
        self._drop_claim(row, length)
        self.allocator.free(self.table.slots[row, :length])
        self._run_starts[row] = None
        self.table.close(row)

    def length(self, row: int) -> int:
        """Number of slots the row holds. Raises ValueError if it is closed."""
        return self.table.length(row)

    def slots(self, row: int) -> Slots:
        """The row's slots in position order, int32 ``[length]``: a view of the table, valid until the cache changes."""
        return self.table.slots[row, : self.table.length(row)]

    def run(self, row: int) -> slice | None:
        """The row's slots as one slice of the pool if they are one ascending run, else None; O(1)."""
        length, start = self.table.length(row), self._run_starts[row]
        if start is not None:
            return slice(start, start + length)
        return None if length else slice(0, 0)

    # ---------------------------------------------------------------- size

    def grow_to(self, n: int) -> int:
        """Map memory and raise the number of slots to n, at most ``max_slots``; never lowers it.

        Returns:
            The number of slots there are now: fewer than n where memory comes in large steps or is gone.
        """
        n = min(n, self.max_slots)
        if n > self.num_slots:
            self.allocator.resize(n if self.pool is None else self.pool.resize(n))
        return self.num_slots

    def shrink_to(self, n: int) -> int:
        """Move live slots below the line ``max(n, num_used)``, then unmap what lies above it.

        The line is raised to a size that the pool can have. Rows that are one run stay one where a gap below the line
        holds them. A pool that cannot be resized stays as is.

        Returns:
            The number of slots there are now.
        """
        if self.prefixes is not None and self.num_used > n:  # the first to give memory back
            self.prefixes.evict(self.num_used - n)
        line = max(n, self.num_used)
        if self.pool is not None:
            line = self.pool.round_up(line)
        if line >= self.num_slots or not (self.pool is None or self.pool.elastic):
            return self.num_slots
        for row in self.table.open_rows():
            self._drop_claim(row, self.table.length(row))
        self.allocator.resize(line)
        copies = _Copies(self.pool, self.max_slots)
        self._move_runs(line, copies)
        stranded = self.allocator.stranded()
        if stranded.size:
            target = self.allocator.alloc(stranded.size)
            if target is None:
                raise IntegrityError("fewer free slots below the line than live slots above it")
            self._move(stranded, target, copies)
            self._rewrite_table(stranded, target)
        for row in self.table.open_rows():
            start, length = self._run_starts[row], self.table.length(row)
            if start is not None:
                self.allocator.claim(start + length, self._expected[row] - length)
        copies.flush()
        if self.pool is not None:
            self.pool.resize(line)
        return line

    def check_integrity(self) -> None:
        """Raise IntegrityError unless allocator, table, runs and pool agree in every number."""
        self.allocator.check_integrity()
        references = np.zeros(self.max_slots, dtype=np.int64)
        for row in self.table.open_rows():
            slots = self.slots(row)
            np.add.at(references, slots, 1)
            start = self._run_starts[row]
            is_run = bool(len(slots)) and bool((np.diff(slots) == 1).all())
            if (start is not None) != is_run or (is_run and start != slots[0]):
                raise IntegrityError(f"row {row} has slots {slots.tolist()} but run {self.run(row)}")
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        references[self.allocator.kept()] += 1
        if not np.array_equal(references, self.allocator.references(range(self.max_slots))):
            raise IntegrityError("references do not match the rows")
        if self.allocator.stranded().size:
            raise IntegrityError("live slots lie above the limit")
        if self.pool is not None and self.pool.num_slots < self.num_slots:
            raise IntegrityError(f"{self.num_slots} slots over {self.pool.num_slots} mapped ones")

    # ---------------------------------------------------------------- inside

    def _append(self, row: int, length: int, n: int) -> None:
        """Allocate n more slots for a row; the caller has checked that they are free."""
        if n == 0:
            return
        slots = self._place(row, length, n)
        if slots is None:
            raise IntegrityError("free slots could not be allocated")
        self.table.slots[row, length : length + n] = slots
        self.table.lengths[row] = length + n

    def _place(self, row: int, length: int, n: int) -> Slots | range | None:
        """Choose slots for positions ``[length, length + n)`` and keep ``_run_starts`` true."""
        start = self._run_starts[row]
        if length == 0:
            run = self.allocator.alloc_contiguous(n, max(0, self._expected[row] - n))
            if run is not None:
                self._run_starts[row] = run.start
                return run
        elif start is not None:
            if self.allocator.extend(start + length, n):
                return range(start + length, start + length + n)
            self._drop_claim(row, length)
        slots = self.allocator.alloc(n)
        if slots is not None and (length == 0 or start is not None):
            # Scattered on purpose, but the lowest open slots may happen to be neighbours.
            first, last = int(slots[0]), int(slots[-1])
            begin = first - length if start is None else start
            self._run_starts[row] = begin if first == begin + length and last - first == n - 1 else None
        return slots

    def _drop_claim(self, row: int, length: int) -> None:
        start = self._run_starts[row]
        if start is not None:
            self.allocator.release_claim(start + length)

    def _move_runs(self, line: int, copies: _Copies) -> None:
        """Move rows that are one run across or above the line as a whole, where an open gap below holds them."""
        for row in self.table.open_rows():
            start, length = self._run_starts[row], self.table.length(row)
            if start is None or start + length <= line:
                continue
            source = range(start, start + length)
            if self.allocator.references(source).max() > 1:
                continue  # another row has them too: leave these to the general rewrite
            target = self.allocator.alloc_contiguous(length)
            if target is not None:
                self._move(source, target, copies)
                self.table.slots[row, :length] = target
                self._run_starts[row] = target.start

    def _move(self, source: SlotIds, target: SlotIds, copies: _Copies) -> None:
        copies.add(source, target)
        self.allocator.move(source, target)
        self.epoch += 1

    def _rewrite_table(self, source: Slots, target: Slots) -> None:
        """Replace every mention of a source slot, in all rows that share it."""
        new_slot = np.arange(self.max_slots, dtype=np.int32)
        new_slot[source] = target
        if self.prefixes is not None:
            self.prefixes.rename(source, new_slot)
        for row in self.table.open_rows():
            slots = self.slots(row)
            renamed = new_slot[slots]
            if not np.array_equal(renamed, slots):
                slots[:] = renamed
                self._find_run(row)

    def _find_run(self, row: int) -> None:
        slots = self.slots(row)
        is_run = len(slots) > 0 and bool((np.diff(slots) == 1).all())
        self._run_starts[row] = int(slots[0]) if is_run else None


class _Copies:
    """The copies of one shrink, joined as far as their order allows: each costs a launch a layer on a GPU.

    No slot is moved twice in a shrink, but a row may move to slots that one before it has left.
    """

    def __init__(self, pool: KVPool | None, num_slots: int) -> None:
        self._pool = pool
        self._left = np.zeros(num_slots, dtype=bool)  # slots whose content is still to be copied away
        self._sources: list[SlotIds] = []
        self._targets: list[SlotIds] = []

    def add(self, source: SlotIds, target: SlotIds) -> None:
        if self._left[target].any():
            self.flush()
        self._left[source] = True
        self._sources.append(source)
        self._targets.append(target)

    def flush(self) -> None:
        if self._pool is not None and self._sources:
            self._pool.move(np.concatenate(self._sources), np.concatenate(self._targets))
        self._left[:] = False
        self._sources, self._targets = [], []
