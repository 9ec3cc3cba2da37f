"""The command tree and the exit codes: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import fineinfer
from fineinfer.cli import chat, collect_env, data, demo, files, fine_tuning, memory, models, serve
from fineinfer.cli.client import CliError
from fineinfer.config import ConfigError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(name="fineinfer", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.add_typer(fine_tuning.app, name="ft")
app.add_typer(fine_tuning.app, name="fine-tuning", hidden=True)
app.add_typer(files.app, name="files")
app.add_typer(data.app, name="data")
app.add_typer(models.app, name="models")
app.command("memory")(memory.memory)
app.command("demo")(demo.demo)
app.command("collect-env")(collect_env.collect_env)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fineinfer {fineinfer.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Serve an LLM and fine-tune LoRA adapters on the same weights, in one engine, at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program name; None takes the process's own.

    Returns:
        The exit code; a failure has printed one line to stderr.
    """
    try:
        result = app(args=None if argv is None else list(argv), prog_name="fineinfer", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except ConfigError as error:
        return _complain(str(error), WRONG_USAGE)
    except CliError as error:
        return _complain(str(error), FAILED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left (`| head`): nothing more to say, at exit neither
        return FAILED
    except Exception as error:
        # click's usage errors; typer carries click under a private name, so they are known by their shape
        show = getattr(error, "format_message", None)
        if show is None:
            raise
        message = show()
        # `fineinfer` and `fineinfer ft` alone print their help and raise this with an empty message
        return _complain(message, WRONG_USAGE) if message else WRONG_USAGE


def _complain(message: str, code: int) -> int:
    typer.echo(f"fineinfer: error: {message}", err=True)
    return code
