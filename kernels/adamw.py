"""AdamW over flat tensors in one pass: masters, both moments, the clipped gradient, the copy in the model's dtype.

Twin: ``reference_training.adamw``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(
    params_ptr: tl.tensor,
    grads_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    compute_ptr: tl.tensor,  # None: no copy
    count: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    weight1: tl.tensor,
    beta2: tl.tensor,
    weight2: tl.tensor,
    root_correction2: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    grad = tl.load(grads_ptr + place, mask=inside, other=0.0) * grad_scale  # [BLOCK] fp32, as all but the copy
    exp_avg = tl.load(exp_avg_ptr + place, mask=inside, other=0.0)
    exp_avg += weight1 * (grad - exp_avg)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + place, mask=inside, other=0.0) * beta2 + weight2 * grad * grad
    param = tl.load(params_ptr + place, mask=inside, other=0.0) * decay
    param -= step_size * tl.div_rn(exp_avg, tl.div_rn(tl.sqrt_rn(exp_avg_sq), root_correction2) + eps)
    tl.store(params_ptr + place, param, mask=inside)
    tl.store(exp_avg_ptr + place, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=inside)
    if compute_ptr is not None:
        tl.store(compute_ptr + place, param.to(compute_ptr.dtype.element_ty), mask=inside)


def adamw(
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute: torch.Tensor | None,
    *,
    grad_scale: float,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    num_updates: int,
) -> None:
    """One update of Adam with decoupled weight decay (Loshchilov and Hutter 2019) on flat fp32 tensors, in place.

    Args:
        params: [n] master weights.
        grads: [n], not changed.
        exp_avg: [n] first moment.
        exp_avg_sq: [n] second moment.
        compute: [n] copy of the masters in another dtype, refreshed; None where there is none.
        grad_scale: Factor on the gradient, of clipping.
        learning_rate: Of this update.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        num_updates: Updates including this one, for the bias corrections.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    for tensor in (params, grads, exp_avg, exp_avg_sq):
        if tensor.shape != params.shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{list(tensor.shape)} {tensor.dtype}: expected fp32 {list(params.shape)}, contiguous")
    if compute is not None and (compute.shape != params.shape or not compute.is_contiguous()):
        raise ValueError(f"the copy {list(compute.shape)} does not fit {list(params.shape)}")
    count = params.numel()
    if count == 0:
        return
    correction1, correction2 = 1 - betas[0] ** num_updates, 1 - betas[1] ** num_updates
    _adamw_kernel[(cdiv(count, _BLOCK),)](
        params, grads, exp_avg, exp_avg_sq, compute, count, float(grad_scale), 1 - learning_rate * weight_decay,
        1 - betas[0], betas[1], 1 - betas[1], math.sqrt(correction2), eps, learning_rate / correction1, _BLOCK,
        num_warps=4,
    )  # fmt: skip
