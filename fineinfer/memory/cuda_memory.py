"""A GPU's memory through the driver's virtual memory calls: address ranges, and handles mapped behind their fronts.

A *handle* is a piece of physical memory. Mapping one costs about 60 us whatever its size (H100: 4 GiB in handles of
2 MiB 131 ms, of 32 MiB 7.5 ms), so handles are large, and a pool changes its size in whole ones.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

Handle = Any  # the driver's own object

MIN_HANDLE_BYTES, MAX_HANDLE_BYTES = 8 << 20, 64 << 20
HANDLES_PER_RANGE = 64  # a range is resized in steps of this share of itself
RETRY_S = 0.25  # after the device had no memory left it is not asked again for this long
MAX_RETRY_DOUBLINGS = 4  # and after each further refusal in a row for twice as long, 4 s in the end


class CudaDriverError(RuntimeError):
    """A call of the driver failed; the message names the call and the error."""


class CudaOutOfMemory(CudaDriverError):
    """The device has no memory left: an ordinary answer, since other programs may hold it."""


class MemoryDriver(Protocol):
    """What a mapped range needs of a device; ``CudaDriver`` in earnest, a stand-in in tests."""

    def handle_bytes(self, range_bytes: int) -> int:
        """Size of the handles for ranges of ``range_bytes``."""

    def reserve(self, num_bytes: int) -> int:
        """The address of a new range without memory."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give up a range in which nothing is mapped."""

    def create(self, num_bytes: int) -> Handle | None:
        """A handle; None if the device has no memory left."""

    def release(self, handle: Handle) -> None:
        """Return the memory of a handle that is mapped nowhere."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds, also not as a cache."""

    def map(self, address: int, handles: Sequence[Handle], handle_bytes: int) -> None:
        """Map handles one behind the other from ``address`` on, readable and writable; all or none."""

    def unmap(self, address: int, count: int, handle_bytes: int) -> None:
        """Unmap ``count`` handles from ``address`` on."""

    def tensor(self, owner: MappedRange) -> torch.Tensor:
        """The range as uint8 ``[num_bytes]``, which keeps ``owner`` alive; its first handle is mapped."""

    def zero(self, tensor: torch.Tensor) -> None:
        """Fill with zeros beside what the device is doing; work launched later on the current stream comes after."""

    def settle(self) -> None:
        """Wait until all ``zero`` has been asked for is done, so that any stream may use the memory."""

    def wait(self) -> None:
        """Wait for everything on the device that may still use mapped memory."""

    def reclaim(self) -> None:
        """Return to the device what this process has cached."""


def pick_handle_bytes(range_bytes: int, granularity: int) -> int:
    """About a 64th of a range, a power of two from 8 to 64 MiB; a smaller range is one handle.

    Args:
        range_bytes: Size of the range.
        granularity: Handles are multiples of this.
    """
    size = 1 << max(0, round(math.log2(range_bytes / HANDLES_PER_RANGE)))
    size = min(max(size, MIN_HANDLE_BYTES), MAX_HANDLE_BYTES, range_bytes)
    return max(1, size // granularity) * granularity


def open_driver(device: torch.device) -> MemoryDriver | None:
    """The driver of a CUDA device; None, and a warning on CUDA, where memory cannot be mapped."""
    if device.type != "cuda":
        return None
    try:
        return CudaDriver(device)
    except (ImportError, RuntimeError) as error:  # no cuda.bindings, no such calls (WSL, some virtual GPUs), no memory
        logger.warning("the KV pool cannot shrink and grow, training gets a fixed half of the memory: %s", error)
        return None


class CudaDriver:
    """``MemoryDriver`` over ``cuda.bindings``.

    Args:
        device: A CUDA device.

    Raises:
        ImportError: ``cuda.bindings`` is not installed.
        RuntimeError: The driver or the device lacks these calls.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._api = driver
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.zeros(1, device=self.device)  # makes torch's context the current one
        supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", supported, index):
            raise CudaDriverError("cuDeviceGetAttribute: the device has no virtual memory management")
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        for place in (self._kind.location, self._access.location):
            place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._kind, recommended))
        # of high priority: memory that somebody waits for is not zeroed behind a training unit
        self._side = torch.cuda.Stream(self.device, priority=-1)
        MappedRange(self.granularity, HandleStore(self, self.granularity)).tensor()  # every call once

    def handle_bytes(self, range_bytes: int) -> int:
        """See ``MemoryDriver``."""
        return pick_handle_bytes(range_bytes, self.granularity)

    def reserve(self, num_bytes: int) -> int:
        """See ``MemoryDriver``."""
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free(self, address: int, num_bytes: int) -> None:
        """See ``MemoryDriver``."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Handle | None:
        """See ``MemoryDriver``."""
        try:
            return self._call("cuMemCreate", num_bytes, self._kind, 0)
        except CudaOutOfMemory:
            return None

    def release(self, handle: Handle) -> None:
        """See ``MemoryDriver``."""
        self._call("cuMemRelease", handle)

    def free_bytes(self) -> int:
        """See ``MemoryDriver``."""
        return int(self._call("cuMemGetInfo"))

    def map(self, address: int, handles: Sequence[Handle], handle_bytes: int) -> None:
        """See ``MemoryDriver``."""
        done = 0
        try:
            for handle in handles:
                self._call("cuMemMap", address + done * handle_bytes, handle_bytes, 0, handle, 0)
                done += 1
            self._call("cuMemSetAccess", address, done * handle_bytes, [self._access], 1)
        except CudaDriverError:
            self.unmap(address, done, handle_bytes)
            raise

    def unmap(self, address: int, count: int, handle_bytes: int) -> None:
        """See ``MemoryDriver``."""
        for place in range(address, address + count * handle_bytes, handle_bytes):
            self._call("cuMemUnmap", place, handle_bytes)

    def tensor(self, owner: MappedRange) -> torch.Tensor:
        """See ``MemoryDriver``; torch asks the driver about the first byte only."""
        tensor = torch.as_tensor(owner, device=self.device)
        if tensor.data_ptr() != owner.address:
            raise CudaDriverError("torch copied the range instead of using it")
        return tensor

    def zero(self, tensor: torch.Tensor) -> None:
        """See ``MemoryDriver``."""
        with torch.cuda.stream(self._side):
            tensor.zero_()
        torch.cuda.current_stream(self.device).wait_stream(self._side)

    def settle(self) -> None:
        """See ``MemoryDriver``."""
        self._side.synchronize()

    def wait(self) -> None:
        """See ``MemoryDriver``.

        The whole device, not one stream: a step that was launched ahead, the copies of a move, zeroing and whatever
        stream a runner may use. Unmapping under a kernel that still reads is an illegal access, which ends the process.
        """
        torch.cuda.synchronize(self.device)

    def reclaim(self) -> None:
        """See ``MemoryDriver``."""
        torch.cuda.empty_cache()

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._api, name)(*arguments)
        if int(error):
            message = f"{name}: {getattr(error, 'name', error)}"
            out_of_memory = int(error) == int(self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            raise CudaOutOfMemory(message) if out_of_memory else CudaDriverError(message)
        return values[0] if values else None


class HandleStore:
    """Handles of one size for several ranges; a few that nobody has mapped are kept for the next who grows.

    Args:
        driver: Makes them.
        handle_bytes: Size of each.
        max_idle: Most handles kept unmapped.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        handle_bytes: int,
        max_idle: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.driver, self.handle_bytes = driver, handle_bytes
        self._max_idle, self._clock = max_idle, clock
        self._idle: list[Handle] = []
        self._num_refusals = 0  # in a row
        self._ask_again_s = 0.0
        self._num_looks = 0  # until the device is asked again, even if nobody has given memory back
        self._free_bytes = 0  # of the device, when it refused
        _at_death(self, _release, driver, self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes of handles that are mapped nowhere."""
        return len(self._idle) * self.handle_bytes

    @property
    def is_refused(self) -> bool:
        """Whether the device had no memory left, and has not got any back since, so that asking again is no use yet."""
        if self._clock() < self._ask_again_s:
            return True
        if self._num_looks:
            if self.driver.free_bytes() < self._free_bytes + self.handle_bytes:
                self._num_looks -= 1
                self._ask_again_s = self._clock() + RETRY_S
                return True
            self._num_looks = 0
        return False

    def refuse(self) -> None:
        """Note that the device had no memory left."""
        self._num_looks = (1 << min(self._num_refusals, MAX_RETRY_DOUBLINGS)) - 1
        self._num_refusals += 1
        self._ask_again_s, self._free_bytes = self._clock() + RETRY_S, self.driver.free_bytes()

    def forget_refusals(self) -> None:
        """Let the device be asked again at once: a growth got all it asked for, or this process gave memory back."""
        self._num_refusals = self._num_looks = 0
        self._ask_again_s = 0.0

    def stock(self, count: int) -> int:
        """Create handles until ``count`` are idle or the device has no memory left; how many are idle.

        What this process has cached is returned before the 1st, 2nd, 4th, 8th ... refusal in a row only: that waits for
        the device and makes the next micro-batch allocate anew.
        """
        may_reclaim = self._num_refusals & (self._num_refusals + 1) == 0
        while len(self._idle) < count and not self.is_refused:
            handle = self.driver.create(self.handle_bytes)
            if handle is not None:
                self._idle.append(handle)
            elif may_reclaim:
                self.driver.reclaim()
                may_reclaim = False
            else:
                self.refuse()
        return len(self._idle)

    def take(self, count: int) -> list[Handle]:
        """Take handles out, creating what is missing: ``count`` of them, or none if there are too few."""
        if self.stock(count) < count:
            return []
        taken = self._idle[len(self._idle) - count :]
        del self._idle[len(self._idle) - count :]
        return taken

    def give(self, handles: Sequence[Handle]) -> None:
        """Take back unmapped handles: some are kept, the memory of the others is returned."""
        self._idle.extend(handles)
        self._release_above(self._max_idle)

    def release_idle(self) -> None:
        """Return the memory of all idle handles."""
        self._release_above(0)

    def _release_above(self, count: int) -> None:
        while len(self._idle) > count:
            self.driver.release(self._idle.pop())


class MappedRange:
    """One address range whose first handles are mapped. Lives as long as any tensor over it, then gives back all.

    Args:
        max_bytes: Size; rounded up to whole handles.
        store: Where handles come from.
    """

    def __init__(self, max_bytes: int, store: HandleStore) -> None:
        self._store, driver, size = store, store.driver, store.handle_bytes
        self.handle_bytes = size
        self.num_bytes = -(-max_bytes // size) * size
        self.address = driver.reserve(self.num_bytes)
        self._handles: list[Handle] = []
        _at_death(self, _dissolve, driver, (self.address, self.num_bytes, size), self._handles)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes; see numba's description of the protocol."""
        place = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": place, "version": 3, "strides": None}

    def tensor(self) -> torch.Tensor:
        """uint8 ``[num_bytes]``; touch only what is mapped. Maps one handle for the moment, if none is.

        Raises:
            CudaOutOfMemory: There is not even one.
        """
        if self._handles:
            return self._store.driver.tensor(self)
        if not self.grow(self.handle_bytes):
            raise CudaOutOfMemory(f"cuMemCreate: no {self.handle_bytes} bytes are left on the device")
        try:
            return self._store.driver.tensor(self)
        finally:
            self.shrink(self.handle_bytes)

    def grow(self, num_bytes: int) -> int:
        """Map ``num_bytes`` more, whole handles of unknown content; returns 0 instead if there is too little memory."""
        size = self.handle_bytes
        handles = self._store.take(num_bytes // size)
        if not handles:
            return 0
        try:
            self._store.driver.map(self.address + len(self._handles) * size, handles, size)
        except CudaDriverError as error:
            self._store.give(handles)
            if isinstance(error, CudaOutOfMemory):  # no memory for page tables
                return 0
            raise
        self._handles.extend(handles)
        return num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Unmap the last ``num_bytes``, whole handles, once the device no longer uses them."""
        size = self.handle_bytes
        left = len(self._handles) - num_bytes // size
        self._store.driver.wait()
        self._store.driver.unmap(self.address + left * size, len(self._handles) - left, size)
        freed = self._handles[left:]
        del self._handles[left:]
        self._store.give(freed)


def _at_death(owner: object, function: Callable[..., None], *arguments: Any) -> None:
    # at the end of the process the driver frees everything itself, and may be gone before Python is
    weakref.finalize(owner, function, *arguments).atexit = False


def _release(driver: MemoryDriver, handles: list[Handle]) -> None:
    while handles:
        driver.release(handles.pop())


def _dissolve(driver: MemoryDriver, place: tuple[int, int, int], handles: list[Handle]) -> None:
    address, num_bytes, handle_bytes = place
    if handles:
        driver.wait()
        driver.unmap(address, len(handles), handle_bytes)
        _release(driver, handles)
    driver.free(address, num_bytes)
