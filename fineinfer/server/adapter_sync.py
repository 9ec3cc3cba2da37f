"""Keeps the engine's adapter names in line with the store, which always commits first (no torch)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from fineinfer.messages import RemoveAdapter, SetAdapter, ToEngine
from fineinfer.store import Store


class AdapterSync:
    """What one engine process was told about adapters, and what it must hear next.

    Args:
        store: The registry.
        send: Sends a message to the engine.
    """

    def __init__(self, store: Store, send: Callable[[ToEngine], Awaitable[None]]) -> None:
        self._store = store
        self._send = send
        self._lock = asyncio.Lock()
        self._told: dict[tuple[str, int], SetAdapter] | None = None  # by (name, step)

    def engine_is_new(self) -> None:
        """The engine knows nothing yet."""
        self._told = {}

    def engine_is_gone(self) -> None:
        """Nobody listens."""
        self._told = None

    async def send_news(self) -> None:
        """Tell the engine what it does not know yet; without an engine, nothing happens."""
        async with self._lock:  # an older view of the store must not be sent after a newer one
            told = self._told
            if told is None:
                return
            for message in self._news(told):
                if self._told is not told:  # the engine died meanwhile: its successor is told everything
                    return
                if isinstance(message, RemoveAdapter):
                    for key in [key for key in told if key[0] == message.name]:
                        del told[key]
                else:
                    if message.current:
                        told.update({key: _former(told[key]) for key in told if key[0] == message.name})
                    told[message.name, message.step] = message
                await self._send(message)

    def _news(self, told: dict[tuple[str, int], SetAdapter]) -> list[RemoveAdapter | SetAdapter]:
        """Removals first; the version that a name means comes last."""
        adapters = sorted(self._store.adapters.all(), key=lambda adapter: adapter.current)
        gone = {name for name, _ in told} - {adapter.name for adapter in adapters}
        news: list[RemoveAdapter | SetAdapter] = [RemoveAdapter(name=name) for name in sorted(gone)]
        for adapter in adapters:
            message = SetAdapter(
                name=adapter.name,
                version=adapter.version,
                step=adapter.step,
                directory=adapter.directory,
                current=adapter.current,
                pinned=adapter.pinned and adapter.current,
            )
            before = told.get((adapter.name, adapter.step))
            # that another version is current now needs no message: the new one's says so
            if before is None or message not in (before, _former(before)):
                news.append(message)
        return news


def _former(message: SetAdapter) -> SetAdapter:
    """The same version when the name means another one."""
    return msgspec.structs.replace(message, current=False, pinned=False)
