"""Everything between the fused qkv projection and attention in one launch: the adapters' part, head norms, RoPE, the
write to the pool.

Twin: ``reference.rope_and_store``, with adapters after ``reference.lora_grouped``. One program takes a token and a
group of its heads, query, key and value alike: all are read as two halves, and masks say what each becomes. Rotations
are fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import dependent, follow
from fineinfer.kernels.lora import RowExpansion

MAX_HEAD_DIM = 256
# Pairs (x[i], x[i + head_dim / 2]) of a program; with 2 warps 8 a thread, 16-byte loads. Never fewer than threads: a
# value held by two threads could be read by the second after the first has written the rotated one over it.
_PAIRS, _NUM_WARPS = 512, 2
# With adapters: rows of B asked for at once, 16 values of each half a thread, in programs of fewer pairs.
_LORA_RANKS, _LORA_PAIRS, _LORA_NUM_WARPS = 16, 128, 4


@triton.jit  # type: ignore[untyped-decorator]
def _expanded(  # type: ignore[no-untyped-def]
    part,
    split_stride,
    b_columns,
    b_row_stride,
    index,
    may_load,
    is_rank,
    inside,
    SPLITS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Both halves of ``shrunk @ B`` over the ranks ``index``, [GROUP, HALF_BLOCK] each; masks [RANKS, GROUP, 1]."""
    shrunk = tl.load(part + index, mask=may_load, other=0.0)
    for split in tl.static_range(1, SPLITS):
        shrunk += tl.load(part + split * split_stride.to(tl.int64) + index, mask=may_load, other=0.0)
    rows = b_columns + index.to(tl.int64) * b_row_stride  # [RANKS, GROUP, HALF_BLOCK]
    first = tl.load(rows, mask=may_load & inside[None, :, :], other=0.0)
    second = tl.load(rows + HALF, mask=may_load & inside[None, :, :], other=0.0)
    factor = tl.where(is_rank, shrunk, 0.0).to(first.dtype).to(tl.float32)  # rounded as shrunk rows are before B
    first = factor * tl.where(is_rank, first, 0.0).to(tl.float32)  # past its rank an adapter may hold anything
    second = factor * tl.where(is_rank, second, 0.0).to(tl.float32)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit(do_not_specialize=["split_stride"], do_not_specialize_on_alignment=["slots_ptr", "adapters_ptr"])  # type: ignore[untyped-decorator]
def _rope_store_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,  # both None: no head norms
    k_norm_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,  # this and the next four None: no adapters
    b_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    adapters_ptr: tl.tensor,
    eps: tl.tensor,
    split_stride: tl.tensor,
    b_slot_stride: tl.tensor,
    b_row_stride: tl.tensor,
    slot_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    ALL_HEADS: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS
    dtype = qkv_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]  # [GROUP, 1]
    lane = tl.arange(0, HALF_BLOCK)[None, :]  # [1, HALF_BLOCK]
    is_query = head < NUM_HEADS
    is_value = head >= NUM_ROTATED
    in_half = lane < HALF
    inside = (head < ALL_HEADS) & in_half

    source = qkv_ptr + row * (ALL_HEADS * HEAD_DIM) + head * HEAD_DIM + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [GROUP, HALF_BLOCK]
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = row * HEAD_DIM + lane
    cos_first = tl.load(cos_ptr + turn, mask=in_half, other=0.0).to(tl.float32)  # [1, HALF_BLOCK]
    cos_second = tl.load(cos_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)

    if shrunk_ptr is not None:
        adapter = tl.load(adapters_ptr + row).to(tl.int64)
        module = tl.where(is_query, 0, tl.where(is_value, 2, 1))  # [GROUP, 1]
        place = adapter * 3 + module
        adapted = head < tl.where(adapter >= 0, ALL_HEADS, 0)
        rank = tl.load(ranks_ptr + place, mask=adapted, other=0)
        scale = tl.load(scales_ptr + place, mask=adapted, other=0.0)
        part = (shrunk_ptr + row * (3 * MAX_RANK) + module * MAX_RANK)[None, :, :]  # [1, GROUP, 1]
        b_columns = (b_ptr + adapter * b_slot_stride + head * HEAD_DIM + lane)[None, :, :]  # [1, GROUP, HALF_BLOCK]
        index = tl.arange(0, RANKS)[:, None, None]
        # the first ranks are asked for before the rank is known
        may_load = (index < MAX_RANK) & adapted[None, :, :]
        first_sum, second_sum = _expanded(
            part, split_stride, b_columns, b_row_stride, index, may_load, index < rank[None, :, :], inside, SPLITS, HALF
        )
        for begin in range(RANKS, tl.max(rank), RANKS):
            is_rank = begin + index < rank[None, :, :]
            more = _expanded(
                part, split_stride, b_columns, b_row_stride, begin + index, is_rank, is_rank, inside, SPLITS, HALF
            )
            first_sum += more[0]
            second_sum += more[1]
        first = (first + scale * first_sum).to(dtype).to(tl.float32)
        second = (second + scale * second_sum).to(dtype).to(tl.float32)

    x, y = first, second
    if q_norm_ptr is not None:
        q_first = tl.load(q_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)  # [1, HALF_BLOCK]
        q_second = tl.load(q_norm_ptr + lane + HALF, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm_ptr + lane + HALF, mask=in_half, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM  # [GROUP, 1]
        inverse = tl.rsqrt(mean_square + eps)
        # rounded before and after the weight, as rms_norm does
        x = (x * inverse).to(dtype).to(tl.float32) * tl.where(is_query, q_first, k_first)
        y = (y * inverse).to(dtype).to(tl.float32) * tl.where(is_query, q_second, k_second)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    first = tl.where(is_value, first, x * cos_first - y * sin_first).to(dtype)
    second = tl.where(is_value, second, y * cos_second + x * sin_second).to(dtype)

    tl.store(source, first, mask=inside & is_query)
    tl.store(source + HALF, second, mask=inside & is_query)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    part = is_value.to(tl.int64)  # 0 keys, 1 values
    kv_head = head - NUM_HEADS - part * NUM_KV_HEADS
    target = pool_ptr + slot * slot_stride + part * part_stride + kv_head * head_stride + lane
    stored = inside & (head >= tl.where(slot >= 0, NUM_HEADS, ALL_HEADS))  # of a padding row none
    tl.store(target, first, mask=stored)
    tl.store(target + HALF, second, mask=stored)


def rope_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool_layer: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    lora: RowExpansion | None = None,
) -> None:
    """Rotate the query heads in place; rotate the key heads and write them, with the value heads, to the pool.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous; its key and value heads stay as they
            are, head_dim is even and at most ``MAX_HEAD_DIM``.
        cos: [num_tokens, head_dim], in ``qkv``'s dtype as every tensor here.
        sin: As ``cos``.
        slots: [num_tokens] int32 or int64, distinct. Negative: a padding row, of which nothing is stored and whose
            query heads may hold anything afterwards.
        pool_layer: [num_slots, 2, num_kv_heads, head_dim], strided, contiguous in the last dimension.
        num_heads: Query heads.
        q_norm: [head_dim] weight of the query heads' norm, or None.
        k_norm: As ``q_norm``, of the key heads; both or neither.
        eps: Of the head norms.
        lora: What query, key and value of each row still lack of its adapter, added first; None: nothing.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = pool_layer.shape[2]
    if pool_layer.shape[1:] != (2, num_kv_heads, head_dim) or num_heads + 2 * num_kv_heads != all_heads:
        raise ValueError(f"qkv {list(qkv.shape)} does not fit {num_heads} heads and pool {list(pool_layer.shape)}")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, must be even and at most {MAX_HEAD_DIM}")
    if not (cos.shape == sin.shape == (num_tokens, head_dim)) or slots.shape != (num_tokens,):
        raise ValueError(f"cos {list(cos.shape)}, sin {list(sin.shape)}, slots {list(slots.shape)}: {num_tokens} rows")
    if not (qkv.dtype == cos.dtype == sin.dtype == pool_layer.dtype) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{qkv.dtype}, {cos.dtype}, {sin.dtype}, {pool_layer.dtype} must agree; slots {slots.dtype}")
    dense = qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
    if not dense or pool_layer.stride(3) != 1:
        raise ValueError("qkv, cos, sin and slots must be contiguous, the pool in its last dimension")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != qkv.dtype or not norm.is_contiguous()):
            raise ValueError(f"head norm {list(norm.shape)} {norm.dtype}, expected [{head_dim}] {qkv.dtype}")
    if lora is not None:
        lora.check(qkv.flatten(1), 3)
    if num_tokens == 0:
        return
    half_block = triton.next_power_of_2(head_dim // 2)
    # heads of a program, any kind: 8 of 128, so 6 programs for one row of 48
    group = max(1, (_PAIRS if lora is None else _LORA_PAIRS) // half_block)
    slot_stride, part_stride, head_stride, _ = pool_layer.stride()
    adapters = (None,) * 5 if lora is None else lora[:5]
    strides = (0, 0, 0) if lora is None else (lora.shrunk.stride(0), lora.b.stride(0), lora.b.stride(1))
    max_rank, num_splits = (0, 1) if lora is None else (lora.max_rank, lora.shrunk.shape[0])
    _rope_store_kernel[(num_tokens, triton.cdiv(all_heads, group))](
        qkv, cos, sin, slots, pool_layer, q_norm, k_norm, *adapters, eps, *strides, slot_stride, part_stride,
        head_stride, num_heads, num_kv_heads, head_dim, group, half_block, max_rank, num_splits, _LORA_RANKS,
        num_warps=_NUM_WARPS if lora is None else _LORA_NUM_WARPS, **dependent(),
    )  # fmt: skip
