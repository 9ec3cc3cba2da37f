"""Backward of the norm, which also makes the norm's output again, so that no layer has to keep it.

Twin: ``reference_training.rms_norm_backward``. All in fp32, rounded once; the output made again rounds where the
forward kernel does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.norm import MAX_HIDDEN, row_block


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_backward_kernel(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,  # None: nothing to add
    out_ptr: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = row * HIDDEN + column
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    scaled = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * weight
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = x * inverse
    grad_x = inverse * (scaled - normed * (tl.sum(scaled * normed, axis=0) / HIDDEN))
    if residual_ptr is not None:
        grad_x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_ptr + place, grad_x.to(dtype), mask=inside)
    tl.store(out_ptr + place, (weight * normed.to(dtype).to(tl.float32)).to(dtype), mask=inside)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of ``rms_norm`` with respect to its rows, and its output once more.

    Args:
        grad: [num_rows, hidden] gradient of the output; receives the gradient of ``x``, ``residual`` added.
        x: [num_rows, hidden], the norm's input.
        weight: [hidden].
        eps: Added to the mean square.
        residual: Gradient that reaches ``x`` beside the norm, as ``grad``, or None.

    Returns:
        The norm's output, [num_rows, hidden].

    Raises:
        ValueError: Shapes, dtypes or strides do not fit: all tensors are contiguous and of one dtype.
    """
    num_rows, hidden = x.shape
    _check(grad, x.shape, x)
    _check(weight, (hidden,), x)
    if residual is not None:
        _check(residual, x.shape, x)
    if not 0 < hidden <= MAX_HIDDEN or not x.is_contiguous():
        raise ValueError(f"hidden is {hidden}, must be 1 to {MAX_HIDDEN}, and rows contiguous")
    out = torch.empty_like(x)
    if num_rows:
        block, num_warps = row_block(hidden)
        _rms_norm_backward_kernel[(num_rows,)](
            grad, x, weight, residual, out, eps, hidden, block, num_warps=num_warps
        )  # fmt: skip
    return out


def _check(tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if tensor.shape != shape or tensor.dtype != like.dtype or not tensor.is_contiguous():
        raise ValueError(f"{list(tensor.shape)} {tensor.dtype}: expected {list(shape)} {like.dtype}, contiguous")
