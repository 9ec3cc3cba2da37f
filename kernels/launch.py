"""What a kernel does about the gap to the next one; all of it only on GPUs of compute capability 9 and above.

A decode step is a chain of about 300 kernels of a few microseconds; the gap between two costs as much as a small one.
Programmatic dependent launch: a kernel that takes ``**dependent()`` at its launch and calls ``follow`` first is set up
during that gap. Prefetch: a kernel that calls ``prefetch_last`` at its end has memory bring the next weights into the
L2 cache during it.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

_PREFETCHING = tl.constexpr(128)  # programs, the last of a kernel; about as many as an H100 runs at once
_PREFETCH_BYTES = tl.constexpr(2048)  # of one instruction


@functools.cache
def has_launch_control() -> bool:
    """Whether the device knows dependent launches and bulk prefetches."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def dependent() -> dict[str, bool]:
    """Launch arguments of a kernel whose last parameter is ``PDL: tl.constexpr``."""
    return {"PDL": True, "launch_pdl": True} if has_launch_control() else {"PDL": False}


def prefetchable_bytes(weight: torch.Tensor | None) -> int:
    """Bytes of a weight that ``prefetch_last`` can bring; 0: leave it out."""
    if weight is None or not has_launch_control() or not weight.is_contiguous() or weight.data_ptr() % 16:
        return 0
    return weight.nbytes // 2048 * 2048


@triton.jit  # type: ignore[untyped-decorator]
def follow(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel come, then wait until what the kernels before have written can be read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_last(weight, num_bytes, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring the first ``num_bytes`` of ``weight`` into the L2 cache; each of the last programs asks for a part.

    ``THREADS`` are those of a program. It takes a moment when the program has read all its own data, so the memory
    goes on working while the kernel drains, the next starts and what lies between two products runs.
    """
    program = tl.program_id(0) - tl.maximum(0, tl.num_programs(0) - _PREFETCHING)
    share = tl.cdiv(num_bytes // _PREFETCH_BYTES, tl.minimum(tl.num_programs(0), _PREFETCHING))  # instructions
    if program >= 0:
        lane = tl.arange(0, THREADS)
        for first in range(0, share, THREADS):
            number = program * share + first + lane
            wanted = (first + lane < share) & (number * _PREFETCH_BYTES < num_bytes)
            address = weight.to(tl.pointer_type(tl.int8)) + number.to(tl.int64) * _PREFETCH_BYTES
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;"
                " @p cp.async.bulk.prefetch.L2.global [$1], 2048; }",
                "=r,l,r",
                [address, wanted.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
