"""``fineinfer ft``: fine-tuning jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineinfer.cli.client import CliError, JsonOption, UrlOption, connect, print_json, print_table, when
from fineinfer.cli.files import upload_file
from fineinfer.cli.flags import with_settings
from fineinfer.config import load_config

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

app = typer.Typer(help="Create and watch fine-tuning jobs.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(metavar="JOB_ID", help="Such as ftjob-abc123.")]
ENDED = ("succeeded", "failed", "cancelled")
_POLL_S = 0.5


@app.command()
@with_settings("train", "optimizer", leave_out=("lora_train", "lora_train_name"))
def create(
    training_file: Annotated[
        str, typer.Argument(metavar="FILE", help="Id of an uploaded file, or a local path, which is uploaded first.")
    ],
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Base model (default: the served one)")] = None,
    suffix: Annotated[str | None, typer.Option(metavar="TEXT", help="Name under which the adapter is served.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job.")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
    **flags: Any,
) -> None:
    """Start a fine-tuning job and print its id."""
    hyperparameters = load_config(flags).hyperparameters()
    with connect(url) as client:
        path = Path(training_file).expanduser()
        if path.exists() or not training_file.startswith("file-"):
            training_file = upload_file(client, path).id
        body: dict[str, Any] = {"model": model or first_model(client), "training_file": training_file}
        body |= {key: value for key, value in {"suffix": suffix, "seed": seed}.items() if value is not None}
        if hyperparameters:
            body["method"] = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        job = client.fine_tuning.jobs.create(**body)
    if json:
        print_json(job)
    else:
        typer.echo(job.id)


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
def events(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's events, oldest first; with -f exits 0 if the job succeeds."""
    import json as codec

    seen: set[str] = set()
    with connect(url) as client:
        while True:
            job = client.fine_tuning.jobs.retrieve(job_id)  # before the events: the last ones are not missed
            for event in _new_events(client, job_id, seen):
                typer.echo(codec.dumps(event.to_dict(), ensure_ascii=False) if json else _event_line(event))
            if not follow or job.status in ENDED:
                break
            time.sleep(_POLL_S)
    if follow and job.status != "succeeded":
        raise CliError(f"{job_id} {job.status}" + (f": {job.error.message}" if job.error else ""))


def _new_events(client: OpenAI, job_id: str, seen: set[str]) -> list[FineTuningJobEvent]:
    fresh = []
    for event in client.fine_tuning.jobs.list_events(job_id, limit=100):  # newest first, page by page
        if event.id in seen:
            break
        seen.add(event.id)
        fresh.append(event)
    return fresh[::-1]


def _event_line(event: FineTuningJobEvent) -> str:
    level = "" if event.level == "info" else f"{event.level}: "
    return f"{when(event.created_at)}  {level}{event.message}"


@app.command()
def cancel(job_id: JobId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Stop a job."""
    with connect(url) as client:
        job = client.fine_tuning.jobs.cancel(job_id)
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
            _number(item.metrics.train_loss),
            when(item.created_at),
        ]
        for item in found
    ]
    print_table(["step", "model", "loss", "created"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _progress(job: FineTuningJob) -> str:
    # `progress` is FineInfer's addition; the SDK hands unknown fields through
    state = getattr(job, "progress", None)
    if not isinstance(state, dict) or not state.get("total_steps"):
        return ""
    return f"{state.get('step', 0)}/{state['total_steps']}"


def _show(job: FineTuningJob) -> None:
    state = getattr(job, "progress", None)
    lines = {
        "id": job.id,
        "status": job.status,
        "model": job.model,
        "fine-tuned model": job.fine_tuned_model,
        "training file": job.training_file,
        "created": when(job.created_at),
        "finished": when(job.finished_at),
        "progress": _progress(job),
        "loss": _number(state.get("loss")) if isinstance(state, dict) else None,
        "trained tokens": job.trained_tokens,
        "device seconds": getattr(job, "device_seconds", None),  # FineInfer's addition, as `progress`
        "error": job.error.message if job.error else None,
    }
    for name, value in lines.items():
        if value not in (None, ""):
            typer.echo(f"{name:<17} {value}")
