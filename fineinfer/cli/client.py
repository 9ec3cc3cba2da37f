"""What the client commands share: the server's address, the OpenAI SDK, and errors as one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from fineinfer.config import is_loopback

if TYPE_CHECKING:
    import openai
    from openai import OpenAI

DEFAULT_URL = "http://127.0.0.1:8000"

UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help=f"Server; also FINEINFER_URL or OPENAI_BASE_URL (default: {DEFAULT_URL})"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the server's object as JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB_ID", help="Such as ftjob-abc123.")]


class CliError(Exception):
    """The command failed; the message is one line for the user."""


def base_url(url: str | None) -> str:
    """The API's root: flag, else environment, else the default; ``/v1`` is added to an address without a path.

    Raises:
        CliError: Not an http address.
    """
    chosen = url or os.environ.get("FINEINFER_URL") or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL
    parts = urlsplit(chosen)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CliError(f"not a server address: {chosen} (expected something like {DEFAULT_URL})")
    return chosen.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


@contextmanager
def connect(url: str | None, *, timeout_s: float = 600.0) -> Iterator[OpenAI]:
    """The stock OpenAI client for the server; its errors leave the block as ``CliError``."""
    import openai  # 0.5 s that `--help` does not need

    root = base_url(url)
    key = os.environ.get("OPENAI_API_KEY") or "EMPTY"
    # a proxy from the environment cannot reach a server on this machine's loopback
    http = openai.DefaultHttpxClient(trust_env=not is_loopback(urlsplit(root).hostname or ""))
    with openai.OpenAI(base_url=root, api_key=key, timeout=timeout_s, http_client=http) as client:
        try:
            yield client
        except openai.APIError as error:
            raise explain(error) from None


def explain(error: openai.APIError) -> CliError:
    """The SDK's error as one line: the server's own words and the HTTP status."""
    url = error.request.url
    if type(error).__name__ == "APITimeoutError":
        return CliError(f"no answer from {url} in time")
    if type(error).__name__ == "APIConnectionError":
        return CliError(f"cannot reach {url} (is `fineinfer serve` running?)")
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    status = getattr(error, "status_code", None)
    words = " ".join(str(message or error).split())
    return CliError(f"{words} (HTTP {status})" if message and status else words)


def print_json(item: Any) -> None:
    """Print an SDK object, a list of them, or builtins, as JSON."""
    if isinstance(item, list):
        item = [part.to_dict() for part in item]
    plain = item if isinstance(item, dict | list) else item.to_dict()
    typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: with lines on a terminal, tab separated for programs."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for row in [columns, *rows]:
            typer.echo("\t".join(row))
        return
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def when(unix_s: int | None) -> str:
    """Unix seconds -> local date and time."""
    from datetime import datetime

    return "" if unix_s is None else datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def decimals(value: float | None) -> str:
    """A loss for people."""
    return "" if value is None else f"{value:.4f}"
