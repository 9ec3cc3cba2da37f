"""Copy slots of one layer's pool to other slots of it, one program per slot and group of its heads.

Twin: ``reference.move_slots``, which reads everything before it writes; this kernel does not, so the two sets of
slots must have none in common.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, next_power_of_2

_TILE = 2048  # values of a program, 16 a thread: a slot of 8 key heads of 128 is one program
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _move_slots_kernel(
    pool_ptr: tl.tensor,
    src_ptr: tl.tensor,
    dst_ptr: tl.tensor,
    slot_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    move = tl.program_id(0)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]  # [GROUP, 1], keys then values
    lane = tl.arange(0, DIM_BLOCK)[None, :]  # [1, DIM_BLOCK]
    inside = (head < 2 * NUM_KV_HEADS) & (lane < HEAD_DIM)
    part = (head >= NUM_KV_HEADS).to(tl.int64)
    within = part * part_stride + (head - part * NUM_KV_HEADS) * head_stride + lane
    src = tl.load(src_ptr + move).to(tl.int64) * slot_stride
    dst = tl.load(dst_ptr + move).to(tl.int64) * slot_stride
    tl.store(pool_ptr + dst + within, tl.load(pool_ptr + src + within, mask=inside), mask=inside)


def move_slots(pool_layer: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slots ``src`` to ``dst``; no slot may be in both, nor twice in ``dst`` (not checked, that would wait).

    Args:
        pool_layer: [num_slots, 2, num_kv_heads, head_dim], strided, contiguous in the last dimension.
        src: [num_moves] int32 or int64, on the pool's device.
        dst: As ``src``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    _, parts, num_kv_heads, head_dim = pool_layer.shape
    if parts != 2 or pool_layer.stride(3) != 1:
        raise ValueError(f"pool {list(pool_layer.shape)} must be [slots, 2, heads, head_dim], the last contiguous")
    if src.dim() != 1 or src.shape != dst.shape or not (src.is_contiguous() and dst.is_contiguous()):
        raise ValueError(f"src {list(src.shape)} and dst {list(dst.shape)} must be equally long and contiguous")
    if src.dtype not in (torch.int32, torch.int64) or dst.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"src {src.dtype} and dst {dst.dtype} must be int32 or int64")
    if src.shape[0] == 0:
        return
    dim_block = next_power_of_2(head_dim)
    group = min(max(1, _TILE // dim_block), next_power_of_2(2 * num_kv_heads))
    slot_stride, part_stride, head_stride, _ = pool_layer.stride()
    _move_slots_kernel[(src.shape[0], cdiv(2 * num_kv_heads, group))](
        pool_layer, src, dst, slot_stride, part_stride, head_stride,
        num_kv_heads, head_dim, group, dim_block, num_warps=_NUM_WARPS,
    )  # fmt: skip
