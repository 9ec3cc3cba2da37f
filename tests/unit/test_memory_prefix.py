"""The prefix cache: what it finds is what was computed, for the same key only; it never keeps what others need."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from fineinfer.memory import prefix_cache
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.prefix_cache import MIN_EVICTED, PrefixCache
from fineinfer.memory.slot_allocator import IntegrityError, SlotAllocator


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class TaggedPool:
    """A pool whose slots remember what was written: the key and all tokens up to theirs."""

    elastic = True

    def __init__(self, max_slots: int) -> None:
        self.max_slots, self.num_slots = max_slots, 0
        self.content: dict[int, tuple[object, ...]] = {}

    def round_up(self, num_slots: int) -> int:
        return num_slots

    def resize(self, num_slots: int) -> int:
        self.content = {slot: tag for slot, tag in self.content.items() if slot < num_slots}
        self.num_slots = num_slots
        return num_slots

    def move(self, src, dst) -> None:
        tags = [self.content[int(slot)] for slot in src]
        self.content.update({int(slot): tag for slot, tag in zip(dst, tags, strict=True)})


def test_match_split_and_insert() -> None:
    allocator = SlotAllocator(64)
    cache = PrefixCache(allocator)
    slots = allocator.alloc(6)
    cache.insert("k", ids(1, 2, 3, 4, 5, 6), slots)
    assert cache.match("k", ids(1, 2, 3, 9)).tolist() == slots[:3].tolist()
    assert cache.match("other", ids(1, 2, 3)).size == 0 and cache.match("k", ids(2)).size == 0
    more = allocator.alloc(5)
    cache.insert("k", ids(1, 2, 3, 7, 8), more)  # the first three are known: their slots stay
    assert cache.match("k", ids(1, 2, 3, 7, 8)).tolist() == [*slots[:3], *more[3:]]
    assert cache.match("k", ids(1, 2, 3, 4, 5, 6, 7)).tolist() == slots.tolist()
    assert cache.num_slots == 8 and allocator.kept().tolist() == sorted([*slots, *more[3:]])
    cache.insert("k", ids(1, 2), slots[:2])
    cache.insert("k", ids(), slots[:0])
    assert cache.num_slots == 8
    assert allocator.references(more).tolist() == [1, 1, 1, 2, 2]
    cache.check_integrity()


def test_the_oldest_end_goes_first_and_what_rows_hold_stays() -> None:
    allocator = SlotAllocator(4096)
    cache = PrefixCache(allocator)
    for start in (0, 1000, 2000):
        slots = allocator.alloc(200)
        cache.insert(None, np.arange(start, start + 200, dtype=np.int32), slots)
        allocator.free(slots)  # only the tree holds them now
    cache.match(None, np.arange(0, 200, dtype=np.int32))  # the first is the newest again
    held = cache.match(None, np.arange(1000, 1050, dtype=np.int32))
    allocator.share(held)
    assert cache.evict(150) == 150
    assert cache.match(None, np.arange(2000, 2200, dtype=np.int32)).size == 50  # the oldest, from its end
    assert cache.evict(10_000) == 50 + 200 + 150
    assert cache.match(None, np.arange(1000, 1200, dtype=np.int32)).tolist() == held.tolist()
    assert cache.num_slots == 50 and cache.evict(1) == 0
    assert MIN_EVICTED > 1


@pytest.mark.parametrize("seed", range(12))
def test_rows_find_only_what_was_computed_for_their_key(seed: int) -> None:
    """Rows open, grow and close, the pool shrinks and grows: every slot found holds what the row would compute."""
    rng = random.Random(seed)
    pool = TaggedPool(600)
    kv = KVCache(600, 8, 128, pool=pool, keep_prefixes=True)
    rows: dict[int, tuple[object, list[int]]] = {}
    shared = [[rng.randrange(3) for _ in range(60)] for _ in range(3)]
    found = evicted = 0

    def write(row: int, first: int) -> None:
        key, tokens = rows[row]
        for position, slot in enumerate(kv.slots(row)[first:], first):
            pool.content[int(slot)] = (key, *tokens[: position + 1])

    for _ in range(400):
        action = rng.random()
        if action < 0.35:
            key = rng.choice([("a", None), ("b", None), ("a", "salt")])
            begin = rng.choice(shared)[: rng.randrange(1, 60)]
            tokens = begin + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            opened = kv.open_row_from(key, np.array(tokens, dtype=np.int32), rng.randrange(40))
            if opened is None:
                continue
            row, matched = opened
            assert matched < len(tokens)
            found += matched
            rows[row] = key, tokens
            for position, slot in enumerate(kv.slots(row)):
                assert pool.content[int(slot)] == (key, *tokens[: position + 1]), "a foreign or stale slot"
            if kv.append(row, len(tokens) - matched):
                write(row, matched)
            else:
                kv.close_row(row)
                del rows[row]
        elif action < 0.6 and rows:
            row = rng.choice(list(rows))
            length = kv.length(row)
            if length < 127 and kv.append(row, 1):
                rows[row][1].append(rng.randrange(3))
                write(row, length)
        elif action < 0.85 and rows:
            row = rng.choice(list(rows))
            key, tokens = rows.pop(row)
            keep = rng.random() < 0.9
            kv.close_row(row, key, np.array(tokens[: kv.length(row)], dtype=np.int32) if keep else None)
        elif action < 0.95:
            before = kv.num_cached
            kv.shrink_to(rng.randrange(100, 600))
            evicted += before - kv.num_cached
        else:
            kv.grow_to(600)
        kv.check_integrity()
        for row, (key, tokens) in rows.items():
            for position, slot in enumerate(kv.slots(row)):
                assert pool.content[int(slot)] == (key, *tokens[: position + 1])
    assert found > 0 and evicted > 0
    for row in list(rows):
        kv.close_row(row)
    assert kv.num_used == kv.num_cached
    kv.prefixes.evict(10_000)
    assert kv.num_used == 0
    kv.check_integrity()


def test_appending_gives_up_prefixes_that_nobody_uses() -> None:
    kv = KVCache(100, 4, 100, keep_prefixes=True)
    row, _ = kv.open_row_from(None, ids(*range(80)))
    assert kv.append(row, 80)
    kv.close_row(row, None, ids(*range(80)))
    assert kv.num_free == 20 and kv.num_cached == 80
    row, matched = kv.open_row_from(None, ids(*range(10), 99))
    assert matched == 10 and kv.can_append(row, 90) and not kv.can_append(row, 91)
    assert kv.append(row, 90)
    assert kv.num_cached == 0 and kv.slots(row).size == 100
    kv.check_integrity()


def test_forgetting_a_key_frees_what_no_row_holds_and_leaves_rows_and_other_keys_alone() -> None:
    kv = KVCache(100, 4, 100, keep_prefixes=True)
    for key in ("bad", "good"):
        row, _ = kv.open_row_from(key, ids(*range(30)))
        assert kv.append(row, 30)
        kv.close_row(row, key, ids(*range(30)))
    row, matched = kv.open_row_from("bad", ids(*range(20), 99))
    assert matched == 20 and kv.append(row, 5)
    slots = kv.slots(row).tolist()
    kv.prefixes.forget("bad")
    kv.prefixes.forget("never seen")
    kv.check_integrity()
    assert kv.slots(row).tolist() == slots and kv.num_used == 25 + 30 and kv.num_cached == 30
    assert kv.prefixes.match("bad", ids(*range(30))).size == 0
    assert kv.prefixes.match("good", ids(*range(30))).size == 30
    kv.close_row(row, "bad", ids(*range(20), 1, 2, 3, 4, 5))  # it ended well: what it held is known again
    assert kv.prefixes.match("bad", ids(*range(30))).size == 20
    kv.check_integrity()


def serve(kv: KVCache, key: object, tokens: np.ndarray) -> None:
    """A request from beginning to end."""
    row, matched = kv.open_row_from(key, tokens, len(tokens))
    assert kv.append(row, len(tokens) - matched)
    kv.close_row(row, key, tokens)


def test_keys_whose_prefixes_are_gone_leave_nothing_behind() -> None:
    """A client may send another salt with every request, and every update of a served job is another version."""
    kv = KVCache(5000, 4, 4000, keep_prefixes=True)
    tracemalloc.start()
    try:
        for number in range(600):
            serve(kv, ("version", f"salt {number}"), np.arange(number, number + 2000, dtype=np.int32))
            if number == 100:
                before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(kv.prefixes._roots) <= 3 and all(root.children for root in kv.prefixes._roots.values())
    assert grown < 100_000, "500 prompts of 2000 tokens are 4 MB"
    kv.prefixes.evict(5000)
    assert not kv.prefixes._roots and not kv.prefixes._nodes and kv.num_used == 0
    kv.check_integrity()


def test_what_is_left_of_a_prefix_does_not_keep_the_whole_alive() -> None:
    allocator = SlotAllocator(20_000)
    cache = PrefixCache(allocator)
    slots = allocator.alloc(10_000)
    cache.insert("k", np.arange(10_000, dtype=np.int32), slots)
    allocator.free(slots)
    (node,) = cache._nodes.values()
    cache.evict(9990)
    assert len(node.tokens) == 10 and node.tokens.base is None and node.slots.base is None
    cache.insert("k", ids(0, 1, 2, 77), allocator.alloc(4))  # cuts the edge in two
    for part in cache._nodes.values():
        assert part.tokens.base is None and part.slots.base is None
    cache.check_integrity()


def num_calls(function: Callable[[], object]) -> int:
    """Calls of functions, and steps of generators, until a function returns."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event.endswith("call") for event in events)


def test_no_call_of_the_engine_goes_through_all_nodes() -> None:
    kv = KVCache(60_000, 8, 100, keep_prefixes=True)
    for number in range(2000):
        serve(kv, "k", np.arange(number, number + 20, dtype=np.int32))
    row, matched = kv.open_row_from("k", np.arange(0, 30, dtype=np.int32))  # holds the longest unused
    kv.append(row, 10)
    assert matched == 20 and len(kv.prefixes._nodes) == 2000
    moved = kv.prefixes.match("k", np.arange(1500, 1520, dtype=np.int32))
    target = kv.allocator.alloc(20)
    kv.allocator.move(moved, target)
    new_slot = np.arange(kv.max_slots, dtype=np.int32)
    new_slot[moved] = target
    assert num_calls(lambda: kv.prefixes.rename(moved, new_slot)) < 100
    assert kv.prefixes.match("k", np.arange(1500, 1520, dtype=np.int32)).tolist() == target.tolist()
    assert num_calls(lambda: kv.num_cached) < 10 and kv.num_cached == 1999 * 20
    assert num_calls(lambda: kv.prefixes.evict(1)) < 400
    assert num_calls(lambda: serve(kv, "k", np.arange(5, 25, dtype=np.int32))) < 400
    kv.check_integrity()


def test_ends_are_evicted_in_the_order_of_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list of all prefixes with the time of their last use; a use of one is one of all it begins with."""
    monkeypatch.setattr(prefix_cache, "MIN_EVICTED", 1)
    rng = random.Random(7)
    allocator = SlotAllocator(400)
    cache = PrefixCache(allocator)
    used: dict[tuple[int, ...], int] = {}
    num_evicted = 0
    for now in range(3000):
        tokens = tuple(rng.randrange(4) for _ in range(rng.randrange(1, 5)))
        array = np.array(tokens, dtype=np.int32)
        if rng.random() < 0.5:
            known = cache.match("k", array)
            new = allocator.alloc(len(tokens) - len(known))
            slots = np.concatenate([known, new])
            for length in range(1, len(tokens) + 1):  # one token an edge, so that an edge is a prefix
                cache.insert("k", array[:length], slots[:length])
            allocator.free(new)
            used.update({tokens[:length]: now for length in range(1, len(tokens) + 1)})
        elif rng.random() < 0.5:
            found = len(cache.match("k", array))
            assert found == max((n for n in range(1, len(tokens) + 1) if tokens[:n] in used), default=0)
            used.update({tokens[:length]: now for length in range(1, found + 1)})
        elif used:
            ends = [one for one in used if not any(other[:-1] == one for other in used)]
            del used[min(ends, key=used.__getitem__)]
            num_evicted += 1
            assert cache.evict(1) == 1
        assert cache.num_slots == len(used)
        cache.check_integrity()
    assert num_evicted > 300


def test_the_audit_notices_a_tree_that_is_wrong() -> None:
    allocator = SlotAllocator(64)
    cache = PrefixCache(allocator)
    cache.insert("k", ids(1, 2, 3), allocator.alloc(3))
    cache.insert("k", ids(1, 2, 4), allocator.alloc(3))
    cache.check_integrity()
    first = next(iter(cache._nodes))
    cache._nodes.move_to_end(first)  # an end behind the node above it
    with pytest.raises(IntegrityError, match="comes before"):
        cache.check_integrity()
    cache._nodes.move_to_end(first, last=False)
    cache._roots["empty"] = prefix_cache._Root("empty")
    with pytest.raises(IntegrityError, match="root has none"):
        cache.check_integrity()
