"""Root-mean-square norm of token rows, alone or with the residual addition before it, one program per row.

Twins: ``reference.rms_norm`` and ``reference.add_rms_norm``. Half types are normalised in fp32, rounded, then scaled
in their own type, as transformers does; so the product with the weight is rounded a second time. A residual stream in
fp32 under half weights is rounded once, when it has been normed and scaled: the stream itself loses nothing by the two
additions of a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import dependent, follow, next_power_of_2
from fineinfer.kernels.lora import AdapterPart, adapter_part

MAX_HIDDEN = 16384  # a row is held in registers: 32 values for each of 512 threads


@triton.jit(do_not_specialize_on_alignment=["row_slots_ptr"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,  # None: plain norm
    part_ptr: tl.tensor,  # both None: no adapters
    row_slots_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    out_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dtype = out_ptr.dtype.element_ty
    stream_dtype = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        if part_ptr is not None:
            part = adapter_part(part_ptr, row_slots_ptr, row, row * HIDDEN + column, inside)
            delta = (delta + part).to(delta_ptr.dtype.element_ty).to(tl.float32)
        rounded = (wide + delta).to(stream_dtype)
        tl.store(x_ptr + row * x_stride + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)  # the norm is that of the stream as stored
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = weight * (wide * inverse).to(stream_dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, normed.to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Norm of each row, scaled.

    Args:
        x: [num_tokens, hidden] in ``weight``'s dtype or fp32, rows may be strided.
        weight: [hidden].
        eps: Added to the mean square.
        out: [num_tokens, hidden] in ``weight``'s dtype, or None for a new tensor; may be ``x`` itself.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    return _launch(x, None, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    part: AdapterPart | None = None,
) -> torch.Tensor:
    """``x += delta`` in place, ``part`` included, then the norm of the new ``x``.

    Args:
        x: [num_tokens, hidden] in ``weight``'s dtype or fp32, the residual stream; rows may be strided.
        delta: [num_tokens, hidden] in ``weight``'s dtype or ``x``'s.
        weight: [hidden].
        eps: Added to the mean square.
        out: [num_tokens, hidden] in ``weight``'s dtype, or None for a new tensor; may be ``delta`` itself, not ``x``.
        part: What adapters add to ``delta``, which is rounded to its dtype as after ``lora.lora_expand``.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    if delta.shape != x.shape or delta.dtype not in (weight.dtype, x.dtype) or delta.stride(1) != 1:
        raise ValueError(f"delta {list(delta.shape)} {delta.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if out is x:
        raise ValueError("out must not be x, which receives the sum")
    if part is not None:
        part.check(delta)
    return _launch(x, delta, part, weight, eps, out)


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    part: AdapterPart | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    fits = weight.shape == (hidden,) and x.dtype in (weight.dtype, torch.float32)
    if not fits or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} {weight.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"hidden is {hidden}, must be 1 to {MAX_HIDDEN}")
    if out is None:
        out = torch.empty((num_tokens, hidden), dtype=weight.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != weight.dtype or out.stride(1) != 1:
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit x {list(x.shape)} and {weight.dtype}")
    if num_tokens == 0:
        return out
    block, num_warps = row_block(hidden)
    delta_stride = 0 if delta is None else delta.stride(0)
    _rms_norm_kernel[(num_tokens,)](
        x,
        delta,
        *(part or (None, None)),
        weight,
        out,
        eps,
        x.stride(0),
        delta_stride,
        out.stride(0),
        hidden,
        block,
        num_warps=num_warps,
        **dependent(),
    )
    return out


def row_block(hidden: int) -> tuple[int, int]:
    """Block of a whole row and its warps: 16 values a thread, and never more threads than values.

    A value held by two threads could be read by the second after the first has written the sum over it.
    """
    block = max(128, next_power_of_2(hidden))
    return block, min(16, max(1, block // 512))
