"""Deterministic mode of training (``--deterministic``): the same bits in every run, on a GPU too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def prepare_determinism() -> None:
    """Give cuBLAS the workspaces it needs to add in a fixed order; before the process first uses CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with fixed_order(True):  # torch imports a compiler the first time, 0.8 s that no request shall wait
        pass


@contextmanager
def fixed_order(wanted: bool) -> Iterator[None]:
    """Operations within add in a fixed order: of training's, flash attention's backward has none by itself.

    The mode is the whole process's, so it is set for one unit at a time: torch refuses some operations in it, such as
    the cumulative sums of the reference sampler.

    Args:
        wanted: Whether to change anything.
    """
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    mode: Any = torch.utils.deterministic
    fills = mode.fill_uninitialized_memory
    mode.fill_uninitialized_memory = False  # a pass over every new buffer, none of which is read before it is written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        mode.fill_uninitialized_memory = fills
