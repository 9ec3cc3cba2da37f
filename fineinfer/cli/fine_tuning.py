"""``fineinfer ft``: fine-tuning jobs."""

from __future__ import annotations

import json as codec
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineinfer.cli.client import (
    CliError,
    JobId,
    JsonOption,
    UrlOption,
    connect,
    decimals,
    print_json,
    print_table,
    when,
)
from fineinfer.cli.flags import with_settings
from fineinfer.cli.ft_download import download
from fineinfer.cli.ft_watch import events, metrics
from fineinfer.cli.transfer import upload_file
from fineinfer.config import ConfigError, load_config

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.fine_tuning import FineTuningJob

app = typer.Typer(help="Create and watch fine-tuning jobs.", no_args_is_help=True)
app.command()(events)
app.command()(metrics)
app.command()(download)


@app.command()
@with_settings("train", "optimizer", leave_out=("lora_train", "lora_train_name", "validation_file"))
def create(
    training_file: Annotated[
        str, typer.Argument(metavar="FILE", help="Id of an uploaded file, or a local path, which is uploaded first.")
    ],
    validation_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Rows for evaluation: an id or a local path, as FILE.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Base model (default: the served one)")] = None,
    suffix: Annotated[str | None, typer.Option(metavar="TEXT", help="Name under which the adapter is served.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="N", help="high | normal | low or a number: lower is earlier in the queue.")
    ] = None,
    max_gpu_share: Annotated[
        float | None, typer.Option(help="Most of the time that it may train, above 0 to 1.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Note on the job; may be repeated.")
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="More fields of the request, such as integrations.")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
    **flags: Any,
) -> None:
    """Start a fine-tuning job and print its id."""
    hyperparameters = load_config(flags).hyperparameters()
    is_number = re.fullmatch(r"[+-]?[0-9]+", priority or "")
    extra: dict[str, Any] = {"priority": int(priority or 0) if is_number else priority, "max_gpu_share": max_gpu_share}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}} if hyperparameters else None
    body: dict[str, Any] = {"suffix": suffix, "seed": seed, "metadata": _pairs(metadata), "method": method}
    more = _object(extra_body)
    with connect(url) as client:
        body["training_file"] = _file_id(client, training_file)
        body["validation_file"] = None if validation_file is None else _file_id(client, validation_file)
        body["model"] = model or first_model(client)
        body, extra = ({key: item for key, item in part.items() if item is not None} for part in (body, extra))
        job = client.fine_tuning.jobs.create(**body, extra_body=extra | more or None)
    if json:
        print_json(job)
    else:
        typer.echo(job.id)


def _file_id(client: OpenAI, text: str) -> str:
    """The id itself, or that of the local file, which is uploaded."""
    path = Path(text).expanduser()
    return upload_file(client, path).id if path.exists() or not text.startswith("file-") else text


def _pairs(items: list[str] | None) -> dict[str, str] | None:
    split = [item.partition("=") for item in items or ()]
    if bad := [key for key, sign, _ in split if not sign or not key]:
        raise ConfigError(f"--metadata: expected KEY=VALUE, got {bad[0]!r}")
    return {key: value for key, _, value in split} or None


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = codec.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--extra-body: expected a JSON object")
    return value


def first_model(client: OpenAI) -> str:
    """Name of the served base model.

    Raises:
        CliError: The server lists none.
    """
    models = list(client.models.list())
    if not models:
        raise CliError("the server lists no model")
    return next((item.id for item in models if not getattr(item, "parent", None)), models[0].id)


@app.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, help="Newest jobs shown.")] = 20,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with connect(url) as client:
        jobs = client.fine_tuning.jobs.list(limit=limit).data
    if json:
        print_json(jobs)
        return
    rows = [[job.id, job.status, _progress(job), job.fine_tuned_model or "", when(job.created_at)] for job in jobs]
    print_table(["id", "status", "progress", "model", "created"], rows)


@app.command()
def get(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show one job."""
    with connect(url) as client:
        job = client.fine_tuning.jobs.retrieve(job_id)
    if json:
        print_json(job)
    else:
        _show(job)


@app.command()
def pause(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Stop a job so that it can go on later, bit for bit, and give its memory back."""
    _act("pause", job_id, url, json)


@app.command()
def resume(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Put a paused job back into the queue."""
    _act("resume", job_id, url, json)


@app.command()
def cancel(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Stop a job for good; versions that it has published stay."""
    _act("cancel", job_id, url, json)


def _act(action: str, job_id: str, url: str | None, json: bool) -> None:
    with connect(url) as client:
        job: FineTuningJob = getattr(client.fine_tuning.jobs, action)(job_id)
    if json:
        print_json(job)
    else:
        typer.echo(f"{job.id} {job.status}")


@app.command()
def checkpoints(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """List a job's checkpoints, newest first."""
    with connect(url) as client:
        found = list(client.fine_tuning.jobs.checkpoints.list(job_id))
    if json:
        print_json(found)
        return
    rows = [
        [
            str(item.step_number),
            item.fine_tuned_model_checkpoint,
            decimals(item.metrics.train_loss),
            decimals(item.metrics.valid_loss),
            when(item.created_at),
        ]
        for item in found
    ]
    print_table(["step", "model", "loss", "eval loss", "created"], rows)


def _progress(job: FineTuningJob) -> str:
    # `progress` is FineInfer's addition; the SDK hands unknown fields through
    state = getattr(job, "progress", None)
    if not isinstance(state, dict) or not state.get("total_steps"):
        return ""
    return f"{state.get('step', 0)}/{state['total_steps']}"


def _show(job: FineTuningJob) -> None:
    state = getattr(job, "progress", None)
    state = state if isinstance(state, dict) else {}
    lines = {
        "id": job.id,
        "status": job.status,
        "queue position": getattr(job, "queue_position", None),  # FineInfer's addition, as `progress`
        "model": job.model,
        "fine-tuned model": job.fine_tuned_model,
        "training file": job.training_file,
        "validation file": job.validation_file,
        "created": when(job.created_at),
        "finished": when(job.finished_at),
        "progress": _progress(job),
        "loss": decimals(state.get("loss")),
        "eval loss": decimals(state.get("eval_loss")),
        "trained tokens": job.trained_tokens,
        "device seconds": getattr(job, "device_seconds", None),
        "error": job.error.message if job.error else None,
    }
    for name, value in lines.items():
        if value not in (None, ""):
            typer.echo(f"{name:<17} {value}")
