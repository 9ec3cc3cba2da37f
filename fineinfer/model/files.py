"""Which files of a model folder hold weights (no torch: api workers resolve paths too)."""

from __future__ import annotations

import json
from pathlib import Path

from fineinfer.model.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, all of which exist.

    Raises:
        ModelLoadError: There are none, or one that the index names is missing.
    """
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a safetensors index") from error
        files = [path / Path(name).name for name in names]  # a name never leads out of the folder
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(f"{path} lacks {', '.join(missing)}, which {INDEX_FILE} names")
        return files
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ModelLoadError(
            f"{path} has only pickle weights (*.bin), which are never opened: convert them to safetensors"
        )
    if (path / "adapter_config.json").is_file():
        raise ModelLoadError(f"{path} is a LoRA adapter, not a model: name its base model")
    raise ModelLoadError(f"{path} has no {SINGLE_FILE} and no {INDEX_FILE}")


def has_whole_weights(path: Path) -> bool:
    """Whether every safetensors file that a folder should have is there."""
    try:
        weight_files(path)
    except ModelLoadError:
        return False
    return True
