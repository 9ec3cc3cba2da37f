"""Other programs hold the device: how often a growth that cannot end asks for memory, and when it goes on."""

from __future__ import annotations

import pytest
import torch

from fineinfer.memory.cuda_memory import RETRY_S, HandleStore
from fineinfer.memory.kv_pool import KVPool, KVSpec

from .fake_memory_driver import FakeDriver

LAYERS, HANDLE = 3, 4096
SPEC = KVSpec(num_layers=LAYERS, num_kv_heads=2, head_dim=24, dtype=torch.float32)  # 384 bytes: 10.67 slots a handle


def test_each_refusal_in_a_row_doubles_the_wait_up_to_four_seconds() -> None:
    driver, now = FakeDriver(HANDLE, limit=0), [0.0]
    store = HandleStore(driver, HANDLE, clock=lambda: now[0])
    asked, reclaimed = [], []
    for turn in range(6400):
        now[0] = turn / 64
        driver.calls.clear()
        assert store.stock(1) == 0 and store.is_refused
        asked += [now[0]] if "create" in driver.calls else []
        reclaimed += [len(asked)] if "reclaim" in driver.calls else []
    assert asked[:8] == [0.0, 0.25, 0.75, 1.75, 3.75, 7.75, 11.75, 15.75]
    assert reclaimed == [1, 2, 4, 8, 16]


def test_memory_that_another_program_returns_is_found_at_the_next_look() -> None:
    driver, now = FakeDriver(HANDLE, limit=4 * HANDLE), [0.0]
    store = HandleStore(driver, HANDLE, max_idle=8, clock=lambda: now[0])
    for turn in range(640):
        now[0] = turn / 64
        store.stock(8)
    driver.calls.clear()
    driver.limit = 6 * HANDLE
    now[0] += RETRY_S
    assert store.stock(8) == 6 and "reclaim" not in driver.calls, "part of it: the series goes on"
    now[0] += RETRY_S
    driver.limit = 8 * HANDLE
    assert store.stock(8) == 8


def turns(pool: KVPool, now: list[float], seconds: float) -> None:
    """What the engine does with a growth that has not come to its end: a turn every 10 ms."""
    for _ in range(round(100 * seconds)):
        now[0] += 0.01
        if pool.slots_in_reach > pool.num_slots:
            pool.resize(pool.slots_in_reach)


@pytest.mark.parametrize("lacking", ["memory", "page tables"])
def test_a_growth_that_cannot_end_leaves_the_device_alone(lacking: str) -> None:
    driver = FakeDriver(HANDLE)
    pool, now = KVPool(SPEC, 96, driver=driver), [0.0]
    pool._store._clock = lambda: now[0]
    pool.resize(21)
    if lacking == "memory":
        driver.limit = driver.physical_bytes
    else:
        driver.map_limit = (2 * LAYERS + 8) * HANDLE  # of 27: every attempt maps a layer and takes it back
    waits = []
    driver.on_wait = lambda: waits.append(now[0])
    driver.calls.clear()
    turns(pool, now, 60)
    num_first = len(waits) + driver.calls.count("reclaim")
    assert pool.num_slots == 21 and 0 < num_first < 25
    driver.calls.clear()
    turns(pool, now, 600)
    assert driver.calls.count("reclaim") <= 4, "each waits for the device, and costs a micro-batch its cached blocks"
    assert len(waits) < 200
    driver.limit = driver.map_limit = 1 << 30
    turns(pool, now, 2 * RETRY_S if lacking == "memory" else 5)  # free memory is seen, room for page tables is not
    assert pool.num_slots == 96


@pytest.mark.parametrize("giving", ["a smaller pool", "idle handles", "a whole growth"])
def test_a_series_of_refusals_ends_when_memory_is_given_back_or_found(giving: str) -> None:
    driver = FakeDriver(HANDLE)
    pool, now = KVPool(SPEC, 96, driver=driver), [0.0]
    pool._store._clock = lambda: now[0]
    pool.resize(21)
    driver.limit = driver.physical_bytes + HANDLE
    turns(pool, now, 20)
    assert pool._store.is_refused and pool.held_bytes == pool.mapped_bytes + HANDLE
    if giving == "a smaller pool":
        pool.resize(10)
    elif giving == "idle handles":
        pool.release_idle()
    else:
        driver.limit += LAYERS * HANDLE
        turns(pool, now, 2 * RETRY_S)
        assert pool.num_slots == 32 and pool.resize(32) == 32
        now[0] += 5
        pool.release_idle()
        driver.limit = driver.physical_bytes
    driver.calls.clear()
    pool.resize(96)
    assert driver.calls.count("reclaim") == 1, "the first refusal of a new series"
