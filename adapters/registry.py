"""Adapters that can be served: names and immutable versions, and the tier that each version's weights are in.

A request acquires the version it starts with and keeps it; a name may move to another version meanwhile. Weights are in
a slot on the device (one version a slot, by content hash), else as a copy in host memory, else on disk only
(``AdapterReader``). A slot that no request holds is reused, least recently used first; those of pinned names never.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fineinfer.adapters.config import AdapterError, ModelShape
from fineinfer.adapters.reader import AdapterReader
from fineinfer.adapters.stacks import AdapterStacks
from fineinfer.adapters.weights import LoraWeights

__all__ = ["AdapterRegistry", "AdapterStacks", "AdapterVersion"]


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable version: ``version`` is the SHA-256 of its content, ``directory`` its PEFT folder.

    A version served live from training has neither: its ``version`` is ``live-<job>-<step>``.
    """

    name: str
    step: int
    version: str
    directory: Path | None


@dataclass
class _Slot:
    version: str | None = None
    num_references: int = 0
    last_used: int = 0


class AdapterRegistry:
    """Names, versions and slots; the one owner of adapter weights that are served.

    Args:
        shape: Sizes of the base model.
        num_slots: Adapters held on the device at once.
        max_rank: Largest rank accepted.
        dtype: The model's dtype.
        device: The model's device.
        reader: Reads folders and keeps copies; None: one that keeps none and reads at once.

    Attributes:
        stacks: The weights, for ``ServingProjection`` and ``DeviceProjection``.
        expected: Names that will be served in a moment, so that requests for them wait.
        num_loads: Versions written into slots so far.
        num_evictions: Versions that others took a slot from.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        reader: AdapterReader | None = None,
    ) -> None:
        self.stacks = AdapterStacks(shape, num_slots, max_rank, dtype, device)
        self.reader = reader or AdapterReader(shape, max_rank, dtype)
        self.expected: set[str] = set()
        self.num_loads = self.num_evictions = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._current: dict[str, AdapterVersion] = {}
        self._live: dict[str, AdapterVersion] = {}
        self._pinned: set[str] = set()
        self._ended: set[str] = set()  # live names without training: its result is yet to be registered
        self._by_step: dict[tuple[str, int], AdapterVersion] = {}
        self._directories: dict[str, Path] = {}  # by version; outlives the names, since requests hold versions
        self._claim: tuple[str, int] | None = None  # a version that waits too long, and the slot that is drained for it
        self._clock = 0

    # ------------------------------------------------------------ names

    def register(self, entry: AdapterVersion, current: bool = True, pinned: bool = False) -> bool:
        """Check an adapter folder and serve it as ``name@step``; with ``current`` also as ``name``.

        A current version is loaded at once if a slot is empty or holds what no name means any more; then all of its
        content is checked, else its config and shapes. A name that was registered before stays as it was if this fails.

        Args:
            entry: The version, with its folder.
            current: Whether the name means it from now on, unless training serves a later step of it live.
            pinned: Whether the name's current version keeps its slot.

        Returns:
            False if nothing has changed yet, because its content is being read: call again.

        Raises:
            AdapterError: The folder cannot be served, or its content is not ``version``.
        """
        version, directory = entry.version, entry.directory
        if directory is None:
            raise AdapterError(f"adapter version {version} has no folder")
        if self._find(version) is None and not self._settle(entry, directory, current, pinned):
            return False
        self._directories[version] = directory
        self._by_step[entry.name, entry.step] = entry
        live = self._live.get(entry.name)
        if live is not None and entry.name in self._ended and (current or entry.step >= live.step):
            self.end_live(entry.name, awaited=False)
        if current:
            self._current[entry.name] = entry
            (self._pinned.add if pinned else self._pinned.discard)(entry.name)
        return True

    def _settle(self, entry: AdapterVersion, directory: Path, current: bool, pinned: bool) -> bool:
        slot = self._unused(entry, stale_only=not pinned) if current else None
        if slot is not None:
            weights = self.reader.get(entry.version, directory)
            if weights is None:
                return False
            self._fill(slot, entry.version, weights)
        elif not self.reader.knows(entry.version):
            self.reader.check(directory)
        return True

    def resolve(self, model: str) -> AdapterVersion | None:
        """The version that ``name`` or ``name@step`` means now."""
        live, kept = self._live.get(model), self._current.get(model)
        if live is not None and (kept is None or live.step >= kept.step):
            return live
        if kept is not None:
            return kept
        name, separator, step = model.rpartition("@")
        return self._by_step.get((name, int(step))) if separator and step.isdecimal() else None

    def remove(self, name: str) -> None:
        """Forget every version of a name; versions in use stay loaded until they are released."""
        self._current.pop(name, None)
        self.end_live(name, awaited=False)
        self._pinned.discard(name)
        self._by_step = {key: entry for key, entry in self._by_step.items() if key[0] != name}

    def names(self) -> list[str]:
        """Names that are served."""
        return sorted(self._current.keys() | self._live.keys())

    def current(self) -> dict[str, str]:
        """The version that each name means."""
        found = {name: self.resolve(name) for name in self.names()}
        return {name: entry.version for name, entry in found.items() if entry is not None}

    # ------------------------------------------------------------ requests

    def acquire(self, version: str) -> int | None:
        """Take a reference to a version and return its slot, loading it if needed.

        Returns:
            None if it has to wait: every slot is in use, or its content is being read.

        Raises:
            AdapterError: It was never registered, or has to be loaded and its folder is gone or damaged.
        """
        index = self._find(version)
        if index is None:
            index = self._unused(version)
            if index is None:
                return None
            weights = self.reader.get(version, self._directories.get(version))
            if weights is None:
                return None
            self._fill(index, version, weights)
        elif self._claim is not None and self._claim[1] == index:
            return None
        self._clock += 1
        self._slots[index].num_references += 1
        self._slots[index].last_used = self._clock
        return index

    def release(self, version: str) -> None:
        """Undo one ``acquire``.

        Raises:
            ValueError: No reference to the version is held.
        """
        index = self._find(version)
        if index is None or self._slots[index].num_references == 0:
            raise ValueError(f"adapter version {version} is not pinned")
        self._slots[index].num_references -= 1

    def claim(self, version: str | None) -> None:
        """Let one slot run empty for a version that has waited too long: nobody new gets what is in it.

        Without this, adapters that always have requests would keep others waiting for ever.

        Args:
            version: The one that has waited longest; None: nobody has waited too long.
        """
        if version is None or self._find(version) is not None:
            self._claim = None
        elif self._claim is None or self._claim[0] != version:
            kept = self._kept_versions()
            slots = [i for i, slot in enumerate(self._slots) if slot.version not in kept]
            slot = min(slots, key=lambda i: (self._slots[i].num_references, self._slots[i].last_used), default=None)
            self._claim = None if slot is None else (version, slot)

    # ------------------------------------------------------------ live from training

    def place(self, version: str, weights: LoraWeights) -> bool:
        """Copy weights into a slot under a version that no name means yet, and hold it; False: no slot is unused.

        Raises:
            ValueError: There is such a version already.
        """
        if self._find(version) is not None:
            raise ValueError(f"adapter version {version} is in a slot already")
        index = self._unused(version)
        if index is None:
            return False
        self._fill(index, version, weights)
        self._slots[index].num_references += 1
        return True

    def serve_live(self, entry: AdapterVersion) -> None:
        """Let the name mean a placed version, which needs no folder, until a later step is registered or served."""
        self._live[entry.name] = entry
        self._ended.discard(entry.name)
        self.release(entry.version)

    def end_live(self, name: str, awaited: bool) -> None:
        """Training is over, or stops for a while: the name means what was registered.

        If a version of its last update is ``awaited``, it means the live one until that is registered: one of as late a
        step, which may be here already, or one that comes from now on and is current.
        """
        live, known_steps = self._live.get(name), [step for other, step in self._by_step if other == name]
        if awaited and live is not None and max(known_steps, default=-1) < live.step:
            self._ended.add(name)
        else:
            self._live.pop(name, None)
            self._ended.discard(name)

    # ------------------------------------------------------------ where things are

    def tiers(self) -> dict[str, str]:
        """Version -> ``loaded`` (in a slot) or ``cpu`` (a copy in host memory); the others are on disk."""
        copies = dict.fromkeys(self.reader.versions(), "cpu")
        return copies | {slot.version: "loaded" for slot in self._slots if slot.version is not None}

    @property
    def num_used(self) -> int:
        """Slots that hold a version."""
        return sum(slot.version is not None for slot in self._slots)

    def num_pinned(self) -> int:
        """References held by requests now."""
        return sum(slot.num_references for slot in self._slots)

    def _find(self, version: str) -> int | None:
        return next((index for index, slot in enumerate(self._slots) if slot.version == version), None)

    def _kept_versions(self) -> set[str]:
        """Versions that keep their slot: of pinned names, and those that could not be loaded again."""
        names = self._pinned | self._live.keys()
        entries = [entry for entry in map(self.resolve, names) if entry is not None]
        return {entry.version for entry in entries if entry.directory is None or entry.name in self._pinned}

    def _unused(self, wanted: AdapterVersion | str, stale_only: bool = False) -> int | None:
        """A slot for a version: an empty one, else one that no request uses, else None.

        Of those, what no name means any more goes first, then the least recently used. The version that the name of
        ``wanted`` means so far counts as meant no more.
        """
        name, version = (wanted.name, wanted.version) if isinstance(wanted, AdapterVersion) else (None, wanted)
        claimed = None if self._claim is None or self._claim[0] == version else self._claim[1]
        free = [i for i, slot in enumerate(self._slots) if slot.num_references == 0 and i != claimed]
        kept = self._kept_versions() if free else set()
        free = [index for index in free if self._slots[index].version not in kept]
        if not free:
            return None
        meant = {version for other, version in self.current().items() if other != name}

        def rank(index: int) -> tuple[int, int]:
            held = self._slots[index].version
            return 0 if held is None else 1 + (held in meant), self._slots[index].last_used

        best = min(free, key=rank)
        return None if stale_only and rank(best)[0] == 2 else best

    def _fill(self, index: int, version: str, weights: LoraWeights) -> None:
        self.num_evictions += self._slots[index].version is not None
        self._slots[index].version = None  # should filling fail, the slot holds no version
        self.stacks.fill(index, weights)
        self._slots[index].version = version
        self.num_loads += 1
        if self._claim is not None and self._claim[1] == index:
            self._claim = None
