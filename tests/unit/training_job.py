"""A small fine-tuning job for an engine in this process, and what the engine tells the supervisor of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fineinfer.data.packed import write_dataset
from fineinfer.messages import JobEnded, JobNote, JobProgress, LoraSpec, StartJob, TrainingSettings

from .engine_harness import CONFIG, Harness

SETTINGS = TrainingSettings(
    lora=LoraSpec(r=4, lora_alpha=8), n_epochs=1, batch_size=4, micro_batch_tokens=128, learning_rate=1e-2,
    warmup_ratio=0.2, save_steps=2,
)  # fmt: skip


def write_job(
    folder: Path, settings: TrainingSettings = SETTINGS, num_rows: int = 12, longest: int = 100, shortest: int = 20
) -> StartJob:
    """A job on random rows of ``shortest`` to ``longest`` tokens, the latter not included."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    lengths = rng.integers(shortest, longest, num_rows)
    rows = [(rng.integers(3, CONFIG["vocab_size"], n).tolist(), [0] + [1] * (int(n) - 1)) for n in lengths]
    return StartJob(
        job_id="job", name="lora", base_model="m", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder.parent / "adapters"), dataset_sha256=write_dataset(folder, rows),
    )  # fmt: skip


class Told:
    """Everything the engine notified the supervisor of, in order."""

    def __init__(self, harness: Harness) -> None:
        self.messages: list[Any] = []
        harness.parts.outbox.notify = self.messages.append  # type: ignore[method-assign]

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def notes(self) -> list[str]:
        return [message.message for message in self.of(JobNote)]

    def losses(self) -> dict[int, float]:
        return {message.step: message.loss for message in self.of(JobProgress)}

    def end(self) -> JobEnded:
        (ended,) = self.of(JobEnded)
        return ended


def trained(job: StartJob) -> dict[str, bytes | Any]:
    """Bytes of the newest checkpoint: adapter, moments and the loss trace."""
    newest = max(Path(job.job_dir, "checkpoints").glob("step-*"))
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    state = json.loads((newest / "trainer_state.json").read_text())
    return {name: (newest / name).read_bytes() for name in names} | {"log": state["log_history"]}
