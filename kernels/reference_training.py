"""Plain torch twins of the kernels that only training uses, and what a Triton kernel of theirs is tested against.

Like the kernels they write their results over operands that are not needed any more, and say so. Half types are
computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fineinfer.kernels import reference
from fineinfer.kernels.reference_noise import HASH_STEPS, mixed, signed


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x += delta`` in place, then the norm of the new ``x``: both [num_tokens, hidden]."""
    return reference.rms_norm(x.add_(delta), weight, eps)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of ``rms_norm`` with respect to its rows, and its output once more.

    Args:
        grad: [num_rows, hidden] gradient of the output; receives the gradient of ``x``, ``residual`` added.
        x: [num_rows, hidden], the norm's input.
        weight: [hidden].
        eps: Added to the mean square.
        residual: Gradient that reaches ``x`` beside the norm, as ``grad``, or None.

    Returns:
        The norm's output, [num_rows, hidden].
    """
    rows, scaled = _wide(x), _wide(grad) * _wide(weight)
    inverse = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    normed = rows * inverse
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad.copy_(grad_x if residual is None else grad_x + _wide(residual))
    return weight * normed.to(x.dtype)


class Expansion(NamedTuple):
    """What an adapter adds to a projection: ``scaling * xa B^T``, [num_rows, out_features].

    Attributes:
        xa: [num_rows, rank]; rows may be strided.
        b: [out_features, rank], contiguous.
        scaling: Factor.
    """

    xa: torch.Tensor
    b: torch.Tensor
    scaling: float


def silu_and_mul(gate_up: torch.Tensor, gate: Expansion | None, up: Expansion | None) -> torch.Tensor:
    """``silu(gate) * up`` of a projection whose adapter is still to be added.

    Args:
        gate_up: [num_rows, 2 * intermediate] of the base model, the gate's columns first.
        gate: The adapter's part of the gate, None where it has none.
        up: The same of the other half.

    Returns:
        [num_rows, intermediate].
    """
    gates, ups = _adapted(gate_up, gate, up)
    return (F.silu(gates) * ups).to(gate_up.dtype)


def silu_and_mul_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, gate: Expansion | None, up: Expansion | None
) -> None:
    """Gradient of ``silu_and_mul`` with respect to the projection, in place.

    Args:
        grad: [num_rows, intermediate] gradient of the output; receives the output once more.
        gate_up: As in the forward; receives its gradient.
        gate: As in the forward.
        up: As in the forward.
    """
    gates, ups = _adapted(gate_up, gate, up)
    wide, sigmoid = _wide(grad), torch.sigmoid(gates)
    silu = gates * sigmoid
    joined = torch.cat((wide * ups * (sigmoid * (1 + gates * (1 - sigmoid))), wide * silu), dim=-1)
    grad.copy_(silu * ups)
    gate_up.copy_(joined)


def _adapted(gate_up: torch.Tensor, gate: Expansion | None, up: Expansion | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves with the adapter, half types in fp32."""
    gates, ups = (
        half if part is None else half + part.scaling * (_wide(part.xa) @ _wide(part.b).t())
        for half, part in zip(_wide(gate_up).chunk(2, dim=-1), (gate, up), strict=True)
    )
    return gates, ups


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
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim].
        cos: [num_tokens, head_dim].
        sin: As ``cos``.
        num_heads: Query heads.
        q_norm: [head_dim] weight of the query heads' norm, or None.
        k_norm: As ``q_norm``, of the key heads.
        eps: Of the head norms.
    """
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    for part, weight in ((q, q_norm), (k, k_norm)):
        normed = part if weight is None else reference.rms_norm(part, weight, eps)
        part.copy_(reference.apply_rope(_wide(normed), _wide(cos), _wide(sin)))


def rope_backward(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Turn the gradients of rotated queries and keys back and lay those of queries, keys and values side by side.

    Args:
        grad_q: [num_tokens, num_heads, head_dim].
        grad_k: [num_tokens, num_kv_heads, head_dim].
        grad_v: As ``grad_k``.
        cos: [num_tokens, head_dim].
        sin: As ``cos``.

    Returns:
        [num_tokens, num_heads + 2 * num_kv_heads, head_dim].
    """
    joined = torch.cat((grad_q, grad_k, grad_v), dim=1)
    turning = joined[:, : grad_q.shape[1] + grad_k.shape[1]]
    wide = _wide(turning)
    first, second = (wide * _wide(sin)[:, None]).chunk(2, dim=-1)
    turning.copy_(wide * _wide(cos)[:, None] + torch.cat((second, -first), dim=-1))
    return joined


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of each row, whether its target is the most likely id, and the gradient of the sum of losses.

    The loss goes through ``log_softmax`` as in transformers: ``logsumexp`` is nearer to the exact value but 6e-6 away
    from what users compare with.

    Args:
        logits: [num_rows, vocab]; a kernel writes the gradient over them.
        targets: [num_rows] int64.

    Returns:
        (losses [num_rows] in at least fp32, [num_rows] bool, softmax - one-hot as the logits).
    """
    wide, picked = _wide(logits), targets[:, None]
    correct = wide.gather(1, picked) == wide.amax(dim=-1, keepdim=True)  # argmax takes 5 x as long
    log_probs = F.log_softmax(wide, dim=-1)
    losses = -log_probs.gather(1, picked)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=gradient.dtype))
    return losses[:, 0], correct[:, 0], gradient.to(logits.dtype)


def dropout_threshold(rate: float) -> int:
    """Signed hashes below it are dropped: a share ``rate`` of all of them."""
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)


def dropout(x: torch.Tensor, keys: torch.Tensor, salt: int, rate: float) -> torch.Tensor:
    """A copy of ``x`` in which a share ``rate`` of the elements is zero; the others are not scaled.

    An element's fate is a hash of its row's key, the salt and its column, so the same mask can be made again at any
    time, on any device, for any part of the rows.

    Args:
        x: [num_rows, width].
        keys: [num_rows] int32, well mixed.
        salt: Which mask of those rows.
        rate: 0 to 1.
    """
    columns = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    bits = mixed(keys ^ salt)[:, None] ^ mixed(columns)
    first, second = (signed(factor) for factor in HASH_STEPS)
    bits.mul_(first)  # both keys are mixed already: what is left of the finaliser is enough
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits.mul_(second)
    return torch.where(bits >= dropout_threshold(rate), x, 0.0)


def adamw(
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute: torch.Tensor | None,
    *,
    grad_scale: float,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    num_updates: int,
) -> None:
    """One update of Adam with decoupled weight decay (Loshchilov and Hutter 2019) on flat tensors, in place.

    Args:
        params: [n] master weights.
        grads: [n]; may be scaled in place.
        exp_avg: [n] first moment.
        exp_avg_sq: [n] second moment.
        compute: [n] copy of the masters in the model's dtype, refreshed; None where there is none.
        grad_scale: Factor on the gradient, of clipping.
        learning_rate: Of this update.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        num_updates: Updates including this one, for the bias corrections.
    """
    if grad_scale != 1.0:
        grads.mul_(grad_scale)
    params.mul_(1 - learning_rate * weight_decay)
    exp_avg.lerp_(grads, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(grads, grads, value=1 - betas[1])
    correction1, correction2 = 1 - betas[0] ** num_updates, 1 - betas[1] ** num_updates
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(eps)
    params.addcdiv_(exp_avg, denominator, value=-learning_rate / correction1)
    if compute is not None:
        compute.copy_(params)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half types in fp32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
