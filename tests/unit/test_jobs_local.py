"""The job of ``--lora-train``: made once, found again, replaced when it was cancelled, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fineinfer.messages import (
    JobEnded,
    StartJob,
)
from fineinfer.server.job_manager import LocalJobError

from .jobs_world import ROW, checkpoint, quick_child, run, world

__all__ = ["quick_child"]  # a fixture


def test_lora_train_makes_one_job_for_the_same_file_name_and_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text(json.dumps(ROW) + "\n")
            overrides = {"n_epochs": 2, "lora": {"r": 4}, "recompute": "never"}
            job = w.manager.create_local_job(data, "my-lora", overrides)
            assert w.manager.create_local_job(data, "my-lora", dict(reversed(overrides.items()))).id == job.id
            await w.restart_server()
            assert w.manager.create_local_job(data, "my-lora", overrides).id == job.id
            with pytest.raises(LocalJobError, match="belongs to job"):
                w.manager.create_local_job(data, "my-lora", {"n_epochs": 3})
            await w.up()
            await w.running(job)
            start = next(message for message in w.sent if isinstance(message, StartJob))
            assert (start.settings.n_epochs, start.settings.lora.r, start.settings.lora.lora_alpha) == (2, 4, 8.0)
            await w.manager.on_engine_message(checkpoint(job.id, "my-lora", 2))
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="succeeded"))
            assert w.manager.create_local_job(data, "my-lora", overrides).id == job.id, "already trained"
            w.store.adapters.delete("my-lora")
            assert w.manager.create_local_job(data, "my-lora", overrides).id != job.id, "asked for again"

    run(scenario())


def test_a_cancelled_local_job_is_replaced_with_its_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text(json.dumps(ROW) + "\n")
            job = w.manager.create_local_job(data, "my-lora", {})
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(checkpoint(job.id, "my-lora", 2))
            w.store.jobs.cancel(job.id)
            again = w.manager.create_local_job(data, "my-lora", {})
            assert again.id != job.id and w.store.adapters.resolve("my-lora@2") is None

    run(scenario())


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("base", {}, "base model"),
        ("a/b", {}, "--lora-train-name"),
        ("x", {"n_epoch": 1}, "did you mean 'n_epochs'"),
        ("x", {"lora": {"r": 100}}, "lora.r"),
    ],
)
def test_wrong_local_settings_are_one_clear_line(
    tmp_path: Path, name: str, overrides: dict[str, Any], words: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text("{}\n")
            with pytest.raises(LocalJobError, match=words):
                w.manager.create_local_job(data, name, overrides)
            with pytest.raises(LocalJobError, match="No such file"):
                w.manager.create_local_job(tmp_path / "missing", "y", {})

    run(scenario())
