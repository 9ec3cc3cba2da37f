"""A memory driver without a GPU: it knows what is mapped where, and what must never happen."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from fineinfer.memory.cuda_memory import CudaDriverError, CudaOutOfMemory, MappedRange

NOWHERE, USED_BEFORE = 0xFF, 0xA5  # what unmapped addresses hold (NaN as a float), and memory fresh from the driver


class FakeDriver:
    """Addresses are host memory; what is not mapped there holds NaN, and a write to it is noticed.

    Attributes:
        limit: Bytes of physical memory that exist.
        calls: Names of the calls, in order.
        on_wait: Runs when somebody waits for the device.
        map_limit: Bytes mapped at most: page tables take memory, too.
    """

    def __init__(self, handle_bytes: int = 4096, limit: int = 1 << 40) -> None:
        self.size, self.limit, self.map_limit = handle_bytes, limit, 1 << 40
        self.granularity = handle_bytes
        self.calls: list[str] = []
        self.on_wait: Callable[[], object] = lambda: None
        self.cached_bytes = 0  # freed by the program, but not returned
        self.handles: dict[int, bool] = {}  # number -> whether it is mapped
        self.ranges: dict[int, tuple[mmap.mmap, torch.Tensor]] = {}
        self.mapped: dict[int, int] = {}  # address -> handle
        self._waited = self._settled = True
        self._next = 0

    @property
    def physical_bytes(self) -> int:
        return len(self.handles) * self.size

    def handle_bytes(self, range_bytes: int) -> int:
        return self.size

    def reserve(self, num_bytes: int) -> int:
        self._note("reserve", num_bytes)
        pages = mmap.mmap(-1, num_bytes)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        tensor.fill_(NOWHERE)
        self.ranges[tensor.data_ptr()] = pages, tensor
        return tensor.data_ptr()

    def free(self, address: int, num_bytes: int) -> None:
        self._note("free", num_bytes)
        _, tensor = self.ranges.pop(address)
        assert len(tensor) == num_bytes
        assert not any(address <= place < address + num_bytes for place in self.mapped), "a range in use was freed"
        assert (tensor == NOWHERE).all(), "unmapped memory was written"

    def create(self, num_bytes: int) -> int | None:
        self._note("create", num_bytes)
        assert num_bytes == self.size
        if self.physical_bytes + self.cached_bytes + num_bytes > self.limit:
            return None
        self._next += 1
        self.handles[self._next] = False
        return self._next

    def release(self, handle: int) -> None:
        self._note("release", self.size)
        assert not self.handles.pop(handle), "a mapped handle was released"

    def free_bytes(self) -> int:
        return max(0, self.limit - self.physical_bytes - self.cached_bytes)

    def map(self, address: int, handles: Sequence[int], handle_bytes: int) -> None:
        self._note("map", handle_bytes)
        if self.num_mapped_bytes + len(handles) * handle_bytes > self.map_limit:
            raise CudaOutOfMemory("cuMemSetAccess: CUDA_ERROR_OUT_OF_MEMORY")
        for index, handle in enumerate(handles):
            place = address + index * handle_bytes
            if place in self.mapped or self.handles[handle]:
                raise CudaDriverError("cuMemMap: CUDA_ERROR_ALREADY_MAPPED")
            window = self.window(place)
            assert (window == NOWHERE).all(), "unmapped memory was written"
            self.mapped[place], self.handles[handle] = handle, True
            window.fill_(USED_BEFORE)

    def unmap(self, address: int, count: int, handle_bytes: int) -> None:
        assert self._waited, "memory was unmapped under running work"
        for place in range(address, address + count * handle_bytes, handle_bytes):
            self._note("unmap", handle_bytes)
            if place not in self.mapped:
                raise CudaDriverError("cuMemUnmap: CUDA_ERROR_INVALID_VALUE")
            self.window(place).fill_(NOWHERE)
            self.handles[self.mapped.pop(place)] = False

    def tensor(self, owner: MappedRange) -> torch.Tensor:
        assert owner.address in self.mapped, "torch asks about the first byte"
        described = owner.__cuda_array_interface__
        assert described["data"] == (owner.address, False) and described["shape"] == (owner.num_bytes,)
        tensor = torch.frombuffer(self.ranges[owner.address][0], dtype=torch.uint8)
        return tensor

    def zero(self, tensor: torch.Tensor) -> None:
        self.calls.append("zero")
        tensor.zero_()
        self._settled = False

    def settle(self) -> None:
        self._settled = True

    def wait(self) -> None:
        self.on_wait()
        self._waited = True

    def launch(self) -> None:
        """Something uses the memory from now on, until somebody waits."""
        assert self._settled, "memory was handed out before it was zero"
        self._waited = False

    def reclaim(self) -> None:
        self._note("reclaim", 0)
        self.cached_bytes = 0

    @property
    def num_mapped_bytes(self) -> int:
        return len(self.mapped) * self.size

    def window(self, place: int) -> torch.Tensor:
        """The bytes of one handle's place."""
        start = max(address for address in self.ranges if address <= place)
        return self.ranges[start][1][place - start : place - start + self.size]

    def check(self) -> None:
        """Nothing was written where nothing is mapped, and every mapped handle is in one place."""
        for start, (_, tensor) in self.ranges.items():
            mapped = torch.zeros(len(tensor) // self.size, dtype=torch.bool)
            for place in self.mapped:
                if start <= place < start + len(tensor):
                    mapped[(place - start) // self.size] = True
            assert (tensor.view(-1, self.size)[~mapped] == NOWHERE).all(), "unmapped memory was written"
        assert sorted(self.mapped.values()) == sorted(handle for handle, used in self.handles.items() if used)

    def _note(self, name: str, num_bytes: int) -> None:
        self.calls.append(name)
        if num_bytes % self.granularity:
            raise CudaDriverError(f"{name}: CUDA_ERROR_INVALID_VALUE")
