"""``fineinfer data``: what a training file holds and how it would be trained, without a server."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineinfer.cli.client import CliError
from fineinfer.cli.flags import with_settings
from fineinfer.config import TrainConfig, load_config

if TYPE_CHECKING:
    from fineinfer.data.prepare import Judge

app = typer.Typer(help="Check a training file and see what of it is trained.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A JSONL file.")]
ModelOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Folder, .gguf file or hub id of the model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_READING = ("max_seq_length", "data_format", "train_on", "excess_length_strategy", "skip_invalid")
_OTHERS = tuple(name for name in TrainConfig.__dataclass_fields__ if name not in _READING)


def _judge(path: Path, model: str | None, flags: dict[str, Any], with_tokens: bool) -> Judge:
    from fineinfer.data.prepare import Judge
    from fineinfer.request import InvalidRequestError
    from fineinfer.server.api_process import start_errors
    from fineinfer.server.job_params import JobRequest, Limits, data_settings, parse_hyperparameters
    from fineinfer.server.job_validation import JobSettings, model_path
    from fineinfer.text.tokenizer import forgo_torch, load_tokenizer

    if not path.is_file():
        raise CliError(f"{path}: no such file")
    forgo_torch()
    base = JobSettings("", model)
    reasons: tuple[type[Exception], ...] = (InvalidRequestError, *start_errors())
    try:
        values = parse_hyperparameters(load_config(flags).hyperparameters(), Limits(""))
        tokenizer = load_tokenizer(model_path(base)) if with_tokens else None
    except reasons as error:
        raise CliError(" ".join(str(error).split())) from None
    settings = data_settings(JobRequest(model="", training_file="", hyperparameters=values))
    longest = values.get("max_seq_length", base.defaults.max_seq_length)
    return Judge(path, settings, longest, (lambda: tokenizer) if with_tokens else None)


@app.command()
@with_settings("train", leave_out=_OTHERS)
def check(path: FileArgument, model: ModelOption = None, json: JsonOption = False, **flags: Any) -> None:
    """Say what is wrong with a file, by line; with --model the tokens too. Exits 0 if it can be trained on."""
    import msgspec

    judge = _judge(path, model, flags, model is not None)
    num_tokens = sum(len(ids) for _, ids, _ in judge.examples())
    report = judge.report()
    shown = {"ok": not judge.refused, **msgspec.to_builtins(report), "tokens": num_tokens, "truncated": judge.truncated}
    if json:
        typer.echo(msgspec.json.encode(shown))
    else:
        warnings = [f"warning: {text}" for text in report.warnings]
        counts = [f"{report.rows} rows ({report.format}), {report.bad_rows} of them bad, {num_tokens} tokens"]
        counts += [f"{number} {code}" for code, number in report.counts.items()]
        typer.echo("\n".join([*map(str, report.first), *warnings, "; ".join(counts)]))
    raise typer.Exit(int(judge.refused))


@app.command()
@with_settings("train", leave_out=_OTHERS)
def preview(
    path: FileArgument,
    model: ModelOption = None,
    rows: Annotated[int, typer.Option(min=1, help="Good rows shown.")] = 3,
    json: JsonOption = False,
    **flags: Any,
) -> None:
    """Show the first rows as the model (default: embedded) sees them: green, or in double brackets, is trained."""
    import msgspec

    judge, shown = _judge(path, model, flags, True), []
    for line, ids, mask in itertools.islice(judge.examples(), rows):
        runs = [
            (bool(trained), judge.decode([token for token, _ in run]))
            for trained, run in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        ]
        spans = [{"trained": trained, "text": text} for trained, text in runs]
        shown.append({"line": line, "input_ids": ids, "loss_mask": mask, "spans": spans})
        if not json:
            typer.secho(f"line {line}: {len(ids)} tokens, {sum(mask)} trained", bold=True)
            typer.echo("".join(itertools.starmap(_marked, runs)))
    if json:
        typer.echo(msgspec.json.encode(shown))
    for problem in judge.report().first:
        typer.echo(str(problem), err=True)


def _marked(trained: bool, text: str) -> str:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return typer.style(text, fg="green" if trained else "bright_black")
    return f"[[{text}]]" if trained else text
