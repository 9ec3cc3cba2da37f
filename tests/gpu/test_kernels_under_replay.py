"""Every kernel captured once in a CUDA graph, then replayed on other inputs at the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor

from fineinfer.kernels import (
    activation,
    attention_decode,
    attention_prefill,
    few_rows_linear,
    lora,
    norm,
    reference,
    reference_sampling,
    rope_store,
    sampling,
    slot_move,
    token_tables,
)

from ..unit.test_kernel_token_tables import enter_rows_plainly, enter_tokens_plainly, random_fields, random_tables

pytestmark = pytest.mark.gpu
EPS = 1e-5
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
NUM_SEQUENCES, MAX_LENGTH, NUM_SLOTS = 9, 700, 6400
RANKS, MAX_RANK, COLUMNS = (0, 4, 16, 17, 32), 32, (0, 128, 160, 200)
# a few roundings of values up to 10 or so, or fp32 sums of up to 700 products
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP32, ALL = (torch.float32,), (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """An operation: inputs of the same shapes each time, the kernels that run on them, and its twin.

    ``draw`` makes fp32 inputs on the CPU; there the twin computes, from inputs as rounded, what ``run`` returns.
    """

    draw: Callable[[Generator], tuple[Tensor, ...]]
    run: Callable[..., tuple[Tensor, ...]]
    twin: Callable[..., tuple[Tensor, ...]]


def randn(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def whole(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.int32)


def some(g: Generator, count: int, among: int) -> Tensor:
    return torch.randperm(among, generator=g)[:count].int()


def attention_inputs(g: Generator, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fused queries, keys and values; a pool; slots of every sequence."""
    table = some(g, NUM_SEQUENCES * MAX_LENGTH, NUM_SLOTS).view(NUM_SEQUENCES, MAX_LENGTH)
    kv = randn(g, NUM_SLOTS, 2, KV_HEADS, HEAD_DIM)
    return randn(g, num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM), kv, table


def norms(_dtype: torch.dtype) -> Case:
    def apply(module: Any, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        first = module.rms_norm(x, weight, EPS)
        result = module.add_rms_norm(x, delta, weight, EPS)
        return (first, *result) if isinstance(result, tuple) else (first, result, x)  # the kernel adds in place

    def draw(g: Generator) -> tuple[Tensor, ...]:
        return randn(g, 7, 576), randn(g, 7, 576), randn(g, 576)

    return Case(draw, partial(apply, norm), partial(apply, reference))


def silu_and_mul(_dtype: torch.dtype) -> Case:
    def apply(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        return (module.silu_and_mul(x),)

    return Case(lambda g: (randn(g, 7, 3000),), partial(apply, activation), partial(apply, reference))


def few_rows(_dtype: torch.dtype, num_rows: int) -> Case:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return few_rows_linear.few_rows_linear(x, weight, bias), few_rows_linear.few_rows_gated(x, weight)

    def twin(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return x @ weight.T + bias, reference.silu_and_mul(x @ weight.T)

    return Case(lambda g: (randn(g, num_rows, 576), randn(g, 200, 576) / 24, randn(g, 200)), run, twin)


def rope(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        qkv, kv, _ = attention_inputs(g, 9)
        slots = some(g, 9, NUM_SLOTS)
        slots[int(whole(g, 3, 9)) :] = -1  # padding behind the rows
        head_norms = (1 + randn(g, HEAD_DIM) / 8 for _ in range(2))
        return qkv, randn(g, 9, HEAD_DIM).clamp(-1, 1), randn(g, 9, HEAD_DIM).clamp(-1, 1), slots, kv, *head_norms

    def apply(module: Any, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor, *head_norms: Tensor):
        module.rope_and_store(qkv, cos, sin, slots, kv, HEADS, *head_norms, EPS)
        return torch.where(slots[:, None, None] >= 0, qkv, 0.0), kv  # queries of padding may be anything

    return Case(draw, partial(apply, rope_store), partial(apply, reference))


def decode(_dtype: torch.dtype, window: int | None = None) -> Case:
    batch = 6

    def draw(g: Generator) -> tuple[Tensor, ...]:
        lengths = whole(g, 0, int(whole(g, 2, MAX_LENGTH + 1)), batch)
        lengths[int(whole(g, 0, batch))] = 0  # padding
        return *attention_inputs(g, batch), some(g, batch, NUM_SEQUENCES), lengths

    @cache
    def plan_on(device: torch.device) -> attention_decode.DecodePlan:
        return attention_decode.DecodePlan.allocate(batch + 2, HEADS, KV_HEADS, HEAD_DIM, window, device)

    def run(qkv: Tensor, kv: Tensor, table: Tensor, rows: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        plan, q = plan_on(qkv.device), qkv[:, :HEADS]
        attention_decode.plan(lengths, plan)
        layers = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2)]  # of one plan
        return tuple(attention_decode.attention_decode(q, kv, table, rows, lengths, plan, out) for out in layers)

    def twin(qkv: Tensor, kv: Tensor, table: Tensor, rows: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        out, live = torch.full((batch, HEADS, HEAD_DIM), torch.nan), lengths > 0  # padding stays as it was
        slots = table[rows.long()[live]]
        out[live] = reference.attention_decode(qkv[live, :HEADS], kv, slots, lengths[live], window)
        return out, out

    return Case(draw, run, twin)


def prefill(dtype: torch.dtype, window: int | None = None) -> Case:
    num_rows, most_spans, tile_rows = 300, 4, attention_prefill.block_rows(dtype)

    def draw(g: Generator) -> tuple[Tensor, ...]:
        spans, first = [], 2
        for row in some(g, int(whole(g, 1, most_spans + 1)), NUM_SEQUENCES).tolist():
            length, start = int(whole(g, 2, 74)), int(whole(g, 0, MAX_LENGTH - 74))
            spans.append((first, length, start, row))
            first += length
        tiles = torch.zeros(num_rows // tile_rows + most_spans, 4, dtype=torch.int32)  # the last ones are padding
        cut = attention_prefill.tiles(spans, tile_rows)
        tiles[: len(cut)] = torch.from_numpy(cut)
        return *attention_inputs(g, num_rows), tiles

    def run(qkv: Tensor, kv: Tensor, table: Tensor, tiles: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty(num_rows, HEADS, HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
        return (attention_prefill.attention_prefill(qkv[:, :HEADS], kv, table, tiles, out, window),)

    def twin(qkv: Tensor, kv: Tensor, table: Tensor, tiles: Tensor) -> tuple[Tensor, ...]:
        out = torch.full((num_rows, HEADS, HEAD_DIM), torch.nan)  # rows of no tile stay as they were
        for first, length, start, row in tiles[tiles[:, 1] > 0].tolist():
            q, slots = qkv[first : first + length, :HEADS], table[row, : start + length].long()
            out[first : first + length] = reference.attention_prefill(q, kv, slots, start, window)
        return (out,)

    return Case(draw, run, twin)


def choices(_dtype: torch.dtype) -> Case:
    """Greedy ones and draws; a NaN wanders through the rows."""

    def draw(g: Generator) -> tuple[Tensor, ...]:
        logits = 3 * randn(g, 6, 5000)
        logits[int(whole(g, 0, 6)), int(whole(g, 0, 5000))] = torch.nan
        temperature = torch.tensor([0.0, 0.7, 1.0, 1.5, 0.9, 1.1])[some(g, 6, 6).long()]
        top_p, min_p = torch.rand(2, 6, generator=g)
        keys = whole(g, -(2**31), 2**31, 6, 2)
        return logits, temperature, whole(g, 0, 60, 6), (0.5 + top_p).clamp(max=1.0), min_p / 20, keys

    def apply(module: Any, logits: Tensor, temperature: Tensor, top_k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        top_p, min_p, keys = rest
        results = torch.empty(4, 6, dtype=torch.int32, device=logits.device)
        module.argmax(logits, results[0], results[1])
        reals = (top_p.float(), min_p.float())
        module.sample(logits, temperature.float(), top_k, *reals, keys, results[2], results[3])
        return (results,)

    return Case(draw, partial(apply, sampling), partial(apply, reference_sampling))


def adjustments(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        total, places = whole(g, 1, 131, 6), some(g, 300, 6 * 576)
        prompt, factors = (
            (total * torch.rand(6, generator=g)).int(),
            (0.5 + torch.rand(6, generator=g), *randn(g, 2, 6)),
        )
        edits = (places // 576, places % 576, randn(g, 300))
        return randn(g, 6, 576), whole(g, 0, 576, 7, 130), some(g, 6, 7), prompt, total, *factors, *edits

    def apply(module: Any, logits: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        module.penalize(logits, *rest[:7])
        module.add_at(logits, *rest[7:])
        return (logits,)

    return Case(draw, partial(apply, sampling), partial(apply, reference_sampling))


def adapters(_dtype: torch.dtype, block_m: int) -> Case:
    """Other segments, and other adapters of other ranks in the slots."""
    num_rows, width, modules, slots = 90, 576, len(COLUMNS) - 1, 4

    def draw(g: Generator) -> tuple[Tensor, ...]:
        ranks = torch.tensor(RANKS, dtype=torch.int32)[whole(g, 0, len(RANKS), slots, modules).long()]
        is_rank = torch.arange(MAX_RANK) < ranks[..., None]  # [slots, modules, MAX_RANK]
        a = randn(g, slots, modules * MAX_RANK, width) * is_rank.flatten(1)[..., None] / width**0.5
        module_of = torch.repeat_interleave(torch.arange(modules), torch.tensor(COLUMNS).diff())
        b = randn(g, slots, MAX_RANK, COLUMNS[-1]) * is_rank[:, module_of].transpose(1, 2) / MAX_RANK**0.5
        bounds = whole(g, 0, num_rows + 1, 2 * slots).sort().values.tolist()
        segments = zip(range(slots), bounds[::2], bounds[1::2], strict=True)
        cut = [(i, min(block_m, end - i), slot) for slot, start, end in segments for i in range(start, end, block_m)]
        tiles = torch.zeros(num_rows // block_m + slots, 3, dtype=torch.int32)  # the last ones are padding
        tiles[: len(cut)] = torch.tensor(cut, dtype=torch.int32).view(-1, 3)
        return randn(g, num_rows, width), randn(g, num_rows, COLUMNS[-1]), a, b, randn(g, slots, modules), ranks, tiles

    def run(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scales: Tensor, ranks: Tensor, tiles: Tensor):
        shrunk = lora.lora_shrink(x, a, ranks, tiles, MAX_RANK, block_m)
        return (lora.lora_expand(shrunk, b, scales.float(), ranks, tiles, MAX_RANK, block_m, COLUMNS, y),)

    def twin(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scales: Tensor, _ranks: Tensor, tiles: Tensor):
        segments = [(first, first + count, slot) for first, count, slot in tiles.tolist()]
        for module, first in enumerate(COLUMNS[:-1]):
            own = slice(first, COLUMNS[module + 1])
            own_a, own_b = a[:, module * MAX_RANK : (module + 1) * MAX_RANK], b[..., own].transpose(1, 2)
            reference.lora_grouped(x, y[:, own], segments, own_a, own_b, scales[:, module].tolist())
        return (y,)

    return Case(draw, run, twin)


def draw_part(g: Generator, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Values and slots of an ``AdapterPart``."""
    return randn(g, num_rows, width), whole(g, -1, 3, num_rows)


def add_part(y: Tensor, values: Tensor, row_slots: Tensor) -> Tensor:
    return y + values * (row_slots >= 0)[:, None]


def norm_of_part(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        return randn(g, 7, 576), randn(g, 7, 576), randn(g, 576), *draw_part(g, 7, 576)

    def run(x: Tensor, delta: Tensor, weight: Tensor, *part: Tensor) -> tuple[Tensor, ...]:
        return norm.add_rms_norm(x, delta, weight, EPS, part=lora.AdapterPart(*part)), x

    def twin(x: Tensor, delta: Tensor, weight: Tensor, *part: Tensor) -> tuple[Tensor, ...]:
        return reference.add_rms_norm(x, add_part(delta, *part), weight, EPS)

    return Case(draw, run, twin)


def activation_of_part(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        return randn(g, 7, 3000), *draw_part(g, 7, 3000)

    def run(gate_up: Tensor, *part: Tensor) -> tuple[Tensor, ...]:
        return (activation.silu_and_mul(gate_up, part=lora.AdapterPart(*part)),)

    return Case(draw, run, lambda gate_up, *part: (reference.silu_and_mul(add_part(gate_up, *part)),))


def rope_of_part(dtype: torch.dtype) -> Case:
    plain = rope(dtype)

    def draw(g: Generator) -> tuple[Tensor, ...]:
        return *plain.draw(g), *draw_part(g, 9, (HEADS + 2 * KV_HEADS) * HEAD_DIM)

    def run(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *head_norms, values, row_slots = rest
        part = lora.AdapterPart(values, row_slots)
        rope_store.rope_and_store(qkv, cos, sin, slots, kv, HEADS, *head_norms, EPS, part)
        return torch.where(slots[:, None, None] >= 0, qkv[:, :HEADS], 0.0), kv

    def twin(qkv: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *others, values, row_slots = rest
        queries, kv = plain.twin(add_part(qkv.flatten(1), values, row_slots).view_as(qkv), *others)
        return queries[:, :HEADS], kv

    return Case(draw, run, twin)


def tables(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        sample_rows = some(g, 40, 150)
        sample_rows[int(whole(g, 1, 40)) :] = -1
        return random_fields(150, g), random_tables(g), whole(g, 0, 50_000, 40), sample_rows

    def apply(rows: Any, tokens: Any, fields: Tensor, both: Tensor, sampled: Tensor, sample_rows: Tensor):
        ids = torch.empty(150, dtype=torch.int32, device=fields.device)
        rows(fields, both[0], both[1], ids)
        tokens(sampled, sample_rows, fields, both[1])
        return ids, both

    run = partial(apply, token_tables.enter_rows, token_tables.enter_tokens)
    return Case(draw, run, partial(apply, enter_rows_plainly, enter_tokens_plainly))


def moves(_dtype: torch.dtype) -> Case:
    def draw(g: Generator) -> tuple[Tensor, ...]:
        order = torch.randperm(NUM_SLOTS, generator=g)
        return attention_inputs(g, 1)[1], order[:50], order[50:100]

    def apply(module: Any, kv: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, ...]:
        module.move_slots(kv, src, dst)
        return (kv,)

    return Case(draw, partial(apply, slot_move), partial(apply, reference))


CASES: list[tuple[Callable[[torch.dtype], Case], tuple[torch.dtype, ...]]] = [
    *((make, ALL) for make in (norms, silu_and_mul, rope, decode, prefill, choices, moves)),
    *((partial(make, window=100), ALL) for make in (decode, prefill)),
    *((partial(adapters, block_m=block_m), ALL) for block_m in lora.BLOCK_ROWS),
    *((make, ALL) for make in (norm_of_part, activation_of_part, rope_of_part)),
    *((partial(few_rows, num_rows=num_rows), (torch.float16, torch.bfloat16)) for num_rows in (1, 2, 7)),
    (adjustments, FP32),
    (tables, FP32),
]


def name_of(value: object) -> str:
    if isinstance(value, partial):
        return f"{value.func.__name__}-" + "-".join(f"{key}{item}" for key, item in value.keywords.items())
    return getattr(value, "__name__", str(value).removeprefix("torch."))


@pytest.mark.parametrize(("make", "dtype"), [(make, dtype) for make, dtypes in CASES for dtype in dtypes], ids=name_of)
def test_a_replay_computes_what_the_twin_does_on_the_inputs_as_they_are_now(make, dtype: torch.dtype) -> None:
    case, g = make(dtype), Generator().manual_seed(0)
    inputs = [item.to("cuda", dtype if item.is_floating_point() else item.dtype) for item in case.draw(g)]
    case.run(*inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run(*inputs)
    for _ in range(3):
        for place, value in zip(inputs, case.draw(g), strict=True):
            place.copy_(value)
        for result in results:
            if not any(result is item for item in inputs):
                result.fill_(torch.nan if result.is_floating_point() else -7)
        expected = case.twin(*(item.cpu().float() if item.is_floating_point() else item.cpu() for item in inputs))
        graph.replay()
        for ours, theirs in zip(results, expected, strict=True):
            ours = ours.cpu().float() if ours.is_floating_point() else ours.cpu()
            tolerance = TOLERANCE[dtype] if ours.is_floating_point() else 0.0
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
