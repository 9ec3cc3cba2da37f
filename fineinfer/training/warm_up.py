"""Compiles what a training step will launch before the first request comes: later it would hold up everybody."""

from __future__ import annotations

import torch

from fineinfer.adapters.config import MODULES
from fineinfer.adapters.weights import LoraLayout
from fineinfer.messages import TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.training.dropout import Dropout
from fineinfer.training.fused_layers import make_layers
from fineinfer.training.layers import Segments
from fineinfer.training.loss import head_chunk
from fineinfer.training.ops import TrainingOps
from fineinfer.training.projection import adapted_blocks
from fineinfer.training.state import AdapterState

_RANK = 16  # kernels differ only for ranks that it does not divide
_NUM_TOKENS = 32


@torch.inference_mode(False)
def warm_up(decoder: Decoder, ops: TrainingOps) -> None:
    """Run one layer, the head and the optimizer on a few tokens, forward and backward.

    Args:
        decoder: The base model; a float16 one cannot be trained, so nothing is done.
        ops: Kernels.
    """
    if decoder.dtype == torch.float16:
        return
    layout = LoraLayout(decoder.spec, {(0, name): (_RANK, 1.0) for name in MODULES})
    state = AdapterState(layout, TrainingSettings(), decoder.dtype, decoder.device, ops)
    layers = make_layers(decoder, adapted_blocks(state.compute, state.grads), ops)
    positions = torch.arange(_NUM_TOKENS, device=decoder.device)
    lengths = torch.full_like(positions, _NUM_TOKENS)
    x = torch.zeros(_NUM_TOKENS, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    for dropout in (None, Dropout(torch.zeros_like(positions, dtype=torch.int32), 0.1, ops.dropout)):
        segments = Segments.make(decoder, positions, lengths, [0, _NUM_TOKENS], dropout)
        y, saved = layers.forward(0, x, segments, keep=True)
        layers.backward(0, x, segments, saved, head_chunk(decoder, y, torch.zeros_like(positions), 1.0, ops).grad)
    state.optimizer.update(state.grads.flat, 0.0)
