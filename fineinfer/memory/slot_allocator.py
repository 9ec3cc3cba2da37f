"""Token-granular slot allocator: which KV slots are free, claimed or live, and how often referenced (no torch)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import neg

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]
SlotIds = Slots | range | Sequence[int]

# From this many pieces on, one vectorised rebuild of the interval lists beats inserting piece by piece.
_BULK_PIECES = 64


class IntegrityError(RuntimeError):
    """The allocator's or cache's books contradict themselves; always a bug, never an answer to a request."""


class SlotAllocator:
    """Hands out slot ids ``[0, limit)``, lowest first, and counts references to each.

    A slot is *free* (open or claimed) or *live* (one reference or more). Free slots are sorted, merged, half-open
    intervals, so no call loops over the pool. A *claim* is a soft reservation of the free slots right
    behind a contiguous run, so that the run's later tokens stay contiguous: other allocations take open slots first and
    steal claimed ones only when they must. Claimed slots count as free.

    Live slots may lie at or above ``limit`` after ``resize``: they stay valid ("stranded") until moved or freed and are
    not handed out again.

    Args:
        num_slots: Capacity; the limit can never exceed it.
        limit: Slots usable now; None means all.
    """

    def __init__(self, num_slots: int, limit: int | None = None) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}.")
        self.capacity = num_slots
        self._refs = np.zeros(num_slots, dtype=np.int32)
        self._ref = self._refs.data  # the same numbers; one is reached 3 x faster than through numpy
        self._kept = np.zeros(num_slots, dtype=bool)  # whether one of the references is the prefix cache's
        # Open intervals [start, end): disjoint, never adjacent, highest first: the lowest leaves the lists in O(1).
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._claims: dict[int, int] = {}  # start -> end of each claim, disjoint from the open intervals
        self._num_open = self._num_claimed = self._num_used = self._num_cached = self._limit = 0
        self.resize(num_slots if limit is None else limit)

    @property
    def limit(self) -> int:
        """Slots at or above this id are not handed out."""
        return self._limit

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now, claimed ones included."""
        return self._num_open + self._num_claimed

    @property
    def num_used(self) -> int:
        """Live slots, each counted once however often it is shared, stranded ones included."""
        return self._num_used

    @property
    def num_cached(self) -> int:
        """Live slots that only the prefix cache holds."""
        return self._num_cached

    @property
    def num_claimed(self) -> int:
        """Free slots softly reserved behind contiguous runs."""
        return self._num_claimed

    # ---------------------------------------------------------------- allocate

    def alloc(self, n: int) -> Slots | None:
        """Allocate the n lowest open slots, ascending; None (and no change) if fewer than n are free."""
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}.")
        if n > self._num_open and not self._steal(n):
            return None
        out = np.empty(n, dtype=np.int32)
        filled = 0
        while filled < n:
            start, end = self._starts[-1], self._ends[-1]
            take = min(end - start, n - filled)
            out[filled : filled + take] = np.arange(start, start + take)
            filled += take
            self._take_front(-1, take)
        self._refs[out] = 1
        self._num_used += n
        return out

    def alloc_one(self) -> int | None:
        """Allocate the lowest open slot without building an array; None if nothing is free."""
        if not self._num_open and not self._steal(1):
            return None
        slot = self._starts[-1]
        self._take_front(-1, 1)
        self._ref[slot] = 1
        self._num_used += 1
        return slot

    def alloc_contiguous(self, n: int, room: int = 0) -> range | None:
        """Allocate n neighbouring slots and claim up to ``room`` slots behind them.

        Takes the lowest gap that holds ``n + room``, else the largest gap that holds n, else half of the longest claim.

        Returns:
            The slots, or None (and no change) if no gap holds n.
        """
        if n <= 0 or room < 0:
            raise ValueError(f"n must be positive and room not negative, got {n} and {room}.")
        if n > self.num_free:
            return None
        index = self._find_gap(n, n + room)
        if index is None:
            longest = max(self._claims, key=self._claim_size, default=None)
            if longest is None or self._claim_size(longest) < n:
                return None
            self._cut_claim(longest, n)
            index = self._find_gap(n, n + room)
            if index is None:
                raise IntegrityError("a stolen claim did not become a gap")
        start = self._starts[index]
        self._take_front(index, n)
        self._refs[start : start + n] = 1
        self._num_used += n
        self.claim(start + n, room)
        return range(start, start + n)

    def extend(self, start: int, n: int) -> bool:
        """Allocate exactly ``[start, start + n)``: the claim that begins there, then open slots; False if not free."""
        claim_end = self._claims.get(start, start)
        beyond = start + n - claim_end  # open slots needed behind the claim
        if beyond > 0:
            index = self._interval_at(claim_end)
            if index is None or self._ends[index] - claim_end < beyond:
                return False
            self._take_front(index, beyond)
        if claim_end > start:
            del self._claims[start]
            if beyond < 0:
                self._claims[start + n] = claim_end
            self._num_claimed -= n if beyond < 0 else claim_end - start
        if n == 1:
            self._ref[start] = 1
        else:
            self._refs[start : start + n] = 1
        self._num_used += n
        return True

    def claim(self, start: int, room: int) -> int:
        """Claim up to ``room`` open slots from ``start`` on (the end of a run); returns how many were claimed."""
        index = self._interval_at(start)
        if room <= 0 or index is None:
            return 0
        size = min(room, self._ends[index] - start)
        self._take_front(index, size)
        self._claims[start] = start + size
        self._num_claimed += size
        return size

    def release_claim(self, start: int) -> None:
        """Open the claim that begins at ``start``, if there is one."""
        end = self._claims.pop(start, None)
        if end is not None:
            self._num_claimed -= end - start
            self._insert(start, end)

    # ---------------------------------------------------------------- share, free, move, resize

    def share(self, slots: SlotIds) -> None:
        """Add one reference to each live slot. Raises ValueError (and changes nothing) if one is not live."""
        ids = self._checked(slots)
        if (self._refs[ids] <= 0).any():
            raise ValueError("only a live slot can be shared")
        cached = np.sort(ids[self._is_cached(ids)])
        self._num_cached -= cached.size - int(np.count_nonzero(cached[1:] == cached[:-1]))  # each once
        np.add.at(self._refs, ids, 1)

    def free(self, slots: SlotIds) -> None:
        """Drop one reference from each slot; slots without any become free.

        Raises:
            ValueError: A slot has fewer references than are dropped (double free), the prefix cache's own not counted;
                nothing changes then.
        """
        ids = self._checked(slots)
        if ids.size == 0:
            return
        ids, counts = np.unique(ids, return_counts=True)
        left = self._refs[ids] - counts
        spare = left - self._kept[ids]
        if spare.min() < 0:
            raise ValueError(f"double free of slot {int(ids[spare.argmin()])}")
        self._refs[ids] = left
        self._num_cached += int(np.count_nonzero(self._is_cached(ids)))
        self._reopen(ids[left == 0])

    def keep(self, slots: SlotIds) -> None:
        """``share``, for the prefix cache. Raises ValueError (and changes nothing) if it has one already, too."""
        ids = self._checked(slots)
        if self._kept[ids].any():
            raise ValueError("a live slot is kept only once")
        self.share(slots)
        self._kept[ids] = True

    def drop(self, slots: SlotIds) -> None:
        """Take back ``keep``. Raises ValueError (and changes nothing) if a slot is not kept."""
        ids = self._checked(slots)
        if not self._kept[ids].all():
            raise ValueError("only a live slot that is kept can be dropped")
        self._num_cached -= int(np.count_nonzero(self._is_cached(ids)))
        self._kept[ids] = False
        self.free(slots)

    def move(self, src: SlotIds, dst: SlotIds) -> None:
        """Hand each live src slot's references to the just allocated dst slot of the same index and free src.

        Raises:
            ValueError: Lengths differ, a src is not live, a dst was not freshly allocated, or the two overlap.
        """
        old, new = self._checked(src), self._checked(dst)
        distinct = len(np.unique(np.concatenate([old, new]))) == old.size + new.size
        if old.size != new.size or not distinct or (self._refs[old] <= 0).any() or (self._refs[new] != 1).any():
            raise ValueError("move needs live sources and as many other, freshly allocated destinations")
        self._refs[new], self._kept[new] = self._refs[old], self._kept[old]
        self._refs[old], self._kept[old] = 0, False
        self._reopen(np.sort(old))

    def resize(self, limit: int) -> None:
        """Change which slots may be handed out. Live slots above a lower limit become stranded.

        Raises:
            ValueError: ``limit`` is negative or above the capacity.
        """
        if not 0 <= limit <= self.capacity:
            raise ValueError(f"limit must be between 0 and {self.capacity}, got {limit}.")
        old, self._limit = self._limit, limit
        if limit > old:
            self._insert_pieces(np.flatnonzero(self._refs[old:limit] == 0) + old)
            return
        for start, end in list(self._claims.items()):
            if end > limit:
                self._cut_claim(start, end - max(start, limit))
        num_above = self._num_from(limit)
        self._num_open -= sum(self._ends[:num_above]) - sum(self._starts[:num_above])
        del self._starts[:num_above], self._ends[:num_above]
        if self._ends and self._ends[0] > limit:
            self._num_open -= self._ends[0] - limit
            self._ends[0] = limit

    def stranded(self) -> Slots:
        """Live slots at or above the limit, ascending."""
        return (np.flatnonzero(self._refs[self._limit :]) + self._limit).astype(np.int32)

    def references(self, slots: SlotIds) -> NDArray[np.int32]:
        """Number of references to each slot."""
        return self._refs[self._checked(slots)]

    def kept(self) -> Slots:
        """The slots that the prefix cache holds, ascending."""
        return np.flatnonzero(self._kept).astype(np.int32)

    # ---------------------------------------------------------------- audit

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot below the limit is exactly one of open, claimed and live."""
        seen = np.zeros(self.capacity + 1, dtype=np.int32)
        previous = -1
        for start, end in self._open_intervals():
            if not previous < start < end <= self._limit:
                raise IntegrityError(f"open interval [{start}, {end}) is empty, unmerged or out of order")
            previous = end
            seen[start:end] += 1
        for start, end in self._claims.items():
            if not 0 <= start < end <= self._limit:
                raise IntegrityError(f"claim [{start}, {end}) is empty or out of range")
            seen[start:end] += 1
        expected = self._refs == 0
        expected[self._limit :] = False
        if not np.array_equal(seen[: self.capacity], expected):
            raise IntegrityError("free intervals and reference counts disagree")
        num_claimed = sum(end - start for start, end in self._claims.items())
        num_free, num_used = int(expected.sum()), int(np.count_nonzero(self._refs))
        if (self._num_open + self._num_claimed, self._num_claimed, self._num_used) != (num_free, num_claimed, num_used):
            raise IntegrityError("slot counts are wrong")
        if (self._refs < self._kept).any():
            raise IntegrityError("a reference count is negative, or 0 for a kept slot")
        if self._num_cached != np.count_nonzero(self._kept & (self._refs == 1)):
            raise IntegrityError("the count of cached slots is wrong")

    # ---------------------------------------------------------------- inside

    def _open_intervals(self) -> Iterator[tuple[int, int]]:
        """The open intervals, lowest first."""
        return zip(reversed(self._starts), reversed(self._ends), strict=True)

    def _num_from(self, slot: int) -> int:
        """Number of open intervals that start at ``slot`` or above; the index of the next one below."""
        return bisect_left(self._starts, 1 - slot, key=neg)

    def _interval_at(self, start: int) -> int | None:
        index = self._num_from(start) - 1
        return index if index >= 0 and self._starts[index] == start else None

    def _checked(self, slots: SlotIds) -> NDArray[np.int64]:
        ids = np.asarray(slots, dtype=np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.capacity):
            raise ValueError(f"slot ids must be in [0, {self.capacity})")
        return ids

    def _is_cached(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each slot whether only the prefix cache holds it."""
        return self._kept[ids] & (self._refs[ids] == 1)

    def _claim_size(self, start: int) -> int:
        return self._claims[start] - start

    def _find_gap(self, n: int, wanted: int) -> int | None:
        best, best_size = None, n - 1
        for position, (start, end) in enumerate(self._open_intervals(), start=1):
            size = end - start
            if size >= wanted:
                return len(self._starts) - position
            if size > best_size:
                best, best_size = len(self._starts) - position, size
        return best

    def _take_front(self, index: int, n: int) -> None:
        start = self._starts[index] + n
        if start < self._ends[index]:
            self._starts[index] = start
        else:
            del self._starts[index], self._ends[index]
        self._num_open -= n

    def _steal(self, num_open: int) -> bool:
        """Open claimed slots until ``num_open`` are open; False (and no change) if fewer are free."""
        if num_open > self.num_free:
            return False
        while self._num_open < num_open:
            longest = max(self._claims, key=self._claim_size)
            self._cut_claim(longest, num_open - self._num_open)
        return True

    def _cut_claim(self, start: int, n: int) -> None:
        """Open n slots (or all) from a claim's far end; half of it at least, so that stealing is rare."""
        end = self._claims.pop(start)
        n = min(max(n, (end - start + 1) // 2), end - start)
        if end - n > start:
            self._claims[start] = end - n
        self._num_claimed -= n
        self._insert(end - n, end)

    def _reopen(self, ids: NDArray[np.int64]) -> None:
        """Return ascending ids, whose references just became 0, to the open intervals."""
        self._num_used -= ids.size
        self._insert_pieces(ids[: int(np.searchsorted(ids, self._limit))])

    def _insert_pieces(self, ids: NDArray[np.int64]) -> None:
        if ids.size == 0:
            return
        breaks = np.flatnonzero(np.diff(ids) != 1)
        starts = ids[np.concatenate([[0], breaks + 1])]
        ends = ids[np.concatenate([breaks, [ids.size - 1]])] + 1
        if starts.size < _BULK_PIECES:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self._insert(start, end)
            return
        # Disjoint intervals stay paired when starts and ends are sorted apart; neighbours merge where they touch.
        all_starts = np.sort(np.concatenate([np.asarray(self._starts, dtype=np.int64), starts]))
        all_ends = np.sort(np.concatenate([np.asarray(self._ends, dtype=np.int64), ends]))
        gap = all_starts[1:] != all_ends[:-1]
        self._starts = all_starts[np.concatenate([[True], gap])][::-1].tolist()
        self._ends = all_ends[np.concatenate([gap, [True]])][::-1].tolist()
        self._num_open += ids.size

    def _insert(self, start: int, end: int) -> None:
        """Add the free, not empty interval [start, end) to the open ones and merge neighbours."""
        self._num_open += end - start
        index = self._num_from(start)  # of the neighbour below; the one above is at index - 1
        joins_below = index < len(self._starts) and self._ends[index] == start
        joins_above = index > 0 and self._starts[index - 1] == end
        if joins_below and joins_above:
            self._ends[index] = self._ends[index - 1]
            del self._starts[index - 1], self._ends[index - 1]
        elif joins_below:
            self._ends[index] = end
        elif joins_above:
            self._starts[index - 1] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
