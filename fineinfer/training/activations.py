"""How many bytes the activations of a micro-batch take, measured once on the model itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fineinfer.kernels.reference import attention_varlen
from fineinfer.model.decoder import Decoder, Project

_PROBE_TOKENS = (53, 106)  # no size of a weight is likely to be either


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes in bytes. A kept layer holds its graph; a recomputed one only its input.

    Attributes:
        num_layers: Layers of the model.
        input_per_token: One layer's input, for one token.
        graph_per_token: What autograd saves for one layer and token, the input not counted.
        graph_per_square: The same for one pair of tokens of a sequence (0 where attention keeps no score matrix).
        head_workspace: Largest buffers of one head chunk.
    """

    num_layers: int
    input_per_token: int
    graph_per_token: float
    graph_per_square: float
    head_workspace: int

    def inputs(self, num_tokens: int) -> int:
        """The input of one layer."""
        return self.input_per_token * num_tokens

    def graph(self, lengths: list[int]) -> int:
        """The graph of one kept layer for sequences of these lengths."""
        return int(sum(self.graph_per_token * n + self.graph_per_square * n * n for n in lengths))

    def all_kept(self, lengths: list[int]) -> int:
        """Peak of a micro-batch whose layers are all kept."""
        per_layer = self.inputs(sum(lengths)) + self.graph(lengths)
        return self.num_layers * per_layer + self._workspace(lengths)

    def all_recomputed(self, lengths: list[int]) -> int:
        """Peak of a micro-batch whose layers are all recomputed: every input, and one graph at a time."""
        inputs = self.num_layers * self.inputs(sum(lengths))
        return inputs + self.graph(lengths) + self._workspace(lengths)

    def _workspace(self, lengths: list[int]) -> int:
        """Gradients within one layer's backward take about its graph once more; the head runs before any of it."""
        return 2 * self.inputs(sum(lengths)) + max(self.graph(lengths), self.head_workspace)


@torch.inference_mode(False)
@torch.enable_grad()
def measure_activations(decoder: Decoder, project: Project, head_chunk_tokens: int) -> ActivationSizes:
    """Run one layer on two lengths under saved_tensors_hooks and count the distinct storages that autograd keeps.

    Args:
        decoder: The base model.
        project: The linear maps of a training step.
        head_chunk_tokens: Rows of one head chunk.
    """
    short, long = _PROBE_TOKENS
    counts = [_saved_bytes(decoder, project, num_tokens) for num_tokens in _PROBE_TOKENS]
    square = max(0.0, (counts[1] - counts[0] * long / short) / (long * long - short * long))
    spec, element = decoder.spec, decoder.dtype.itemsize
    return ActivationSizes(
        num_layers=spec.num_layers,
        input_per_token=spec.hidden_size * element,
        graph_per_token=counts[0] / short - square * short,
        graph_per_square=square,
        head_workspace=head_chunk_tokens * spec.vocab_size * (2 * max(element, 4) + element),
    )


def _saved_bytes(decoder: Decoder, project: Project, num_tokens: int) -> int:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Weights and constants are shared by all tokens: only what has a row per token is an activation.
        if num_tokens in tensor.shape:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_varlen(q, k, v, [0, num_tokens], decoder.spec.sliding_windows[layer])

    generator = torch.Generator(decoder.device).manual_seed(0)
    x = torch.empty(num_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    x.normal_(generator=generator).requires_grad_()
    positions = torch.arange(num_tokens, device=decoder.device)
    rows = decoder.rope.rows(positions, torch.full_like(positions, num_tokens))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = decoder.layer(0, x, rows, project, attend)
    for shared in (x, *rows):  # a layer's input is counted apart, cosines and sines are there once for all layers
        sizes.pop(shared.untyped_storage().data_ptr(), None)
    del y  # lived until here, so that no storage address was used twice
    return sum(sizes.values())
