"""``fineinfer serve``: starts the server."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from fineinfer.cli.flags import with_settings
from fineinfer.config import ConfigError, load_config


@with_settings("model", "memory", "adapters", "scheduler", "server", "train", "optimizer", leave_out=("model",))
def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder, .gguf file or hub id; without it the embedded model."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file with flag names as keys, or the name of a shipped preset."),
    ] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP and, with --lora-train or by API, fine-tune adapters beside it."""
    resolved = load_config(flags | {"model": model}, os.environ, find_preset(config) if config else None)
    from fineinfer.server.supervisor import run

    raise typer.Exit(run(resolved))


def find_preset(name: str) -> Path:
    """Path of a YAML file, or of the shipped preset of that name.

    Raises:
        ConfigError: Neither exists.
    """
    path = Path(name)
    if path.is_file():
        return path
    folder = resources.files("fineinfer.configs")
    presets = sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))
    if name not in presets:
        raise ConfigError(f"--config: no file '{name}' and no preset of that name; presets: {', '.join(presets)}")
    return Path(str(folder / f"{name}.yaml"))
