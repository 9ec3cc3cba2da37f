"""What `fineinfer serve` takes before it starts anything: the state folder's lock, the port, a folder for sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fineinfer.config import ServerConfig

MAX_FILES = 65_536  # of a process


class StartError(Exception):
    """The server cannot start or go on; the message is one line for the user."""


@contextlib.contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """Hold the state folder; two servers on one folder would train the same job twice.

    Raises:
        StartError: Another server has it, or it cannot be made.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle: IO[str] = open(state_dir / "lock", "w")  # noqa: SIM115 (held until exit)
    except OSError as error:
        raise StartError(f"state directory {state_dir}: {error.strerror or error}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(f"state directory {state_dir} is in use by another fineinfer serve") from None
        yield


@contextlib.contextmanager
def listening_socket(server: ServerConfig) -> Iterator[socket.socket]:
    """The TCP socket that all api workers accept from; bound first, so that a busy port is known at once.

    Raises:
        StartError: The address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise StartError(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from None
    with listener:
        yield listener


@contextlib.contextmanager
def runtime_dir() -> Iterator[Path]:
    """A 0700 folder for sockets, short enough for the 107 bytes of a Unix socket's path; removed at the end."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base is None or not os.access(base, os.W_OK) or len(base) > 60:
        base = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="fineinfer-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def raise_file_limit() -> int:
    """Let this process open as many files as it may, and return how many that are.

    Every open answer is a socket: a shell's usual 1,024 are gone in a burst at twice the capacity.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    with contextlib.suppress(OSError, ValueError):  # where the system sets another bound
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
