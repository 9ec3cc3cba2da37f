"""/health, /ping, /version and /metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from fineinfer.server.errors import engine_unavailable
from fineinfer.server.generation import services

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 only if the engine answers and gets on with its work; this process alone proves nothing.

    The body is JSON, not empty as in vLLM: probes look at the status, and clients that parse every answer can.
    """
    reason = services(request).engine.unavailable_reason()
    if reason is not None:
        raise engine_unavailable(reason)
    return {"status": "ok"}


@router.api_route("/ping", methods=["GET", "POST"])
async def ping(request: Request) -> dict[str, str]:
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
