"""Adapter folders from outside: found below the allowed root, copied into the state folder by content (no torch)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import BinaryIO

from fineinfer.hashing import ADAPTER_FILES, adapter_hash, sync_to_disk
from fineinfer.request import InvalidRequestError
from fineinfer.server.errors import ApiError

CONFIG_NAME, WEIGHTS_NAME, TEMPLATE_NAME = ADAPTER_FILES
MAX_SMALL_FILE_BYTES = 1 << 20
DISK_MARGIN_BYTES = 256 << 20  # left free for checkpoints and the database
_TEMPORARY = ".import-"


class AdapterFolderError(InvalidRequestError):
    """A folder that cannot be taken; the message names no place outside the root."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message, "lora_path", code)


def locate(lora_path: str, root: Path) -> Path:
    """The folder that a request names, relative to the root or absolute; links are followed, but not out of the root.

    Raises:
        AdapterFolderError: It is not inside the root, whether it exists or not, or it is not a folder.
    """
    try:
        path = (root / lora_path).resolve()
        if not path.is_relative_to(root.resolve()):
            raise AdapterFolderError("lora_path must be inside the server's --adapter-root.")
        if path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, AdapterFolderError):
            raise
    raise AdapterFolderError(f"No adapter found for '{lora_path[:200]}' in --adapter-root.", "adapter_not_found")


def import_adapter(source: Path, adapters_dir: Path, root: Path | None = None) -> tuple[str, Path]:
    """Copy an adapter to ``<adapters_dir>/<sha256>``, whole or not at all; what becomes of ``source`` is no matter.

    Args:
        source: PEFT folder.
        adapters_dir: Where versions are kept.
        root: Files must be inside it, wherever links lead; None: the operator named the folder.

    Returns:
        (version, folder).

    Raises:
        AdapterFolderError: A file is missing, too large, not a plain file or outside the root.
        ApiError: 507 the disk is full.
    """
    temporary = adapters_dir / f"{_TEMPORARY}{uuid.uuid4().hex}"
    temporary.mkdir(mode=0o700)
    try:
        for name in ADAPTER_FILES:
            if name != TEMPLATE_NAME or (source / name).is_file():
                with _open(source / name, root) as file:
                    _copy(file, temporary / name)
        sync_to_disk(temporary)
        version = adapter_hash(temporary)
        target = adapters_dir / version
        if not (target.is_dir() and adapter_hash(target) == version):
            shutil.rmtree(target, ignore_errors=True)  # a damaged one
            os.rename(temporary, target)
            sync_to_disk(adapters_dir)
    except OSError as error:
        raise AdapterFolderError(f"The adapter cannot be copied: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return version, target


def _open(path: Path, root: Path | None) -> BinaryIO:
    resolved = path.resolve()
    if root is not None and not resolved.is_relative_to(root.resolve()):
        raise AdapterFolderError(f"{path.name} leads out of the server's --adapter-root.")
    try:
        # neither a link put there a moment ago nor a pipe that never opens
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        pickled = path.name == WEIGHTS_NAME and (path.parent / "adapter_model.bin").exists()
        why = "adapter_model.bin is a pickle and is not loaded; save the adapter as safetensors" if pickled else None
        raise AdapterFolderError(f"{why or f'{path.name} is missing'}.") from error
    file = os.fdopen(descriptor, "rb")
    size, is_plain = os.fstat(descriptor).st_size, stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not is_plain or (path.name != WEIGHTS_NAME and size > MAX_SMALL_FILE_BYTES):
        file.close()
        raise AdapterFolderError(f"{path.name} is {'too large' if is_plain else 'not a plain file'}.")
    return file


def _copy(file: BinaryIO, target: Path) -> None:
    size, free = os.fstat(file.fileno()).st_size, shutil.disk_usage(target.parent).free
    if size + DISK_MARGIN_BYTES > free:
        raise ApiError(
            507,
            f"{target.name} has {size >> 20} MiB and the server's disk {free >> 20} MiB free, of which "
            f"{DISK_MARGIN_BYTES >> 20} MiB are kept.",
            code="disk_full",
        )
    with target.open("xb") as out:
        shutil.copyfileobj(file, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())


@functools.lru_cache(maxsize=4096)
def adapter_rank(directory: str) -> int | None:
    """Largest rank that the config of a stored adapter names; None if it cannot be read."""
    try:
        config = json.loads((Path(directory) / CONFIG_NAME).read_text(encoding="utf-8"))
        return int(max([config["r"], *(config.get("rank_pattern") or {}).values()]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
