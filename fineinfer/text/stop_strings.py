"""Stop strings over streamed text: never shown in part, cut exactly, whatever pieces the text comes in (no torch)."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete.

    The first stop string to be completed counts, of several completed by the same character the longest. Text that
    might be the beginning of a stop string is held back.

    Args:
        stops: Stop strings, none empty.
        include_stop: Let the matched string itself through.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """More text in, the text that may be shown out; empty once a stop string matched."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._first_complete(buffer)
        if found is not None:
            end, self.matched = found
            self._held = ""
            return buffer[: end if self._include else end - len(self.matched)]
        keep = self._possible_beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text still held back, when the sequence ended without a match."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, buffer: str) -> tuple[int, str] | None:
        ends = ((buffer.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in buffer)
        first = min(ends, default=None)
        return None if first is None else (first[0], first[2])

    def _possible_beginning(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that is the beginning of a stop string."""
        for size in range(min(len(buffer), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(buffer[-size:]) for stop in self._stops):
                return size
        return 0
