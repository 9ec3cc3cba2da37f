"""The course of ``fineinfer demo``: ask, train with chat requests beside it, ask again, compare."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fineinfer.cli.client import CliError, connect
from fineinfer.cli.demo_display import DemoDisplay
from fineinfer.cli.fine_tuning import first_model
from fineinfer.cli.ft_watch import ENDED
from fineinfer.cli.local_server import LocalServer, local_server
from fineinfer.cli.transfer import upload_file

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.fine_tuning import FineTuningJob

_READY_TIMEOUT_S = 300.0  # the first start converts the embedded model, 20 s on two cores
_MAX_ANSWER_TOKENS = 48
_PROBE_TOKENS = 12
_PROBE_PAUSE_S = 4.0
_PROBE_MAX_SHARE = 0.25  # of the time, chat requests run: on a slow machine they must not starve the training they show
_POLL_S = 0.5


@dataclass(frozen=True)
class HeldOut:
    """One question the training data does not contain word for word, and what a right answer contains."""

    question: str
    expected: str

    def is_answered_by(self, answer: str) -> bool:
        """Whether the expected text occurs in the answer, case and spacing aside."""
        return " ".join(self.expected.lower().split()) in " ".join(answer.lower().split())


@dataclass
class ChatProbe:
    """Chat requests that run beside training, one at a time, and the time to first token of each in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    last_answer: str = ""
    error: Exception | None = None


def run_demo(hyperparameters: dict[str, Any]) -> None:
    """Run the whole demo on a server of its own.

    Args:
        hyperparameters: Of the fine-tuning job, REST names.

    Raises:
        CliError: Something failed, or the adapter does not beat the base model.
    """
    start_s = time.monotonic()
    display = DemoDisplay()
    folder = Path(str(resources.files("fineinfer.data") / "demo"))
    with _stoppable(), local_server() as server:
        with display.waiting("starting the server with the embedded model") as show:
            server.wait_until_ready(_READY_TIMEOUT_S, show)
        held_out = read_held_out(folder / "held_out.jsonl")
        with connect(server.url) as client:
            base = first_model(client)
            display.say(f"{server.url} serves {base}; it knows nothing of the company in the demo data.")
            idle_ttft_s = [probe_once(client, base, item.question)[0] for item in held_out[:3]]
            before = ask_all(client, base, held_out)
            job = _submit(client, base, folder / "train.jsonl", hyperparameters)
            display.say(f"fine-tuning job {job.id}: training starts, while chat requests go on")
            job, probe = _train(client, server, job, held_out, display)
            if job.fine_tuned_model is None:
                raise CliError(f"{job.id} succeeded without naming its model")
            after = ask_all(client, job.fine_tuned_model, held_out)
    display.compare(held_out, before, after, job.fine_tuned_model)
    display.latencies(idle_ttft_s, probe.ttft_s)
    num_before, num_after = (sum(map(HeldOut.is_answered_by, held_out, answers)) for answers in (before, after))
    display.say(
        f"right answers: base {num_before}/{len(held_out)}, adapter {num_after}/{len(held_out)}; "
        f"the whole demo took {time.monotonic() - start_s:.0f} s"
    )
    if num_after <= num_before:
        raise CliError("the adapter does not beat the base model")


def read_held_out(path: Path) -> list[HeldOut]:
    """Rows ``{"question", "expected"}`` of a JSONL file."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [HeldOut(row["question"], row["expected"]) for row in rows]


def ask_all(client: OpenAI, model: str, held_out: list[HeldOut]) -> list[str]:
    """Greedy answers to all questions, asked at once: the server batches them."""

    def ask(item: HeldOut) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": item.question}],
            temperature=0,
            max_tokens=_MAX_ANSWER_TOKENS,
        )
        return (answer.choices[0].message.content or "").strip()

    with ThreadPoolExecutor(max_workers=len(held_out)) as pool:
        return list(pool.map(ask, held_out))


def probe_once(client: OpenAI, model: str, question: str) -> tuple[float, str]:
    """One streamed chat request -> (time to first token in seconds, text)."""
    start_s = time.monotonic()
    first_s: float | None = None
    pieces: list[str] = []
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=_PROBE_TOKENS,
        stream=True,
    ) as chunks:
        for chunk in chunks:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first_s = first_s or time.monotonic()
                pieces.append(piece)
    return (first_s or time.monotonic()) - start_s, "".join(pieces)


def _submit(client: OpenAI, base: str, path: Path, hyperparameters: dict[str, Any]) -> FineTuningJob:
    uploaded = upload_file(client, path)
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return client.fine_tuning.jobs.create(model=base, training_file=uploaded.id, suffix="demo", method=method)


def _train(
    client: OpenAI, server: LocalServer, job: FineTuningJob, held_out: list[HeldOut], display: DemoDisplay
) -> tuple[FineTuningJob, ChatProbe]:
    """Follow the job to its end with chat requests beside it."""
    with _chatting(client, job.model, held_out) as probe, display.training() as show:
        while job.status not in ENDED:
            time.sleep(_POLL_S)
            server.check_alive()
            if probe.error is not None:
                raise probe.error
            job = client.fine_tuning.jobs.retrieve(job.id)
            show(job, probe)
    if job.status != "succeeded":
        raise CliError(f"{job.id} {job.status}" + (f": {job.error.message}" if job.error else ""))
    return job, probe


@contextmanager
def _chatting(client: OpenAI, model: str, held_out: list[HeldOut]) -> Iterator[ChatProbe]:
    probe, stop = ChatProbe(), threading.Event()

    def run() -> None:
        turn, pause_s = 0, _PROBE_PAUSE_S
        while not stop.wait(pause_s):
            start_s = time.monotonic()
            try:
                ttft_s, probe.last_answer = probe_once(client, model, held_out[turn % len(held_out)].question)
            except Exception as error:  # shown by the main thread, which also ends the demo
                probe.error = error
                return
            probe.ttft_s.append(ttft_s)
            turn += 1
            pause_s = max(_PROBE_PAUSE_S, (time.monotonic() - start_s) * (1 / _PROBE_MAX_SHARE - 1))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield probe
    finally:
        stop.set()
        thread.join(timeout=10)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that the server is stopped and its folder removed."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
