"""Prefill attention: runs of rows of several sequences, each causal over its whole sequence in the pool by slot index.

A tile is up to ``block_rows`` neighbouring rows of one sequence; ``tiles`` lays a batch out on the host. A program
takes one tile and one query head, walks the keys from the oldest visible one, and masks only the blocks that the
diagonal or the window cuts. Source of the online softmax: FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import dependent, follow, next_power_of_2

LOG2_E = 1.4426950408889634
BLOCK_ROWS, BLOCK_KEYS, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3  # half types; fp32 tiles are smaller


def block_rows(dtype: torch.dtype) -> int:
    """Rows of a tile."""
    return 32 if dtype == torch.float32 else BLOCK_ROWS


def tiles(spans: Sequence[tuple[int, int, int, int]], rows: int) -> np.ndarray:
    """Cut spans of rows into tiles, those with most keys first.

    Args:
        spans: (first row, number of rows, position of the first row in its sequence, the sequence's table row).
        rows: ``block_rows`` of the dtype.

    Returns:
        [num_tiles, 4] int32, fields as of a span.
    """
    cut = [
        (first + offset, min(rows, length - offset), position + offset, table_row)
        for first, length, position, table_row in spans
        for offset in range(0, length, rows)
    ]
    cut.sort(key=lambda tile: -(tile[2] + tile[1]))
    return np.array(cut, dtype=np.int32).reshape(-1, 4)


def attention_prefill(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_table: torch.Tensor,
    tile_list: torch.Tensor,
    out: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the tiles' rows.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows and heads may be strided.
        pool_layer: [num_slots, 2, num_kv_heads, head_dim], keys and values of all rows stored already.
        slot_table: [table_size, max_length] int32, slots of each sequence by position.
        tile_list: [num_tiles, 4] int32 on the device, from ``tiles``.
        out: [num_tokens, num_heads, head_dim] contiguous; rows of no tile are left as they are.
        window: Newest positions a token attends to, its own included, or None.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes that do not fit each other.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = pool_layer.shape[2]
    if num_heads % num_kv_heads or pool_layer.shape[3] != head_dim or out.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)} does not fit a pool layer {tuple(pool_layer.shape)}")
    if tile_list.shape[0] == 0:
        return out
    wide = q.dtype == torch.float32
    block_keys, num_stages = _key_blocks(wide, head_dim)
    _prefill_kernel[(num_heads, tile_list.shape[0])](
        q,
        pool_layer,
        slot_table,
        tile_list,
        out,
        LOG2_E / head_dim**0.5,
        window or 0,
        q.stride(0),
        q.stride(1),
        pool_layer.stride(0),
        pool_layer.stride(1),
        slot_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows(q.dtype),
        BLOCK_KEYS=block_keys,
        BLOCK_DIM=max(16, next_power_of_2(head_dim)),
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if wide else "tf32",
        num_warps=4 if wide else NUM_WARPS,
        num_stages=num_stages,
        **dependent(),
    )
    return out


def _key_blocks(wide: bool, head_dim: int) -> tuple[int, int]:
    """Keys of a block and how many blocks are loaded ahead.

    A tile of 128 rows takes 64 KiB if heads are wider than 128; cards of capability 8.6 and 8.9 have 99 KiB in all.
    """
    if wide or (head_dim > 128 and not dependent()["PDL"]):
        return 32, 1
    return BLOCK_KEYS, NUM_STAGES


@triton.jit(do_not_specialize_on_alignment=["tile_list"])  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    pool,
    slot_table,
    tile_list,
    out,
    scale,
    window,
    q_row_stride,
    q_head_stride,
    slot_stride,
    value_offset,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    head = tl.program_id(0)
    tile = tile_list + 4 * tl.program_id(1)
    first_row, num_rows = tl.load(tile), tl.load(tile + 1)
    first_position = tl.load(tile + 2)
    slots_of_row = slot_table + tl.load(tile + 3).to(tl.int64) * table_stride

    member = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    row = (first_row + member).to(tl.int64)
    position = first_position + member
    is_value = (member[:, None] < num_rows) & (dim[None, :] < HEAD_DIM)
    query = tl.load(q + row[:, None] * q_row_stride + head * q_head_stride + dim[None, :], mask=is_value, other=0.0)
    keys = pool + (head // GROUP) * HEAD_DIM
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sum_values = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)

    stop = first_position + num_rows
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.maximum(first_position - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    # without a window, blocks that end before the first row's own position need no mask
    clean = oldest
    if not HAS_WINDOW:
        clean = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    for first in range(oldest, clean, BLOCK_KEYS):
        slot = tl.load(slots_of_row + first + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
        key = tl.load(keys + slot[None, :] * slot_stride + dim[:, None], mask=dim[:, None] < HEAD_DIM, other=0.0)
        score = tl.dot(query, key, input_precision=PRECISION) * scale  # [rows, keys], base 2
        new_best = tl.maximum(best, tl.max(score, axis=1))
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        value = tl.load(
            keys + value_offset + slot[:, None] * slot_stride + dim[None, :], mask=dim[None, :] < HEAD_DIM, other=0.0
        )
        total = total * shrink + tl.sum(weight, axis=1)
        sum_values = sum_values * shrink[:, None]
        sum_values = tl.dot(weight.to(value.dtype), value, sum_values, input_precision=PRECISION)
        best = new_best
    for first in range(clean, stop, BLOCK_KEYS):
        key_position = first + tl.arange(0, BLOCK_KEYS)
        exists = key_position < stop
        slot = tl.load(slots_of_row + key_position, mask=exists, other=0).to(tl.int64)
        key = tl.load(
            keys + slot[None, :] * slot_stride + dim[:, None],
            mask=exists[None, :] & (dim[:, None] < HEAD_DIM),
            other=0.0,
        )
        score = tl.dot(query, key, input_precision=PRECISION) * scale
        visible = key_position[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key_position[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        known = tl.where(new_best == float("-inf"), 0.0, new_best)  # a window may hide a whole block from a row
        shrink = tl.exp2(best - known)
        weight = tl.exp2(score - known[:, None])
        value = tl.load(
            keys + value_offset + slot[:, None] * slot_stride + dim[None, :],
            mask=exists[:, None] & (dim[None, :] < HEAD_DIM),
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, axis=1)
        sum_values = sum_values * shrink[:, None]
        sum_values = tl.dot(weight.to(value.dtype), value, sum_values, input_precision=PRECISION)
        best = new_best
    total = tl.where(total > 0.0, total, 1.0)  # rows past the tile's end may have seen nothing
    place = row[:, None] * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dim[None, :]
    tl.store(out + place, (sum_values / total[:, None]).to(out.dtype.element_ty), mask=is_value)
