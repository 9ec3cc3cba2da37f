"""``fineinfer memory``: the engine's memory, and its budget."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fineinfer.cli.client import CliError, JsonOption, UrlOption, connect, print_table
from fineinfer.parse import size


def memory(
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="New budget, such as 4GiB; requests and training follow it.")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show who holds how much of the engine's memory; with --budget change how much there is."""
    with connect(url) as client:
        if budget is None:
            shown = client.get("/memory", cast_to=dict[str, Any])
        else:
            try:
                num_bytes = size(budget)
            except ValueError as error:
                raise CliError(f"--budget: {error}") from None
            shown = client.post("/memory", cast_to=dict[str, Any], body={"budget_bytes": num_bytes})
    if json:
        import json as codec

        typer.echo(codec.dumps(shown, indent=2))
        return
    rows = [[name, mebibytes(held)] for name, held in shown["leases"].items()]
    rows += [["free", mebibytes(shown["free_bytes"])], ["budget", mebibytes(shown["budget_bytes"])]]
    print_table(["what", "MiB"], rows)


def mebibytes(num_bytes: int | None) -> str:
    """A size for people."""
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:.0f}"
