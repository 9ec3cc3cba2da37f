"""Returns memory that was freed in this process but is still held by an allocator."""

from __future__ import annotations

import torch

from fineinfer.memory.host import trim_heap


def return_freed_memory(device: torch.device) -> None:
    """Make freed memory of a device available to its other users: the C heap's pages, or torch's cached blocks.

    On CUDA that is ``empty_cache``, which waits for the device (cudaFree does) and makes the next micro-batch allocate
    its blocks anew. It is therefore called only when the ladder moves bytes, never between two steps. A
    ``torch.cuda.MemPool`` for training would have to do the same (dropping it is a cudaFree of its blocks), and it
    catches the allocations of the calling thread only, while autograd runs backward on a thread of its own. When a
    cudaMalloc fails, torch returns its cached blocks by itself and tries again, so what is cached is never the reason
    for an out-of-memory error. ``expandable_segments`` is left off: it does not go together with the private pools of
    captured steps and of MemPool (pytorch#147851).
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()
