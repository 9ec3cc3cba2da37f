"""The one decoder: Llama, Mistral, Qwen2 and Qwen3 over a flat batch of token rows, for serving and training alike.

It owns the frozen base weights and nothing else. How linear maps are done (with or without LoRA) and where keys and
values live are given by the caller, so both uses share every other operation. All of it is out of place and can be
differentiated with respect to the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn

from fineinfer.kernels.linear import linear, wide_linear
from fineinfer.kernels.reference import add_rms_norm, apply_rope, rms_norm, silu_and_mul
from fineinfer.model.rope import Rope, Rows
from fineinfer.model.spec import ModelSpec

# (layer, "qkv" | "o" | "gate_up" | "down", x, weight, bias) -> y
Project = Callable[[int, str, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# (layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v) -> [T, heads, head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (layer, qkv [T, heads + 2 * kv_heads, head_dim] as projected, neither normed nor rotated) -> [T, heads, head_dim]
AttendRows = Callable[[int, torch.Tensor], torch.Tensor]


class LayerOps(NamedTuple):
    """The operations of a layer besides linear maps and attention.

    Attributes:
        add_norm: (x, delta or None, weight, eps) -> (norm of x + delta, x + delta); may change ``x`` in place.
        gated: (project, layer, h, gate_up weight) -> SiLU(gate) * up, [num_tokens, intermediate].
    """

    add_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    gated: Callable[[Project, int, torch.Tensor, torch.Tensor], torch.Tensor]


def _add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return (rms_norm(x, weight, eps), x) if delta is None else add_rms_norm(x, delta, weight, eps)


def _gated(project: Project, layer_index: int, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(project(layer_index, "gate_up", h, weight, None))


REFERENCE_OPS = LayerOps(_add_norm, _gated)  # out of place and differentiable


def plain_project(
    layer_index: int, block: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The base model's own linear map, without an adapter."""
    return linear(x, weight, bias)


class DecoderLayer(nn.Module):
    """Weights of one layer; query, key and value are one matrix, gate and up another (gate rows first)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        self.attention_norm = weight(hidden)
        self.qkv = weight(spec.qkv_size, hidden)
        self.qkv_bias = weight(spec.qkv_size) if spec.qkv_bias else None
        self.q_norm = weight(spec.head_dim) if spec.qk_norm else None
        self.k_norm = weight(spec.head_dim) if spec.qk_norm else None
        self.o = weight(hidden, heads)
        self.o_bias = weight(hidden) if spec.o_bias else None
        self.mlp_norm = weight(hidden)
        self.gate_up = weight(2 * spec.intermediate_size, hidden)
        self.down = weight(hidden, spec.intermediate_size)


class Decoder(nn.Module):
    """A decoder-only transformer, built without storage; ``load_model`` gives the parameters their tensors.

    Args:
        spec: Shape and constants.
        dtype: Of weights and rows.
        device: Where the weights will be.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device = spec, dtype, device
        self.rope = Rope(spec.rope, dtype, device)
        with init_empty_weights():
            self.embed_tokens = nn.Parameter(
                torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype), requires_grad=False
            )
            self.layers = nn.ModuleList(DecoderLayer(spec, dtype) for _ in range(spec.num_layers))
            self.norm = nn.Parameter(torch.empty(spec.hidden_size, dtype=dtype), requires_grad=False)
            self.lm_head = (
                None
                if spec.tie_embeddings
                else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype), requires_grad=False)
            )

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab_size, hidden_size]; the embedding itself when the head is tied."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [num_tokens, hidden_size] of token ids [num_tokens]."""
        return F.embedding(ids, self.embed_tokens)

    def stream(self, ids: torch.Tensor) -> torch.Tensor:
        """The residual stream of a forward without gradients, [num_tokens, hidden_size], at its begin.

        fp32 where the weights are of a half type: rounding it at each of two additions a layer would be most of the
        error of the logits.
        """
        return self.embed(ids).to(torch.promote_types(self.dtype, torch.float32))

    def layer(
        self, index: int, x: torch.Tensor, rows: Rows, project: Project = plain_project, attend: Attend | None = None
    ) -> torch.Tensor:
        """One transformer layer.

        Args:
            index: Which layer.
            x: [num_tokens, hidden_size].
            rows: Of ``rope.rows`` for the tokens' positions.
            project: Linear maps of the four blocks.
            attend: Attention; receives q, k and v after the head norms and RoPE.

        Returns:
            [num_tokens, hidden_size].

        Raises:
            ValueError: No ``attend`` was given.
        """
        if attend is None:
            raise ValueError("layer needs an attend function")
        weights = self.weights(index)

        def attend_rows(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return attend(layer, *self._rotated(qkv, rows, weights))

        x, delta = self.layer_parts(index, x, None, project, attend_rows, REFERENCE_OPS)
        return x + delta

    def layer_parts(
        self,
        index: int,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        project: Project,
        attend: AttendRows,
        ops: LayerOps,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer whose residual additions are left to the norms that follow them.

        Args:
            index: Which layer.
            x: [num_tokens, hidden_size], the residual stream without ``delta``.
            delta: What the layer before adds to it; None for the first.
            project: Linear maps of the four blocks.
            attend: Attention, the head norms and RoPE included.
            ops: The other operations.

        Returns:
            The stream and what this layer adds to it at its end.
        """
        spec, weights = self.spec, self.weights(index)
        h, x = ops.add_norm(x, delta, weights.attention_norm, spec.rms_norm_eps)
        qkv = project(index, "qkv", h, weights.qkv, weights.qkv_bias)
        attended = attend(index, qkv.unflatten(-1, (-1, spec.head_dim))).flatten(1)  # [num_tokens, heads * head_dim]
        h, x = ops.add_norm(
            x, project(index, "o", attended, weights.o, weights.o_bias), weights.mlp_norm, spec.rms_norm_eps
        )
        h = ops.gated(project, index, h, weights.gate_up)
        return x, project(index, "down", h, weights.down, None)

    def weights(self, index: int) -> DecoderLayer:
        """Weights of one layer."""
        return cast(DecoderLayer, self.layers[index])

    def _rotated(
        self, qkv: torch.Tensor, rows: Rows, weights: DecoderLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value heads after the head norms and RoPE."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
            q = rms_norm(q, weights.q_norm, self.spec.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, self.spec.rms_norm_eps)
            return apply_rope(q, *rows), apply_rope(k, *rows), v
        rotating, v = qkv.split((heads + kv_heads, kv_heads), dim=1)  # q and k turn in one operation
        q, k = apply_rope(rotating, *rows).split((heads, kv_heads), dim=1)
        return q, k, v

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """The norm before the head: [n, hidden_size] to the same."""
        return rms_norm(x, self.norm, self.spec.rms_norm_eps)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of rows [n, hidden_size], fp32 at least."""
        return wide_linear(self.final_norm(x), self.head_weight)
