"""An engine whose pool comes in handles of a driver, as on CUDA: growing, shrinking and refusals change no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from fineinfer.engine import memory_ladder
from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, STATE, MemoryLadder
from fineinfer.engine.memory_plan import MemoryPlanError
from fineinfer.engine.rungs import Rungs
from fineinfer.kernels import attention_decode
from fineinfer.memory.cuda_memory import RETRY_S
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool
from fineinfer.messages import AbortRequest, ResizeKV, SetBudget
from fineinfer.scheduler.latency_model import LatencyModel

from .engine_harness import BYTES_PER_SLOT, Harness
from .fake_memory_driver import FakeDriver
from .test_memory_handles import SPEC

HANDLE, LAYERS = 512, 2
BIG = 4096
STEP_SLOTS = HANDLE * LAYERS // BYTES_PER_SLOT  # 4
# two beginnings in common, so that shared slots move too
PROMPTS = {
    f"r{n}": [5 + i for i in range(20 * (n % 2))] + [5 + (7 * n + i) % 90 for i in range(9 + n)] for n in range(5)
}
MAX_TOKENS = 16


@pytest.fixture
def make(tmp_path_factory, monkeypatch) -> Iterator[Callable[..., tuple[Harness, FakeDriver]]]:
    """Engines with the Triton kernels, whose pool has a driver that notices every mistake."""
    monkeypatch.setattr(attention_decode, "TARGET_PROGRAMS", 8)
    made: list[Harness] = []

    def build(driver: FakeDriver | None = None, **settings: object) -> tuple[Harness, FakeDriver]:
        driver = driver or FakeDriver(HANDLE)
        monkeypatch.setattr("fineinfer.engine.process.open_driver", lambda device: driver)
        own = {"attention_backend": "triton", "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_loras": 1}
        made.append(
            Harness(tmp_path_factory.mktemp("e"), **(own | {"max_lora_rank": 4, "deterministic": True} | settings))
        )
        return made[-1], driver

    yield build
    for harness in made:
        harness.close()


def alone(make) -> dict[str, list[int]]:
    quiet, tokens = make(no_enable_prefix_caching=True, attention_backend="reference")[0], {}
    for name, prompt in PROMPTS.items():
        quiet.outputs.clear()
        quiet.add(name, prompt, max_tokens=MAX_TOKENS)
        quiet.run()
        tokens[name] = quiet.tokens(name)
    return tokens


def books_agree(harness: Harness, driver: FakeDriver) -> None:
    kv, governor = harness.parts.ladder._kv, harness.parts.ladder._governor
    assert governor.leased(KV) == kv.pool.held_bytes == driver.physical_bytes
    assert kv.num_slots == kv.pool.num_slots and kv.pool.mapped_bytes == driver.num_mapped_bytes
    driver.check()


@pytest.mark.parametrize("seed", range(1))
def test_random_resizes_in_mid_flight_change_no_token(make, seed: int) -> None:
    want, rng = alone(make), random.Random(seed)
    harness, driver = make(kv_cache_memory_bytes=100 * STEP_SLOTS * BYTES_PER_SLOT, max_num_seqs=6)
    kv, ladder, waiting = harness.parts.ladder._kv, harness.parts.ladder, list(PROMPTS.items())
    sizes, in_flight, holes = set(), set(), []
    harness.add("first", [5] * 30, max_tokens=40)
    harness.add("gone", [6] * 30, max_tokens=40)

    def resize(turn: int) -> None:
        if turn == 8:
            harness.send(AbortRequest(request_id="gone"))
        if turn % 4 == 2 and waiting:  # the next request lies above a hole, which its rows then fall into
            holes.append(kv.open_row(min(kv.num_free, rng.randrange(5, 40))))
            name, prompt = waiting.pop()
            harness.add(name, prompt, max_tokens=MAX_TOKENS)
        elif turn % 4 == 0:
            for row in filter(None, holes):
                kv.close_row(row)
            holes.clear()
            in_flight.add(len(harness.loop._in_flight))
            ladder._resize(max(64, kv.num_used, ladder._reserved_slots()))
        elif rng.random() < 0.5:
            harness.send(ResizeKV(num_slots=rng.randrange(kv.max_slots)))
        if rng.random() < 0.2:
            kv.pool.release_idle()
            ladder._governor.lease(KV, kv.pool.held_bytes)
        sizes.add(kv.num_slots)
        books_agree(harness, driver)
        driver.launch()

    harness.run(resize)
    assert {name: harness.tokens(name) for name in PROMPTS} == want
    assert len(sizes) >= 4 and kv.epoch >= 4, "nothing moved, so nothing is tested"
    assert 1 in in_flight, "no step was in flight, so nothing is tested"


def test_the_pool_starts_with_all_that_is_left(make) -> None:
    harness, driver = make(memory_budget=48 << 20, attention_backend="reference")
    governor, kv = harness.parts.ladder._governor, harness.parts.ladder._kv
    assert kv.num_slots == kv.max_slots == 4 * 512
    books_agree(harness, driver)
    budget = governor.budget_bytes - governor.leased(KV) + 333 * BYTES_PER_SLOT
    small, driver = make(memory_budget=budget, attention_backend="reference")
    kv = small.parts.ladder._kv
    # the dry run measures a little more or less each time
    assert kv.num_slots == kv.max_slots and kv.num_slots % STEP_SLOTS == 0
    assert small.parts.ladder._governor.free_bytes >= 0
    books_agree(small, driver)


def test_a_device_that_others_hold_is_an_error_at_start_and_a_wait_later(make) -> None:
    with pytest.raises(MemoryPlanError, match="which other programs may hold"):
        make(FakeDriver(HANDLE, limit=LAYERS * HANDLE))
    harness, driver = make(FakeDriver(HANDLE, limit=72 * LAYERS * HANDLE), attention_backend="reference")
    ladder, kv = harness.parts.ladder, harness.parts.ladder._kv
    assert kv.num_slots == 72 * STEP_SLOTS < kv.max_slots
    books_agree(harness, driver)
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, max_tokens=MAX_TOKENS)
    harness.run()
    store = kv.pool._store
    store._ask_again_s = 0.0
    ladder.set_budget(ladder._governor.budget_bytes + (1 << 20), None, 0.0)
    assert kv.num_slots == 72 * STEP_SLOTS and ladder._governor.events[-1].kind != "kv_grow"
    assert any(event.kind == "kv_refused" for event in ladder._governor.events)
    books_agree(harness, driver)
    driver.limit = 1 << 30
    store._ask_again_s -= RETRY_S
    for _ in range(10):  # the growth is long: so many handles a turn
        harness.loop.step()
    assert kv.num_slots == kv.max_slots, "nobody had to ask again"
    books_agree(harness, driver)


def test_another_program_gets_the_memory_that_the_budget_loses(make) -> None:
    want = alone(make)
    harness, driver = make(attention_backend="reference")
    kv, governor = harness.parts.ladder._kv, harness.parts.ladder._governor
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, max_tokens=MAX_TOKENS)
    fixed = governor.budget_bytes - governor.free_bytes - governor.leased(KV)
    taken = []

    def change(turn: int) -> None:
        if turn == 6:
            harness.send(SetBudget(num_bytes=fixed + 96 * LAYERS * HANDLE + 100))
        if turn == 8:  # the other program takes all of it, so growing must fail
            assert kv.num_slots == 96 * STEP_SLOTS and driver.physical_bytes == governor.leased(KV)
            taken.append(driver.physical_bytes)
            driver.limit = driver.physical_bytes
            harness.send(SetBudget(num_bytes=fixed + 320 * LAYERS * HANDLE))
        if turn == 14:
            assert kv.num_slots == 96 * STEP_SLOTS
        books_agree(harness, driver)

    harness.run(change)
    assert taken and {name: harness.tokens(name) for name in PROMPTS} == want


# ---------------------------------------------------------------- the ladder alone, over handles


class StubTrainer:
    num_layers, micro_batch_open, micro_batch_tokens, can_drop, step = 4, False, 10, True, 0

    def next_micro_batch_tokens(self) -> int:
        return 10

    def bytes_if_recomputed(self, num_tokens: int) -> int:
        return 10_000

    def bytes_if_all_kept(self, num_tokens: int) -> int:
        return 50_000

    def next_micro_batch_bytes(self) -> tuple[int, int]:
        return 10_000, 50_000


@pytest.fixture
def ladder(monkeypatch) -> tuple[MemoryLadder, MemoryGovernor, KVPool, FakeDriver]:
    driver = FakeDriver(BIG)
    pool = KVPool(SPEC, 20 * BIG // 384, driver=driver)  # 20 steps of 3 handles, 10.67 slots each
    cache = KVCache(pool.max_slots, max_rows=2, max_len=pool.max_slots, pool=pool)
    governor = MemoryGovernor(pool.held_bytes + 1000)
    governor.lease(KV, pool.held_bytes)
    monkeypatch.setattr(memory_ladder, "MIN_KV_SLOTS", 5)
    return MemoryLadder(governor, cache, lambda: 30, Rungs(LatencyModel(), "cpu")), governor, pool, driver


def test_training_takes_whole_handles_and_no_more_than_it_needs(ladder) -> None:
    ladder, governor, pool, driver = ladder
    step = 3 * BIG
    assert ladder.lease_state(30_000)  # 1000 are free: three steps of 12,288
    assert pool.mapped_bytes == driver.physical_bytes == governor.leased(KV) == 17 * step
    assert ladder.lease_micro_batch(StubTrainer())  # 50,000 of which 7,864 are free
    assert governor.leased(ACTIVATIONS) == 50_000 and pool.mapped_bytes == driver.physical_bytes == 13 * step
    assert governor.free_bytes >= 0 and governor.leased(STATE) == 30_000
    assert not ladder.lease_state(20 * step), "the admitted requests keep theirs"
    assert pool.num_slots == pool.round_up(30) == 32
    ladder.end_job()
    assert pool.num_slots == pool.max_slots and driver.physical_bytes == governor.leased(KV)


def test_requests_get_a_whole_step_when_they_want_a_slot(ladder) -> None:
    ladder, governor, pool, _ = ladder
    assert ladder.lease_micro_batch(StubTrainer())
    before = pool.num_slots
    assert ladder.make_room(1, None, 0.0)  # between two micro-batches: all of it comes back, one step is taken
    assert governor.leased(ACTIVATIONS) == 0 and pool.num_slots == pool.round_up(before + 1)
    assert governor.free_bytes > 0
    ladder.grow_kv()
    assert pool.num_slots == pool.max_slots


def test_a_long_growth_is_spread_over_turns(ladder, monkeypatch) -> None:
    monkeypatch.setattr("fineinfer.memory.kv_pool._HANDLES_AT_ONCE", 9)  # three steps
    ladder, governor, pool, driver = ladder
    ladder.resize_kv(0)
    assert pool.num_slots == 32 and governor.leased(KV) == pool.held_bytes == driver.physical_bytes
    ladder.grow_kv()
    sizes = [pool.num_slots]
    for turn in range(10):
        ladder.follow_budget(None, float(turn))
        sizes.append(pool.num_slots)
        assert governor.leased(KV) == pool.held_bytes == driver.physical_bytes
    assert sizes == [min(213, (3 + 3 * n) * BIG // 384) for n in range(1, 12)]
