"""Memory governor: one budget of bytes, leased to owners atomically (no torch)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

MAX_EVENTS = 1024


@dataclass(frozen=True)
class MemoryEvent:
    """One change of who holds how much, or one refusal.

    Attributes:
        at_s: ``time.monotonic()`` of the event.
        kind: ``lease``, ``refused``, ``release``, ``budget`` or a caller's own, such as ``kv_shrink``.
        owner: Who asked; empty for the budget itself.
        num_bytes: The owner's bytes after the event; for ``refused`` the bytes asked for.
        ms: How long the work behind the event took, in milliseconds; 0 for bookkeeping.
    """

    at_s: float
    kind: str
    owner: str
    num_bytes: int
    ms: float


class MemoryGovernor:
    """Grants leases from one budget. A lease is all or nothing and "no" is an ordinary answer, so that no other owner
    can take bytes between asking and using them. It moves no memory itself. One event loop owns it: no locks.

    Args:
        budget_bytes: Bytes all leases together may take.

    Attributes:
        events: The last ``MAX_EVENTS`` events, oldest first.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.events: deque[MemoryEvent] = deque(maxlen=MAX_EVENTS)
        self._leases: dict[str, int] = {}
        self.set_budget(budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """Bytes all leases together may take."""
        return self._budget_bytes

    @property
    def free_bytes(self) -> int:
        """Budget less leases; negative after a budget cut that the owners have not followed yet."""
        return self._budget_bytes - sum(self._leases.values())

    def leased(self, owner: str) -> int:
        """Bytes the owner holds."""
        return self._leases.get(owner, 0)

    def leases(self) -> dict[str, int]:
        """Each owner's bytes; a copy."""
        return dict(self._leases)

    def lease(self, owner: str, num_bytes: int) -> bool:
        """Set the owner's lease to ``num_bytes`` in all; giving back always succeeds, taking more only if it fits.

        Returns:
            False (and no change) if the bytes are negative or do not fit.
        """
        held = self.leased(owner)
        if num_bytes < 0 or (num_bytes > held and num_bytes - held > self.free_bytes):
            last = self.events[-1] if self.events else None
            if last is None or (last.kind, last.owner, last.num_bytes) != ("refused", owner, num_bytes):  # log once
                self.record("refused", owner, num_bytes)
            return False
        if num_bytes != held:
            self._leases[owner] = num_bytes
            self.record("lease", owner, num_bytes)
        return True

    def release(self, owner: str) -> None:
        """Give back all the owner holds; an owner without a lease is no error."""
        if self._leases.pop(owner, 0):
            self.record("release", owner, 0)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget, also below what is leased: ``free_bytes`` is negative until owners give back.

        Raises:
            ValueError: The budget is negative.
        """
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}.")
        self._budget_bytes = budget_bytes
        self.record("budget", "", budget_bytes)

    def record(self, kind: str, owner: str, num_bytes: int, ms: float = 0.0) -> None:
        """Log a step taken for a lease, such as a pool resize with its duration."""
        self.events.append(MemoryEvent(time.monotonic(), kind, owner, num_bytes, ms))

    def snapshot(self) -> dict[str, int]:
        """``budget_bytes``, ``free_bytes`` and, as ``lease:<owner>``, each owner's bytes; a copy."""
        leases = {f"lease:{owner}": num_bytes for owner, num_bytes in self._leases.items()}
        return {"budget_bytes": self._budget_bytes, "free_bytes": self.free_bytes, **leases}
