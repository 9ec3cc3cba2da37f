"""Head norms and RoPE of the packed qkv projection in training, in place, and the way back.

Twins: ``reference_training.rope`` and ``reference_training.rope_backward``. One program takes a token and a group of
its heads; rotations are fp32, rounded once. Unlike ``rope_store`` nothing goes to a pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, next_power_of_2

MAX_HEAD_DIM = 256
# Pairs (x[i], x[i + head_dim / 2]) of a program; with 2 warps 8 a thread. Never fewer than threads: a value held by two
# threads could be read by the second after the first has written the rotated one over it.
_PAIRS, _NUM_WARPS = 512, 2


@triton.jit  # type: ignore[untyped-decorator]
def _rope_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,  # None: forward, in place
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,  # both None: no head norms
    k_norm_ptr: tl.tensor,
    eps: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]  # [GROUP, 1]
    lane = tl.arange(0, HALF_BLOCK)[None, :]  # [1, HALF_BLOCK]
    in_half = lane < HALF
    is_query = (head < NUM_HEADS) & in_half
    is_key = (head >= NUM_HEADS) & (head < NUM_ROTATED) & in_half
    q_place = q_ptr + row * q_stride + head * HEAD_DIM + lane
    k_place = k_ptr + row * k_stride + (head - NUM_HEADS) * HEAD_DIM + lane
    x = tl.load(q_place, mask=is_query, other=0.0) + tl.load(k_place, mask=is_key, other=0.0)  # one is masked away
    y = tl.load(q_place + HALF, mask=is_query, other=0.0) + tl.load(k_place + HALF, mask=is_key, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)  # [GROUP, HALF_BLOCK]
    turn = row * HEAD_DIM + lane
    cos_x = tl.load(cos_ptr + turn, mask=in_half, other=0.0).to(tl.float32)  # [1, HALF_BLOCK]
    cos_y = tl.load(cos_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_x = tl.load(sin_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
    sin_y = tl.load(sin_ptr + turn + HALF, mask=in_half, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        q_first = tl.load(q_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)  # [1, HALF_BLOCK]
        q_second = tl.load(q_norm_ptr + lane + HALF, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm_ptr + lane, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm_ptr + lane + HALF, mask=in_half, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM + eps)  # [GROUP, 1]
        # rounded before and after the weight, as rms_norm does
        x = (x * inverse).to(dtype).to(tl.float32) * tl.where(is_query, q_first, k_first)
        y = (y * inverse).to(dtype).to(tl.float32) * tl.where(is_query, q_second, k_second)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    target = out_ptr + row * ((NUM_ROTATED + NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + lane
    if v_ptr is None:
        tl.store(target, (x * cos_x - y * sin_x).to(dtype), mask=is_query | is_key)
        tl.store(target + HALF, (y * cos_y + x * sin_y).to(dtype), mask=is_query | is_key)
    else:
        is_value = (head >= NUM_ROTATED) & (head < NUM_ROTATED + NUM_KV_HEADS) & in_half
        v_place = v_ptr + row * v_stride + (head - NUM_ROTATED) * HEAD_DIM + lane
        v_first = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)
        v_second = tl.load(v_place + HALF, mask=is_value, other=0.0).to(tl.float32)
        inside = is_query | is_key | is_value
        tl.store(target, tl.where(is_value, v_first, x * cos_x + y * sin_y).to(dtype), mask=inside)
        tl.store(target + HALF, tl.where(is_value, v_second, y * cos_y - x * sin_x).to(dtype), mask=inside)


def rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (with ``q_norm`` and ``k_norm``) and rotate the query and key heads in place.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous; head_dim is even, at most
            ``MAX_HEAD_DIM``.
        cos: [num_tokens, head_dim], in ``qkv``'s dtype as every tensor here.
        sin: As ``cos``.
        num_heads: Query heads.
        q_norm: [head_dim] weight of the query heads' norm, or None.
        k_norm: As ``q_norm``, of the key heads; both or neither.
        eps: Of the head norms.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_kv_heads, odd = divmod(qkv.shape[1] - num_heads, 2)
    if odd or num_kv_heads < 1 or (q_norm is None) != (k_norm is None):
        raise ValueError(f"qkv {list(qkv.shape)} does not fit {num_heads} query heads; q_norm and k_norm go together")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != qkv.shape[2:] or norm.dtype != qkv.dtype or not norm.is_contiguous()):
            raise ValueError(f"head norm {list(norm.shape)} {norm.dtype} does not fit {list(qkv.shape)} {qkv.dtype}")
    q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    _launch((q, k, None), qkv, cos, sin, (q_norm, k_norm, eps))


def rope_backward(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Turn the gradients of rotated queries and keys back and lay those of queries, keys and values side by side.

    Args:
        grad_q: [num_tokens, num_heads, head_dim]; tokens may be strided, as of all three.
        grad_k: [num_tokens, num_kv_heads, head_dim].
        grad_v: As ``grad_k``.
        cos: [num_tokens, head_dim], in the gradients' dtype.
        sin: As ``cos``.

    Returns:
        [num_tokens, num_heads + 2 * num_kv_heads, head_dim].

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = grad_q.shape, grad_k.shape[1]
    fitting = grad_k.shape == grad_v.shape == (num_tokens, num_kv_heads, head_dim)
    if not fitting or not grad_q.dtype == grad_k.dtype == grad_v.dtype:
        raise ValueError(f"gradients {list(grad_q.shape)}, {list(grad_k.shape)}, {list(grad_v.shape)} do not fit")
    out = grad_q.new_empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    _launch((grad_q, grad_k, grad_v), out, cos, sin, (None, None, 0.0))
    return out


def _launch(
    sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float],
) -> None:
    (num_tokens, all_heads, head_dim), (q, k, v) = out.shape, sources
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, must be even and at most {MAX_HEAD_DIM}")
    for turn in (cos, sin):
        if turn.shape != (num_tokens, head_dim) or turn.dtype != out.dtype or not turn.is_contiguous():
            raise ValueError(f"cosines and sines must be [{num_tokens}, {head_dim}] {out.dtype}, contiguous")
    for source in sources:
        if source is not None and source.stride()[1:] != (head_dim, 1):
            raise ValueError("the heads of a token must lie side by side")
    if not out.is_contiguous():
        raise ValueError("qkv must be contiguous")
    if num_tokens == 0:
        return
    half_block = next_power_of_2(head_dim // 2)
    group = _PAIRS // half_block
    written = all_heads if v is not None else q.shape[1] + k.shape[1]
    v_stride = 0 if v is None else v.stride(0)
    _rope_kernel[(num_tokens, cdiv(written, group))](
        q, k, v, out, cos, sin, *norms, q.stride(0), k.stride(0), v_stride,
        q.shape[1], k.shape[1], head_dim, group, half_block, num_warps=_NUM_WARPS,
    )  # fmt: skip
