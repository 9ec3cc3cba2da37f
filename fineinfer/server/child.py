"""A process that the supervisor started."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Child:
    """A running child process and the last lines it wrote to stderr."""

    name: str
    process: asyncio.subprocess.Process
    tail: list[str] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None

    def reason(self) -> str:
        """Why it ended: its last ``error:`` line, else its exit code and the last line it wrote (a traceback's end)."""
        line = next((line for line in reversed(self.tail) if line.startswith("error: ")), None)
        if line is not None:
            return line.removeprefix("error: ")
        last = next((line.strip() for line in reversed(self.tail) if line.strip()), None)
        ended = f"{self.name} ended with code {self.process.returncode}"
        return ended if last is None else f"{ended}: {last}"
