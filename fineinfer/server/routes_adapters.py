"""vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, and rollback to an earlier version; for administrators."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from fineinfer.server.adapter_files import import_adapter, locate
from fineinfer.server.errors import ApiError
from fineinfer.server.json_body import read_json
from fineinfer.server.routes_models import delete_adapter, model_object, resolve_model
from fineinfer.store import AdapterRecord, NameTakenError

router = APIRouter()
logger = logging.getLogger(__name__)
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")  # no @: that is for name@step


class LoadRequest(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter (vLLM's fields, SGLang's ``pinned``)."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    pinned: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter; ``lora_int_id`` is accepted and means nothing."""

    lora_name: str = ""
    lora_int_id: int | None = None


class RollbackRequest(msgspec.Struct):
    """Body of POST /v1/models/{name}/rollback."""

    step: int


def require_admin(request: Request) -> None:
    """Let only administrators pass, if the server knows such.

    Raises:
        ApiError: 403; the key is not one of ``--admin-api-key``.
    """
    keys = request.app.state.settings.admin_api_keys
    given = request.headers.get("authorization", "").partition(" ")[2].strip().encode("latin-1")
    # all are compared whatever matches, so that the time tells nothing
    if keys and not any([hmac.compare_digest(given, key.encode()) for key in keys]):
        raise ApiError(403, "This needs an admin key: see --admin-api-key.", code="permission_denied")


def check_adapter_name(name: str, base_model: str) -> None:
    """Raise ApiError unless a loaded adapter may have this name."""
    if not ADAPTER_NAME.fullmatch(name):
        raise ApiError(
            400, "lora_name may have 1 to 128 letters, digits and . _ : / -, the first a letter or digit.",
            param="lora_name",
        )  # fmt: skip
    if name == base_model or name.startswith(f"{base_model}:"):
        raise ApiError(400, f"The lora adapter name '{name}' is the base model's.", param="lora_name")


def _adapter_root(request: Request) -> Path:
    require_admin(request)
    root = request.app.state.settings.adapter_root
    if root is None:
        raise ApiError(404, "Adapters can be loaded on servers with --adapter-root DIR only.", code="not_found")
    return Path(root)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Copy, check, commit, serve; answers when new requests get the adapter. Nothing changes if anything is wrong."""
    root = _adapter_root(request)
    body = await read_json(request, LoadRequest)
    if not body.lora_name or not body.lora_path:
        empty = "lora_path" if body.lora_name else "lora_name"
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", param=empty)
    if body.is_3d_lora_weight:
        raise ApiError(400, "'is_3d_lora_weight' is not supported.", param="is_3d_lora_weight")
    state, name = request.app.state, body.lora_name
    check_adapter_name(name, state.settings.served_model_name)
    try:
        state.store.adapters.check_free(name, replace=body.load_inplace)
    except NameTakenError as taken:  # before anything is copied
        raise ApiError(400, str(taken), param="lora_name") from taken
    source = locate(body.lora_path, root)
    _check_pin(request, body)
    adapters_dir = Path(state.settings.state_dir) / "adapters"
    version, directory = await asyncio.to_thread(import_adapter, source, adapters_dir, root)
    try:
        error = await state.engine.check_adapter(version, str(directory))
        if error is not None:
            raise ApiError(400, f"The adapter cannot be served: {error}.", param="lora_path")
        record = state.store.adapters.load(name, version, str(directory), replace=body.load_inplace, pinned=body.pinned)
    except NameTakenError as taken:
        raise ApiError(400, str(taken), param="lora_name") from taken
    finally:
        if not state.store.needs_adapter(version):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    await _served(request, record)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _check_pin(request: Request, body: LoadRequest) -> None:
    """One slot at least must be left for adapters that are not pinned."""
    most = request.app.state.engine.require_info().max_loras - 1
    if body.pinned and request.app.state.store.adapters.num_pinned(besides=body.lora_name) >= most:
        raise ApiError(400, f"At most {most} adapters can be pinned with --max-loras {most + 1}.", param="pinned")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Forget a loaded adapter with all its versions; requests in flight finish on the version they hold."""
    _adapter_root(request)
    body = await read_json(request, UnloadRequest)
    name = body.lora_name
    if not name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    record = request.app.state.store.adapters.resolve(name)
    if record is None or record.name != name:
        message = f"The lora adapter '{name[:200]}' cannot be found."
        raise ApiError(404, message, param="lora_name", code="adapter_not_found")
    if record.job_id is not None:
        message = f"'{name}' was trained by job {record.job_id}; delete it with DELETE /v1/models/{name}."
        raise ApiError(400, message, param="lora_name")
    await delete_adapter(request, name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@router.post("/v1/models/{model:path}/rollback")
async def rollback(request: Request, model: str) -> dict[str, Any]:
    """Let a name mean another of its versions; new requests get it when this answers, those in flight keep theirs.

    Raises:
        ApiError: 404 no such adapter or step; 409 the name is served live by a job.
    """
    require_admin(request)
    body = await read_json(request, RollbackRequest)
    store, name = request.app.state.store, model
    if (
        not store.adapters.versions(name) and store.adapters.live_job(name) is None
    ):  # a name may mean none of its versions
        resolve_model(request, name)
        raise ApiError(400, "Only an adapter's plain name can be moved to another version.", param="model")
    job = store.adapters.live_job(name)
    if job is not None:
        message = f"Job {job} serves '{name}' live; pause or cancel it first."
        raise ApiError(409, message, param="model", code="job_state_conflict", should_retry=False)
    try:
        record = store.adapters.set_current(name, body.step)
    except LookupError as error:
        raise ApiError(404, str(error), param="step", code="adapter_not_found") from error
    await _served(request, record)
    return model_object(request, name)


async def _served(request: Request, record: AdapterRecord) -> None:
    """Tell the supervisor, and wait until the engine gives the version to new requests."""
    engine = request.app.state.engine
    await engine.notify_store_changed()
    if engine.info is not None and not await engine.until_served(record.name, record.version):
        raise ApiError(
            503, f"'{record.name}' is stored, but the engine has not taken it yet.", code="engine_overloaded"
        )
