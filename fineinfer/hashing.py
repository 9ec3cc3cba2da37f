"""Files that must be what they were: known by their SHA-256, and on disk when they are said to be (no torch)."""

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


CHAT_TEMPLATE_FILE = "chat_template.jinja"  # what an adapter was trained in; transformers knows it by this name
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", CHAT_TEMPLATE_FILE)  # the last one may be missing


def adapter_hash(directory: Path) -> str:
    """SHA-256 (hex) over the files of an adapter, names and sizes included: its version.

    The chat template belongs to it: the same weights, asked in another template, give other answers.

    Raises:
        OSError: A file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        if name == CHAT_TEMPLATE_FILE and not (directory / name).exists():
            continue
        with (directory / name).open("rb") as file:
            digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, would outlive a power cut.

    Raises:
        OSError: It cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
