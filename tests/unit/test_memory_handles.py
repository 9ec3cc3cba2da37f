"""Memory that comes in handles of a driver: ranges, the store, pools, and what a driver's errors become."""

from __future__ import annotations

import gc
import types

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fineinfer.memory import cuda_memory
from fineinfer.memory.cuda_memory import (
    RETRY_S,
    CudaDriver,
    CudaDriverError,
    HandleStore,
    MappedRange,
    open_driver,
    pick_handle_bytes,
)
from fineinfer.memory.elastic_buffer import ElasticBuffer
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec

from .fake_memory_driver import FakeDriver

MIB = 1 << 20
LAYERS, HANDLE = 3, 4096
SPEC = KVSpec(num_layers=LAYERS, num_kv_heads=2, head_dim=24, dtype=torch.float32)  # 384 bytes: 10.67 slots a handle
EIGHT_B = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMOL = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(HANDLE)


@pytest.mark.parametrize(
    ("range_bytes", "granularity", "want"),
    [
        (55 * (1 << 30) // 32, 2 * MIB, 32 * MIB),  # 8B shape on 80 GB
        (110 * (1 << 30) // 32, 2 * MIB, 64 * MIB),
        (500 * (1 << 30), 2 * MIB, 64 * MIB),
        (1 << 30, 2 * MIB, 16 * MIB),
        (200 * MIB, 2 * MIB, 8 * MIB),
        (7 * MIB, 2 * MIB, 6 * MIB),
        (100_000, 2 * MIB, 2 * MIB),
        (1, 4096, 4096),
    ],
)
def test_handles_are_large_and_a_64th_of_their_range(range_bytes: int, granularity: int, want: int) -> None:
    assert pick_handle_bytes(range_bytes, granularity) == want


def test_buffer_keeps_its_address_and_reads_zero_after_growing(driver: FakeDriver) -> None:
    buffer = ElasticBuffer(5 * HANDLE - 7, handles=HandleStore(driver, HANDLE))
    tensor = buffer.as_tensor(torch.uint8, (5 * HANDLE - 7,))
    address = tensor.data_ptr()
    assert buffer.grow(2 * HANDLE) == 2 * HANDLE and not tensor[: 2 * HANDLE].any()
    tensor[: 2 * HANDLE] = 7
    buffer.shrink(HANDLE)
    assert buffer.grow(2 * HANDLE) == 2 * HANDLE
    assert (tensor[:HANDLE] == 7).all() and not tensor[HANDLE : 3 * HANDLE].any()
    assert (tensor.data_ptr(), buffer.mapped_bytes, buffer.elastic) == (address, 3 * HANDLE, True)
    driver.check()


def test_only_whole_handles_within_the_range(driver: FakeDriver) -> None:
    buffer = ElasticBuffer(3 * HANDLE, handles=HandleStore(driver, HANDLE))
    for call in (lambda: buffer.grow(4 * HANDLE), lambda: buffer.grow(100), lambda: buffer.shrink(HANDLE)):
        with pytest.raises(ValueError):
            call()
    assert buffer.mapped_bytes == driver.num_mapped_bytes == 0


def test_a_buffer_that_is_refused_stays_as_it_is(driver: FakeDriver) -> None:
    driver.limit = 2 * HANDLE
    buffer = ElasticBuffer(3 * HANDLE, handles=HandleStore(driver, HANDLE))
    assert buffer.grow(3 * HANDLE) == 0 and buffer.mapped_bytes == driver.num_mapped_bytes == 0
    assert buffer.grow(2 * HANDLE) == 2 * HANDLE


def test_the_store_asks_again_only_after_a_while_and_after_cached_memory_is_returned(driver: FakeDriver) -> None:
    now = [100.0]
    store = HandleStore(driver, HANDLE, max_idle=2, clock=lambda: now[0])
    driver.limit, driver.cached_bytes = 5 * HANDLE, 2 * HANDLE
    assert store.stock(4) == 4 and driver.calls.count("reclaim") == 1  # what the program had cached was enough
    driver.calls.clear()
    assert store.stock(8) == 5 and store.is_refused
    assert driver.calls == ["create", "create", "reclaim", "create"]
    driver.limit = 8 * HANDLE
    assert store.stock(8) == 5 and len(driver.calls) == 4  # not asked
    now[0] += RETRY_S
    assert not store.is_refused and store.stock(8) == 8
    handles = store.take(3)
    assert len(handles) == 3 and store.idle_bytes == 5 * HANDLE
    store.give(handles)
    assert store.idle_bytes == 2 * HANDLE == driver.physical_bytes
    store.release_idle()
    assert store.idle_bytes == 0 == driver.physical_bytes


def test_pool_sizes_are_whole_handles_and_nothing_between_them_is_lost(driver: FakeDriver) -> None:
    pool = KVPool(SPEC, 100, driver=driver)
    assert (pool.max_slots, pool.num_slots, pool.elastic) == (96, 0, True)  # 9 handles of 10.67 slots
    sizes = []
    for asked in range(pool.max_slots + 1):
        got = pool.resize(asked)
        assert got <= asked and pool.round_up(got) == got, "growing gives no more than was asked for"
        assert pool.bytes_for(got) == pool.mapped_bytes == driver.num_mapped_bytes
        assert pool.slots_within(pool.mapped_bytes) == got and pool.slots_within(pool.mapped_bytes - 1) < max(got, 1)
        sizes.append(got)
    assert sorted(set(sizes)) == [i * HANDLE // 384 for i in range(10)]
    for asked in reversed(range(pool.max_slots + 1)):
        got = pool.resize(asked)
        assert got == pool.round_up(asked) >= asked, "shrinking leaves no less than was asked for"
    assert (pool.round_up(1), pool.round_up(10), pool.round_up(11), pool.slots_within(-5)) == (10, 10, 21, 0)


@pytest.mark.parametrize("spec", [EIGHT_B, SMOL], ids=["8b", "135m"])
@pytest.mark.parametrize("gib", [1, 7, 55])
def test_97_percent_of_mapped_memory_are_usable_slots(spec: KVSpec, gib: int) -> None:
    """P10; the pool's arithmetic alone, at real sizes."""
    pool = KVPool.__new__(KVPool)
    pool.spec, pool.max_slots = spec, 1 << 40
    pool._step = pick_handle_bytes(gib * (1 << 30) // spec.num_layers, 2 * MIB)
    for share in (0.01, 0.3, 1.0):
        room = int(share * gib * (1 << 30))
        slots = pool.slots_within(room)
        mapped = pool.bytes_for(slots)
        assert mapped <= room < mapped + spec.num_layers * pool._step
        assert slots * spec.bytes_per_slot >= 0.97 * mapped


def test_a_pool_smaller_than_a_handle_is_one(driver: FakeDriver) -> None:
    pool = KVPool(SPEC, 3, driver=driver)
    assert (pool.max_slots, pool.slots_in_reach, pool.resize(10)) == (10, 10, 10)


def test_a_pool_grows_as_far_as_there_is_memory_and_goes_on_later(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("fineinfer.memory.cuda_memory.time.monotonic", lambda: now[0])
    pool = KVPool(SPEC, 96, driver=driver)
    pool._store._clock = lambda: now[0]
    driver.limit = (4 * LAYERS + 2) * HANDLE  # two handles short of the fifth step
    assert pool.resize(96) == 42
    assert pool.held_bytes == driver.physical_bytes == driver.limit, "the rest waits for the missing handle"
    assert [len([a for a in driver.mapped if b <= a < b + 9 * HANDLE]) for b in driver.ranges] == [4] * LAYERS
    assert pool.slots_in_reach == 42, "no use in trying again at once"
    driver.limit = 1 << 30
    now[0] += RETRY_S
    assert pool.slots_in_reach == 96 and pool.resize(96) == 96
    assert pool.held_bytes == pool.mapped_bytes == driver.physical_bytes


def test_layers_stay_alike_when_mapping_fails_in_one(driver: FakeDriver) -> None:
    pool, now = KVPool(SPEC, 96, driver=driver), [0.0]
    pool._store._clock = lambda: now[0]
    pool.resize(21)
    driver.map_limit = (2 * LAYERS + 3) * HANDLE
    assert pool.resize(42) == 21
    assert driver.num_mapped_bytes == pool.mapped_bytes == 2 * LAYERS * HANDLE
    driver.map_limit = 1 << 30
    now[0] += RETRY_S
    assert pool.resize(42) == 42
    driver.check()


def test_one_step_of_handles_is_kept_until_it_is_asked_back(driver: FakeDriver) -> None:
    pool = KVPool(SPEC, 96, driver=driver)
    pool.resize(96)
    pool.resize(42)
    assert driver.physical_bytes == pool.held_bytes == pool.mapped_bytes + LAYERS * HANDLE
    created = driver.calls.count("create")
    pool.resize(53)
    assert driver.calls.count("create") == created and pool.held_bytes == pool.mapped_bytes
    pool.resize(42)
    pool.release_idle()
    assert driver.physical_bytes == pool.held_bytes == pool.mapped_bytes == 4 * LAYERS * HANDLE


def test_memory_is_unmapped_behind_running_work_only(driver: FakeDriver) -> None:
    pool = KVPool(SPEC, 96, driver=driver)
    pool.resize(96)
    driver.launch()  # also: nothing is handed out before it is zero
    pool.resize(10)  # the driver objects to unmapping without waiting
    driver.launch()
    with pytest.raises(AssertionError, match="running work"):
        driver.unmap(next(iter(driver.mapped)), 1, HANDLE)


def test_a_dropped_pool_gives_everything_back(driver: FakeDriver) -> None:
    pool = KVPool(SPEC, 96, driver=driver)
    pool.resize(96)
    pool.resize(42)
    driver.launch()
    del pool
    gc.collect()
    assert not driver.handles and not driver.mapped and not driver.ranges


def test_a_shrink_copies_in_as_few_moves_as_order_allows(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(SPEC, 96, driver=driver)
    cache = KVCache(96, max_rows=8, max_len=96, pool=pool)
    rows = [cache.open_row(n) for n in (40, 8, 8, 8, 8)]
    for row in rows[1:]:
        for layer in range(LAYERS):
            pool.layer(layer)[cache.slots(row).tolist()] = float(row)
    calls, move = [], KVPool.move
    monkeypatch.setattr(KVPool, "move", lambda self, src, dst: (calls.append(len(src)), move(self, src, dst)))
    cache.close_row(rows[0])
    assert cache.shrink_to(32) == 32
    assert calls == [32], "four rows in one copy"
    for row in rows[1:]:
        assert all((pool.layer(i)[cache.slots(row).tolist()] == float(row)).all() for i in range(LAYERS))
    cache.check_integrity()
    driver.check()


def test_rows_that_move_into_what_others_leave_are_copied_after_them(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of slots 20 to 37 leaves 20 to 31 behind, where the next one then goes; a kernel copies in any order."""
    calls, move = [], KVPool.move
    monkeypatch.setattr(KVPool, "move", lambda self, src, dst: (calls.append({*src} & {*dst}), move(self, src, dst)))
    pool = KVPool(SPEC, 96, driver=driver)
    cache = KVCache(96, max_rows=8, max_len=96, pool=pool)
    hole, across, above = (cache.open_row(n) for n in (20, 18, 6))
    for row in (across, above):
        for layer in range(LAYERS):
            pool.layer(layer)[cache.slots(row).tolist()] = 1.0 + row
    cache.close_row(hole)
    assert cache.shrink_to(32) == 32
    assert cache.slots(across).tolist() == list(range(18)) and cache.slots(above).max() < 32
    for row in (across, above):
        assert all((pool.layer(i)[cache.slots(row).tolist()] == 1.0 + row).all() for i in range(LAYERS))
    assert calls == [set(), set()], "slots that are read and written by one copy"


# ---------------------------------------------------------------- the driver itself


def test_without_the_calls_the_pool_is_fixed_and_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert open_driver(torch.device("cpu")) is None and not caplog.text

    def missing(device: torch.device) -> None:
        raise CudaDriverError("cuMemAddressReserve: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(cuda_memory, "CudaDriver", missing)
    assert open_driver(torch.device("cuda")) is None
    assert "cannot shrink and grow" in caplog.text and "CUDA_ERROR_NOT_SUPPORTED" in caplog.text


class Result(int):
    name = property(lambda self: {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY"}.get(self, "CUDA_ERROR_UNKNOWN"))


def make_driver(**calls: object) -> CudaDriver:
    """A real driver object over stand-ins for single calls of ``cuda.bindings.driver``."""
    made = CudaDriver.__new__(CudaDriver)
    codes = types.SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
    made._api = types.SimpleNamespace(CUresult=codes, **calls)
    made._kind = made._access = None
    return made


def test_errors_name_the_call_and_out_of_memory_is_an_answer() -> None:
    driver = make_driver(
        cuMemCreate=lambda size, kind, flags: (Result(2), None) if size > 100 else (Result(0), "handle"),
        cuMemRelease=lambda handle: (Result(999),),
        cuMemAddressReserve=lambda *numbers: (Result(0), 1 << 40),
        cuMemGetInfo=lambda: (Result(0), 3 << 30, 80 << 30),
    )
    assert driver.create(101) is None and driver.create(100) == "handle"
    assert driver.reserve(100) == 1 << 40 and driver.free_bytes() == 3 << 30
    with pytest.raises(CudaDriverError, match="cuMemRelease: CUDA_ERROR_UNKNOWN"):
        driver.release("handle")


@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess"])
def test_a_failed_mapping_is_taken_back(failing: str) -> None:
    places: set[int] = set()

    def map_one(place: int, *rest: object) -> tuple[Result]:
        if failing == "cuMemMap" and place == 48:
            return (Result(2),)
        places.add(place)
        return (Result(0),)

    driver = make_driver(
        cuMemMap=map_one,
        cuMemSetAccess=lambda *arguments: (Result(2 if failing == "cuMemSetAccess" else 0),),
        cuMemUnmap=lambda place, size: (Result(places.remove(place) or 0),),
    )
    with pytest.raises(CudaDriverError, match=f"{failing}: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.map(16, ["a", "b", "c"], 16)
    assert not places


def test_a_range_describes_itself_as_bytes(driver: FakeDriver) -> None:
    mapped = MappedRange(HANDLE + 1, HandleStore(driver, HANDLE))
    assert mapped.__cuda_array_interface__ == {
        "shape": (2 * HANDLE,), "typestr": "|u1", "data": (mapped.address, False), "version": 3, "strides": None,
    }  # fmt: skip


# ---------------------------------------------------------------- random programs


class PoolMachine(RuleBasedStateMachine):
    """A pool on a device whose memory others take and return: values survive, new memory is zero, books are right."""

    @initialize(max_slots=st.integers(1, 120), handle=st.sampled_from([512, 1024, 4096]))
    def create(self, max_slots: int, handle: int) -> None:
        self.driver, self.now = FakeDriver(handle), 0.0
        self.pool = KVPool(SPEC, max_slots, driver=self.driver)
        self.pool._store._clock = lambda: self.now
        self.tags: list[float] = []

    @rule(num_slots=st.integers(0, 140))
    def resize(self, num_slots: int) -> None:
        before, num_slots = self.pool.num_slots, min(num_slots, self.pool.max_slots)
        now = self.pool.resize(num_slots)
        assert min(before, num_slots) <= now <= max(before, num_slots, self.pool.round_up(num_slots))
        for layer in range(LAYERS):
            assert not self.pool.layer(layer)[len(self.tags) : now].any(), "newly mapped memory is not zero"
        if now < len(self.tags):
            del self.tags[now:]
        for slot in range(len(self.tags), now):
            self.tags.append(float(len(self.driver.calls) + slot))
            for layer in range(LAYERS):
                self.pool.layer(layer)[slot] = self.tags[-1]
        self.driver.launch()

    @rule(limit=st.integers(0, 60))
    def others_take_memory(self, limit: int) -> None:
        self.driver.limit = max(limit * self.driver.size, self.driver.physical_bytes)

    @rule(seconds=st.floats(0.0, 2 * RETRY_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def give_back(self) -> None:
        self.pool.release_idle()
        assert self.pool.held_bytes == self.pool.mapped_bytes

    @precondition(lambda self: self.pool.num_slots > 1)
    @rule(half=st.booleans())
    def move(self, half: bool) -> None:
        count = max(1, self.pool.num_slots // (2 if half else 4))
        source, target = range(self.pool.num_slots - count, self.pool.num_slots), range(count)
        self.pool.move(source, target)
        self.tags[:count] = self.tags[-count:]

    @invariant()
    def check(self) -> None:
        pool, driver = self.pool, self.driver
        assert pool.held_bytes == driver.physical_bytes
        assert pool.mapped_bytes == driver.num_mapped_bytes == pool.bytes_for(pool.num_slots)
        assert pool.held_bytes - pool.mapped_bytes <= LAYERS * driver.size
        assert len(self.tags) == pool.num_slots <= pool.slots_in_reach <= pool.max_slots
        for layer in range(LAYERS):
            values = pool.layer(layer)[: pool.num_slots].flatten(1)
            assert (values == torch.tensor(self.tags)[:, None]).all(), "a slot lost its value"
        driver.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
