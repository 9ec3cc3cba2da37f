"""What the API shows of a job."""

from __future__ import annotations

from typing import Any

import msgspec

from fineinfer.messages import TrainingSettings
from fineinfer.server.errors import ApiError
from fineinfer.server.job_params import JobRequest, echo_hyperparameters, echo_lora
from fineinfer.store import JobRecord, JobStatus, Store, now


def job_object(store: Store, job: JobRecord) -> dict[str, Any]:
    """OpenAI's FineTuningJob, and ``progress``, ``device_seconds``, ``queue_position``, ``data``, ``lora`` and more."""
    request = msgspec.convert(job.request, JobRequest)
    settings = None if job.settings is None else msgspec.convert(job.settings, TrainingSettings)
    data = None if job.dataset is None else {key: job.dataset.get(key) for key in _DATA_KEYS}
    hyperparameters = echo_hyperparameters(request, settings, data["examples"] if data else None)
    progress = _progress(job)
    running = job.status is JobStatus.RUNNING and progress is not None
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "estimated_finish": now() + int(progress["eta_seconds"]) if running and progress else None,
        "model": request.model,
        "fine_tuned_model": job.name if job.status is JobStatus.SUCCEEDED else None,
        "status": job.status.value,
        "error": job.error,
        "hyperparameters": hyperparameters,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "organization_id": "",
        "result_files": job.result_files,
        "seed": request.seed,
        "trained_tokens": job.trained_tokens,
        "device_seconds": round(job.device_s, 3),
        "training_file": request.training_file,
        "validation_file": request.validation_file,
        "integrations": request.integrations,
        "metadata": request.metadata,
        "user_provided_suffix": request.suffix,
        "adapter_name": job.name,
        "lora": echo_lora(request, settings),
        "data": data,
        "progress": progress,
        "queue_position": store.jobs.queue_position(job),
    }


def require_job(store: Store, job_id: str) -> JobRecord:
    """The job.

    Raises:
        ApiError: 404, there is none with this id.
    """
    job = store.jobs.get(job_id)
    if job is None:
        raise job_not_found(job_id)
    return job


def job_not_found(job_id: str) -> ApiError:
    """404 for an id that no job has."""
    message = f"Could not find fine-tuning job: {job_id[:64]}"
    return ApiError(404, message, param="fine_tuning_job_id", code="job_not_found")


_DATA_KEYS = ("format", "examples", "tokens", "trainable_tokens", "skipped", "truncated", "eval")


def _progress(job: JobRecord) -> dict[str, Any] | None:
    latest = job.progress
    if latest is None:
        return None
    total = max(1, latest["total_steps"])
    return {
        "step": latest["step"],
        "total_steps": latest["total_steps"],
        "epoch": latest["epoch"],
        "percent": round(100.0 * latest["step"] / total, 2),
        "tokens_per_second": latest["tokens_per_second"],
        "eta_seconds": latest["eta_seconds"],
        "loss": latest["train_loss"],
        "lr": latest["learning_rate"],
        "eval_loss": latest.get("eval_loss"),
    }
