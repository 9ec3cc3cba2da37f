"""Where a model's files are: an existing path first, then the local hub cache, the hub itself last."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fineinfer.model.errors import ModelLoadError
from fineinfer.model.files import has_whole_weights
from fineinfer.model.gguf import converted_gguf, embedded_gguf

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHT_FILES = ["model.safetensors", "model-*.safetensors"]
_CONNECT_TIMEOUT_S = 10.0


def resolve_model_path(source: str | Path | None, *, revision: str | None = None, need_weights: bool = True) -> Path:
    """Folder with config, tokenizer and (unless told otherwise) safetensors of a model; reads no weights.

    Args:
        source: Folder, ``.gguf`` file (converted into the cache when first seen) or hub id; None: the embedded model.
        revision: Branch, tag or commit of a hub id.
        need_weights: Whether a hub model must have its weight files here afterwards.

    Raises:
        ModelLoadError: There is no such folder, or the hub does not have it or cannot be reached.
    """
    if source is None:
        return converted_gguf(embedded_gguf())
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file; name its folder (only a .gguf file is opened by itself)")
        return converted_gguf(path.resolve())
    if not _HUB_ID.fullmatch(str(source)) or str(source).endswith(".gguf"):
        raise ModelLoadError(f"there is no model folder or .gguf file {source}")
    return _from_hub(str(source), revision, need_weights)


def _from_hub(repo: str, revision: str | None, need_weights: bool) -> Path:
    try:
        path = _snapshot(repo, revision, need_weights, offline=True)
    except LocalEntryNotFoundError:
        pass
    else:
        if (path / "config.json").is_file() and (not need_weights or has_whole_weights(path)):
            return path
    try:
        return _snapshot(repo, revision, need_weights, offline=False)
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the hub model {repo} is gated: accept its terms and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"there is no folder {repo} here and no model {repo} on the hub") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"the hub model {repo} has no revision {revision}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"there is no folder {repo} here, it is not in the local hub cache, and the hub cannot be reached"
        ) from error


def _snapshot(repo: str, revision: str | None, need_weights: bool, *, offline: bool) -> Path:
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if need_weights else []),
            ignore_patterns=["*/*"],  # other formats live in sub-folders
            local_files_only=offline,
            etag_timeout=_CONNECT_TIMEOUT_S,
        )
    )
