"""The reference operations on a CUDA device equal themselves on the CPU."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.linear import linear
from fineinfer.model.rope import Rope, RopeSpec

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def cuda(request: pytest.FixtureRequest):
    """Moves a tensor to the device (floats in the dtype under test) and compares results with the fp32 CPU ones."""
    dtype = request.param

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda", dtype if x.is_floating_point() else x.dtype, copy=True)

    def check(ours: torch.Tensor, expected: torch.Tensor) -> None:
        assert ours.is_cuda
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(ours.cpu().float(), expected, atol=tolerance, rtol=tolerance)

    move.check = check
    return move


@pytest.mark.parametrize("window", [None, 5])
def test_attention_over_the_pool(cuda, window: int | None) -> None:
    pool, q = rand(300, 2, KV_HEADS, HEAD_DIM), rand(3, HEADS, HEAD_DIM, seed=1)
    table = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:90].view(3, 30)
    lengths = torch.tensor([30, 1, 17])
    on_device = cuda(pool)
    padded = reference.attention_decode(cuda(q), on_device, cuda(table), cuda(lengths), window)
    cuda.check(padded, reference.attention_decode(q, pool, table, lengths, window))
    each = [row[:length] for row, length in zip(table, lengths.tolist(), strict=True)]
    cuda.check(
        reference.attention_decode_each(cuda(q), on_device, [cuda(slots) for slots in each], window),
        reference.attention_decode_each(q, pool, each, window),
    )
    for start in (0, 14):
        q = rand(16, HEADS, HEAD_DIM, seed=2)
        slots = table[0, : start + 16]
        cuda.check(
            reference.attention_prefill(cuda(q), on_device, cuda(slots), start, window),
            reference.attention_prefill(q, pool, slots, start, window),
        )


@pytest.mark.parametrize("window", [None, 5])
def test_varlen_and_its_gradients(cuda, window: int | None) -> None:
    bounds = [0, 1, 40, 64]
    inputs = [rand(64, heads, HEAD_DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    upstream = rand(64, HEADS, HEAD_DIM, seed=9)
    results = []
    for move in (cuda, torch.clone):
        leaves = [move(x).requires_grad_() for x in inputs]
        out = reference.attention_varlen(*leaves, bounds, window)
        out.backward(move(upstream))
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for ours, expected in zip(*results, strict=True):
        cuda.check(ours, expected)


def test_pool_writes_lora_and_rows(cuda) -> None:
    pool, k, v = (
        rand(50, 2, KV_HEADS, HEAD_DIM),
        rand(4, KV_HEADS, HEAD_DIM, seed=1),
        rand(4, KV_HEADS, HEAD_DIM, seed=2),
    )
    slots, target = torch.tensor([3, 40, 7, 8]), torch.tensor([8, 3, 20, 21])
    on_device = cuda(pool)
    for where, move in ((on_device, cuda), (pool, torch.clone)):
        reference.store_kv(where, move(slots), move(k), move(v))
        reference.move_slots(where, move(slots), move(target))
    cuda.check(on_device, pool)
    x, y, a, b = rand(9, 64), rand(9, 32, seed=1), rand(2, 4, 64, seed=2) / 8, rand(2, 32, 4, seed=3) / 2
    segments, scales = [(0, 3, 1), (5, 9, 0)], [0.5, 2.0]
    ours = reference.lora_grouped(cuda(x), cuda(y), segments, cuda(a), cuda(b), scales)
    cuda.check(ours / 8, reference.lora_grouped(x, y.clone(), segments, a, b, scales) / 8)
    cuda.check(linear(cuda(x), cuda(b.view(-1, 64) / 8)), linear(x, b.view(-1, 64) / 8))
    spec = RopeSpec("dynamic", HEAD_DIM, 10000.0, 2.0, 16, 16)
    positions = torch.tensor([0, 5, 40])
    rows = Rope(spec, torch.float32, torch.device("cuda")).rows(positions.cuda(), (positions + 1).cuda())
    expected = Rope(spec, torch.float32, torch.device("cpu")).rows(positions, positions + 1)
    torch.testing.assert_close(rows.cos.cpu(), expected.cos, atol=1e-5, rtol=0)
