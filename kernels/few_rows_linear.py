"""``y = x @ weight.T + bias`` for a handful of rows, where reading the weight once is all the work.

Up to ``MAX_ROWS`` rows are padded to one tensor-core tile; each program streams a band of the weight's rows with many
loads in flight. A single row is multiplied without tensor cores by many more programs, each with two rows of the weight
in wide loads: 2.9 instead of 2.7 TB/s over a layer of 8B on an H100 (two rows that way: 7.3 instead of 5.9 ms a step).
Libraries choose tiles for arithmetic and stay below both.
Not launched ahead as the small kernels are: its early programs, waiting, took the place of working ones (a step of an
8B model with one row 6.46 instead of 5.97 ms). Asking for the next weights at a kernel's end (bulk prefetch into the L2
cache) gained nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, dependent
from fineinfer.kernels.linear import wide_linear

MAX_ROWS = 16  # one tensor-core tile
_BLOCK_OUT, _BLOCK_IN, _NUM_WARPS, _NUM_STAGES = 32, 256, 4, 4
_GATED_BLOCK_OUT, _GATED_NUM_WARPS, _GATED_NUM_STAGES = 32, 8, 3  # of gate and of up each
_WIDE_BLOCK_OUT, _WIDE_BLOCK_IN, _WIDE_NUM_WARPS = 2, 2048, 4  # one row; gate and up have a row of each


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear map of at most ``MAX_ROWS`` rows.

    Args:
        x: [num_rows, in_features] fp16 or bf16, contiguous.
        weight: [out_features, in_features], contiguous, of the same dtype.
        bias: [out_features] or None.
        out_dtype: fp32, or None for ``x``'s.
        out: [num_rows, out_features], contiguous, which receives the result in its own dtype; None for a new tensor.

    Returns:
        [num_rows, out_features], accumulated in fp32 and rounded once.

    Raises:
        ValueError: Too many rows, or tensors that do not fit each other.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    return _launch(x, weight, bias, out)


def few_rows_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` of at most ``MAX_ROWS`` rows in one launch.

    Args:
        x: [num_rows, in_features] fp16 or bf16, contiguous.
        weight: [2 * intermediate, in_features], the gate's rows first, contiguous, of the same dtype.

    Returns:
        [num_rows, intermediate]; both products are rounded before they meet, as one after the other would be.

    Raises:
        ValueError: Too many rows, or tensors that do not fit each other.
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    return _launch(x, weight, None, out)


def has_few_rows(x: torch.Tensor) -> bool:
    """Whether the kernels of this file serve ``x`` and are faster than a library's."""
    return x.shape[0] <= MAX_ROWS and x.dtype != torch.float32 and x.is_contiguous()


def device_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, by ``few_rows_linear`` where that is faster; shapes as there, any number of rows, any dtype."""
    return few_rows_linear(x, weight, bias) if has_few_rows(x) else F.linear(x, weight, bias)


def device_wide_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear.wide_linear``, by ``few_rows_linear`` where that is faster."""
    if has_few_rows(x):
        return few_rows_linear(x, weight, bias, torch.float32, out)
    return wide_linear(x, weight, bias, out)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Either map; it is gated when the output has half as many columns as the weight rows."""
    (num_rows, in_features), num_columns = x.shape, out.shape[1]
    gated = weight.shape[0] != num_columns
    fits = weight.shape == ((2 if gated else 1) * num_columns, in_features) and weight.dtype == x.dtype
    if num_rows > MAX_ROWS or not fits or out.shape[0] != num_rows or not out.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype} by a weight {tuple(weight.shape)} of {weight.dtype}")
    tensors = x, weight, out if bias is None else bias, out
    if num_rows > 1:
        block_out = _GATED_BLOCK_OUT if gated else _BLOCK_OUT
        _tile_kernel[(cdiv(num_columns, block_out),)](
            *tensors,
            num_rows,
            num_columns,
            in_features,
            HAS_BIAS=bias is not None,
            GATED=gated,
            EVEN=in_features % _BLOCK_IN == 0,
            BLOCK_ROWS=MAX_ROWS,
            BLOCK_OUT=block_out,
            BLOCK_IN=_BLOCK_IN,
            num_warps=_GATED_NUM_WARPS if gated else _NUM_WARPS,
            num_stages=_GATED_NUM_STAGES if gated else _NUM_STAGES,
        )
    elif num_rows:
        block_out = _WIDE_BLOCK_OUT // (2 if gated else 1)
        _wide_kernel[(cdiv(num_columns, block_out),)](
            *tensors,
            num_columns,
            in_features,
            HAS_BIAS=bias is not None,
            GATED=gated,
            EVEN=in_features % _WIDE_BLOCK_IN == 0,
            BLOCK_OUT=block_out,
            BLOCK_IN=_WIDE_BLOCK_IN,
            num_warps=_WIDE_NUM_WARPS,
            **dependent(),
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    in_features,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    row_exists, column_exists = row < num_rows, column < num_columns
    x_at = x + row[:, None] * in_features + inner[None, :]  # [rows, in]
    weight_at = weight + column[:, None].to(tl.int64) * in_features + inner[None, :]  # [out, in]
    up_at = weight + (column + num_columns)[:, None].to(tl.int64) * in_features + inner[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, in_features, BLOCK_IN):
        x_mask, weight_mask = row_exists[:, None], column_exists[:, None]
        if not EVEN:
            x_mask = x_mask & (inner[None, :] < in_features - start)
            weight_mask = weight_mask & (inner[None, :] < in_features - start)
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        band = tl.load(weight_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        total = tl.dot(rows, tl.trans(band), total)
        if GATED:
            up_band = tl.load(up_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(rows, tl.trans(up_band), up)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = _gate(total, up, out.dtype.element_ty)
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(out + row[:, None] * num_columns + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _wide_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_columns,
    in_features,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    exists = column < num_columns
    weight_at = weight + column[:, None].to(tl.int64) * in_features + inner[None, :]  # [out, in]
    up_at = weight + (column + num_columns)[:, None].to(tl.int64) * in_features + inner[None, :]
    in_row = inner < in_features
    mask = exists[:, None] & in_row[None, :]
    # weights are asked for before the row, which the kernel before may still be writing
    band = tl.load(weight_at, mask=mask, other=0.0, eviction_policy="evict_first")
    up_band = band
    if GATED:
        up_band = tl.load(up_at, mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(x + inner, mask=in_row, other=0.0).to(tl.float32)[None, :]
    products, up_products = row * band.to(tl.float32), row * up_band.to(tl.float32)
    for start in range(BLOCK_IN, in_features, BLOCK_IN):
        mask = exists[:, None] & (inner[None, :] >= 0)
        if EVEN:
            row = tl.load(x + start + inner).to(tl.float32)[None, :]
        else:
            in_row = inner < in_features - start
            row = tl.load(x + start + inner, mask=in_row, other=0.0).to(tl.float32)[None, :]
            mask = mask & in_row[None, :]
        band = tl.load(weight_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        products += row * band.to(tl.float32)
        if GATED:
            up_band = tl.load(up_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up_products += row * up_band.to(tl.float32)
    total = tl.sum(products, axis=1)  # [out]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    if GATED:
        total = _gate(total, tl.sum(up_products, axis=1), out.dtype.element_ty)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """``silu(gate) * up`` of rounded products, fp32."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up
