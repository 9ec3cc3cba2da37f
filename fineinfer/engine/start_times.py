"""What an engine's start spends its time on: users wait for it, and a slow part should show."""

from __future__ import annotations

import time

import psutil


class StartTimes:
    """Seconds of the phases of a start, from the process's creation on."""

    def __init__(self) -> None:
        self._since_s = psutil.Process().create_time()
        self._phases: list[str] = []
        self.ended("imports")

    def ended(self, phase: str) -> None:
        """A phase ends, the next begins."""
        now_s = time.time()
        self._phases.append(f"{phase} {now_s - self._since_s:.1f} s")
        self._since_s = now_s

    def __str__(self) -> str:
        return ", ".join(self._phases)
