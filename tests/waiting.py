"""Waiting for what another thread or process does: until it holds, not for a time that usually suffices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
LIMIT_S = 120.0  # what hangs reaches it, what is slow on a busy machine does not


def until(condition: Callable[[], Value], what: str = "the condition never held") -> Value:
    """The condition's first true value; ``AssertionError`` with ``what`` when there is none in time."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value
