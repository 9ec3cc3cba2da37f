"""Adapters that can be served: names and immutable versions, and the slots of the stacked weights they are loaded into.

A request acquires the version it starts with and keeps it; a name may move to another version meanwhile. One slot holds
one version (by content hash); unreferenced slots are reused, least recently used first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fineinfer.adapters.config import BLOCK_MODULES, MODULES, AdapterError, ModelShape, module_features
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


class AdapterStacks:
    """Weights of all slots, one pair of tensors a module: A [layers, slots, max_rank, in], B the same with out.

    B lies transposed, so the rows of an adapter's own rank are contiguous in both. Memory of a slot is touched only
    when an adapter is loaded into it.

    Args:
        shape: Sizes of the base model.
        num_slots: Adapters held at once.
        max_rank: Largest rank.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(
        self, shape: ModelShape, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        features = module_features(shape)

        def stack(width: int) -> torch.Tensor:
            return torch.empty(shape.num_layers, num_slots, max_rank, width, dtype=dtype, device=device)

        self._a = {name: stack(features[name][0]) for name in MODULES}
        self._b = {name: stack(features[name][1]) for name in MODULES}
        self._scales = {name: [[0.0] * num_slots for _ in range(shape.num_layers)] for name in MODULES}
        self._columns: dict[str, slice] = {}
        for names in BLOCK_MODULES.values():
            start = 0
            for name in names:
                self._columns[name] = slice(start, start + features[name][1])
                start += features[name][1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(tensor.nbytes for tensor in (*self._a.values(), *self._b.values()))

    @torch.inference_mode()
    def fill(self, slot: int, weights: LoraWeights) -> None:
        """Write one adapter into a slot; ranks below the largest are padded with zeros, absent modules scale by 0."""
        for name in MODULES:
            self._a[name][:, slot].zero_()
            self._b[name][:, slot].zero_()
            for scales in self._scales[name]:
                scales[slot] = 0.0
        for module in weights.layout.modules():
            self._a[module.name][module.layer, slot, : module.rank].copy_(weights.a(module))
            self._b[module.name][module.layer, slot, : module.rank].copy_(weights.b(module).t())
            self._scales[module.name][module.layer][slot] = module.scaling

    def scales(self, layer: int, module: str) -> list[float]:
        """Scaling of each slot's adapter for one module, 0 where it has none."""
        return self._scales[module][layer]

    def columns(self, module: str) -> slice:
        """The module's columns in the output of its fused block."""
        return self._columns[module]

    def a(self, layer: int, module: str) -> torch.Tensor:
        """[num_slots, max_rank, in_features] view."""
        return self._a[module][layer]

    def b(self, layer: int, module: str) -> torch.Tensor:
        """[num_slots, out_features, max_rank] view."""
        return self._b[module][layer].transpose(1, 2)


class AdapterRegistry:
    """Names, versions and slots; the one owner of adapter weights that are served.

    Args:
        shape: Sizes of the base model.
        num_slots: Adapters held in memory at once.
        max_rank: Largest rank accepted.
        dtype: The model's dtype.
        device: The model's device.

    Attributes:
        stacks: The weights, for ``ServingProjection``.
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
