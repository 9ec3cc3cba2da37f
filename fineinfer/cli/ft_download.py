"""``fineinfer ft download``: the adapter of a job as a PEFT folder, verified by its version."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from fineinfer.cli.client import CliError, JobId, JsonOption, UrlOption, connect, print_json
from fineinfer.cli.transfer import fetch

if TYPE_CHECKING:
    from openai import OpenAI


def download(
    job_id: JobId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="New folder (default: the version's name).")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="A checkpoint's step (default: the version served).")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Fetch a job's adapter into a new folder, which PEFT and vLLM can load."""
    route = f"/fine_tuning/jobs/{quote(job_id, safe='')}/adapter"
    with connect(url) as client:
        listed = client.get(f"{route}?step={step}" if step is not None else route, cast_to=dict[str, Any])
        folder = output or Path(os.path.basename(listed["model"]))
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CliError(f"{folder} exists already")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                _fetch_all(client, route, listed, part)
                part.chmod(0o755)  # a temporary folder is private
                os.replace(part, folder)  # an empty folder may be in the way
            finally:
                shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            raise CliError(f"{folder}: {error.strerror or error}") from None
    if json:
        print_json(listed | {"directory": str(folder)})
    else:
        typer.echo(folder)


def _fetch_all(client: OpenAI, route: str, listed: dict[str, Any], folder: Path) -> None:
    """Write the listed files and compare their hash with the version."""
    digest = hashlib.sha256()
    for file in sorted(listed["files"], key=lambda file: file["name"]):
        name, size = file["name"], file["bytes"]
        if name != os.path.basename(name) or name.startswith("."):
            raise CliError(f"the server names a file {name[:64]!r}, which is not taken")
        digest.update(f"{name}\0{size}\0".encode())
        with (folder / name).open("xb") as out:

            def write(chunk: bytes, out: Any = out) -> None:
                out.write(chunk)
                digest.update(chunk)

            fetch(client, f"{route}/{quote(name)}?step={listed['step_number']}", write, size)
            out.flush()
            os.fsync(out.fileno())
    if digest.hexdigest() != listed["adapter_version"]:
        raise CliError(f"what came has the hash {digest.hexdigest()}, expected {listed['adapter_version']}")
