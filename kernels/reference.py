"""Plain torch twins of every kernel: what runs without Triton, and what a Triton kernel is tested against.

Shapes: a pool layer is [num_slots, 2, num_kv_heads, head_dim] (keys 0, values 1). Slots of a sequence are an index
tensor, or a python slice when they are one contiguous run (then keys and values are views, nothing is gathered).
Grouped query heads are folded as [num_kv_heads, group, ...], so keys and values are never repeated.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

Slots = slice | torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension; half types are normalised in fp32, then scaled in their own.

    An fp32 ``x`` under a half ``weight`` is rounded once, at the end, to the weight's type.
    """
    if x.dtype != weight.dtype:
        return (weight.to(x.dtype) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))).to(weight.dtype)
    if x.dtype in (torch.float16, torch.bfloat16):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + delta``, and that sum: both [num_tokens, hidden], out of place and differentiable."""
    x = x + delta
    return rms_norm(x, weight, eps), x


class _SiluAndMul(torch.autograd.Function):
    """Saves its input only and writes both halves of the gradient into one buffer: no copy to join them."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        joined = torch.empty_like(gate_up)
        grad_gate, grad_up = joined.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return joined


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [num_tokens, 2 * intermediate], the gate's columns first."""
    if gate_up.requires_grad and torch.is_grad_enabled():
        return _SiluAndMul.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [num_tokens, num_heads, head_dim] by ``cos``/``sin`` [num_tokens, head_dim] (halves, as Llama)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def store_kv(pool_layer: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write ``k`` and ``v`` [num_tokens, num_kv_heads, head_dim] to their slots (distinct ones)."""
    if isinstance(slots, slice):
        pool_layer[slots, 0].copy_(k)
        pool_layer[slots, 1].copy_(v)
    else:
        pool_layer.index_copy_(0, slots, torch.stack((k, v), dim=1).to(pool_layer.dtype))


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
) -> None:
    """Norm (with ``q_norm`` and ``k_norm``) and rotate the query heads in place, and key heads into the pool.

    Unlike the rest of this file it waits for the device: it counts the rows to store.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its key and value heads stay as they are.
        cos: [num_tokens, head_dim].
        sin: As ``cos``.
        slots: [num_tokens] integer, distinct; of a row with a negative one nothing is stored.
        pool_layer: [num_slots, 2, num_kv_heads, head_dim].
        num_heads: Query heads.
        q_norm: [head_dim] weight of the query heads' norm, or None.
        k_norm: As ``q_norm``, of the key heads.
        eps: Of the head norms.
    """
    num_kv_heads = pool_layer.shape[2]
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    stored = slots >= 0
    turned_k = apply_rope(k if k_norm is None else rms_norm(k, k_norm, eps), cos, sin)
    store_kv(pool_layer, slots[stored].long(), turned_k[stored], v[stored])
    q.copy_(apply_rope(q if q_norm is None else rms_norm(q, q_norm, eps), cos, sin))


def move_slots(pool_layer: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slots ``src`` to ``dst``; all are read before any is written, so the two may overlap."""
    pool_layer.index_copy_(0, dst, pool_layer.index_select(0, src))


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [num_queries, num_keys], True where the query (the last keys' rows) may look."""
    key = torch.arange(num_keys, device=device)
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def prefill_mask(num_tokens: int, start: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The mask of ``attention_prefill`` over the keys that any of its rows may see; None where none is needed."""
    num_keys = start + num_tokens - _first_visible(start, window)
    if start == 0 and (window is None or window >= num_keys):
        return None
    return causal_mask(num_tokens, num_keys, window, device)


def attention_prefill(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    slots_of_sequence: Slots,
    start: int,
    window: int | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one prefill chunk over its whole sequence in the pool.

    Args:
        q: [num_tokens, num_heads, head_dim], the tokens at positions ``start`` ...
        pool_layer: Keys and values; the chunk's own are stored already.
        slots_of_sequence: The ``start + num_tokens`` slots of the sequence up to the chunk's end, in order.
        start: Number of tokens before the chunk.
        window: Newest positions a token attends to, its own included, or None.
        mask: ``prefill_mask(num_tokens, start, window, device)`` if the caller shares it between layers.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    k, v = _keys_values(pool_layer, slots_of_sequence, _first_visible(start, window))
    return _causal(q, k, v, window, mask)


def attention_decode_one(
    q: torch.Tensor, pool_layer: torch.Tensor, slots: Slots, window: int | None = None
) -> torch.Tensor:
    """Attention of one new token: ``q`` [num_heads, head_dim] over its sequence's slots (its own included)."""
    return attention_decode_each(q[None], pool_layer, [slots], window)[0]


def attention_decode_each(
    q: torch.Tensor, pool_layer: torch.Tensor, slots_of_rows: Sequence[Slots], window: int | None = None
) -> torch.Tensor:
    """One new token for each sequence, one call per sequence: the fast way on a CPU, where padding loses.

    Args:
        q: [batch, num_heads, head_dim].
        pool_layer: Keys and values; the new tokens' own are stored already.
        slots_of_rows: For each row its sequence's slots in order, the new token's last.
        window: Newest positions a token attends to, its own included, or None.

    Returns:
        [batch, num_heads, head_dim].
    """
    num_kv_heads = pool_layer.shape[2]
    queries = q.unflatten(1, (num_kv_heads, -1))[:, None].unbind(0)  # batch x [1, kv_heads, group, head_dim]
    keys, values = pool_layer.permute(1, 2, 0, 3)[:, None].unbind(0)  # [1, kv_heads, num_slots, head_dim]
    out = []
    for query, slots in zip(queries, slots_of_rows, strict=True):
        if isinstance(slots, slice):
            first = slots.start if window is None else max(slots.start, slots.stop - window)
            k, v = keys.narrow(2, first, slots.stop - first), values.narrow(2, first, slots.stop - first)
        else:
            newest = slots if window is None else slots[-window:]
            k, v = pool_layer.index_select(0, newest).permute(1, 2, 0, 3)[:, None].unbind(0)
        out.append(F.scaled_dot_product_attention(query, k, v))
    return torch.cat(out).flatten(1, 2)


def attention_decode(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_table: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """One new token for each sequence as one padded batch: few launches, for GPUs.

    Args:
        q: [batch, num_heads, head_dim].
        pool_layer: Keys and values; the new tokens' own are stored already.
        slot_table: [batch, max_length] integer; entries past a row's length may be any valid slot.
        lengths: [batch] integer, each at least 1.
        window: Newest positions a token attends to, its own included, or None.

    Returns:
        [batch, num_heads, head_dim].
    """
    batch, max_length = slot_table.shape
    num_kv_heads = pool_layer.shape[2]
    position = torch.arange(max_length, device=q.device)
    mask = position < lengths[:, None]
    # padding reads the row's own first slot: a foreign one may hold NaN, which no mask takes out again
    slot_table = torch.where(mask, slot_table, slot_table[:, :1])
    gathered = pool_layer.index_select(0, slot_table.flatten()).unflatten(0, (batch, max_length))
    k, v = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, kv_heads, max_length, head_dim]
    if window is not None:
        mask = mask & (position >= lengths[:, None] - window)
    query = q.unflatten(1, (num_kv_heads, -1))  # [batch, kv_heads, group, head_dim]
    # an H100 takes 0.33 ms for 60 rows of 1,000 tokens this way, 0.99 ms with matmul, softmax, matmul by hand
    mask = mask[:, None, None].expand(-1, -1, query.shape[2], -1)
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask).flatten(1, 2)


def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int], window: int | None = None
) -> torch.Tensor:
    """Causal attention within each of several whole sequences laid end to end; differentiable.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim].
        v: As ``k``.
        cu_seqlens: Python numbers 0, end of the first sequence, ..., num_tokens.
        window: Newest positions a token attends to, its own included, or None.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    bounds = list(itertools.pairwise(cu_seqlens))
    if has_flash(q):
        return _varlen_flash(q, k, v, cu_seqlens, window)
    out = [_causal(q[a:b], k[a:b].transpose(0, 1), v[a:b].transpose(0, 1), window, None) for a, b in bounds if b > a]
    return torch.cat(out) if len(out) > 1 else out[0]


def lora_grouped(
    x: torch.Tensor,
    y_out: torch.Tensor,
    segments: Sequence[tuple[int, int, int]],
    a_stack: torch.Tensor,
    b_stack: torch.Tensor,
    scales: Sequence[float],
) -> torch.Tensor:
    """Add each segment's adapter to the base output, in place: ``y += scale * (x @ A.T) @ B.T``.

    Args:
        x: [num_tokens, in_features].
        y_out: [num_tokens, out_features], base output, may be a column slice; rows in no segment are not touched.
        segments: (first row, end row, adapter slot).
        a_stack: [num_adapter_slots, max_rank, in_features], zero past an adapter's rank.
        b_stack: [num_adapter_slots, out_features, max_rank].
        scales: Of each adapter slot.

    Returns:
        ``y_out``.
    """
    for first, end, slot in segments:
        shrunk = x[first:end] @ a_stack[slot].T
        y_out[first:end].addmm_(shrunk, b_stack[slot].T, alpha=scales[slot])
    return y_out


def _first_visible(start: int, window: int | None) -> int:
    """Oldest position that the token at position ``start`` sees."""
    return 0 if window is None else max(0, start - window + 1)


def _keys_values(pool_layer: torch.Tensor, slots: Slots, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence from position ``first`` on, each [num_kv_heads, num_keys, head_dim]."""
    if isinstance(slots, slice):
        chosen = pool_layer[slots.start + first : slots.stop]
    else:
        chosen = pool_layer.index_select(0, slots[first:])
    k, v = chosen.permute(1, 2, 0, 3).unbind(0)
    return k, v


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the last rows of one sequence; ``k``, ``v`` [num_kv_heads, num_keys, head_dim]."""
    num_queries, num_heads = q.shape[:2]
    num_kv_heads, num_keys = k.shape[:2]
    group = num_heads // num_kv_heads
    query = q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)  # [kv_heads, group, num_queries, head_dim]
    k = k[:, None].expand(-1, group, -1, -1)  # stride 0: shared, not repeated
    v = v[:, None].expand(-1, group, -1, -1)
    plain = num_queries == num_keys and (window is None or window >= num_keys)
    if mask is None and not plain:
        mask = causal_mask(num_queries, num_keys, window, q.device)
    if mask is not None and q.is_cuda:
        out = _by_definition(query, k, v, mask)
    else:
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=mask is None)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, q.shape[2])


def _by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention in three operations. On CUDA, SDPA with a mask and heads of stride 0 gives wrong last rows, or reads
    memory that is not its own (torch 2.11, H100, fp32, 129 queries over 192 keys)."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


def has_flash(q: torch.Tensor) -> bool:
    """Whether torch's flash attention takes queries [.., .., head_dim] of this device, dtype and head size."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and q.shape[2] % 8 == 0 and torch.cuda.get_device_capability(q.device)[0] >= 8


@functools.cache
def _flash_takes_groups() -> bool:
    """Whether this torch's varlen attention knows grouped heads (2.11 may not)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int], window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(b - a for a, b in itertools.pairwise(cu_seqlens))
    # pinned and asynchronous: a plain copy would wait for the device in every layer
    cumulative = torch.tensor(cu_seqlens, dtype=torch.int32).pin_memory().to(q.device, non_blocking=True)
    left = -1 if window is None else window - 1  # flash counts the tokens before the own one
    grouped = k.shape[1] != q.shape[1]
    options: dict[str, Any] = {}
    if grouped and _flash_takes_groups():
        options["enable_gqa"] = True
    elif grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, cumulative, cumulative, longest, longest, window_size=(left, 0), **options)
    return out if isinstance(out, torch.Tensor) else out[0]
