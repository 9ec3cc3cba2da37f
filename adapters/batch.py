"""LoRA on the rows of one forward batch: each run of rows uses one slot of the registry, base rows pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fineinfer.adapters.config import BLOCK_MODULES
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.adapters.stacks import AdapterStacks, BlockStack
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


def max_tiles(max_rows: int, num_segments: int, block_m: int) -> int:
    """Most tiles that up to ``max_rows`` rows with up to ``num_segments`` adapter segments can need."""
    num_runs = min(2 * num_segments + 1, max_rows)  # a gap before, between and after; each run's first row opens a tile
    return num_runs + (max_rows - num_runs) // block_m


def lora_tiles(segments: Sequence[AdapterSegment], num_rows: int, block_m: int, max_tiles: int) -> np.ndarray:
    """Cut all rows into tiles of at most ``block_m`` rows of one adapter, or of none.

    Returns:
        [max_tiles, 3] int32: first row, number of rows, slot (-1: no adapter); the tiles left over are zero, which is
        padding.

    Raises:
        ValueError: The rows need more tiles, or the segments overlap or leave the batch.
    """
    runs, covered = [], 0
    for slot, start, end in sorted(segments, key=lambda segment: (segment.start, segment.end)):
        if start < covered or end < start:
            raise ValueError(f"rows {start} to {end} of slot {slot} overlap the rows before them")
        runs += [(-1, covered, start), (slot, start, end)]
        covered = end
    if covered > num_rows:
        raise ValueError(f"the segments end at row {covered} of {num_rows}")
    runs.append((-1, covered, num_rows))
    cut = [
        (first, min(block_m, end - first), slot) for slot, start, end in runs for first in range(start, end, block_m)
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


class _Pending(NamedTuple):
    """An adapter's part that the base output of a block still lacks."""

    stack: BlockStack
    shrunk: torch.Tensor


class RowAdapters(NamedTuple):
    """Which adapter each row of a step has, on the device; may be rewritten between steps.

    Attributes:
        tiles: [num_tiles, 3] int32, from ``lora_tiles``.
        slots: [num_rows] int32, the slot of each row as in ``tiles``, negative: no adapter.
        block_m: Rows of a tile, 16 (decode) or 64 (prefill).
    """

    tiles: torch.Tensor
    slots: torch.Tensor
    block_m: int


class DeviceProjection:
    """What ``ServingProjection`` computes, on a GPU; what varies is data, for CUDA graphs.

    Each block's rows are shrunk beside the base product. Of few rows only query, key and value are expanded by a launch
    of its own: ``gated`` expands in the activation, and "o" and "down" are left to the norm that follows (``add_norm``)
    or, after the last layer, to ``flush``. So ``add_norm`` and ``gated`` belong into the decoder's ``LayerOps``.

    Args:
        stacks: The registry's weights; the tiles' slots are pinned.
        rows: The step's adapters.
        workspace: From ``make_workspace`` for at least as many rows; holds one block's shrunk rows at a time.
        base: Linear maps of the base model, as the decoder's ``Project``.
        side: Shrinks run on this stream beside the base product, which leaves arithmetic idle at decode; None runs
            them before it. For captured steps: there the fork costs nothing.
    """

    def __init__(
        self,
        stacks: AdapterStacks,
        rows: RowAdapters,
        workspace: torch.Tensor,
        base: Project,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        from fineinfer.kernels import lora, lora_epilogue, norm  # here: a CPU needs no Triton

        self._lora, self._epilogue, self._norm = lora, lora_epilogue, norm
        self._base = base
        self._stacks, (self._tiles, self._row_slots, self._block_m) = stacks, rows
        self._workspace, self._side = workspace, side
        self._pending: _Pending | None = None

    def __call__(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_rows, in] -> [num_rows, out] of one fused block; of "o" and "down" maybe without the adapters' part.

        Raises:
            ValueError: More rows than the workspace has room for, or tensors that do not fit the adapters'.
            RuntimeError: The block before still lacks its adapters' part.
        """
        y, part = self._product(layer_index, block, x, weight, bias)
        if block in ("o", "down") and x.shape[0] <= self._epilogue.MAX_NORM_ROWS:
            self._pending = part
            return y
        return self._expand(y, part)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + delta``, what ``delta`` still lacks included, and that sum, which is ``x`` changed in place.

        Raises:
            ValueError: Tensors that do not fit.
            RuntimeError: A block still lacks its adapters' part, but there is no ``delta``.
        """
        if delta is None:
            if self._pending is not None:
                raise RuntimeError("the block before still lacks its adapters' part")
            return self._norm.rms_norm(x, weight, eps), x
        if self._pending is None:
            return self._norm.add_rms_norm(x, delta, weight, eps), x
        (stack, shrunk), self._pending = self._pending, None
        lora = stack.b, stack.scales, stack.ranks, self._row_slots, self._stacks.max_rank
        return self._epilogue.add_rms_norm_lora(x, delta, weight, eps, self._lora.RowExpansion(shrunk, *lora)), x

    def gated(self, _project: Project, layer_index: int, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [num_rows, intermediate], of rows ``h`` [num_rows, hidden]; raises as a call does."""
        gate_up, (stack, shrunk) = self._product(layer_index, "gate_up", h, weight, None)
        adapters = shrunk, stack.b, stack.scales, stack.ranks, self._tiles, self._stacks.max_rank, self._block_m
        return self._epilogue.silu_and_mul_lora(gate_up, *adapters)

    def flush(self, delta: torch.Tensor) -> torch.Tensor:
        """Add what ``delta``, the last block's output, still lacks, in place, by a launch of its own."""
        part, self._pending = self._pending, None
        return delta if part is None else self._expand(delta, part)

    def _product(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, _Pending]:
        """The base output, and what it lacks."""
        if self._pending is not None:
            raise RuntimeError(f"{block} of layer {layer_index}: the block before still lacks its adapters' part")
        stack, max_rank = self._stacks.block(layer_index, block), self._stacks.max_rank
        num_rows, in_features = x.shape
        splits = self._lora.shrink_splits(num_rows, in_features, stack.b.shape[2], self._block_m)
        shape = (splits, num_rows, stack.a.shape[1])
        size = shape[0] * shape[1] * shape[2]
        if size > self._workspace.shape[0]:
            raise ValueError(f"{num_rows} rows need a workspace of {size} numbers, it has {self._workspace.shape[0]}")
        shrunk = self._workspace[:size].view(shape)
        if self._side is None:
            self._lora.lora_shrink(x, stack.a, stack.ranks, self._tiles, max_rank, self._block_m, shrunk)
            y = self._base(layer_index, block, x, weight, bias)
        else:
            own = torch.cuda.current_stream()
            self._side.wait_stream(own)
            with torch.cuda.stream(self._side):
                self._lora.lora_shrink(x, stack.a, stack.ranks, self._tiles, max_rank, self._block_m, shrunk)
            y = self._base(layer_index, block, x, weight, bias)
            own.wait_stream(self._side)
        return y, _Pending(stack, shrunk)

    def _expand(self, y: torch.Tensor, part: _Pending) -> torch.Tensor:
        stack, shrunk = part
        max_rank, tiles = self._stacks.max_rank, self._tiles
        return self._lora.lora_expand(
            shrunk, stack.b, stack.scales, stack.ranks, tiles, max_rank, self._block_m, stack.columns, y
        )
