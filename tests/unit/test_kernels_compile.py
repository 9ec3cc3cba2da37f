"""Every kernel that serving and training launch is compiled for real GPUs, without one: interpreters accept more.

A child process runs the device runner's and the training step's own code on CPU tensors, with launches that stop after
compilation: kernels are compiled with exactly the arguments that they are given there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAX_SHARED_BYTES = {86: 99 << 10, 90: 227 << 10}  # a block's shared memory, by compute capability
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
CHILD = """
import json, sys
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

capability, dtype, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]

class Device:
    utils = launcher_cls = None
    def get_current_target(self): return GPUTarget("cuda", capability, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

driver.set_active(Device())
shared, variants, run = {}, set(), JITFunction.run

def compile_only(self, *args, grid=None, warmup=False, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    name = self.fn.__name__
    variants.add((name, kernel.hash))
    shared[name] = max(shared.get(name, 0), kernel.metadata.shared)
    return kernel

compiled = []
knobs.compilation.listener = lambda **told: compiled.append(told)
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.kernels import (
    activation, attention_decode, attention_prefill, few_rows_linear, lora, norm, rope_store, slot_move
)
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec
from fineinfer.model.loader import load_model
from fineinfer.runner.device_runner import DeviceRunner
from fineinfer.runner.step_graphs import GraphKey

if capability >= 90:
    own = activation, attention_decode, attention_prefill, few_rows_linear, lora, norm, rope_store
    for module in own:
        module.dependent = lambda: {"PDL": True, "launch_pdl": True}
model = load_model(folder, dtype=dtype, device="cpu", load_format="dummy", revision=None, seed=0)
spec, cpu = model.spec, torch.device("cpu")
adapters = AdapterRegistry(spec, 2, 32, model.decoder.dtype, cpu)
pool = KVPool(KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, model.decoder.dtype), 256, cpu)
runner = DeviceRunner(model.decoder, KVCache(256, 16, 256, pool=pool), adapters, 16, cpu)
from fineinfer.runner.compiling import compiling_only
from fineinfer.training.ops import triton_ops
from fineinfer.training.warm_up import warm_up

ops, launches = triton_ops(), JITFunction.run
with compiling_only():
    runner.warm_up()
    warm_up(model.decoder, ops)
assert JITFunction.run is launches
ahead, JITFunction.run = len(compiled), compile_only
runner.warm_up()
slots = torch.arange(2)
slot_move.move_slots(pool.layer(0), slots[:1], slots[1:])  # on a GPU the pool's own way of moving
before = dict(shared)
with torch.inference_mode():
    for rows, mixed, adapted in ((1, False, False), (16, False, True), (16, True, False), (16, True, True)):
        key = GraphKey(rows, mixed, adapted)
        runner._enter_padding(key)
        runner._captured_step(key)
new = sorted(set(shared) - set(before))

from fineinfer.adapters.weights import LoraLayout
from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.training.dropout import Dropout
from fineinfer.training.fused_layers import make_layers
from fineinfer.training.layers import Segments
from fineinfer.training.loss import head_chunk
from fineinfer.training.projection import adapted_blocks
from fineinfer.training.state import AdapterState

served, unexpected = set(shared), []
warm_up(model.decoder, ops)
late = [str(told["src"].name) for told in compiled[ahead:]]
warm = set(variants)
layout = LoraLayout.uniform(spec, LoraSpec(r=48))
state = AdapterState(layout, TrainingSettings(), model.decoder.dtype, cpu, ops)
layers = make_layers(model.decoder, adapted_blocks(state.compute, state.grads), ops)
positions = torch.arange(21)
x = torch.zeros(21, spec.hidden_size, dtype=model.decoder.dtype)
for dropout in (None, Dropout(positions.int(), 0.3, ops.dropout)):
    segments = Segments.make(model.decoder, positions, torch.full((21,), 21), [0, 21], dropout)
    for layer in range(spec.num_layers):
        _, saved = layers.forward(layer, x, segments, True)
        layers.backward(layer, x, segments, saved, x)
head_chunk(model.decoder, x, positions, 1.0, ops)
state.optimizer.update(state.grads.flat, 0.1, 0.5)
unexpected = [name for name, _ in variants - warm]
head_norm = x.new_zeros(spec.head_dim)  # of Qwen3
ops.rope(saved.qkv, *segments.rows, spec.num_heads, head_norm, head_norm, 1e-5)
trained = sorted(set(shared) - served)
print(json.dumps({"shared": shared, "new": new, "trained": trained, "unexpected": unexpected, "late": late}))
"""


# of the 8.x cards that with the least shared memory, and the widest heads on it; float16 is compiled as bfloat16 is,
# float32 on cards only: it takes half as long again
@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [(86, "bfloat16", 256), (90, "bfloat16", 64)])
def test_every_kernel_compiles(tmp_path: Path, capability: int, dtype: str, head_dim: int) -> None:
    pytest.importorskip("triton")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": head_dim}))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(capability), dtype, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["shared"]) >= 19, said
    assert not said["new"], "a captured step uses kernels that the warm-up does not"
    assert said["late"] == ["_move_slots_kernel"], "something was not compiled ahead"  # only a pool on a GPU calls it
    assert not said["unexpected"], "a training step compiles what the warm-up did not"
    assert len(said["trained"]) == 6, said["trained"]
    too_large = {name: size for name, size in said["shared"].items() if size > MAX_SHARED_BYTES[capability]}
    assert not too_large
