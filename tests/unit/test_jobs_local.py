"""The job of ``--lora-train``: made once, found again, replaced when it was cancelled, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fineinfer.config import ConfigError, load_config
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


def test_a_local_job_takes_a_validation_file_and_what_the_server_keeps_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data, evaluated = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
            for path in (data, evaluated):
                path.write_text(json.dumps(ROW) + "\n")
            flags = {
                "lora_train": str(data), "validation_file": str(evaluated), "eval_steps": "5", "lora_dropout": "0.1",
                "early_stopping_patience": "3", "serve_while_training": "off", "publish": "if_better",
            }  # fmt: skip
            overrides = load_config(flags).hyperparameters()
            job = w.manager.create_local_job(data, "my-lora", overrides)
            assert (job.request["serve"], job.request["publish"]) == ("off", "if_better")
            kept = w.store.job_dir(job.id) / "validation.jsonl"
            assert kept.read_text() == evaluated.read_text() and job.request["validation_file"].startswith("file-")
            assert w.manager.create_local_job(data, "my-lora", overrides).id == job.id
            await w.up()
            await w.running(job)
            start = next(message for message in w.sent if isinstance(message, StartJob))
            assert start.settings.eval_steps == 5 and start.settings.early_stopping is not None
            assert (start.settings.early_stopping.patience, start.settings.lora.lora_dropout) == (3, 0.1)
            assert start.serve == "off"
            evaluated.write_text(json.dumps(ROW) * 2)
            with pytest.raises(LocalJobError, match="belongs to"):  # another job: its evaluation would be another
                w.manager.create_local_job(data, "my-lora", overrides)
            with pytest.raises(LocalJobError, match="eval_steps needs an evaluation set"):
                w.manager.create_local_job(data, "other", {"eval_steps": 5})
            assert len(w.store.files.page()[0]) == 4, "the job that was refused for its settings left none"
            with pytest.raises(ConfigError, match="--validation-file: no such file"):
                load_config({"lora_train": str(data), "validation_file": str(tmp_path / "none")})

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
