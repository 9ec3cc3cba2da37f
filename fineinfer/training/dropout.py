"""LoRA dropout (Hu et al. 2021, as in PEFT): each adapted module sees its input with a share of the elements left out.

Masks are a pure function of (seed, update, example, position, layer, module, column). So a recomputed layer, a replayed
micro-batch, a resumed job and a split micro-batch all see the same ones, however the examples were packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.training.hashes import splitmix64


@dataclass(frozen=True)
class Dropout:
    """The masks of one micro-batch.

    Attributes:
        keys: [num_tokens] int32, of ``row_keys``.
        rate: Share of the elements that is left out, below 1.
        op: ``dropout`` of TrainingOps.
    """

    keys: torch.Tensor
    rate: float
    op: Callable[..., torch.Tensor]

    @property
    def scale(self) -> float:
        """Factor that keeps the mean of what is left."""
        return 1.0 / (1.0 - self.rate)

    def __call__(self, x: torch.Tensor, salt: int) -> torch.Tensor:
        """A copy of ``x`` [num_tokens, in] with zeros in it, still to be scaled; applied to a gradient, its way back.

        Args:
            x: A module's input, or the gradient of it.
            salt: The module's, see ``AdaptedPart``.
        """
        return self.op(x, self.keys, salt, self.rate)


def row_keys(seed: int, step: int, example: int, length: int) -> np.ndarray:
    """Keys [length] int32 of an example's positions in update ``step`` (from 0)."""
    key = np.array([seed & (2**64 - 1)], dtype=np.uint64)
    for value in (step, example):
        key = splitmix64(key) ^ np.uint64(value)
    keys = splitmix64(splitmix64(key) ^ np.arange(length, dtype=np.uint64))
    return (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
