"""Parsers of settings: a raw value (flag, YAML, environment) to a typed one, or a ValueError that says why."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

_SIZE_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}ib", 1024), (f"{letter}b", 1000), (letter, 1024))
}


def setting(default: Any, parse: Callable[[object], Any], metavar: str, help: str) -> Any:
    """A dataclass field that is a setting: how it is parsed and described."""
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help})


def size(raw: object) -> int:
    """``4294967296``, ``'4GiB'``, ``'500MB'`` or ``'2G'`` (binary) -> bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(raw).lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("expected a size such as 4GiB, 500MB or a number of bytes")
    num_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if num_bytes <= 0:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def text(raw: object) -> str:
    """A text that is not blank."""
    if isinstance(raw, (dict, list, bool)) or not str(raw).strip():
        raise ValueError("expected a text")
    return str(raw).strip()


def file_path(raw: object) -> Path:
    """An absolute path; ``~`` is the home folder."""
    return Path(text(raw)).expanduser().absolute()


def names(raw: object) -> tuple[str, ...]:
    """Names, from a list or separated by commas; at least one."""
    items = raw if isinstance(raw, (list, tuple)) else str(raw).split(",")
    names = tuple(str(item).strip() for item in items if str(item).strip())
    if not names:
        raise ValueError("expected at least one entry")
    return names


def lora_modules(raw: object) -> tuple[tuple[str, Path], ...]:
    """vLLM's ``name=path`` entries, or JSON objects with ``name`` and ``path`` -> (name, absolute path) pairs."""
    if isinstance(raw, str):
        raw = json.loads(raw) if raw.lstrip().startswith(("[", "{")) else raw.split(",")
    pairs = []
    for item in raw if isinstance(raw, (list, tuple)) else [raw]:
        entry = json.loads(item) if isinstance(item, str) and item.lstrip().startswith("{") else item
        if isinstance(entry, dict):
            name, path = str(entry.get("name", "")), str(entry.get("path", ""))
        else:
            name, _, path = str(entry).strip().partition("=")
        if not name or not path:
            raise ValueError('expected NAME=PATH or {"name": NAME, "path": PATH}')
        pairs.append((name, file_path(path)))
    if len(dict(pairs)) != len(pairs):
        raise ValueError("expected each name once")
    return tuple(pairs)


def numbers(raw: object) -> dict[str, float]:
    """``a=1,b=2.5``, or a mapping -> numbers by name; whole ones as int."""
    items = raw.items() if isinstance(raw, dict) else [item.partition("=")[::2] for item in names(raw)]
    found = {str(name).strip(): number(-math.inf)(value) for name, value in items}
    return {name: int(value) if value.is_integer() else value for name, value in found.items()}


def one_of(*choices: str) -> Callable[[object], str]:
    """A parser that takes one of the choices."""

    def parse(raw: object) -> str:
        if str(raw) not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return str(raw)

    return parse


def whole(low: int, high: int | None = None) -> Callable[[object], int]:
    """A parser of whole numbers from ``low`` to ``high``."""

    def parse(raw: object) -> int:
        if isinstance(raw, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(raw).strip()):
            raise ValueError("expected a whole number")
        value = int(str(raw))
        if value < low or (high is not None and value > high):
            raise ValueError(f"must be at least {low}" if high is None else f"must be between {low} and {high}")
        return value

    return parse


def number(low: float, high: float = math.inf, *, low_open: bool = False) -> Callable[[object], float]:
    """A parser of finite numbers from ``low`` (or above it) to ``high``."""

    def parse(raw: object) -> float:
        try:
            value = float(str(raw))
        except ValueError:
            raise ValueError("expected a number") from None
        if isinstance(raw, bool) or not math.isfinite(value) or not low <= value <= high or (low_open and value == low):
            bound = f"more than {low}" if low_open else f"at least {low}"
            raise ValueError(f"must be {bound}" + ("" if high == math.inf else f" and at most {high}"))
        return value

    return parse


def switch(raw: object) -> bool:
    """True or false."""
    if str(raw).lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return str(raw).lower() == "true"


def metrics_prefix(raw: object) -> str:
    """What the names of metrics begin with, such as ``fineinfer:``."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*[:_]", str(raw)):
        raise ValueError("expected letters, digits and _ ending in ':' or '_', such as fineinfer: or vllm:")
    return str(raw)
