"""GET /v1/models, GET and DELETE /v1/models/{id}; and the one place that turns a model name into base or adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from fineinfer.server.errors import ApiError, model_not_found

router = APIRouter()


@dataclass(frozen=True)
class ResolvedModel:
    """What a client's model name means: ``adapter`` is None for the base model."""

    name: str
    adapter: str | None


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
        if _find(request, candidate) is not None:
            return ResolvedModel(name, candidate)
    raise model_not_found(name)


def _find(request: Request, name: str) -> Any:
    store = request.app.state.store
    return None if store is None else store.adapters.resolve(name)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The base model, every adapter under its plain name, and every checkpoint as ``name@step``."""
    store = request.app.state.store
    data = [_base_object(request)]
    for record in store.adapters.all() if store is not None else ():
        if record.current:
            data.append(_adapter_object(request, record, record.name))
        data.append(_adapter_object(request, record, f"{record.name}@{record.step}"))
    return {"object": "list", "data": data}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    resolved = resolve_model(request, model)
    if resolved.adapter is None:
        return _base_object(request)
    return _adapter_object(request, _find(request, resolved.adapter), resolved.adapter)


@router.delete("/v1/models/{model:path}")
async def delete_model(request: Request, model: str) -> dict[str, Any]:
    """Forget an adapter with all its versions; requests in flight finish on the version they hold."""
    store = request.app.state.store
    versions = [] if store is None else store.adapters.versions(model)  # which a name may have and mean none of
    resolved = ResolvedModel(model, model) if versions else resolve_model(request, model)
    if resolved.adapter is None:
        raise ApiError(403, "The base model cannot be deleted.", param="model", code="permission_denied")
    state = request.app.state
    record = versions[-1] if versions else _find(request, resolved.adapter)
    if record.name != resolved.adapter:
        raise ApiError(403, "A single checkpoint cannot be deleted; delete the adapter.", param="model")
    job = None if record.job_id is None else state.store.jobs.get(record.job_id)
    if job is not None and job.finished_at is None:
        message = f"Job {job.id} is training '{record.name}'; cancel it first."
        raise ApiError(409, message, param="model", code="job_state_conflict", should_retry=False)
    state.store.adapters.delete(record.name)
    await state.engine.notify_store_changed()
    return {"id": model, "object": "model", "deleted": True}


def _base_object(request: Request) -> dict[str, Any]:
    name = request.app.state.settings.served_model_name
    return _model(request, name, int(request.app.state.started_s), None, {"kind": "base", "state": "loaded"})


def _adapter_object(request: Request, record: Any, name: str) -> dict[str, Any]:
    extra = {"kind": "adapter", "step": record.step, "version": record.version, "job_id": record.job_id}
    return _model(request, name, record.created_at, request.app.state.settings.served_model_name, extra)


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
