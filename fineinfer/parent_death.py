"""No process of a server outlives the one that started it (no torch)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends; does nothing elsewhere than on Linux.

    Args:
        parent_pid: ``os.getppid()`` as the process's first act.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call
        sys.exit(1)
