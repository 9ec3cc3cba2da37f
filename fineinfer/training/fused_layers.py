"""A layer of a training step written out, forward and backward, for few passes over memory and few launches.

A block is a chain of matrix products into one output: the adapter's part first, the base product on top of it, so
neither the adapter nor the residual is an addition of its own; to gate and up the activation adds it. A kept layer
saves what the base model's products made and the small ``x A^T``; what norms and SiLU made of them, backward makes
again while it reads them anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fineinfer.kernels.reference_training import Expansion
from fineinfer.model.decoder import Decoder, DecoderLayer
from fineinfer.training.attention import attention_backward, attention_forward
from fineinfer.training.dropout import Dropout
from fineinfer.training.layers import AutogradLayers, LayerPass, Segments
from fineinfer.training.ops import TrainingOps
from fineinfer.training.projection import (
    AdaptedBlock,
    TrainingProjection,
    add_grad_a,
    add_product,
    expand_grad,
    shrink,
)


class Saved(NamedTuple):
    """Activations of a kept layer; ``xa`` are None where a block has no adapter.

    Attributes:
        qkv: [num_tokens, heads + 2 * kv_heads, head_dim], rotated; as projected where heads have norms.
        attended: [num_tokens, heads * head_dim].
        lse: Of ``attention_forward``.
        stream: [num_tokens, hidden], the residual stream after attention.
        gate_up: [num_tokens, 2 * intermediate] of the base model, the adapter not added.
        xa_qkv: [num_tokens, ranks of the block], as all ``xa``.
        xa_o: Of attended.
        xa_gate_up: Of the second norm.
        xa_down: Of the activation.
    """

    qkv: torch.Tensor
    attended: torch.Tensor
    lse: torch.Tensor
    stream: torch.Tensor
    gate_up: torch.Tensor
    xa_qkv: torch.Tensor | None
    xa_o: torch.Tensor | None
    xa_gate_up: torch.Tensor | None
    xa_down: torch.Tensor | None


class FusedLayers:
    """See ``LayerPass``; what a forward saves is overwritten by the backward that uses it.

    Args:
        decoder: The frozen base model.
        blocks: Adapted blocks by (layer, name).
        ops: Everything but matrix products and attention.
    """

    def __init__(self, decoder: Decoder, blocks: dict[tuple[int, str], AdaptedBlock], ops: TrainingOps) -> None:
        self._decoder, self._blocks, self._ops = decoder, blocks, ops

    # ------------------------------------------------------------ forward

    @torch.no_grad()
    def forward(self, layer: int, x: torch.Tensor, segments: Segments, keep: bool) -> tuple[torch.Tensor, Any | None]:
        """See LayerPass."""
        saved, h = self._upto_activation(layer, x, segments)
        stream = saved.stream.clone() if keep else saved.stream
        xa = self._xa(layer, "down", h, segments.dropout)
        y = self._linear((layer, "down"), h, xa, self._decoder.weights(layer).down, onto=stream)
        return y, saved._replace(xa_down=xa) if keep else None

    def _upto_activation(self, layer: int, x: torch.Tensor, segments: Segments) -> tuple[Saved, torch.Tensor]:
        """The layer without its last product, and that product's input."""
        ops, weights, eps = self._ops, self._decoder.weights(layer), self._decoder.spec.rms_norm_eps
        dropout = segments.dropout
        h = ops.rms_norm(x, weights.attention_norm, eps)
        xa_qkv = self._xa(layer, "qkv", h, dropout)
        flat = self._linear((layer, "qkv"), h, xa_qkv, weights.qkv, weights.qkv_bias)
        qkv = flat.unflatten(-1, (-1, self._decoder.spec.head_dim))
        q, k, v = self._heads(qkv, weights, segments)
        attended, lse = attention_forward(q, k, v, segments.sequences, self._decoder.spec.sliding_windows[layer])
        attended = attended.flatten(1)
        del q, k, v
        xa_o = self._xa(layer, "o", attended, dropout)
        stream = self._linear((layer, "o"), attended, xa_o, weights.o, weights.o_bias)
        h = ops.add_rms_norm(stream, x, weights.mlp_norm, eps)  # the stream receives x
        gate_up, xa_gate_up = F.linear(h, weights.gate_up), self._xa(layer, "gate_up", h, dropout)
        h = ops.silu_and_mul(gate_up, *self._expansions(layer, xa_gate_up))
        return Saved(qkv, attended, lse, stream, gate_up, xa_qkv, xa_o, xa_gate_up, None), h

    def _heads(
        self, qkv: torch.Tensor, weights: DecoderLayer, segments: Segments
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value heads after the head norms and RoPE; without head norms ``qkv`` itself is rotated."""
        spec = self._decoder.spec
        if weights.q_norm is not None:
            qkv = qkv.clone()  # the norms' backward needs what they were given
        self._ops.rope(qkv, *segments.rows, spec.num_heads, weights.q_norm, weights.k_norm, spec.rms_norm_eps)
        return self._split(qkv)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads = self._decoder.spec.num_heads, self._decoder.spec.num_kv_heads
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        return q, k, v

    def _xa(self, layer: int, name: str, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor | None:
        """``x A^T``, None where a block has no adapter."""
        block = self._blocks.get((layer, name))
        return None if block is None else shrink(block, x, dropout)

    def _expansions(self, layer: int, xa: torch.Tensor | None) -> tuple[Expansion | None, Expansion | None]:
        """What the adapter adds to gate and up."""
        found: dict[bool, Expansion] = {}
        if xa is not None:
            for part in self._blocks[layer, "gate_up"].parts:
                found[part.columns.start == 0] = Expansion(xa[:, part.ranks], part.b, part.scaling)
        return found.get(True), found.get(False)

    def _linear(
        self,
        key: tuple[int, str],
        x: torch.Tensor,
        xa: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x W^T + bias`` of block ``key`` with its adapter, added to ``onto`` if given; ``xa`` of ``_xa``."""
        block = self._blocks.get(key)
        if block is None and onto is None:
            return F.linear(x, weight, bias)
        if onto is not None:
            y = onto
        elif bias is not None:
            y = bias.expand(x.shape[0], -1).contiguous()
        else:
            y = x.new_empty(x.shape[0], weight.shape[0])
        if block is not None and xa is not None:
            beta = 0.0
            if onto is not None or bias is not None:
                beta = 1.0
            elif not block.covers(weight.shape[0]):
                y.zero_()
            for part in block.parts:
                delta = y[:, part.columns]
                delta.addmm_(xa[:, part.ranks], part.b.t(), beta=beta, alpha=part.scaling)
        return y.addmm_(x, weight.t())

    # ------------------------------------------------------------ backward

    @torch.no_grad()
    def backward(
        self, layer: int, x: torch.Tensor, segments: Segments, saved: Any | None, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """See LayerPass."""
        kept: Saved = self._again(layer, x, segments) if saved is None else saved
        ops, weights, eps = self._ops, self._decoder.weights(layer), self._decoder.spec.rms_norm_eps
        dropout = segments.dropout
        grad_h, grad_xa = self._linear_backward((layer, "down"), grad, kept.xa_down, weights.down, dropout)
        grad_gate_up = kept.gate_up
        ops.silu_and_mul_backward(grad_h, grad_gate_up, *self._expansions(layer, kept.xa_gate_up))
        self._add_grad_a((layer, "down"), grad_xa, grad_h, dropout)  # which holds the activation now
        grad_h, grad_xa = self._linear_backward(
            (layer, "gate_up"), grad_gate_up, kept.xa_gate_up, weights.gate_up, dropout
        )
        h = ops.rms_norm_backward(grad_h, kept.stream, weights.mlp_norm, eps, grad)
        self._add_grad_a((layer, "gate_up"), grad_xa, h, dropout)
        grad_stream = grad_h
        grad_attended, grad_xa = self._linear_backward((layer, "o"), grad_stream, kept.xa_o, weights.o, dropout)
        self._add_grad_a((layer, "o"), grad_xa, kept.attended, dropout)
        grad_qkv = self._attention_backward(layer, kept, segments, grad_attended)
        if layer == 0:  # nobody needs the gradient of its input
            grad_xa = self._grad_xa((layer, "qkv"), grad_qkv, kept.xa_qkv)
            self._add_grad_a((layer, "qkv"), grad_xa, ops.rms_norm(x, weights.attention_norm, eps), dropout)
            return None
        grad_h, grad_xa = self._linear_backward((layer, "qkv"), grad_qkv, kept.xa_qkv, weights.qkv, dropout)
        h = ops.rms_norm_backward(grad_h, x, weights.attention_norm, eps, grad_stream)
        self._add_grad_a((layer, "qkv"), grad_xa, h, dropout)
        return grad_h

    def _again(self, layer: int, x: torch.Tensor, segments: Segments) -> Saved:
        """What ``forward`` saved, once more; the last base product is not needed for it."""
        saved, h = self._upto_activation(layer, x, segments)
        return saved._replace(xa_down=self._xa(layer, "down", h, segments.dropout))

    def _linear_backward(
        self,
        key: tuple[int, str],
        grad: torch.Tensor,
        xa: torch.Tensor | None,
        weight: torch.Tensor,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradient of the input of block ``key``, and of ``x A^T``; adds the gradient of B."""
        grad_xa = self._grad_xa(key, grad, xa)
        if grad_xa is None:
            return grad @ weight, None
        return expand_grad(self._blocks[key], grad_xa, dropout).addmm_(grad, weight), grad_xa

    def _grad_xa(self, key: tuple[int, str], grad: torch.Tensor, xa: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient of ``x A^T``; adds the gradient of B."""
        if xa is None:
            return None
        grad_xa = torch.empty_like(xa)
        for part in self._blocks[key].parts:
            grad_part = grad[:, part.columns]
            grad_xa[:, part.ranks].addmm_(grad_part, part.b, beta=0.0, alpha=part.scaling)
            add_product(part.grad_b, grad_part.t(), xa[:, part.ranks], part.scaling)
        return grad_xa

    def _add_grad_a(
        self, key: tuple[int, str], grad_xa: torch.Tensor | None, x: torch.Tensor, dropout: Dropout | None
    ) -> None:
        """Add the gradient of A, given that of ``x A^T``."""
        if grad_xa is not None:
            add_grad_a(self._blocks[key], grad_xa, x, dropout)

    def _attention_backward(self, layer: int, kept: Saved, segments: Segments, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the projected qkv, [num_tokens, qkv_size]."""
        weights, spec = self._decoder.weights(layer), self._decoder.spec
        normed = weights.q_norm is not None
        heads = self._heads(kept.qkv, weights, segments) if normed else self._split(kept.qkv)
        shape = (-1, spec.num_heads, spec.head_dim)
        grads = attention_backward(
            grad.view(shape),
            heads,
            kept.attended.view(shape),
            kept.lse,
            segments.sequences,
            spec.sliding_windows[layer],
        )
        joined = self._ops.rope_backward(*grads, *segments.rows)
        if weights.q_norm is not None and weights.k_norm is not None:
            (grad_q, grad_k, _), (q, k, _) = self._split(joined), self._split(kept.qkv)
            for part, raw, weight in ((grad_q, q, weights.q_norm), (grad_k, k, weights.k_norm)):
                flat = part.reshape(-1, spec.head_dim)  # a copy: heads of one kind do not lie side by side
                self._ops.rms_norm_backward(flat, raw.reshape(-1, spec.head_dim), weight, spec.rms_norm_eps, None)
                part.copy_(flat.view_as(part))
        return joined.flatten(1)


def make_layers(decoder: Decoder, blocks: dict[tuple[int, str], AdaptedBlock], ops: TrainingOps | None) -> LayerPass:
    """The layers of a job: written out over ``ops``, or without them as autograd graphs.

    Args:
        decoder: The frozen base model.
        blocks: Adapted blocks by (layer, name).
        ops: Kernels, or their twins.
    """
    if ops is None:
        return AutogradLayers(decoder, TrainingProjection(blocks))
    return FusedLayers(decoder, blocks, ops)
