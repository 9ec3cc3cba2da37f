"""AdamW on one flat tensor of master weights, equal to torch.optim.AdamW to rounding, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fineinfer.kernels.reference_training import adamw
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
        compute: Copy of the parameters in another dtype, refreshed by every update; None where there is none.
        update: ``adamw`` of TrainingOps.
    """

    def __init__(
        self,
        params: torch.Tensor,
        settings: TrainingSettings,
        compute: torch.Tensor | None = None,
        update: Callable[..., None] = adamw,
    ) -> None:
        self.params, self.compute, self._update = params, compute, update
        self.exp_avg = torch.zeros_like(params)
        self.exp_avg_sq = torch.zeros_like(params)
        self.num_updates = 0
        self._betas, self._eps, self._weight_decay = settings.adam_betas, settings.adam_eps, settings.weight_decay

    @torch.no_grad()
    def update(self, grads: torch.Tensor, learning_rate: float, grad_scale: float = 1.0) -> None:
        """One update from the flat gradient, which may be scaled in place."""
        self.num_updates += 1
        self._update(
            self.params,
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            self.compute,
            grad_scale=grad_scale,
            learning_rate=learning_rate,
            num_updates=self.num_updates,
            betas=self._betas,
            eps=self._eps,
            weight_decay=self._weight_decay,
        )
