"""Runs the data child for one job and commits its verdict."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fineinfer.data.packed import SUMMARY_FILE, read_summary
from fineinfer.data.prepare import EXIT_BAD_FILE, PROBLEMS_FILE, PrepareSettings
from fineinfer.data.problems import ProblemReport
from fineinfer.messages import TrainingSettings
from fineinfer.server.job_creation import TRAINING_FILE, VALIDATION_FILE
from fineinfer.server.job_params import JobRequest, data_settings, resolve_settings
from fineinfer.store import JobRecord, JobStateConflictError, JobStatus, Store

logger = logging.getLogger(__name__)
_LOG_FILE = "prepare.log"
_NAMED_IN_ERROR = 3  # bad lines in the job's error message; the events name up to 20
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME")


@dataclass(frozen=True)
class JobSettings:
    """What jobs on this server have in common.

    Attributes:
        base_model: Served name of the base model.
        model: Folder, .gguf file or hub id of the base model; None: the embedded one.
        revision: Branch, tag or commit of a hub id.
        max_lora_rank: Largest rank the engine serves.
        defaults: What ``auto`` and unset hyperparameters mean.
    """

    base_model: str
    model: str | None = None
    revision: str | None = None
    max_lora_rank: int = 64
    defaults: TrainingSettings = field(default_factory=TrainingSettings)


def model_path(settings: JobSettings) -> Path:
    """Folder (or .gguf file) of the base model; asks the hub for what is not there."""
    from fineinfer.model.resolve import resolve_model_path  # the hub library is slow to import

    return resolve_model_path(settings.model, revision=settings.revision, need_weights=False)


class Validation:
    """One run of ``python -m fineinfer.data.prepare``.

    Args:
        store: The registry.
        settings: The base model and defaults.
        job: A job in ``validating_files``.
        max_model_len: Longest sequence the model can take, in tokens.
    """

    def __init__(self, store: Store, settings: JobSettings, job: JobRecord, max_model_len: int) -> None:
        self._store = store
        self._settings = settings
        self._job = job
        self._request = msgspec.convert(job.request, JobRequest)
        longest = min(settings.defaults.max_seq_length, max_model_len)
        self._max_seq_length = min(self._request.hyperparameters.get("max_seq_length", longest), max_model_len)
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def job_id(self) -> str:
        """The job being validated."""
        return self._job.id

    def start(self, done: Callable[[], None]) -> None:
        """Begin; ``done`` is called when the verdict is committed or the child was killed."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: done())

    def kill(self) -> None:
        """The verdict is not wanted any more."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """Kill the child and wait until it is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        folder = self._store.job_dir(self.job_id)
        try:
            status = await self._run_child(folder)
            with contextlib.suppress(JobStateConflictError):  # cancelled while the verdict was written
                if self._store.jobs.require(self.job_id).status is JobStatus.VALIDATING:
                    self._commit(folder, status)
        except Exception as error:  # a job that cannot be validated fails; the others must go on
            logger.exception("validation of %s broke", self.job_id)
            self._fail("server_error", f"The file could not be prepared: {error}", None)
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    async def _run_child(self, folder: Path) -> int:
        for name in (SUMMARY_FILE, PROBLEMS_FILE):
            (folder / name).unlink(missing_ok=True)
        # the engine is up, so the model's files are here already
        path = await asyncio.to_thread(model_path, self._settings)
        told = folder / "prepare.json"
        told.write_bytes(
            msgspec.json.encode(
                PrepareSettings(
                    source=str(folder / TRAINING_FILE),
                    job_dir=str(folder),
                    model_path=str(path),
                    max_seq_length=self._max_seq_length,
                    data=data_settings(self._request),
                    validation=None if self._request.validation_file is None else str(folder / VALIDATION_FILE),
                    validation_split=self._request.hyperparameters.get("validation_split", 0.0),
                    seed=self._request.seed,
                )
            )
        )
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        with (folder / _LOG_FILE).open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fineinfer.data.prepare", str(told),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=log,
                start_new_session=True,  # Ctrl-C is the supervisor's; the closing pipe ends the child
                env={**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
        return await self._process.wait()

    def _commit(self, folder: Path, status: int) -> None:
        if status == 0:
            self._accept(folder)
        elif status == EXIT_BAD_FILE and (folder / PROBLEMS_FILE).exists():
            report = msgspec.json.decode((folder / PROBLEMS_FILE).read_bytes(), type=ProblemReport)
            self._refuse(report)
        else:
            last = (folder / _LOG_FILE).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
            reason = last[-1][:300] if last else f"the process ended with status {status}"
            self._fail("server_error", f"The file could not be prepared: {reason}", None)

    def _accept(self, folder: Path) -> None:
        summary = read_summary(folder)
        defaults = msgspec.structs.replace(self._settings.defaults, max_seq_length=self._max_seq_length)
        resolved = resolve_settings(self._request, summary.examples, defaults)
        with self._store.db.transaction():
            self._store.jobs.transition(
                self._job,
                JobStatus.QUEUED,
                settings=msgspec.to_builtins(resolved),
                dataset=msgspec.to_builtins(summary),
            )
            for warning in summary.warnings:
                self._store.jobs.add_event(self.job_id, "warn", warning[0].upper() + warning[1:])
            text = f"Files validated: {summary.examples} examples ({summary.format}), {summary.tokens} tokens, "
            text += f"{summary.trainable_tokens} trained; {summary.skipped} rows left out, {summary.truncated} cut"
            data: dict[str, object] = {"problems": summary.problems}
            if (held := summary.eval) is not None:
                text += f". To evaluate: {held.examples} examples, {held.trainable_tokens} of {held.tokens} tokens; "
                text += f"{held.skipped} rows left out, {held.truncated} cut"
                data["validation_problems"] = held.problems
            self._store.jobs.add_event(self.job_id, "info", text, data)

    def _refuse(self, report: ProblemReport) -> None:
        lines = "; ".join(str(problem) for problem in report.first[:_NAMED_IN_ERROR])
        more = report.total - min(report.total, _NAMED_IN_ERROR)
        file = report.file.replace("_", " ")
        where = "" if report.file == "training_file" else f"{file}: "
        message = f"The {file} has {report.total} problem(s): {lines}" + (f"; and {more} more" if more else "")
        with self._store.db.transaction():
            for problem in report.first:
                told = {**msgspec.to_builtins(problem), "file": report.file}
                self._store.jobs.add_event(self.job_id, "error", where + str(problem), told)
            rows = {"counts": report.counts, "rows": report.rows, "bad_rows": report.bad_rows}
            self._fail(f"invalid_{report.file}", message, report.file, rows)

    def _fail(self, code: str, message: str, param: str | None, data: dict[str, object] | None = None) -> None:
        with contextlib.suppress(JobStateConflictError), self._store.db.transaction():
            error = {"code": code, "message": message, "param": param}
            self._store.jobs.transition(self._job, JobStatus.FAILED, error=error)
            self._store.jobs.add_event(self.job_id, "error", f"The job failed: {message}", data)
