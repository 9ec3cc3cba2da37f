"""KVCache without a pool: rows, runs, forks, growing and shrinking; no torch is imported on the way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.slot_allocator import IntegrityError


def _open(cache: KVCache, prompt_len: int, room: int = 0) -> int:
    row = cache.open_row(prompt_len, room)
    assert row is not None
    return row


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys, fineinfer.memory.kv_cache, fineinfer.memory.governor, fineinfer.memory.host;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_grow_as_one_run_beside_each_other() -> None:
    cache = KVCache(200, max_rows=4, max_len=100)
    rows = [_open(cache, 10, room=20) for _ in range(4)]
    assert rows == [0, 1, 2, 3]
    assert cache.open_row(1, 0) is None  # no row left
    for _ in range(20):
        assert all(cache.append(row, 1) for row in rows)
    assert [cache.run(row) for row in rows] == [slice(30 * row, 30 * row + 30) for row in rows]
    assert cache.num_used == 120
    cache.check_integrity()


def test_append_is_all_or_nothing() -> None:
    cache = KVCache(10, max_rows=2, max_len=100)
    row, other = _open(cache, 4), _open(cache, 4)
    assert cache.can_append(row, 2) and not cache.can_append(row, 3)
    assert not cache.append(row, 3)
    assert (cache.length(row), cache.num_free) == (4, 2)
    assert cache.append(row, 2) and cache.append(row, 0)
    assert cache.slots(row).tolist() == [0, 1, 2, 3, 8, 9]
    assert cache.run(row) is None
    assert not cache.append(other, 1)
    assert cache.open_row(1, 0) is None
    assert cache.num_free_rows == 0
    cache.check_integrity()
    cache.close_row(row)
    assert cache.append(other, 1)
    assert cache.run(other) == slice(4, 9)  # the next slot is free again
    cache.check_integrity()


def test_a_refused_open_takes_no_row() -> None:
    cache = KVCache(10, max_rows=2, max_len=100)
    assert cache.open_row(11, 0) is None
    assert cache.num_free_rows == 2


def test_close_is_idempotent_and_leaves_nothing() -> None:
    cache = KVCache(50, max_rows=4, max_len=50)
    row = _open(cache, 10, room=30)
    fork = cache.fork_row(row, 6)
    assert fork is not None
    for _ in range(2):
        cache.close_row(row)
    assert cache.num_used == 6
    cache.close_row(fork)
    assert (cache.num_used, cache.num_free, cache.allocator.num_claimed) == (0, 50, 0)
    for call in (lambda: cache.length(row), lambda: cache.slots(row), lambda: cache.run(row)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError):
        cache.append(row, 1)
    cache.check_integrity()


def test_empty_row_claims_its_room_at_the_first_chunk() -> None:
    cache = KVCache(100, max_rows=4, max_len=64)
    row = _open(cache, 0, room=30)
    assert cache.run(row) == slice(0, 0)
    assert cache.append(row, 8)
    other = _open(cache, 5)
    assert cache.append(row, 8) and cache.append(row, 14)
    assert cache.run(row) == slice(0, 30)
    assert cache.run(other) == slice(30, 35)
    cache.check_integrity()


@pytest.mark.parametrize(("prompt_len", "room"), [(-1, 0), (0, -1), (65, 0)])
def test_impossible_rows_raise(prompt_len: int, room: int) -> None:
    with pytest.raises(ValueError):
        KVCache(100, max_rows=4, max_len=64).open_row(prompt_len, room)


def test_a_row_cannot_pass_max_len() -> None:
    cache = KVCache(100, max_rows=1, max_len=8)
    row = _open(cache, 7)
    assert cache.append(row, 1)
    assert not cache.can_append(row, 1)
    with pytest.raises(ValueError):
        cache.append(row, 1)


def test_fork_shares_and_then_diverges() -> None:
    cache = KVCache(40, max_rows=4, max_len=40)
    row = _open(cache, 8, room=8)
    fork = cache.fork_row(row, 5)
    assert fork is not None
    assert cache.num_used == 8
    assert cache.append(fork, 2) and cache.append(row, 1)
    assert cache.slots(fork).tolist() == [0, 1, 2, 3, 4, 16, 17]
    assert cache.run(row) == slice(0, 9)
    cache.close_row(row)
    assert cache.slots(fork)[:5].tolist() == [0, 1, 2, 3, 4]
    assert cache.num_used == 7
    cache.check_integrity()
    with pytest.raises(ValueError):
        cache.fork_row(fork, 8)


def test_shrink_moves_whole_runs_and_keeps_their_room() -> None:
    cache = KVCache(200, max_rows=4, max_len=100)
    first, second, third = _open(cache, 50), _open(cache, 20, room=10), _open(cache, 30)
    cache.close_row(first)
    assert cache.run(third) == slice(80, 110)
    assert cache.shrink_to(85) == 85
    assert cache.epoch == 1
    assert cache.run(third) == slice(0, 30)
    for _ in range(10):
        assert cache.append(second, 1)
    assert cache.run(second) == slice(50, 80)
    assert (cache.num_slots, cache.num_used, cache.num_free) == (85, 60, 25)
    cache.check_integrity()


def test_shrink_claims_room_again_for_every_run() -> None:
    cache = KVCache(100, max_rows=4, max_len=100)
    row = _open(cache, 10, room=20)
    assert cache.shrink_to(60) == 60
    assert cache.allocator.num_claimed == 20
    other = _open(cache, 20)
    assert cache.append(row, 20)
    assert (cache.run(row), cache.run(other)) == (slice(0, 30), slice(30, 50))
    cache.check_integrity()


def test_shrink_stops_at_what_is_used_and_grow_at_the_maximum() -> None:
    cache = KVCache(100, max_rows=4, max_len=100, max_slots=150)
    row = _open(cache, 40)
    other = _open(cache, 30)
    fork = cache.fork_row(other, 30)
    assert fork is not None
    cache.close_row(row)
    assert cache.shrink_to(0) == 30
    assert sorted(cache.slots(other).tolist()) == list(range(30))
    assert cache.slots(other).tolist() == cache.slots(fork).tolist()
    assert cache.num_free == 0
    cache.check_integrity()
    assert cache.shrink_to(60) == 30  # never grows
    assert cache.grow_to(20) == 30  # never shrinks
    assert cache.grow_to(1000) == 150
    assert cache.num_free == 120
    cache.check_integrity()


def test_shrink_without_a_gap_scatters() -> None:
    cache = KVCache(60, max_rows=8, max_len=60)
    rows = [_open(cache, 10) for _ in range(6)]
    for row in rows[0:5:2]:
        cache.close_row(row)
    assert cache.append(rows[5], 3)
    assert cache.shrink_to(33) == 33
    assert sum(cache.length(row) for row in (rows[1], rows[3], rows[5])) == 33
    cache.check_integrity()


def test_check_integrity_can_fail() -> None:
    cache = KVCache(20, max_rows=2, max_len=20)
    row = _open(cache, 4)
    cache.table.slots[row, 3] = 9
    with pytest.raises(IntegrityError):
        cache.check_integrity()
