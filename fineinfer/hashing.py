"""SHA-256 of files: what checkpoints, data sets and uploads are known by (no torch)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read in pieces.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_hash(directory: Path) -> str:
    """SHA-256 (hex) over the two files of a PEFT folder, names and sizes included: the adapter's version.

    Raises:
        OSError: A file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        with (directory / name).open("rb") as file:
            digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
