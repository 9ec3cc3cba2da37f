"""``silu(gate) * up`` of the fused gate and up projection, one program per row and block of columns.

Twin: ``reference.silu_and_mul``, which rounds the SiLU before the product; here it is all fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, dependent, follow, next_power_of_2
from fineinfer.kernels.lora import AdapterPart, adapter_part

MAX_BLOCK = 1024  # columns of a program: with 4 warps 8 a thread, one 16-byte load of each half


@triton.jit(do_not_specialize_on_alignment=["row_slots_ptr"])  # type: ignore[untyped-decorator]
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    part_ptr: tl.tensor,  # both None: no adapters
    row_slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    INTERMEDIATE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    # one grid axis: neighbouring programs read neighbouring memory, and no limit of 65,535 rows
    program = tl.program_id(0)
    row = (program // NUM_BLOCKS).to(tl.int64)
    column = (program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptr + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    if part_ptr is not None:
        dtype = gate_up_ptr.dtype.element_ty
        place = row * (2 * INTERMEDIATE) + column
        gate = (gate + adapter_part(part_ptr, row_slots_ptr, row, place, inside)).to(dtype).to(tl.float32)
        up = (up + adapter_part(part_ptr, row_slots_ptr, row, place + INTERMEDIATE, inside)).to(dtype).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + column, activated.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, part: AdapterPart | None = None
) -> torch.Tensor:
    """``silu(gate) * up``, of ``part`` added to both.

    Args:
        gate_up: [num_tokens, 2 * intermediate], the gate's columns first; rows may be strided.
        out: [num_tokens, intermediate] in the same dtype, or None for a new tensor.
        part: What adapters add to ``gate_up``, which is rounded to its dtype as after ``lora.lora_expand``.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    if width % 2 or width == 0 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {list(gate_up.shape)} must have an even number of columns, next to each other")
    if out is None:
        out = gate_up.new_empty(num_tokens, intermediate)
    elif out.shape != (num_tokens, intermediate) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit {list(gate_up.shape)} {gate_up.dtype}")
    if part is not None:
        part.check(gate_up)
    if num_tokens == 0:
        return out
    block = min(MAX_BLOCK, next_power_of_2(intermediate))
    num_blocks = cdiv(intermediate, block)
    _silu_and_mul_kernel[(num_tokens * num_blocks,)](
        gate_up,
        *(part or (None, None)),
        out,
        gate_up.stride(0),
        out.stride(0),
        intermediate,
        num_blocks,
        block,
        num_warps=4,
        **dependent(),
    )
    return out
