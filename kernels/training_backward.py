"""Backward of the norm and of SiLU·mul; each also makes its forward's output again, which no layer then has to keep.

Twins: ``reference_training.rms_norm_backward`` and ``reference_training.silu_and_mul_backward``. All in fp32, rounded
once; the outputs made again round where their forward kernels do, so they are the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.norm import MAX_HIDDEN, row_block

_MAX_BLOCK = 1024  # columns of a program of the activation: with 4 warps 8 a thread
# never fewer than threads: a value held by two threads could be read by the second after the first has written over it
_MIN_BLOCK = 128


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


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_backward_kernel(
    grad_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    INTERMEDIATE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // NUM_BLOCKS).to(tl.int64)
    column = (program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    dtype = grad_ptr.dtype.element_ty
    gate_ptr = gate_up_ptr + row * (2 * INTERMEDIATE) + column
    out_ptr = grad_ptr + row * INTERMEDIATE + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptr + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(gate_ptr, (grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))).to(dtype), mask=inside)
    tl.store(gate_ptr + INTERMEDIATE, (grad * silu).to(dtype), mask=inside)
    tl.store(out_ptr, (silu * up).to(dtype), mask=inside)


def silu_and_mul_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Gradient of ``silu_and_mul``, in place.

    Args:
        grad: [num_rows, intermediate] gradient of the output; receives ``silu(gate) * up``, the output once more.
        gate_up: [num_rows, 2 * intermediate], the gate's columns first; receives its gradient.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit: both tensors are contiguous and of one dtype.
    """
    num_rows, intermediate = grad.shape
    _check(gate_up, (num_rows, 2 * intermediate), grad)
    if not grad.is_contiguous():
        raise ValueError("the gradient must be contiguous")
    if grad.numel():
        block = min(_MAX_BLOCK, max(_MIN_BLOCK, triton.next_power_of_2(intermediate)))
        num_blocks = triton.cdiv(intermediate, block)
        _silu_and_mul_backward_kernel[(num_rows * num_blocks,)](
            grad, gate_up, intermediate, num_blocks, block, num_warps=4
        )  # fmt: skip


def _check(tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if tensor.shape != shape or tensor.dtype != like.dtype or not tensor.is_contiguous():
        raise ValueError(f"{list(tensor.shape)} {tensor.dtype}: expected {list(shape)} {like.dtype}, contiguous")
