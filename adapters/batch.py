"""LoRA on the rows of one forward batch: each run of rows uses one slot of the registry, base rows pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fineinfer.adapters.config import BLOCK_MODULES
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.kernels.linear import linear
from fineinfer.kernels.reference import lora_grouped

Project = Callable[[int, str, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class AdapterSegment(NamedTuple):
    """Rows ``[start, end)`` of the batch use the adapter in ``slot``; rows of no segment are the base model's."""

    slot: int
    start: int
    end: int


def serving_project(registry: AdapterRegistry, segments: Sequence[AdapterSegment]) -> Project:
    """The decoder's ``project`` callable for one batch; without adapter rows it is the plain linear map."""
    return ServingProjection(registry, segments) if segments else _plain_project


def _plain_project(
    _layer_index: int, _block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return linear(x, weight, bias)


class ServingProjection:
    """Base linear map plus each segment's adapter; ranks, scalings and target modules may differ between segments.

    Args:
        registry: Holds the weights; the segments' slots are pinned.
        segments: Disjoint runs of rows.
    """

    def __init__(self, registry: AdapterRegistry, segments: Sequence[AdapterSegment]) -> None:
        self._stacks = registry.stacks
        self._segments = [(segment.start, segment.end, segment.slot) for segment in segments]

    def __call__(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out] of one fused block."""
        stacks = self._stacks
        y = linear(x, weight, bias)
        for name in BLOCK_MODULES[block]:
            scales = stacks.scales(layer_index, name)
            adapted = [segment for segment in self._segments if scales[segment[2]] != 0.0]
            if adapted:
                a, b = stacks.a(layer_index, name), stacks.b(layer_index, name)
                lora_grouped(x, y[:, stacks.columns(name)], adapted, a, b, scales)
        return y
