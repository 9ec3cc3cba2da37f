"""``fineinfer demo``: a model serves while it learns what it cannot know; it is asked before and after."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the demo data.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
) -> None:
    """Fine-tune the embedded model on shipped data while it answers requests, and compare before and after."""
    from fineinfer.cli.demo_run import run_demo

    run_demo({"n_epochs": epochs, "learning_rate": learning_rate, "batch_size": 4})
