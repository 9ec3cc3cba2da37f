"""Every request of the stock ``openai`` SDK for files, fine-tuning and models, over real HTTP, and its every answer."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import FileObject, Model
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from fineinfer.store import CheckpointRecord, JobStatus, Store, new_id, now

ROW = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
BASE = "org/base-model"


class Desk:
    """A server with a slash in its model's name, the SDK with its own retries, and a count of the requests."""

    def __init__(self, server: Any) -> None:
        self.server, self.store = server, server.app.state.store
        self.requests: list[str] = []
        self.sdk = self.client()
        self.jobs, self.files = self.sdk.fine_tuning.jobs, self.sdk.files

    def client(self, **options: Any) -> openai.OpenAI:
        hooks = {"request": [lambda request: self.requests.append(f"{request.method} {request.url.raw_path.decode()}")]}
        return openai.OpenAI(base_url=f"{self.server.url}/v1", http_client=openai.DefaultHttpxClient(event_hooks=hooks),
                             **{"api_key": "x", "max_retries": 2, **options})  # fmt: skip

    def file(self, purpose: str = "fine-tune", name: str = "t.jsonl") -> str:
        return str(self.files.create(file=(name, ROW), purpose=purpose).id)  # type: ignore[arg-type]

    def create(self, **fields: Any) -> FineTuningJob:
        return self.jobs.create(**{"model": BASE, "training_file": self.file(), **fields})

    def fails(
        self, kind: type[openai.APIStatusError], call: Callable[[], Any], code: str, param: str | None = None
    ) -> None:
        """The call raises this exception of the SDK, after one request."""
        before = len(self.requests)
        with pytest.raises(kind) as caught:
            call()
        error = caught.value
        assert (error.code, error.param) == (code, param), error
        assert error.message and error.type and error.request_id and len(self.requests) == before + 1, self.requests[
            before:
        ]


@pytest.fixture
def desk(serve: Callable[..., Any]) -> Iterator[Desk]:
    desk = Desk(serve(served_model_name=BASE, max_file_bytes=4096))
    yield desk
    desk.sdk.close()


def valid(kind: Any, item: Any) -> None:
    """The object fits the SDK's declared type, which the SDK itself never checks."""
    kind.model_validate(item.to_dict())


# ---------------------------------------------------------------- files


def test_files(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "ünï 名.jsonl"
    path.write_bytes(ROW * 2)
    made = [
        desk.files.create(file=path, purpose="fine-tune"),
        desk.files.create(file=io.BytesIO(ROW), purpose="fine-tune"),
        desk.files.create(file=ROW, purpose="batch"),
        desk.files.create(file=("b.jsonl", ROW, "application/jsonl"), purpose="fine-tune",
                          expires_after={"anchor": "created_at", "seconds": 3600}),
    ]  # fmt: skip
    assert made[0].filename == path.name and made[0].bytes == len(ROW) * 2 and made[0].expires_at is None
    assert made[3].expires_at == made[3].created_at + 3600
    for file in made:
        valid(FileObject, file)
        assert desk.files.retrieve(file.id) == file and desk.files.wait_for_processing(file.id) == file
    assert desk.files.content(made[0].id).read() == ROW * 2 and desk.files.content(made[1].id).text == ROW.decode()
    with desk.files.with_streaming_response.content(made[2].id) as response:
        assert b"".join(response.iter_bytes(7)) == ROW
    ids = [file.id for file in made]
    assert [file.id for file in desk.files.list()] == ids[::-1]
    assert [file.id for file in desk.files.list(order="asc", limit=3)] == ids
    assert [file.id for file in desk.files.list(purpose="fine-tune", limit=1)] == [ids[3], ids[1], ids[0]]
    page = desk.files.list(limit=2, after=ids[2])
    assert [file.id for file in page.data] == [ids[1], ids[0]] and page.has_more is False
    gone = desk.files.delete(ids[0])
    assert (gone.id, gone.object, gone.deleted) == (ids[0], "file", True)
    for call in (desk.files.retrieve, desk.files.content, desk.files.delete):
        desk.fails(openai.NotFoundError, lambda call=call: call(ids[0]), "file_not_found", "id")  # type: ignore[misc]
    with pytest.raises(ValueError, match="non-empty"):
        desk.files.retrieve("")


def test_files_that_are_refused(desk: Desk) -> None:
    create = desk.files.create
    desk.fails(openai.APIStatusError, lambda: create(file=b"x" * 5000, purpose="fine-tune"), "file_too_large", "file")
    desk.fails(openai.BadRequestError, lambda: create(file=b"", purpose="fine-tune"), "invalid_request_error", "file")
    desk.fails(openai.BadRequestError, lambda: create(file=ROW, purpose="training"), "invalid_request_error", "purpose")  # type: ignore[arg-type]
    soon = {"anchor": "created_at", "seconds": 10}
    desk.fails(
        openai.BadRequestError, lambda: create(file=ROW, purpose="evals", expires_after=soon),  # type: ignore[arg-type]
        "invalid_request_error", "expires_after",
    )  # fmt: skip
    for query, param in (({"limit": 0}, "limit"), ({"after": "file-no"}, "after"), ({"order": "up"}, "order")):
        desk.fails(openai.BadRequestError, lambda q=query: desk.files.list(**q), "invalid_request_error", param)  # type: ignore[misc]


# ---------------------------------------------------------------- jobs

SHAPES: list[dict[str, Any]] = [
    {},
    {"hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}},
    {"method": {"type": "supervised"}},
    {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 4}}}},
    {"method": {"type": "supervised", "supervised": {"hyperparameters": {"lora": {"r": 4}, "save_steps": 3}}}},
    {
        "extra_body": {
            "lora": {"r": 4, "dropout": 0.1},
            "validation_split": 0.2,
            "early_stopping": True,
            "priority": "low",
        }
    },
    {"suffix": "my-lora", "seed": 5, "metadata": {"a": "b"}, "integrations": []},
    {"integrations": None, "metadata": None, "seed": None},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_jobs_are_created_in_every_shape(desk: Desk, fields: dict[str, Any]) -> None:
    job = desk.create(validation_file=None if "extra_body" in fields else desk.file(), **fields)
    valid(FineTuningJob, job)
    assert job.status == "validating_files" and job.model == BASE and job.object == "fine_tuning.job"
    assert job.id.startswith("ftjob-") and job.seed == (fields.get("seed") or 42) and job.fine_tuned_model is None
    assert desk.jobs.retrieve(job.id) == job and job.metadata == fields.get("metadata")
    assert (job.validation_file is None) == ("extra_body" in fields)
    assert desk.requests[-2:] == ["POST /v1/fine_tuning/jobs", f"GET /v1/fine_tuning/jobs/{job.id}"]


def test_jobs_that_are_refused(desk: Desk) -> None:
    bad, bad_type = openai.BadRequestError, "invalid_request_error"
    supervised: dict[str, Any] = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 0}}}
    cases: list[tuple[type[openai.APIStatusError], dict[str, Any], str, str]] = [
        (openai.NotFoundError, {"model": "gpt-4o-mini"}, "model_not_found", "model"),
        (bad, {"training_file": "file-none"}, "file_not_found", "training_file"),
        (bad, {"training_file": desk.file("batch")}, "invalid_file_purpose", "training_file"),
        (bad, {"validation_file": "file-none"}, "file_not_found", "validation_file"),
        (bad, {"method": supervised}, bad_type, "method.supervised.hyperparameters.n_epochs"),
        (bad, {"method": {"type": "dpo", "dpo": {}}}, "unsupported_parameter", "method.type"),
        (bad, {"method": {"type": "reinforcement"}}, "unsupported_parameter", "method.type"),
        (bad, {"suffix": "a/b"}, bad_type, "suffix"),
        (bad, {"seed": -1}, bad_type, "seed"),
        (bad, {"metadata": {"k": 1}}, bad_type, "metadata"),
        (bad, {"integrations": [{"type": "aim"}]}, "unsupported_parameter", "integrations[0].type"),
        (bad, {"extra_body": {"lora_r": 8}}, bad_type, "lora_r"),
        (bad, {"extra_body": {"from_checkpoint": "nobody"}}, "checkpoint_not_found", "from_checkpoint"),
    ]
    training = desk.file()
    for kind, fields, code, param in cases:
        body = {"model": BASE, "training_file": training, **fields}
        desk.fails(kind, lambda body=body: desk.jobs.create(**body), code, param)  # type: ignore[misc]
    assert desk.jobs.list().data == []
    desk.jobs.create(model=BASE, training_file=training, suffix="mine")
    taken = {"model": BASE, "training_file": training, "suffix": "mine"}
    desk.fails(bad, lambda: desk.jobs.create(**taken), "model_name_taken", "suffix")  # type: ignore[arg-type]


def test_jobs_page_and_filter(desk: Desk) -> None:
    ids = [desk.create(metadata={"team": "ab"[i % 2]}).id for i in range(5)]
    assert [job.id for job in desk.jobs.list(limit=2)] == ids[::-1]
    assert [job.id for job in desk.jobs.list(metadata={"team": "a"}, limit=2)] == [ids[4], ids[2], ids[0]]
    page = desk.jobs.list(after=ids[1])
    assert [job.id for job in page.data] == [ids[0]] and not page.has_next_page()
    assert desk.jobs.list(limit=2).has_next_page()
    desk.fails(openai.BadRequestError, lambda: desk.jobs.list(after="ftjob-no"), "invalid_request_error", "after")
    desk.fails(openai.BadRequestError, lambda: desk.jobs.list(limit=101), "invalid_request_error", "limit")


def start(store: Store, job_id: str) -> None:
    """As the supervisor would."""
    job = store.jobs.require(job_id)
    for status in (JobStatus.QUEUED, JobStatus.RUNNING):
        dataset = {"sha256": "d", "examples": 10, "format": "openai_chat", "tokens": 9, "trainable_tokens": 5}
        job = store.jobs.transition(job, status, settings={}, dataset=dataset)


def test_events_and_checkpoints_page(desk: Desk) -> None:
    job = desk.create(suffix="lora")
    start(desk.store, job.id)
    with desk.store.db.transaction():
        for step in range(1, 26):
            data = {"step": step, "total_steps": 30, "train_loss": 2.0, "epoch": 0.1, "learning_rate": 1e-4,
                    "tokens_per_second": 1.0, "eta_seconds": 9.0}  # fmt: skip
            desk.store.jobs.record_progress(job.id, step, data, step)
        for step in range(12):
            desk.store.jobs.add_checkpoint(CheckpointRecord(
                id=new_id("ftckpt"), job_id=job.id, created_at=now(), step=step, name=f"lora@{step}", version="v",
                metrics={"step": step, "train_loss": 1.0, "valid_loss": 1.5},
            ))  # fmt: skip
    events = list(desk.jobs.list_events(job.id, limit=7))
    assert len(events) == 26 and [event.type for event in events] == ["metrics"] * 25 + ["message"]
    assert events[0].data == {**data, "step": 25}
    assert len(desk.jobs.list_events(job.id).data) == 20 and desk.jobs.list_events(job.id).has_more
    checkpoints = list(desk.jobs.checkpoints.list(job.id, limit=5))
    assert [checkpoint.step_number for checkpoint in checkpoints] == list(range(11, -1, -1))
    assert checkpoints[0].metrics.valid_loss == 1.5 and checkpoints[0].fine_tuned_model_checkpoint == "lora@11"
    for event in events:
        valid(FineTuningJobEvent, event)
    for checkpoint in checkpoints:
        valid(FineTuningJobCheckpoint, checkpoint)
    running = desk.jobs.retrieve(job.id)
    valid(FineTuningJob, running)
    assert running.trained_tokens == 25 and running.estimated_finish and running.estimated_finish > now()
    for call, param in ((desk.jobs.list_events, "after"), (desk.jobs.checkpoints.list, "after")):
        desk.fails(openai.BadRequestError, lambda c=call: c(job.id, after="no"), "invalid_request_error", param)  # type: ignore[misc]
        desk.fails(openai.NotFoundError, lambda c=call: c("ftjob-no"), "job_not_found", "fine_tuning_job_id")  # type: ignore[misc]


def test_actions_and_their_conflicts_cost_one_request_each(desk: Desk) -> None:
    job = desk.create(suffix="lora")
    conflict = (openai.BadRequestError, "job_state_conflict")
    desk.fails(conflict[0], lambda: desk.jobs.resume(job.id), conflict[1])
    start(desk.store, job.id)
    assert desk.jobs.pause(job.id).status == "pausing"
    desk.store.jobs.transition(desk.store.jobs.require(job.id), JobStatus.PAUSED)
    assert desk.jobs.retrieve(job.id).status == "paused"
    assert desk.jobs.resume(job.id).status == "queued"
    cancelled = desk.jobs.cancel(job.id)
    assert cancelled.status == "cancelled" and cancelled.finished_at
    valid(FineTuningJob, cancelled)
    for action in (desk.jobs.cancel, desk.jobs.pause, desk.jobs.resume):
        desk.fails(conflict[0], lambda a=action: a(job.id), conflict[1])  # type: ignore[misc]
        desk.fails(openai.NotFoundError, lambda a=action: a("ftjob-no"), "job_not_found", "fine_tuning_job_id")  # type: ignore[misc]
    desk.fails(openai.NotFoundError, lambda: desk.jobs.retrieve("ftjob-no"), "job_not_found", "fine_tuning_job_id")
    desk.fails(openai.NotFoundError, lambda: desk.jobs.retrieve("a/b"), "not_found")
    for missing in (
        lambda: desk.sdk.fine_tuning.checkpoints.permissions.list("lora@1"),
        lambda: desk.sdk.fine_tuning.alpha.graders.run(grader={}, model_sample="x"),  # type: ignore[typeddict-item]
    ):
        desk.fails(openai.NotFoundError, missing, "not_found")


def test_the_sdks_own_stream_reads_events_as_they_come(desk: Desk) -> None:
    job = desk.create()
    start(desk.store, job.id)

    def follow() -> list[str]:
        options: Any = {"params": {"stream": "true"}}
        kinds: dict[str, Any] = {"cast_to": FineTuningJobEvent, "stream_cls": openai.Stream[FineTuningJobEvent]}
        seen = []
        for event in desk.sdk.get(f"/fine_tuning/jobs/{job.id}/events", options=options, stream=True, **kinds):
            seen.append(event.message)
            if len(seen) == 1:  # the server is heard while it waits
                desk.store.jobs.add_event(job.id, "info", "live")
            elif seen[-1] == "live":
                desk.store.jobs.cancel(job.id)
        return seen

    assert follow()[1:] == ["live", "The job has been cancelled"]


# ---------------------------------------------------------------- retries, keys


def test_a_conflict_is_asked_once_and_a_restart_is_waited_for(desk: Desk) -> None:
    job = desk.create(suffix="tone")
    desk.store.adapters.publish("tone", 1, "v1", "/d1", job.id)
    desk.fails(openai.ConflictError, lambda: desk.sdk.models.delete("tone"), "job_state_conflict", "model")
    desk.server.script("ok")
    desk.server.engine.die()
    assert desk.create(suffix="made-without-an-engine").status == "validating_files"
    timer = threading.Timer(0.5, desk.server.engine.come_back)
    timer.start()
    before, begun_s = len(desk.requests), time.monotonic()
    chat = desk.sdk.chat.completions.with_raw_response.create(model=BASE, messages=[{"role": "user", "content": "x"}])
    assert chat.retries_taken >= 1 and len(desk.requests) - before == chat.retries_taken + 1
    assert time.monotonic() - begun_s >= 2, "the SDK heeds Retry-After"
    timer.join()


def test_a_retried_create_with_a_key_makes_one_job(desk: Desk) -> None:
    fields: dict[str, Any] = {"model": BASE, "training_file": desk.file(), "extra_headers": {"Idempotency-Key": "k"}}
    first = desk.jobs.create(**fields)
    assert desk.jobs.create(**fields).id == first.id and len(desk.jobs.list().data) == 1
    fields["seed"] = 9
    desk.fails(openai.BadRequestError, lambda: desk.jobs.create(**fields), "idempotency_key_reused")
    assert desk.jobs.with_raw_response.retrieve(first.id).headers["x-request-id"]


def test_a_wrong_key_is_refused_everywhere(serve: Callable[..., Any]) -> None:
    desk = Desk(serve(served_model_name=BASE, api_keys=["right"]))
    with desk.sdk, desk.client(api_key="right") as right:
        for call in (desk.files.list, desk.jobs.list, desk.sdk.models.list, desk.file, lambda: desk.jobs.cancel("x")):
            desk.fails(openai.AuthenticationError, call, "invalid_api_key")
        file = right.files.create(file=ROW, purpose="fine-tune")
        assert right.fine_tuning.jobs.create(model=BASE, training_file=file.id).status == "validating_files"


# ---------------------------------------------------------------- models with a slash


def test_slashes_in_model_names(desk: Desk) -> None:
    desk.store.adapters.publish("team/tone:v1", 4, "v4", "/d4", None)
    desk.server.script("ok")
    names = [BASE, "team/tone:v1", "team/tone:v1@4"]
    assert [model.id for model in desk.sdk.models.list()] == names
    for name in names:
        model = desk.sdk.models.retrieve(name)
        valid(Model, model)
        assert model.id == name and desk.requests[-1] == "GET /v1/models/" + name.replace("/", "%2F")
        answer = desk.sdk.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
        assert answer.model == name and answer.choices[0].message.content == "ok"
        assert desk.server.engine.added[-1].adapter == (None if name == BASE else name)
        assert desk.sdk.completions.create(model=name, prompt="x").choices[0].text == "ok"
    answer = desk.sdk.chat.completions.create(model=f"{BASE}:team/tone:v1", messages=[{"role": "user", "content": "x"}])
    assert desk.server.engine.added[-1].adapter == "team/tone:v1"
    desk.fails(openai.NotFoundError, lambda: desk.sdk.models.retrieve("team/none"), "model_not_found", "model")
    desk.fails(openai.PermissionDeniedError, lambda: desk.sdk.models.delete(BASE), "permission_denied", "model")
    gone = desk.sdk.models.delete("team/tone:v1")
    assert (gone.id, gone.object, gone.deleted) == ("team/tone:v1", "model", True)
    assert [model.id for model in desk.sdk.models.list()] == [BASE]


# ---------------------------------------------------------------- async


def test_the_async_client_too(desk: Desk) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{desk.server.url}/v1", api_key="x") as sdk:
            files = await asyncio.gather(*(sdk.files.create(file=ROW, purpose="fine-tune") for _ in range(3)))
            assert {file.id async for file in sdk.files.list(limit=1)} == {file.id for file in files}
            assert (await sdk.files.content(files[0].id)).content == ROW
            jobs = await asyncio.gather(
                *(sdk.fine_tuning.jobs.create(model=BASE, training_file=file.id) for file in files)
            )
            assert {job.id async for job in sdk.fine_tuning.jobs.list(limit=2)} == {job.id for job in jobs}
            assert [event.level async for event in sdk.fine_tuning.jobs.list_events(jobs[0].id)] == ["info"]
            assert [item async for item in sdk.fine_tuning.jobs.checkpoints.list(jobs[0].id)] == []
            assert (await sdk.fine_tuning.jobs.cancel(jobs[0].id)).status == "cancelled"
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.fine_tuning.jobs.pause(jobs[0].id)
            assert caught.value.code == "job_state_conflict"
            assert (await sdk.models.retrieve(BASE)).id == BASE
            assert (await sdk.files.delete(files[0].id)).deleted

    asyncio.run(scenario())
