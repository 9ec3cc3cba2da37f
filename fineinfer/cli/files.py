"""``fineinfer files``: training files on the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fineinfer.cli.client import JsonOption, UrlOption, connect, print_json, print_table, when
from fineinfer.cli.transfer import fetch, upload_file, whole_file

app = typer.Typer(help="Upload, list, fetch and delete training files.", no_args_is_help=True)
FileId = Annotated[str, typer.Argument(metavar="FILE_ID", help="Such as file-abc123.")]


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A JSONL file.")],
    purpose: Annotated[str, typer.Option(metavar="NAME", help="What the file is for.")] = "fine-tune",
    expires_after: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="The server forgets the file then (default: never).")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Upload a file for fine-tuning and print its id."""
    with connect(url) as client:
        created = upload_file(client, path, purpose, expires_after)
    if json:
        print_json(created)
    else:
        typer.echo(created.id)


@app.command("list")
def list_files(
    purpose: Annotated[str | None, typer.Option(metavar="NAME", help="Only files for this.")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the files, newest first."""
    with connect(url) as client:
        found = list(client.files.list(purpose=purpose) if purpose else client.files.list())
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
def content(
    file_id: FileId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PATH", help="Where to (default: standard output).")
    ] = None,
    url: UrlOption = None,
) -> None:
    """Fetch a file's bytes: what was uploaded, or the result file of a job."""
    with connect(url) as client:
        if output is None:
            fetch(client, f"/files/{file_id}/content", sys.stdout.buffer.write)
            sys.stdout.buffer.flush()
            return
        found = client.files.retrieve(file_id)
        with whole_file(output) as write:
            fetch(client, f"/files/{file_id}/content", write, found.bytes)


@app.command()
def delete(file_id: FileId, url: UrlOption = None, json: JsonOption = False) -> None:
    """Delete one file."""
    with connect(url) as client:
        gone = client.files.delete(file_id)
    if json:
        print_json(gone)
    else:
        typer.echo(f"{gone.id} deleted")
