"""``fineinfer ft events`` and ``metrics``: what a job does, as it does it and afterwards."""

from __future__ import annotations

import csv
import json as codec
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

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

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

ENDED = ("succeeded", "failed", "cancelled")
_POLL_S = 0.5
_TABLE_ROWS = 20


def events(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's events, oldest first; with -f exits 0 if the job succeeds. On a terminal a bar shows its steps."""
    seen: set[str] = set()
    with connect(url) as client, _watching(follow and not json) as (show, say):
        while True:
            job = client.fine_tuning.jobs.retrieve(job_id)  # before the events: the last ones are not missed
            for event in _new_events(client, job_id, seen):
                say(event) if not json else typer.echo(codec.dumps(event.to_dict(), ensure_ascii=False))
            show(job)
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


@contextmanager
def _watching(
    follow: bool,
) -> Iterator[tuple[Callable[[FineTuningJob], None], Callable[[FineTuningJobEvent], None]]]:
    """What to do with each state of the job and each event: lines, and on a terminal a bar instead of metrics."""
    if not follow or not sys.stdout.isatty():
        yield lambda job: None, lambda event: typer.echo(_event_line(event))
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.fields[status]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bars:
        task = bars.add_task("", total=None, status="")

        def show(job: FineTuningJob) -> None:
            state: dict[str, Any] = getattr(job, "progress", None) or {}
            total, step = state.get("total_steps"), state.get("step") or 0
            bars.update(task, total=total, completed=step, status=job.status, description=progress_words(state))

        def say(event: FineTuningJobEvent) -> None:
            if event.type != "metrics":
                bars.console.print(_event_line(event), highlight=False, markup=False, soft_wrap=True)

        yield show, say


def progress_words(state: dict[str, Any]) -> str:
    """A job's progress beside its bar: losses, speed and the time left."""
    left = state.get("eta_seconds")
    parts = [f"{name} {decimals(state[key])}" for name, key in (("loss", "loss"), ("eval", "eval_loss"))
             if state.get(key) is not None]  # fmt: skip
    parts += [f"{state['tokens_per_second']:.0f} tok/s"] if state.get("tokens_per_second") else []
    parts += [f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left"] if left else []
    return " · ".join(parts)


def metrics(
    job_id: JobId,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV.")] = False,
    max_points: Annotated[int, typer.Option(min=2, help="Most steps of a long job that are fetched.")] = 1000,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's losses: a small chart and its newest steps."""
    with connect(url) as client:
        options: Any = {"params": {"max_points": max_points}}
        route = f"/fine_tuning/jobs/{quote(job_id, safe='')}/metrics"
        shown = client.get(route, cast_to=dict[str, Any], options=options)
    if json:
        return print_json(shown)
    columns: dict[str, list[Any]] = shown["columns"]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(["" if v is None else v for v in column] for column in columns.values()), strict=True))
        return None
    from fineinfer.cli.demo_display import sparkline

    for name in ("train_loss", "valid_loss"):
        if values := [value for value in columns.get(name, ()) if value is not None]:
            ends = f"{decimals(values[0])} to {decimals(values[-1])}, lowest {decimals(min(values))}"
            typer.echo(f"{name:<11} {sparkline(values)}  {ends}")
    names = [name for name in _SHOWN if any(value is not None for value in columns.get(name, ()))]
    rows = [[_cell(value) for value in row] for row in zip(*(columns[name] for name in names), strict=True)]
    print_table(names, rows[-_TABLE_ROWS:])
    return None


_SHOWN = ("step", "train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy",
          "learning_rate", "grad_norm")  # fmt: skip


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
