"""Kernels are compiled on all cores at once before they run: one after the other a cold start takes 40 s for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only() -> Iterator[None]:
    """Launches of Triton kernels in here compile them, on threads, and run nothing; at the end all are compiled.

    Raises:
        Exception: What a compiler says of a kernel that it cannot compile, at the end.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        JITFunction.run = run
