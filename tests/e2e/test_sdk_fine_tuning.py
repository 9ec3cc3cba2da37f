"""The stock openai client and a whole job with an evaluation set: watched, finished, gone on from, cleaned up."""

from __future__ import annotations

import csv
import json
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJobEvent

from .conftest import chat_rows

pytestmark = pytest.mark.e2e


def _upload(client: openai.OpenAI, rows: list[dict[str, Any]], name: str) -> str:
    body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return client.files.create(file=(name, body), purpose="fine-tune").id


def _follow(client: openai.OpenAI, job_id: str, **params: str) -> list[FineTuningJobEvent]:
    """All events until the job ends, as they come."""
    return list(
        client.get(
            f"/fine_tuning/jobs/{job_id}/events", options={"params": {"stream": "true", **params}},
            cast_to=FineTuningJobEvent, stream=True, stream_cls=openai.Stream[FineTuningJobEvent],
        )
    )  # fmt: skip


def test_a_job_with_an_evaluation_set_from_upload_to_successor(embedded_server):
    client, base = embedded_server.openai, embedded_server.base_model
    rows = chat_rows(15)
    training, validation = _upload(client, rows[:12], "train.jsonl"), _upload(client, rows[12:], "valid.jsonl")
    asked = {
        "n_epochs": 2, "batch_size": 4, "eval_steps": 2, "early_stopping": {"patience": 9}, "learning_rate": 1e-3,
        "load_best_model_at_end": True, "lora": {"r": 8, "dropout": 0.05, "rank_pattern": {"q_proj": 4}},
    }  # fmt: skip
    job = client.fine_tuning.jobs.create(
        model=base, training_file=training, validation_file=validation, suffix="watched", seed=3,
        method={"type": "supervised", "supervised": {"hyperparameters": asked}},
    )  # fmt: skip
    told = _follow(client, job.id)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", told[-1]
    assert [event.id for event in told] == [event.id for event in client.fine_tuning.jobs.list_events(job.id)][::-1]
    assert [event.data["step"] for event in told if event.type == "metrics"] == [1, 2, 3, 4, 5, 6]
    middle = len(told) // 2
    assert [event.id for event in _follow(client, job.id, after=told[middle].id)] == [e.id for e in told[middle + 1 :]]

    extra = job.model_extra
    assert (
        job.validation_file == validation and extra["data"]["eval"]["examples"] == 3 and extra["data"]["examples"] == 12
    )
    assert extra["lora"]["rank_pattern"] == {"q_proj": 4} and job.hyperparameters.model_extra["save_steps"] == 3
    columns = embedded_server.http.get(f"/v1/fine_tuning/jobs/{job.id}/metrics").json()["columns"]
    assert columns["step"] == [1, 2, 3, 4, 5, 6] and None not in columns["train_loss"]
    evaluated = {
        step: loss for step, loss in zip(columns["step"], columns["valid_loss"], strict=True) if loss is not None
    }
    assert set(evaluated) == {2, 4, 6} and evaluated[6] < evaluated[2]
    table = list(csv.DictReader(client.files.content(job.result_files[0]).text.splitlines()))
    assert {int(row["step"]): float(row["valid_loss"]) for row in table if row["valid_loss"]} == evaluated
    checkpoints = {
        item.step_number: item.metrics.valid_loss for item in client.fine_tuning.jobs.checkpoints.list(job.id)
    }
    assert checkpoints[6] == evaluated[6] and evaluated.items() <= checkpoints.items()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(embedded_server.state_dir / "jobs" / job.id / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == columns["step"]
    assert {point.step: pytest.approx(point.value) for point in board.Scalars("eval/loss")} == evaluated

    successor = client.fine_tuning.jobs.create(
        model=base, training_file=training, suffix="successor", seed=3,
        extra_body={"from_checkpoint": "watched", "n_epochs": 1, "batch_size": 12, "learning_rate": 1e-4},
    )  # fmt: skip
    assert successor.hyperparameters.model_extra["from_checkpoint"].startswith("watched@")
    assert successor.model_extra["lora"]["r"] == 8
    assert _follow(client, successor.id)[-1].message == "The job has successfully completed"
    first = embedded_server.http.get(f"/v1/fine_tuning/jobs/{successor.id}/metrics").json()["columns"]["train_loss"][0]
    assert first < columns["train_loss"][0] - 0.3, "it begins where the other one ended"

    for name in ("watched", "successor"):
        answer = client.chat.completions.create(model=name, messages=rows[0]["messages"][:1], max_tokens=4)
        assert answer.choices[0].message.content
        assert client.models.delete(name).deleted
    for file in (training, validation):
        assert client.files.delete(file).deleted


def test_a_bad_validation_file_fails_its_job_naming_file_and_line(embedded_server):
    client = embedded_server.openai
    rows = chat_rows(12)
    training = _upload(client, rows, "train.jsonl")
    validation = _upload(client, [*rows[:2], {"messages": [{"role": "user", "content": "x"}]}], "valid.jsonl")
    job = client.fine_tuning.jobs.create(
        model=embedded_server.base_model, training_file=training, validation_file=validation
    )
    last = _follow(client, job.id)[-1]
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert (
        job.status == "failed" and job.error.code == "invalid_validation_file" and job.error.param == "validation_file"
    )
    assert "The validation file has 1 problem(s): line 3" in job.error.message and last.level == "error"
