"""Turns the settings of ``fineinfer.config`` into options of a command, so that each is described in one place only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fineinfer.config import SETTINGS, Setting

_PANELS = {
    "model": "Model",
    "memory": "Memory",
    "adapters": "Adapters",
    "scheduler": "Scheduling",
    "server": "Server",
    "train": "Training",
    "optimizer": "Training",
}


def with_settings(*groups: str, leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the command's ``**flags`` become one option for each setting of the groups.

    Values arrive as typed text (None: not given); ``load_config`` parses them, as it does for YAML and environment,
    so that all sources give the same errors.

    Args:
        groups: Field names of ``Config``.
        leave_out: Settings that the command takes in another way.
    """
    chosen = [item for item in SETTINGS.values() if item.group in groups and item.name not in leave_out]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [_option(setting) for setting in chosen]
        command.__signature__ = signature.replace(parameters=own + options)  # type: ignore[attr-defined]
        return command

    return decorate


def _option(setting: Setting) -> inspect.Parameter:
    repeatable = setting.default == ()
    shown = setting.help
    if setting.default not in (None, (), False) and "default" not in shown:
        shown += f" (default: {setting.default})"
    option = typer.Option(
        setting.flag,
        metavar=setting.metavar or None,
        help=shown,
        rich_help_panel=_PANELS[setting.group],
        show_default=False,
    )
    kind = bool | None if setting.default is False else list[str] | None if repeatable else str | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )
