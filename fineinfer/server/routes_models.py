"""GET /v1/models, GET and DELETE /v1/models/{id}; and the one place that turns a model name into base or adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from fineinfer.server.adapter_files import adapter_rank
from fineinfer.server.errors import ApiError, model_not_found

router = APIRouter()


@dataclass(frozen=True)
class ResolvedModel:
    """What a client's model name means: ``adapter`` is None for the base model, ``directory`` has its files if any."""

    name: str
    adapter: str | None
    directory: str | None = None


def resolve_model(request: Request, name: str) -> ResolvedModel:
    """Exact names first, then ``base:adapter``: adapter names may hold colons themselves (``ft:…``).

    Raises:
        ApiError: 404 ``model_not_found``.
    """
    base = request.app.state.settings.served_model_name
    if name == base:
        return ResolvedModel(name, None)
    candidates = [name, name.removeprefix(f"{base}:")] if name.startswith(f"{base}:") else [name]
    for candidate in candidates:
        found = _find(request, candidate)
        if found is not None:
            return ResolvedModel(name, candidate, getattr(found, "directory", None))
    raise model_not_found(name)


def _find(request: Request, name: str) -> Any:
    """The adapter's record, or the id of the job that serves it live before its first checkpoint, or None."""
    store = request.app.state.store
    return None if store is None else store.adapters.resolve(name) or store.adapters.live_job(name)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The base model, every adapter under its plain name, and every checkpoint as ``name@step``."""
    store = request.app.state.store
    data = [_base_object(request)]
    if store is None:
        return {"object": "list", "data": data}
    records, live = store.adapters.all(), store.adapters.live_names()
    for record in records:
        if record.current:
            data.append(_adapter_object(request, record, record.name, live))
        data.append(_adapter_object(request, record, f"{record.name}@{record.step}"))
    named = {record.name for record in records if record.current}
    data += [_live_object(request, store.adapters.live_job(name), name) for name in live if name not in named]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    return model_object(request, model)


def model_object(request: Request, model: str) -> dict[str, Any]:
    """OpenAI's object of a model, with ``fineinfer`` facts.

    Raises:
        ApiError: 404 ``model_not_found``.
    """
    resolved = resolve_model(request, model)
    if resolved.adapter is None:
        return _base_object(request)
    found = _find(request, resolved.adapter)
    if isinstance(found, str):
        return _live_object(request, found, resolved.adapter)
    return _adapter_object(request, found, resolved.adapter, request.app.state.store.adapters.live_names())


@router.delete("/v1/models/{model:path}")
async def delete_model(request: Request, model: str) -> dict[str, Any]:
    """Forget an adapter with all its versions; requests in flight finish on the version they hold."""
    store = request.app.state.store
    versions = [] if store is None else store.adapters.versions(model)  # which a name may have and mean none of
    resolved = ResolvedModel(model, model) if versions else resolve_model(request, model)
    if resolved.adapter is None:
        raise ApiError(403, "The base model cannot be deleted.", param="model", code="permission_denied")
    record = versions[-1] if versions else _find(request, resolved.adapter)
    if not isinstance(record, str) and record.name != resolved.adapter:
        raise ApiError(403, "A single checkpoint cannot be deleted; delete the adapter.", param="model")
    job_id = record if isinstance(record, str) else record.job_id
    job = None if job_id is None else request.app.state.store.jobs.get(job_id)
    if job is not None and job.finished_at is None:
        message = f"Job {job.id} is training '{resolved.adapter}'; cancel it first."
        raise ApiError(409, message, param="model", code="job_state_conflict", should_retry=False)
    await delete_adapter(request, resolved.adapter)
    return {"id": model, "object": "model", "deleted": True}


async def delete_adapter(request: Request, name: str) -> None:
    """Forget every version of a name."""
    request.app.state.store.adapters.delete(name)
    await request.app.state.engine.notify_store_changed()


def _base_object(request: Request) -> dict[str, Any]:
    name = request.app.state.settings.served_model_name
    return _model(request, name, int(request.app.state.started_s), None, {"kind": "base", "state": "loaded"})


def _adapter_object(request: Request, record: Any, name: str, live: Sequence[str] = ()) -> dict[str, Any]:
    """``state`` says where the weights are: ``loaded`` in a slot, ``cpu`` or ``disk``; or ``training``: served live."""
    stats = request.app.state.engine.stats
    tier = "disk" if stats is None else stats.adapter_tiers.get(record.version, "disk")
    extra = {
        "kind": "adapter",
        "state": "training" if name in live else tier,
        "step": record.step,
        "version": record.version,
        "rank": adapter_rank(record.directory),
        "pinned": record.pinned,
        "job_id": record.job_id,
    }
    return _model(request, name, record.created_at, request.app.state.settings.served_model_name, extra)


def _live_object(request: Request, job_id: str, name: str) -> dict[str, Any]:
    """A name that a job serves live and that has no checkpoint yet."""
    job = request.app.state.store.jobs.get(job_id)
    created, parent = 0 if job is None else job.created_at, request.app.state.settings.served_model_name
    return _model(request, name, created, parent, {"kind": "adapter", "state": "training", "job_id": job_id})


def _model(request: Request, name: str, created: int, parent: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    info = request.app.state.engine.info
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "fineinfer",
        "root": parent or name,
        "parent": parent,
        "max_model_len": None if info is None else min(info.max_model_len, info.max_request_tokens),
        "fineinfer": extra,
    }
