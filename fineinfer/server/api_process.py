"""Entry of an api worker: ``python -m fineinfer.server.api_process SETTINGS.json``, started by the supervisor."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from fineinfer.parent_death import die_with_parent

TOKEN_VARIABLE = "FINEINFER_IPC_TOKEN"


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells an api worker, as a JSON file that only the user can read.

    Attributes:
        worker_index: Number of this worker; its socket identity is ``api-<index>``.
        engine_address: ``ipc://`` address of the engine.
        control_address: ``ipc://`` address of the supervisor.
        state_dir: Folder of the store.
        served_model_name: Name of the base model in the API.
        model: Folder, ``.gguf`` file or hub id of the tokenizer; None: the embedded model.
        revision: Of a hub model.
        socket_fd: Inherited listening socket; without it ``host`` and ``port`` are bound.
        api_keys: Accepted bearer keys; none: no authentication.
        admin_api_keys: Keys that may change what is served; none: every accepted key may.
        adapter_root: Folder below which adapters may be loaded; None: they may not.
        metrics_prefix: ``fineinfer:`` or ``vllm:``.
        max_file_bytes: Largest upload.
        files_quota_bytes: Most bytes of files kept at a time.
        num_text_threads: Threads that tokenise.
        shutdown_timeout_s: How long running answers may go on after SIGTERM (which comes after the engine has drained);
            then they end with an error.
        log_level: Python's name of a log level, for FineInfer's own lines.
    """

    worker_index: int = 0
    engine_address: str
    control_address: str
    state_dir: str
    served_model_name: str
    model: str | None = None
    revision: str | None = None
    socket_fd: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    admin_api_keys: list[str] = []
    adapter_root: str | None = None
    metrics_prefix: str = "fineinfer:"
    max_file_bytes: int = 2 << 30
    files_quota_bytes: int = 20 << 30
    num_text_threads: int = 2
    shutdown_timeout_s: float = 4.0
    log_level: str = "info"


def main() -> int:
    """Serve until SIGTERM or the parent's end; the exit code."""
    parent_pid = os.getppid()
    die_with_parent(parent_pid)
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ApiSettings)
    token = bytes.fromhex(os.environ.pop(TOKEN_VARIABLE))  # not for grandchildren
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("fineinfer").setLevel(settings.log_level.upper())  # others' notes are not the user's business
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of our own
    # uvicorn raises the signal again when it is done; before it runs there is nothing to drain
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return _serve(settings, token)
    except start_errors() as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def start_errors() -> tuple[type[Exception], ...]:
    """What a start fails with for a reason that the user can mend."""
    from fineinfer.model.errors import ModelLoadError
    from fineinfer.store import StoreError
    from fineinfer.text.tokenizer import TokenizerError

    return (ModelLoadError, TokenizerError, StoreError)


def _serve(settings: ApiSettings, token: bytes) -> int:
    from fineinfer.text.tokenizer import TokenizerPool, forgo_torch, load_tokenizer

    forgo_torch()  # before the imports: one that brought torch along would fail here, not pass unseen
    import huggingface_hub
    import uvicorn

    from fineinfer.model.resolve import resolve_model_path
    from fineinfer.server.app import create_app
    from fineinfer.server.engine_client import EngineClient
    from fineinfer.server.start_checks import raise_file_limit
    from fineinfer.store import Store

    raise_file_limit()
    path = resolve_model_path(settings.model, revision=settings.revision, need_weights=False)
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the line above was the last that may ask the hub
    tokenizers = TokenizerPool(load_tokenizer(path), settings.num_text_threads)
    engine = EngineClient(settings.engine_address, settings.control_address, token, settings.worker_index)
    app = create_app(settings, engine, tokenizers, Store(settings.state_dir))
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s) + 1,
        ws="none",
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            give_up = functools.partial(engine.fail_open, "The server is shutting down.")
            timer = asyncio.get_running_loop().call_later(settings.shutdown_timeout_s, give_up)
            await super().shutdown(sockets)
            timer.cancel()

    sockets = None if settings.socket_fd is None else [socket.socket(fileno=settings.socket_fd)]
    gc.collect()
    gc.freeze()  # as in the engine: no request waits while all that is loaded is gone through
    server = Server(config)
    server.run(sockets=sockets)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
