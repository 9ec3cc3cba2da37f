"""Head and loss for one chunk of trained tokens, with its gradient; the logits live only within the chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fineinfer.kernels.linear import head_linear
from fineinfer.model.decoder import Decoder
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps


@dataclass(frozen=True)
class ChunkLoss:
    """Result of one head chunk.

    Attributes:
        grad: [num_rows, hidden], gradient of ``scale * loss_sum`` with respect to the rows.
        loss_sum: Sum of the token losses, an fp64 scalar.
        num_correct: Tokens whose most likely prediction is the target, an int64 scalar.
    """

    grad: torch.Tensor
    loss_sum: torch.Tensor
    num_correct: torch.Tensor


def head_chunk(
    decoder: Decoder, rows: torch.Tensor, target_ids: torch.Tensor, scale: float, ops: TrainingOps | None = None
) -> ChunkLoss:
    """Final norm, head and cross entropy, forward and backward.

    Logits are in fp32 within the loss (fp64 for an fp64 model).

    Args:
        decoder: Gives ``final_norm`` and ``head_weight``.
        rows: [num_rows, hidden] output of the last layer at the rows that predict a trained token.
        target_ids: [num_rows] int64.
        scale: 1 / trained tokens of the whole update.
        ops: Kernels; None: the reference operations.
    """
    ops = ops or REFERENCE_OPS
    with torch.no_grad():
        losses, correct, grad_logits = _token_losses(decoder, rows, target_ids, ops)
        grad = (grad_logits @ decoder.head_weight).mul_(scale)
        ops.rms_norm_backward(grad, rows, decoder.norm, decoder.spec.rms_norm_eps, None)
        return ChunkLoss(grad, losses.sum(dtype=torch.float64), correct.sum())


@torch.no_grad()
def evaluated_chunk(
    decoder: Decoder, rows: torch.Tensor, target_ids: torch.Tensor, ops: TrainingOps | None = None
) -> torch.Tensor:
    """(sum of the token losses, number of right predictions), [2] fp64: ``head_chunk`` without the way back."""
    losses, correct, _ = _token_losses(decoder, rows, target_ids, ops or REFERENCE_OPS)
    return torch.stack((losses.sum(dtype=torch.float64), correct.sum(dtype=torch.float64)))


def _token_losses(
    decoder: Decoder, rows: torch.Tensor, target_ids: torch.Tensor, ops: TrainingOps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``TrainingOps.cross_entropy`` returns, [num_rows], [num_rows] and [num_rows, vocab]."""
    normed = ops.rms_norm(rows, decoder.norm, decoder.spec.rms_norm_eps)
    return ops.cross_entropy(head_linear(normed, decoder.head_weight), target_ids)
