"""What leaves the engine: outputs are collected during a turn and sent once per peer at its end."""

from __future__ import annotations

from collections.abc import Callable

from fineinfer.ipc import Router
from fineinfer.messages import EngineInfo, EngineStats, FromEngine, Outputs, Pong, RequestOutput, ToEngine


class Outbox:
    """Collects outputs by peer; knows who said hello.

    Args:
        router: The bound socket.
        info: Answer to ``Hello``.
        snapshot: Makes the current statistics.
        progress: Count of finished layers and units.
    """

    def __init__(
        self,
        router: Router[FromEngine, ToEngine],
        info: EngineInfo,
        snapshot: Callable[[], EngineStats],
        progress: Callable[[], int],
    ) -> None:
        self._router = router
        self._info = info
        self._snapshot = snapshot
        self._progress = progress
        self._outputs: dict[bytes, list[RequestOutput]] = {}
        self._supervisor_messages: list[FromEngine] = []
        self._peers: set[bytes] = set()

    def put(self, peer: bytes, output: RequestOutput) -> None:
        """Queue tokens or an end for the peer that asked."""
        self._outputs.setdefault(peer, []).append(output)

    def notify(self, message: FromEngine) -> None:
        """Queue a job, adapter or process event for the supervisor."""
        self._supervisor_messages.append(message)

    def greet(self, peer: bytes) -> None:
        """Answer a peer's ``Hello`` at once."""
        self._peers.add(peer)
        self._router.send(peer, self._info)
        self._router.send(peer, self._snapshot())

    def pong(self, peer: bytes, sequence: int) -> None:
        """Answer a health probe at once."""
        stats = self._snapshot()
        self._router.send(
            peer,
            Pong(
                sequence=sequence,
                boot_id=self._info.boot_id,
                progress=self._progress(),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
            ),
        )

    def answer(self, peer: bytes, message: FromEngine) -> None:
        """Answer a peer's question at once."""
        self._router.send(peer, message)

    def flush(self) -> None:
        """Send everything collected, tokens first."""
        for peer, outputs in self._outputs.items():
            self._router.send(peer, Outputs(outputs=outputs))
        self._outputs = {}
        for message in self._supervisor_messages:
            self._router.send(SUPERVISOR, message)
        self._supervisor_messages = []

    def broadcast_stats(self) -> None:
        """Send a statistics snapshot to every peer."""
        stats = self._snapshot()
        self._peers = {peer for peer in self._peers if self._router.send(peer, stats)}


SUPERVISOR = b"supervisor"  # identity of the supervisor's socket
