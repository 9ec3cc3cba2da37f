"""The decoder's operations on a GPU for rows without adapters."""

from __future__ import annotations

import torch

from fineinfer.kernels import activation, norm
from fineinfer.kernels.few_rows_linear import device_linear, device_wide_linear, few_rows_gated, has_few_rows
from fineinfer.model.decoder import Decoder, Project


class BaseProjection:
    """Linear maps of the base model for ``Decoder.layer_parts``, with the norms and the activation around them.

    Args:
        decoder: The base model; its weights stay where they are.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(
        self, _layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_rows, in] -> [num_rows, out] of one fused block, fp32 where it is added to the residual stream."""
        return (device_wide_linear if block in ("o", "down") else device_linear)(x, weight, bias)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + delta``, and that sum, which is ``x`` changed in place."""
        return norm.rms_norm(x, weight, eps) if delta is None else norm.add_rms_norm(x, delta, weight, eps), x

    def gated(self, _project: Project, _layer_index: int, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [num_rows, intermediate], of rows ``h`` [num_rows, hidden]."""
        if has_few_rows(h):
            return few_rows_gated(h, weight)
        return activation.silu_and_mul(device_linear(h, weight))

    def take_part(self) -> None:
        """What the newest output lacks: nothing; a projection with adapters has something to add here."""

    def flush(self, delta: torch.Tensor) -> torch.Tensor:
        """What the last layer adds, as it is."""
        return delta

    def head(self, x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, vocab_size], fp32 at least, of ``x + delta``, [n, hidden], in ``out`` if given; changes ``x``."""
        normed, _ = self.add_norm(x, delta, self._decoder.norm, self._decoder.spec.rms_norm_eps)
        return device_wide_linear(normed, self._decoder.head_weight, out=out)
