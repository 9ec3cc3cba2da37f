"""What the tests change about Triton's interpreter (3.6 to 3.9): its speed, and that it checks every address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


def patch_once_a_launch() -> None:
    """Triton's interpreter patches its language again for each function a kernel calls: much of its time.

    What is patched already stays as it is. Another interpreter may do it in another way, and is then as slow as it is.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return

    def patch_unless_patched(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        return patch(function) if any(language.core.is_builtin(module.load) for module in used) else scope()

    interpreter._patch_lang = patch_unless_patched


def check_addresses() -> None:
    """From now on a kernel that reads or writes outside of the tensors it was given fails, as under memcheck on a GPU.

    Stricter than that: a view ends where its last element does, not where the allocation does.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor._init_args_hst
    memory = _Memory(interpreter._interpreter)

    def begin_launch(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = launch(self, args, kwargs)
        memory.extents = [extent(tensor) for tensor in _tensors([on_host[0], *on_host[1].values()])]
        return on_host

    interpreter.GridExecutor._init_args_hst = begin_launch
    interpreter._interpreter = memory


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a view: its first byte, and the one behind its last."""
    first, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + size * (1 + sum((count - 1) * stride for count, stride in steps))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _Memory:
    """Triton's functions that touch memory, behind a look at the addresses."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.extents: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        self._check(pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self._check(pointers, mask, value.dtype.itemsize)
        self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def _check(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        used = pointers if mask.all() else pointers[np.broadcast_to(mask, pointers.shape)]
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + size
        if not any(start <= first and last <= end for start, end in self.extents):
            raise IndexError(f"a kernel used addresses {first:#x} to {last:#x}, of no tensor that it was given")
