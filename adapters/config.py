"""Which linear modules carry LoRA, where they sit in the fused blocks, and how an adapter is scaled (no torch)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Protocol, TypeVar

# Block of the fused decoder -> PEFT module names, in the row order of the fused weight.
BLOCK_MODULES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MODULES: tuple[str, ...] = tuple(name for names in BLOCK_MODULES.values() for name in names)
MODULE_BLOCK: dict[str, str] = {name: block for block, names in BLOCK_MODULES.items() for name in names}


ValueT = TypeVar("ValueT")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


class AdapterError(ValueError):
    """An adapter that cannot be served or trained here; the message names the field or tensor."""


class ModelShape(Protocol):
    """The part of a model's spec that decides adapter shapes."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


def module_features(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Module name -> (in_features, out_features)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "q_proj": (hidden, q_size),
        "k_proj": (hidden, kv_size),
        "v_proj": (hidden, kv_size),
        "o_proj": (q_size, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def lora_scaling(r: int, lora_alpha: float, use_rslora: bool) -> float:
    """Factor on ``B(Ax)``: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (as PEFT)."""
    return lora_alpha / math.sqrt(r) if use_rslora else lora_alpha / r


def module_path(layer: int, module: str) -> str:
    """Full name of a module in the transformers model, for example ``model.layers.3.self_attn.q_proj``."""
    parent = "self_attn" if MODULE_BLOCK[module] in ("qkv", "o") else "mlp"
    return f"model.layers.{layer}.{parent}.{module}"


def pattern_value(pattern: Mapping[str, ValueT], path: str, default: ValueT) -> ValueT:
    """What ``rank_pattern`` or ``alpha_pattern`` says of a module: of the first key that is its path or the path's end.

    As PEFT's ``get_pattern_key``: keys are regular expressions for what stands behind a dot, or for the whole path.
    """
    for name, value in pattern.items():
        if re.match(rf"(.*\.)?({name})$", path):
            return value
    return default


def check_pattern(field: str, pattern: Mapping[str, float], paths: list[str]) -> None:
    """Raise AdapterError unless every key is a plain name that one of the adapted modules' paths ends in."""
    for name in pattern:
        if not _PLAIN_NAME.fullmatch(name):
            raise AdapterError(f"{field}: {name!r} is not a module name or the end of a module's path")
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            raise AdapterError(f"{field}: {name!r} matches no module that the adapter trains")


def check_target_modules(target_modules: tuple[str, ...]) -> None:
    """Raise AdapterError unless every name is a linear module that can carry LoRA here."""
    if not target_modules:
        raise AdapterError("target_modules is empty")
    for name in target_modules:
        if name not in MODULES:
            raise AdapterError(f"target_modules: {name!r} is not one of {', '.join(MODULES)}")
