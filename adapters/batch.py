"""LoRA on the rows of one forward batch: each run of rows uses one slot of the registry, base rows pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fineinfer.adapters.config import BLOCK_MODULES
from fineinfer.adapters.registry import AdapterRegistry, AdapterStacks
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


def max_tiles(max_rows: int, num_slots: int, block_m: int) -> int:
    """Most tiles that up to ``max_rows`` rows, sorted by adapter over ``num_slots`` slots, can need."""
    num_adapters = min(num_slots, max_rows)  # each adapter's first row opens a tile
    return num_adapters + (max_rows - num_adapters) // block_m


def lora_tiles(segments: Sequence[AdapterSegment], block_m: int, max_tiles: int) -> np.ndarray:
    """Cut segments into tiles of at most ``block_m`` rows.

    Returns:
        [max_tiles, 3] int32: first row, number of rows, slot; the tiles left over are zero, which is padding.

    Raises:
        ValueError: The segments need more tiles.
    """
    cut = [
        (first, min(block_m, segment.end - first), segment.slot)
        for segment in segments
        for first in range(segment.start, segment.end, block_m)
    ]
    if len(cut) > max_tiles:
        raise ValueError(f"the batch needs {len(cut)} tiles of {block_m} rows, there is room for {max_tiles}")
    tiles = np.zeros((max_tiles, 3), dtype=np.int32)
    if cut:
        tiles[: len(cut)] = cut
    return tiles


def make_workspace(max_rows: int, stacks: AdapterStacks, device: torch.device) -> torch.Tensor:
    """Room for the shrunk rows of one fused block at a time, shared by all layers: flat fp32."""
    from fineinfer.kernels.lora import shrunk_elements

    blocks = [stacks.block(0, block) for block in BLOCK_MODULES]
    most = max(shrunk_elements(max_rows, block.a.shape[2], block.a.shape[1]) for block in blocks)
    return torch.empty(most, dtype=torch.float32, device=device)


class DeviceProjection:
    """What ``ServingProjection`` computes, on a GPU: two launches a block, and what varies is data, for CUDA graphs.

    Args:
        stacks: The registry's weights; the tiles' slots are pinned.
        tiles: [num_tiles, 3] int32 on the device, from ``lora_tiles``; may be rewritten between calls.
        block_m: Rows of a tile, 16 (decode) or 64 (prefill).
        workspace: From ``make_workspace`` for at least as many rows.
        side: Shrinks run on this stream beside the base product, which leaves arithmetic idle at decode; None runs
            them before it. For captured steps: there the fork costs nothing.
    """

    def __init__(
        self,
        stacks: AdapterStacks,
        tiles: torch.Tensor,
        block_m: int,
        workspace: torch.Tensor,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        from fineinfer.kernels import few_rows_linear, lora  # here, so that a CPU needs no Triton

        self._lora, self._linear = lora, few_rows_linear.device_linear
        self._stacks, self._tiles, self._block_m, self._workspace = stacks, tiles, block_m, workspace
        self._side = side

    def __call__(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out] of one fused block.

        Raises:
            ValueError: More rows than the workspace has room for, or tensors that do not fit the adapters'.
        """
        stack, max_rank = self._stacks.block(layer_index, block), self._stacks.max_rank
        num_rows, in_features = x.shape
        shape = (self._lora.shrink_splits(num_rows, in_features, self._block_m), num_rows, stack.a.shape[1])
        size = shape[0] * shape[1] * shape[2]
        if size > self._workspace.shape[0]:
            raise ValueError(f"{num_rows} rows need a workspace of {size} numbers, it has {self._workspace.shape[0]}")
        shrunk = self._workspace[:size].view(shape)
        if self._side is None:
            self._lora.lora_shrink(x, stack.a, stack.ranks, self._tiles, max_rank, self._block_m, shrunk)
            y = self._linear(x, weight, bias)
        else:
            own = torch.cuda.current_stream()
            self._side.wait_stream(own)
            with torch.cuda.stream(self._side):
                self._lora.lora_shrink(x, stack.a, stack.ranks, self._tiles, max_rank, self._block_m, shrunk)
            y = self._linear(x, weight, bias)
            own.wait_stream(self._side)
        return self._lora.lora_expand(
            shrunk, stack.b, stack.scales, stack.ranks, self._tiles, max_rank, self._block_m, stack.columns, y
        )
