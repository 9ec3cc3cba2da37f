"""/v1/memory: who holds how much of the engine's memory, and the budget, which may change while it runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from fineinfer.messages import EngineStats
from fineinfer.server.errors import ApiError
from fineinfer.server.generation import services
from fineinfer.server.json_body import read_json
from fineinfer.server.routes_adapters import require_admin

router = APIRouter()
ANSWER_S, POLL_S = 5.0, 0.05  # the engine sends its numbers every second


class MemoryRequest(msgspec.Struct):
    """Body of POST /v1/memory."""

    budget_bytes: int


@router.get("/v1/memory")
async def get_memory(request: Request) -> dict[str, Any]:
    """The budget, the leases in bytes, and the KV pool in slots, at most a second old."""
    engine = services(request).engine
    engine.require_info()
    return _shown(engine.stats)


@router.post("/v1/memory")
async def set_memory(request: Request) -> dict[str, Any]:
    """Change the budget; answers once the engine has taken it, while leases may still be following it.

    Raises:
        ApiError: 400 below what weights, workspace, adapters and the smallest pool need; 503 no answer in time.
    """
    require_admin(request)
    body = await read_json(request, MemoryRequest)
    engine = services(request).engine
    least = engine.require_info().memory_plan["budget_min"]
    if body.budget_bytes < least:
        raise ApiError(400, f"The budget must be at least {least} bytes.", param="budget_bytes")
    engine.set_budget(body.budget_bytes)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        if engine.stats is not None and engine.stats.memory_bytes.get("budget_bytes") == body.budget_bytes:
            return _shown(engine.stats)
        await asyncio.sleep(POLL_S)
    raise ApiError(503, "The engine has not taken the budget yet.", code="engine_unavailable")


def _shown(stats: EngineStats | None) -> dict[str, Any]:
    if stats is None:
        return {"object": "memory", "budget_bytes": None, "free_bytes": None, "leases": {}, "kv_slots": None}
    numbers = stats.memory_bytes
    return {
        "object": "memory",
        "budget_bytes": numbers["budget_bytes"],
        "free_bytes": numbers["free_bytes"],
        "leases": {key.removeprefix("lease:"): value for key, value in numbers.items() if key.startswith("lease:")},
        "kv_slots": {"now": stats.kv_slots_now, "used": stats.kv_slots_used, "max": stats.kv_slots_max},
    }
