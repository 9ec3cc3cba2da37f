"""A ``fineinfer serve`` process of our own on a free port, with a temporary state folder, for the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fineinfer.cli.client import CliError
from fineinfer.config import ENV_PREFIX, SETTINGS

_STOP_GRACE_S = 20.0
_LOG_TAIL_LINES = 15


class LocalServer:
    """The running process.

    Args:
        process: Leader of its own process group.
        url: ``http://127.0.0.1:PORT``.
        log_path: Where its output goes.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.url = url
        self._process, self._log_path = process, log_path

    def check_alive(self) -> None:
        """Raise CliError with the end of the log if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise CliError(f"the server ended with exit code {code}; the end of its log:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the server's output."""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def wait_until_ready(self, timeout_s: float, show: Callable[[str], None]) -> None:
        """Wait for ``/health``; ``show`` gets the newest log line while waiting.

        Raises:
            CliError: The server ended or is not ready in time.
        """
        import httpx2

        deadline_s = time.monotonic() + timeout_s
        with httpx2.Client(trust_env=False, timeout=2.0) as client:
            while time.monotonic() < deadline_s:
                self.check_alive()
                with contextlib.suppress(httpx2.HTTPError):  # not listening yet
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                show(self.log_tail(1))
                time.sleep(0.2)
        raise CliError(f"the server was not ready within {timeout_s:.0f} s; the end of its log:\n{self.log_tail()}")

    def stop(self) -> None:
        """Ctrl-C, and if that does not end it in time, kill its whole group."""
        for sign, grace_s in ((signal.SIGINT, _STOP_GRACE_S), (signal.SIGTERM, 5.0)):
            if self._process.poll() is None:
                self._process.send_signal(sign)
                try:
                    self._process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    continue
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # workers whose parent had to be killed
        except ProcessLookupError:
            pass
        self._process.wait()


@contextmanager
def local_server(*flags: str) -> Iterator[LocalServer]:
    """Start the embedded model on a free port; stop it and remove its state afterwards.

    Args:
        flags: More flags of ``fineinfer serve``.
    """
    with tempfile.TemporaryDirectory(prefix="fineinfer-demo-") as folder:
        port = _free_port()
        command = [sys.executable, "-m", "fineinfer.cli", "serve", "--port", str(port)]
        command += ["--state-dir", f"{folder}/state", "--shutdown-timeout", "5", *flags]
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            # its own session: Ctrl-C in the terminal reaches the demo only, which then stops the server in order
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_clean_environment(),
                start_new_session=True,
            )
        server = LocalServer(process, f"http://127.0.0.1:{port}", log_path)
        try:
            with _ending_in_order():
                yield server
        finally:
            server.stop()


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM ends the program as an exception, so that what it has started is stopped."""
    if threading.current_thread() is not threading.main_thread():  # which may set no handler
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clean_environment() -> dict[str, str]:
    """Our environment without the user's server settings, which are not meant for this server."""
    settings = {ENV_PREFIX + name.upper() for name in SETTINGS}
    return {name: value for name, value in os.environ.items() if name not in settings} | {"PYTHONSAFEPATH": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
