"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors, never a pickle."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fineinfer.adapters.config import (
    MODULES,
    AdapterError,
    ModelShape,
    lora_scaling,
    module_features,
    module_path,
    pattern_value,
)
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.hashing import ADAPTER_FILES, adapter_hash
from fineinfer.messages import LoraSpec

CONFIG_NAME, WEIGHTS_NAME, _ = ADAPTER_FILES
PEFT_VERSION = "0.21.2"  # the release whose file format is written
MAX_CONFIG_BYTES = 1 << 20

logger = logging.getLogger(__name__)

# Every key PEFT 0.21 writes, with the value it has in an adapter of ours.
_CONFIG_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 0,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": PEFT_VERSION,
    "qalora_group_size": 16,
    "r": 0,
    "rank_pattern": {},
    "revision": None,
    "target_modules": [],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
# Options that change the maths or the base weights: only these values (or an absent key) can be served.
_ONLY_OFF = (
    "use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora", "alora_invocation_tokens",
    "target_parameters", "trainable_token_indices", "fan_in_fan_out", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# PEFT's own keys, and what other tools write: without its prefix, and with the adapter's name in the key.
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?layers\.(\d{1,5})\.(self_attn|mlp)\.([a-z_]+)\.lora_([AB])(?:\.\w{1,64})?\.weight"
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Patterns are regular expressions in PEFT. Those of unknown authors are matched only if they cannot take long: few
# repetitions, none of a group.
_PATTERN = re.compile(r"(?:[\w.^$|-]|\\[.dw]|\((?:\?:)?|\)(?![*+?{])|\[[\w-]{1,40}\]|[*+?](?![*+?{]))*")
MAX_PATTERN_CHARACTERS, MAX_REPETITIONS = 200, 3


def save_adapter(weights: LoraWeights, spec: LoraSpec, base_model: str, directory: Path) -> None:
    """Write an adapter as PEFT 0.21 does.

    Args:
        weights: Matrices; saved in their own dtype.
        spec: The LoRA settings the layout was made from.
        base_model: Recorded as ``base_model_name_or_path``.
        directory: Existing folder.
    """
    config = _CONFIG_DEFAULTS | {
        "alpha_pattern": {name: _short(alpha) for name, alpha in spec.alpha_pattern.items()},
        "base_model_name_or_path": base_model,
        "lora_alpha": _short(spec.lora_alpha),
        "lora_dropout": spec.lora_dropout,
        "r": spec.r,
        "rank_pattern": spec.rank_pattern,
        "target_modules": sorted(spec.target_modules),
        "use_rslora": spec.use_rslora,
    }
    # _CONFIG_DEFAULTS is sorted as PEFT's files are; patterns are not, since of two that match the first one counts
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in weights.named_tensors()}
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})


def _short(alpha: float) -> float:
    """Whole numbers without a decimal point, as PEFT's users write them."""
    return int(alpha) if float(alpha).is_integer() else alpha


def content_hash(directory: Path) -> str:
    """``fineinfer.hashing.adapter_hash``: the adapter's version.

    Raises:
        AdapterError: A file is missing or unreadable.
    """
    try:
        return adapter_hash(directory)
    except OSError as error:
        name = Path(error.filename or directory).name
        raise AdapterError(f"{name} cannot be read: {error.strerror}") from error


def load_adapter(directory: Path, shape: ModelShape, max_rank: int) -> LoraWeights:
    """Read a PEFT LoRA folder and check every shape before any tensor is read.

    ``base_model_name_or_path`` is not looked at: shapes decide. Config keys this version does not know are logged.

    Args:
        directory: Folder with adapter_config.json and adapter_model.safetensors.
        shape: Sizes of the base model.
        max_rank: Largest rank that fits the serving slots.

    Returns:
        The weights on the CPU, in the file's dtype (the first tensor's, if they differ).

    Raises:
        AdapterError: Anything that cannot be served, naming the key or tensor.
    """
    config = _read_config(directory)
    path = _weights_file(directory)
    try:
        with safe_open(path, framework="pt") as file:
            layout, dtype, keys = _check_tensors(file, config, shape, max_rank)
            weights = LoraWeights.zeros(layout, dtype)
            for module in layout.modules():
                weights.a(module).copy_(file.get_tensor(keys[module.layer, module.name, "A"]))
                weights.b(module).copy_(file.get_tensor(keys[module.layer, module.name, "B"]))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS_NAME} is damaged: {error}") from error
    if not weights.is_finite():
        bad = next(key for key, view in weights.named_tensors() if not torch.isfinite(view).all())
        raise AdapterError(f"tensor {bad} has values that are not finite")
    return weights


def check_adapter(directory: Path, shape: ModelShape, max_rank: int) -> LoraLayout:
    """The layout of a PEFT LoRA folder, with every check of ``load_adapter`` that needs no tensor's values.

    Raises:
        AdapterError: As ``load_adapter``.
    """
    config = _read_config(directory)
    try:
        with safe_open(_weights_file(directory), framework="pt") as file:
            return _check_tensors(file, config, shape, max_rank)[0]
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS_NAME} is damaged: {error}") from error


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        raise AdapterError(
            "adapter_model.bin is a pickle and is not loaded; save the adapter as safetensors"
            if pickled
            else f"{WEIGHTS_NAME} is missing"
        )
    return path


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AdapterError(f"{CONFIG_NAME} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{CONFIG_NAME} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_NAME} is not a JSON object")
    _check_config(config)
    return config


def _check_config(config: dict[str, Any]) -> None:
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"peft_type {config['peft_type']!r} is not supported, only LORA")
    for key in _ONLY_OFF:
        if config.get(key):
            raise AdapterError(f"{key}={config[key]!r} is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias={config['bias']!r} is not supported, only 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterError(f"init_lora_weights={init!r} changes the base weights, which are shared")
    r, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise AdapterError(f"r={r!r} must be a positive integer")
    if not _is_number(alpha):
        raise AdapterError(f"lora_alpha={alpha!r} must be a finite number")
    targets = config.get("target_modules")
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        raise AdapterError("target_modules must be a string or a list of strings")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(_is_number(value) for value in pattern.values()):
            raise AdapterError(f"{key} must map module names to numbers")
        for name in pattern:
            _check_pattern(key, name)
    unknown = sorted(set(config) - set(_CONFIG_DEFAULTS))
    if unknown:
        logger.warning("%s: unknown keys are ignored: %s", CONFIG_NAME, ", ".join(unknown)[:500])


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) < 1e30  # also False for NaN


def _check_pattern(key: str, pattern: str) -> None:
    repetitions = sum(map(pattern.count, "*+?"))
    plain = len(pattern) <= MAX_PATTERN_CHARACTERS and repetitions <= MAX_REPETITIONS and _PATTERN.fullmatch(pattern)
    try:
        re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{key}: {pattern[:200]!r} is not a regular expression: {error}") from error
    if not plain:
        raise AdapterError(
            f"{key}: {pattern[:200]!r} is a regular expression beyond names, '.', classes, alternatives and "
            f"{MAX_REPETITIONS} repetitions"
        )


def _check_tensors(
    file: Any, config: dict[str, Any], shape: ModelShape, max_rank: int
) -> tuple[LoraLayout, torch.dtype, dict[tuple[int, str, str], str]]:
    """The layout that the file's tensors describe, every shape checked; the dtype to load in, and the tensors' keys."""
    features, keys = module_features(shape), _tensor_keys(file, shape)
    found = {(layer, name) for layer, name, _ in keys}
    _check_coverage(config, found, shape)
    ranks: dict[tuple[int, str], tuple[int, float]] = {}
    for layer, name in sorted(found):
        path = module_path(layer, name)
        rank = pattern_value(config.get("rank_pattern") or {}, path, config["r"])
        alpha = pattern_value(config.get("alpha_pattern") or {}, path, config["lora_alpha"])
        if not isinstance(rank, int) or not 1 <= rank <= max_rank:
            raise AdapterError(f"rank {rank} of {path} is not within 1 to {max_rank}, the server's --max-lora-rank")
        width_in, width_out = features[name]
        for side, expected in (("A", (rank, width_in)), ("B", (width_out, rank))):
            key = keys.get((layer, name, side))
            if key is None:
                raise AdapterError(f"tensor base_model.model.{path}.lora_{side}.weight is missing")
            tensor = tuple(file.get_slice(key).get_shape())
            if tensor != expected:
                raise AdapterError(f"tensor {path}.lora_{side} has shape {tensor}, expected {expected}")
        ranks[layer, name] = (rank, lora_scaling(rank, float(alpha), bool(config.get("use_rslora"))))
    layout = LoraLayout(shape, ranks)
    dtype = file.get_slice(next(iter(file.keys())))[:1].dtype
    if dtype not in DTYPES:
        raise AdapterError(f"tensors are {dtype}, expected float32, bfloat16 or float16")
    return layout, dtype, keys


def _tensor_keys(file: Any, shape: ModelShape) -> dict[tuple[int, str, str], str]:
    """(layer, module, "A" or "B") -> the key in the file."""
    keys: dict[tuple[int, str, str], str] = {}
    for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
        match = _KEY.fullmatch(key)
        if match is None or match[3] not in MODULES:
            raise AdapterError(f"tensor {key[:200]} is not a LoRA matrix of a served module ({', '.join(MODULES)})")
        layer, name, side = int(match[1]), match[3], match[4]
        if layer >= shape.num_layers or f".{match[2]}.{name}" not in module_path(layer, name):
            raise AdapterError(f"tensor {key[:200]} does not exist in this model of {shape.num_layers} layers")
        if (layer, name, side) in keys:
            raise AdapterError(f"tensors {keys[layer, name, side][:200]} and {key[:200]} are the same matrix")
        keys[layer, name, side] = key
    return keys


def _check_coverage(config: dict[str, Any], found: set[tuple[int, str]], shape: ModelShape) -> None:
    """Compare the tensors with what ``target_modules`` promises (a string there is a pattern: tensors decide)."""
    targets = config["target_modules"]
    if isinstance(targets, str):
        return
    layers = config.get("layers_to_transform")
    chosen = range(shape.num_layers) if layers in (None, []) else [layers] if isinstance(layers, int) else layers
    if not (isinstance(chosen, range) or all(isinstance(layer, int) for layer in chosen)):
        raise AdapterError("layers_to_transform must be a layer index or a list of them")
    excluded = config.get("exclude_modules")
    expected = set()
    for target in targets:
        hits = {
            (layer, name)
            for layer in range(shape.num_layers)
            for name in MODULES
            if f".{module_path(layer, name)}".endswith(f".{target}")
        }
        if not hits:
            raise AdapterError(f"target_modules: {target!r} is not one of {', '.join(MODULES)}")
        expected |= {hit for hit in hits if hit[0] in chosen}
    if excluded:
        expected &= found  # what was excluded is simply absent
    for layer, name in sorted(expected - found):
        raise AdapterError(f"tensors of {module_path(layer, name)} are missing, though target_modules names it")
    for layer, name in sorted(found - expected):
        raise AdapterError(f"tensors of {module_path(layer, name)} are present, though target_modules does not name it")
