"""LoRA's expansion inside the elementwise kernel that follows: the residual norm, and the gated half of the MLP.

At decode a separate expansion is mostly latency, and reads and writes the base output once more. Here the base output
is read once, the adapter's part added and rounded as ``lora.lora_expand`` does it, and what follows computed from that:
``reference.add_rms_norm`` and ``reference.silu_and_mul`` after ``reference.lora_grouped`` are the twins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import announce, cdiv, dependent, next_power_of_2, settle
from fineinfer.kernels.lora import (
    BLOCK_RANK,
    BLOCK_ROWS,
    RowExpansion,
    check_expansion,
    check_modules,
    sum_splits,
    tile_programs,
)
from fineinfer.kernels.norm import MAX_HIDDEN

# Each row of the norm reads all of its adapter's B (128 KB at rank 16 of 4096 columns). Above so many rows a separate
# expansion, whose tiles share B, costs less; both are estimates from the bandwidths of L2 and memory of an H100.
MAX_NORM_ROWS = 128
BLOCK_OUT = 128
# By rows of a tile. A program is mostly latency, so registers are limited: four of decode's programs fit on an SM.
# With 80 registers six would, but what they spill costs 2 us of 9 (8 adapters, 64 rows, H200).
_NUM_WARPS = {16: 4, 64: 8}
_MAX_REGISTERS = 128


def add_rms_norm_lora(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: RowExpansion,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x += delta + scale * (shrunk @ B)`` in place, then the norm of the new ``x``; each row with its own adapter.

    Args:
        x: [num_rows, hidden] in ``weight``'s dtype or fp32, the residual stream; rows may be strided.
        delta: [num_rows, hidden] in ``weight``'s dtype or ``x``'s, the base output of a block of one module; stays as
            it is.
        weight: [hidden].
        eps: Added to the mean square.
        lora: The rows' adapters.
        out: [num_rows, hidden] in ``weight``'s dtype, or None for a new tensor; may be ``delta`` itself, not ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_rows, hidden = x.shape
    if delta.shape != x.shape or delta.dtype not in (weight.dtype, x.dtype) or x.stride(1) != 1:
        raise ValueError(f"delta {list(delta.shape)} {delta.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if weight.shape != (hidden,) or x.dtype not in (weight.dtype, torch.float32) or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} {weight.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden is {hidden}, must be 1 to {MAX_HIDDEN}")
    lora.check(delta, 1)
    if lora.b.dtype != weight.dtype:
        raise ValueError(f"B is {lora.b.dtype}, the norm's weight {weight.dtype}")
    if out is None:
        out = torch.empty((num_rows, hidden), dtype=weight.dtype, device=x.device)
    elif out is x or out.shape != x.shape or out.dtype != weight.dtype or out.stride(1) != 1:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit x {list(x.shape)} {weight.dtype}, or is x")
    if num_rows == 0:
        return out
    block, group, num_warps = _row_block(hidden, weight.element_size())
    _add_rms_norm_lora_kernel[(num_rows,)](
        x,
        delta,
        weight,
        out,
        lora.shrunk,
        lora.b,
        lora.scales,
        lora.ranks,
        lora.row_slots,
        eps,
        x.stride(0),
        delta.stride(0),
        out.stride(0),
        num_rows * lora.max_rank,
        lora.b.stride(0),
        lora.b.stride(1),
        hidden,
        lora.max_rank,
        lora.shrunk.shape[0],
        group,
        block,
        num_warps=num_warps,
        **dependent(),
    )
    return out


def silu_and_mul_lora(
    gate_up: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    tiles: torch.Tensor,
    max_rank: int,
    block_m: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(gate) * up`` of the fused gate and up projection with each tile's adapter added to both.

    Args:
        gate_up: [num_rows, 2 * intermediate], base output, the gate's columns first; rows may be strided.
        shrunk: [num_splits, num_rows, 2 * max_rank] fp32 of ``lora.lora_shrink``; num_splits a power of two.
        b: [num_slots, max_rank, 2 * intermediate] in ``gate_up``'s dtype, not read past an adapter's ranks.
        scales: [num_slots, 2] fp32.
        ranks: [num_slots, 2] int32, 0 where an adapter lacks the module.
        tiles: [num_tiles, 3] int32: first row, number of rows (at most ``block_m``; 0 is padding), slot (negative: no
            adapter). Only their rows are written.
        max_rank: Largest rank.
        block_m: Rows of a tile, one of ``lora.BLOCK_ROWS``.
        out: [num_rows, intermediate] in ``gate_up``'s dtype, or None for a new tensor.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_rows, width = gate_up.shape
    intermediate = width // 2
    if width % 2 or width == 0:
        raise ValueError(f"gate_up {list(gate_up.shape)} must have an even number of columns")
    if tiles.shape[1] != 3 or tiles.dtype != torch.int32 or not tiles.is_contiguous() or block_m not in BLOCK_ROWS:
        raise ValueError(f"tiles {list(tiles.shape)} {tiles.dtype} must be contiguous int32 [num_tiles, 3] of 16 or 64")
    check_modules(ranks, 2)
    check_expansion(shrunk, b, scales, ranks, max_rank, gate_up)
    if out is None:
        out = gate_up.new_empty(num_rows, intermediate)
    elif out.shape != (num_rows, intermediate) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit {list(gate_up.shape)} {gate_up.dtype}")
    if num_rows == 0 or tiles.shape[0] == 0:
        return out
    _silu_and_mul_lora_kernel[(tile_programs(tiles.shape[0], block_m), cdiv(intermediate, BLOCK_OUT))](
        gate_up,
        out,
        shrunk,
        b,
        scales,
        ranks,
        tiles,
        tiles.shape[0],
        gate_up.stride(0),
        out.stride(0),
        num_rows * 2 * max_rank,
        b.stride(0),
        b.stride(1),
        intermediate,
        max_rank,
        shrunk.shape[0],
        block_m,
        BLOCK_RANK,
        BLOCK_OUT,
        num_warps=_NUM_WARPS[block_m],
        num_stages=2,
        maxnreg=_MAX_REGISTERS,
        **dependent(),
    )
    return out


def _row_block(hidden: int, item_bytes: int) -> tuple[int, int, int]:
    """Columns of a whole row as a block, rows of B asked for at once, and warps.

    A thread holds 8 values of a row (one 16-byte load of a half type) until there are 16 warps, then more. At first two
    groups of 128 bytes of B a thread are under way: rank 16 of a half type, in 128 registers without a spill.
    """
    block = max(256, next_power_of_2(hidden))
    num_warps = min(16, block // 256)
    return block, max(1, 128 * 32 * num_warps // (block * item_bytes)), num_warps


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(parts, b_block, is_rank):  # type: ignore[no-untyped-def]
    """[GROUP, BLOCK] rows of B by the sums of ``parts`` [SPLITS, GROUP], rounded as the shrunk rows are before B."""
    factor = tl.where(is_rank, tl.sum(parts, axis=0), 0.0).to(b_block.dtype).to(tl.float32)
    return tl.sum(factor[:, None] * tl.where(is_rank[:, None], b_block, 0.0).to(tl.float32), axis=0)


@triton.jit(do_not_specialize=["shrunk_split_stride"], do_not_specialize_on_alignment=["row_slots"])  # type: ignore[untyped-decorator]
def _add_rms_norm_lora_kernel(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    out,
    shrunk,
    b,
    scales,
    ranks,
    row_slots,
    eps,
    x_stride,
    delta_stride,
    out_stride,
    shrunk_split_stride,
    b_slot_stride,
    b_row_stride,
    HIDDEN: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dtype = out.dtype.element_ty
    stream_dtype = x.dtype.element_ty
    delta_dtype = delta.dtype.element_ty
    factor = tl.load(weight + column, mask=inside, other=0.0)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    scale = tl.load(scales + slot, mask=slot >= 0, other=0.0)

    index = tl.arange(0, GROUP)
    split = tl.arange(0, SPLITS)[:, None] * shrunk_split_stride.to(tl.int64)
    parts = shrunk + row * MAX_RANK + split + index[None, :]  # [SPLITS, GROUP]
    b_columns = (b + slot * b_slot_stride + column)[None, :]  # [1, BLOCK]
    # two groups of ranks are under way together, the first before the rank is known: what is past it is dropped
    exists, second = index < tl.where(slot >= 0, MAX_RANK, 0), GROUP + index
    b_0 = tl.load(
        b_columns + index[:, None].to(tl.int64) * b_row_stride, mask=exists[:, None] & inside[None, :], other=0.0
    )
    b_1 = tl.load(
        b_columns + second[:, None].to(tl.int64) * b_row_stride,
        mask=(second < rank)[:, None] & inside[None, :],
        other=0.0,
    )
    settle(PDL)
    stream = tl.load(x + row * x_stride + column, mask=inside, other=0.0)  # [BLOCK]
    base = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
    parts_0 = tl.load(parts, mask=(index < rank)[None, :], other=0.0)
    parts_1 = tl.load(parts + GROUP, mask=(second < rank)[None, :], other=0.0)
    acc = _weighted_sum(parts_0, b_0, index < rank) + _weighted_sum(parts_1, b_1, second < rank)  # [BLOCK]
    for first in range(2 * GROUP, rank, GROUP):
        is_rank = first + index < rank
        b_rows = b_columns + (first + index)[:, None].to(tl.int64) * b_row_stride  # [GROUP, BLOCK]
        b_block = tl.load(b_rows, mask=is_rank[:, None] & inside[None, :], other=0.0)
        acc += _weighted_sum(tl.load(parts + first, mask=is_rank[None, :], other=0.0), b_block, is_rank)

    added = (base.to(tl.float32) + scale * acc).to(delta_dtype)
    rounded = (stream.to(tl.float32) + added.to(tl.float32)).to(stream_dtype)
    tl.store(x + row * x_stride + column, rounded, mask=inside)
    wide = rounded.to(tl.float32)  # the norm is that of the stream as stored
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    normed = factor.to(tl.float32) * (wide * inverse).to(stream_dtype).to(tl.float32)
    tl.store(out + row * out_stride + column, normed.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "shrunk_split_stride"], do_not_specialize_on_alignment=["tiles"])  # type: ignore[untyped-decorator]
def _silu_and_mul_lora_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    shrunk,
    b,
    scales,
    ranks,
    tiles,
    num_tiles,
    gate_up_stride,
    out_stride,
    shrunk_split_stride,
    b_slot_stride,
    b_row_stride,
    INTERMEDIATE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    dtype = out.dtype.element_ty
    member, index = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < INTERMEDIATE
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tiles + i * 3
        first_row, num_rows, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if num_rows > 0:
            # of no adapter: rank 0, and the sums below are empty
            gate_rank = tl.load(ranks + slot * 2, mask=slot >= 0, other=0)
            up_rank = tl.load(ranks + slot * 2 + 1, mask=slot >= 0, other=0)
            gate_scale = tl.load(scales + slot * 2, mask=slot >= 0, other=0.0)
            up_scale = tl.load(scales + slot * 2 + 1, mask=slot >= 0, other=0.0)
            row = first_row + member
            is_row = member < num_rows
            is_place = is_row[:, None] & is_column[None, :]
            places = gate_up + row[:, None] * gate_up_stride + column[None, :]
            part = (shrunk + row * (2 * MAX_RANK))[:, None] + index[None, :]  # [BLOCK_M, BLOCK_R]
            b_columns = b + slot * b_slot_stride + column  # [BLOCK_N]
            # B of the first ranks comes from memory while the product before still runs, and before the ranks are
            # known: what is past them is dropped
            exists = index < tl.where(slot >= 0, MAX_RANK, 0)
            b_rows = b_columns[None, :] + index[:, None].to(tl.int64) * b_row_stride  # [BLOCK_R, BLOCK_N]
            gate_b = tl.load(b_rows, mask=exists[:, None] & is_column[None, :], other=0.0)
            up_b = tl.load(b_rows + INTERMEDIATE, mask=exists[:, None] & is_column[None, :], other=0.0)
            settle(PDL)
            gate = tl.load(places, mask=is_place, other=0.0)  # [BLOCK_M, BLOCK_N]
            up = tl.load(places + INTERMEDIATE, mask=is_place, other=0.0)
            in_gate, in_up = index < gate_rank, index < up_rank
            gate_sum = sum_splits(part, is_row[:, None] & in_gate[None, :], shrunk_split_stride, SPLITS)
            up_sum = sum_splits(part + MAX_RANK, is_row[:, None] & in_up[None, :], shrunk_split_stride, SPLITS)
            gate_acc = _product(gate_sum, gate_b, in_gate)
            up_acc = _product(up_sum, up_b, in_up)
            for first in range(BLOCK_R, tl.maximum(gate_rank, up_rank), BLOCK_R):
                in_gate, in_up = first + index < gate_rank, first + index < up_rank
                b_rows = b_columns[None, :] + (first + index)[:, None].to(tl.int64) * b_row_stride
                gate_b = tl.load(b_rows, mask=in_gate[:, None] & is_column[None, :], other=0.0)
                up_b = tl.load(b_rows + INTERMEDIATE, mask=in_up[:, None] & is_column[None, :], other=0.0)
                gate_sum = sum_splits(part + first, is_row[:, None] & in_gate[None, :], shrunk_split_stride, SPLITS)
                up_sum = sum_splits(
                    part + MAX_RANK + first, is_row[:, None] & in_up[None, :], shrunk_split_stride, SPLITS
                )
                gate_acc = tl.dot(gate_sum.to(gate_b.dtype), gate_b, gate_acc, input_precision="ieee")
                up_acc = tl.dot(up_sum.to(up_b.dtype), up_b, up_acc, input_precision="ieee")

            gate_value = (gate.to(tl.float32) + gate_scale * gate_acc).to(dtype).to(tl.float32)
            up_value = (up.to(tl.float32) + up_scale * up_acc).to(dtype).to(tl.float32)
            activated = gate_value / (1.0 + tl.exp(-gate_value)) * up_value
            tl.store(out + row[:, None] * out_stride + column[None, :], activated.to(dtype), mask=is_place)
    settle(PDL)  # all programs wait, also those without a tile: whoever follows relies on it


@triton.jit  # type: ignore[untyped-decorator]
def _product(shrunk, b_block, is_rank):  # type: ignore[no-untyped-def]
    """[BLOCK_M, BLOCK_N] of shrunk rows [BLOCK_M, BLOCK_R] and rows of B, of which those past the rank are dropped."""
    b_block = tl.where(is_rank[:, None], b_block, 0.0)
    return tl.dot(shrunk.to(b_block.dtype), b_block, input_precision="ieee")
