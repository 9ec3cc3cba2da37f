"""Files to and from the server, with a bar on a terminal; what arrives is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fineinfer.cli.client import CliError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import FileObject
    from rich.progress import Progress

_CHUNK_BYTES = 256 << 10


@contextmanager
def _bars() -> Iterator[Progress]:
    """Bars on standard error, so that results can be piped; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def upload_file(client: OpenAI, path: Path, purpose: str = "fine-tune", expires_s: int | None = None) -> FileObject:
    """Upload a file.

    Args:
        client: Of the server.
        path: The file.
        purpose: What it is for, an OpenAI name.
        expires_s: Seconds after which the server forgets it; None: never.

    Raises:
        CliError: It does not exist or cannot be read.
    """
    # both fields have more types in the SDK than a variable can have
    more: Any = {"expires_after": {"anchor": "created_at", "seconds": expires_s}} if expires_s else {}
    kind: Any = purpose
    try:
        with path.open("rb") as file, _bars() as bars:
            size = os.fstat(file.fileno()).st_size
            with bars.wrap_file(file, size, description=path.name) as source:
                return client.files.create(file=source, purpose=kind, **more)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from None


def fetch(client: OpenAI, route: str, write: Callable[[bytes], Any], size: int | None = None) -> int:
    """Read the bytes of a route piece by piece.

    Args:
        client: Of the server.
        route: Below ``/v1``.
        write: Gets the pieces.
        size: Expected bytes, for the bar.

    Returns:
        How many came.

    Raises:
        CliError: They are not ``size`` bytes.
    """
    import httpx2

    total = 0
    raw: Any = {"headers": {"X-Stainless-Raw-Response": "stream"}}  # as the SDK's with_streaming_response asks itself
    with _bars() as bars, closing(client.get(route, cast_to=httpx2.Response, options=raw)) as answer:
        task = bars.add_task(route.rpartition("/")[2].partition("?")[0], total=size)
        try:
            for chunk in answer.iter_bytes(_CHUNK_BYTES):
                write(chunk)
                total += len(chunk)
                bars.advance(task, len(chunk))
        except httpx2.HTTPError as error:  # the SDK names only errors before the body
            raise CliError(f"{route}: the connection broke after {total} bytes: {error}") from None
    if size is not None and total != size:
        raise CliError(f"{route}: {total} bytes came, expected {size}")
    return total


@contextmanager
def whole_file(path: Path) -> Iterator[Callable[[bytes], Any]]:
    """Write a file that gets its name when the block ends well; it replaces an older one.

    Raises:
        CliError: It cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:64]}.", delete=False) as file:
            try:
                yield file.write
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from None
