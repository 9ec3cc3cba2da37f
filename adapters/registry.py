"""Adapters that can be served: names and immutable versions, and the slots of the stacked weights they are loaded into.

A request acquires the version it starts with and keeps it; a name may move to another version meanwhile. One slot holds
one version (by content hash); unreferenced slots are reused, least recently used first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fineinfer.adapters.config import BLOCK_MODULES, MODULE_BLOCK, MODULES, AdapterError, ModelShape, module_features
from fineinfer.adapters.peft_io import content_hash, load_adapter
from fineinfer.adapters.weights import LoraWeights


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable version: ``version`` is the SHA-256 of its content, ``directory`` its PEFT folder."""

    name: str
    step: int
    version: str
    directory: Path


@dataclass
class _Slot:
    version: str | None = None
    num_references: int = 0
    last_used: int = 0


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
        self.num_slots, self.max_rank = num_slots, max_rank
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
        self._scales = {name: [[0.0] * num_slots for _ in range(shape.num_layers)] for name in MODULES}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(tensor.nbytes for s in self._blocks.values() for tensor in (s.a, s.b, s.scales, s.ranks))

    @torch.inference_mode()
    def fill(self, slot: int, weights: LoraWeights) -> None:
        """Write one adapter into a slot; ranks below the largest are padded with zeros, absent modules scale by 0.

        The slot counts as empty (rank 0) until its weights are complete.
        """
        for stack in self._blocks.values():
            for tensor in (stack.ranks, stack.scales, stack.a, stack.b):
                tensor[:, slot].zero_()
        for name in MODULES:
            for scales in self._scales[name]:
                scales[slot] = 0.0
        for module in weights.layout.modules():
            self.a(module.layer, module.name)[slot, : module.rank].copy_(weights.a(module))
            self.b(module.layer, module.name)[slot, :, : module.rank].copy_(weights.b(module))
        for block, stack in self._blocks.items():
            names = BLOCK_MODULES[block]
            settings = torch.zeros(2, len(stack.ranks), len(names))  # (rank, scale) by layer and module
            for (layer, block_of_entry), entry in weights.layout.blocks.items():
                for module in entry.modules if block_of_entry == block else ():
                    settings[0, layer, names.index(module.name)] = module.rank
                    settings[1, layer, names.index(module.name)] = module.scaling
                    self._scales[module.name][layer][slot] = module.scaling
            stack.scales[:, slot].copy_(settings[1])
            stack.ranks[:, slot].copy_(settings[0])

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


class AdapterRegistry:
    """Names, versions and slots; the one owner of adapter weights that are served.

    Args:
        shape: Sizes of the base model.
        num_slots: Adapters held in memory at once.
        max_rank: Largest rank accepted.
        dtype: The model's dtype.
        device: The model's device.

    Attributes:
        stacks: The weights, for ``ServingProjection`` and ``DeviceProjection``.
    """

    def __init__(
        self, shape: ModelShape, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._max_rank = shape, max_rank
        self.stacks = AdapterStacks(shape, num_slots, max_rank, dtype, device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._current: dict[str, AdapterVersion] = {}
        self._by_step: dict[tuple[str, int], AdapterVersion] = {}
        self._directories: dict[str, Path] = {}  # by version; outlives the names, since requests hold versions
        self._clock = 0

    def register(
        self, name: str, step: int, version: str, directory: Path | str, current: bool = True
    ) -> AdapterVersion:
        """Check an adapter folder and serve it as ``name@step``; with ``current`` also as ``name``.

        Loads it at once if a slot is empty. A name that was registered before stays as it was if this fails.

        Raises:
            AdapterError: The folder cannot be served, or its content is not ``version``.
        """
        entry = AdapterVersion(name, step, version, Path(directory))
        weights = self._load(version, entry.directory)
        empty = next((index for index, slot in enumerate(self._slots) if slot.version is None), None)
        if empty is not None and self._find(version) is None:
            self._fill(empty, version, weights)
        self._directories[version] = entry.directory
        self._by_step[name, step] = entry
        if current:
            self._current[name] = entry
        return entry

    def resolve(self, model: str) -> AdapterVersion | None:
        """The version that ``name`` or ``name@step`` means now."""
        if model in self._current:
            return self._current[model]
        name, separator, step = model.rpartition("@")
        return self._by_step.get((name, int(step))) if separator and step.isdecimal() else None

    def acquire(self, version: str) -> int | None:
        """Pin a version and return its slot, loading it if needed; None if every slot is pinned by other versions.

        Raises:
            AdapterError: It was never registered, or has to be loaded and its folder is gone or damaged.
        """
        index = self._find(version)
        if index is None:
            free = [i for i, slot in enumerate(self._slots) if slot.num_references == 0]
            if not free:
                return None
            if version not in self._directories:
                raise AdapterError(f"adapter version {version} is not known")
            weights = self._load(version, self._directories[version])
            index = min(free, key=lambda i: (self._slots[i].version is not None, self._slots[i].last_used))
            self._fill(index, version, weights)
        self._clock += 1
        self._slots[index].num_references += 1
        self._slots[index].last_used = self._clock
        return index

    def release(self, version: str) -> None:
        """Undo one ``acquire``.

        Raises:
            ValueError: The version is not pinned.
        """
        index = self._find(version)
        if index is None or self._slots[index].num_references == 0:
            raise ValueError(f"adapter version {version} is not pinned")
        self._slots[index].num_references -= 1

    def remove(self, name: str) -> None:
        """Forget every version of a name; pinned versions stay loaded until they are released."""
        self._current.pop(name, None)
        self._by_step = {key: entry for key, entry in self._by_step.items() if key[0] != name}

    def names(self) -> list[str]:
        """Names with a current version."""
        return sorted(self._current)

    def num_pinned(self) -> int:
        """References held by requests now."""
        return sum(slot.num_references for slot in self._slots)

    def _find(self, version: str) -> int | None:
        return next((index for index, slot in enumerate(self._slots) if slot.version == version), None)

    def _fill(self, index: int, version: str, weights: LoraWeights) -> None:
        self._slots[index].version = None  # should filling fail, the slot holds no version
        self.stacks.fill(index, weights)
        self._slots[index].version = version

    def _load(self, version: str, directory: Path) -> LoraWeights:
        found = content_hash(directory)
        if found != version:
            raise AdapterError(f"the content of the adapter folder is {found}, expected {version}")
        return load_adapter(directory, self._shape, self._max_rank)
