"""What the engine must know of a model besides its weights, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fineinfer.model.errors import ModelLoadError, UnsupportedModelError
from fineinfer.model.rope import RopeSpec

# architecture -> (qkv bias, o bias, q/k norm); None: as the config's attention_bias says
_ARCHITECTURES: dict[str, tuple[bool | None, bool | None, bool]] = {
    "LlamaForCausalLM": (None, None, False),
    "MistralForCausalLM": (False, False, False),
    "Qwen2ForCausalLM": (True, False, False),
    "Qwen3ForCausalLM": (None, None, True),
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


@dataclass(frozen=True)
class ModelSpec:
    """Shape and constants of a decoder; the one description that model, memory, adapters and training share.

    ``sliding_windows`` has one entry a layer: the number of newest positions, its own included, that a token attends
    to, or None. ``eos_token_ids`` joins those of config and generation config.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    rope: RopeSpec
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    initializer_range: float = 0.02
    mlp_bias: bool = False

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value weight."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, config: Any, generation_config: Any = None) -> ModelSpec:
        """Read a transformers config (and the generation config's end tokens, where there is one).

        Raises:
            UnsupportedModelError: The architecture or one of its options is not supported.
            ModelLoadError: The config contradicts itself.
        """
        architecture = architecture_of(getattr(config, "architectures", None), getattr(config, "model_type", None))
        _refuse_options(config)
        qkv_bias, o_bias, qk_norm = _ARCHITECTURES[architecture]
        attention_bias = bool(getattr(config, "attention_bias", False))
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")
        max_length = config.max_position_embeddings
        return cls(
            architecture=architecture,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
            o_bias=attention_bias if o_bias is None else o_bias,
            qk_norm=qk_norm,
            rope=RopeSpec.from_parameters(config.rope_parameters or {}, head_dim, max_length),
            max_position_embeddings=max_length,
            sliding_windows=_sliding_windows(config, architecture),
            eos_token_ids=_token_ids(
                getattr(source, "eos_token_id", None) for source in (generation_config, config) if source is not None
            ),
            bos_token_id=config.bos_token_id,
            pad_token_id=config.pad_token_id,
            initializer_range=getattr(config, "initializer_range", 0.02),
        )


def architecture_of(architectures: Iterable[str] | None, model_type: str | None) -> str:
    """The supported architecture that a config names.

    Raises:
        UnsupportedModelError: It names none; the message lists the supported ones.
    """
    by_type = {name.removesuffix("ForCausalLM").lower(): name for name in _ARCHITECTURES}
    names = list(architectures or []) or [by_type.get(model_type or "", model_type or "none named")]
    for name in names:
        if name in _ARCHITECTURES:
            return name
    raise UnsupportedModelError(
        f"architecture {', '.join(names)} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_options(config: Any) -> None:
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError("quantised checkpoints (quantization_config) are not supported")
    if getattr(config, "mlp_bias", False):
        raise UnsupportedModelError("mlp_bias is not supported")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {config.hidden_act!r} is not supported; supported: silu")


def _sliding_windows(config: Any, architecture: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    num_layers = config.num_hidden_layers
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    kinds = config.layer_types
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer type {', '.join(unknown)} is not supported")
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(values: Iterable[int | list[int] | None]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[token_id] = None
    return tuple(ids)
