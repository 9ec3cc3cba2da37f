"""``y = x @ weight.T + bias`` for a handful of rows, where reading the weight once is all the work.

Up to ``MAX_ROWS`` rows are padded to one tensor-core tile; each program streams a band of the weight's rows with many
loads in flight. Libraries choose tiles for arithmetic and leave a quarter of the bandwidth of an H100 unused here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fineinfer.kernels.launch import dependent, follow

MAX_ROWS = 16  # one tensor-core tile
_LINE = 64  # values of a cache line
_PREFETCHED = 1024  # values of each weight row asked for before the rows to multiply are there
_BLOCK_OUT, _BLOCK_IN, _NUM_WARPS, _NUM_STAGES = 32, 256, 4, 4


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Linear map of at most ``MAX_ROWS`` rows.

    Args:
        x: [num_rows, in_features] fp16 or bf16, contiguous.
        weight: [out_features, in_features], contiguous, of the same dtype.
        bias: [out_features] or None.

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
        _few_rows_kernel[(triton.cdiv(out_features, _BLOCK_OUT),)](
            x,
            weight,
            out if bias is None else bias,
            out,
            num_rows,
            out_features,
            in_features,
            HAS_BIAS=bias is not None,
            EVEN=in_features % _BLOCK_IN == 0,
            LINES=_PREFETCHED // _LINE if in_features >= _PREFETCHED else 0,
            BLOCK_ROWS=MAX_ROWS,
            BLOCK_OUT=_BLOCK_OUT,
            BLOCK_IN=_BLOCK_IN,
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
            **dependent(),
        )
    return out


def device_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, by the kernel above where that is faster; shapes as there, any number of rows, any dtype."""
    if x.shape[0] <= MAX_ROWS and x.dtype != torch.float32 and x.is_contiguous():
        return few_rows_linear(x, weight, bias)
    return F.linear(x, weight, bias)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    row_exists, column_exists = row < num_rows, column < out_features
    band_at = weight + column[:, None].to(tl.int64) * in_features  # [out, 1]
    if PDL and LINES > 0:  # the weight does not depend on the kernel before: fetch its beginning meanwhile
        lines = weight + tl.minimum(column, out_features - 1)[:, None].to(tl.int64) * in_features
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines + 64 * tl.arange(0, LINES)[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    follow(PDL)
    x_at = x + row[:, None] * in_features + inner[None, :]  # [rows, in]
    weight_at = band_at + inner[None, :]  # [out, in]
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, in_features, BLOCK_IN):
        x_mask, weight_mask = row_exists[:, None], column_exists[:, None]
        if not EVEN:
            x_mask = x_mask & (inner[None, :] < in_features - start)
            weight_mask = weight_mask & (inner[None, :] < in_features - start)
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        band = tl.load(weight_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        total = tl.dot(rows, tl.trans(band), total)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(out + row[:, None] * out_features + column[None, :], total.to(out.dtype.element_ty), mask=mask)
