"""/health, /ping, /version and /metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from fineinfer.server.errors import engine_unavailable
from fineinfer.server.generation import services

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 only if the engine answers and gets on with its work; this process alone proves nothing."""
    reason = services(request).engine.unavailable_reason()
    if reason is not None:
        raise engine_unavailable(reason)
    return Response(status_code=200)


@router.api_route("/ping", methods=["GET", "POST"])
async def ping(request: Request) -> Response:
    """The same as /health."""
    return await health(request)


@router.get("/version")
async def get_version() -> dict[str, Any]:
    """The version of this software."""
    return {"version": version("fineinfer")}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(services(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
