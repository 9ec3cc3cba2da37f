"""``y = x @ weight.T + bias`` for a handful of rows, where reading the weight once is all the work.

Up to ``MAX_ROWS`` rows are padded to one tensor-core tile; each program streams a band of the weight's rows with many
loads in flight. Libraries choose tiles for arithmetic and leave a quarter of the bandwidth of an H100 unused here.
Not launched ahead as the small kernels are: its early programs, waiting, took the place of working ones (a step of an
8B model with one row 6.46 instead of 5.97 ms).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fineinfer.kernels.launch import prefetch_last, prefetchable_bytes

MAX_ROWS = 16  # one tensor-core tile
_BLOCK_OUT, _BLOCK_IN, _NUM_WARPS, _NUM_STAGES = 32, 256, 4, 4


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    upcoming: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear map of at most ``MAX_ROWS`` rows.

    Args:
        x: [num_rows, in_features] fp16 or bf16, contiguous.
        weight: [out_features, in_features], contiguous, of the same dtype.
        bias: [out_features] or None.
        upcoming: What the next product reads first, brought into the L2 cache while this one ends; None for nothing.

    Returns:
        [num_rows, out_features], accumulated in fp32 and rounded once.

    Raises:
        ValueError: Too many rows, or tensors that do not fit each other.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    if num_rows > MAX_ROWS or weight.shape[1] != in_features or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype} by a weight {tuple(weight.shape)} of {weight.dtype}")
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows:
        num_upcoming = prefetchable_bytes(upcoming)
        _few_rows_kernel[(triton.cdiv(out_features, _BLOCK_OUT),)](
            x,
            weight,
            out if bias is None else bias,
            upcoming if num_upcoming else out,
            out,
            num_rows,
            out_features,
            in_features,
            num_upcoming,
            PREFETCH=num_upcoming > 0,
            THREADS=32 * _NUM_WARPS,
            HAS_BIAS=bias is not None,
            EVEN=in_features % _BLOCK_IN == 0,
            BLOCK_ROWS=MAX_ROWS,
            BLOCK_OUT=_BLOCK_OUT,
            BLOCK_IN=_BLOCK_IN,
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
        )
    return out


def few_rows_gated(x: torch.Tensor, weight: torch.Tensor, upcoming: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` of at most ``MAX_ROWS`` rows in one launch.

    Args:
        x: [num_rows, in_features] fp16 or bf16, contiguous.
        weight: [2 * intermediate, in_features], the gate's rows first, contiguous, of the same dtype.
        upcoming: As for ``few_rows_linear``.

    Returns:
        [num_rows, intermediate]; both products are rounded before they meet, as one after the other would be.

    Raises:
        ValueError: Too many rows, or tensors that do not fit each other.
    """
    num_rows, in_features = x.shape
    intermediate = weight.shape[0] // 2
    if num_rows > MAX_ROWS or weight.shape != (2 * intermediate, in_features) or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype} by a weight {tuple(weight.shape)} of {weight.dtype}")
    out = torch.empty(num_rows, intermediate, dtype=x.dtype, device=x.device)
    if num_rows:
        num_upcoming = prefetchable_bytes(upcoming)
        _few_rows_gated_kernel[(triton.cdiv(intermediate, _BLOCK_OUT // 2),)](
            x,
            weight,
            upcoming if num_upcoming else out,
            out,
            num_rows,
            intermediate,
            in_features,
            num_upcoming,
            PREFETCH=num_upcoming > 0,
            THREADS=32 * _NUM_WARPS,
            EVEN=in_features % _BLOCK_IN == 0,
            BLOCK_ROWS=MAX_ROWS,
            BLOCK_OUT=_BLOCK_OUT // 2,
            BLOCK_IN=_BLOCK_IN,
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
        )
    return out


def has_few_rows(x: torch.Tensor) -> bool:
    """Whether the kernels of this file serve ``x`` and are faster than a library's."""
    return x.shape[0] <= MAX_ROWS and x.dtype != torch.float32 and x.is_contiguous()


def device_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, upcoming: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear``, by ``few_rows_linear`` where that is faster; arguments as there, any number of rows, any dtype."""
    return few_rows_linear(x, weight, bias, upcoming) if has_few_rows(x) else F.linear(x, weight, bias)


@triton.jit(do_not_specialize=["num_rows", "num_upcoming"])  # type: ignore[untyped-decorator]
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    upcoming,
    out,
    num_rows,
    out_features,
    in_features,
    num_upcoming,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    row_exists, column_exists = row < num_rows, column < out_features
    x_at = x + row[:, None] * in_features + inner[None, :]  # [rows, in]
    weight_at = weight + column[:, None].to(tl.int64) * in_features + inner[None, :]  # [out, in]
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, in_features, BLOCK_IN):
        x_mask, weight_mask = row_exists[:, None], column_exists[:, None]
        if not EVEN:
            x_mask = x_mask & (inner[None, :] < in_features - start)
            weight_mask = weight_mask & (inner[None, :] < in_features - start)
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        band = tl.load(weight_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        total = tl.dot(rows, tl.trans(band), total)
    if PREFETCH:
        prefetch_last(upcoming, num_upcoming, THREADS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(out + row[:, None] * out_features + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_upcoming"])  # type: ignore[untyped-decorator]
def _few_rows_gated_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    upcoming,
    out,
    num_rows,
    intermediate,
    in_features,
    num_upcoming,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    row_exists, column_exists = row < num_rows, column < intermediate
    x_at = x + row[:, None] * in_features + inner[None, :]  # [rows, in]
    gate_at = weight + column[:, None].to(tl.int64) * in_features + inner[None, :]  # [out, in]
    up_at = gate_at + intermediate.to(tl.int64) * in_features
    gate = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, in_features, BLOCK_IN):
        x_mask, weight_mask = row_exists[:, None], column_exists[:, None]
        if not EVEN:
            x_mask = x_mask & (inner[None, :] < in_features - start)
            weight_mask = weight_mask & (inner[None, :] < in_features - start)
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        gate_band = tl.load(gate_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        up_band = tl.load(up_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(rows, tl.trans(gate_band), gate)
        up = tl.dot(rows, tl.trans(up_band), up)
    if PREFETCH:
        prefetch_last(upcoming, num_upcoming, THREADS)
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(
        out + row[:, None] * intermediate + column[None, :], (gate / (1.0 + tl.exp(-gate)) * up).to(dtype), mask=mask
    )
