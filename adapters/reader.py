"""Reads adapters for the registry: content checked once, copies kept in host memory, on a thread where that matters."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from fineinfer.adapters.config import AdapterError, ModelShape
from fineinfer.adapters.peft_io import check_adapter, content_hash, load_adapter
from fineinfer.adapters.weights import LoraWeights


class AdapterReader:
    """From PEFT folders to weights in host memory.

    Hashing and reading the rank 16 adapter of an 8B model (168 MB in fp32) takes most of a second, so beside a GPU
    it is done on a thread; on a CPU, whose models are small and whose cores the thread would take, at once.

    Args:
        shape: Sizes of the base model.
        max_rank: Largest rank served.
        dtype: The model's dtype; copies have it.
        num_copies: Adapters kept in host memory, least recently used given up first.
        on_thread: Read beside the caller and keep copies in pinned memory; needs at least one copy.
    """

    def __init__(
        self, shape: ModelShape, max_rank: int, dtype: torch.dtype, num_copies: int = 0, on_thread: bool = False
    ) -> None:
        self._shape, self._max_rank, self._dtype = shape, max_rank, dtype
        self._num_copies = max(num_copies, int(on_thread))
        self._copies: OrderedDict[str, LoraWeights] = OrderedDict()
        self._verified: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "adapter-reader") if on_thread else None
        self._under_way: tuple[str, Future[LoraWeights]] | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory that the copies take."""
        return sum(weights.flat.nbytes for weights in self._copies.values())

    @property
    def busy(self) -> bool:
        """Whether the thread reads, or has read what nobody has asked for yet."""
        return self._under_way is not None

    def versions(self) -> list[str]:
        """Versions of which there is a copy."""
        return list(self._copies)

    def knows(self, version: str) -> bool:
        """Whether the content of this version was read and checked before."""
        return version in self._verified

    def check(self, directory: Path) -> None:
        """Look at config and shapes only (milliseconds, whatever the size).

        Raises:
            AdapterError: The adapter cannot be served.
        """
        check_adapter(directory, self._shape, self._max_rank)

    def get(self, version: str, directory: Path | None) -> LoraWeights | None:
        """The weights of a version, in the model's dtype; None while the thread reads them: ask again.

        Args:
            version: Hash of the content.
            directory: Its folder; None if it has none, so that only a copy can be given.

        Raises:
            AdapterError: There is no folder, its content is not ``version``, or it cannot be served.
        """
        weights = self._copies.get(version)
        if weights is not None:
            self._copies.move_to_end(version)
            return weights
        if directory is None:
            raise AdapterError(f"adapter version {version} is not known")
        weights = self._read(version, directory) if self._thread is None else self._ask_thread(version, directory)
        if weights is not None:
            self._keep(version, weights)
        return weights

    def _ask_thread(self, version: str, directory: Path) -> LoraWeights | None:
        if self._thread is None:
            return None
        if self._under_way is not None and self._under_way[1].done() and self._under_way[0] != version:
            other, future = self._under_way  # whoever wants it will ask and find a copy, or read it again
            if future.exception() is None:
                self._keep(other, future.result())
            self._under_way = None
        if self._under_way is None:
            self._under_way = version, self._thread.submit(self._read, version, directory)
        reading, future = self._under_way
        if reading != version or not future.done():
            return None
        self._under_way = None
        return future.result()

    def _read(self, version: str, directory: Path) -> LoraWeights:
        if version not in self._verified:
            found = content_hash(directory)
            if found != version:
                raise AdapterError(f"the content of the adapter folder is {found}, expected {version}")
        loaded = load_adapter(directory, self._shape, self._max_rank)
        flat = loaded.flat.to(self._dtype)
        if self._thread is not None and torch.cuda.is_available():
            flat = flat.pin_memory()
        self._verified.add(version)
        return LoraWeights(loaded.layout, flat)

    def _keep(self, version: str, weights: LoraWeights) -> None:
        self._copies[version] = weights
        while len(self._copies) > self._num_copies:
            self._copies.popitem(last=False)

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
