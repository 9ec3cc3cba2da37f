"""Makes a job: its folder with its files in it, then its row; used by the HTTP route and by --lora-train."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.request import InvalidRequestError
from fineinfer.server.job_params import JobRequest
from fineinfer.server.job_settings import Limits, parse_hyperparameters, show
from fineinfer.store import AdapterRecord, FileRecord, JobRecord, JobStatus, Store, new_id, now

TRAINING_FILE = "training.jsonl"
VALIDATION_FILE = "validation.jsonl"


def check_references(store: Store, request: JobRequest, limits: Limits) -> JobRequest:
    """Look up what a request names; its ``from_checkpoint`` becomes a folder and gives the adapter its shape.

    Raises:
        InvalidRequestError: A file or checkpoint is not there, or contradicts the request.
    """
    for param, file_id in (("training_file", request.training_file), ("validation_file", request.validation_file)):
        if file_id is None:
            continue
        file = store.files.get(file_id)
        if file is None:
            raise InvalidRequestError(f"{param}: no such file '{file_id[:64]}'.", param, "file_not_found")
        if file.purpose != "fine-tune":
            message = f"{param}: the purpose of '{file.id}' is '{file.purpose}', not 'fine-tune'."
            raise InvalidRequestError(message, param, "invalid_file_purpose")
    asked = request.hyperparameters
    if "from_checkpoint" not in asked:
        return request
    adapter = _start_adapter(store, asked["from_checkpoint"])
    lora = _lora_of(adapter, asked.get("lora", {}), limits)
    values = {**asked, "from_checkpoint": f"{adapter.name}@{adapter.step}", "lora": lora}
    return msgspec.structs.replace(request, hyperparameters=values, init_from=adapter.directory)


def _start_adapter(store: Store, wanted: str) -> AdapterRecord:
    """The version that an adapter's name, ``name@step``, a checkpoint's id or a job's id (its newest) stands for."""
    found = store.adapters.resolve(wanted)
    if found is None:
        checkpoint = store.jobs.checkpoint(wanted) or next(iter(store.jobs.checkpoints(wanted, limit=1)[0]), None)
        found = None if checkpoint is None else store.adapters.resolve(checkpoint.name)
    if found is None:
        gone = " any more" if store.jobs.checkpoint(wanted) else " yet" if store.jobs.get(wanted) else ""
        message = f"from_checkpoint: '{wanted[:64]}' names no adapter or checkpoint{gone}."
        raise InvalidRequestError(message, "from_checkpoint", "checkpoint_not_found")
    return found


def _lora_of(adapter: AdapterRecord, asked: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Hyperparameter ``lora`` of a job that goes on from an adapter.

    Raises:
        InvalidRequestError: The request asks for another shape, or this server cannot train that one.
    """
    name = f"{adapter.name}@{adapter.step}"
    try:
        config = msgspec.json.decode(
            (Path(adapter.directory) / "adapter_config.json").read_bytes(), type=dict[str, Any]
        )
        given = {ours: config[theirs] for ours, theirs in _PEFT_NAMES.items() if config.get(theirs) is not None}
        odd = [
            key for key in ("layers_to_transform", "exclude_modules", "use_dora", "modules_to_save") if config.get(key)
        ]
        if odd:
            raise InvalidRequestError(f"{odd[0]} is set in its adapter_config.json")
        shape: dict[str, Any] = parse_hyperparameters({"lora": given}, limits)["lora"]
    except (OSError, msgspec.DecodeError, InvalidRequestError) as error:
        message = f"from_checkpoint: '{name}' cannot be trained on: {error}"
        raise InvalidRequestError(message, "from_checkpoint") from error
    for key, value in asked.items():
        if key != "dropout" and value != shape.get(key, {}):
            message = f"lora.{key} is {show(value)}, but from_checkpoint '{name}' has {show(shape.get(key))}."
            raise InvalidRequestError(message, f"lora.{key}")
    return shape | asked


# what an adapter says of itself in PEFT's adapter_config.json
_PEFT_NAMES = {
    "r": "r", "alpha": "lora_alpha", "target_modules": "target_modules", "rslora": "use_rslora",
    "dropout": "lora_dropout", "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern",
}  # fmt: skip


def create_job(
    store: Store,
    request: JobRequest,
    *,
    idempotency_key: str | None = None,
    body_sha256: str = "",
    local_key: str | None = None,
    owner: str = "",
) -> JobRecord:
    """Create a job in ``validating_files``; the file stays usable for it even if its id is deleted later.

    Args:
        store: The registry.
        request: A checked request, see ``check_references``.
        idempotency_key: Requests with the same key make one job.
        body_sha256: Identifies the request body that the key stands for.
        local_key: Identifies a ``--lora-train`` job.
        owner: Whose job it is; keys of different owners do not meet, and queued jobs take turns by owner.

    Raises:
        FileNotFoundError: A file was deleted meanwhile.
        IdempotencyConflictError: The key was used with another body.
        NameTakenError: The adapter's name belongs to another live job or adapter.
    """
    job_id = new_id("ftjob")
    record = JobRecord(
        id=job_id,
        version=1,
        status=JobStatus.VALIDATING,
        name=request.suffix or f"ft-{job_id.removeprefix('ftjob-')[:8]}",
        created_at=now(),
        finished_at=None,
        request=msgspec.to_builtins(request),
        settings=None,
        dataset=None,
        error=None,
        local_key=local_key,
        trained_tokens=None,
        progress=None,
        num_engine_deaths=0,
        result_files=[],
        owner=owner,
        priority=request.priority,
    )
    folder = store.job_dir(job_id)
    folder.mkdir(mode=0o700)
    try:
        _link_or_copy(store.file_path(request.training_file), folder / TRAINING_FILE)
        if request.validation_file is not None:
            _link_or_copy(store.file_path(request.validation_file), folder / VALIDATION_FILE)
        made = store.jobs.create(record, idempotency_key=idempotency_key, body_sha256=body_sha256)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if made.id != job_id:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def add_file(store: Store, content: Path, filename: str, purpose: str) -> FileRecord:
    """Copy a local file into the store as a file object."""
    file_id = new_id("file")
    target = store.file_path(file_id)
    digest, size = hashlib.sha256(), 0
    with content.open("rb") as source, target.open("xb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    record = FileRecord(
        id=file_id, filename=filename, bytes=size, purpose=purpose, sha256=digest.hexdigest(), created_at=now()
    )
    store.files.add(record)
    return record


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
