"""Everything between the fused qkv projection and attention in one launch: head norms, RoPE, the write to the pool.

Twin: ``reference.rope_and_store``. One program takes a token and a group of its heads, query, key and value alike:
all are read as two halves, and masks say what each becomes. Rotations are fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, dependent, follow, next_power_of_2
from fineinfer.kernels.lora import AdapterPart, adapter_part

MAX_HEAD_DIM = 256
# Pairs (x[i], x[i + head_dim / 2]) of a program; with 2 warps 8 a thread, 16-byte loads. Never fewer than threads: a
# value held by two threads could be read by the second after the first has written the rotated one over it.
_PAIRS, _NUM_WARPS = 512, 2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "row_slots_ptr"])  # type: ignore[untyped-decorator]
def _rope_store_kernel(
    qkv_ptr: tl.tensor,
    part_ptr: tl.tensor,  # both None: no adapters
    row_slots_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,  # both None: no head norms
    k_norm_ptr: tl.tensor,
    eps: tl.tensor,
    slot_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
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

    place = row * (ALL_HEADS * HEAD_DIM) + head * HEAD_DIM + lane
    source = qkv_ptr + place
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [GROUP, HALF_BLOCK]
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if part_ptr is not None:
        first = (first + adapter_part(part_ptr, row_slots_ptr, row, place, inside)).to(dtype).to(tl.float32)
        second = (second + adapter_part(part_ptr, row_slots_ptr, row, place + HALF, inside)).to(dtype).to(tl.float32)
    turn = row * HEAD_DIM + lane
    cos_first = tl.load(cos_ptr + turn, mask=in_half, other=0.0).to(tl.float32)  # [1, HALF_BLOCK]
    cos_second = tl.load(cos_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)

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
    part: AdapterPart | None = None,
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
        part: What adapters add to ``qkv``, as [num_tokens, all heads * head_dim]; the sum is rounded to its dtype as
            after ``lora.lora_expand``.

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
    if part is not None:
        part.check(qkv.flatten(1))
    if num_tokens == 0:
        return
    half_block = next_power_of_2(head_dim // 2)
    group = _PAIRS // half_block  # heads of a program, any kind: 8 of 128, so 6 programs for one row of 48
    slot_stride, part_stride, head_stride, _ = pool_layer.stride()
    _rope_store_kernel[(num_tokens, cdiv(all_heads, group))](
        qkv, *(part or (None, None)), cos, sin, slots, pool_layer, q_norm, k_norm, eps,
        slot_stride, part_stride, head_stride, num_heads, num_kv_heads, head_dim, group, half_block,
        num_warps=_NUM_WARPS, **dependent(),
    )  # fmt: skip
