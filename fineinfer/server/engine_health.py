"""When the supervisor calls an engine stuck."""

from __future__ import annotations

from dataclasses import dataclass

from fineinfer.messages import EngineInfo

STUCK_S = 10.0  # silence that ends an engine, unless its slices are known to take long


@dataclass
class EngineHealth:
    """When the engine was last heard, and how long its silence may last."""

    info: EngineInfo | None = None
    last_heard_s: float | None = None
    longest_slice_s: float = 0.0

    def is_stuck(self, now_s: float) -> bool:
        """Whether the engine was silent for longer than any slice explains."""
        if self.last_heard_s is None:
            return False
        return now_s - self.last_heard_s > max(STUCK_S, 5.0 * self.longest_slice_s)
