"""ElasticBuffer, KVPool and the process's real memory: RssAnon follows the pool, new memory is zero, tokens survive."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fineinfer.memory.elastic_buffer import ElasticBuffer
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_buffer_keeps_its_address_and_reads_zero_after_growing() -> None:
    buffer = ElasticBuffer(10_000)
    tensor = buffer.as_tensor(torch.uint8, (10_000,))
    address = tensor.data_ptr()
    buffer.grow(9_000)
    tensor[:9_000] = 7
    buffer.shrink(7_500)  # inside the first page
    assert buffer.mapped_bytes == 1_500
    buffer.grow(8_500)
    assert (tensor[:1_500] == 7).all() and not tensor[1_500:].any()
    assert (tensor.data_ptr(), buffer.mapped_bytes, buffer.elastic) == (address, 10_000, True)


def test_tensor_outlives_its_buffer() -> None:
    buffer = ElasticBuffer(4096)
    buffer.grow(4096)
    tensor = buffer.as_tensor(torch.float32, (4, 256))
    del buffer
    tensor.fill_(3.0)
    assert tensor.sum().item() == 3072.0


def test_buffer_refuses_what_cannot_be() -> None:
    buffer = ElasticBuffer(100)
    for call in (lambda: buffer.grow(101), lambda: buffer.grow(-1), lambda: buffer.shrink(1), lambda: ElasticBuffer(0)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError):
        buffer.as_tensor(torch.float32, (26,))
    assert buffer.mapped_bytes == 0


def test_memory_of_other_devices_is_not_resized() -> None:
    """The meta device stands in for a GPU: same path, no memory."""
    buffer = ElasticBuffer(4096, "meta")
    assert (buffer.elastic, buffer.mapped_bytes) == (False, 4096)
    with pytest.raises(RuntimeError):
        buffer.shrink(1)
    pool = KVPool(SPEC, 64, "meta")
    cache = KVCache(64, max_rows=2, max_len=64, pool=pool)
    assert (cache.shrink_to(8), cache.num_slots, pool.resize(8)) == (64, 64, 64)


def test_pool_shapes_and_sizes() -> None:
    pool = KVPool(SPEC, 50)
    assert [pool.layer(i).shape for i in range(3)] == [(50, 2, 2, 8)] * 3
    assert pool.layer(0).dtype == torch.bfloat16
    assert pool.bytes_per_slot == 3 * 2 * 2 * 8 * 2
    assert (pool.resize(20), pool.num_slots, pool.mapped_bytes) == (20, 20, 20 * pool.bytes_per_slot)
    for bad in (-1, 51):
        with pytest.raises(ValueError):
            pool.resize(bad)


def test_move_copies_k_and_v_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fineinfer.memory.kv_pool._MOVE_CHUNK_SLOTS", 2)
    pool = KVPool(SPEC, 16)
    pool.resize(16)
    for i in range(3):
        pool.layer(i).copy_(torch.randn(16, 2, 2, 8))
    before = [pool.layer(i).clone() for i in range(3)]
    pool.move([9, 10, 15, 11, 12], range(5))
    for i in range(3):
        assert torch.equal(pool.layer(i)[:5], before[i][[9, 10, 15, 11, 12]])
        assert torch.equal(pool.layer(i)[5:], before[i][5:])


RSS_SCRIPT = """
import json, torch
from fineinfer.memory.host import rss_anon_bytes, set_malloc_thresholds, trim_heap
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec

set_malloc_thresholds()
pool = KVPool(KVSpec(num_layers=4, num_kv_heads=4, head_dim=64, dtype=torch.float32), max_slots=16384)  # 128 MiB
cache = KVCache(16384, max_rows=8, max_len=16384, pool=pool)
report = []

def note(name):
    trim_heap()
    report.append((name, rss_anon_bytes(), pool.mapped_bytes))

def write(start, end):
    for i in range(4):
        pool.layer(i)[start:end] = torch.arange(start, end, dtype=torch.float32).view(-1, 1, 1, 1)

def tokens(row):
    return [pool.layer(i)[cache.slots(row).tolist(), j, 3, 63].tolist() for i in range(4) for j in range(2)]

first, second, third = (cache.open_row(n) for n in (9000, 3000, 2000))
pool.move([0], [1])  # lets torch set up its machinery before memory is measured
note("mapped")
write(0, 16384)
expected = [[float(s) for s in cache.slots(row)] for row in (second, third)]
note("written")
cache.close_row(first)
assert cache.shrink_to(6000) == 6000
note("shrunk")
assert [tokens(row) == [want] * 8 for row, want in zip((second, third), expected)] == [True, True]
assert cache.grow_to(14000) == 14000
assert not any(pool.layer(i)[6000:14000].any() for i in range(4))
note("grown")
write(6000, 14000)
note("rewritten")
assert [tokens(row) == [want] * 8 for row, want in zip((second, third), expected)] == [True, True]
for _ in range(20):
    cache.shrink_to(5000)
    cache.grow_to(16384)
    write(5000, 16384)
cache.shrink_to(5000)
note("cycled")
cache.check_integrity()
print(json.dumps(report))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_rss_follows_the_pool_within_five_percent(capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.run([sys.executable, "-c", RSS_SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    points = {name: (rss, mapped) for name, rss, mapped in json.loads(run.stdout)}
    slot = 4 * 2 * 4 * 64 * 4
    with capsys.disabled():
        print()
        for start, end, num_slots in (
            ("mapped", "written", 16384),  # mapping alone costs nothing, writing costs all of it
            ("written", "shrunk", 6000 - 16384),
            ("shrunk", "rewritten", 14000 - 6000),
            ("rewritten", "cycled", 5000 - 14000),
        ):
            change, expected = points[end][0] - points[start][0], num_slots * slot
            print(f"RssAnon {start} -> {end}: {change / 2**20:+.1f} MiB, pool {expected / 2**20:+.1f} MiB")
            assert abs(change - expected) <= 0.05 * abs(expected)
    assert abs(points["grown"][0] - points["shrunk"][0]) <= 0.05 * 8000 * slot
    assert points["cycled"][1] == 5000 * slot
