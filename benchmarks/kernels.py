"""Speed of the Triton kernels on a CUDA device, against a plain copy in the same run.

    python benchmarks/kernels.py [--only norm rope_store]

Each line is a CUDA graph of 20 calls that go round over buffers larger than the L2 cache; where even 20 sets of buffers
fit into it, they are cold all the same: before each replay the cache is filled with something else. The median over the
replays. Bytes are those the operation has to move (each tensor once). Shapes are those of the 8B model. Prints a table
and appends to benchmarks/results/kernels.csv.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from harness import LLAMA_8B, versions, write_csv

RESULTS = Path(__file__).parent / "results" / "kernels.csv"
NUM_ROWS = (1, 64, 256, 4096)
NUM_CALLS = 20  # in one graph
ROTATED_BYTES = 256 << 20  # the buffers of one graph together, where 20 sets of them come to so much; the L2 has 50 MB
FLUSH_BYTES = 128 << 20
COPY_BYTES = 4 << 30  # 512 MiB copies gave 2.4 instead of 3.0 TB/s on an H100
POOL_SLOTS = 131_072
HIDDEN, INNER = int(str(LLAMA_8B["hidden_size"])), int(str(LLAMA_8B["intermediate_size"]))
HEADS, KV_HEADS = int(str(LLAMA_8B["num_attention_heads"])), int(str(LLAMA_8B["num_key_value_heads"]))
HEAD_DIM, EPS = int(str(LLAMA_8B["head_dim"])), 1e-5

Call = Callable[[], object]


@dataclass
class Bench:
    """Measures and keeps the rows of the table.

    Args:
        repeats: Replays of each graph.
    """

    repeats: int
    rows: list[dict[str, object]] = field(default_factory=list)
    copy_gb_s: float = 0.0

    def bench(self, name: str, call: Callable[[int], Call], num_bytes: int) -> float:
        """Time one operation, print and keep its row.

        Args:
            name: Of the row.
            call: Makes the call on its own set of buffers; called with 0, 1, ..., one set each.
            num_bytes: What one call reads and writes.

        Returns:
            Seconds of one call.
        """
        num_sets = min(NUM_CALLS, max(2, -(-ROTATED_BYTES // num_bytes)))
        calls = [call(i) for i in range(num_sets)]
        for one in calls:  # compiles and warms up outside the graph
            one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(NUM_CALLS):
                calls[i % num_sets]()
        seconds = median(self._replay(graph) for _ in range(self.repeats)) / NUM_CALLS
        gb_s = num_bytes / seconds / 1e9
        self.copy_gb_s = self.copy_gb_s or gb_s  # the copy is measured first
        percent = 100 * gb_s / self.copy_gb_s
        row = {"name": name, "us": 1e6 * seconds, "gb_s": gb_s, "percent_of_copy": percent, "bytes": num_bytes}
        print(f"{name:32s} {row['us']:10.2f} us {gb_s:9.1f} GB/s {percent:6.1f} % of copy", flush=True)
        self.rows.append(row)
        return seconds

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of one replay on a cold cache."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _flush_buffer().sum()  # read, not written: lines to write back would slow down the first calls
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES // 4, device="cuda")


def noise(*shape: int) -> torch.Tensor:
    """Random bf16 values on the device."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def copy(bench: Bench) -> None:
    """The yardstick; first in every run."""

    def call(_: int) -> Call:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    bench.bench("copy", call, 2 * COPY_BYTES)


def norm(bench: Bench) -> None:
    from fineinfer.kernels.norm import add_rms_norm, rms_norm

    weight = noise(HIDDEN)

    def plain(_: int, rows: int) -> Call:
        x, out = noise(rows, HIDDEN), noise(rows, HIDDEN)
        return lambda: rms_norm(x, weight, EPS, out)

    def added(_: int, rows: int) -> Call:
        x, out = noise(rows, HIDDEN), noise(rows, HIDDEN)
        delta = torch.zeros_like(x)  # x is updated in place, often
        return lambda: add_rms_norm(x, delta, weight, EPS, out)

    for rows in NUM_ROWS:
        size = 2 * rows * HIDDEN  # bytes of one [rows, hidden]
        bench.bench(f"rms_norm {rows}", functools.partial(plain, rows=rows), 2 * size)
        bench.bench(f"add_rms_norm {rows}", functools.partial(added, rows=rows), 4 * size)


def activation(bench: Bench) -> None:
    from fineinfer.kernels.activation import silu_and_mul

    def call(_: int, rows: int) -> Call:
        gate_up, out = noise(rows, 2 * INNER), noise(rows, INNER)
        return lambda: silu_and_mul(gate_up, out)

    for rows in NUM_ROWS:
        bench.bench(f"silu_and_mul {rows}", functools.partial(call, rows=rows), 2 * rows * 3 * INNER)


def rope_store(bench: Bench) -> None:
    from fineinfer.kernels.rope_store import rope_and_store

    pool_layer = noise(POOL_SLOTS, 2, KV_HEADS, HEAD_DIM)
    slots_in_any_order = torch.randperm(POOL_SLOTS, device="cuda")

    def call(index: int, rows: int) -> Call:
        qkv = noise(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        angle = torch.rand(rows, HEAD_DIM, device="cuda")
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        slots = slots_in_any_order[index * rows : (index + 1) * rows]
        return lambda: rope_and_store(qkv, cos, sin, slots, pool_layer, HEADS)

    for rows in NUM_ROWS:
        # query heads are read and written, key and value heads read and stored; cosine and sine, slots
        values = 2 * (HEADS + 2 * KV_HEADS) * HEAD_DIM + 2 * HEAD_DIM
        bench.bench(f"rope_and_store {rows}", functools.partial(call, rows=rows), rows * (2 * values + 8))


def lora(bench: Bench) -> None:
    """Shrink and expand of the fused blocks: rows sorted by adapter, 8 adapters of rank 16 in stacks of rank 64."""
    from fineinfer.kernels.lora import BLOCK_ROWS, lora_expand, lora_shrink

    num_slots, rank, max_rank = 8, 16, 64
    kv = KV_HEADS * HEAD_DIM
    blocks = {  # in_features, first column of each module and the end
        "qkv": (HIDDEN, (0, HEADS * HEAD_DIM, HEADS * HEAD_DIM + kv, HEADS * HEAD_DIM + 2 * kv)),
        "o": (HEADS * HEAD_DIM, (0, HIDDEN)),
        "gate_up": (HIDDEN, (0, INNER, 2 * INNER)),
        "down": (INNER, (0, HIDDEN)),
    }

    def call(_: int, rows: int, in_features: int, columns: tuple[int, ...]) -> Call:
        modules, each = len(columns) - 1, -(-rows // num_slots)
        block_m = next((size for size in BLOCK_ROWS if size >= each), BLOCK_ROWS[-1])
        ends = [min(rows, (slot + 1) * each) for slot in range(num_slots)]
        tiles = [
            (first, min(block_m, end - first), slot)
            for slot, end in enumerate(ends)
            for first in range(min(rows, slot * each), end, block_m)
        ]
        tile_table = torch.tensor(tiles, dtype=torch.int32, device="cuda")
        ranks = torch.full((num_slots, modules), rank, dtype=torch.int32, device="cuda")
        scales = torch.full((num_slots, modules), 1e-3, device="cuda")  # y is added to in place, often
        a, b = noise(num_slots, modules * max_rank, in_features), noise(num_slots, max_rank, columns[-1])
        x, y = noise(rows, in_features), noise(rows, columns[-1])

        def both() -> None:
            shrunk = lora_shrink(x, a, ranks, tile_table, max_rank, block_m)
            lora_expand(shrunk, b, scales, ranks, tile_table, max_rank, block_m, columns, y)

        return both

    for rows in NUM_ROWS:
        for name, (in_features, columns) in blocks.items():
            used = min(num_slots, rows)
            weights = used * rank * ((len(columns) - 1) * in_features + columns[-1])
            make = functools.partial(call, rows=rows, in_features=in_features, columns=columns)
            # the partial sums between the two kernels are not counted: a fused kernel would not move them
            bench.bench(f"lora {name} {rows}", make, 2 * (weights + rows * (in_features + 2 * columns[-1])))


def attention_decode(bench: Bench) -> None:
    """One token a row over scattered slots; bytes are those of its keys and values."""
    from fineinfer.kernels import attention_decode as kernel

    pool_layer = noise(4 * POOL_SLOTS, 2, KV_HEADS, HEAD_DIM)  # 2 GB
    slots = torch.randperm(4 * POOL_SLOTS, device="cuda", dtype=torch.int32)

    def call(index: int, lengths: list[int]) -> Call:
        table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32, device="cuda")
        first = index * sum(lengths)
        for row, length in enumerate(lengths):
            # runs of slots, as the allocator gives them
            start = int(slots[(first + row) % len(slots)]) % (len(slots) - length)
            table[row, :length] = torch.arange(start, start + length, device="cuda")
        sizes = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        work = kernel.DecodePlan.allocate(len(lengths), HEADS, KV_HEADS, HEAD_DIM, None, torch.device("cuda"))
        q = noise(len(lengths), HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
        out = torch.empty(len(lengths), HEADS, HEAD_DIM, dtype=q.dtype, device="cuda")
        kernel.plan(sizes, work)
        return lambda: kernel.attention_decode(q, pool_layer, table, rows, sizes, work, out)

    cases = {
        "1 x 300": [300],
        "1 x 4000": [4000],
        "16 x 500": [500] * 16,
        "64 x 1000": [1000] * 64,
        "256 x 430": [430] * 256,
        "256 x 20..2000": [20 + 1980 * i * i // 65025 for i in range(256)],
    }
    for name, lengths in cases.items():
        size = sum(lengths) * 2 * KV_HEADS * HEAD_DIM * 2
        bench.bench(f"attention_decode {name}", functools.partial(call, lengths=lengths), size)


def attention_prefill(bench: Bench) -> None:
    """Whole prompts over gathered slots, and flash attention over contiguous rows beside it."""
    from torch.nn.attention.varlen import varlen_attn

    from fineinfer.kernels import attention_prefill as kernel

    pool_layer = noise(POOL_SLOTS, 2, KV_HEADS, HEAD_DIM)

    def ours(_: int, lengths: list[int]) -> Call:
        table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32, device="cuda")
        order = torch.randperm(POOL_SLOTS, device="cuda", dtype=torch.int32)
        spans, first = [], 0
        for row, length in enumerate(lengths):
            table[row, :length] = order[first : first + length]
            spans.append((first, length, 0, row))
            first += length
        tiles = torch.from_numpy(kernel.tiles(spans, kernel.block_rows(torch.bfloat16))).cuda()
        q = noise(first, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
        out = torch.empty(first, HEADS, HEAD_DIM, dtype=q.dtype, device="cuda")
        return lambda: kernel.attention_prefill(q, pool_layer, table, tiles, out)

    def flash(_: int, lengths: list[int]) -> Call:
        total = sum(lengths)
        q, k, v = (noise(total, HEADS, HEAD_DIM) for _ in range(3))
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        longest = max(lengths)
        return lambda: varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))

    for lengths in ([1024] * 4, [256] * 16, [200] * 20, [8192]):
        flops = sum(2 * HEADS * HEAD_DIM * length * length for length in lengths)  # causal: half of 4 n^2 d
        size = sum(lengths) * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
        shape = f"{len(lengths)} x {lengths[0]}"
        for name, make in (("attention_prefill", ours), ("varlen_attn", flash)):
            seconds = bench.bench(f"{name} {shape}", functools.partial(make, lengths=lengths), size)
            print(f"{'':32s} {flops / seconds / 1e12:10.1f} TFLOP/s")


def training(bench: Bench) -> None:
    """What a training step of 4 x 1,024 tokens runs beside matrix products, adapters of rank 16."""
    from fineinfer.kernels import activation_training, adamw, cross_entropy, norm_backward, rope
    from fineinfer.kernels.reference_training import Expansion

    rows, rank, vocab, params = 4096, 16, int(str(LLAMA_8B["vocab_size"])), 40_000_000
    weight, all_heads = noise(HIDDEN), HEADS + 2 * KV_HEADS
    b = noise(INNER, rank)

    def norm_call(_: int) -> Call:
        grad, x, residual = (noise(rows, HIDDEN) for _ in range(3))
        return lambda: norm_backward.rms_norm_backward(grad, x, weight, EPS, residual)

    def silu_call(_: int, backward: bool, adapted: bool) -> Call:
        gate_up, grad, xa = noise(rows, 2 * INNER), noise(rows, INNER), noise(rows, 2 * rank)
        gate, up = (Expansion(half, b, 1e-3) if adapted else None for half in xa.chunk(2, dim=1))
        if backward:
            return lambda: activation_training.silu_and_mul_backward(grad, gate_up, gate, up)
        return lambda: activation_training.silu_and_mul(gate_up, gate, up)

    def rope_call(_: int, backward: bool) -> Call:
        qkv, (cos, sin) = noise(rows, all_heads, HEAD_DIM), noise(2, rows, HEAD_DIM)
        if backward:
            grads = [noise(rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            return lambda: rope.rope_backward(*grads, cos, sin)
        return lambda: rope.rope(qkv, cos, sin, HEADS)

    def loss_call(_: int) -> Call:
        logits, targets = noise(512, vocab), torch.randint(0, vocab, (512,), device="cuda")
        return lambda: cross_entropy.cross_entropy(logits, targets)

    def adamw_call(_: int) -> Call:
        state = [torch.zeros(params, device="cuda") for _ in range(4)]
        copy = torch.zeros(params, device="cuda", dtype=torch.bfloat16)
        return lambda: adamw.adamw(
            *state, copy, grad_scale=1.0, learning_rate=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
            num_updates=1,
        )  # fmt: skip

    bench.bench("rms_norm_backward", norm_call, 2 * rows * 5 * HIDDEN)
    for adapted in (False, True):
        kind = "adapted" if adapted else "plain"
        forward, backward = (functools.partial(silu_call, backward=way, adapted=adapted) for way in (False, True))
        bench.bench(f"silu_and_mul {kind}", forward, 2 * rows * 3 * INNER)
        bench.bench(f"silu_and_mul_backward {kind}", backward, 2 * rows * 6 * INNER)
    rotated = 2 * (HEADS + KV_HEADS) * HEAD_DIM
    bench.bench("rope", functools.partial(rope_call, backward=False), 2 * rows * (rotated + 2 * HEAD_DIM))
    moved = 2 * all_heads * HEAD_DIM + 2 * HEAD_DIM
    bench.bench("rope_backward", functools.partial(rope_call, backward=True), 2 * rows * moved)
    bench.bench("cross_entropy 512", loss_call, 2 * 512 * 2 * vocab)
    bench.bench("adamw 40M", adamw_call, params * (7 * 4 + 2))


def attention_training(bench: Bench) -> None:
    """Flash attention over whole sequences, as training calls it, and what a backward in a fixed order costs."""
    from fineinfer.training.attention import Sequences, attention_backward, attention_forward

    for lengths in ([1024] * 4, [200] * 20, [8192]):
        total, shape = sum(lengths), f"{len(lengths)} x {lengths[0]}"
        bounds = [lengths[0] * i for i in range(len(lengths) + 1)]
        sequences = Sequences.make(bounds, torch.device("cuda"))

        def call(_: int, backward: bool, total: int = total, sequences: Sequences = sequences) -> Call:
            heads = noise(total, HEADS + 2 * KV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            out, lse = attention_forward(*heads, sequences, None)
            grad = torch.randn_like(out)
            if backward:
                return lambda: attention_backward(grad, heads, out, lse, sequences, None)
            return lambda: attention_forward(*heads, sequences, None)

        size = total * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
        bench.bench(f"attention_forward {shape}", functools.partial(call, backward=False), size)
        bench.bench(f"attention_backward {shape}", functools.partial(call, backward=True), 2 * size)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        bench.bench(f"  in a fixed order {shape}", functools.partial(call, backward=True), 2 * size)
        torch.use_deterministic_algorithms(False)


# One entry a kernel file, one for all that training alone uses. An entry calls
# ``bench.bench(name, make_call, bytes)`` for each of its shapes.
ENTRIES: dict[str, Callable[[Bench], None]] = {
    "norm": norm,
    "activation": activation,
    "rope_store": rope_store,
    "lora": lora,
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "training": training,
    "attention_training": attention_training,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--repeats", type=int, default=50, help="replays of each graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks/kernels.py needs a CUDA device", file=sys.stderr)
        return 1
    table = Bench(args.repeats)
    for entry in (copy, *(ENTRIES[name] for name in args.only)):
        entry(table)
        torch.cuda.empty_cache()
    write_csv(RESULTS, [row | {"versions": versions()} for row in table.rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
