"""The reference operations against naive loops, with gradients where they are trained."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fineinfer.kernels import linear as linear_module
from fineinfer.kernels import reference
from fineinfer.kernels.linear import MAX_FAST_ROWS, linear

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Head by head, query by query; the queries are the last rows of the sequence."""
    out, offset = torch.zeros_like(q), len(k) - len(q)
    for row in range(len(q)):
        position = offset + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys, values = (x[first : position + 1, head // (HEADS // KV_HEADS)] for x in (k, v))
            weights = torch.softmax(keys @ q[row, head] / math.sqrt(HEAD_DIM), dim=0)
            out[row, head] = weights @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("start", [0, 1, 6])
@pytest.mark.parametrize("contiguous", [False, True])
def test_prefill(window: int | None, start: int, contiguous: bool) -> None:
    length = start + 5
    slots = slice(3, 3 + length) if contiguous else torch.randperm(20)[:length]
    pool = torch.full((20, 2, KV_HEADS, HEAD_DIM), float("nan"), dtype=torch.float64)
    k, v = rand(length, KV_HEADS, HEAD_DIM, seed=1), rand(length, KV_HEADS, HEAD_DIM, seed=2)
    reference.store_kv(pool, slots, k, v)
    q = rand(5, HEADS, HEAD_DIM)
    expected = naive_attention(q, k, v, window)
    shared = reference.prefill_mask(5, start, window, q.device)
    for mask in (None, shared):
        torch.testing.assert_close(reference.attention_prefill(q, pool, slots, start, window, mask), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_decode_of_ragged_rows(window: int | None) -> None:
    lengths = [1, 7, 3, 12]
    pool = torch.full((40, 2, KV_HEADS, HEAD_DIM), float("nan"), dtype=torch.float64)
    q = rand(len(lengths), HEADS, HEAD_DIM)
    order = torch.randperm(28, generator=torch.Generator().manual_seed(0)) + 12
    table = torch.full((len(lengths), 13), 39)
    slots_of_rows, expected = [], []
    for row, length in enumerate(lengths):
        k, v = rand(length, KV_HEADS, HEAD_DIM, seed=10 + row), rand(length, KV_HEADS, HEAD_DIM, seed=20 + row)
        slots = slice(0, 12) if length == 12 else order[sum(lengths[:row]) : sum(lengths[:row]) + length]
        reference.store_kv(pool, slots, k, v)
        table[row, :length] = torch.arange(40)[slots]
        slots_of_rows.append(slots)
        expected.append(naive_attention(q[row : row + 1], k, v, window))
    expected = torch.cat(expected)
    torch.testing.assert_close(reference.attention_decode_each(q, pool, slots_of_rows, window), expected)
    padded = reference.attention_decode(q, pool, table, torch.tensor(lengths), window)
    torch.testing.assert_close(padded, expected)
    one = reference.attention_decode_one(q[1], pool, slots_of_rows[1], window)
    torch.testing.assert_close(one, expected[1])


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_and_its_gradients(window: int | None) -> None:
    bounds = [0, 1, 6, 10]
    inputs = [rand(10, heads, HEAD_DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    upstream = rand(10, HEADS, HEAD_DIM, seed=9)
    gradients = []
    for attention in ("ours", "naive"):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        if attention == "ours":
            out = reference.attention_varlen(q, k, v, bounds, window)
        else:
            parts = [_differentiable(q[a:b], k[a:b], v[a:b], window) for a, b in itertools.pairwise(bounds)]
            out = torch.cat(parts)
            torch.testing.assert_close(
                out[1:6].detach(), naive_attention(*(x[1:6] for x in inputs), window), rtol=1e-9, atol=1e-9
            )
        out.backward(upstream)
        gradients.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def _differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= (window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def test_rope_turns_pairs_of_halves() -> None:
    x, angle = rand(3, 2, HEAD_DIM), rand(3, HEAD_DIM // 2, seed=1)
    cos, sin = (torch.cat((f(angle), f(angle)), dim=-1) for f in (torch.cos, torch.sin))
    turned = (
        torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(reference.apply_rope(x, cos, sin), expected)


def test_rms_norm_of_half_types_is_computed_wide() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square overflows fp16
    out = reference.rms_norm(x, torch.full((8,), 2.0, dtype=torch.float16), 1e-6)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.full_like(x, 2.0))


def test_silu_and_mul_takes_the_gate_first() -> None:
    x = rand(4, 6)
    torch.testing.assert_close(reference.silu_and_mul(x), F.silu(x[:, :3]) * x[:, 3:])


def test_lora_touches_its_segments_only() -> None:
    x, base = rand(7, 5), rand(7, 6, seed=1)
    a, b, scales = rand(3, 2, 5, seed=2), rand(3, 6, 2, seed=3), [9.0, 0.5, 2.0]
    y = base.clone()
    wide = torch.cat((y, y), dim=1)
    reference.lora_grouped(x, wide[:, 6:], [(0, 2, 2), (4, 7, 1)], a, b, scales)  # a column slice, as in fused qkv
    expected = base.clone()
    for rows, slot in ((range(2), 2), (range(4, 7), 1)):
        for row in rows:
            expected[row] += scales[slot] * b[slot] @ (a[slot] @ x[row])
    torch.testing.assert_close(wide[:, 6:], expected)
    torch.testing.assert_close(wide[:, :6], base)


def test_moves_may_overlap() -> None:
    pool = rand(6, 2, KV_HEADS, HEAD_DIM)
    before = pool.clone()
    reference.move_slots(pool, torch.tensor([3, 4, 5]), torch.tensor([2, 3, 4]))
    assert torch.equal(pool[[0, 1, 2, 3, 4, 5]], before[[0, 1, 3, 4, 5, 5]])


@pytest.mark.parametrize("rows", [1, 5, MAX_FAST_ROWS, MAX_FAST_ROWS + 1])
def test_linear_equals_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "onednn_linear_pays", lambda: True)
    x, weight, bias = rand(rows, 16).float(), rand(24, 16, seed=1).float(), rand(24, seed=2).float()
    for b in (None, bias):
        torch.testing.assert_close(linear(x, weight, b), F.linear(x, weight, b))
    stripe = rand(rows, 40).float()[:, 8:24]  # rows that are not packed
    torch.testing.assert_close(linear(stripe, weight, bias), F.linear(stripe, weight, bias))


def test_linear_builds_a_graph_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "onednn_linear_pays", lambda: True)
    x = rand(2, 16).float().requires_grad_()
    weight = rand(3, 16, seed=1).float()
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1))
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
