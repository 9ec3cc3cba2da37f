"""Which captured step serves how many rows; capturing itself needs a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineinfer.runner.step_graphs import TIMED_FROM, GraphKey, Results, StepGraphs, decode_buckets, mixed_buckets

LARGEST_TILED = 4096  # up to here buckets follow the tiles of 64 rows that matrix products go by
MOST = 10_000


def unused(key: GraphKey) -> Results:
    raise AssertionError(f"{key} was run")


def graphs(num_decode_rows: int, num_mixed_rows: int, captured: list[GraphKey] | None = None) -> StepGraphs:
    """Without CUDA: keys stand as captured, with nothing behind them."""
    made = StepGraphs(unused, unused, num_decode_rows, num_mixed_rows)
    keys = made.keys() if captured is None else captured
    made._graphs = dict.fromkeys(keys)
    return made


def smallest(buckets: list[int], size: int) -> int:
    return min(bucket for bucket in buckets if bucket >= size)


@given(st.integers(1, MOST))
def test_decode_buckets_rise_to_the_maximum(max_rows: int) -> None:
    buckets = decode_buckets(max_rows)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == max_rows


@given(st.integers(1, LARGEST_TILED))
def test_decode_padding_is_less_than_the_rows_and_opens_no_tile_of_a_large_batch(max_rows: int) -> None:
    buckets = decode_buckets(max_rows)
    for size in range(1, max_rows + 1, 1 + max_rows // 500):
        bucket = smallest(buckets, size)
        assert bucket < 2 * size
        assert bucket - size < (8 if size <= 32 else 16 if size <= 256 else 64)
        assert size <= 256 or -(-bucket // 64) == -(-size // 64)


@given(st.integers(0, MOST))
def test_mixed_buckets_rise_and_do_not_pass_the_maximum(max_rows: int) -> None:
    buckets = mixed_buckets(max_rows)
    assert buckets == sorted(set(buckets)) and all(64 <= bucket <= max_rows for bucket in buckets)
    assert bool(buckets) == (max_rows >= 64)
    assert all(smallest(buckets, size) - size < 128 for size in range(64, max(buckets, default=0) + 1))
    assert set(buckets) == {bucket for bucket in mixed_buckets(MOST) if bucket <= max_rows}


@given(st.integers(1, 600), st.integers(0, 1500), st.integers(1, 1600), st.booleans(), st.booleans())
def test_find_gives_the_smallest_step_that_holds_the_rows(
    num_decode_rows: int, num_mixed_rows: int, num_rows: int, mixed: bool, adapted: bool
) -> None:
    buckets = mixed_buckets(num_mixed_rows) if mixed else decode_buckets(num_decode_rows)
    key = graphs(num_decode_rows, num_mixed_rows).find(num_rows, mixed, adapted)
    if num_rows > max(buckets, default=0):
        assert key is None
    else:
        assert key == GraphKey(smallest(buckets, num_rows), mixed, adapted)


@given(st.data())
def test_no_step_is_left_that_takes_longer_than_a_larger_one(data: st.DataObject) -> None:
    made, took = graphs(512, 1024), {}
    times = st.floats(5e-3, 25e-3)

    def seconds(key: GraphKey) -> float:
        assert key not in took and not key.adapted
        took[key] = data.draw(times)
        return took[key]

    before = set(made.keys())
    made.drop_slower(seconds)
    assert set(made.keys()) == set(made._graphs) <= before
    for mixed, largest in ((False, 512), (True, 1024)):
        for rows in (1, 200, 256, 257, 300, 449, 512):
            for adapted in (False, True):
                key = made.find(rows, mixed, adapted)
                assert key is not None and key.num_rows >= rows
                timed = GraphKey(key.num_rows, mixed, False)
                wider = [took[other] for other in took if other.mixed == mixed and other.num_rows > key.num_rows]
                assert timed not in took or took[timed] <= min(wider, default=1.0)
        assert made.find(largest, mixed, False) == GraphKey(largest, mixed, False), "the largest stays"
        assert {key for key in before - set(made.keys()) if key.num_rows < TIMED_FROM} == set()


def test_every_decode_batch_has_a_step() -> None:
    for max_rows in (1, 3, 48, 64, 100, 256, 300):
        made = graphs(max_rows, 512)
        assert all(made.find(size, False, adapted) for size in range(1, max_rows + 1) for adapted in (False, True))


def test_a_step_that_was_not_captured_is_not_found() -> None:
    made = graphs(64, 256, [GraphKey(64, False, False), GraphKey(128, True, True)])
    assert made.num_graphs == 2
    assert made.find(60, False, False) == GraphKey(64, False, False)
    assert made.find(60, False, True) is None and made.find(20, False, False) is None
    assert made.find(100, True, True) == GraphKey(128, True, True)
    assert made.find(100, True, False) is None and made.find(200, True, True) is None


def test_before_capture_nothing_is_found() -> None:
    made = StepGraphs(unused, unused, 64, 256)
    assert made.num_graphs == 0 and made.capture_s == 0.0 and made.pool_bytes == 0
    assert made.find(1, False, False) is None and made.find(64, True, True) is None


@given(st.integers(1, 600), st.integers(0, 1500))
def test_keys_are_every_kind_of_every_bucket_once_the_largest_first(num_decode_rows: int, num_mixed_rows: int) -> None:
    keys = StepGraphs(unused, unused, num_decode_rows, num_mixed_rows).keys()
    rows = [key.num_rows for key in keys]
    assert rows == sorted(rows, reverse=True)
    wanted = {GraphKey(n, False, adapted) for n in decode_buckets(num_decode_rows) for adapted in (False, True)}
    wanted |= {GraphKey(n, True, adapted) for n in mixed_buckets(num_mixed_rows) for adapted in (False, True)}
    assert set(keys) == wanted and len(keys) == len(wanted)


def test_the_first_key_is_the_step_that_needs_most_memory() -> None:
    """``capture_largest`` measures this one: of equal rows the one with prefill spans, and with adapters."""
    assert StepGraphs(unused, unused, 256, 512).keys()[0] == GraphKey(512, True, True)
    assert StepGraphs(unused, unused, 512, 512).keys()[0] == GraphKey(512, True, True)
    assert StepGraphs(unused, unused, 600, 512).keys()[0] == GraphKey(600, False, True)


def test_a_step_that_was_not_captured_cannot_be_replayed() -> None:
    with pytest.raises(KeyError):
        StepGraphs(unused, unused, 8, 0).replay(GraphKey(8, False, False))
