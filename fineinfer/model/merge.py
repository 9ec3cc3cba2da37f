"""Writes a base model with an adapter merged into it as a new model folder; the base's own files are only read."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fineinfer.model.errors import ModelLoadError
from fineinfer.model.files import weight_files

# weights in other forms, which would not be merged, and what belongs to the folder's history rather than the model
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".lock"}


class Delta(NamedTuple):
    """What an adapter adds to one weight: ``scaling * b @ a`` with a [rank, in] and b [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def merge_into(base: Path, deltas: Mapping[str, Delta], fill: Callable[[Path], None], target: Path) -> None:
    """Write ``base`` with the deltas added, file by file, so that one of its weight files is in memory at a time.

    Sums are made in fp32 and rounded once to the weight's own dtype.

    Args:
        base: Model folder with safetensors.
        deltas: Name of a weight in the checkpoint -> what to add.
        fill: Called with the new folder after the base's other files are in it, for files that replace them.
        target: Folder to make; may exist if it is empty.

    Raises:
        ModelLoadError: The base lacks a weight or has another shape, or its weights are quantised.
        FileExistsError: ``target`` is not empty.
    """
    files = weight_files(base)
    _check(files, deltas)

    def write(folder: Path) -> None:
        for path in sorted(base.iterdir()):
            if path.is_file() and path.suffix not in _NOT_COPIED and not path.name.startswith("."):
                shutil.copyfile(path, folder / path.name)
        for file in files:
            _merge_file(file, deltas, folder / file.name)
        fill(folder)

    write_folder(target, write)


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make a folder appear whole: written beside its place, synced, renamed.

    Args:
        target: May exist if it is empty.
        write: Fills the folder that it is given.

    Raises:
        FileExistsError: ``target`` is a file or not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; nothing was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        os.rename(temporary, target)  # replaces an empty folder, and fails if it is empty no more
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(files: list[Path], deltas: Mapping[str, Delta]) -> None:
    missing = set(deltas)
    for file in files:
        with _opened(file) as tensors:
            for name in missing & set(tensors.keys()):
                weight, delta = tensors.get_slice(name), deltas[name]
                expected = [delta.b.shape[0], delta.a.shape[1]]
                if list(weight.get_shape()) != expected:
                    raise ModelLoadError(f"{name} has shape {weight.get_shape()}, the adapter is for {expected}")
                if weight.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise ModelLoadError(f"{name} is {weight.get_dtype()}: an adapter is merged into plain floats only")
                missing.discard(name)
    if missing:
        raise ModelLoadError(f"{files[0].parent} lacks {min(missing)}, to which the adapter adds")


def _merge_file(file: Path, deltas: Mapping[str, Delta], target: Path) -> None:
    merged: dict[str, torch.Tensor] = {}
    with _opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            weight = tensors.get_tensor(name)
            if name in deltas:
                delta = deltas[name]
                added = delta.scaling * (delta.b.float() @ delta.a.float())
                weight = (weight.float() + added).to(weight.dtype)
            merged[name] = weight
        save_file(merged, target, metadata=tensors.metadata() or {"format": "pt"})


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file.name} is damaged: {error}") from error
