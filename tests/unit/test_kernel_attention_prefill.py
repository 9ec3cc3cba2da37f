"""Prefill attention kernel against its torch twin."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import attention_prefill as kernel
from fineinfer.kernels import reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def dtypes(device: torch.device) -> list[torch.dtype]:
    half = [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]
    return [torch.float32, *half]


def check(
    spans: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> None:
    """``spans``: (tokens before the chunk, rows of the chunk) of each sequence; rows between spans belong to nobody."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(sum(a + b for a, b in spans))
    count = sum(start + length for start, length in spans)
    pool = torch.full((count + 9, 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    order = torch.randperm(count + 9)[:count].to(device)
    pool[order] = torch.randn(count, 2, kv_heads, head_dim, device=device).to(dtype)
    table = torch.zeros(len(spans), max(a + b for a, b in spans), dtype=torch.int32, device=device)
    num_rows = sum(length + 1 for _, length in spans)
    q = torch.randn(num_rows, heads + 2, head_dim, device=device).to(dtype)[:, :heads]
    out = torch.full((num_rows, heads, head_dim), float("nan"), dtype=dtype, device=device)
    laid, first, used = [], 0, 0
    for index, (start, length) in enumerate(spans):
        table[index, : start + length] = order[used : used + start + length].to(torch.int32)
        laid.append((first, length, start, index))
        first, used = first + length + 1, used + start + length
    tiles = torch.from_numpy(kernel.tiles(laid, kernel.block_rows(dtype))).to(device)
    kernel.attention_prefill(q, pool, table, tiles, out, window)
    for first, length, start, index in laid:
        slots = table[index, : start + length].long()
        expected = reference.attention_prefill(q[first : first + length].float(), pool.float(), slots, start, window)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[first : first + length].float(), expected, atol=tolerance, rtol=tolerance)
        assert out[first + length].isnan().all()


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 80), (2, 2, 16), (8, 8, 128), (2, 1, 96)], ids=str)
def test_equals_the_twin(shape, kernel_device: torch.device) -> None:
    for dtype in dtypes(kernel_device):
        check([(0, 1), (0, 65), (130, 3), (63, 129)], shape, dtype, kernel_device)


@pytest.mark.parametrize("window", [1, 31, 64, 100, 1000])
def test_window(window: int, kernel_device: torch.device) -> None:
    check([(0, 150), (200, 70), (0, 1), (90, 2)], (2, 1, 32), torch.float32, kernel_device, window)


def test_tiles_cover_every_row_once_and_the_longest_come_first() -> None:
    tiles = kernel.tiles([(0, 300, 0, 5), (300, 1, 900, 6)], 128)
    assert tiles.tolist() == [[300, 1, 900, 6], [256, 44, 256, 5], [128, 128, 128, 5], [0, 128, 0, 5]]
    assert kernel.tiles([], 128).shape == (0, 4)


def test_no_tiles_and_wrong_shapes(kernel_device: torch.device) -> None:
    q, pool = torch.zeros(2, 4, 16, device=kernel_device), torch.zeros(3, 2, 2, 16, device=kernel_device)
    table = torch.zeros(1, 2, dtype=torch.int32, device=kernel_device)
    out = torch.full_like(q, 7.0)
    none = torch.zeros(0, 4, dtype=torch.int32, device=kernel_device)
    assert (kernel.attention_prefill(q, pool, table, none, out) == 7.0).all()
    with pytest.raises(ValueError, match="does not fit"):
        kernel.attention_prefill(q[:, :3], pool, table, none, out)
