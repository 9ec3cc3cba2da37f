"""Learning-rate schedules, equal to transformers' ``get_*_schedule_with_warmup``; the last check of the settings."""

from __future__ import annotations

import math

from fineinfer.messages import TrainingSettings
from fineinfer.training.errors import TrainingError

KINDS = ("cosine", "linear", "constant")


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Updates of warm-up: the ratio of all updates, rounded up (as transformers)."""
    return math.ceil(total_steps * warmup_ratio)


def lr_factor(kind: str, step: int, total_steps: int, num_warmup: int) -> float:
    """Factor on the learning rate of update ``step`` (from 0; with warm-up the first update has factor 0).

    Args:
        kind: One of ``KINDS``.
        step: Update, from 0.
        total_steps: Updates of the whole job.
        num_warmup: Updates over which the factor rises linearly from 0 to 1.

    Raises:
        TrainingError: Unknown kind.
    """
    if kind not in KINDS:
        raise TrainingError(f"lr_scheduler {kind!r} is not one of {', '.join(KINDS)}", "invalid_hyperparameters")
    if step < num_warmup:
        return step / max(1, num_warmup)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return max(0.0, (total_steps - step) / max(1, total_steps - num_warmup))
    progress = (step - num_warmup) / max(1, total_steps - num_warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def check_settings(settings: TrainingSettings) -> None:
    """Raise TrainingError for values that the arithmetic cannot take; the server checked the finer limits before."""
    positive = (settings.n_epochs, settings.batch_size, settings.micro_batch_tokens)
    if min(positive) < 1 or settings.gradient_accumulation_steps < 0 or settings.save_steps < 0:
        raise TrainingError("epochs, batch size and micro-batch tokens must be at least 1", "invalid_hyperparameters")
    if settings.recompute not in ("auto", "never", "always"):
        raise TrainingError("recompute must be auto, never or always", "invalid_hyperparameters")
    lr_factor(settings.lr_scheduler, 0, 1, 0)
