"""Head and loss for one chunk of trained tokens, with its gradient; the logits live only within the chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fineinfer.kernels.linear import head_linear
from fineinfer.model.decoder import Decoder


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


def head_chunk(decoder: Decoder, rows: torch.Tensor, target_ids: torch.Tensor, scale: float) -> ChunkLoss:
    """Final norm, head and cross entropy, forward and backward.

    Logits are computed in fp32 (fp64 for an fp64 model) and go through ``log_softmax`` as in transformers:
    ``logsumexp`` is nearer to the exact value but 6e-6 away from what users compare with.

    Args:
        decoder: Gives ``final_norm`` and ``head_weight``.
        rows: [num_rows, hidden] output of the last layer at the rows that predict a trained token.
        target_ids: [num_rows] int64.
        scale: 1 / trained tokens of the whole update.
    """
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        normed = decoder.final_norm(leaf)
    with torch.no_grad():
        weight = decoder.head_weight  # [vocab, hidden]
        logits = head_linear(normed.detach(), weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        picked = target_ids[:, None]
        num_correct = (wide.gather(1, picked) == wide.amax(dim=-1, keepdim=True)).sum()  # argmax takes 5 x as long
        log_probs = F.log_softmax(wide, dim=-1)
        del logits, wide
        loss_sum = -log_probs.gather(1, picked).sum(dtype=torch.float64)
        # d(loss)/d(logits) = softmax - one-hot, made in place of the log-probabilities
        grad_logits = log_probs.exp_()
        grad_logits.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=grad_logits.dtype))
        grad_normed = (grad_logits.to(weight.dtype) @ weight).mul_(scale)
    (grad,) = torch.autograd.grad(normed, leaf, grad_normed)
    return ChunkLoss(grad, loss_sum, num_correct)
