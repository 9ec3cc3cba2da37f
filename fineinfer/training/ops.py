"""The operations of a training step that are not matrix products: as kernels of the device, or as their torch twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fineinfer.kernels import reference, reference_training


class TrainingOps(NamedTuple):
    """One implementation of each; ``kernels/reference_training.py`` says what they take and which operands they change.

    Attributes:
        rms_norm: (x, weight, eps) -> norm.
        add_rms_norm: (x, delta, weight, eps) -> norm of the new ``x``, which receives the sum.
        rms_norm_backward: (grad, x, weight, eps, residual) -> norm; ``grad`` becomes that of ``x``.
        silu_and_mul: (gate_up, gate, up) -> product.
        silu_and_mul_backward: (grad, gate_up, gate, up); the first two change.
        rope: (qkv, cos, sin, num_heads, q_norm, k_norm, eps), in place.
        rope_backward: (grad_q, grad_k, grad_v, cos, sin) -> gradient of qkv.
        cross_entropy: (logits, targets) -> (losses, correct, gradient of the logits, maybe written over them).
        adamw: See the twin.
        dropout: (x, keys, salt, rate) -> copy with zeros.
    """

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    rms_norm_backward: Callable[..., torch.Tensor]
    silu_and_mul: Callable[..., torch.Tensor]
    silu_and_mul_backward: Callable[..., None]
    rope: Callable[..., None]
    rope_backward: Callable[..., torch.Tensor]
    cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    adamw: Callable[..., None]
    dropout: Callable[..., torch.Tensor]


REFERENCE_OPS = TrainingOps(
    reference.rms_norm,
    reference_training.add_rms_norm,
    reference_training.rms_norm_backward,
    reference_training.silu_and_mul,
    reference_training.silu_and_mul_backward,
    reference_training.rope,
    reference_training.rope_backward,
    reference_training.cross_entropy,
    reference_training.adamw,
    reference_training.dropout,
)


def pick_ops(backend: str, device: torch.device) -> TrainingOps | None:
    """The kernels, where serving uses them too; None: layers run as autograd graphs.

    Args:
        backend: ``reference`` or ``triton``.
        device: Where the model lives.
    """
    if backend == "reference" or device.type != "cuda":
        return None
    return triton_ops()


def triton_ops() -> TrainingOps:
    """The kernels; imports Triton."""
    from fineinfer.kernels import activation_training, adamw, cross_entropy, dropout, norm, norm_backward, rope

    return TrainingOps(
        norm.rms_norm,
        norm.add_rms_norm,
        norm_backward.rms_norm_backward,
        activation_training.silu_and_mul,
        activation_training.silu_and_mul_backward,
        rope.rope,
        rope.rope_backward,
        cross_entropy.cross_entropy,
        adamw.adamw,
        dropout.dropout,
    )
