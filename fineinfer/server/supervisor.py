"""The `fineinfer serve` parent: starts engine and api workers, watches them, runs the job manager (no torch)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.config import Config
from fineinfer.engine.settings import engine_settings
from fineinfer.ipc import AsyncDealer, AsyncRouter, ProtocolError
from fineinfer.messages import (
    AdapterRejected,
    Drain,
    Drained,
    EngineDown,
    EngineInfo,
    EngineStats,
    EngineUp,
    FromApi,
    FromEngine,
    Hello,
    Ping,
    Pong,
    ShuttingDown,
    StoreChanged,
    ToApi,
    ToEngine,
    TrainingSettings,
)
from fineinfer.server.api_process import ApiSettings
from fineinfer.server.child import Child
from fineinfer.server.engine_health import EngineHealth
from fineinfer.server.job_manager import JobManager, JobSettings, LocalJobError
from fineinfer.server.job_trackers import JobTrackers
from fineinfer.server.lora_modules import LoraModules
from fineinfer.server.start_checks import StartError, listening_socket, runtime_dir, state_lock
from fineinfer.server.status_line import StatusLine, print_banner
from fineinfer.store import Store, StoreError

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
ENGINE_WORD_S = 15.0  # an api worker that ended at start waits this long for the engine to say what is wrong
MAX_RESTARTS = 5  # within RESTART_WINDOW_S; more means the fault is not a passing one
RESTART_WINDOW_S = 300.0


def run(config: Config) -> int:
    """Serve until told to stop.

    Returns:
        The exit code: 0 after a clean stop, 1 on a failure that was reported in one line on stderr.
    """
    try:
        with state_lock(config.server.state_dir), listening_socket(config.server) as listener:
            return asyncio.run(_serve(config, listener))
    except (StartError, LocalJobError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _serve(config: Config, listener: socket.socket) -> int:
    with runtime_dir() as folder:
        supervisor = Supervisor(config, listener, folder)
        try:
            return await supervisor.main()
        finally:
            await supervisor.kill_all()


class Supervisor:
    """Owner of the child processes and the control socket.

    Args:
        config: The resolved configuration.
        listener: Bound TCP socket that the api workers accept from.
        runtime_dir: Private folder for sockets and settings files.
    """

    def __init__(self, config: Config, listener: socket.socket, runtime_dir: Path) -> None:
        self._config = config
        self._listener = listener
        self._runtime_dir = runtime_dir
        self._token = secrets.token_bytes(32)
        self._control: AsyncRouter[ToApi, FromApi] = AsyncRouter(self._address("control"), self._token, FromApi)
        self._engine_link: AsyncDealer[ToEngine, FromEngine] | None = None
        self._engine_reader: asyncio.Task[None] | None = None
        self._children: dict[str, Child] = {}
        self._workers: set[bytes] = set()
        self._stop = asyncio.Event()
        job_settings = JobSettings(
            base_model=self._base_model(),
            model=config.model.model,
            revision=config.model.revision,
            max_lora_rank=config.memory.max_lora_rank,
            defaults=TrainingSettings(seed=config.model.seed),
        )
        store, state_dir = Store(config.server.state_dir), config.server.state_dir
        store.remove_unknown_adapters()
        store.set_meta("model", [config.model.model, config.model.revision])  # what `models export --merge` merges into
        self._lora_modules = LoraModules(store, self._base_model(), config.adapters.lora_modules)
        self._jobs = JobManager(store, state_dir, job_settings, self._send_to_engine)
        self._trackers = JobTrackers(store, config.server.allow_outbound)
        self._jobs.reports.watchers.append(self._trackers.see)
        self._health = EngineHealth()
        self._was_ready = False

    def _address(self, name: str) -> str:
        return f"ipc://{self._runtime_dir / name}"

    def _base_model(self) -> str:
        model = self._config.model
        if model.served_model_name is not None:
            return model.served_model_name
        return EMBEDDED_MODEL_NAME if model.model is None else model.model.rstrip("/")

    # ------------------------------------------------------------ life

    async def main(self) -> int:
        """Start everything, serve, stop; the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal)
        train = self._config.train
        if train.lora_train is not None:
            self._jobs.create_local_job(train.lora_train, train.lora_train_name, self._config.hyperparameters())
        for index in range(self._config.server.api_server_count):
            await self._spawn_api(index)
        await self._spawn_engine()
        tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (
                self._read_control(),
                self._watch_reader(),
                self._jobs.run(),
                self._watch_health(),
                self._watch_children(),
            )
        ]
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a failed task ends the server with its error
            return await self._shut_down(tasks)
        finally:
            for task in [stop, *tasks]:
                task.cancel()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
        self._stop.set()

    async def _shut_down(self, tasks: list[asyncio.Task[Any]]) -> int:
        """No new requests; those in flight finish or end with an error; the job is checkpointed; all exit."""
        for peer in self._workers:
            await self._control.send(peer, ShuttingDown())
        timeout_s = self._config.server.shutdown_timeout
        engine = self._children.get("engine")
        if engine is not None and self._health.info is not None:
            await self._send_to_engine(Drain(timeout_s=timeout_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s + 10.0):
                    await engine.process.wait()
            await asyncio.sleep(0.2)  # last outputs of the drained engine reach the clients
        await self._close_link()
        await self.kill_all()
        await asyncio.to_thread(self._trackers.close)
        return 0

    async def kill_all(self) -> None:
        """End every child; safe to call twice."""
        for child in self._children.values():
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
        for child in self._children.values():
            try:
                async with asyncio.timeout(5.0):
                    await child.process.wait()
            except TimeoutError:
                child.process.kill()
                await child.process.wait()
            if child.reader is not None:
                child.reader.cancel()
        self._children = {}

    # ------------------------------------------------------------ children

    async def _spawn_engine(self) -> None:
        settings = engine_settings(self._config, self._base_model(), self._address("engine"))
        self._health = EngineHealth()
        await self._spawn("engine", "fineinfer.engine.process", settings)
        await self._close_link()
        # a new socket for a new engine: nothing queued for the dead one may reach its successor
        link: AsyncDealer[ToEngine, FromEngine] = AsyncDealer(
            self._address("engine"), self._token, b"supervisor", FromEngine
        )
        self._engine_link, self._engine_reader = link, asyncio.create_task(self._read_engine(link))
        await link.send(Hello())

    async def _close_link(self) -> None:
        """Stop reading from an engine that is gone; its last messages have been read or are lost with it."""
        reader, link = self._engine_reader, self._engine_link
        self._engine_reader = self._engine_link = None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if link is not None:
            link.close()

    async def _spawn_api(self, index: int) -> None:
        server = self._config.server
        settings = ApiSettings(
            worker_index=index,
            socket_fd=self._listener.fileno(),
            engine_address=self._address("engine"),
            control_address=self._address("control"),
            state_dir=str(server.state_dir),
            model=self._config.model.model,
            revision=self._config.model.revision,
            served_model_name=self._base_model(),
            api_keys=list(server.api_key),
            admin_api_keys=list(server.admin_api_key),
            adapter_root=None
            if self._config.adapters.adapter_root is None
            else str(self._config.adapters.adapter_root),
            metrics_prefix=server.metrics_prefix,
            max_file_bytes=server.max_file_size,
            files_quota_bytes=server.files_quota,
            shutdown_timeout_s=int(server.shutdown_timeout),
            log_level=server.log_level,
        )
        await self._spawn(f"api-{index}", "fineinfer.server.api_process", settings)

    async def _spawn(self, name: str, module: str, settings: msgspec.Struct) -> None:
        path = self._runtime_dir / f"{name}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(settings))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(path),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(self._listener.fileno(),) if name != "engine" else (),
            start_new_session=True,  # Ctrl-C reaches the supervisor only, which drains the rest in order
            # spinning threads of an idle engine would take the cores from the api workers on a small machine
            env={
                "OMP_WAIT_POLICY": "PASSIVE",
                **os.environ,
                "FINEINFER_IPC_TOKEN": self._token.hex(),
                "PYTHONSAFEPATH": "1",
            },
        )
        child = Child(name, process)
        child.reader = asyncio.create_task(self._forward_stderr(child))
        self._children[name] = child

    async def _forward_stderr(self, child: Child) -> None:
        stream = child.process.stderr
        if stream is None:
            return
        while line := await stream.readline():
            text = line.decode(errors="replace").rstrip()
            child.tail = [*child.tail[-19:], text]
            if self._was_ready:  # before that, one line says what is wrong: see _watch_children
                print(text, file=sys.stderr, flush=True)

    async def _watch_children(self) -> None:
        """Restart what died; give up when it keeps dying or never started."""
        restarts: list[float] = []
        while True:
            await asyncio.sleep(0.05)
            dead = [child for child in self._children.values() if child.process.returncode is not None]
            for child in dead:
                if self._stop.is_set():
                    return
                now = time.monotonic()
                restarts = [t for t in restarts if now - t < RESTART_WINDOW_S] + [now]
                if not self._was_ready or len(restarts) > MAX_RESTARTS:
                    raise StartError(await self._reason(child))
                if child.name == "engine":
                    await self._engine_lost(f"the engine ended with code {child.process.returncode}")
                    await self._spawn_engine()
                else:
                    await self._spawn_api(int(child.name.removeprefix("api-")))

    async def _reason(self, child: Child) -> str:
        """Why a child ended, in one line; the engine's word goes first, since a bad model ends the api workers too."""
        engine = self._children.get("engine")
        if engine is not None and engine is not child:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENGINE_WORD_S):
                    await engine.process.wait()
                    child = engine
        await asyncio.sleep(0.1)  # its last stderr lines
        return child.reason()

    async def _engine_lost(self, reason: str) -> None:
        print(f"{reason}; restarting it", file=sys.stderr, flush=True)
        self._jobs.on_engine_down()
        for peer in self._workers:
            await self._control.send(peer, EngineDown(reason=reason, restarting=True))

    async def _watch_reader(self) -> None:
        """End the server with the error of a message that could not be handled."""
        while True:
            await asyncio.sleep(0.2)
            reader = self._engine_reader
            if reader is not None and reader.done() and not reader.cancelled():
                reader.result()

    async def _watch_health(self) -> None:
        """Kill an engine that answers no more although it has work; _watch_children then restarts it."""
        sequence = 0
        while True:
            await asyncio.sleep(1.0)
            engine = self._children.get("engine")
            if engine is None or self._health.info is None:
                continue
            sequence += 1
            await self._send_to_engine(Ping(sequence=sequence))
            if self._health.is_stuck(time.monotonic()):
                print("the engine answers no more", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    engine.process.kill()
                self._health = EngineHealth(info=self._health.info)

    # ------------------------------------------------------------ messages

    async def _send_to_engine(self, message: ToEngine) -> None:
        if self._engine_link is not None:
            await self._engine_link.send(message)

    async def _read_control(self) -> None:
        while True:
            peer, message = await self._control.recv()
            if isinstance(message, Hello):
                self._workers.add(peer)
                if self._health.info is not None:
                    await self._control.send(peer, EngineUp(info=self._health.info))
            elif isinstance(message, StoreChanged):
                self._jobs.wake()

    async def _read_engine(self, link: AsyncDealer[ToEngine, FromEngine]) -> None:
        """Handle one engine's messages until its link is replaced."""
        status = StatusLine()
        while True:
            try:
                message = await link.recv()
            except ProtocolError as error:
                print(f"engine message dropped: {error}", file=sys.stderr, flush=True)
                continue
            self._health.last_heard_s = time.monotonic()
            if isinstance(message, EngineInfo):
                await self._engine_ready(message)
            elif isinstance(message, EngineStats):
                self._health.longest_slice_s = max(message.slice_times_ms.values(), default=0.0) / 1e3
                status.update(message)
            elif not isinstance(message, (Pong, Drained)):
                if isinstance(message, AdapterRejected):
                    self._lora_modules.on_rejected(message)
                await self._jobs.on_engine_message(message)

    async def _engine_ready(self, info: EngineInfo) -> None:
        self._health.info = info
        if not self._was_ready:
            self._was_ready = True
            for child in self._children.values():
                print("".join(f"{line}\n" for line in child.tail), end="", file=sys.stderr, flush=True)
            print_banner(info, self._config)
        for peer in self._workers:
            await self._control.send(peer, EngineUp(info=info))
        await self._jobs.on_engine_up(info)
