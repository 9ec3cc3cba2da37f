"""``y = x @ weight.T + bias`` for rows of tokens, on whichever library is fastest at few rows.

fp32 on a CPU: ``F.linear`` goes to a GEMM that is slow for the few rows of a decode step; oneDNN's own entry point on
the same plain weights (no packed second copy) takes half the time for wide outputs. It is private to torch, so a probe
in each process decides once whether it exists, agrees and pays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

MAX_FAST_ROWS = 256
_PROBE_ROWS, _PROBE_IN, _PROBE_OUT = 16, 512, 16384  # wide enough that a timing tells something; 33 MB, 0.1 s
_PROBE_REPEATS = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Linear map of token rows.

    Args:
        x: [num_tokens, in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.

    Returns:
        [num_tokens, out_features], in ``x``'s dtype. A graph-building call always takes ``F.linear``.
    """
    if (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and 0 < x.shape[0] <= MAX_FAST_ROWS
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and onednn_linear_pays()
    ):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def wide_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear`` whose result is fp32 (fp64 stays), for sums that are added to or compared: half types round 20 to 1/8.

    On a GPU the fp32 sums of the product are kept; on a CPU, which would have to widen the weight first, they are
    rounded and widened.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features], of the same dtype.
        bias: [out_features] or None.
        out: Receives the result, or None for a new tensor.

    Returns:
        [num_rows, out_features].
    """
    if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16):
        y = torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return y if bias is None else y.add_(bias)
    y = linear(x, weight, bias)
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return y if out is None else out.copy_(y)


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The head of a training step, without a graph: one library per machine, so that a resumed job repeats every bit.

    Unlike ``linear`` it never asks a clock. fp32 on a CPU goes to oneDNN where that exists: 128 rows onto a vocabulary
    of 49,152, loss and gradient included, take 149 to 179 ms with it and 228 to 245 ms without (2 cores, AVX2).

    Args:
        x: [num_rows, hidden].
        weight: [vocab, hidden].
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and 0 < x.shape[0] <= MAX_FAST_ROWS and _onednn_agrees():
        return _onednn(x, weight, None)
    return F.linear(x, weight)


@functools.cache
def onednn_linear_pays() -> bool:
    """Whether oneDNN's linear can be used here and is faster at few rows (timed once)."""
    if not _onednn_agrees():
        return False
    x, weight, _ = _probe_tensors()
    with torch.no_grad():
        return _seconds(lambda: _onednn(x, weight, None)) < _seconds(lambda: F.linear(x, weight))


@functools.cache
def _onednn_agrees() -> bool:
    """Whether oneDNN's linear exists here and computes what ``F.linear`` does."""
    x, weight, bias = _probe_tensors()
    with torch.no_grad():
        try:
            ours = _onednn(x, weight, bias)
        except (AttributeError, RuntimeError, TypeError):
            return False
        return torch.allclose(ours, F.linear(x, weight, bias), rtol=1e-4, atol=1e-3)


def _probe_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((_PROBE_ROWS, _PROBE_IN), (_PROBE_OUT, _PROBE_IN), (_PROBE_OUT,))
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
    return x, weight, bias


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_PROBE_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
