"""How a job's training ends: what the engine said of it, and the last things that are done for one that succeeded."""

from __future__ import annotations

import contextlib

import msgspec

from fineinfer.messages import JobEnded
from fineinfer.server.job_params import JobRequest
from fineinfer.server.job_results import write_result_file
from fineinfer.store import TRAINING, JobRecord, JobStateConflictError, JobStatus, Store


def apply_end(store: Store, message: JobEnded) -> bool:
    """Move the job to where its run ended: ``finalizing``, ``paused``, ``cancelled`` or ``failed``.

    Returns:
        False if the job has ended already, which stays as it is.
    """
    job = store.jobs.get(message.job_id)
    if job is None or job.status not in TRAINING:
        return False
    try:
        if message.status == "succeeded":
            _begin_finalizing(store, job, message)
        elif message.status == "paused":
            pause(store, job, message.error_message if message.error_code else None)
        elif message.status == "cancelled":
            store.jobs.cancel(job.id)
        else:
            fail(store, job.id, message.error_code or "server_error", message.error_message or "No reason was given.")
    except JobStateConflictError:  # cancelled this very moment
        return False
    return True


def pause(store: Store, job: JobRecord, reason: str | None) -> None:
    """Commit that a job is paused.

    Args:
        store: The registry.
        job: One that nobody trains any more.
        reason: Why, if no user asked for it.

    Raises:
        JobStateConflictError: The job changed meanwhile.
    """
    step = (job.progress or {}).get("step", 0)
    with store.db.transaction():
        store.jobs.transition(job, JobStatus.PAUSED)
        text = f"The job has been paused after step {step}"
        if reason is None:
            store.jobs.add_event(job.id, "info", text)
        else:
            store.jobs.add_event(job.id, "error", f"{text}: {reason}; resume it when that is solved")


def fail(store: Store, job_id: str, code: str, message: str) -> None:
    """Let a job fail, unless it has ended already."""
    with contextlib.suppress(JobStateConflictError), store.db.transaction():
        error = {"code": code, "message": message, "param": None}
        store.jobs.transition(store.jobs.require(job_id), JobStatus.FAILED, error=error)
        store.jobs.add_event(job_id, "error", f"The job failed: {message}")


def _begin_finalizing(store: Store, job: JobRecord, message: JobEnded) -> None:
    """Keep what the engine knows, so that a crash from now on is finished after it."""
    progress = job.progress
    if progress is not None:
        progress = progress | {"best_step": message.best_step, "early_stopped": message.early_stopped}
    with store.db.transaction():
        store.jobs.transition(job, JobStatus.FINALIZING, progress=progress)
        if message.early_stopped:
            store.jobs.add_event(job.id, "info", "Training stopped early: the evaluation loss no longer got better")


def finalize(store: Store, job: JobRecord) -> None:
    """Write the result file, let the name mean the version that is best, and end the job; again after a crash.

    Raises:
        OSError: The result file could not be written; nothing was changed.
    """
    versions = [version.step for version in store.adapters.versions(job.name) if version.job_id == job.id]
    if not versions:
        fail(store, job.id, "server_error", "The job ended without an adapter.")
        return
    step = _step_to_serve(store, job, versions)
    result = write_result_file(store, job)
    try:
        with store.db.transaction():
            store.jobs.transition(job, JobStatus.SUCCEEDED, result_files=[result.id])
            store.files.add(result)
            store.adapters.set_current(job.name, step)
            of = "" if step == versions[-1] else f", its checkpoint of step {step}"
            store.jobs.add_event(job.id, "info", f"New fine-tuned model created: {job.name}{of}")
            used = {"device_seconds": job.device_s}
            store.jobs.add_event(job.id, "info", "The job has successfully completed", used)
    except (JobStateConflictError, LookupError):  # cancelled, or its adapter deleted, this very moment
        store.file_path(result.id).unlink(missing_ok=True)


def _step_to_serve(store: Store, job: JobRecord, steps: list[int]) -> int:
    """The best one, where the engine was asked to find it or the name only moves to better ones; else the last."""
    best = (job.progress or {}).get("best_step")
    if best in steps:
        return int(best)
    if msgspec.convert(job.request, JobRequest).publish == "if_better":
        losses = {step: loss for step, loss in store.jobs.checkpoint_losses(job.id).items() if step in steps}
        if losses:
            return min(losses, key=lambda step: losses[step])
    return steps[-1]
