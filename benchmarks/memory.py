"""How long memory takes to move between the KV pool and training: mapping by handle size, shrinking, growing.

    python benchmarks/memory.py [--gib 4] [--pool-gib 48] [--repeats 5]

The pool is that of the 8B model. First table (CUDA): ms to map and unmap --gib by size of the handles, through the
product's own ranges, zeroing included. Second: the real pool, cache and ladder, with live rows to move: ms until the
memory is free (a shrink by --gib), and from asking for it back to the first slots usable and to all of them. Prints
medians and appends to benchmarks/results/memory.csv.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from harness import LLAMA_8B, versions, write_csv

from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, MemoryLadder
from fineinfer.engine.rungs import Rungs
from fineinfer.memory.cuda_memory import HandleStore, MappedRange, MemoryDriver, open_driver
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec
from fineinfer.scheduler.latency_model import LatencyModel

RESULTS = Path(__file__).parent / "results" / "memory.csv"
HANDLE_MIB = (2, 8, 16, 32, 64, 256)
NUM_LAYERS = int(str(LLAMA_8B["num_hidden_layers"]))
SPEC = KVSpec(NUM_LAYERS, int(str(LLAMA_8B["num_key_value_heads"])), int(str(LLAMA_8B["head_dim"])), torch.bfloat16)
ROW_TOKENS = 1000


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call and all it launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def by_handle_size(driver: MemoryDriver, device: torch.device, gib: float, repeats: int) -> list[dict[str, object]]:
    """One range, all of it mapped and unmapped: new handles, then handles kept from the round before."""
    rows: list[dict[str, object]] = []
    for mib in HANDLE_MIB:
        num_bytes, size = int(gib * (1 << 30)), mib << 20
        for kept in (False, True):
            store = HandleStore(driver, size, max_idle=num_bytes // size if kept else 0)
            mapped = MappedRange(num_bytes, store)
            tensor = mapped.tensor()

            def grow(mapped: MappedRange = mapped, tensor: torch.Tensor = tensor, num_bytes: int = num_bytes) -> None:
                if mapped.grow(num_bytes) < num_bytes:
                    raise SystemExit("the device has too little memory left for this benchmark")
                driver.zero(tensor)
                driver.settle()

            times = []
            for _ in range(repeats + 1):
                up = timed(grow, device)
                times.append((up, timed(lambda mapped=mapped, n=num_bytes: mapped.shrink(n), device)))  # type: ignore[misc]
            up_ms, down_ms = (median(column) for column in zip(*times[1:], strict=True))
            name = f"{gib:g} GiB, handles of {mib} MiB" + (", kept" if kept else "")
            rows += [{"name": f"map {name}", "ms": up_ms}, {"name": f"unmap {name}", "ms": down_ms}]
            print(f"{name:42s} map and zero {up_ms:8.2f} ms, unmap {down_ms:8.2f} ms", flush=True)
            del tensor, mapped, store
    return rows


def through_the_ladder(
    driver: MemoryDriver | None, device: torch.device, gib: float, pool_gib: float, repeats: int
) -> list[dict[str, object]]:
    """Training takes ``gib`` from a pool with scattered live rows; requests want it back."""
    num_bytes = int(gib * (1 << 30))
    pool = KVPool(SPEC, int(pool_gib * (1 << 30)) // SPEC.bytes_per_slot, device, driver)
    cache = KVCache(pool.max_slots, 64, 4 * ROW_TOKENS, pool=pool)
    governor = MemoryGovernor(pool.held_bytes)
    governor.lease(KV, pool.held_bytes)
    ladder = MemoryLadder(governor, cache, lambda: 0, Rungs(LatencyModel(), device.type))
    columns: dict[str, list[float]] = {"shrink": [], "first slots": [], "all slots": [], "turn": []}
    for _ in range(repeats + 1):
        filler = cache.allocator.alloc(pool.max_slots - 20 * ROW_TOKENS)  # live rows lie at the pool's end
        rows = [cache.open_row(ROW_TOKENS) for _ in range(16)]
        cache.allocator.free(filler)
        columns["shrink"].append(timed(lambda: ladder._shrink_kv_for(num_bytes), device))
        if not governor.lease(ACTIVATIONS, num_bytes):
            raise SystemExit("the pool did not give what was asked for")
        start = time.perf_counter()
        governor.release(ACTIVATIONS)
        first_ms, before, wanted = 0.0, cache.num_slots, pool.max_slots - cache.num_slots
        turns = []
        while cache.num_slots < pool.max_slots:
            turn = time.perf_counter()
            ladder.make_room(pool.max_slots - cache.num_slots, None, time.monotonic())
            if cache.num_slots == before:
                raise SystemExit(f"the pool does not grow: {before} slots, {wanted} wanted")
            before = cache.num_slots
            turns.append(1e3 * (time.perf_counter() - turn))
            first_ms = first_ms or 1e3 * (time.perf_counter() - start)
        columns["first slots"].append(first_ms)
        columns["all slots"].append(1e3 * (time.perf_counter() - start))
        columns["turn"].append(max(turns))
        for row in rows:
            cache.close_row(row)
    table = []
    names = {
        "shrink": f"{gib:g} GiB from the pool, 16 rows of {ROW_TOKENS} moved",
        "first slots": f"{gib:g} GiB back: first slots usable",
        "all slots": f"{gib:g} GiB back: all slots usable",
        "turn": "longest hold of the loop meanwhile",
    }
    for key, values in columns.items():
        table.append({"name": names[key], "ms": median(values[1:])})
        print(f"{names[key]:56s} {median(values[1:]):8.2f} ms (worst {max(values[1:]):.2f})", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="what moves")
    parser.add_argument("--pool-gib", type=float, default=48.0)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    driver, rows = open_driver(device), []
    if driver is not None:
        rows = by_handle_size(driver, device, arguments.gib, arguments.repeats)
    rows += through_the_ladder(driver, device, arguments.gib, arguments.pool_gib, arguments.repeats)
    write_csv(RESULTS, [row | {"versions": versions()} for row in rows])


if __name__ == "__main__":
    main()
