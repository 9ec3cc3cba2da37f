"""Programmatic dependent launch: a kernel's programs start while the kernel before still drains, then wait for it.

A decode step is a chain of about 300 kernels of a few microseconds; the gap between two costs as much as a small one.
On GPUs of compute capability 9 and above a kernel that takes ``**dependent()`` at its launch and calls ``follow`` first
is set up during that gap. Elsewhere both do nothing.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own takes 5 us on the host, a sixth of a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, which is 1 or more; on the host, as ``cdiv``."""
    return 1 << (n - 1).bit_length()


@functools.cache
def dependent() -> dict[str, bool]:
    """Launch arguments of a kernel whose last parameter is ``PDL: tl.constexpr``."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit  # type: ignore[untyped-decorator]
def follow(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel come, then wait until what the kernels before have written can be read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def announce(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel come; before ``settle`` only what no kernel of the chain writes may be read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def settle(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until what the kernels before have written can be read; nothing may be written before."""
    if PDL:
        tl.extra.cuda.gdc_wait()
