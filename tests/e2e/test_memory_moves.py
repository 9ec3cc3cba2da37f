"""Bytes really move between the KV pool and training: RssAnon follows the leases in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

COMMON = """
import json, sys, tempfile, threading, time
from pathlib import Path
import numpy as np, torch
from fineinfer.data.packed import write_dataset
from fineinfer.engine import process
from fineinfer.engine.settings import EngineSettings
from fineinfer.memory.host import rss_anon_bytes, trim_heap
from fineinfer.model.loader import base_weights_hash
from fineinfer.messages import StartJob, TrainingSettings, LoraSpec

folder = Path(tempfile.mkdtemp())

def engine(model, **settings):
    address = f"ipc://{folder}/engine"
    return process.build_engine(
        EngineSettings(model=model, base_model="m", engine_address=address, dtype="float32", device="cpu", **settings), b"t" * 32
    ).parts

def start_job(parts, lengths, **settings):
    rng = np.random.default_rng(0)
    job = folder / "job"
    job.mkdir()
    rows = [(rng.integers(3, 200, n).tolist(), [0] + [1] * (n - 1)) for n in lengths]
    sha = write_dataset(job, rows)
    parts.training.start(StartJob(job_id="j", name="a", base_model="m", job_dir=str(job), adapters_dir=str(folder / "adapters"),
        dataset_sha256=sha, settings=TrainingSettings(n_epochs=1, lora=LoraSpec(r=8), **settings)))
    assert parts.training.trainer is not None
"""

LADDER = (
    COMMON
    + """
parts = engine(sys.argv[1], kv_cache_memory_bytes=192 << 20, max_num_seqs=96, max_loras=1, max_lora_rank=8)
ladder, kv, training = parts.ladder, parts.scheduler._kv, parts.training
governor, pool = ladder._governor, kv.pool
base_hash = base_weights_hash(training._decoder)
for layer in range(8):
    pool.layer(layer)[: kv.num_slots].fill_(1.0)
start_job(parts, [2048], batch_size=1, gradient_accumulation_steps=1, micro_batch_tokens=2048)
trainer = training.trainer
moves = {}

def move(name, leased, action):
    trim_heap()
    before, leased_before = rss_anon_bytes(), leased()
    action()
    trim_heap()
    moves[name] = [rss_anon_bytes() - before, leased() - leased_before]

# the budget leaves the job half of what it wants: the pool must give the rest, and some layers are recomputed
needed = trainer.bytes_if_all_kept(2048)
governor.set_budget(governor.budget_bytes - governor.free_bytes + needed // 2)
slots = kv.num_slots
move("pool gives to training", lambda: governor.leased("kv"), lambda: training.run_unit())
assert kv.num_slots < slots

def forward():
    while len([u for u in trainer.remaining_units() if u[0] == "forward"]):
        training.run_unit()

move("training holds activations", trainer.held_bytes, forward)
held_layers = trainer.num_kept_layers()
assert held_layers > 0
move("kept graphs are dropped", trainer.held_bytes, lambda: ladder.make_room(64, trainer, time.monotonic()))
assert trainer.num_kept_layers() == 0 and ladder.num_dropped_layers == held_layers
governor.set_budget(governor.budget_bytes + (256 << 20))

while training.trainer is not None:
    training.run_unit()

def use():
    for layer in range(8):
        pool.layer(layer)[: kv.num_slots].fill_(1.0)

def grow_and_use():
    ladder.grow_kv()
    use()

use()
move("pool shrinks again", lambda: governor.leased("kv"), lambda: ladder.resize_kv(slots // 2))
move("pool grows back", lambda: governor.leased("kv"), grow_and_use)
assert kv.num_slots == slots
assert base_weights_hash(training._decoder) == base_hash
print(json.dumps(moves))
"""
)

PEAK = (
    COMMON
    + """
from fineinfer.request import SamplingParams
from fineinfer.scheduler.sequence import Sequence

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

budget = int(sys.argv[2])
before = rss()  # torch and all modules are imported; the weights are not opened yet
peak, stop = [before], threading.Event()

def watch():
    while not stop.wait(0.004):
        peak[0] = max(peak[0], rss())

threading.Thread(target=watch, daemon=True).start()
parts = engine(sys.argv[1], memory_budget=budget, max_loras=2, max_lora_rank=16)
start_job(parts, [200] * 4, batch_size=2)
for i in range(6):
    parts.scheduler.add(Sequence(f"r{i}", b"x", [7 + i] * 150, SamplingParams(temperature=0.0), 166, time.monotonic()))
while not parts.scheduler.is_idle() or parts.training.trainer is not None:
    plan = parts.scheduler.plan(time.monotonic(), parts.training.state(time.monotonic()))
    for chunk in plan.chunks:
        parts.scheduler.launched(chunk)
    for result in parts.runner.run(plan.chunks) if plan.chunks else ():
        parts.scheduler.commit(result.chunk, result.token_id)
        if result.token_id is not None and result.chunk.sequence.max_output_left <= 0:
            parts.scheduler.finish(result.chunk.sequence, "length")
    if parts.training.trainer is not None:
        parts.training.run_unit()
stop.set()
weights = parts.ladder._governor.leased("weights")
print(json.dumps({"growth": peak[0] - before, "weights": weights, "budget": budget}))
"""
)


def run(script: str, *arguments: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def medium_model(tmp_path_factory) -> Path:
    """8 layers whose activations at 2,048 tokens take hundreds of MiB, so that 5 % is well above noise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("medium")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        )
    ).save_pretrained(path)
    return path


def test_rss_follows_every_shrink_drop_and_grow(medium_model, capsys):
    moves = run(LADDER, str(medium_model))
    with capsys.disabled():
        for name, (rss, leased) in moves.items():
            print(f"\n{name}: RssAnon {rss / 2**20:+.1f} MiB, leased {leased / 2**20:+.1f} MiB", end="")
    for name, (rss, leased) in moves.items():
        assert abs(leased) > 16 << 20, f"{name} moved too little to be measured"
        assert abs(rss - leased) <= 0.05 * abs(leased), name


def test_peak_rss_is_the_weights_once_and_the_planned_pools(embedded_model, capsys):
    budget = 1400 << 20
    result = run(PEAK, str(embedded_model), str(budget))
    with capsys.disabled():
        print(
            f"\npeak RSS grew by {result['growth'] / 2**20:.0f} MiB; weights {result['weights'] / 2**20:.0f} MiB, "
            f"plan (weights included) {budget / 2**20:.0f} MiB"
        )
    assert result["growth"] <= 1.10 * budget
