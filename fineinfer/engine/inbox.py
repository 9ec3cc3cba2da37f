"""What arrives at the engine: drained once per loop turn, each message handled so that none can end the loop."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque

from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.engine.outbox import Outbox
from fineinfer.ipc import Router
from fineinfer.messages import (
    AbortRequest,
    AddRequest,
    FinishRequest,
    FromEngine,
    Hello,
    Ping,
    RequestOutput,
    ToEngine,
)
from fineinfer.request import FinishReason, InvalidRequestError
from fineinfer.scheduler.scheduler import Scheduler
from fineinfer.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

# The api worker has found the name in the store; the supervisor's word of it comes by another socket and may be later.
ADAPTER_GRACE_S = 2.0
# Adapters that always have requests would keep their slots for ever; after this long one of them stands back.
SLOT_PATIENCE_S = 1.0


class RequestDesk:
    """Opens and closes requests: checks them again at the door of the engine, pins their adapter version.

    Args:
        scheduler: Owner of the queues.
        adapters: Adapter versions and slots.
        outbox: Where refusals go.
        max_request_tokens: Prompt plus output of one request never exceeds this.
        vocab_size: Token ids are below this.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        adapters: AdapterRegistry,
        outbox: Outbox,
        max_request_tokens: int,
        vocab_size: int,
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._outbox = outbox
        self._max_request_tokens = max_request_tokens
        self._vocab_size = vocab_size
        self.open: dict[str, Sequence] = {}
        self.without_slot: deque[Sequence] = deque()  # all adapter slots are pinned by others; retried each turn
        self.draining = False

    def add(self, peer: bytes, message: AddRequest) -> None:
        """Accept a request or answer it with an error; nothing in between."""
        try:
            sequence = self._check(peer, message)
        except InvalidRequestError as error:
            self._outbox.put(
                peer,
                RequestOutput(
                    request_id=message.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_code=error.code,
                    error_message=error.message,
                    error_param=error.param,
                ),
            )
            return
        self.open[sequence.request_id] = sequence
        if sequence.adapter_name is None:
            self._scheduler.add(sequence)
        else:
            self._resolve(sequence)  # the version that its name means on arrival
            self.without_slot.append(sequence)

    def _check(self, peer: bytes, message: AddRequest) -> Sequence:
        if self.draining:
            raise InvalidRequestError("The server is shutting down.", code="engine_overloaded")
        if message.request_id in self.open:
            raise InvalidRequestError(f"Request id {message.request_id} is already in use.", "request_id")
        prompt = message.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("The prompt must have at least one token.", "prompt")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise InvalidRequestError(f"Token ids must be between 0 and {self._vocab_size - 1}.", "prompt")
        message.sampling.check(self._vocab_size)
        limit = self._max_request_tokens
        wanted = len(prompt) + (message.sampling.max_tokens or 1)
        if wanted > limit:
            raise InvalidRequestError(
                f"{len(prompt)} prompt tokens and {message.sampling.max_tokens or 1} new ones exceed the {limit} "
                "tokens that one request can have.",
                "max_tokens" if len(prompt) < limit else "prompt",
                "context_length_exceeded",
            )
        max_tokens = message.sampling.max_tokens
        return Sequence(
            request_id=message.request_id,
            peer=peer,
            prompt=prompt,
            sampling=message.sampling,
            max_total_tokens=limit if max_tokens is None else len(prompt) + max_tokens,
            arrival_s=message.arrival_s,
            seed=secrets.randbits(63) if message.sampling.seed is None else message.sampling.seed,
            adapter_name=message.adapter,
            cache_salt=message.cache_salt,
            priority=message.priority,
        )

    def _resolve(self, sequence: Sequence) -> None:
        version = None if sequence.adapter_name is None else self._adapters.resolve(sequence.adapter_name)
        if version is not None:
            sequence.adapter_version, sequence.adapter_step = version.version, version.step

    def assign_adapter_slots(self) -> None:
        """Hand free adapter slots to requests in order of arrival; the rest go on waiting for one.

        For a version that has waited too long one slot is drained: requests for what is in it wait from then on.
        """
        refused: set[str | None] = set()
        for _ in range(len(self.without_slot)):
            sequence = self.without_slot.popleft()
            if sequence.adapter_version is None:
                self._resolve(sequence)
            version, slot = sequence.adapter_version, None
            if version is None and self._is_unknown(sequence):
                message = f"The model {sequence.adapter_name} does not exist."
                self.end(sequence, FinishReason.ERROR, "model_not_found", message)
                continue
            if version is not None and version not in refused:
                try:
                    slot = self._adapters.acquire(version)
                except Exception as error:  # a broken adapter folder ends its own requests only
                    logger.warning("adapter %s could not be loaded: %s", sequence.adapter_name, error)
                    message = f"The adapter could not be loaded: {error}"
                    self.end(sequence, FinishReason.ERROR, "adapter_not_found", message)
                    continue
            if slot is None:
                refused.add(version)
                self.without_slot.append(sequence)
            else:
                sequence.adapter_slot = slot
                self._scheduler.add(sequence)
        oldest = next((one for one in self.without_slot if one.adapter_version is not None), None)
        overdue = oldest is not None and now_s() - oldest.arrival_s > SLOT_PATIENCE_S
        self._adapters.claim(oldest.adapter_version if oldest is not None and overdue else None)

    def _is_unknown(self, sequence: Sequence) -> bool:
        expected = sequence.adapter_name in self._adapters.expected
        return not expected and now_s() - sequence.arrival_s > ADAPTER_GRACE_S

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        sequence = self.open.get(request_id)
        if sequence is not None:
            self.end(sequence, FinishReason.ABORT)

    def abort_all(self, peer: bytes) -> None:
        """A peer is gone, and all its clients with it; nothing is sent."""
        for sequence in [sequence for sequence in self.open.values() if sequence.peer == peer]:
            self.release(sequence, FinishReason.ABORT)

    def finish_early(self, message: FinishRequest) -> None:
        """A stop string matched in the api worker: the request ends with its first ``num_tokens`` tokens."""
        sequence = self.open.get(message.request_id)
        if sequence is not None:
            del sequence.output[max(0, message.num_tokens) :]
            self.end(sequence, FinishReason.STOP)

    def end(
        self, sequence: Sequence, reason: FinishReason, error_code: str | None = None, error: str | None = None
    ) -> None:
        """End a request outside a step's normal results and send its terminal message."""
        self._outbox.put(
            sequence.peer,
            RequestOutput(
                request_id=sequence.request_id,
                finish_reason=reason,
                adapter_version=sequence.adapter_version,
                adapter_step=sequence.adapter_step,
                error_code=error_code,
                error_message=error,
            ),
        )
        self.release(sequence, reason)

    def release(self, sequence: Sequence, reason: FinishReason) -> None:
        """Free all a request holds; its terminal message is already in the outbox."""
        if self.open.pop(sequence.request_id, None) is None:
            return
        if sequence.adapter_name is not None and sequence.adapter_slot is None:  # never got a slot: never scheduled
            sequence.finish_reason = reason
            with contextlib.suppress(ValueError):
                self.without_slot.remove(sequence)
            return
        self._scheduler.finish(sequence, reason)
        if sequence.adapter_version is not None:
            self._adapters.release(sequence.adapter_version)


class Inbox:
    """Drains the socket and hands each message to the part that it concerns."""

    def __init__(self, router: Router[FromEngine, ToEngine], desk: RequestDesk, outbox: Outbox) -> None:
        self._router = router
        self._desk = desk
        self._outbox = outbox
        self._links: dict[bytes, str] = {}

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message arrives, at most ``timeout_s``."""
        self._router.poll(int(timeout_s * 1000))

    @property
    def has_mail(self) -> bool:
        """Whether a message waits."""
        return self._router.poll(0)

    def drain(self) -> list[tuple[bytes, ToEngine]]:
        """Handle all request traffic; return the messages that concern jobs, adapters, memory or the process."""
        others: list[tuple[bytes, ToEngine]] = []
        while (item := self._router.recv()) is not None:
            peer, message = item
            if isinstance(message, AddRequest):
                self._desk.add(peer, message)
            elif isinstance(message, AbortRequest):
                self._desk.abort(message.request_id)
            elif isinstance(message, FinishRequest):
                self._desk.finish_early(message)
            elif isinstance(message, Hello):
                self._greet(peer, message.link)
            elif isinstance(message, Ping):
                self._outbox.pong(peer, message.sequence)
            else:
                others.append(item)
        self._desk.assign_adapter_slots()
        return others

    def _greet(self, peer: bytes, link: str) -> None:
        if link:
            if self._links.get(peer, link) != link:  # an api worker that died, or gave this engine up
                self._desk.abort_all(peer)
            self._links[peer] = link
        self._outbox.greet(peer)


def now_s() -> float:
    """Seconds on the clock that all processes of the machine share."""
    return time.monotonic()
