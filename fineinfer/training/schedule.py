"""Learning-rate schedules, equal to transformers' (``cosine_with_min_lr`` too); the last check of the settings."""

from __future__ import annotations

import math

from fineinfer.messages import EarlyStopping, TrainingSettings
from fineinfer.training.errors import TrainingError

KINDS = ("cosine", "linear", "constant")


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Updates of warm-up: the ratio of all updates, rounded up (as transformers)."""
    return math.ceil(total_steps * warmup_ratio)


def lr_factor(kind: str, step: int, total_steps: int, num_warmup: int, min_ratio: float = 0.0) -> float:
    """Factor on the learning rate of update ``step`` (from 0; with warm-up the first update has factor 0).

    Args:
        kind: One of ``KINDS``.
        step: Update, from 0.
        total_steps: Updates of the whole job.
        num_warmup: Updates over which the factor rises linearly from 0 to 1.
        min_ratio: What it falls to.

    Raises:
        TrainingError: Unknown kind.
    """
    if kind not in KINDS:
        raise TrainingError(f"lr_scheduler {kind!r} is not one of {', '.join(KINDS)}", "invalid_hyperparameters")
    if step < num_warmup:
        return step / max(1, num_warmup)
    if kind == "constant":
        return 1.0
    falling = max(1, total_steps - num_warmup)
    if kind == "linear":
        left = (total_steps - step) / falling
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * (step - num_warmup) / falling))
    return min_ratio + (1.0 - min_ratio) * max(0.0, left)


def check_settings(settings: TrainingSettings) -> None:
    """Raise TrainingError for values that the arithmetic cannot take; the server checked the finer limits before."""
    stopping = settings.early_stopping or EarlyStopping()
    rules = (
        (settings.n_epochs >= 1, "n_epochs must be at least 1"),
        (settings.batch_size >= 1, "batch_size must be at least 1"),
        (settings.micro_batch_tokens >= 1, "micro_batch_tokens must be at least 1"),
        (settings.gradient_accumulation_steps >= 0, "gradient_accumulation_steps must not be negative"),
        (settings.save_steps >= 0, "save_steps must not be negative"),
        (settings.eval_steps >= 0, "eval_steps must not be negative"),
        (settings.recompute in ("auto", "never", "always"), "recompute must be auto, never or always"),
        (0.0 <= settings.lora.lora_dropout < 1.0, "lora_dropout must be at least 0 and below 1"),
        (0.0 <= settings.min_lr_ratio <= 1.0, "min_lr_ratio must be within 0 and 1"),
        (
            settings.min_lr_ratio == 0.0 or settings.lr_scheduler != "constant",
            "min_lr_ratio needs an lr_scheduler that falls, not constant",
        ),
        (stopping.patience >= 1, "early_stopping.patience must be at least 1"),
        (stopping.min_delta >= 0.0, "early_stopping.min_delta must not be negative"),
        (stopping.warmup_evals >= 0, "early_stopping.warmup_evals must not be negative"),
    )
    for holds, message in rules:
        if not holds:
            raise TrainingError(message, "invalid_hyperparameters")
    lr_factor(settings.lr_scheduler, 0, 1, 0)
