"""``fineinfer models``: what a server serves, and adapters as files."""

from __future__ import annotations

import json as codec
import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from fineinfer.cli.client import CliError, JsonOption, UrlOption, connect, print_json, print_table
from fineinfer.config import load_config

app = typer.Typer(help="List, load, roll back, remove and export models.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]


@app.command("list")
def list_models(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the base model and all adapters, with where their weights are."""
    with connect(url) as client:
        found = list(client.models.list())
    if json:
        print_json(found)
        return
    rows = []
    for model in found:
        facts = (model.model_extra or {}).get("fineinfer") or {}
        shown = [facts.get(key) for key in ("kind", "state", "rank", "step", "version", "job_id")]
        rows.append([model.id, *("" if value is None else str(value)[:12] for value in shown[:-1]), shown[-1] or ""])
    print_table(["name", "kind", "state", "rank", "step", "version", "job"], rows)


@app.command()
def load(
    name: NameArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="PEFT folder below the server's --adapter-root.")],
    inplace: Annotated[bool, typer.Option("--inplace", help="A new version of an adapter that is loaded.")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="It keeps its slot.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Load an adapter into a running server."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": inplace, "pinned": pinned}
    _post("/load_lora_adapter", body, url, json)


@app.command()
def unload(name: NameArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Unload an adapter that was loaded with `models load`."""
    _post("/unload_lora_adapter", {"lora_name": name}, url, json)


def _post(path: str, body: dict[str, Any], url: str | None, json: bool) -> None:
    with connect(url) as client:
        said = client.post(path, cast_to=str, body=body)
    typer.echo(codec.dumps({"message": said}) if json else said)


@app.command()
def rm(name: NameArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Delete an adapter with all its versions."""
    with connect(url) as client:
        gone = client.models.delete(name)
    if json:
        print_json(gone)
    else:
        typer.echo(f"{gone.id} deleted")


@app.command()
def rollback(
    version: Annotated[str, typer.Argument(metavar="NAME@STEP", help="The version that NAME is to mean.")],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Let an adapter's name mean an earlier (or later) one of its versions."""
    name, _, step = version.rpartition("@")
    if not name or not step.isdecimal():
        raise CliError(f"expected NAME@STEP, got {version}")
    with connect(url) as client:
        path = f"/models/{quote(name, safe='')}/rollback"
        shown = client.post(path, cast_to=dict[str, Any], body={"step": int(step)})
    typer.echo(codec.dumps(shown, indent=2) if json else f"{name} is {name}@{step} now")


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="NAME[@STEP]", help="A served adapter, or the path of a PEFT folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder; never one that has files.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge it into its base: a model folder of its own.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Base model (default: what the state folder's server serves).")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The server's state folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Write an adapter as a PEFT folder or, merged, as a model; needs no running server."""
    adapter, served = _find_adapter(name, load_config({"state_dir": state_dir}, os.environ).server.state_dir)
    from fineinfer.engine.export import export_adapter, export_merged

    warning = None
    try:
        if merge:
            base, revision = (model, None) if model is not None else served
            warning = export_merged(adapter, base, revision, out)
        else:
            export_adapter(adapter, out)
    except (ValueError, OSError) as error:  # ModelLoadError and AdapterError are ValueErrors
        raise CliError(" ".join(str(error).split())) from None
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(codec.dumps({"name": name, "path": str(out), "merged": merge}) if json else str(out))


def _find_adapter(name: str, state_dir: Path) -> tuple[Path, tuple[str | None, str | None]]:
    """The PEFT folder, and (model, revision) that the state folder's server serves."""
    folder = Path(name).expanduser()
    store = None
    if (state_dir / "fineinfer.db").is_file():
        from fineinfer.store import Store, StoreError

        try:
            store = Store(state_dir)
        except StoreError as error:
            raise CliError(str(error)) from None
    try:
        model, revision = (store.get_meta("model") if store is not None else None) or (None, None)
        if (folder / "adapter_config.json").is_file():
            return folder, (model, revision)
        record = None if store is None else store.adapters.resolve(name)
    finally:
        if store is not None:
            store.close()
    if record is None:
        raise CliError(f"no adapter '{name}' in {state_dir}, and no PEFT folder of that name")
    return Path(record.directory), (model, revision)
