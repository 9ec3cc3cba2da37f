"""``fineinfer files``: training files on the server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineinfer.cli.client import CliError, JsonOption, UrlOption, connect, print_json, print_table, when

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import FileObject

app = typer.Typer(help="Upload, list and delete training files.", no_args_is_help=True)
FileId = Annotated[str, typer.Argument(metavar="FILE_ID", help="Such as file-abc123.")]


def upload_file(client: OpenAI, path: Path) -> FileObject:
    """Upload a training file.

    Raises:
        CliError: It does not exist or cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return client.files.create(file=stream, purpose="fine-tune")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from None


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A JSONL file.")],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Upload a file for fine-tuning and print its id."""
    with connect(url) as client:
        created = upload_file(client, path)
    if json:
        print_json(created)
    else:
        typer.echo(created.id)


@app.command("list")
def list_files(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the uploaded files, newest first."""
    with connect(url) as client:
        found = list(client.files.list())
    if json:
        print_json(found)
    else:
        rows = [[item.id, item.filename, str(item.bytes), item.purpose, when(item.created_at)] for item in found]
        print_table(["id", "filename", "bytes", "purpose", "created"], rows)


@app.command()
def get(file_id: FileId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show one file."""
    with connect(url) as client:
        found = client.files.retrieve(file_id)
    if json:
        print_json(found)
    else:
        typer.echo(f"{found.id}  {found.filename}  {found.bytes} bytes  {found.purpose}  {when(found.created_at)}")


@app.command()
def delete(file_id: FileId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Delete one file."""
    with connect(url) as client:
        gone = client.files.delete(file_id)
    if json:
        print_json(gone)
    else:
        typer.echo(f"{gone.id} deleted")
