"""What the demo shows: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from openai.types.fine_tuning import FineTuningJob

    from fineinfer.cli.demo_run import ChatProbe, HeldOut

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_PLAIN_WIDTH = 120
_PLAIN_EVERY_S = 5.0
_ANSWER_CHARACTERS = 160


class DemoDisplay:
    """Prints to standard output; decides once whether that is a terminal."""

    def __init__(self) -> None:
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=_PLAIN_WIDTH)

    def say(self, line: str) -> None:
        """One line for the reader."""
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something is under way; yields a function that takes the newest detail."""
        if not self._console.is_terminal:
            self.say(f"{what} …")
            yield lambda detail: None
            return
        with self._console.status(what) as status:
            yield lambda detail: status.update(f"{what} [dim]{escape(detail.strip()[:80])}[/dim]")

    @contextmanager
    def training(self) -> Iterator[Callable[[FineTuningJob, ChatProbe], None]]:
        """Show a job that runs; yields a function that takes its newest state."""
        view = _TrainingView()
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4) as live:

                def show(job: FineTuningJob, probe: ChatProbe) -> None:
                    view.take(job)
                    live.update(view.render(job, probe))

                yield show
            return
        last_s = time.monotonic()

        def tell(job: FineTuningJob, probe: ChatProbe) -> None:
            nonlocal last_s
            if view.take(job) and time.monotonic() - last_s > _PLAIN_EVERY_S:
                last_s = time.monotonic()
                self.say(view.line(probe))

        yield tell

    def compare(self, held_out: list[HeldOut], before: list[str], after: list[str], name: str) -> None:
        """The table of answers; a right one is marked."""
        table = Table("question", "base model", escape(name), show_lines=True, header_style="bold")
        for item, first, second in zip(held_out, before, after, strict=True):
            table.add_row(escape(item.question), _marked(item, first), _marked(item, second))
        self._console.print(table)

    def latencies(self, idle_s: list[float], training_s: list[float]) -> None:
        """Time to first token with and without training beside it."""
        idle = f"time to first token: {_milliseconds(idle_s)} without training"
        beside = f"{_milliseconds(training_s)} while training" if training_s else "no request ran while training"
        self.say(f"{idle}, {beside}")


class _TrainingView:
    """The newest progress of a job and its loss so far."""

    def __init__(self) -> None:
        self._progress: dict[str, Any] = {}
        self._loss_by_step: dict[int, float] = {}

    def take(self, job: FineTuningJob) -> bool:
        """Remember a job's state; True if a new step finished."""
        # `progress` is FineInfer's addition; the SDK hands unknown fields through
        progress = getattr(job, "progress", None)
        if not isinstance(progress, dict):
            return False
        self._progress = progress
        step, loss = progress.get("step"), progress.get("loss")
        if not step or loss is None or step in self._loss_by_step:
            return False
        self._loss_by_step[step] = loss
        return True

    def line(self, probe: ChatProbe) -> str:
        """The state as one line."""
        get = self._progress.get
        loss = get("loss")
        parts = [
            f"step {get('step') or 0}/{get('total_steps') or '?'}",
            f"loss {loss:.3f}" if loss is not None else "loss -",
            f"{get('tokens_per_second') or 0:.0f} tok/s",
        ]
        if get("eta_seconds") is not None:
            parts.append(f"{get('eta_seconds'):.0f} s left")
        if probe.ttft_s:
            parts.append(f"{len(probe.ttft_s)} chats beside it, TTFT {_milliseconds(probe.ttft_s)}")
        return " · ".join(parts)

    def render(self, job: FineTuningJob, probe: ChatProbe) -> Group:
        """The state as a live view."""
        total, done = self._progress.get("total_steps") or 1, self._progress.get("step") or 0
        answer = " ".join(probe.last_answer.split())
        bar = Table.grid()  # a bare ProgressBar does not end its line
        bar.add_row(ProgressBar(total=total, completed=done, width=_SPARK_WIDTH))
        return Group(
            Text(f"{job.id} {job.status}", style="bold"),
            bar,
            Text(f"loss {sparkline(list(self._loss_by_step.values()))}", style="cyan"),
            Text(self.line(probe)),
            Text(f"meanwhile: {answer}…" if answer else "", style="dim", no_wrap=True, overflow="ellipsis"),
        )


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """Values as a row of block characters, at most ``width``: each stands for the mean of its share of the values."""
    if not values:
        return ""
    num_bars = min(width, len(values))
    edges = [index * len(values) // num_bars for index in range(num_bars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _marked(item: HeldOut, answer: str) -> Text:
    right = item.is_answered_by(answer)
    short = answer if len(answer) <= _ANSWER_CHARACTERS else answer[:_ANSWER_CHARACTERS] + "…"
    return Text(("✓ " if right else "✗ ") + " ".join(short.split()), style="green" if right else "red")


def _milliseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2] * 1000:.0f} ms, longest {ordered[-1] * 1000:.0f} ms"
