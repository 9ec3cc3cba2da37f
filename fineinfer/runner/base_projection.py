"""The decoder's operations on a GPU for rows without adapters, and which weights to bring up while a product ends."""

from __future__ import annotations

import torch

from fineinfer.kernels import activation, norm
from fineinfer.kernels.few_rows_linear import device_linear, few_rows_gated, has_few_rows
from fineinfer.model.decoder import Decoder, Project

# Between the query-key-value and the output product lie RoPE and attention, long enough for the whole weight of the
# latter (33 MB of an 8B model, of an L2 cache of 50 MB); between the others only the ends of kernels and a norm.
_MOST_AFTER_QKV, _MOST_AFTER_OTHERS = 36 << 20, 8 << 20


class BaseProjection:
    """Linear maps of the base model for ``Decoder.layer_parts``, with the norms and the activation around them.

    Args:
        decoder: The base model; its weights stay where they are.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._upcoming: dict[tuple[int, str], torch.Tensor] = {}
        for layer in range(decoder.spec.num_layers):
            weights, last = decoder.weights(layer), layer + 1 == decoder.spec.num_layers
            after_down = decoder.head_weight if last else decoder.weights(layer + 1).qkv
            self._upcoming[layer, "qkv"] = _first(weights.o, _MOST_AFTER_QKV)
            self._upcoming[layer, "o"] = _first(weights.gate_up, _MOST_AFTER_OTHERS)
            self._upcoming[layer, "gate_up"] = _first(weights.down, _MOST_AFTER_OTHERS)
            self._upcoming[layer, "down"] = _first(after_down, _MOST_AFTER_OTHERS)

    def __call__(
        self, layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_rows, in] -> [num_rows, out] of one fused block."""
        return device_linear(x, weight, bias, self._upcoming[layer_index, block])

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of ``x + delta``, and that sum, which is ``x`` changed in place."""
        return norm.rms_norm(x, weight, eps) if delta is None else norm.add_rms_norm(x, delta, weight, eps), x

    def gated(self, _project: Project, layer_index: int, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [num_rows, intermediate], of rows ``h`` [num_rows, hidden]."""
        if has_few_rows(h):
            return few_rows_gated(h, weight, self._upcoming[layer_index, "gate_up"])
        return activation.silu_and_mul(device_linear(h, weight))

    def flush(self, delta: torch.Tensor) -> torch.Tensor:
        """What the last layer adds, as it is; a projection with adapters has something to add here."""
        return delta

    def head(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] in the model's dtype of ``x + delta``, [n, hidden]; changes ``x``."""
        normed, _ = self.add_norm(x, delta, self._decoder.norm, self._decoder.spec.rms_norm_eps)
        return device_linear(normed, self._decoder.head_weight)


def _first(weight: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """The first rows of a weight, as many as fit."""
    return weight[: max(1, most_bytes // (weight.shape[1] * weight.element_size()))]
