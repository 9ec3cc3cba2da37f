"""Files and fine-tuning over HTTP with the stock OpenAI client, and the raw errors it never sends."""

from __future__ import annotations

import errno
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.server import routes_files, routes_fine_tuning, routes_job_watch
from fineinfer.server.errors import install_error_handlers
from fineinfer.server.job_params import JobRequest, Limits, data_settings, parse_job_request, resolve_settings
from fineinfer.store import CheckpointRecord, JobStatus, Store, new_id, now, to_json

ROW = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
JOBS = "/v1/fine_tuning/jobs"


class FakeEngine:
    """Counts the notices to the supervisor."""

    notices = 0
    shutting_down = False

    async def notify_store_changed(self) -> None:
        self.notices += 1


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()
    app.state.store = Store(tmp_path / "state")
    app.state.store.set_meta("limits", {"base_model": "base", "max_lora_rank": 64, "max_model_len": 2048})
    app.state.settings = types.SimpleNamespace(served_model_name="base", max_file_bytes=4096, files_quota_bytes=16384)
    app.state.engine = FakeEngine()
    install_error_handlers(app)
    app.include_router(routes_files.router)
    app.include_router(routes_fine_tuning.router)
    app.include_router(routes_job_watch.router)
    return app


@pytest.fixture
def http(app: FastAPI) -> Iterator[Any]:
    with TestClient(app) as client:
        yield client


@pytest.fixture
def sdk(http: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="k", http_client=http, max_retries=0)


def upload(http: Any, content: bytes = ROW, purpose: str = "fine-tune", name: str = "t.jsonl", **fields: str) -> Any:
    return http.post("/v1/files", files={"file": (name, content)}, data={"purpose": purpose, **fields})


def file_id(http: Any) -> str:
    return str(upload(http).json()["id"])


def error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"]
    return body


# ---------------------------------------------------------------- files


def test_a_file_goes_up_and_comes_back_byte_for_byte(sdk: openai.OpenAI, app: FastAPI) -> None:
    content = ROW + bytes(range(256)) + b"\r\n--boundary\r\n"
    made = sdk.files.create(file=("名前 \"q\".jsonl", content), purpose="fine-tune",
                            expires_after={"anchor": "created_at", "seconds": 3600})  # fmt: skip
    assert made.bytes == len(content) and made.status == "processed" and made.object == "file"
    assert made.expires_at is not None and made.expires_at - made.created_at == 3600
    assert sdk.files.content(made.id).read() == content
    assert sdk.files.retrieve(made.id).filename == made.filename
    assert app.state.store.file_path(made.id).read_bytes() == content
    assert sdk.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(made.id)
    assert list((app.state.store.state_dir / "files").iterdir()) == []


def test_files_page_through_the_sdk(sdk: openai.OpenAI, http: Any) -> None:
    ids = [file_id(http) for _ in range(5)]
    upload(http, purpose="batch")
    assert [record.id for record in sdk.files.list(limit=2, purpose="fine-tune")] == ids[::-1]
    assert [record.id for record in sdk.files.list(limit=3, order="asc", purpose="fine-tune")] == ids


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\\..\\b", "x" * 2000, "nul%00", ".."])
def test_a_filename_is_never_a_path(http: Any, app: FastAPI, name: str) -> None:
    made = upload(http, name=name).json()
    files = [path.name for path in app.state.store.state_dir.rglob("*") if path.is_file()]
    assert sorted(n for n in files if not n.startswith("fineinfer.db")) == [made["id"]]
    assert len(made["filename"]) <= 255


def test_uploads_that_are_refused_leave_nothing(http: Any, app: FastAPI) -> None:
    assert error(upload(http, b"x" * 5000), 413)["code"] == "file_too_large"
    big = {"content-type": "multipart/form-data; boundary=b", "content-length": str(1 << 40)}
    error(http.post("/v1/files", content=b"", headers=big), 413)
    assert error(upload(http, purpose="evil"))["param"] == "purpose"
    assert error(upload(http, b""))["param"] == "file"
    assert error(http.post("/v1/files", data={"purpose": "fine-tune"}, files={"other": ("x", b"y")}))["param"] == "file"
    assert error(http.post("/v1/files", json={"file": "x"}))["param"] == "file"
    assert error(upload(http, **{"expires_after[seconds]": "5"}))["param"] == "expires_after"
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
    error(http.post("/v1/files", content=cut, headers={"content-type": "multipart/form-data; boundary=b"}))
    error(http.post("/v1/files", content=b"garbage", headers={"content-type": "multipart/form-data; boundary=b"}))
    error(http.post("/v1/files", files={"file": ("x", b"y")}, data={f"f{i}": "1" for i in range(40)}))
    error(http.post("/v1/files", files={"file": ("x", b"y")}, data={"purpose": "x" * 9999}))
    assert list((app.state.store.state_dir / "files").iterdir()) == []
    assert http.get("/v1/files").json() == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip


def test_all_files_together_stay_within_the_quota(http: Any, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [upload(http, b"x" * 4000).json()["id"] for _ in range(4)]  # 16,000 of 16,384 bytes
    assert error(upload(http, b"x" * 500), 413)["code"] == "file_quota_exceeded"
    assert error(upload(http, b"x" * 5000), 413)["code"] == "file_quota_exceeded"
    assert upload(http, b"x" * 384).status_code == 200
    assert error(upload(http, b"x"), 413)["code"] == "file_quota_exceeded"
    http.delete(f"/v1/files/{made[0]}")
    # another upload ends while this one is under way
    monkeypatch.setattr(type(app.state.store.files), "total_bytes", iter([0, 16_000]).__next__)
    assert error(upload(http, b"x" * 500), 413)["code"] == "file_quota_exceeded"
    monkeypatch.undo()
    assert len(list((app.state.store.state_dir / "files").iterdir())) == 4
    assert upload(http, b"x" * 4000).status_code == 200


def test_a_full_disk_is_said_and_leaves_nothing(http: Any, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(routes_files, "_sync", full)
    response = upload(http)
    assert error(response, 507)["code"] == "disk_full" and response.headers["x-should-retry"] == "false"
    assert list((app.state.store.state_dir / "files").iterdir()) == []


def test_bytes_without_a_record_are_removed_at_start(http: Any, app: FastAPI) -> None:
    kept, store = file_id(http), app.state.store
    store.file_path("file-of-a-crash").write_bytes(b"half")
    store.job_dir("ftjob-of-a-crash").mkdir()
    (store.job_dir("ftjob-of-a-crash") / "training.jsonl").write_bytes(b"half")
    store.remove_unknown_files()
    assert list((store.state_dir / "jobs").iterdir()) == []
    assert [path.name for path in (store.state_dir / "files").iterdir()] == [kept]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=-1", "after=file-no", "order=up", "limit=²"])
def test_wrong_list_parameters_are_named(http: Any, query: str) -> None:
    assert error(http.get(f"/v1/files?{query}"))["param"] == query.partition("=")[0]


# ---------------------------------------------------------------- jobs


def test_a_job_object_has_openais_fields_and_ours(sdk: openai.OpenAI, http: Any, app: FastAPI) -> None:
    job = sdk.fine_tuning.jobs.create(
        model="base",
        training_file=file_id(http),
        suffix="my-lora",
        seed=7,
        metadata={"team": "x"},
        method={"type": "supervised", "supervised": {"hyperparameters": {
            "n_epochs": 2, "batch_size": "auto", "learning_rate": 1e-3, "lora": {"r": 8, "target_modules": ["q_proj"]},
        }}},  # type: ignore[typeddict-unknown-key]
    )  # fmt: skip
    assert job.object == "fine_tuning.job" and job.status == "validating_files" and job.seed == 7
    assert job.fine_tuned_model is None and job.error is None and job.result_files == [] and job.finished_at is None
    assert job.metadata == {"team": "x"} and job.hyperparameters.n_epochs == 2
    assert job.hyperparameters.batch_size == "auto"
    assert job.model_extra is not None and job.model_extra["adapter_name"] == "my-lora"
    assert job.model_extra["lora"]["r"] == 8
    assert app.state.engine.notices == 1
    assert sdk.fine_tuning.jobs.retrieve(job.id) == job
    assert [found.id for found in sdk.fine_tuning.jobs.list(metadata={"team": "x"})] == [job.id]
    assert [found.id for found in sdk.fine_tuning.jobs.list(metadata={"team": "y"})] == []


def test_cancel_is_final_and_a_second_one_is_not_retried(sdk: openai.OpenAI, http: Any) -> None:
    job = sdk.fine_tuning.jobs.create(model="base", training_file=file_id(http))
    cancelled = sdk.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled" and cancelled.finished_at is not None
    response = http.post(f"{JOBS}/{job.id}/cancel")
    assert error(response)["code"] == "job_state_conflict"
    assert response.headers["x-should-retry"] == "false"
    assert error(http.post(f"{JOBS}/ftjob-no/cancel"), 404)["code"] == "job_not_found"
    error(http.post(f"{JOBS}/{job.id}/explode"), 404)
    messages = [event.message for event in sdk.fine_tuning.jobs.list_events(job.id)]
    assert messages == ["The job has been cancelled", f"Created fine-tuning job: {job.id}"]


def test_events_and_checkpoints_page_newest_first(sdk: openai.OpenAI, http: Any, app: FastAPI) -> None:
    job = sdk.fine_tuning.jobs.create(model="base", training_file=file_id(http), suffix="lora")
    store: Store = app.state.store
    for i in range(45):
        store.jobs.add_event(job.id, "info", f"event {i}", {"i": i})
    for step in range(12):
        store.jobs.add_checkpoint(CheckpointRecord(
            id=new_id("ftckpt"), job_id=job.id, created_at=now(), step=step, name=f"lora@{step}", version="v",
            metrics={"step": step, "train_loss": 1.0},
        ))  # fmt: skip
    events = list(sdk.fine_tuning.jobs.list_events(job.id, limit=7))
    assert [event.message for event in events[:-1]] == [f"event {i}" for i in range(44, -1, -1)]
    assert events[0].object == "fine_tuning.job.event" and events[0].data == {"i": 44}
    checkpoints = list(sdk.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == list(range(11, -1, -1))
    assert checkpoints[0].fine_tuned_model_checkpoint == "lora@11" and checkpoints[0].fine_tuning_job_id == job.id
    assert error(http.get(f"{JOBS}/{job.id}/events?after=nope"))["param"] == "after"
    error(http.get(f"{JOBS}/nope/events"), 404)
    error(http.get(f"{JOBS}/nope/checkpoints"), 404)


def test_resolved_values_are_echoed_and_progress_shown(sdk: openai.OpenAI, http: Any, app: FastAPI) -> None:
    job = sdk.fine_tuning.jobs.create(model="base", training_file=file_id(http),
                                      hyperparameters={"learning_rate_multiplier": 2.0})  # fmt: skip
    store: Store = app.state.store
    record = store.jobs.require(job.id)
    settings = resolve_settings(msgspec.convert(record.request, JobRequest), 1000, TrainingSettings())
    dataset = {
        "format": "openai_chat",
        "examples": 1000,
        "tokens": 9,
        "trainable_tokens": 5,
        "skipped": 0,
        "truncated": 0,
    }
    record = store.jobs.transition(record, JobStatus.QUEUED, settings=msgspec.to_builtins(settings), dataset=dataset)
    assert http.get(f"{JOBS}/{job.id}").json()["queue_position"] == 1
    store.jobs.transition(record, JobStatus.RUNNING)
    data = {"step": 250, "total_steps": 1500, "epoch": 0.5, "train_loss": 1.25, "learning_rate": 1e-4,
            "tokens_per_second": 7.0, "eta_seconds": 60.0}  # fmt: skip
    store.jobs.record_progress(job.id, 250, data, 123)
    store.jobs.record_usage(job.id, 12.3456)
    shown = http.get(f"{JOBS}/{job.id}").json()
    hyper = shown["hyperparameters"]
    assert (hyper["n_epochs"], hyper["batch_size"], hyper["learning_rate_multiplier"]) == (3, 4, 2.0)
    assert hyper["learning_rate"] == pytest.approx(4e-4)
    assert shown["method"]["supervised"]["hyperparameters"] == hyper
    assert (
        shown["data"] == dataset | {"eval": None} and shown["trained_tokens"] == 123 and shown["queue_position"] is None
    )
    assert shown["progress"]["percent"] == pytest.approx(16.67) and shown["progress"]["loss"] == 1.25
    assert shown["device_seconds"] == 12.346
    assert shown["estimated_finish"] >= now() + 58
    assert shown["lora"]["r"] == 16 and shown["lora"]["alpha"] == 32.0


def test_an_idempotency_key_makes_one_job(http: Any) -> None:
    body = {"model": "base", "training_file": file_id(http), "suffix": "lora"}
    headers = {"Idempotency-Key": "k1"}
    first = http.post(JOBS, json=body, headers=headers).json()
    http.delete(f"/v1/files/{body['training_file']}")
    assert http.post(JOBS, json=dict(reversed(body.items())), headers=headers).json()["id"] == first["id"]
    response = http.post(JOBS, json={**body, "seed": 1}, headers=headers)
    assert error(response)["code"] == "idempotency_key_reused" and response.headers["x-should-retry"] == "false"
    assert len(http.get(JOBS).json()["data"]) == 1


def test_names_that_are_taken_are_refused(http: Any) -> None:
    body = {"model": "base", "training_file": file_id(http), "suffix": "lora"}
    assert http.post(JOBS, json=body).status_code == 200
    assert error(http.post(JOBS, json=body))["code"] == "model_name_taken"
    assert error(http.post(JOBS, json={**body, "suffix": "base"}))["param"] == "suffix"
    unnamed = [http.post(JOBS, json={**body, "suffix": None}).json() for _ in range(2)]
    assert all(job["adapter_name"] == f"ft-{job['id'][6:14]}" for job in unnamed)


HYPER = "method.supervised.hyperparameters"
BAD_BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "invalid_request_error"),
    ({"model": 3}, "model", "invalid_request_error"),
    ({"training_file": ""}, "training_file", "invalid_request_error"),
    ({"training_file": "file-none"}, "training_file", "file_not_found"),
    ({"training_file": "../../x"}, "training_file", "file_not_found"),
    ({"method": {"type": "dpo"}}, "method.type", "unsupported_parameter"),
    ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo", "unsupported_parameter"),
    ({"method": {"kind": "x"}}, "method.kind", "invalid_request_error"),
    ({"suffix": "a/b"}, "suffix", "invalid_request_error"),
    ({"suffix": "a@1"}, "suffix", "invalid_request_error"),
    ({"suffix": "x" * 65}, "suffix", "invalid_request_error"),
    ({"seed": -1}, "seed", "invalid_request_error"),
    ({"metadata": {"k": 1}}, "metadata", "invalid_request_error"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "invalid_request_error"),
    ({"n_epochs": 0}, "n_epochs", "invalid_request_error"),
    ({"n_epochs": 1.5}, "n_epochs", "invalid_request_error"),
    ({"n_epochs": True}, "n_epochs", "invalid_request_error"),
    ({"learning_rate": 0}, "learning_rate", "invalid_request_error"),
    ({"learning_rate": "fast"}, "learning_rate", "invalid_request_error"),
    ({"hyperparameters": {"warmup_ratio": 2}}, "hyperparameters.warmup_ratio", "invalid_request_error"),
    ({"hyperparameters": {"lr_scheduler": "step"}}, "hyperparameters.lr_scheduler", "invalid_request_error"),
    ({"max_seq_length": 4096}, "max_seq_length", "invalid_request_error"),
    ({"train_on": "user"}, "train_on", "invalid_request_error"),
    ({"format": "jsonl"}, "format", "invalid_request_error"),
    ({"skip_invalid": 1}, "skip_invalid", "invalid_request_error"),
    ({"excess_length_strategy": "cut"}, "excess_length_strategy", "invalid_request_error"),
    ({"packing": False}, "packing", "unsupported_parameter"),
    ({"lora": {"r": 65}}, "lora.r", "invalid_request_error"),
    ({"lora": {"alpha": 0}}, "lora.alpha", "invalid_request_error"),
    ({"lora": {"rslora": "yes"}}, "lora.rslora", "invalid_request_error"),
    ({"lora": {"target_modules": ["q_prj"]}}, "lora.target_modules", "invalid_request_error"),
    ({"lora": {"target_modules": []}}, "lora.target_modules", "invalid_request_error"),
    ({"lora": {"rank": 4}}, "lora.rank", "invalid_request_error"),
    ({"lora": 5}, "lora", "invalid_request_error"),
    ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"epochs": 1}}}}, f"{HYPER}.epochs",
     "invalid_request_error"),
    ({"learning_rte": 1e-4}, "learning_rte", "invalid_request_error"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "code"), BAD_BODIES)
def test_bad_bodies_name_the_field(http: Any, change: dict[str, Any], param: str, code: str) -> None:
    body = {"model": "base", "training_file": "file-x", **change}
    found = error(http.post(JOBS, json=body))
    assert (found["param"], found["code"]) == (param, code)
    assert http.get(JOBS).json()["data"] == []


def test_close_names_are_suggested_and_other_failures_shaped(http: Any, app: FastAPI) -> None:
    body = {"model": "base", "training_file": "f"}
    assert "did you mean 'learning_rate'" in error(http.post(JOBS, json={**body, "learning_rte": 1}))["message"]
    assert (
        "did you mean 'q_proj'"
        in error(http.post(JOBS, json={**body, "lora": {"target_modules": ["q_prj"]}}))["message"]
    )
    assert error(http.post(JOBS, json={**body, "model": "gpt-4"}), 404)["code"] == "model_not_found"
    error(http.post(JOBS, content=b"{nope"))
    error(http.post(JOBS, content=b"[]"))
    error(http.post(JOBS, content=b'{"model": "base", "learning_rate": NaN}'))
    batch = upload(http, purpose="batch").json()["id"]
    assert error(http.post(JOBS, json={**body, "training_file": batch}))["code"] == "invalid_file_purpose"
    assert list((app.state.store.state_dir / "jobs").iterdir()) == []


def test_nested_wins_over_older_over_flat() -> None:
    nested = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": None}}}
    body = {"model": "base", "training_file": "f", "n_epochs": 1, "save_steps": 9, "batch_size": 4, "eval_steps": None,
            "packing": True, "train_on": "assistant", "hyperparameters": {"seed": None}, "method": nested}  # fmt: skip
    with pytest.raises(ValueError, match=r"hyperparameters\.seed"):
        parse_job_request(body, Limits("base"))
    body["hyperparameters"] = {"n_epochs": 2, "max_grad_norm": 1}
    parsed = parse_job_request(body, Limits("base"))
    assert parsed.hyperparameters == {
        "n_epochs": 3, "save_steps": 9, "batch_size": 4, "max_grad_norm": 1.0, "train_on": "assistant"}  # fmt: skip
    assert to_json(parsed.hyperparameters["max_grad_norm"]) == "1.0"


def test_what_the_data_child_reads_by_is_not_the_trainers() -> None:
    asked = {"format": "alpaca", "train_on": "all", "skip_invalid": True, "excess_length_strategy": "drop"}
    body = {"model": "base", "training_file": "f", "hyperparameters": asked}
    request = parse_job_request(body, Limits("base"))
    assert msgspec.to_builtins(data_settings(request)) == asked
    assert resolve_settings(request, 80, TrainingSettings()) == resolve_settings(
        parse_job_request({"model": "base", "training_file": "f"}, Limits("base")), 80, TrainingSettings()
    )


@pytest.mark.parametrize(
    ("examples", "batch_size", "n_epochs"), [(1, 1, 3), (80, 4, 3), (10_000, 20, 3), (100_000, 64, 3), (320_000, 64, 2)]
)
def test_auto_follows_the_number_of_examples(examples: int, batch_size: int, n_epochs: int) -> None:
    settings = resolve_settings(JobRequest(model="base", training_file="f"), examples, TrainingSettings())
    assert (settings.batch_size, settings.n_epochs) == (batch_size, n_epochs)
    lora = {"r": 4, "target_modules": ["v_proj"], "rslora": True}
    asked = JobRequest(model="base", training_file="f", seed=3, hyperparameters={"n_epochs": 9, "lora": lora})
    settings = resolve_settings(asked, examples, TrainingSettings())
    assert (settings.n_epochs, settings.seed) == (9, 3)
    assert settings.lora == LoraSpec(r=4, lora_alpha=8.0, target_modules=("v_proj",), use_rslora=True)
