"""The api worker's side of the two sockets: requests to the engine, its life signs, news of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable

from fineinfer.ipc import AsyncDealer, ProtocolError
from fineinfer.messages import (
    AbortRequest,
    AdapterChecked,
    AddRequest,
    CheckAdapter,
    EngineDown,
    EngineInfo,
    EngineStats,
    EngineUp,
    FinishRequest,
    FromApi,
    FromEngine,
    Hello,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    SetBudget,
    ShuttingDown,
    StoreChanged,
    ToApi,
    ToEngine,
)
from fineinfer.request import FinishReason

logger = logging.getLogger(__name__)
PING_INTERVAL_S = 1.0
MAX_SILENCE_S = 10.0
ADAPTER_CHECK_S, ADAPTER_SERVED_S, POLL_S = 60.0, 15.0, 0.02


class EngineUnavailableError(Exception):
    """There is no engine to take the request now."""


class EngineClient:
    """All traffic of one api worker. Every submitted request gets exactly one terminal output.

    Args:
        engine_address: ``ipc://`` address of the engine.
        control_address: ``ipc://`` address of the supervisor.
        token: Shared secret of this server's processes.
        worker_index: Makes the peer name ``api-<index>``.

    Attributes:
        info: The running engine, None while there is none.
        stats: Its newest snapshot, kept for metrics when it is gone.
        shutting_down: No new requests are taken.
    """

    def __init__(self, engine_address: str, control_address: str, token: bytes, worker_index: int = 0) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.shutting_down = False
        self._control_address = control_address
        self._token = token
        self._identity = f"api-{worker_index}".encode()
        self._link = _EngineLink(engine_address, token, self._identity)
        self._control: AsyncDealer[FromApi, ToApi] | None = None
        self._life = _LifeSigns()
        self._open: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._checks: dict[str, list[asyncio.Future[str | None]]] = {}
        self._lost_boots: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Connect and say hello; the engine may come later."""
        self._control = AsyncDealer(self._control_address, self._token, self._identity, ToApi)
        self._link.open(self._on_engine_message)
        await self._control.send(Hello())
        self._tasks = [asyncio.create_task(self._read_control(self._control)), asyncio.create_task(self._ping())]

    async def close(self) -> None:
        """End open requests with an error, then disconnect."""
        self.shutting_down = True
        self.fail_open("The server is shutting down.")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()
        if self._control is not None:
            self._control.close()

    async def notify_store_changed(self) -> None:
        """Tell the supervisor that a user action was committed to the store."""
        if self._control is not None:
            await self._control.send(StoreChanged())

    @property
    def num_open(self) -> int:
        """Requests without a terminal output."""
        return len(self._open)

    def unavailable_reason(self) -> str | None:
        """Why no request can be served now; None when all is well.

        Well means: the engine answered a ping within the last 10 s, and its progress counter moved within the last
        10 s or nothing waits for it.
        """
        if self.shutting_down:
            return "The server is shutting down."
        if self.info is None:
            return "The engine is not ready."
        return self._life.trouble(time.monotonic())

    # ------------------------------------------------------------ requests

    def require_info(self) -> EngineInfo:
        """The running engine.

        Raises:
            EngineUnavailableError: There is none, or the server shuts down.
        """
        if self.shutting_down:
            raise EngineUnavailableError("The server is shutting down.")
        if self.info is None:
            raise EngineUnavailableError("The engine is not available; it is starting or being restarted.")
        return self.info

    def submit(self, request: AddRequest, inbox: asyncio.Queue[RequestOutput]) -> None:
        """Send a request; its outputs arrive in ``inbox``, which several requests may share.

        Raises:
            EngineUnavailableError: There is no engine.
        """
        self.require_info()
        self._open[request.request_id] = inbox
        self._link.post(request)

    def set_budget(self, num_bytes: int) -> None:
        """Ask for another memory budget.

        Raises:
            EngineUnavailableError: There is no engine.
        """
        self.require_info()
        self._link.post(SetBudget(num_bytes=num_bytes))

    async def check_adapter(self, version: str, directory: str) -> str | None:
        """Let the engine read an adapter folder; why it cannot be served, or None.

        Raises:
            EngineUnavailableError: There is no engine, or it does not answer in time.
        """
        self.require_info()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._checks.setdefault(version, []).append(answer)
        self._link.post(CheckAdapter(version=version, directory=directory))
        try:
            async with asyncio.timeout(ADAPTER_CHECK_S):
                return await answer
        except TimeoutError:
            raise EngineUnavailableError("The engine has not checked the adapter in time.") from None

    async def until_served(self, name: str, version: str) -> bool:
        """Wait until new requests for ``name`` get this version; False: not in time."""
        deadline = time.monotonic() + ADAPTER_SERVED_S
        while time.monotonic() < deadline and self.info is not None:
            stats = self.stats
            if stats is not None and stats.boot_id == self.info.boot_id and stats.adapter_versions.get(name) == version:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def finish(self, request_id: str, num_tokens: int) -> None:
        """A stop string ended the request after ``num_tokens`` tokens; later outputs are of no interest."""
        if self._open.pop(request_id, None) is not None:
            self._link.post(FinishRequest(request_id=request_id, num_tokens=num_tokens))

    def abort(self, request_id: str) -> None:
        """Nobody waits for the request any more. Does nothing when it has ended; never blocks and never fails."""
        if self._open.pop(request_id, None) is not None:
            self._link.post(AbortRequest(request_id=request_id))

    async def generate(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, the terminal one last; leaving the loop early aborts the request."""
        inbox: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.submit(request, inbox)
        try:
            while True:
                output = await inbox.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    # ------------------------------------------------------------ what arrives

    def _on_engine_message(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._on_output(output)
        elif isinstance(message, Pong):
            if self.info is not None and message.boot_id == self.info.boot_id:
                self._life.on_pong(message, time.monotonic())
        elif isinstance(message, EngineStats):
            if message.boot_id not in self._lost_boots:
                self.stats = message
        elif isinstance(message, EngineInfo):
            self._on_up(message, by_engine=True)
        elif isinstance(message, AdapterChecked):
            for answer in self._checks.pop(message.version, ()):
                if not answer.done():
                    answer.set_result(message.error)

    def _on_output(self, output: RequestOutput) -> None:
        inbox = self._open.get(output.request_id)
        if inbox is None:  # finished or aborted here a moment ago
            return
        if output.finish_reason is not None:
            del self._open[output.request_id]
        inbox.put_nowait(output)

    async def _read_control(self, control: AsyncDealer[FromApi, ToApi]) -> None:
        while True:
            try:
                message = await control.recv()
            except ProtocolError:
                logger.exception("dropped a message of the supervisor")
                continue
            if isinstance(message, EngineUp):
                self._on_up(message.info, by_engine=False)
            elif isinstance(message, EngineDown):
                logger.error("engine down: %s", message.reason)
                self._on_down()
            elif isinstance(message, ShuttingDown):
                self.shutting_down = True

    def _on_up(self, info: EngineInfo, *, by_engine: bool) -> None:
        if info.boot_id in self._lost_boots or (self.info is not None and info.boot_id == self.info.boot_id):
            return
        if self.info is not None:  # the supervisor's EngineDown is late or lost
            self._lost_boots.add(self.info.boot_id)
            self.fail_open("The engine was restarted.")
        if not by_engine:
            # nothing queued for a dead engine may reach its successor
            self._link.reopen()
        self._life = _LifeSigns(started_s=time.monotonic())
        self.info = info
        self._link.post(Ping(sequence=0))

    def _on_down(self) -> None:
        if self.info is not None:
            self._lost_boots.add(self.info.boot_id)
        self.info = None
        self.fail_open("The engine stopped; it is being restarted.")
        self._link.reopen()

    def fail_open(self, message: str) -> None:
        """End every open request with an error that clients may retry."""
        unchecked, self._checks = self._checks, {}
        for answer in (one for answers in unchecked.values() for one in answers if not one.done()):
            answer.set_exception(EngineUnavailableError(message))
        lost, self._open = self._open, {}
        for request_id, inbox in lost.items():
            inbox.put_nowait(
                RequestOutput(
                    request_id=request_id,
                    finish_reason=FinishReason.ERROR,
                    error_code="engine_overloaded",
                    error_message=message,
                )
            )

    async def _ping(self) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self.info is not None:
                sequence += 1
                self._link.post(Ping(sequence=sequence))


class _LifeSigns:
    """When the engine last answered, and when it last got on with its work."""

    def __init__(self, started_s: float = 0.0) -> None:
        self._answered_s: float | None = None
        self._moved_s = started_s
        self._progress: int | None = None

    def on_pong(self, pong: Pong, now_s: float) -> None:
        """Take note of an answer."""
        self._answered_s = now_s
        idle = pong.num_running == 0 and pong.num_waiting == 0
        if idle or pong.progress != self._progress:
            self._moved_s, self._progress = now_s, pong.progress

    def trouble(self, now_s: float) -> str | None:
        """What is wrong with the engine, or None."""
        if self._answered_s is None or now_s - self._answered_s > MAX_SILENCE_S:
            return "The engine does not answer."
        if now_s - self._moved_s > MAX_SILENCE_S:
            return "The engine makes no progress while requests wait."
        return None


class _EngineLink:
    """The socket to the engine with an outbox, so that sending is never a point where a caller can be cancelled."""

    def __init__(self, address: str, token: bytes, identity: bytes) -> None:
        self._address, self._token, self._identity = address, token, identity
        self._dealer: AsyncDealer[ToEngine, FromEngine] | None = None
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._on_message: Callable[[FromEngine], None]

    def open(self, on_message: Callable[[FromEngine], None]) -> None:
        """Connect; each message that arrives goes to ``on_message``."""
        self._on_message = on_message
        self._connect()

    def reopen(self) -> None:
        """Connect anew; what was not delivered yet is dropped."""
        self._disconnect()
        self._connect()

    def post(self, message: ToEngine) -> None:
        """Queue a message; never waits."""
        self._outbox.put_nowait(message)

    async def close(self) -> None:
        """Disconnect, after what is queued has been handed to the socket."""
        tasks = self._tasks
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._outbox.join(), 0.5)
        self._disconnect()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connect(self) -> None:
        dealer: AsyncDealer[ToEngine, FromEngine] = AsyncDealer(self._address, self._token, self._identity, FromEngine)
        self._dealer, self._outbox = dealer, asyncio.Queue()
        self.post(Hello(link=secrets.token_hex(8)))
        self._tasks = [
            asyncio.create_task(self._send(dealer, self._outbox)),
            asyncio.create_task(self._receive(dealer)),
        ]

    def _disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._dealer is not None:
            self._dealer.close()
        self._tasks, self._dealer = [], None

    async def _send(self, dealer: AsyncDealer[ToEngine, FromEngine], outbox: asyncio.Queue[ToEngine]) -> None:
        while True:
            await dealer.send(await outbox.get())
            outbox.task_done()

    async def _receive(self, dealer: AsyncDealer[ToEngine, FromEngine]) -> None:
        while True:
            try:
                message = await dealer.recv()
            except ProtocolError:
                logger.exception("dropped a message of the engine")
                continue
            try:
                self._on_message(message)
            except Exception:  # one odd message must not silence the engine for good
                logger.exception("could not handle a message of the engine")
