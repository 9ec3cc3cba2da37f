"""From a model's name to its weights in memory: one copy, frozen, safetensors only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from fineinfer.model.checkpoint import CheckpointFolder
from fineinfer.model.decoder import Decoder
from fineinfer.model.errors import ModelLoadError
from fineinfer.model.gguf import EMBEDDED_NAME
from fineinfer.model.resolve import resolve_model_path
from fineinfer.model.spec import ModelSpec, architecture_of

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its weights, its spec, the folder it came from and a short name for people."""

    decoder: Decoder
    spec: ModelSpec
    path: Path
    name: str


def load_model(
    source: str | Path | None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    revision: str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a model, or make one up.

    Args:
        source: Folder, ``.gguf`` file or hub id; None is the embedded model.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``float64`` or ``auto`` (fp32 on a CPU, else as stored).
        device: A torch device name.
        load_format: ``auto`` reads weights; ``dummy`` draws random ones for the shape in ``config.json``.
        revision: Of a hub id.
        seed: Of dummy weights.

    Raises:
        ModelLoadError: One sentence that names what is wrong.
        UnsupportedModelError: The architecture is not supported.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(f"load format {load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    path = resolve_model_path(source, revision=revision, need_weights=not dummy)
    config, spec = read_spec(path)
    checkpoint = None if dummy else CheckpointFolder(path)
    if checkpoint is not None and spec.tie_embeddings and not checkpoint.head_is_tied():
        spec = replace(spec, tie_embeddings=False)  # as transformers: a head of its own in the file wins
    target = torch.device(device)
    decoder = Decoder(spec, _torch_dtype(dtype, target, config, checkpoint), target)
    if checkpoint is None:
        _fill_with_noise(decoder, seed)
    else:
        checkpoint.fill(decoder)
    decoder.eval()
    return LoadedModel(decoder, spec, path, EMBEDDED_NAME if source is None else _short_name(source))


def read_spec(path: Path) -> tuple[Any, ModelSpec]:
    """The transformers config and the spec of a model folder; reads JSON only and runs no code of the folder.

    Raises:
        ModelLoadError: ``config.json`` is missing or malformed.
        UnsupportedModelError: The architecture or an option is not supported.
    """
    content = _read_json(path / "config.json")
    if content is None:
        raise ModelLoadError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    architecture = architecture_of(content.get("architectures"), content.get("model_type"))
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    try:
        config = config_class.from_dict(content)
    except Exception as error:  # transformers raises many kinds for a malformed config
        raise ModelLoadError(f"{path / 'config.json'} is not valid: {' '.join(str(error).split())}") from error
    generation = _read_json(path / "generation_config.json")
    generation_config = None if generation is None else transformers.GenerationConfig.from_dict(generation)
    return config, ModelSpec.from_hf(config, generation_config)


def base_weights_hash(decoder: Decoder) -> str:
    """SHA-256 over every parameter's name, dtype, shape and bytes; equal hashes mean untouched base weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(decoder.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        rows = parameter.detach().reshape(-1)
        for block in rows.split(1 << 24):  # a copy from the device is never larger than 64 MiB in fp32
            digest.update(block.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return content


def _torch_dtype(name: str, device: torch.device, config: Any, checkpoint: CheckpointFolder | None) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    if isinstance(config.dtype, torch.dtype):  # may be None
        return config.dtype
    return torch.bfloat16 if checkpoint is None else checkpoint.dtype()


def _short_name(source: str | Path) -> str:
    path = Path(source).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return str(source)


def _fill_with_noise(decoder: Decoder, seed: int) -> None:
    """Random weights made on the device itself: matrices normal, norms one, biases zero."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, dtype=decoder.dtype, device=decoder.device)
            if name.endswith("norm"):
                value.fill_(1)
            elif name.endswith("bias"):
                value.zero_()
            else:
                value.normal_(0, decoder.spec.initializer_range, generator=generator)
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
