"""Puts the HTTP application together; everything it works with is given, so that tests give fakes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request

from fineinfer.server import (
    routes_adapters,
    routes_chat,
    routes_completions,
    routes_files,
    routes_fine_tuning,
    routes_health,
    routes_job_files,
    routes_job_watch,
    routes_memory,
    routes_models,
    routes_tokenize,
)
from fineinfer.server.boundary import Boundary
from fineinfer.server.engine_client import EngineClient, EngineUnavailableError
from fineinfer.server.errors import engine_unavailable, install_error_handlers
from fineinfer.server.generation import Services
from fineinfer.server.metrics import ServerMetrics
from fineinfer.text.tokenizer import TokenizerPool

if TYPE_CHECKING:
    from fineinfer.server.api_process import ApiSettings

_ROUTES = (
    routes_chat,
    routes_completions,
    routes_adapters,
    routes_models,
    routes_tokenize,
    routes_files,
    routes_fine_tuning,
    routes_job_files,
    routes_job_watch,
    routes_memory,
    routes_health,
)


def create_app(settings: ApiSettings, engine: EngineClient, tokenizers: TokenizerPool, store: Any) -> FastAPI:
    """The application of one api worker.

    Args:
        settings: Names, keys and limits.
        engine: Started with the app and closed with it.
        tokenizers: Closed with the app.
        store: Registry of files, jobs and adapters (fineinfer.store.Store); None serves the base model only.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()
            tokenizers.close()

    # no documentation pages: they load scripts from elsewhere
    app = FastAPI(title="FineInfer", lifespan=lifespan, docs_url=None, redoc_url=None)
    metrics = ServerMetrics(settings.metrics_prefix, settings.served_model_name, lambda: engine.stats)
    app.state.settings, app.state.store, app.state.engine = settings, store, engine
    app.state.services = Services(engine, tokenizers, metrics)
    app.state.started_s = time.time()
    install_error_handlers(app)
    app.add_exception_handler(EngineUnavailableError, _on_engine_unavailable)
    keys = [*settings.api_keys, *settings.admin_api_keys] if settings.api_keys else []
    app.add_middleware(Boundary, api_keys=keys, metrics=metrics)
    for module in _ROUTES:
        app.include_router(module.router)
    return app


async def _on_engine_unavailable(_: Request, error: Exception) -> Response:
    return engine_unavailable(str(error)).response()
