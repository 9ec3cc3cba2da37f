"""Writes a running job's metrics where people look at them: TensorBoard files always, trackers if the job asks.

Each writer has a thread, and each tracker a process too: one that hangs or breaks costs a warning, never the job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from fineinfer.messages import FromEngine, JobEnded, JobEval, JobProgress
from fineinfer.server.job_params import JobRequest
from fineinfer.store import JobRecord, Store

logger = logging.getLogger(__name__)
TENSORBOARD_DIR = "tensorboard"
METRICS_FILE = "metrics.jsonl"
MAX_WAITING = 1000  # points that a writer may be behind before it is given up
FINISH_S = 60.0  # that a tracker gets when its job has ended
CLOSE_S = 5.0  # that all writers get when the server stops

Values = dict[str, float]


class MetricsWriter(Protocol):
    """Where points go; used by one thread."""

    def write(self, step: int, time_s: float, values: Values) -> None:
        """One point; ``values`` by tag."""

    def close(self) -> None:
        """The job has ended or stopped."""

    def release(self) -> None:
        """Let go of files and processes, closed or not."""


class TensorBoardWriter:
    """An event file for TensorBoard and ``metrics.jsonl`` in one folder; each run of the job makes a new event file.

    Args:
        folder: Created if missing. Steps that are replayed after a crash replace, in TensorBoard, those written before.
    """

    def __init__(self, folder: Path) -> None:
        # 90 ms, so not before a job runs; no torch and no TensorFlow comes with it
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._begin: Any = SessionLog(status=SessionLog.START)
        now_s = time.time()
        name = f"events.out.tfevents.{int(now_s)}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._lines: IO[bytes] = (folder / METRICS_FILE).open("ab")
        self._put(Event(wall_time=now_s, file_version="brain.Event:2"))

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()  # to the kernel: about 20 us, and TensorBoard sees it at once

    def write(self, step: int, time_s: float, values: Values) -> None:
        """One point."""
        if self._begin is not None:
            self._put(self._event(wall_time=time_s, step=step, session_log=self._begin))
            self._begin = None
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._put(self._event(wall_time=time_s, step=step, summary=self._summary(value=scalars)))
        self._lines.write(msgspec.json.encode({"step": step, "time": round(time_s, 3), **values}) + b"\n")
        self._lines.flush()

    def close(self) -> None:
        """Close both files."""
        self._records.close()
        self._lines.close()

    def release(self) -> None:
        """Close both files, also when one cannot write its rest."""
        for file in (self._records, self._lines):
            with contextlib.suppress(OSError):
                file.close()


class TrackerProcess:
    """A tracker in a child, ``python -m fineinfer.server.tracker_child``, that reads points as JSON lines.

    Args:
        told: What the child must know, see there.
        log: Where its output goes.
        outbound: Whether it may know where to send, and with which key: it gets the server's environment then.
    """

    def __init__(self, told: dict[str, Any], log: Path, outbound: bool) -> None:
        kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items()
               if (outbound and not name.startswith("FINEINFER_")) or name in kept}  # fmt: skip
        self._log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fineinfer.server.tracker_child", json.dumps(told)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
                env={**env, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def write(self, step: int, time_s: float, values: Values) -> None:
        """One point; blocks while the child does not read."""
        stdin = self.process.stdin
        if stdin is None or self.process.poll() is not None:
            raise TrackerError(self._reason())
        try:
            stdin.write(msgspec.json.encode({"step": step, "time": time_s, "values": values}) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise TrackerError(self._reason()) from None

    def close(self) -> None:
        """Let it finish; it is killed if that takes longer than FINISH_S."""
        self._close_stdin()
        try:
            status = self.process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            raise TrackerError(f"it did not finish within {FINISH_S:g} s") from None
        if status != 0:
            raise TrackerError(self._reason())

    def release(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 2048))
            last = log.read().decode(errors="replace").strip().splitlines()
        return last[-1][:300] if last else f"it ended with status {self.process.returncode}"


class TrackerError(RuntimeError):
    """A tracker cannot go on; the message is for the job's events."""


class _Sink(threading.Thread):
    """Gives points to a writer in the background; the first error ends it.

    Args:
        name: For people.
        make: Makes the writer, in this thread.
        failed: Told the reason, once, from any thread.
    """

    def __init__(self, name: str, make: Callable[[], MetricsWriter], failed: Callable[[str, str], None]) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self._label, self._make, self._failed = name, make, failed
        self._points: queue.Queue[tuple[int, float, Values] | None] = queue.Queue(MAX_WAITING)
        self._writer: MetricsWriter | None = None
        self._dead = threading.Event()

    def put(self, point: tuple[int, float, Values] | None) -> None:
        """One more point, or None for the end; never waits."""
        try:
            if not self._dead.is_set():
                self._points.put_nowait(point)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING} points behind")

    def run(self) -> None:
        """Write until the end."""
        try:
            self._writer = self._make()
            while not self._dead.is_set() and (point := self._points.get()) is not None:
                self._writer.write(*point)
            self._writer.close()
        except Exception as error:  # whatever a tracker does, the job goes on
            self._give_up(str(error) or type(error).__name__)
        finally:
            if self._writer is not None:
                self._writer.release()

    def _give_up(self, reason: str) -> None:
        if not self._dead.is_set():
            self._dead.set()
            self._failed(self._label, " ".join(reason.split()))
        if isinstance(self._writer, TrackerProcess):
            self._writer.process.kill()  # so that a write to it ends


class JobTrackers:
    """Follows the job that runs; a watcher of ``JobReports``.

    Args:
        store: For the folders, and for warnings.
        allow_outbound: Whether trackers may send what they write.
    """

    def __init__(self, store: Store, allow_outbound: bool = False) -> None:
        self._store, self._allow_outbound = store, allow_outbound
        self._job_id: str | None = None
        self._sinks: list[_Sink] = []
        self._ending: list[_Sink] = []

    def see(self, job: JobRecord, message: FromEngine) -> None:
        """One message of the engine about a job, after it was committed; takes microseconds."""
        if isinstance(message, JobEnded):
            if job.id == self._job_id:
                self._stop()
            return
        if not isinstance(message, (JobProgress, JobEval)):
            return
        if job.id != self._job_id:  # the one before may have lost its engine and then its user
            self._stop()
            self._start(job)
        for sink in self._sinks:
            sink.put((message.step, time.time(), _values(message)))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let all writers finish, for a moment; what they have not written then is lost."""
        self._stop()
        deadline = time.monotonic() + timeout_s
        for sink in self._ending:
            sink.join(max(0.0, deadline - time.monotonic()))

    def _stop(self) -> None:
        for sink in self._sinks:
            sink.put(None)
        self._ending = [sink for sink in (*self._ending, *self._sinks) if sink.is_alive()]
        self._sinks, self._job_id = [], None

    def _start(self, job: JobRecord) -> None:
        folder = self._store.job_dir(job.id)
        makers: dict[str, Callable[[], MetricsWriter]] = {
            "TensorBoard": functools.partial(TensorBoardWriter, folder / TENSORBOARD_DIR)
        }
        for integration in msgspec.convert(job.request, JobRequest).integrations:
            kind = integration["type"]
            told, log = self._told(job, integration), folder / f"{kind}.log"
            makers[kind] = functools.partial(TrackerProcess, told, log, self._allow_outbound)

        def failed(name: str, reason: str) -> None:
            logger.warning("%s of %s: %s", name, job.id, reason)
            with contextlib.suppress(sqlite3.Error):  # the server is stopping
                text = f"{name} gets no more metrics of this job, which goes on: {reason}"
                self._store.jobs.add_event(job.id, "warn", text)

        self._job_id, self._sinks = job.id, [_Sink(name, make, failed) for name, make in makers.items()]
        for sink in self._sinks:
            sink.start()

    def _told(self, job: JobRecord, integration: dict[str, Any]) -> dict[str, Any]:
        kind = integration["type"]
        return {
            "kind": kind,
            "options": {"name": f"{job.name}-{job.id[6:12]}", **integration[kind]},  # trackio knows runs by name
            "job_id": job.id,
            "folder": str(self._store.state_dir / "trackers"),
            "job_dir": str(self._store.job_dir(job.id)),
            "outbound": self._allow_outbound,
            "config": {"model": job.request["model"], "settings": job.settings},
        }


def _values(message: JobProgress | JobEval) -> Values:
    """The message's numbers by TensorBoard's tags."""
    if isinstance(message, JobProgress):
        return {
            "train/loss": message.loss,
            "train/learning_rate": message.learning_rate,
            "train/grad_norm": message.grad_norm,
            "train/epoch": message.epoch,
            "train/mean_token_accuracy": message.mean_token_accuracy,
            "train/tokens_per_second": message.tokens_per_s,
        }
    return {"eval/loss": message.loss, "eval/mean_token_accuracy": message.mean_token_accuracy}
