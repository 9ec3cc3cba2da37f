"""AdamW on one flat tensor of master weights, equal to torch.optim.AdamW to rounding, and gradient clipping."""

from __future__ import annotations

import math

import torch

from fineinfer.messages import TrainingSettings


def gradient_norm(grads: torch.Tensor) -> torch.Tensor:
    """Euclidean norm of the flat gradient, summed in fp64; a scalar on the gradient's device."""
    return torch.linalg.vector_norm(grads, dtype=torch.float64)


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor on the gradient (as ``torch.nn.utils.clip_grad_norm_``); 1 when ``max_norm`` is 0, which turns it off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        params: Flat master weights, changed in place.
        settings: Betas, epsilon and weight decay of the job.
    """

    def __init__(self, params: torch.Tensor, settings: TrainingSettings) -> None:
        self.params = params
        self.exp_avg = torch.zeros_like(params)
        self.exp_avg_sq = torch.zeros_like(params)
        self.num_updates = 0
        self._beta1, self._beta2 = settings.adam_betas
        self._eps, self._weight_decay = settings.adam_eps, settings.weight_decay

    @torch.no_grad()
    def update(self, grads: torch.Tensor, learning_rate: float) -> None:
        """One update from the flat gradient."""
        self.num_updates += 1
        self.params.mul_(1 - learning_rate * self._weight_decay)
        self.exp_avg.lerp_(grads, 1 - self._beta1)
        self.exp_avg_sq.mul_(self._beta2).addcmul_(grads, grads, value=1 - self._beta2)
        correction1 = 1 - self._beta1**self.num_updates
        correction2 = 1 - self._beta2**self.num_updates
        denominator = self.exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(self._eps)
        self.params.addcdiv_(self.exp_avg, denominator, value=-learning_rate / correction1)
