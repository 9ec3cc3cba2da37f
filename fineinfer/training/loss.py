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
    with torch.no_grad():
        ops, weight = ops or REFERENCE_OPS, decoder.head_weight  # [vocab, hidden]
        eps = decoder.spec.rms_norm_eps
        logits = head_linear(ops.rms_norm(rows, decoder.norm, eps), weight)
        losses, correct, grad_logits = ops.cross_entropy(logits, target_ids)
        del logits
        grad = (grad_logits @ weight).mul_(scale)
        ops.rms_norm_backward(grad, rows, decoder.norm, eps, None)
        return ChunkLoss(grad, losses.sum(dtype=torch.float64), correct.sum())
