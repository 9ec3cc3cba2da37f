"""Cross entropy of rows of logits with its gradient in two passes over them, one program a row.

Twin: ``reference_training.cross_entropy``. The first pass finds maximum and sum of exponentials together, the second
writes the gradient over the logits; all in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import next_power_of_2

_MAX_BLOCK, _NUM_WARPS = 4096, 8  # 16 values a thread


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    correct_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    # a maximum and a sum for each lane, joined at the end: no reduction over the program inside the loop
    highest = tl.full([BLOCK], -1e38, tl.float32)  # finite, so that a lane past the end has no inf - inf
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        x = tl.load(row_ptr + start + lane, mask=start + lane < VOCAB, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    log_sum = tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
    at_target = tl.load(row_ptr + target).to(tl.float32)
    tl.store(losses_ptr + row, log_sum - (at_target - top))
    tl.store(correct_ptr + row, at_target == top)
    tl.debug_barrier()  # the target's logit is read before any thread writes over it
    for start in range(0, VOCAB, BLOCK):
        column = start + lane
        x = tl.load(row_ptr + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        gradient = tl.exp((x - top) - log_sum) - tl.where(column == target, 1.0, 0.0)
        tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < VOCAB)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of each row, whether its target is the most likely id, and the gradient of the sum of losses.

    Args:
        logits: [num_rows, vocab], rows may be strided; the gradient is written over them.
        targets: [num_rows] int64.

    Returns:
        (losses [num_rows] fp32, [num_rows] bool, ``logits``, which hold softmax - one-hot).

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    num_rows, vocab = logits.shape
    if targets.shape != (num_rows,) or targets.dtype != torch.int64 or not targets.is_contiguous():
        raise ValueError(f"targets {list(targets.shape)} {targets.dtype} do not fit logits {list(logits.shape)}")
    if vocab == 0 or logits.stride(1) != 1:
        raise ValueError("the logits of a row must lie side by side")
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        # never fewer than threads: what one thread has written another must not read as a logit
        block = min(_MAX_BLOCK, max(32 * _NUM_WARPS, next_power_of_2(vocab)))
        _cross_entropy_kernel[(num_rows,)](
            logits, targets, losses, correct, logits.stride(0), vocab, block, num_warps=_NUM_WARPS
        )  # fmt: skip
    return losses, correct, logits
