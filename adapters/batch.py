"""LoRA on the rows of one forward batch: each run of rows uses one slot of the registry, base rows pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fineinfer.adapters.config import BLOCK_MODULES
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.adapters.stacks import AdapterStacks, BlockStack
from fineinfer.kernels.linear import linear
from fineinfer.kernels.reference import lora_grouped

if TYPE_CHECKING:
    from fineinfer.kernels.lora import AdapterPart

# Of more rows, which keep arithmetic busy, the adapters are added to the base output instead of written apart: 29 MB of
# room at 8B, where 28,672 columns are widest.
MAX_BESIDE_ROWS = 512
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


class Workspace(NamedTuple):
    """Room for one fused block at a time, shared by all layers.

    Attributes:
        shrunk: Of all rows, flat fp32.
        parts: Of up to ``MAX_BESIDE_ROWS`` rows what the adapters add, flat in the adapters' dtype.
    """

    shrunk: torch.Tensor
    parts: torch.Tensor


def make_workspace(max_rows: int, stacks: AdapterStacks, device: torch.device) -> Workspace:
    """A workspace for batches of up to ``max_rows`` rows."""
    from fineinfer.kernels.lora import shrunk_elements

    blocks = [stacks.block(0, block) for block in BLOCK_MODULES]
    most = max(shrunk_elements(max_rows, block.a.shape[2], block.a.shape[1]) for block in blocks)
    widest = max(block.b.shape[2] for block in blocks)
    return Workspace(
        shrunk=torch.empty(most, dtype=torch.float32, device=device),
        parts=torch.empty(min(max_rows, MAX_BESIDE_ROWS) * widest, dtype=blocks[0].b.dtype, device=device),
    )


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

    Of few rows a block gives the base output, and beside its product what the adapters add: reading it is left to the
    kernel that reads the output anyway. That is ``add_norm`` after "o" and "down", ``gated`` after gate and up, so both
    belong into the decoder's ``LayerOps``; after query, key and value the caller has to ``take_part``, and after the
    last layer to ``flush``. Of many rows the adapters are added to the output at once.

    Args:
        stacks: The registry's weights; the tiles' slots are pinned.
        rows: The step's adapters.
        workspace: From ``make_workspace`` for at least as many rows.
        base: Linear maps of the base model, as the decoder's ``Project``.
        side: The adapters run on this stream beside the base product, which leaves arithmetic idle at decode; None runs
            them before it. For captured steps: there the fork costs nothing.
    """

    def __init__(
        self,
        stacks: AdapterStacks,
        rows: RowAdapters,
        workspace: Workspace,
        base: Project,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        from fineinfer.kernels import activation, lora, norm  # here: a CPU needs no Triton

        self._lora, self._activation, self._norm = lora, activation, norm
        self._stacks, self._rows, self._workspace, self._base, self._side = stacks, rows, workspace, base, side
        self._part: AdapterPart | None = None  # what the newest output lacks

    def __call__(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_rows, in] -> [num_rows, out] of one fused block, of few rows without the adapters' part.

        Raises:
            ValueError: More rows than the workspace has room for, or tensors that do not fit the adapters'.
            RuntimeError: The block before still lacks its adapters' part.
        """
        if self._part is not None:
            raise RuntimeError(f"{block} of layer {layer_index}: the block before still lacks its adapters' part")
        stack = self._stacks.block(layer_index, block)
        shrunk, values = self._shrunk(stack, x), self._room_beside(stack, x)
        with self._beside():
            tiles, _, block_m = self._rows
            self._lora.lora_shrink(x, stack.a, stack.ranks, tiles, self._stacks.max_rank, block_m, shrunk)
            if values is not None:
                self._expand(stack, shrunk, values, add=False)
        y = self._base(layer_index, block, x, weight, bias)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        if values is None:
            return self._expand(stack, shrunk, y, add=True)
        self._part = self._lora.AdapterPart(values, self._rows.slots)
        return y

    def take_part(self) -> AdapterPart | None:
        """What the newest output lacks; from now on the caller's to add. None if nothing."""
        part, self._part = self._part, None
        return part

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + delta``, what ``delta`` still lacks included, and that sum, which is ``x`` changed in place.

        Raises:
            ValueError: Tensors that do not fit.
            RuntimeError: A block still lacks its adapters' part, but there is no ``delta``.
        """
        if delta is not None:
            return self._norm.add_rms_norm(x, delta, weight, eps, part=self.take_part()), x
        if self._part is not None:
            raise RuntimeError("the block before still lacks its adapters' part")
        return self._norm.rms_norm(x, weight, eps), x

    def gated(self, _project: Project, layer_index: int, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [num_rows, intermediate], of rows ``h`` [num_rows, hidden]; raises as a call does."""
        gate_up = self(layer_index, "gate_up", h, weight, None)
        return self._activation.silu_and_mul(gate_up, part=self.take_part())

    def flush(self, delta: torch.Tensor) -> torch.Tensor:
        """Add what ``delta``, the last block's output, still lacks, in place."""
        part = self.take_part()
        if part is None:
            return delta
        return delta.add_(part.values.where((part.row_slots >= 0)[:, None], 0.0))

    def _shrunk(self, stack: BlockStack, x: torch.Tensor) -> torch.Tensor:
        """Room for the shrunk rows, [num_splits, num_rows, width]."""
        num_rows, in_features = x.shape
        splits = self._lora.shrink_splits(num_rows, in_features, stack.b.shape[2], self._rows.block_m)
        shape = (splits, num_rows, stack.a.shape[1])
        size, room = shape[0] * shape[1] * shape[2], self._workspace.shrunk
        if size > room.shape[0]:
            raise ValueError(f"{num_rows} rows need a workspace of {size} numbers, it has {room.shape[0]}")
        return room[:size].view(shape)

    def _room_beside(self, stack: BlockStack, x: torch.Tensor) -> torch.Tensor | None:
        """Room for what the adapters add, [num_rows, out]; None of many rows."""
        num_rows, width = x.shape[0], stack.b.shape[2]
        return self._workspace.parts[: num_rows * width].view(num_rows, width) if num_rows <= MAX_BESIDE_ROWS else None

    def _beside(self) -> AbstractContextManager[object]:
        """Launches inside run on the side stream, behind what was launched so far."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _expand(self, stack: BlockStack, shrunk: torch.Tensor, y: torch.Tensor, add: bool) -> torch.Tensor:
        tiles, _, block_m = self._rows
        operands = shrunk, stack.b, stack.scales, stack.ranks, tiles
        return self._lora.lora_expand(*operands, self._stacks.max_rank, block_m, stack.columns, y, add)
