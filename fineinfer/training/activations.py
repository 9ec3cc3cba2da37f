"""How many bytes the activations of a micro-batch take, measured once on the model itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from fineinfer.model.decoder import Decoder
from fineinfer.training.layers import LayerPass, Segments

_PROBE_TOKENS = 53  # no size of a weight is likely to be this or twice this


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes in bytes. A kept layer holds its graph; a recomputed one only its input.

    Attributes:
        num_layers: Layers of the model.
        input_per_token: One layer's input, for one token.
        graph_per_token: What autograd saves for one layer and token, the input not counted.
        graph_per_square: The same for one pair of tokens of a sequence (0 where attention keeps no score matrix).
        packing_per_token: What is saved besides when sequences are joined after attention.
        head_workspace: Largest buffers of one head chunk.
    """

    num_layers: int
    input_per_token: int
    graph_per_token: float
    graph_per_square: float
    packing_per_token: float
    head_workspace: int

    def inputs(self, num_tokens: int) -> int:
        """The input of one layer."""
        return self.input_per_token * num_tokens

    def graph(self, lengths: list[int]) -> int:
        """The graph of one kept layer for sequences of these lengths."""
        packing = self.packing_per_token if len(lengths) > 1 else 0.0
        return int(sum((self.graph_per_token + packing) * n + self.graph_per_square * n * n for n in lengths))

    def all_kept(self, num_tokens: int) -> int:
        """No micro-batch of this many tokens needs more with all layers kept."""
        return self.num_layers * (self.inputs(num_tokens) + self._largest_graph(num_tokens)) + self._rest(num_tokens)

    def all_recomputed(self, num_tokens: int) -> int:
        """The same with all layers recomputed: every input, and one graph at a time."""
        return self.num_layers * self.inputs(num_tokens) + self._largest_graph(num_tokens) + self._rest(num_tokens)

    def all_offloaded(self, num_tokens: int) -> int:
        """The same with the inputs in host memory: three are under way, to the host or back."""
        return 3 * self.inputs(num_tokens) + self._largest_graph(num_tokens) + self._rest(num_tokens)

    def _largest_graph(self, num_tokens: int) -> int:
        return self.graph([num_tokens]) + int(self.packing_per_token * num_tokens)

    def _rest(self, num_tokens: int) -> int:
        """Gradients within one layer's backward take about its graph once more; the head runs before any of it."""
        return 2 * self.inputs(num_tokens) + max(self._largest_graph(num_tokens), self.head_workspace)


@torch.inference_mode(False)
@torch.enable_grad()
def measure_activations(
    decoder: Decoder, layers: LayerPass, head_chunk_tokens: int, fused_head: bool
) -> ActivationSizes:
    """Run one layer on a few lengths and count the distinct storages that it keeps, itself or through autograd.

    Args:
        decoder: The base model.
        layers: What runs the layers of a training step.
        head_chunk_tokens: Rows of one head chunk.
        fused_head: Whether the gradient of the logits overwrites them.
    """
    n = _PROBE_TOKENS
    one, two = _saved_bytes(decoder, layers, [n]), _saved_bytes(decoder, layers, [2 * n])
    joined = _saved_bytes(decoder, layers, [n, n])
    square = max(0.0, (two - 2 * one) / (2 * n * n))
    spec, element = decoder.spec, decoder.dtype.itemsize
    per_logit = element if fused_head else 2 * max(element, 4) + element
    return ActivationSizes(
        num_layers=spec.num_layers,
        input_per_token=spec.hidden_size * element,
        graph_per_token=one / n - square * n,
        graph_per_square=square,
        packing_per_token=max(0.0, (joined - 2 * one) / (2 * n)),
        head_workspace=head_chunk_tokens * spec.vocab_size * per_logit,
    )


def _saved_bytes(decoder: Decoder, layers: LayerPass, lengths: list[int]) -> int:
    num_tokens, bounds = sum(lengths), [0, *itertools.accumulate(lengths)]
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Weights and constants are shared by all tokens: only what has a row per token is an activation.
        if num_tokens in tensor.shape or lengths[0] in tensor.shape:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    generator = torch.Generator(decoder.device).manual_seed(0)
    x = torch.empty(num_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    x.normal_(generator=generator)
    positions = torch.cat([torch.arange(length, device=decoder.device) for length in lengths])
    segments = Segments.make(decoder, positions, torch.full_like(positions, lengths[0]), bounds)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, saved = layers.forward(0, x, segments, keep=True)
    for tensor in saved or ():
        if tensor is not None and tensor.grad_fn is None:  # an output that has one is the next layer's input
            pack(tensor)
    for shared in (x, *segments.rows):  # a layer's input is counted apart, cosines and sines are there once for all
        sizes.pop(shared.untyped_storage().data_ptr(), None)
    del y, saved  # lived until here, so that no storage address was used twice
    return sum(sizes.values())
