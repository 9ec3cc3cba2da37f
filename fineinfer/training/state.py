"""The trainable state of a job: fp32 masters, the compute copy, gradient accumulators and Adam moments."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.messages import TrainingSettings
from fineinfer.training.errors import TrainingError
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps
from fineinfer.training.optimizer import AdamW, clip_factor, gradient_norm


@dataclass(frozen=True)
class AppliedUpdate:
    """What an optimizer step did. ``skipped``: loss or gradient was not finite and nothing was changed."""

    grad_norm: float
    skipped: bool


class AdapterState:
    """Owner of the adapter under training.

    Args:
        layout: Its modules.
        settings: Hyperparameters of the job.
        dtype: The model's dtype.
        device: The model's device.
        ops: Kernels of the optimizer; None: the reference operations.

    Raises:
        TrainingError: The dtype cannot be trained in.
    """

    def __init__(
        self,
        layout: LoraLayout,
        settings: TrainingSettings,
        dtype: torch.dtype,
        device: torch.device,
        ops: TrainingOps | None = None,
    ) -> None:
        if dtype == torch.float16:
            raise TrainingError("float16 has too small a range for gradients; use bfloat16", "unsupported_dtype")
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.masters = LoraWeights.init(layout, master_dtype, device, settings.seed)
        self.grads = LoraWeights.zeros(layout, master_dtype, device)
        self.compute = self.masters if dtype == master_dtype else LoraWeights.zeros(layout, dtype, device)
        copy = None if self.compute is self.masters else self.compute.flat
        self.optimizer = AdamW(self.masters.flat, settings, copy, (ops or REFERENCE_OPS).adamw)
        self._fused = ops is not None
        self._max_grad_norm = settings.max_grad_norm
        self.refresh_compute()

    @property
    def num_bytes(self) -> int:
        """Bytes held for as long as the job runs (the temporary of an optimizer without kernels included)."""
        copy = 0 if self.compute is self.masters else self.compute.flat.nbytes
        return (4 if self._fused else 5) * self.masters.flat.nbytes + copy

    def restore(self, weights: LoraWeights, moments: dict[str, torch.Tensor], num_updates: int) -> None:
        """Take masters and moments from a checkpoint.

        Raises:
            TrainingError: They do not fit the job's adapter.
        """
        flat = self.masters.flat
        for tensor in (weights.flat, moments.get("exp_avg"), moments.get("exp_avg_sq")):
            if tensor is None or tensor.shape != flat.shape or tensor.dtype != flat.dtype:
                raise TrainingError("the checkpoint does not fit the job's adapter", "checkpoint_mismatch")
        flat.copy_(weights.flat)
        self.optimizer.exp_avg.copy_(moments["exp_avg"])
        self.optimizer.exp_avg_sq.copy_(moments["exp_avg_sq"])
        self.optimizer.num_updates = num_updates
        self.refresh_compute()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Copy the masters into the model's dtype."""
        if self.compute is not self.masters:
            self.compute.flat.copy_(self.masters.flat)

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of the accumulated gradient, an fp64 scalar on the device."""
        return gradient_norm(self.grads.flat)

    def apply(self, loss: float, norm: float, learning_rate: float) -> AppliedUpdate:
        """Clip and update; leaves parameters and moments untouched if loss or gradient is not finite.

        Args:
            loss: Of the update.
            norm: Of the gradient.
            learning_rate: Of the update.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return AppliedUpdate(norm, skipped=True)
        self.optimizer.update(self.grads.flat, learning_rate, clip_factor(norm, self._max_grad_norm))
        return AppliedUpdate(norm, skipped=False)
