"""A training step that can stop at every layer: forward and backward of one micro-batch as a generator.

Every layer runs forward and backward by itself (layers.py) and hands the gradient of its input down. Kept layers hold
their activations until then, recomputed layers only their input; both run the same forward, so the bits are equal
whatever was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fineinfer.model.decoder import Decoder
from fineinfer.training.activations import ActivationSizes
from fineinfer.training.dataset import MicroBatch
from fineinfer.training.dropout import Dropout
from fineinfer.training.layers import LayerPass, Segments
from fineinfer.training.loss import head_chunk
from fineinfer.training.offload import HostStore, LayerInputs
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps

KeepPolicy = Callable[[int, int], bool]  # (tokens of the micro-batch, layer index) -> keep its graph
Unit = tuple[str, int]  # (kind, tokens)


@dataclass(frozen=True)
class StepContext:
    """What every micro-batch of a job shares.

    Attributes:
        decoder: The frozen base model.
        layers: What runs a layer.
        ops: Kernels of the head; None: the reference operations.
        keep: Asked at each layer's forward whether its activations are kept.
        head_chunk_tokens: Trained tokens of one head unit.
        sizes: Bytes of activations.
        host: Where layer inputs can go; None: nowhere.
        dropout_rate: Of the adapter's inputs.
    """

    decoder: Decoder
    layers: LayerPass
    ops: TrainingOps | None
    keep: KeepPolicy
    head_chunk_tokens: int
    sizes: ActivationSizes
    host: HostStore | None = None
    dropout_rate: float = 0.0

    def segments(self, batch: MicroBatch) -> Segments:
        """What the layers must know of a micro-batch."""
        dropout, keys = None, batch.dropout_keys
        if keys is not None:
            dropout = Dropout(keys, self.dropout_rate, (self.ops or REFERENCE_OPS).dropout)
        return Segments.make(self.decoder, batch.positions, batch.rope_lengths, batch.cu_seqlens, dropout)


class MicroBatchPass:
    """Forward and backward of one micro-batch. Gradients of the adapter are added to the accumulators of ``layers``.

    Args:
        context: Model and job.
        batch: The sequences.
        loss_scale: 1 / trained tokens of the whole update.

    Attributes:
        loss_sum: Sum of the token losses so far, an fp64 scalar on the device.
        num_correct: Correctly predicted targets so far, an int64 scalar on the device.
    """

    def __init__(self, context: StepContext, batch: MicroBatch, loss_scale: float) -> None:
        self._context, self._batch, self._loss_scale = context, batch, loss_scale
        self._x: torch.Tensor | None = None  # running activation, [num_tokens, hidden]
        self._grad: torch.Tensor | None = None  # gradient of the running activation on the way back
        self._inputs = LayerInputs(context.decoder.spec.num_layers, context.host)
        self._saved: list[Any | None] = [None] * context.decoder.spec.num_layers
        self._segments = context.segments(batch)
        lengths = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
        self._graph_bytes = context.sizes.graph(lengths)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=batch.input_ids.device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=batch.input_ids.device)

    def units(self) -> Iterator[Unit]:
        """Run one unit at a time: embed, layers forward, head chunks, layers backward.

        Grad mode is entered inside each unit, never across a yield, where it would leak into the caller. Not to be run
        in inference mode: its tensors cannot be saved for backward.
        """
        num_tokens, num_layers = self._batch.num_tokens, self._context.decoder.spec.num_layers
        self._embed()
        yield "embed", num_tokens
        for layer in range(num_layers):
            self._forward(layer)
            yield "forward", num_tokens
        for start in range(0, self._batch.num_targets, self._context.head_chunk_tokens):
            yield "head", self._head(start)
        self._x = None
        for layer in reversed(range(num_layers)):
            kind = "recompute" if self._saved[layer] is None else "backward"
            self._backward(layer)
            yield kind, num_tokens

    def drop_kept(self, bytes_wanted: int | None = None) -> tuple[int, int]:
        """Drop kept graphs until ``bytes_wanted`` are free (None: all); their layers are recomputed later, bit-equal.

        The first layers go first: their backward is the last, so the bytes stay free longest.

        Returns:
            (layers dropped, bytes freed).
        """
        dropped = freed = 0
        for layer in range(len(self._saved)):
            if bytes_wanted is not None and freed >= bytes_wanted:
                break
            if self._saved[layer] is not None:
                self._saved[layer] = None
                dropped, freed = dropped + 1, freed + self._graph_bytes
        return dropped, freed

    def offload_inputs(self) -> tuple[int, int]:
        """Move the inputs of layers whose graph is not kept to the host, from now on also those that come.

        A kept graph may hold its input itself, so it is dropped first.

        Returns:
            (inputs moved, bytes freed on the device).
        """
        moved = self._inputs.offload(layer for layer, saved in enumerate(self._saved) if saved is None)
        return moved, moved * self._context.sizes.inputs(self._batch.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Rows of the micro-batch."""
        return self._batch.num_tokens

    @property
    def num_kept(self) -> int:
        """Layers whose graph is held now."""
        return sum(saved is not None for saved in self._saved)

    @property
    def held_bytes(self) -> int:
        """Bytes of layer inputs and kept graphs held on the device now."""
        return (
            self._inputs.num_on_device * self._context.sizes.inputs(self._batch.num_tokens)
            + self.num_kept * self._graph_bytes
        )

    def backward_kinds(self) -> list[str]:
        """Kinds of the backward units still to come, last layer first; a layer not yet forward counts as kept."""
        kinds = []
        for layer in reversed(range(self._context.decoder.spec.num_layers)):
            dropped = self._inputs.holds(layer) and self._saved[layer] is None
            kinds.append("recompute" if dropped else "backward")
        return kinds

    @torch.no_grad()
    def _embed(self) -> None:
        self._x = self._context.decoder.embed(self._batch.input_ids)

    def _forward(self, layer: int) -> None:
        x = self._x
        if x is None:
            raise RuntimeError("a layer's forward needs the one before it")
        keep = self._context.keep(self._batch.num_tokens, layer)
        self._x, self._saved[layer] = self._context.layers.forward(layer, x, self._segments, keep)
        self._inputs.put(layer, x, movable=self._saved[layer] is None)

    def _head(self, start: int) -> int:
        batch, x = self._batch, self._x
        if x is None:
            raise RuntimeError("the head needs the last layer's output")
        if self._grad is None:
            self._grad = torch.zeros_like(x)
        rows = batch.target_rows[start : start + self._context.head_chunk_tokens]
        targets = batch.target_ids[start : start + self._context.head_chunk_tokens]
        result = head_chunk(self._context.decoder, x[rows], targets, self._loss_scale, self._context.ops)
        self._grad[rows] = result.grad
        self.loss_sum += result.loss_sum
        self.num_correct += result.num_correct
        return rows.shape[0]

    def _backward(self, layer: int) -> None:
        x, saved, grad = self._inputs.take(layer), self._saved[layer], self._grad
        self._saved[layer] = None
        if x is None or grad is None:
            raise RuntimeError("a layer's backward needs its forward and the gradient of its output")
        self._grad = self._context.layers.backward(layer, x, self._segments, saved, grad)
        if layer == 0:
            self._grad = None
