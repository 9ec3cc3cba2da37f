"""Reading a folder of safetensors into the decoder's fused weights, with the weights in memory once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fineinfer.model.decoder import Decoder
from fineinfer.model.errors import ModelLoadError
from fineinfer.model.files import weight_files
from fineinfer.model.spec import ModelSpec

_FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 32 << 20
_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# our parameter -> the checkpoint's tensors that are stacked in it, in order
_LAYER_WEIGHTS = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


class CheckpointFolder:
    """The safetensors files of one model folder.

    Args:
        path: The folder.

    Raises:
        ModelLoadError: It has no safetensors, or a file is missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for file in weight_files(path):
            self._read_header(file)

    def dtype(self) -> torch.dtype:
        """Of the embedding, as stored."""
        return _FLOAT_TYPES.get(self._types.get(_EMBEDDING, ""), torch.bfloat16)

    def head_is_tied(self) -> bool:
        """Whether the file has no head of its own, or one that equals the embedding."""
        if _HEAD not in self._files or self._shapes[_HEAD] != self._shapes.get(_EMBEDDING):
            return _HEAD not in self._files
        blocks = zip(self._blocks(_HEAD), self._blocks(_EMBEDDING), strict=True)
        return all(torch.equal(head, embedding) for (_, head), (_, embedding) in blocks)

    def fill(self, decoder: Decoder) -> None:
        """Give every parameter its tensor, on the decoder's device and in its dtype.

        Raises:
            ModelLoadError: Tensors are missing, unexpected, misshaped or not floating point; nothing was read then.
        """
        self._check(decoder.spec)
        # the largest first, while little is held
        self._fill_parameter(decoder, decoder, "embed_tokens", (_EMBEDDING,))
        if decoder.lm_head is not None:
            self._fill_parameter(decoder, decoder, "lm_head", (_HEAD,))
        self._fill_parameter(decoder, decoder, "norm", (_FINAL_NORM,))
        for index, layer in enumerate(decoder.layers):
            for name, _ in list(layer.named_parameters(recurse=False)):
                self._fill_parameter(decoder, layer, name, _layer_sources(index, name))

    def _fill_parameter(self, decoder: Decoder, module: nn.Module, name: str, sources: tuple[str, ...]) -> None:
        value = torch.empty(module.get_parameter(name).shape, dtype=decoder.dtype, device=decoder.device)
        offset = 0
        for source in sources:
            for first, block in self._blocks(source):
                value[offset + first : offset + first + block.shape[0]].copy_(block)
            offset += self._shapes[source][0]
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def _blocks(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Row blocks of a tensor with their first row, each from a file opened anew: so mapped pages are dropped."""
        shape = self._shapes[name]
        row_bytes = 8 * math.prod(shape[1:])
        step = max(1, _BLOCK_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            with safe_open(self._files[name], framework="pt") as file:
                yield first, file.get_slice(name)[first : first + step]

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    entry = file.get_slice(name)
                    self._files[name] = path
                    self._shapes[name] = tuple(entry.get_shape())
                    self._types[name] = entry.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a whole safetensors file: {error}") from error

    def _check(self, spec: ModelSpec) -> None:
        expected = expected_tensors(spec)
        # old checkpoints keep RoPE's frequencies; a tied head may be stored beside the embedding it equals
        ignored = {name for name in self._files if name.endswith("rotary_emb.inv_freq")}
        if spec.tie_embeddings:
            ignored.add(_HEAD)
        missing = sorted(expected.keys() - self._files.keys())
        unexpected = sorted(self._files.keys() - expected.keys() - ignored)
        if missing:
            raise ModelLoadError(f"{self.path} lacks {_some(missing)}, which {spec.architecture} needs")
        if unexpected:
            raise ModelLoadError(f"{self.path} has {_some(unexpected)}, which {spec.architecture} does not know")
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                raise ModelLoadError(
                    f"tensor {name} of {self.path} has shape {list(self._shapes[name])}, the config says {list(shape)}"
                )
            if self._types[name] not in _FLOAT_TYPES:
                raise ModelLoadError(f"tensor {name} of {self.path} is {self._types[name]}; only plain floats are read")


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec holds."""
    hidden, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "attention_norm": ((hidden,),),
        "qkv": ((heads, hidden), (kv, hidden), (kv, hidden)),
        "o": ((hidden, heads),),
        "mlp_norm": ((hidden,),),
        "gate_up": ((spec.intermediate_size, hidden),) * 2,
        "down": ((hidden, spec.intermediate_size),),
    }
    if spec.qkv_bias:
        shapes["qkv_bias"] = ((heads,), (kv,), (kv,))
    if spec.o_bias:
        shapes["o_bias"] = ((hidden,),)
    if spec.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = ((spec.head_dim,),)
    expected: dict[str, tuple[int, ...]] = {_EMBEDDING: (spec.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not spec.tie_embeddings:
        expected[_HEAD] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        for name, of_sources in shapes.items():
            expected.update(zip(_layer_sources(index, name), of_sources, strict=True))
    return expected


def _layer_sources(index: int, name: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{index}.{source}" for source in _LAYER_WEIGHTS[name])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"
