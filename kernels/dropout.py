"""Dropout by a hash of each element's place, in one pass: the mask is never stored and can be made again anywhere.

Twin: ``reference_training.dropout``, equal to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, next_power_of_2
from fineinfer.kernels.noise import mixed
from fineinfer.kernels.reference_noise import HASH_STEPS
from fineinfer.kernels.reference_training import dropout_threshold

_BLOCK = 1024
_FIRST, _SECOND = (tl.constexpr(factor) for factor in HASH_STEPS)


@triton.jit(do_not_specialize=["salt", "threshold"])  # type: ignore[untyped-decorator]
def _dropout_kernel(
    x_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    salt: tl.tensor,
    threshold: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // NUM_BLOCKS).to(tl.int64)
    column = (program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    key = tl.load(keys_ptr + row + 0 * column, mask=inside, other=0)  # [BLOCK] int32, the same everywhere
    bits = mixed((key ^ salt).to(tl.uint32, bitcast=True)) ^ mixed(column.to(tl.uint32, bitcast=True))
    bits *= _FIRST
    bits ^= bits >> 15
    bits *= _SECOND
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    kept = bits.to(tl.int32, bitcast=True) >= threshold
    tl.store(out_ptr + row * WIDTH + column, tl.where(kept, x, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


def dropout(x: torch.Tensor, keys: torch.Tensor, salt: int, rate: float) -> torch.Tensor:
    """A copy of ``x`` in which a share ``rate`` of the elements is zero; see the twin.

    Args:
        x: [num_rows, width]; rows may be strided.
        keys: [num_rows] int32, contiguous.
        salt: Which mask of those rows.
        rate: 0 to 1.

    Returns:
        [num_rows, width], contiguous.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_rows, width = x.shape
    if keys.shape != (num_rows,) or keys.dtype != torch.int32 or not keys.is_contiguous():
        raise ValueError(f"keys {list(keys.shape)} {keys.dtype} must be [{num_rows}] int32, contiguous")
    if width and x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} must have its columns next to each other")
    out = x.new_empty(num_rows, width)
    if out.numel() == 0:
        return out
    block = min(_BLOCK, next_power_of_2(width))
    num_blocks = cdiv(width, block)
    _dropout_kernel[(num_rows * num_blocks,)](
        x, keys, out, x.stride(0), salt, dropout_threshold(rate), width, num_blocks, block, num_warps=4
    )
    return out
