"""SlotAllocator: order, atomicity, references, claims, resizing, against a plain set model."""

from __future__ import annotations

import random

import pytest

from fineinfer.memory.slot_allocator import IntegrityError, SlotAllocator


def _alloc(allocator: SlotAllocator, n: int) -> list[int]:
    slots = allocator.alloc(n)
    assert slots is not None
    return slots.tolist()


def test_lowest_first() -> None:
    allocator = SlotAllocator(10)
    assert _alloc(allocator, 6) == [0, 1, 2, 3, 4, 5]
    allocator.free([4, 1])
    assert _alloc(allocator, 3) == [1, 4, 6]
    assert allocator.alloc_one() == 7
    assert (allocator.num_free, allocator.num_used) == (2, 8)


def test_alloc_is_atomic() -> None:
    allocator = SlotAllocator(4)
    _alloc(allocator, 2)
    assert allocator.alloc(3) is None
    assert allocator.alloc_contiguous(3) is None
    assert not allocator.extend(1, 2)  # 1 is live, 2 is not
    assert not allocator.extend(2, 3)  # past the end
    assert (allocator.num_free, allocator.num_used) == (2, 2)
    assert _alloc(allocator, 2) == [2, 3]
    assert allocator.alloc_one() is None
    allocator.check_integrity()


def test_double_free_raises_and_changes_nothing() -> None:
    allocator = SlotAllocator(6)
    _alloc(allocator, 4)
    allocator.free([1])
    for bad in ([1], [0, 1], [2, 2], [5], [-1], [6]):
        with pytest.raises(ValueError):
            allocator.free(bad)
    assert allocator.num_used == 3
    allocator.check_integrity()


def test_shared_slot_is_free_after_the_last_reference() -> None:
    allocator = SlotAllocator(4)
    slots = _alloc(allocator, 3)
    allocator.share(slots[:2])
    allocator.share([0, 0])  # twice in one call counts twice
    assert allocator.references(range(4)).tolist() == [4, 2, 1, 0]
    allocator.free(slots)
    assert (allocator.num_used, allocator.num_free) == (2, 2)
    allocator.free([0, 0, 0, 1])
    assert (allocator.num_used, allocator.num_free) == (0, 4)
    with pytest.raises(ValueError):
        allocator.share([0])
    allocator.check_integrity()


def test_contiguous_takes_the_lowest_gap_with_room_else_the_largest() -> None:
    allocator = SlotAllocator(100)
    _alloc(allocator, 100)
    allocator.free(range(10, 14))
    allocator.free(range(20, 40))
    allocator.free(range(60, 70))
    assert allocator.alloc_contiguous(4, room=4) == range(20, 24)
    assert allocator.num_claimed == 4
    assert allocator.alloc_contiguous(3, room=50) == range(28, 31)  # no gap has room for 53: the largest, [28, 40)
    assert allocator.alloc_contiguous(4) == range(10, 14)
    assert allocator.alloc_contiguous(11) is None
    allocator.check_integrity()


def test_claims_cost_nothing_and_keep_runs_together() -> None:
    allocator = SlotAllocator(30)
    assert allocator.alloc_contiguous(5, room=10) == range(0, 5)
    assert (allocator.num_free, allocator.num_claimed) == (25, 10)
    assert _alloc(allocator, 3) == [15, 16, 17]  # the claim [5, 15) is left alone
    for slot in range(5, 15):
        assert allocator.extend(slot, 1)
    assert not allocator.extend(15, 1)
    assert allocator.num_claimed == 0
    allocator.check_integrity()


def test_extend_goes_on_from_the_claim_into_open_slots() -> None:
    allocator = SlotAllocator(20)
    allocator.alloc_contiguous(2, room=3)
    assert allocator.extend(2, 5)  # three claimed, two open
    assert (allocator.num_claimed, allocator.num_used, allocator.num_free) == (0, 7, 13)
    assert not allocator.extend(7, 14)
    assert allocator.extend(7, 13)
    allocator.check_integrity()


def test_claims_are_stolen_only_when_needed_and_from_the_far_end() -> None:
    allocator = SlotAllocator(20)
    allocator.alloc_contiguous(4, room=12)  # claim [4, 16), open [16, 20)
    assert _alloc(allocator, 4) == [16, 17, 18, 19]
    assert allocator.num_claimed == 12
    assert _alloc(allocator, 1) == [10]  # half of the claim is opened: [10, 16)
    assert allocator.num_claimed == 6
    assert allocator.extend(4, 6)
    assert _alloc(allocator, 5) == [11, 12, 13, 14, 15]
    assert allocator.num_free == 0
    allocator.check_integrity()


def test_contiguous_steals_from_the_longest_claim() -> None:
    allocator = SlotAllocator(30)
    allocator.alloc_contiguous(2, room=8)  # claim [2, 10)
    allocator.alloc_contiguous(2, room=18)  # claim [12, 30)
    assert allocator.alloc_contiguous(5) == range(21, 26)
    assert allocator.num_claimed == 8 + 9
    allocator.check_integrity()


def test_released_claim_is_open_again() -> None:
    allocator = SlotAllocator(10)
    allocator.alloc_contiguous(2, room=8)
    allocator.release_claim(2)
    allocator.release_claim(2)
    assert allocator.num_claimed == 0
    assert allocator.claim(2, 3) == 3
    assert allocator.claim(2, 3) == 0
    assert allocator.claim(1, 3) == 0  # live
    allocator.check_integrity()


def test_resize_strands_live_slots_until_moved() -> None:
    allocator = SlotAllocator(20)
    _alloc(allocator, 10)
    allocator.alloc_contiguous(2, room=6)
    allocator.free(range(0, 4))
    allocator.resize(9)
    assert allocator.stranded().tolist() == [9, 10, 11]
    assert (allocator.num_free, allocator.num_used) == (4, 8)
    allocator.check_integrity()
    allocator.share([9])
    target = _alloc(allocator, 2)
    allocator.move([11, 9], target)
    assert allocator.references(target).tolist() == [1, 2]
    allocator.free([10])
    assert allocator.stranded().size == 0
    assert (allocator.num_free, allocator.num_used) == (2, 7)  # freed slots above the limit do not come back
    allocator.resize(20)
    assert allocator.num_free == 13
    allocator.check_integrity()
    for limit in (-1, 21):
        with pytest.raises(ValueError):
            allocator.resize(limit)


def test_moved_slots_come_back_in_any_order_and_only_below_the_limit() -> None:
    allocator = SlotAllocator(12, limit=12)
    _alloc(allocator, 10)
    allocator.free([0, 1, 3])
    allocator.resize(8)
    allocator.move([9, 5, 8], _alloc(allocator, 3))
    assert (allocator.num_free, allocator.num_used, allocator.stranded().size) == (1, 7, 0)
    assert _alloc(allocator, 1) == [5]
    allocator.check_integrity()


@pytest.mark.parametrize(("source", "target"), [([0], [1]), ([9], [8]), ([0, 0], [8, 9]), ([0], [8, 9]), ([8], [8])])
def test_move_refuses_what_would_lose_a_reference(source: list[int], target: list[int]) -> None:
    allocator = SlotAllocator(10)
    _alloc(allocator, 9)
    allocator.share([1])
    with pytest.raises(ValueError):
        allocator.move(source, target)
    allocator.check_integrity()


@pytest.mark.parametrize("call", ["alloc", "contiguous", "room", "capacity"])
def test_negative_arguments_raise(call: str) -> None:
    allocator = SlotAllocator(4)
    with pytest.raises(ValueError):
        {
            "alloc": lambda: allocator.alloc(-1),
            "contiguous": lambda: allocator.alloc_contiguous(0),
            "room": lambda: allocator.alloc_contiguous(1, room=-1),
            "capacity": lambda: SlotAllocator(-1),
        }[call]()


def test_check_integrity_can_fail() -> None:
    allocator = SlotAllocator(8)
    _alloc(allocator, 4)
    allocator._refs[2] = 0
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
    allocator._refs[2] = 1
    allocator.check_integrity()
    allocator._refs[6] = 1
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_matches_a_set_model(seed: int) -> None:
    """Scattered frees of many pieces also exercise the bulk merge."""
    rng, allocator = random.Random(seed), SlotAllocator(1000, limit=700)
    live: dict[int, int] = {}
    for _ in range(600):
        action = rng.randrange(6)
        free = set(range(allocator.limit)) - live.keys()
        if action == 0:
            n = rng.randrange(1, 200)
            slots = allocator.alloc(n)
            assert (slots is None) == (n > len(free))
            if slots is not None:
                assert set(slots.tolist()) <= free and (n == 0 or (slots[1:] > slots[:-1]).all())
                if not allocator.num_claimed:
                    assert slots.tolist() == sorted(free)[:n]
                live.update(dict.fromkeys(slots.tolist(), 1))
        elif action == 1:
            n = rng.randrange(1, 40)
            run = allocator.alloc_contiguous(n, room=rng.randrange(60))
            if run is not None:
                assert len(run) == n and set(run) <= free
                live.update(dict.fromkeys(run, 1))
            elif not allocator.num_claimed:
                assert not any(set(range(slot, slot + n)) <= free for slot in free)
        elif action == 2 and live:
            shared = rng.sample(sorted(live), min(len(live), 20))
            allocator.share(shared)
            for slot in shared:
                live[slot] += 1
        elif action == 3 and live:
            freed = rng.sample(sorted(live), rng.randrange(min(len(live), 300)))
            allocator.free(freed)
            for slot in freed:
                live[slot] -= 1
                if not live[slot]:
                    del live[slot]
        elif action == 4:
            start = rng.randrange(700)
            if allocator.extend(start, 3):
                assert {start, start + 1, start + 2} <= free
                live.update(dict.fromkeys(range(start, start + 3), 1))
        elif action == 5:
            allocator.resize(rng.randrange(300, 1001))
        allocator.check_integrity()
        assert allocator.num_used == len(live)
        assert allocator.num_free == len(set(range(allocator.limit)) - live.keys())
    assert all(allocator.references([slot])[0] == count for slot, count in live.items())


def test_slots_that_the_prefix_cache_holds_are_told_apart() -> None:
    allocator = SlotAllocator(20)
    slots = allocator.alloc(6)
    allocator.keep(slots[:4])
    assert allocator.num_cached == 0 and allocator.kept().tolist() == [0, 1, 2, 3]
    allocator.free(slots)
    assert (allocator.num_cached, allocator.num_used) == (4, 4)
    allocator.share([1, 2, 2])
    assert allocator.num_cached == 2
    allocator.check_integrity()
    with pytest.raises(ValueError, match="double free of slot 1"):
        allocator.free([1, 1])  # the second would be the cache's own
    for wrong in (lambda: allocator.keep([0]), lambda: allocator.drop([4]), lambda: allocator.keep([9])):
        with pytest.raises(ValueError):
            wrong()
    assert allocator.alloc(1).tolist() == [4]
    allocator.move([0], allocator.alloc(1))
    assert allocator.kept().tolist() == [1, 2, 3, 5] and allocator.num_cached == 2
    allocator.drop([1, 3, 5])
    assert (allocator.num_cached, allocator.num_used) == (0, 3)
    allocator.free([2, 2])
    assert allocator.num_cached == 1
    allocator.check_integrity()
