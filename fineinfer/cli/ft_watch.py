"""``fineinfer ft events`` and ``metrics``: what a job does, as it does it and afterwards."""

from __future__ import annotations

import csv
import json as codec
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast
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
    from openai.types.fine_tuning import FineTuningJobEvent

ENDED = ("succeeded", "failed", "cancelled")
_PAUSE_S = 0.5
_TABLE_ROWS = 20


def events(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's events, oldest first; with -f exits 0 if the job succeeds. On a terminal a bar shows its steps."""
    with connect(url) as client, _saying(follow and not json) as say:
        found = _stream(client, job_id) if follow else reversed(list(client.fine_tuning.jobs.list_events(job_id)))
        for event in found:
            if json:
                typer.echo(codec.dumps(event.to_dict(), ensure_ascii=False))
            else:
                say(event)
        job = client.fine_tuning.jobs.retrieve(job_id)
    if follow and job.status != "succeeded":
        raise CliError(f"{job_id} {job.status}" + (f": {job.error.message}" if job.error else ""))


def _stream(client: OpenAI, job_id: str) -> Iterator[FineTuningJobEvent]:
    """The events as they come, until the job ends; after a broken connection they go on where they were."""
    from openai import APIConnectionError, Stream
    from openai.types.fine_tuning import FineTuningJobEvent

    route, params = f"/fine_tuning/jobs/{quote(job_id, safe='')}/events", {"stream": "true", "limit": "100"}
    kind, options = Stream[FineTuningJobEvent], cast(Any, {"params": params})
    while True:
        with client.get(route, cast_to=FineTuningJobEvent, stream=True, stream_cls=kind, options=options) as found:
            try:
                for event in found:
                    params["after"] = event.id
                    yield event
                return
            except APIConnectionError:  # behind the first byte the SDK does not try again by itself
                time.sleep(_PAUSE_S)


def _event_line(event: FineTuningJobEvent) -> str:
    level = "" if event.level == "info" else f"{event.level}: "
    return f"{when(event.created_at)}  {level}{event.message}"


@contextmanager
def _saying(follow: bool) -> Iterator[Callable[[FineTuningJobEvent], None]]:
    """What to do with each event: a line, and on a terminal that follows a job a bar instead of its metrics' lines."""
    if not follow or not sys.stdout.isatty():
        yield lambda event: typer.echo(_event_line(event))
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    state: dict[str, Any] = {}
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")) as bars:
        task = bars.add_task("", total=None)

        def say(event: FineTuningJobEvent) -> None:
            state.update(event.data if isinstance(event.data, dict) else {})
            if event.type == "metrics":
                done, total = state.get("step") or 0, state.get("total_steps")
                bars.update(task, total=total, completed=done, description=progress_words(state))
            else:
                bars.console.print(_event_line(event), highlight=False, markup=False, soft_wrap=True)

        yield say


def progress_words(state: dict[str, Any]) -> str:
    """A job's progress beside its bar: losses, speed and the time left."""
    left = state.get("eta_seconds")
    names = (("loss", "train_loss"), ("eval", "valid_loss"))
    parts = [f"{name} {decimals(state[key])}" for name, key in names if state.get(key) is not None]
    parts += [f"{state['tokens_per_second']:.0f} tok/s"] if state.get("tokens_per_second") else []
    parts += [f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left"] if left else []
    return " · ".join(parts)


def metrics(
    job_id: JobId,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV.")] = False,
    max_points: Annotated[
        int | None, typer.Option(min=2, help="Most steps fetched of a long job (default: 1000, with --csv 100,000).")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's losses: a small chart and its newest steps."""
    with connect(url) as client:
        options: Any = {"params": {"max_points": max_points or (100_000 if as_csv else 1000)}}
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
