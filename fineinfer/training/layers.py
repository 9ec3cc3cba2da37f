"""How one layer of a training step is run: the seam between the preemptible step and what computes it.

``AutogradLayers`` is the reference: each layer is a small autograd graph of its own over the decoder's differentiable
operations. ``FusedLayers`` (fused_layers.py) writes forward and backward out over a device's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from fineinfer.kernels.reference import attention_varlen
from fineinfer.model.decoder import Decoder
from fineinfer.model.rope import Rows
from fineinfer.training.attention import Sequences
from fineinfer.training.dropout import Dropout
from fineinfer.training.projection import TrainingProjection


@dataclass(frozen=True)
class Segments:
    """What every layer of a micro-batch shares.

    Attributes:
        rows: Cosines and sines of the tokens' positions.
        sequences: Bounds of the sequences.
        dropout: Of the adapter's inputs; None: nothing is dropped.
    """

    rows: Rows
    sequences: Sequences
    dropout: Dropout | None = None

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        positions: torch.Tensor,
        rope_lengths: torch.Tensor,
        bounds: Sequence[int],
        dropout: Dropout | None = None,
    ) -> Segments:
        """Of a micro-batch on the decoder's device.

        Args:
            decoder: The base model.
            positions: [num_tokens] int64, from 0 in each sequence.
            rope_lengths: [num_tokens] int64, length of the row's sequence.
            bounds: 0, end of the first sequence, ..., num_tokens.
            dropout: Masks, if any.
        """
        return cls(decoder.rope.rows(positions, rope_lengths), Sequences.make(bounds, decoder.device), dropout)


class LayerPass(Protocol):
    """Forward and backward of single layers; gradients of the adapter are added to accumulators of its own.

    What a forward returns as saved is a NamedTuple of tensors that nobody else looks into; whoever drops it frees the
    layer's activations.
    """

    def forward(self, layer: int, x: torch.Tensor, segments: Segments, keep: bool) -> tuple[torch.Tensor, Any | None]:
        """Run a layer.

        Args:
            layer: Index.
            x: [num_tokens, hidden], not changed.
            segments: Of the micro-batch.
            keep: Whether the activations are wanted.

        Returns:
            (output [num_tokens, hidden], saved activations or None).
        """
        ...

    def backward(
        self, layer: int, x: torch.Tensor, segments: Segments, saved: Any | None, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Run a layer back; the bits do not depend on whether its activations were kept.

        Args:
            layer: Index.
            x: The forward's input.
            segments: Of the micro-batch.
            saved: What the forward saved, used up here; None: the forward is run again.
            grad: [num_tokens, hidden], gradient of the output; not changed.

        Returns:
            Gradient of ``x``; below layer 0 nobody needs one, so it may be None there.
        """
        ...


class _Graph(NamedTuple):
    leaf: torch.Tensor
    output: torch.Tensor


class AutogradLayers:
    """One autograd graph a layer: forward takes a detached input, backward runs that graph alone.

    Args:
        decoder: The frozen base model.
        project: Linear maps with LoRA.
    """

    def __init__(self, decoder: Decoder, project: TrainingProjection) -> None:
        self._decoder, self._project = decoder, project

    def forward(self, layer: int, x: torch.Tensor, segments: Segments, keep: bool) -> tuple[torch.Tensor, Any | None]:
        """See LayerPass."""
        graph = self._run(layer, x, segments)
        return graph.output.detach(), graph if keep else None

    def backward(
        self, layer: int, x: torch.Tensor, segments: Segments, saved: Any | None, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """See LayerPass."""
        leaf, output = self._run(layer, x, segments) if saved is None else saved
        return torch.autograd.grad(output, leaf, grad)[0]

    @torch.enable_grad()
    def _run(self, layer: int, x: torch.Tensor, segments: Segments) -> _Graph:
        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            window = self._decoder.spec.sliding_windows[index]
            return attention_varlen(q, k, v, segments.sequences.bounds, window)

        leaf, dropout = x.detach().requires_grad_(), segments.dropout
        project = self._project if dropout is None else partial(self._project, dropout=dropout)
        return _Graph(leaf, self._decoder.layer(layer, leaf, segments.rows, project, attend))
