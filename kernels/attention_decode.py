"""Decode attention: one query token a row over its slots in the pool, split over the keys, grouped heads together.

Rows differ in length by orders of magnitude, so work is cut on the device: ``plan`` (once a step, for all layers that
share a window) chooses one chunk length for the whole batch such that there are about ``TARGET_PROGRAMS`` chunks,
counted by key/value heads, and lists them. Every program of the attention kernel takes one chunk and one key/value
head; where a row has several, the one that finishes last puts them together. All sizes are data, so a captured graph
serves any lengths.
Source of the split and its log-sum-exp reduction: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import dependent, follow, next_power_of_2

# Chunks of a batch times key/value heads: a few programs for each of a GPU's 132 processors. 512 measured best of 512,
# 1,024 and 2,048 with 8 heads of 128 on an H100.
TARGET_PROGRAMS = 512
MIN_CHUNK = 128  # keys; shorter chunks cost more in the reduction than they gain
BLOCK_KEYS = 64
NUM_WARPS, NUM_STAGES = 2, 3
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class DecodePlan:
    """Device buffers that say which chunks of which rows there are, and room for their partial results.

    Attributes:
        items: [max_items, 2] int32: row and first key position of each chunk.
        rows: [max_rows, 2] int32: first chunk and number of chunks of each row.
        sizes: [2] int32: number of chunks in all, keys of a chunk.
        partial: [max_items, num_heads, head_dim] fp32, normalised results of chunks.
        lse: [max_items, num_heads] fp32, base-2 log-sum-exp of chunks.
        arrived: [max_rows, num_kv_heads] int32, chunks finished; 0 between two launches.
        target: Chunks that a batch is cut into, about.
        window: Newest positions a token attends to, or None.
    """

    items: torch.Tensor
    rows: torch.Tensor
    sizes: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    arrived: torch.Tensor
    target: int
    window: int | None

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        device: torch.device,
    ) -> DecodePlan:
        """Buffers for batches of up to ``max_rows``; a chunk list never exceeds ``target + max_rows``."""
        target = max(1, TARGET_PROGRAMS // num_kv_heads)
        max_items = target + max_rows

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            items=integers(max_items, 2),
            rows=integers(max_rows, 2),
            sizes=integers(2),
            partial=torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device),
            lse=torch.empty(max_items, num_heads, dtype=torch.float32, device=device),
            arrived=integers(max_rows, num_kv_heads),
            target=target,
            window=window,
        )


def plan(lengths: torch.Tensor, work: DecodePlan) -> None:
    """Cut a batch into chunks.

    Args:
        lengths: [batch] int32, tokens each row attends to (the own one included); 0 for a padding row.
        work: Filled for this batch.

    Raises:
        ValueError: More rows than the plan has room for.
    """
    batch = lengths.shape[0]
    if batch > work.rows.shape[0]:
        raise ValueError(f"{batch} rows in a plan of {work.rows.shape[0]}")
    if batch == 0:
        return
    _plan_kernel[(1,)](
        lengths,
        work.items,
        work.rows,
        work.sizes,
        batch,
        work.window or 0,
        TARGET=work.target,
        MIN_CHUNK=MIN_CHUNK,
        BLOCK_KEYS=BLOCK_KEYS,
        BLOCK_ROWS=next_power_of_2(batch),
        num_warps=4,
    )


def attention_decode(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_table: torch.Tensor,
    table_rows: torch.Tensor,
    lengths: torch.Tensor,
    work: DecodePlan,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of one new token for each row.

    Args:
        q: [batch, num_heads, head_dim]; rows and heads may be strided.
        pool_layer: [num_slots, 2, num_kv_heads, head_dim], the new tokens' keys and values stored already.
        slot_table: [table_size, max_length] int32, slots of each sequence by position.
        table_rows: [batch] int32, the rows' places in the table.
        lengths: [batch] int32 as given to ``plan``.
        work: Planned for these lengths.
        out: [batch, num_heads, head_dim] contiguous; rows of length 0 are left as they are.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes that do not fit each other.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = pool_layer.shape[2]
    if num_heads % num_kv_heads or pool_layer.shape[3] != head_dim or work.partial.shape[1:] != q.shape[1:]:
        raise ValueError(f"q {tuple(q.shape)} does not fit a pool layer {tuple(pool_layer.shape)} and its plan")
    if batch == 0:
        return out
    group = num_heads // num_kv_heads
    wide = q.dtype == torch.float32
    _chunk_kernel[((work.target + batch) * num_kv_heads,)](
        q,
        pool_layer,
        slot_table,
        table_rows,
        lengths,
        work.items,
        work.rows,
        work.sizes,
        work.partial,
        work.lse,
        work.arrived,
        out,
        LOG2_E / head_dim**0.5,
        q.stride(0),
        q.stride(1),
        pool_layer.stride(0),
        pool_layer.stride(1),
        slot_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=max(16, next_power_of_2(group)),
        BLOCK_DIM=max(16, next_power_of_2(head_dim)),
        BLOCK_KEYS=32 if wide else BLOCK_KEYS,
        PRECISION="ieee" if wide else "tf32",
        num_warps=NUM_WARPS,
        num_stages=2 if wide else NUM_STAGES,
        **dependent(),
    )
    return out


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["lengths"])  # type: ignore[untyped-decorator]
def _plan_kernel(  # type: ignore[no-untyped-def]
    lengths,
    items,
    rows,
    sizes,
    batch,
    window,
    TARGET: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    length = tl.load(lengths + row, mask=row < batch, other=0)
    begin = tl.zeros_like(length)
    if window > 0:
        begin = tl.maximum(length - window, 0)
    visible = length - begin
    total = tl.sum(visible.to(tl.int64), axis=0)
    chunk = tl.maximum((total + TARGET - 1) // TARGET, MIN_CHUNK).to(tl.int32)
    chunk = (chunk + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
    count = (visible + chunk - 1) // chunk
    first = tl.cumsum(count, axis=0) - count
    tl.store(rows + 2 * row, first, mask=row < batch)
    tl.store(rows + 2 * row + 1, count, mask=row < batch)
    tl.store(sizes, tl.sum(count, axis=0))
    tl.store(sizes + 1, chunk)
    for index in range(tl.max(count, axis=0)):
        tl.store(items + 2 * (first + index), row, mask=index < count)
        tl.store(items + 2 * (first + index) + 1, begin + index * chunk, mask=index < count)


@triton.jit(do_not_specialize_on_alignment=["table_rows", "lengths"])  # type: ignore[untyped-decorator]
def _chunk_kernel(  # type: ignore[no-untyped-def]
    q,
    pool,
    slot_table,
    table_rows,
    lengths,
    items,
    rows,
    sizes,
    partial,
    lse,
    arrived,
    out,
    scale,
    q_row_stride,
    q_head_stride,
    slot_stride,
    value_offset,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    item = tl.program_id(0) // NUM_KV_HEADS  # heads of a chunk run side by side: their keys share memory pages
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if item >= tl.load(sizes):
        return
    row = tl.load(items + 2 * item)
    start = tl.load(items + 2 * item + 1)
    stop = tl.minimum(start + tl.load(sizes + 1), tl.load(lengths + row))
    slots_of_row = slot_table + tl.load(table_rows + row).to(tl.int64) * table_stride

    member = tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    is_value = (member[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
    query = tl.load(
        q + row.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride + dim[None, :], mask=is_value, other=0.0
    )  # [heads, dim]
    keys = pool + kv_head * HEAD_DIM
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    sum_values = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for first in range(start, stop, BLOCK_KEYS):
        position = first + tl.arange(0, BLOCK_KEYS)
        visible = position < stop
        slot = tl.load(slots_of_row + position, mask=visible, other=0).to(tl.int64)
        key = tl.load(
            keys + slot[None, :] * slot_stride + dim[:, None],
            mask=visible[None, :] & (dim[:, None] < HEAD_DIM),
            other=0.0,
        )  # [dim, keys]
        score = tl.dot(query, key, input_precision=PRECISION) * scale  # base 2
        score = tl.where(visible[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        value = tl.load(
            keys + value_offset + slot[:, None] * slot_stride + dim[None, :],
            mask=visible[:, None] & (dim[None, :] < HEAD_DIM),
            other=0.0,
        )  # [keys, dim]
        total = total * shrink + tl.sum(weight, axis=1)
        sum_values = sum_values * shrink[:, None]
        sum_values = tl.dot(weight.to(value.dtype), value, sum_values, input_precision=PRECISION)
        best = new_best
    result = sum_values / total[:, None]
    count = tl.load(rows + 2 * row + 1)
    out_at = out + (row.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    if count == 1:
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_value)
        return
    place = item * NUM_KV_HEADS * GROUP + head
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], result, mask=is_value)
    tl.store(lse + place, best + tl.log2(total), mask=member < GROUP)
    tl.debug_barrier()  # all threads have written before one says so
    counter = arrived + row * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") < count - 1:
        return
    tl.store(counter, 0)  # for the next layer
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    result = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    first_item = tl.load(rows + 2 * row)
    for index in range(first_item, first_item + count):
        place = index * NUM_KV_HEADS * GROUP + head
        own = tl.load(lse + place, mask=member < GROUP, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, own)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(own - new_best)
        value = tl.load(
            partial + place[:, None] * HEAD_DIM + dim[None, :], mask=is_value, other=0.0, cache_modifier=".cg"
        )
        result = result * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        best = new_best
    tl.store(out_at, (result / total[:, None]).to(out.dtype.element_ty), mask=is_value)
