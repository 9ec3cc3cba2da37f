"""Weights of the served adapters on the device, stacked by slot: what the projections of a batch read."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fineinfer.adapters.config import BLOCK_MODULES, MODULE_BLOCK, MODULES, ModelShape, module_features
from fineinfer.adapters.weights import LoraLayout, LoraModule, LoraWeights


class BlockStack(NamedTuple):
    """All slots' adapters of one fused block of one layer, as views that stay where they are.

    Module m of the block has its A in rows ``m * max_rank`` on, and its B in its own output columns.

    Attributes:
        a: [num_slots, num_modules * max_rank, in_features].
        b: [num_slots, max_rank, out_features].
        scales: [num_slots, num_modules] fp32 on the device, 0 where an adapter lacks the module.
        ranks: [num_slots, num_modules] int32 on the device, 0 likewise.
        columns: First output column of each module, then out_features.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor
    columns: tuple[int, ...]


class AdapterStacks:
    """Weights of all slots, one pair of tensors a fused block.

    A is [layers, slots, modules * max_rank, in], B is [layers, slots, max_rank, out of the block]: transposed, so that
    one rank's values of all modules are one row. Addresses never change: captured graphs hold them. Memory of a slot is
    touched only when an adapter is loaded into it.

    Args:
        shape: Sizes of the base model.
        num_slots: Adapters held at once.
        max_rank: Largest rank.
        dtype: The model's dtype.
        device: The model's device.

    Attributes:
        num_slots: As above.
        max_rank: As above.
    """

    def __init__(
        self, shape: ModelShape, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        features = module_features(shape)
        self.num_slots, self.max_rank, self._device = num_slots, max_rank, device
        self._layouts: list[LoraLayout | None] = [None] * num_slots
        self._blocks: dict[str, BlockStack] = {}  # as BlockStack, but with a first dimension of layers
        for block, names in BLOCK_MODULES.items():
            columns = tuple(itertools.accumulate((features[name][1] for name in names), initial=0))
            lead = (shape.num_layers, num_slots)
            self._blocks[block] = BlockStack(
                a=torch.empty(*lead, len(names) * max_rank, features[names[0]][0], dtype=dtype, device=device),
                b=torch.empty(*lead, max_rank, columns[-1], dtype=dtype, device=device),
                scales=torch.zeros(*lead, len(names), dtype=torch.float32, device=device),
                ranks=torch.zeros(*lead, len(names), dtype=torch.int32, device=device),
                columns=columns,
            )
        self._layers = {
            (layer, block): BlockStack(s.a[layer], s.b[layer], s.scales[layer], s.ranks[layer], s.columns)
            for block, s in self._blocks.items()
            for layer in range(shape.num_layers)
        }
        self._filled: torch.cuda.Event | None = None  # the newest fill
        self._scales = {name: [[0.0] * num_slots for _ in range(shape.num_layers)] for name in MODULES}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(tensor.nbytes for s in self._blocks.values() for tensor in (s.a, s.b, s.scales, s.ranks))

    @torch.inference_mode()
    def fill(self, slot: int, weights: LoraWeights) -> None:
        """Write one adapter into a slot; ranks below the largest are padded with zeros, absent modules scale by 0.

        The slot counts as empty (rank 0) until its weights are complete. An adapter of the layout that the slot holds,
        as the next version of a name has it, only overwrites its matrices: the padding, four times as large for ranks
        of 16 in slots for 64, is zero already.

        It is queued on the current stream behind every earlier fill, whose stream may be another: one that serves fills
        a slot that training took the next moment, while the step before it still runs.
        """
        if self._filled is not None:
            self._filled.wait()  # type: ignore[no-untyped-call]
        try:
            self._write(slot, weights)
        finally:
            if self._device.type == "cuda":
                self._filled = torch.cuda.current_stream(self._device).record_event()

    def _write(self, slot: int, weights: LoraWeights) -> None:
        layout, held = weights.layout, self._layouts[slot]
        same = held is not None and (held is layout or held.blocks == layout.blocks)
        if not same:
            self._layouts[slot] = None
            self._clear(slot)
        for _, group in itertools.groupby(layout.modules(), key=lambda module: module.layer):
            modules = list(group)
            first, last = modules[0].a_offset, modules[-1]
            end = last.b_offset + (last.out_end - last.out_start) * last.rank
            # a layer is one piece of the flat tensor: one transfer to the device, not one a matrix
            piece = weights.flat[first:end].to(self._device, non_blocking=True)
            for module in modules:
                self._copy(slot, module, piece, first)
        if not same:
            self._set_scales(slot, layout)
            self._layouts[slot] = layout

    def _clear(self, slot: int) -> None:
        for stack in self._blocks.values():
            for tensor in (stack.ranks, stack.scales, stack.a, stack.b):
                tensor[:, slot].zero_()
        for name in MODULES:
            for scales in self._scales[name]:
                scales[slot] = 0.0

    def _copy(self, slot: int, module: LoraModule, piece: torch.Tensor, first: int) -> None:
        rank, width = module.rank, module.out_end - module.out_start
        a, b = module.a_offset - first, module.b_offset - first
        a_view = piece[a : a + rank * module.in_features].view(rank, module.in_features)
        self.a(module.layer, module.name)[slot, :rank].copy_(a_view)
        self.b(module.layer, module.name)[slot, :, :rank].copy_(piece[b : b + width * rank].view(width, rank))

    def _set_scales(self, slot: int, layout: LoraLayout) -> None:
        for block, stack in self._blocks.items():
            names = BLOCK_MODULES[block]
            settings = torch.zeros(2, len(stack.ranks), len(names))  # (rank, scale) by layer and module
            for (layer, block_of_entry), entry in layout.blocks.items():
                for module in entry.modules if block_of_entry == block else ():
                    settings[0, layer, names.index(module.name)] = module.rank
                    settings[1, layer, names.index(module.name)] = module.scaling
                    self._scales[module.name][layer][slot] = module.scaling
            stack.scales[:, slot].copy_(self._to_device(settings[1]))
            stack.ranks[:, slot].copy_(self._to_device(settings[0].int()))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)  # a plain copy would wait for the stream

    def block(self, layer: int, block: str) -> BlockStack:
        """One fused block of one layer, for the grouped kernels."""
        return self._layers[layer, block]

    def scales(self, layer: int, module: str) -> list[float]:
        """Scaling of each slot's adapter for one module, 0 where it has none."""
        return self._scales[module][layer]

    def columns(self, module: str) -> slice:
        """The module's columns in the output of its fused block."""
        block = MODULE_BLOCK[module]
        index = BLOCK_MODULES[block].index(module)
        return slice(*self._blocks[block].columns[index : index + 2])

    def a(self, layer: int, module: str) -> torch.Tensor:
        """[num_slots, max_rank, in_features] view."""
        block = MODULE_BLOCK[module]
        first = BLOCK_MODULES[block].index(module) * self.max_rank
        return self._layers[layer, block].a[:, first : first + self.max_rank]

    def b(self, layer: int, module: str) -> torch.Tensor:
        """[num_slots, out_features, max_rank] view."""
        return self._layers[layer, MODULE_BLOCK[module]].b[:, :, self.columns(module)].transpose(1, 2)
