"""The trackers that a job may write to besides TensorBoard's files: OpenAI's ``integrations``."""

from __future__ import annotations

import importlib.util
from typing import Any

from fineinfer.request import InvalidRequestError
from fineinfer.server.job_settings import as_object, check_known, show, unsupported

KINDS = ("wandb", "mlflow", "trackio")
_FIELDS = {"wandb": ("project", "name", "entity", "tags"), "mlflow": ("project", "name", "tags"),
           "trackio": ("project", "name")}  # fmt: skip
MAX_TEXT = 128
MAX_TAGS = 50


def parse_integrations(value: Any) -> list[dict[str, Any]]:
    """Check ``integrations``: ``[{"type": "wandb", "wandb": {"project": ...}}]``; mlflow and trackio alike.

    Raises:
        InvalidRequestError: With the offending field as ``param``.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequestError(f"integrations must be a list, not {show(value)}.", "integrations")
    parsed: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(value):
        param = f"integrations[{index}]"
        kind = as_object(item, param).get("type")
        if kind not in KINDS:
            raise unsupported(f"{param}.type", f"{param}.type must be one of {', '.join(KINDS)}, not {show(kind)}.")
        if kind in parsed:
            raise InvalidRequestError(f"{param}: a job has one {kind} integration at most.", f"{param}.type")
        check_known(item, ("type", kind), param + ".", {})
        if not is_installed(kind):
            message = f"{param}.type: '{kind}' is not installed beside this server; install it with: pip install {kind}"
            raise InvalidRequestError(message, f"{param}.type", "integration_not_installed")
        parsed[kind] = {"type": kind, kind: _options(kind, item.get(kind), f"{param}.{kind}")}
    return list(parsed.values())


def is_installed(kind: str) -> bool:
    """Whether the tracker's package is there; it is not imported."""
    return importlib.util.find_spec(kind) is not None


def _options(kind: str, value: Any, param: str) -> dict[str, Any]:
    options = as_object(value, param)
    check_known(options, _FIELDS[kind], param + ".", {})
    for key in ("project", "name", "entity"):
        text = options.get(key)
        if text is None and key != "project":
            continue
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT:
            raise InvalidRequestError(f"{param}.{key} must be a text of 1 to {MAX_TEXT} characters.", f"{param}.{key}")
    tags = options.get("tags") or []
    fine = isinstance(tags, list) and all(isinstance(tag, str) and 1 <= len(tag) <= MAX_TEXT for tag in tags)
    if not fine or len(tags) > MAX_TAGS:
        message = f"{param}.tags must be a list of at most {MAX_TAGS} texts of 1 to {MAX_TEXT} characters."
        raise InvalidRequestError(message, f"{param}.tags")
    return {key: item for key, item in options.items() if item is not None}
