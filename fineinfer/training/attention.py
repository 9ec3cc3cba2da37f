"""Attention within whole sequences laid end to end, forward and backward as two plain functions.

Half types on a GPU take torch's flash attention, called where ``torch.nn.attention.varlen`` calls it: that wrapper has
no grouped heads before torch 2.12, the operation under it has. Everything else takes ``reference.attention_varlen``,
whose backward runs its forward again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fineinfer.kernels.reference import attention_varlen, has_flash


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a micro-batch begin and end.

    Attributes:
        bounds: 0, end of the first sequence, ..., num_tokens.
        cumulative: The same as int32 on the device.
        longest: Tokens of the longest.
    """

    bounds: list[int]
    cumulative: torch.Tensor
    longest: int

    @classmethod
    def make(cls, bounds: Sequence[int], device: torch.device) -> Sequences:
        """From the bounds; does not wait for the device."""
        cumulative = torch.tensor(bounds, dtype=torch.int32)
        if device.type == "cuda":
            cumulative = cumulative.pin_memory().to(device, non_blocking=True)
        return cls(list(bounds), cumulative, max(b - a for a, b in itertools.pairwise(bounds)))


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention.

    Args:
        q: [num_tokens, num_heads, head_dim], may be strided but for the last dimension, as all three.
        k: [num_tokens, num_kv_heads, head_dim].
        v: As ``k``.
        sequences: Bounds.
        window: Newest positions a token attends to, its own included, or None.

    Returns:
        (attended [num_tokens, num_heads, head_dim], what the backward needs besides: of flash attention the
        log-sum-exp [num_heads, num_tokens], else an empty tensor).
    """
    if not has_flash(q):
        return attention_varlen(q, k, v, sequences.bounds, window), q.new_empty(0)
    cumulative, longest = sequences.cumulative, sequences.longest
    left, causal = _window(window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cumulative, cumulative, longest, longest, 0.0, causal, False,
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attended: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values.

    Flash attention adds the parts of a query's gradient in any order, unless
    ``torch.use_deterministic_algorithms`` is on: then two runs give equal bits.

    Args:
        grad: [num_tokens, num_heads, head_dim] gradient of the output.
        heads: Queries, keys and values as in the forward.
        attended: The forward's output.
        lse: Its second result.
        sequences: As in the forward.
        window: As in the forward.
    """
    q, k, v = heads
    if not has_flash(q):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in heads)
            again = attention_varlen(q, k, v, sequences.bounds, window)
        grad_q, grad_k, grad_v = torch.autograd.grad(again, (q, k, v), grad)
        return grad_q, grad_k, grad_v
    cumulative, longest = sequences.cumulative, sequences.longest
    left, causal = _window(window)
    random_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, attended, lse, cumulative, cumulative, longest, longest, 0.0, causal,
        random_state, torch.empty(0, device=q.device), window_size_left=left, window_size_right=0,
    )  # fmt: skip


def _window(window: int | None) -> tuple[int, bool]:
    """(tokens to the left of a query's own, whether that is all of them), as flash attention counts."""
    return (-1, True) if window is None else (window - 1, False)
