"""The command line: one file a command; heavy imports happen inside the commands so that ``--help`` is instant."""

from fineinfer.cli.app import main

__all__ = ["main"]
