"""Durable checkpoints: a folder is whole or absent, the last good one survives every crash, resume is bit-exact.

``<job>/checkpoints/step-00000012/`` holds the adapter in PEFT format (fp32 masters), ``optimizer.safetensors`` (Adam
moments), ``trainer_state.json`` and, written last, ``manifest.json`` with size and SHA-256 of each file. Order:
temporary folder, write, fsync each file, rename, fsync the parent, read back and verify, only then remove older ones.
One that is written again, with an evaluation that has ended since, first moves its forerunner to ``.old-step-...``;
``end_replacements`` brings that back if a crash came before the new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fineinfer.adapters.config import AdapterError
from fineinfer.adapters.peft_io import CONFIG_NAME, WEIGHTS_NAME, content_hash, load_adapter, save_adapter
from fineinfer.adapters.weights import LoraWeights
from fineinfer.hashing import ADAPTER_FILES, CHAT_TEMPLATE_FILE, file_sha256, sync_to_disk
from fineinfer.messages import LoraSpec
from fineinfer.training.errors import TrainingError

OPTIMIZER_NAME, STATE_NAME, MANIFEST_NAME = "optimizer.safetensors", "trainer_state.json", "manifest.json"
NUM_KEPT = 2
_FOLDER = re.compile(r"step-(\d{8,})")
_TEMPORARY, _REPLACED = ".tmp-", ".old-"
# What a folder that is no whole checkpoint raises. Any other OSError tells of the disk or the process at that moment.
_DAMAGE = (ValueError, KeyError, TypeError, FileNotFoundError, IsADirectoryError, NotADirectoryError)

logger = logging.getLogger(__name__)


class Moments(Protocol):
    """Adam's state: flat tensors of the masters' shape."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class CheckpointError(TrainingError):
    """A checkpoint could not be written; the state in memory is unchanged, so try again."""

    def __init__(self, message: str, code: str = "checkpoint_failed") -> None:
        super().__init__(message, code)


class DiskFullError(CheckpointError):
    """There is no room on the disk: the job pauses until somebody has made room and resumes it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "disk_full")


@dataclass(frozen=True)
class SavedState:
    """A verified checkpoint as read back from disk; ``trainer_state`` is the JSON object of the trainer."""

    directory: Path
    step: int
    weights: LoraWeights
    moments: dict[str, torch.Tensor]
    trainer_state: dict[str, Any]


def checkpoint_folder(job_dir: Path, step: int) -> Path:
    """Where the checkpoint after update ``step`` is."""
    return job_dir / "checkpoints" / f"step-{step:08d}"


def write_checkpoint(
    job_dir: Path, weights: LoraWeights, lora: LoraSpec, moments: Moments, trainer_state: dict[str, Any]
) -> None:
    """Write, verify, then remove all but the newest ``NUM_KEPT`` whole checkpoints.

    One of the same step is replaced; at any moment that one or the new one is whole.

    Args:
        job_dir: Folder of the job.
        weights: Master weights.
        lora: The settings of their layout.
        moments: Of the optimizer.
        trainer_state: JSON object with ``step`` and ``base_model``, besides what the trainer wants back.

    Raises:
        DiskFullError: The disk or the quota is full; nothing was added and no whole checkpoint was removed.
        CheckpointError: Likewise, for another reason.
    """
    target = checkpoint_folder(job_dir, trainer_state["step"])

    def fill(folder: Path) -> None:
        save_adapter(weights, lora, trainer_state["base_model"], folder)
        tensors = {"exp_avg": moments.exp_avg.cpu(), "exp_avg_sq": moments.exp_avg_sq.cpu()}
        save_file(tensors, folder / OPTIMIZER_NAME, metadata={"format": "pt"})
        if (job_dir / CHAT_TEMPLATE_FILE).exists():  # raw text has none
            shutil.copyfile(job_dir / CHAT_TEMPLATE_FILE, folder / CHAT_TEMPLATE_FILE)
        (folder / STATE_NAME).write_text(json.dumps(trainer_state, allow_nan=False))
        (folder / MANIFEST_NAME).write_text(json.dumps({"files": _measure(folder)}, indent=2, sort_keys=True))

    try:
        end_replacements(job_dir)
        _publish(target, job_dir.name, fill, _replaced(target))
        try:
            _verify(target)
        except (OSError, ValueError):
            _remove(target, job_dir.name)  # it must not be taken for one of those that are kept
            raise
    except (OSError, SafetensorError, ValueError) as error:
        with contextlib.suppress(OSError):  # then it is done before the next one is written or read
            end_replacements(job_dir)
        raise _failure(f"checkpoint {target.name} was not written", error) from error
    _remove_old(target, job_dir.name)


def end_replacements(job_dir: Path) -> None:
    """End what a crash has cut short: of two checkpoints of one step the newer one stays if it is whole.

    Nobody may be writing. Where a checkpoint cannot be read now, both stay.

    Raises:
        OSError: A folder cannot be renamed or removed now; nothing whole is lost.
    """
    for replaced in (job_dir / "checkpoints").glob(f"{_REPLACED}step-*"):
        target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        try:
            whole = target.exists() and _is_whole(target)
        except OSError as error:
            logger.warning("checkpoint %s cannot be read now: %s", target.name, error)
            continue
        if whole:
            _remove(replaced, job_dir.name)
            continue
        if target.exists():
            _remove(target, job_dir.name)
        os.rename(replaced, target)
        sync_to_disk(target.parent)


def newest_step(job_dir: Path) -> int:
    """Step of the newest checkpoint, whole or not; 0 if there is none."""
    return max((int(path.name.removeprefix("step-")) for path in _folders(job_dir / "checkpoints")), default=0)


def num_checkpoints(job_dir: Path) -> int:
    """How many there are, whole or not."""
    return len(_folders(job_dir / "checkpoints"))


def read_newest(job_dir: Path, weights_shape: Any, max_rank: int) -> SavedState | None:
    """The newest checkpoint that is whole, or None. Damaged ones are logged and left where they are.

    Args:
        job_dir: Folder of the job.
        weights_shape: The model's spec.
        max_rank: Largest rank of the job's adapter.
    """
    for directory in sorted(_folders(job_dir / "checkpoints"), reverse=True):
        try:
            _verify(directory)
            state = json.loads((directory / STATE_NAME).read_text())
            weights = load_adapter(directory, weights_shape, max_rank)
            return SavedState(directory, state["step"], weights, load_file(directory / OPTIMIZER_NAME), state)
        except (OSError, ValueError, KeyError, TypeError, AdapterError, SafetensorError) as error:
            logger.warning("checkpoint %s is damaged and is passed over: %s", directory.name, error)
    return None


def publish_adapter(checkpoint: Path, adapters_dir: Path) -> tuple[str, Path]:
    """Copy a checkpoint's adapter to ``<adapters_dir>/<sha256>``; does nothing if that version is there already.

    Other jobs may publish at the same time.

    Args:
        checkpoint: ``<job>/checkpoints/step-...``; jobs that share ``adapters_dir`` have folders of different names.
        adapters_dir: Where every job's versions go.

    Returns:
        (version, folder).

    Raises:
        DiskFullError: The disk or the quota is full; no version was added.
        CheckpointError: The copy failed for another reason; no version was added.
    """
    version = content_hash(checkpoint)
    target, job_name = adapters_dir / version, checkpoint.parents[1].name

    def fill(folder: Path) -> None:
        for name in ADAPTER_FILES:
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, folder / name)

    try:
        if target.is_dir() and content_hash(target) != version:
            _remove(target, job_name)
        if not target.is_dir():
            _publish(target, job_name, fill)
        if content_hash(target) != version:
            raise CheckpointError(f"adapter {version} does not read back as written")
    except (OSError, AdapterError) as error:
        raise _failure(f"adapter {version} was not published", error) from error
    return version, target


def _failure(what: str, error: Exception) -> CheckpointError:
    code = error.errno if isinstance(error, OSError) else None
    if told := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors has the number in its message only
        code = int(told[1])
    kind = DiskFullError if code in (errno.ENOSPC, errno.EDQUOT) else CheckpointError
    return kind(f"{what}: {os.strerror(code) if code else error}")  # without the path


def _publish(target: Path, job_name: str, fill: Callable[[Path], None], replaced: Path | None = None) -> None:
    """Make ``target`` appear at once and durable, with the files that ``fill`` writes.

    Args:
        target: What is to appear.
        job_name: Of the job's folder.
        fill: Called with a temporary folder.
        replaced: Where a folder goes that is there already; None: it must be another job's copy of the same, and stays.
    """
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    sync_to_disk(root.parent)
    _remove_leftovers(root, job_name)
    temporary = _temporary(root, job_name)
    temporary.mkdir()
    try:
        fill(temporary)
        for path in temporary.iterdir():
            sync_to_disk(path)
        sync_to_disk(temporary)
        if replaced is not None and target.exists():
            os.rename(target, replaced)
        try:
            os.rename(temporary, target)
        except OSError as error:
            if replaced is not None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(temporary)
        sync_to_disk(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary(root: Path, job_name: str) -> Path:
    return root / f"{_TEMPORARY}{job_name}-{uuid.uuid4().hex}"


def _remove_leftovers(root: Path, job_name: str) -> None:
    """Remove what the job has left there, in this process or one that died; another job may be writing beside it."""
    own = re.compile(rf"{re.escape(_TEMPORARY)}({re.escape(job_name)}-)?[0-9a-f]{{32}}")  # older versions wrote none
    for leftover in root.glob(f"{_TEMPORARY}*"):
        if own.fullmatch(leftover.name):
            shutil.rmtree(leftover)


def _replaced(target: Path) -> Path:
    return target.with_name(f"{_REPLACED}{target.name}")


def _measure(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in folder.iterdir()
        if path.name != MANIFEST_NAME
    }


def _verify(directory: Path) -> None:
    """Raise ValueError or OSError unless every file is as the manifest says."""
    files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
    missing = {CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME} - set(files)
    if missing:
        raise ValueError(f"the manifest lacks {', '.join(sorted(missing))}")
    if _measure(directory) != files:
        raise ValueError("size or SHA-256 of a file differs from the manifest")


def _is_whole(directory: Path) -> bool:
    """Whether it is as its manifest says.

    Raises:
        OSError: It cannot be read now, which says nothing of what is on the disk.
    """
    try:
        _verify(directory)
    except _DAMAGE as error:
        logger.warning("checkpoint %s is damaged: %s", directory.name, error)
        return False
    return True


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)] if root.is_dir() else []


def _remove_old(written: Path, job_name: str) -> None:
    """Keep ``written``, which is whole, and the newest others that are, ``NUM_KEPT`` together.

    What the disk has damaged since counts for nothing; one that cannot be read now does not count and stays. What
    cannot be removed costs disk space and nothing else: the checkpoint is written.
    """
    num_whole = 1
    try:
        if _replaced(written).exists():
            _remove(_replaced(written), job_name)
        for directory in sorted(set(_folders(written.parent)) - {written}, reverse=True):
            try:
                if num_whole < NUM_KEPT and _is_whole(directory):
                    num_whole += 1
                    continue
            except OSError as error:
                logger.warning("checkpoint %s cannot be read now and stays: %s", directory.name, error)
                continue
            _remove(directory, job_name)
    except OSError as error:
        logger.warning("not all checkpoints before %s were removed: %s", written.name, error)


def _remove(directory: Path, job_name: str) -> None:
    doomed = _temporary(directory.parent, job_name)
    os.rename(directory, doomed)  # so that a crash leaves no half of a checkpoint under its name
    sync_to_disk(directory.parent)
    shutil.rmtree(doomed)
