"""SiLU·mul of the gate and up projection in training, forward and backward, with the adapter added on the way.

Twins: ``reference_training.silu_and_mul`` and its backward. The adapter's part of a tile is a product over its rank:
added here it moves next to nothing, added in the projection it would write and read [num_tokens, 2 * intermediate] once
more. Backward adds it again, and makes the output again too, which no layer then has to keep. All in fp32, rounded
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv
from fineinfer.kernels.reference_training import Expansion

# A tile is never smaller than the number of threads: a value held by two could be read by the second after the first
# has written over it.
_ROWS, _COLUMNS, _NUM_WARPS = 32, 128, 4  # 256 bytes of a row of bf16 side by side
_RANKS = 16  # of one product; larger ranks take several, so that one compiled kernel serves them all


@triton.jit  # type: ignore[untyped-decorator]
def _expansion(  # type: ignore[no-untyped-def]
    xa_ptr,
    b_ptr,
    xa_stride,
    scaling,
    row,  # [ROWS]
    column,  # [COLUMNS]
    num_rows,
    rank,
    INTERMEDIATE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The adapter's part of a tile, [ROWS, COLUMNS] fp32."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, RANKS):
        lane = start + tl.arange(0, RANKS)
        xa = tl.load(
            xa_ptr + row[:, None].to(tl.int64) * xa_stride + lane[None, :],
            mask=(row < num_rows)[:, None] & (lane < rank)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + column[None, :].to(tl.int64) * rank + lane[:, None],
            mask=(column < INTERMEDIATE)[None, :] & (lane < rank)[:, None],
            other=0.0,
        )
        total = tl.dot(xa, b, total, input_precision="ieee")
    return total * scaling


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _adapted_silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,  # backward: holds the gradient before
    gate_xa_ptr: tl.tensor,  # None: no adapter
    gate_b_ptr: tl.tensor,
    up_xa_ptr: tl.tensor,
    up_b_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_scaling: tl.tensor,
    up_scaling: tl.tensor,
    gate_rank: tl.tensor,
    up_rank: tl.tensor,
    num_rows: tl.tensor,
    INTERMEDIATE: tl.constexpr,
    BACKWARD: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    NUM_TILES: tl.constexpr = (INTERMEDIATE + COLUMNS - 1) // COLUMNS  # side by side
    row = tl.program_id(0) // NUM_TILES * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % NUM_TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < INTERMEDIATE)[None, :]
    dtype = out_ptr.dtype.element_ty
    gate_place = gate_up_ptr + row[:, None].to(tl.int64) * (2 * INTERMEDIATE) + column[None, :]
    out_place = out_ptr + row[:, None].to(tl.int64) * INTERMEDIATE + column[None, :]
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    up = tl.load(gate_place + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    if gate_xa_ptr is not None:
        gate += _expansion(
            gate_xa_ptr, gate_b_ptr, gate_stride, gate_scaling, row, column, num_rows, gate_rank,
            INTERMEDIATE, RANKS, ROWS, COLUMNS,
        )  # fmt: skip
    if up_xa_ptr is not None:
        up += _expansion(
            up_xa_ptr, up_b_ptr, up_stride, up_scaling, row, column, num_rows, up_rank,
            INTERMEDIATE, RANKS, ROWS, COLUMNS,
        )  # fmt: skip
    falling = 1.0 + tl.exp(-gate)
    silu = gate / falling
    if BACKWARD:
        grad = tl.load(out_place, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / falling
        tl.store(gate_place, (grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))).to(dtype), mask=inside)
        tl.store(gate_place + INTERMEDIATE, (grad * silu).to(dtype), mask=inside)
    tl.store(out_place, (silu * up).to(dtype), mask=inside)


def silu_and_mul(gate_up: torch.Tensor, gate: Expansion | None, up: Expansion | None) -> torch.Tensor:
    """``silu(gate) * up`` of a projection whose adapter is still to be added.

    Args:
        gate_up: [num_rows, 2 * intermediate] of the base model, the gate's columns first; contiguous.
        gate: The adapter's part of the gate, None where it has none.
        up: The same of the other half.

    Returns:
        [num_rows, intermediate].

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, gate, up, backward=False)
    return out


def silu_and_mul_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, gate: Expansion | None, up: Expansion | None
) -> None:
    """Gradient of ``silu_and_mul`` with respect to the projection, in place.

    Args:
        grad: [num_rows, intermediate] gradient of the output, contiguous; receives the output once more.
        gate_up: As in the forward; receives its gradient.
        gate: As in the forward.
        up: As in the forward.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    _launch(gate_up, grad, gate, up, backward=True)


def _launch(
    gate_up: torch.Tensor, out: torch.Tensor, gate: Expansion | None, up: Expansion | None, backward: bool
) -> None:
    num_rows, intermediate = out.shape
    fitting = gate_up.shape == (num_rows, 2 * intermediate) and gate_up.dtype == out.dtype
    if not fitting or not gate_up.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"{list(gate_up.shape)} {gate_up.dtype} and {list(out.shape)} {out.dtype}, contiguous ones")
    for part in (gate, up):
        if part is not None:
            shapes = part.xa.shape == (num_rows, part.b.shape[1]) and part.b.shape[0] == intermediate
            if not shapes or not part.xa.dtype == part.b.dtype == out.dtype:
                raise ValueError(f"the adapter's {list(part.xa.shape)} and {list(part.b.shape)} do not fit")
            if part.xa.stride(1) != 1 or not part.b.is_contiguous():
                raise ValueError("the ranks of a row must lie side by side")
    if out.numel() == 0:
        return
    ranks = [0 if part is None else part.b.shape[1] for part in (gate, up)]
    gate_xa, gate_b, gate_stride, gate_scaling = _operands(gate)
    up_xa, up_b, up_stride, up_scaling = _operands(up)
    grid = (cdiv(num_rows, _ROWS) * cdiv(intermediate, _COLUMNS),)
    _adapted_silu_and_mul_kernel[grid](
        gate_up, out, gate_xa, gate_b, up_xa, up_b, gate_stride, up_stride, gate_scaling, up_scaling, *ranks,
        num_rows, intermediate, backward, _RANKS, _ROWS, _COLUMNS, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _operands(part: Expansion | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, float]:
    return (None, None, 0, 0.0) if part is None else (part.xa, part.b, part.xa.stride(0), float(part.scaling))
