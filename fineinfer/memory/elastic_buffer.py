"""A buffer with one fixed address whose physical memory grows and shrinks behind its front."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

from fineinfer.memory.cuda_memory import HandleStore, MappedRange


class ElasticBuffer:
    """Reserves ``max_bytes`` of addresses; only the first ``mapped_bytes`` may be touched and cost memory.

    CPU: a private anonymous mapping. Pages cost memory once written; ``shrink`` returns them to the system at once and
    they read as zero after the next ``grow``. CUDA: an address range of the driver, resized by whole handles. Without
    handles, or elsewhere: one plain zeroed allocation of ``max_bytes`` that cannot be resized (``elastic`` is False).

    Args:
        max_bytes: Size of the address range; fixed for life.
        device: Torch device.
        handles: Where the physical memory comes from on CUDA; None for memory that stays as it is.
    """

    def __init__(self, max_bytes: int, device: torch.device | str = "cpu", handles: HandleStore | None = None) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}.")
        self.max_bytes, self.device = max_bytes, torch.device(device)
        self.elastic = handles is not None or self.device.type == "cpu"
        self.mapped_bytes = 0 if self.elastic else max_bytes
        self._mapping: mmap.mmap | None = None
        self._range: MappedRange | None = None
        if handles is not None:
            self._driver = handles.driver
            self._range = MappedRange(max_bytes, handles)
            self._bytes = self._range.tensor()
        elif self.elastic:
            # Private, as MADV_DONTNEED keeps the data of a shared mapping; no reserve, as the range may exceed RAM.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._mapping = mmap.mmap(-1, max_bytes, flags=flags)
            # The tensor keeps the mapping alive. Never close() it: tensors over it would then point nowhere.
            self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            self._bytes = torch.zeros(max_bytes, dtype=torch.uint8, device=self.device)

    def grow(self, num_bytes: int) -> int:
        """Map ``num_bytes`` more behind the front; they read as zero.

        Returns:
            ``num_bytes``, or 0 (and no change) if the device has no memory for them.

        Raises:
            ValueError: Negative, or past ``max_bytes``, or no whole number of handles.
            RuntimeError: The buffer is not elastic.
        """
        self._check(num_bytes, self.max_bytes - self.mapped_bytes)
        if self._range is not None and num_bytes:
            num_bytes = self._range.grow(num_bytes)
            self._driver.zero(self._bytes[self.mapped_bytes : self.mapped_bytes + num_bytes])
        self.mapped_bytes += num_bytes
        return num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Unmap the last ``num_bytes``; whole pages or handles leave the process at once.

        On CUDA this waits until the device has done what was launched before.

        Raises:
            ValueError: Negative, or more than is mapped, or no whole number of handles.
            RuntimeError: The buffer is not elastic.
        """
        self._check(num_bytes, self.mapped_bytes)
        if self._range is not None:
            self.mapped_bytes -= num_bytes
            self._range.shrink(num_bytes)
            return
        old, self.mapped_bytes = self.mapped_bytes, self.mapped_bytes - num_bytes
        first_page = -(-self.mapped_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # The page that the new front cuts stays; elsewhere than on Linux, dropped pages need not read as zero.
        self._bytes[self.mapped_bytes : min(first_page, old) if sys.platform == "linux" else old].zero_()
        if self._mapping is not None and old > first_page:
            self._mapping.madvise(mmap.MADV_DONTNEED, first_page, old - first_page)

    def as_tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The buffer from its first byte on as a tensor; touch only elements inside ``mapped_bytes``."""
        size = dtype.itemsize * torch.Size(shape).numel()
        if size > self.max_bytes:
            raise ValueError(f"shape {tuple(shape)} of {dtype} needs {size} bytes of {self.max_bytes}.")
        return self._bytes[:size].view(dtype).view(*shape)

    def _check(self, num_bytes: int, most: int) -> None:
        if not self.elastic:
            raise RuntimeError(f"memory on {self.device} cannot be resized")
        if not 0 <= num_bytes <= most or (self._range is not None and num_bytes % self._range.handle_bytes):
            raise ValueError(f"num_bytes must be in [0, {most}] and whole handles, got {num_bytes}.")
