"""Fixtures of the server and text tests: a tiny tokenizer, and a real HTTP server over a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fineinfer.ipc import Router
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
    Hello,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    StoreChanged,
    ToEngine,
    TokenLogprob,
)

from ..waiting import LIMIT_S, until

TOKEN = b"t" * 32
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE tokenizer as Qwen and Llama 3 have one, with a handful of merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the quick brown fox says hello world, stop here\n\n"] * 20, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take seconds for the tiny products of a tiny model on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class FakeEngine:
    """Engine and supervisor in one thread, speaking the real messages.

    Each request gets the tokens of ``script(request)``, one every ``tick_s``, then its finish reason.
    """

    folder: Path
    script: Callable[[AddRequest], list[int]]
    eos: int
    vocab_size: int
    tick_s: float = 0.0
    boot: int = 0
    added: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[FinishRequest] = field(default_factory=list)
    open: dict[str, tuple[bytes, AddRequest, list[int]]] = field(default_factory=dict)
    store_changes: int = 0
    answer_pings: bool = True
    progress_moves: bool = True
    refuse: RequestOutput | None = None
    calls: list[Callable[[], None]] = field(default_factory=list)
    check: Callable[[CheckAdapter], str | None] | None = lambda message: None  # None: it never answers
    store: Any = None  # whose adapters are served as soon as a change of it is told; None: nothing is

    def __post_init__(self) -> None:
        self.addresses = [f"ipc://{self.folder}/engine", f"ipc://{self.folder}/control"]
        self._engine: Router[Any, Any] = Router(self.addresses[0], TOKEN, ToEngine)
        self._control: Router[Any, Any] = Router(self.addresses[1], TOKEN, FromApi)
        self._peers: set[bytes] = set()
        self.served: dict[str, str] = {}
        self._progress = 0
        self._up = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            boot_id=f"boot-{self.boot}", base_model="base", max_model_len=512, max_request_tokens=256, max_loras=3,
            vocab_size=self.vocab_size, eos_token_ids=[self.eos], dtype="float32", device="cpu", memory_plan={},
        )  # fmt: skip

    def stats(self) -> EngineStats:
        return EngineStats(
            boot_id=f"boot-{self.boot}", time_s=time.monotonic(), num_running=len(self.open), num_waiting=0,
            kv_slots_used=5, kv_slots_now=10, kv_slots_max=20, prompt_tokens_total=7, generation_tokens_total=11,
            num_preemptions_total=0, memory_bytes={"weights": 100}, train_loss=1.5, train_job_id="ftjob-1",
            train_job_device_s=2.5, slice_times_ms={"decode": 2.0}, adapter_versions=self.served,
            adapter_tiers={"v4": "loaded", "v8": "cpu"}, adapter_slots=3, adapter_slots_used=1, adapter_loads_total=9,
            adapter_evictions_total=5,
        )  # fmt: skip

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the engine's thread and wait for it."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self.calls.append(run)
        assert done.wait(LIMIT_S)

    def die(self) -> None:
        """The engine process ends; the supervisor says so."""

        def down() -> None:
            self._up = False
            self.open.clear()
            for peer in self._peers:
                self._control.send(peer, EngineDown(reason="killed", restarting=True))

        self.call(down)

    def come_back(self) -> None:
        def up() -> None:
            while self._engine.recv() is not None:  # what was sent to the dead engine
                pass
            self.boot += 1
            self._up = True
            for peer in self._peers:
                self._control.send(peer, EngineUp(info=self.info))

        self.call(up)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        self._engine.close()
        self._control.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            while self.calls:
                self.calls.pop(0)()
            while (item := self._control.recv()) is not None:
                peer, message = item
                self._peers.add(peer)
                self.store_changes += isinstance(message, StoreChanged)
                if isinstance(message, StoreChanged) and self.store is not None:
                    self.served = {record.name: record.version for record in self.store.adapters.current()}
                    self._engine.send(b"api-0", self.stats())
                if isinstance(message, Hello) and self._up:
                    self._control.send(peer, EngineUp(info=self.info))
            if self._up:
                self._engine_turn()
            time.sleep(self.tick_s or 0.0005)

    def _engine_turn(self) -> None:
        while (item := self._engine.recv()) is not None:
            self._handle(*item)
        for request_id, (peer, request, left) in list(self.open.items()):
            self._engine.send(peer, Outputs(outputs=[self._next(request_id, request, left)]))

    def _handle(self, peer: bytes, message: Any) -> None:
        if isinstance(message, Hello):
            self._engine.send(peer, self.info)
            self._engine.send(peer, self.stats())
        elif isinstance(message, Ping) and self.answer_pings:
            self._progress += self.progress_moves
            self._engine.send(peer, Pong(
                sequence=message.sequence, boot_id=f"boot-{self.boot}", progress=self._progress,
                num_running=len(self.open), num_waiting=0,
            ))  # fmt: skip
        elif isinstance(message, AddRequest):
            self.added.append(message)
            if self.refuse is not None:
                refusal = RequestOutput(
                    request_id=message.request_id, finish_reason="error", error_code=self.refuse.error_code,
                    error_message=self.refuse.error_message, error_param=self.refuse.error_param,
                )  # fmt: skip
                self._engine.send(peer, Outputs(outputs=[refusal]))
            else:
                self.open[message.request_id] = (peer, message, list(self.script(message)))
        elif isinstance(message, CheckAdapter) and self.check is not None:
            self._engine.send(peer, AdapterChecked(version=message.version, error=self.check(message)))
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            self._end(message.request_id, "abort")
        elif isinstance(message, FinishRequest):
            self.finished.append(message)
            self._end(message.request_id, "stop")

    def _end(self, request_id: str, reason: str) -> None:
        if request_id in self.open:
            peer = self.open.pop(request_id)[0]
            self._engine.send(peer, Outputs(outputs=[RequestOutput(request_id=request_id, finish_reason=reason)]))

    def _next(self, request_id: str, request: AddRequest, left: list[int]) -> RequestOutput:
        sampling = request.sampling
        done = len(self.script(request)) - len(left)
        token = left.pop(0)
        reason = None
        if (token == self.eos and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            reason = "stop"
        elif not left or done + 1 == sampling.max_tokens:
            reason = "length"
        if reason is not None:
            del self.open[request_id]
        entry = (
            [TokenLogprob(token, -0.5, [(token, -0.5), (1, float("-inf"))])] if sampling.logprobs is not None else None
        )
        prompt_entries = None
        if sampling.prompt_logprobs is not None and done == 0:
            prompt_entries = [None, *(TokenLogprob(i, -1.0, [(i, -1.0)]) for i in request.prompt_token_ids[1:])]
        return RequestOutput(
            request_id=request_id, token_ids=[token], logprobs=entry, prompt_logprobs=prompt_entries,
            finish_reason=reason, stop_token_id=token if token in sampling.stop_token_ids else None,
            adapter_version="sha" if request.adapter else None, adapter_step=4 if request.adapter else None,
            queue_s=0.001 if done == 0 else None,
        )  # fmt: skip


@dataclass
class LiveServer:
    """The application behind uvicorn on a loopback port."""

    url: str
    engine: FakeEngine
    tokenizer: Any
    app: Any
    http: Any  # an httpx.Client; making one for each request costs 50 ms

    @property
    def client(self) -> Any:
        """``EngineClient`` inside the server."""
        return self.app.state.engine

    def script(self, text: str, *, end: bool = True) -> None:
        """Let the engine answer every request with this text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False) + ([self.engine.eos] if end else [])
        self.engine.script = lambda request: ids


@pytest.fixture
def fake_engine(tmp_path: Path, tiny_tokenizer: Any) -> Iterator[FakeEngine]:
    eos = tiny_tokenizer.eos_token_id
    engine = FakeEngine(tmp_path, lambda request: [eos], eos, len(tiny_tokenizer))
    yield engine
    engine.close()


@pytest.fixture
def serve(tmp_path: Path, tiny_tokenizer: Any) -> Iterator[Callable[..., LiveServer]]:
    """Factory of live servers; arguments are ApiSettings fields, ``tokenizer`` and ``tick_s``."""
    import httpx
    import uvicorn

    from fineinfer.server.api_process import ApiSettings
    from fineinfer.server.app import create_app
    from fineinfer.server.engine_client import EngineClient
    from fineinfer.store import Store
    from fineinfer.text.tokenizer import TokenizerPool

    cleanups: list[Callable[[], Any]] = []

    def start(tokenizer: Any = tiny_tokenizer, tick_s: float = 0.0, **fields: Any) -> LiveServer:
        engine = FakeEngine(
            tmp_path, lambda request: [tokenizer.eos_token_id], tokenizer.eos_token_id, len(tokenizer), tick_s
        )
        cleanups.append(engine.close)
        settings = ApiSettings(
            engine_address=engine.addresses[0], control_address=engine.addresses[1], state_dir=str(tmp_path / "state"),
            **{"served_model_name": "base", **fields},
        )  # fmt: skip
        store = Store(settings.state_dir)
        cleanups.append(store.close)
        client = EngineClient(settings.engine_address, settings.control_address, TOKEN)
        app = create_app(settings, client, TokenizerPool(tokenizer), store)
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()

        cleanups.append(stop)
        until(lambda: server.started and client.info is not None and client.unavailable_reason() is None, "no start")
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        http = httpx.Client(base_url=url, timeout=LIMIT_S)
        cleanups.append(http.close)
        return LiveServer(url, engine, tokenizer, app, http)

    yield start
    for cleanup in reversed(cleanups):
        cleanup()
