"""Grouped LoRA for serving: ``y += scale * (x @ A.T) @ B.T`` each run of rows with its own adapter, two launches.

A fused block holds up to three modules of one input (q, k, v): the shrink kernel makes ``x @ A.T`` of all of them as
split-K partial sums in fp32, the expand kernel adds them up, multiplies by B and adds to the base output. Which rows
use which adapter, and at what rank and scale, is data in device tensors, so both can be captured in a CUDA graph; tiles
and rank blocks that do not exist, and tiles of no adapter, exit at once. Neither needs the base output: both can run
beside its product, and the kernel that follows adds the two (``AdapterPart``). Source of the shrink/expand cut: Punica
(Chen et al., 2023).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import announce, cdiv, dependent, settle

BLOCK_ROWS = (16, 64)  # rows of a tile: decode, prefill
BLOCK_RANK = 16  # smallest side tl.dot takes; a rank of 4 pays for 16
MAX_MODULES = 3
MIN_SPLIT = 256  # input features that one program of the shrink kernel sums up at least, if it splits
MAX_SPLITS = 16
SPLIT_TILES = 64  # tiles x splits up to which splitting pays
# Splits x output features: each block of columns sums the splits up again, and a wide product takes long enough for few
# beside it. 8 adapters over 64 rows, H200: with half as many a layer of 8B takes 1.4 us longer, with a quarter 6
SPLIT_COLUMNS = 65_536
_BLOCK_IN = {16: 128, 64: 64}  # by rows of a tile
_BLOCK_OUT = {16: 256, 64: 128}
_NUM_WARPS, _NUM_STAGES = {16: 4, 64: 8}, {16: 1, 64: 2}  # of the expand kernel


def shrink_splits(num_rows: int, in_features: int, out_features: int, block_m: int) -> int:
    """Split-K parts of the shrink of a batch, a power of two.

    For 64 decode rows of 4096 features 16 if there are as many outputs, 2 of 28672; 1 for thousands of rows.
    """
    tiles = max(1, cdiv(num_rows, block_m))
    most = min(MAX_SPLITS, in_features // MIN_SPLIT, SPLIT_TILES // tiles, SPLIT_COLUMNS // out_features)
    return 1 << (max(1, most).bit_length() - 1)


def shrunk_elements(max_rows: int, in_features: int, width: int) -> int:
    """Most fp32 values that the shrunk batch [splits, rows, width] holds for any batch of up to ``max_rows`` rows."""
    splits = shrink_splits(1, in_features, 1, BLOCK_ROWS[0])
    return max(max_rows, min(splits * max_rows, SPLIT_TILES * BLOCK_ROWS[-1])) * width


def lora_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    ranks: torch.Tensor,
    tiles: torch.Tensor,
    max_rank: int,
    block_m: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each tile's rows times its adapter's A, for all modules of a fused block, as split-K partial sums.

    Args:
        x: [num_rows, in_features], rows may be strided.
        a: [num_slots, num_modules * max_rank, in_features] in ``x``'s dtype; module m's rows start at m * max_rank.
        ranks: [num_slots, num_modules] int32, 0 where an adapter lacks the module; A is not read past them.
        tiles: [num_tiles, 3] int32: first row, number of rows (at most ``block_m``; 0 is padding), slot (negative: no
            adapter, nothing to do).
        max_rank: Largest rank.
        block_m: Rows of a tile, one of ``BLOCK_ROWS``.
        out: [num_splits, num_rows, num_modules * max_rank] fp32 or None (splits as for a square block). Only blocks
            of ``BLOCK_RANK`` columns that begin below a module's rank are written, in rows of tiles.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes or dtypes that do not fit.
    """
    num_rows, in_features = x.shape
    width = a.shape[1]
    if out is None:
        splits = shrink_splits(num_rows, in_features, in_features, block_m)
        out = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    num_modules = _check(ranks, tiles, max_rank, block_m)
    if width != num_modules * max_rank or a.shape[2] != in_features or a.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit A {tuple(a.shape)} {a.dtype}, rank {max_rank}")
    if out.shape[1:] != (num_rows, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} must be contiguous fp32 [splits, {num_rows}, {width}]")
    if x.stride(1) != 1 or a.stride(2) != 1:
        raise ValueError("the input features of x and A must be contiguous")
    if num_rows == 0 or tiles.shape[0] == 0:
        return out
    num_splits, block_in = out.shape[0], _BLOCK_IN[block_m]
    rank_blocks = cdiv(max_rank, BLOCK_RANK)
    # padding is the last tiles: programs begin in the order of their numbers, and those of an axis before count first
    _shrink_kernel[(num_splits, num_modules * rank_blocks, tiles.shape[0])](
        x,
        a,
        ranks,
        tiles,
        out,
        in_features,
        cdiv(in_features, num_splits * block_in) * block_in,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        num_rows * width,
        MODULES=num_modules,
        MAX_RANK=max_rank,
        RANK_BLOCKS=rank_blocks,
        BLOCK_M=block_m,
        BLOCK_R=BLOCK_RANK,
        BLOCK_K=block_in,
        num_warps=2 if block_m == 16 else 4,
        num_stages=4,
    )
    return out


def lora_expand(
    shrunk: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    tiles: torch.Tensor,
    max_rank: int,
    block_m: int,
    columns: tuple[int, ...],
    y: torch.Tensor,
    add: bool = True,
) -> torch.Tensor:
    """Add each tile's adapter to the base output of a fused block, in place; or write the adapters' part alone.

    Args:
        shrunk: [num_splits, num_rows, num_modules * max_rank] fp32 of ``lora_shrink``; num_splits a power of two.
        b: [num_slots, max_rank, out_features]; what is past an adapter's rank is not used.
        scales: [num_slots, num_modules] fp32.
        ranks: [num_slots, num_modules] int32, 0 where an adapter lacks the module.
        tiles: [num_tiles, 3] int32 as for ``lora_shrink``.
        max_rank: Largest rank.
        block_m: Rows of a tile, one of ``BLOCK_ROWS``.
        columns: First output column of each module, then out_features.
        y: [num_rows, out_features] in ``b``'s dtype or fp32, rows may be strided; added to in fp32 and rounded once.
        add: False overwrites what ``y`` holds in rows of an adapter, with zeros where it lacks a module; other rows
            stay as they are either way.

    Returns:
        ``y``.

    Raises:
        ValueError: Shapes or dtypes that do not fit.
    """
    num_modules = _check(ranks, tiles, max_rank, block_m)
    _check_expansion(shrunk, b, scales, ranks, max_rank, y)
    num_splits, num_rows, _ = shrunk.shape
    if len(columns) != num_modules + 1 or columns[-1] != y.shape[1]:
        raise ValueError(f"columns {columns} do not fit {num_modules} modules and y {tuple(y.shape)}")
    if num_rows == 0 or tiles.shape[0] == 0:
        return y
    ends = [*columns[1:], columns[-1], columns[-1]]  # modules that do not exist have no columns
    block_out = _BLOCK_OUT[block_m]
    blocks = sum(cdiv(end - start, block_out) for start, end in itertools.pairwise(columns))
    _expand_kernel[(blocks, tiles.shape[0])](
        shrunk,
        b,
        scales,
        ranks,
        tiles,
        y,
        num_rows,
        b.stride(0),
        b.stride(1),
        y.stride(0),
        MODULES=num_modules,
        MAX_RANK=max_rank,
        END0=ends[0],
        END1=ends[1],
        END2=ends[2],
        SPLITS=num_splits,
        ADD=add,
        BLOCK_M=block_m,
        BLOCK_R=BLOCK_RANK,
        BLOCK_N=block_out,
        num_warps=_NUM_WARPS[block_m],
        num_stages=_NUM_STAGES[block_m],
        **dependent(),
    )
    return y


class AdapterPart(NamedTuple):
    """What the adapters add to the base output of a block, for the kernel that reads that output.

    Attributes:
        values: [num_rows, out_features] of ``lora_expand``, contiguous, in the base output's dtype or a half type below
            fp32; of rows without an adapter anything.
        row_slots: [num_rows] int32, negative for a row without an adapter.
    """

    values: torch.Tensor
    row_slots: torch.Tensor

    def check(self, y: torch.Tensor) -> None:
        """Refuse what cannot be added to a base output ``y`` [num_rows, out_features].

        Raises:
            ValueError: Shapes, dtypes or strides do not fit.
        """
        values, slots = self
        halves = y.dtype == torch.float32 and values.dtype in (torch.float16, torch.bfloat16)
        if values.shape != y.shape or not (values.dtype == y.dtype or halves):
            raise ValueError(f"adapters' part {list(values.shape)} {values.dtype} for {list(y.shape)} {y.dtype}")
        if slots.shape != y.shape[:1] or slots.dtype != torch.int32:
            raise ValueError(f"row_slots {list(slots.shape)} {slots.dtype} must be int32 [{y.shape[0]}]")
        if not values.is_contiguous() or not slots.is_contiguous():
            raise ValueError("the adapters' part must be contiguous")


def _check_expansion(
    shrunk: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, ranks: torch.Tensor, max_rank: int, y: torch.Tensor
) -> None:
    """Refuse what cannot be expanded onto a base output ``y``; operands as of ``lora_expand``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_splits, num_rows, width = shrunk.shape
    if scales.shape != ranks.shape or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales {tuple(scales.shape)} {scales.dtype} must be contiguous fp32 {tuple(ranks.shape)}")
    if width != ranks.shape[1] * max_rank or shrunk.dtype != torch.float32 or not shrunk.is_contiguous():
        raise ValueError(f"shrunk {tuple(shrunk.shape)} {shrunk.dtype} does not fit rank {max_rank} in contiguous fp32")
    if b.shape[1:] != (max_rank, y.shape[1]) or y.dtype not in (b.dtype, torch.float32) or b.stride(2) != 1:
        raise ValueError(
            f"B {tuple(b.shape)} {b.dtype} does not fit rank {max_rank} and {y.shape[1]} {y.dtype} columns"
        )
    if y.shape[0] != num_rows or y.stride(1) != 1:
        raise ValueError(f"y {tuple(y.shape)} must have {num_rows} rows of contiguous columns")
    if num_splits & (num_splits - 1):
        raise ValueError(f"num_splits {num_splits} is no power of two")


def _check(ranks: torch.Tensor, tiles: torch.Tensor, max_rank: int, block_m: int) -> int:
    """The number of modules; ValueError if what says who uses what is malformed."""
    num_modules = ranks.shape[1]
    if not 1 <= num_modules <= MAX_MODULES or ranks.dtype != torch.int32 or not ranks.is_contiguous():
        raise ValueError(f"ranks {tuple(ranks.shape)} {ranks.dtype} must be contiguous int32 [slots, 1 to 3]")
    if tiles.shape[1] != 3 or tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(f"tiles {tuple(tiles.shape)} {tiles.dtype} must be contiguous int32 [num_tiles, 3]")
    if max_rank < 1 or block_m not in BLOCK_ROWS:
        raise ValueError(f"max_rank {max_rank} must be at least 1, block_m {block_m} one of {BLOCK_ROWS}")
    return num_modules


@triton.jit(do_not_specialize=["out_split_stride"], do_not_specialize_on_alignment=["ranks", "tiles"])  # type: ignore[untyped-decorator]
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    a,
    ranks,
    tiles,
    out,
    in_features,
    features_per_split,
    x_row_stride,
    a_slot_stride,
    a_row_stride,
    out_split_stride,
    MODULES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(2) * 3
    first_row, num_rows, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    if (num_rows == 0) | (slot < 0):
        return
    module = tl.program_id(1) // RANK_BLOCKS
    rank = tl.load(ranks + slot * MODULES + module)
    first_rank = (tl.program_id(1) % RANK_BLOCKS) * BLOCK_R
    if first_rank >= rank:
        return
    split = tl.program_id(0)

    member = tl.arange(0, BLOCK_M)
    index = first_rank + tl.arange(0, BLOCK_R)  # of the module's rank
    row = first_row + member
    is_row, is_rank = member < num_rows, index < rank
    a_rows = a + slot * a_slot_stride + (module * MAX_RANK + index).to(tl.int64) * a_row_stride  # [BLOCK_R]
    x_rows = x + row * x_row_stride  # [BLOCK_M]
    start = split * features_per_split
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(start, tl.minimum(start + features_per_split, in_features), BLOCK_K):
        feature = first + tl.arange(0, BLOCK_K)
        is_feature = feature < in_features
        # [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_R]
        x_block = tl.load(x_rows[:, None] + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
        a_block = tl.load(a_rows[None, :] + feature[:, None], mask=is_rank[None, :] & is_feature[:, None], other=0.0)
        acc = tl.dot(x_block, a_block, acc, input_precision="ieee")
    place = out + split.to(tl.int64) * out_split_stride + row * (MODULES * MAX_RANK)  # [BLOCK_M]
    fits = is_row[:, None] & (index < MAX_RANK)[None, :]
    tl.store(place[:, None] + (module * MAX_RANK + index)[None, :], acc, mask=fits)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(part, is_row, exists, in_rank, split_stride, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shrunk rows [BLOCK_M, BLOCK_R], summed in fp32 over the parts that ``lora_shrink`` left; 0 past the rank.

    ``part`` points into the first part. What is past the rank was never written and is read all the same, up to where
    ``exists`` ends: a mask by the rank would take each value by a load of its own.
    """
    summed = tl.zeros(part.shape, tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled: the loads of all parts are in flight together
        mask = is_row[:, None] & exists[None, :]
        values = tl.load(part + split * split_stride, mask=mask, other=0.0)
        summed += tl.where(in_rank[None, :], values, 0.0)
    return summed


@triton.jit(do_not_specialize=["batch_rows"], do_not_specialize_on_alignment=["scales", "ranks", "tiles"])  # type: ignore[untyped-decorator]
def _expand_kernel(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    scales,
    ranks,
    tiles,
    y,
    batch_rows,
    b_slot_stride,
    b_row_stride,
    y_row_stride,
    MODULES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    tile = tiles + tl.program_id(1) * 3
    first_row, num_rows, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
    if (num_rows == 0) | (slot < 0):
        if tl.program_id(1) == 0:
            settle(PDL)  # whoever follows relies on this kernel for what came before, also if there is nothing to do
        return
    # column blocks are counted module by module, so that none straddles two
    block = tl.program_id(0)
    until_1: tl.constexpr = (END0 + BLOCK_N - 1) // BLOCK_N
    until_2: tl.constexpr = until_1 + (END1 - END0 + BLOCK_N - 1) // BLOCK_N
    module = tl.where(block >= until_2, 2, tl.where(block >= until_1, 1, 0))
    first_column = tl.where(block >= until_2, END1, tl.where(block >= until_1, END0, 0))
    end_column = tl.where(block >= until_2, END2, tl.where(block >= until_1, END1, END0))
    block -= tl.where(block >= until_2, until_2, tl.where(block >= until_1, until_1, 0))
    column = first_column + block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < end_column
    # all that the tile alone decides is asked for at once, a wait is a large part of this kernel's time: the first
    # block of the rank before the rank is known; what is past it is dropped below
    rank = tl.load(ranks + slot * MODULES + module)
    scale = tl.load(scales + slot * MODULES + module)
    member, index = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    row = first_row + member
    is_row = member < num_rows
    b_columns = b + slot * b_slot_stride + column  # [BLOCK_N]
    exists = index < MAX_RANK
    b_rows = b_columns[None, :] + index[:, None].to(tl.int64) * b_row_stride  # [BLOCK_R, BLOCK_N]
    b_block = tl.load(b_rows, mask=exists[:, None] & is_column[None, :], other=0.0)
    part = (shrunk + row * (MODULES * MAX_RANK) + module * MAX_RANK)[:, None] + index[None, :]  # [BLOCK_M, BLOCK_R]
    split_stride = batch_rows.to(tl.int64) * (MODULES * MAX_RANK)
    settle(PDL)
    in_rank = index < rank
    summed = _sum_splits(part, is_row, exists, in_rank, split_stride, SPLITS)
    b_block = tl.where(in_rank[:, None], b_block, 0.0)
    acc = tl.dot(summed.to(b.dtype.element_ty), b_block, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    for first in range(BLOCK_R, rank, BLOCK_R):
        in_rank = first + index < rank
        b_rows = b_columns[None, :] + (first + index)[:, None].to(tl.int64) * b_row_stride
        b_block = tl.load(b_rows, mask=in_rank[:, None] & is_column[None, :], other=0.0)
        summed = _sum_splits(part + first, is_row, first + index < MAX_RANK, in_rank, split_stride, SPLITS)
        acc = tl.dot(summed.to(b.dtype.element_ty), b_block, acc, input_precision="ieee")
    acc *= scale
    places = y + row[:, None] * y_row_stride + column[None, :]
    is_place = is_row[:, None] & is_column[None, :]
    if ADD:
        is_place = tl.where(rank > 0, is_place, False)
        acc += tl.load(places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(places, acc.to(y.dtype.element_ty), mask=is_place)


@triton.jit  # type: ignore[untyped-decorator]
def adapter_part(values, row_slots, row, place, mask):  # type: ignore[no-untyped-def]
    """Values of an ``AdapterPart`` in fp32 at ``place`` of the whole, all in ``row``; 0 where it has no adapter."""
    read = tl.where(tl.load(row_slots + row) >= 0, mask, False)
    return tl.load(values + place, mask=read, other=0.0).to(tl.float32)
