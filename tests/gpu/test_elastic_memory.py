"""The pool's memory on a GPU, as the driver sees it; and an engine whose pool shrinks and grows all the time."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fineinfer.data.packed import write_dataset
from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, STATE
from fineinfer.kernels import reference
from fineinfer.memory.cuda_memory import RETRY_S, MemoryDriver, open_driver
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings

from ..unit.engine_harness import Harness

pytestmark = pytest.mark.gpu
GIB = 1 << 30
SPEC = KVSpec(num_layers=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 32 KiB a slot
NUM_SLOTS = 3 * GIB // SPEC.bytes_per_slot
ODD = KVSpec(num_layers=5, num_kv_heads=3, head_dim=64, dtype=torch.float32)  # slots that lie over two handles


@pytest.fixture(scope="module")
def driver() -> MemoryDriver:
    found = open_driver(torch.device("cuda"))
    assert found is not None, "no virtual memory calls here"
    return found


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_driver_sees_every_resize(driver: MemoryDriver, capsys) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    start = free_bytes()
    pool = KVPool(SPEC, NUM_SLOTS, "cuda", driver)
    assert pool.elastic and pool.num_slots == 0 and pool.layer(0).is_cuda
    pool.release_idle()
    assert abs(start - free_bytes()) <= 0.05 * GIB, "addresses cost memory"
    sizes = (NUM_SLOTS, NUM_SLOTS // 3, 2 * NUM_SLOTS // 3, NUM_SLOTS // 6, NUM_SLOTS)
    for num_slots in sizes:
        before, held = free_bytes(), pool.held_bytes
        pool.resize(min(num_slots, pool.max_slots))
        moved, leased = before - free_bytes(), pool.held_bytes - held
        with capsys.disabled():
            print(
                f"\n{pool.num_slots} slots: leased {leased / 2**20:+.0f} MiB, driver {moved / 2**20:+.0f} MiB", end=""
            )
        assert abs(leased) > GIB // 2 and abs(moved - leased) <= 0.05 * abs(leased)
        assert pool.num_slots * SPEC.bytes_per_slot >= 0.97 * pool.mapped_bytes
    del pool
    gc.collect()
    assert abs(start - free_bytes()) <= 0.05 * GIB, "a dropped pool kept memory"


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["whole", "odd"])
def test_new_memory_reads_zero_on_every_stream(driver: MemoryDriver, spec: KVSpec) -> None:
    pool = KVPool(spec, GIB // spec.bytes_per_slot, "cuda", driver)
    pool.resize(pool.max_slots)
    other = torch.cuda.Stream()
    for share in (0.3, 0.6, 0.05):
        for layer in range(spec.num_layers):
            pool.layer(layer)[: pool.num_slots].fill_(7.0)
        kept = pool.resize(int(share * pool.max_slots))
        pool.resize(pool.max_slots)
        with torch.cuda.stream(other):  # at once, and not the stream that knows of the zeroing
            dirty = [int(pool.layer(i)[kept : pool.num_slots].count_nonzero()) for i in range(spec.num_layers)]
        assert dirty == [0] * spec.num_layers
        assert all(bool((pool.layer(i)[:kept] == 7.0).all()) for i in range(spec.num_layers))


def test_a_captured_graph_survives_shrinking_and_growing(driver: MemoryDriver) -> None:
    pool = KVPool(SPEC, NUM_SLOTS, "cuda", driver)
    pool.resize(pool.max_slots)
    layer, slots = pool.layer(3), torch.arange(100, device="cuda")
    values = torch.randn(100, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(values)

    def step() -> None:
        layer.index_copy_(0, slots, values)
        torch.index_select(layer, 0, slots, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for first in (NUM_SLOTS // 2, 0, NUM_SLOTS - 500, 17):
        graph.replay()  # may still run when memory is unmapped
        pool.resize(NUM_SLOTS // 10)
        assert pool.resize(pool.max_slots) == pool.max_slots
        slots.copy_(torch.arange(first, first + 100))
        values.normal_()
        graph.replay()
        assert torch.equal(out, values) and torch.equal(layer[first : first + 100], values)


def test_moves_on_the_device_copy_every_layer_behind_what_wrote_it(driver: MemoryDriver) -> None:
    pool = KVPool(ODD, 50_000, "cuda", driver)
    pool.resize(pool.max_slots)
    src, dst = np.random.default_rng(3).permutation(pool.num_slots)[:8000].reshape(2, -1)
    before = torch.randn(pool.num_slots, 2, 3, 64, device="cuda")
    for layer in range(ODD.num_layers):
        pool.layer(layer).copy_(before + layer)
    pool.move(src, dst)
    for layer in range(ODD.num_layers):
        want = before + layer
        reference.move_slots(want, torch.from_numpy(src).cuda(), torch.from_numpy(dst).cuda())
        assert torch.equal(pool.layer(layer), want)


def test_a_full_card_is_an_ordinary_no(driver: MemoryDriver, monkeypatch) -> None:
    pool = KVPool(SPEC, NUM_SLOTS, "cuda", driver)
    pool.resize(pool.max_slots // 2)
    half, now = pool.num_slots, [0.0]
    pool.layer(0)[:half].fill_(1.0)  # kernels that are loaded now need no memory later
    pool._store._clock = lambda: now[0]
    torch.cuda.empty_cache()
    others = [torch.empty(max(1, free_bytes() - GIB // 2), dtype=torch.uint8, device="cuda")]
    got = pool.resize(pool.max_slots)
    assert half <= got < pool.max_slots and pool.num_slots == got == pool.slots_in_reach
    for layer in range(SPEC.num_layers):
        pool.layer(layer)[:got].fill_(1.0)
    torch.cuda.synchronize()
    others.clear()  # freed, but torch keeps it: the store has to ask for it
    now[0] += RETRY_S
    assert pool.resize(pool.max_slots) == pool.max_slots
    pool.layer(7)[: pool.num_slots].fill_(1.0)
    torch.cuda.synchronize()


def test_a_cache_over_it_keeps_its_tokens(driver: MemoryDriver) -> None:
    """Rows scattered over a pool of many handles, shrunk to what they need."""
    pool = KVPool(ODD, 60_000, "cuda", driver)
    cache, rng = KVCache(pool.max_slots, 40, 4000, pool=pool), random.Random(5)
    for _ in range(4):
        filler = cache.allocator.alloc(cache.num_free - 30_000)
        rows = {row: rng.random() for row in (cache.open_row(rng.randrange(1, 900)) for _ in range(30))}
        for row, value in rows.items():
            for layer in range(ODD.num_layers):
                pool.layer(layer)[torch.from_numpy(cache.slots(row).astype(np.int64)).cuda()] = value + layer
        cache.allocator.free(filler)
        epoch = cache.epoch
        cache.shrink_to(0)
        assert cache.epoch > epoch and cache.num_slots < 30_000
        for row, value in rows.items():
            slots = torch.from_numpy(cache.slots(row).astype(np.int64)).cuda()
            for layer in range(ODD.num_layers):
                assert bool((pool.layer(layer)[slots] == torch.tensor(value + layer, device="cuda")).all())
        cache.check_integrity()
        cache.grow_to(pool.max_slots)
        for row in rows:
            cache.close_row(row)


# ---------------------------------------------------------------- the engine


@pytest.fixture
def engine(embedded_model: Path, tmp_path_factory) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**settings: object) -> Harness:
        own = {"model": str(embedded_model), "load_format": "auto", "device": "cuda", "memory_budget": 8 << 30}
        own |= {"no_enable_prefix_caching": True, "max_model_len": 1024, "dtype": "float32"}
        made.append(Harness(tmp_path_factory.mktemp("e"), **(own | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(5, 40_000) for _ in range(rng.choice([9, 60, 200, 400]))] for _ in range(count)]


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_resizes_under_load_change_no_token(engine, eager: bool, capsys) -> None:
    asked = {f"r{i}": prompt for i, prompt in enumerate(prompts(60))}
    harness = engine(max_num_seqs=32, max_num_batched_tokens=512, enforce_eager=eager)
    kv, ladder, governor = harness.parts.ladder._kv, harness.parts.ladder, harness.parts.ladder._governor

    def ask(each_turn: Callable[[int], object] = lambda turn: None) -> dict[str, list[int]]:
        harness.outputs.clear()
        for name, prompt in asked.items():
            harness.add(name, prompt, max_tokens=40)
        harness.run(each_turn)
        return {name: harness.tokens(name) for name in asked}

    want = ask()
    fillers, sizes, epoch = [], set(), kv.epoch
    assert kv.pool.elastic and kv.num_slots == kv.max_slots

    def resize(turn: int) -> None:
        quiet = not harness.parts.scheduler.waiting  # nothing of this is left when the last request ends
        if turn % 4 == 0 or quiet:
            while fillers:
                kv.allocator.free(fillers.pop())
        if quiet:
            return
        if turn % 4 == 0:
            ladder._resize(max(64, kv.num_used, ladder._reserved_slots()))
        elif turn % 4 == 1:
            ladder.grow_kv()
        elif turn % 4 == 2:  # the next slots lie above these, and fall into their place
            fillers.append(kv.allocator.alloc(max(0, kv.num_free - 2000)))
        sizes.add(kv.num_slots)
        assert governor.leased(KV) == kv.pool.held_bytes

    assert ask(resize) == want
    with capsys.disabled():
        events = [event for event in governor.events if event.kind in ("kv_grow", "kv_shrink")]
        worst = {kind: max(e.ms for e in events if e.kind == kind) for kind in ("kv_grow", "kv_shrink")}
        print(f"\n{kv.epoch - epoch} moves, sizes {sorted(sizes)}, longest ms {worst}")
    assert kv.epoch - epoch >= 3 and len(sizes) >= 2, "nothing moved, so nothing is tested"


def test_leases_are_what_the_driver_sees_and_a_smaller_budget_frees_the_card(engine, capsys) -> None:
    harness = engine(max_num_seqs=256, max_num_batched_tokens=512, memory_budget=12 << 30, enforce_eager=True)
    kv, ladder, governor = harness.parts.ladder._kv, harness.parts.ladder, harness.parts.ladder._governor
    torch.cuda.empty_cache()

    def move(name: str, action: Callable[[], object]) -> None:
        before, leased = free_bytes(), governor.leased(KV)
        action()
        freed, given = free_bytes() - before, leased - governor.leased(KV)
        with capsys.disabled():
            print(f"\n{name}: leases {-given / 2**20:+.0f} MiB, driver {-freed / 2**20:+.0f} MiB", end="")
        assert abs(given) > GIB and abs(freed - given) <= 0.05 * abs(given), name

    def grow() -> None:
        for _ in range(100):
            ladder.grow_kv()

    budget = governor.budget_bytes
    move("shrink", lambda: ladder.resize_kv(kv.max_slots // 4))
    move("grow", grow)
    move("another program wants 4 GiB", lambda: ladder.set_budget(budget - 4 * GIB, None, 1e9))
    assert governor.free_bytes >= 0
    others = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    harness.add("while", [5] * 300, max_tokens=20)
    harness.run()
    assert len(harness.tokens("while")) == 20
    del others
    torch.cuda.empty_cache()
    ladder.set_budget(budget, None, 2e9)
    move_back = governor.leased(KV)
    grow()
    assert kv.num_slots == kv.max_slots and governor.leased(KV) > move_back


def test_training_takes_from_the_pool_and_gives_all_of_it_back(engine, tmp_path: Path, capsys) -> None:
    harness = engine(max_num_seqs=128, max_num_batched_tokens=512, memory_budget=4 << 30, dtype="bfloat16")
    kv, ladder, training = harness.parts.ladder._kv, harness.parts.ladder, harness.parts.training
    governor = ladder._governor
    want_slots, free_before = kv.num_slots, free_bytes()
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, 200, 700).tolist(), [0] + [1] * 699) for _ in range(6)]
    sha = write_dataset(tmp_path, rows)
    settings = TrainingSettings(n_epochs=1, lora=LoraSpec(r=8), batch_size=3, micro_batch_tokens=2100)
    training.start(
        StartJob(
            job_id="j", name="a", base_model="m", job_dir=str(tmp_path), adapters_dir=str(tmp_path / "adapters"),
            dataset_sha256=sha, settings=settings,
        )
    )  # fmt: skip
    assert training.trainer is not None
    smallest, most = want_slots, 0
    for _ in range(20_000):
        if training.trainer is None:
            break
        training.run_unit()
        smallest, most = min(smallest, kv.num_slots), max(most, governor.leased(ACTIVATIONS))
        assert governor.free_bytes >= 0
    assert training.trainer is None and smallest < want_slots, "training took nothing from the pool"
    assert governor.leased(ACTIVATIONS) == governor.leased(STATE) == 0
    for turn in range(100):
        ladder.follow_budget(None, float(turn))
    assert kv.num_slots == want_slots and governor.leased(KV) == kv.pool.held_bytes
    with capsys.disabled():
        print(f"\nactivations {most / 2**20:.0f} MiB, pool {want_slots} -> {smallest} slots, "
              f"free {free_before / 2**20:.0f} -> {free_bytes() / 2**20:.0f} MiB")  # fmt: skip
    assert free_before - free_bytes() <= 0.05 * most + (64 << 20), "torch kept what training freed"
