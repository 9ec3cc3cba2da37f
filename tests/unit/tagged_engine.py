"""A stand-in for the model that writes tags instead of keys and values, so that any mix-up is an exact mismatch.

A slot's tag names who wrote it, for which position, adapter weights and salt, after which tokens, and which mapping of
the slot's memory it was written to. Before a step writes, all that it would attend to is compared. The chosen token
depends on what was read back, so a mix-up that slipped through would show in the answer too.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fineinfer.adapters.registry import AdapterRegistry, AdapterStacks
from fineinfer.engine.runners import RunnerParts
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool
from fineinfer.memory.slot_allocator import SlotIds
from fineinfer.messages import FromEngine, Outputs, ToEngine
from fineinfer.runner.results import ChunkResult, FinishedStep
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

from .engine_harness import CONFIG, Harness

OWNER, POSITION, VERSION, SALT, CHAIN, MAPPING, FAILED = range(7)
FIELDS = ("owner", "position", "adapter version", "salt", "tokens before", "mapping epoch", "failed step")
POISON, BREAKER = 95, 96  # as last token of a prompt: logits that are not finite, a forward that raises
STEP_S = 2e-3


class TaggedPool(KVPool):
    """A pool that counts how often the memory of each slot was mapped.

    Attributes:
        tags: Of each layer int64 [max_slots, 16], the pool's own memory.
        mappings: int64 [max_slots].
    """

    mappings: np.ndarray | None = None

    def resize(self, num_slots: int) -> int:
        if self.mappings is None:
            self.tags = [self.layer(i).flatten(1).numpy().view(np.int64) for i in range(self.spec.num_layers)]
            self.mappings = np.zeros(self.max_slots, dtype=np.int64)
        before = self.num_slots
        now = super().resize(num_slots)
        self.mappings[before:now] += 1
        return now

    def move(self, src: SlotIds, dst: SlotIds) -> None:
        super().move(src, dst)
        for tags in self.tags:
            tags[dst, MAPPING] = self.mappings[dst]


@dataclass
class _State:
    """What the device knows of a sequence: its tokens, those in flight included, and who wrote its rows."""

    tokens: list[int] = field(default_factory=list)
    owner: int = 0
    num_preemptions: int = -1
    chain: list[int] = field(default_factory=list)


class TaggedRunner:
    """A ``Runner`` over ``TaggedPool``; steps run when they are launched, and are collected late if so asked.

    Args:
        kv_cache: With a ``TaggedPool``.
        adapters: Whose weights are read.
        max_in_flight: As of the runner that it stands in for: 0 on a CPU, 1 on a GPU.
        clock: Steps take time on it.
    """

    def __init__(self, kv_cache: KVCache, adapters: AdapterRegistry, max_in_flight: int, clock: Clock) -> None:
        self._kv, self._pool, self._stacks = kv_cache, kv_cache.pool, adapters.stacks
        self._clock, self._owners = clock, itertools.count(1)
        self._states: weakref.WeakKeyDictionary[Sequence, _State] = weakref.WeakKeyDictionary()
        self.max_in_flight, self.progress = max_in_flight, 0
        self.num_rows = self.num_shared = 0

    def launch(self, chunks: tuple[Chunk, ...]) -> FinishedStep:
        if any(chunk.sequence.prompt[-1] == BREAKER for chunk in chunks):
            raise RuntimeError("a request that breaks the forward")
        slots = {chunk.sequence.adapter_slot for chunk in chunks}
        versions = {slot: fingerprint(self._stacks, slot) for slot in slots}
        results = [self._run(chunk, versions[chunk.sequence.adapter_slot]) for chunk in chunks]
        self.progress += 1
        self._clock(STEP_S)
        num_rows = sum(chunk.length for chunk in chunks)
        return FinishedStep(results, STEP_S, num_rows, num_rows == len(chunks))

    def _run(self, chunk: Chunk, version: int) -> ChunkResult:
        sequence, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
        state = self._state(sequence)
        salt = salt_number(sequence.cache_salt)
        chain = state.chain
        value = chain[-1] if chain else version ^ salt
        if stop > len(state.tokens):
            raise MixUpError(f"{sequence.request_id}: the token at {stop - 1} is not known")
        for position in range(len(chain), stop):
            value = follow(value, state.tokens[position])
            chain.append(value)
        slots = self._kv.slots(sequence.row)[:stop]
        expected = np.zeros((stop, len(FIELDS)), dtype=np.int64)
        expected[:, OWNER], expected[:, POSITION] = state.owner, np.arange(stop)
        expected[:, VERSION], expected[:, SALT], expected[:, CHAIN] = version, salt, chain[:stop]
        expected[:, MAPPING] = self._pool.mappings[slots]
        failed = sequence.prompt[-1] == POISON and stop >= len(sequence.prompt)
        num_shared = min(sequence.num_cached, start)
        for layer, tags in enumerate(self._pool.tags):
            found = tags[slots[:start], : len(FIELDS)]
            wrong = found != expected[:start]
            wrong[:num_shared, OWNER] = found[:num_shared, OWNER] == 0
            if failed:
                wrong[num_shared:, FAILED] = False
            if wrong.any():
                position, name = np.argwhere(wrong)[0]
                raise MixUpError(
                    f"{sequence.request_id}, layer {layer}, position {position} of {start} ({num_shared} shared): "
                    f"{FIELDS[name]} is {found[position, name]}, not {expected[position, name]}"
                )
            expected[start:, FAILED] = failed
            tags[slots[start:], : len(FIELDS)] = expected[start:]
        self.num_rows += chunk.length
        self.num_shared += num_shared * (start == num_shared)
        if not chunk.samples:
            return ChunkResult(chunk, None)
        last = self._pool.tags[-1][slots[-1]]
        token = (int(last[CHAIN]) // 97 + int(last[VERSION])) % CONFIG["vocab_size"]
        state.tokens.append(token)
        return ChunkResult(chunk, token, failed=failed)

    def _state(self, sequence: Sequence) -> _State:
        known = sequence.tokens(0, len(sequence.prompt) + len(sequence.output))
        state = self._states.setdefault(sequence, _State())
        if state.num_preemptions != sequence.num_preemptions:  # a new row, which has what the host knows
            state.num_preemptions, state.owner, state.tokens = sequence.num_preemptions, next(self._owners), known
        elif known != state.tokens[: len(known)]:
            raise MixUpError(f"{sequence.request_id} was given tokens that are not its own")
        return state


class MixUpError(BaseException):
    """Not an Exception: the engine must not take it for a request's own failure."""


def follow(value: int, token: int) -> int:
    return (value * 6364136223846793005 + token + 1442695040888963407) % 2**62


def salt_number(salt: str | None) -> int:
    return zlib.crc32((salt or "").encode())


def fingerprint(stacks: AdapterStacks, slot: int | None) -> int:
    """Of the weights that are in an adapter slot now; 0 for the base model."""
    if slot is None:
        return 0
    parts = (stacks.a(0, "q_proj")[slot], stacks.b(1, "down_proj")[slot])
    data = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


class Clock:
    """Time that passes only when it is looked at, so that a run depends on its seed alone."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self, seconds: float = 5e-5) -> float:
        self.now_s += seconds
        return self.now_s


def on_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let the engine's loop, ladder and trainer look at this clock; a unit of training takes a millisecond and more."""
    for module in ("loop", "inbox"):
        monkeypatch.setattr(f"fineinfer.engine.{module}.now_s", clock)
    ticks = SimpleNamespace(monotonic=clock, perf_counter=lambda: clock(1e-3))
    for module in ("memory_ladder", "rungs", "training_host", "job_reports"):
        monkeypatch.setattr(f"fineinfer.engine.{module}.time", ticks)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are not worth a second thread, least of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class LocalWire:
    """Router of an engine without a socket: messages in order, at once."""

    def __init__(self, outputs: dict[str, list]) -> None:
        self.inbound: list[tuple[bytes, ToEngine]] = []
        self._outputs = outputs

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.inbound)

    def recv(self) -> tuple[bytes, ToEngine] | None:
        return self.inbound.pop(0) if self.inbound else None

    def send(self, peer: bytes, message: FromEngine) -> bool:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._outputs[output.request_id].append(output)
        return True


class TaggedHarness(Harness):
    """An engine with all its parts, but for the model that serves and the socket."""

    def __init__(self, folder: Path, clock: Clock, max_in_flight: int = 0, **settings: object) -> None:
        def stand_in(parts: RunnerParts, kv_cache: KVCache) -> TaggedRunner:
            return TaggedRunner(kv_cache, parts.adapters, max_in_flight, clock)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fineinfer.engine.process.make_runner", stand_in)
            patched.setattr("fineinfer.engine.process.KVPool", TaggedPool)
            super().__init__(folder, **settings)
        self.clock = clock
        self._bound, self.wire = self.parts.inbox._router, LocalWire(self.outputs)
        self.parts.inbox._router = self.parts.outbox._router = self.wire

    def add(self, *args: Any, **params: object) -> None:
        super().add(*args, **params)
        peer, request = self.wire.inbound.pop()
        self.wire.inbound.append((peer, msgspec.structs.replace(request, arrival_s=self.clock())))

    def send(self, message: object) -> None:
        self.wire.inbound.append((b"api", message))

    def close(self) -> None:
        self._socket.close(0)
        self._bound.close()
