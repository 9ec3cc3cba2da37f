"""The files of a job's adapter over HTTP, and what ``fineinfer ft download`` makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fineinfer.adapters.peft_io import content_hash
from fineinfer.cli import ft_download, main
from fineinfer.cli.client import CliError
from fineinfer.server import routes_job_files
from fineinfer.server.errors import install_error_handlers
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_params import JobRequest
from fineinfer.store import Store

ROOT = "/v1/fine_tuning/jobs"


def folder_of(state: Path, step: int) -> tuple[Path, str]:
    """A PEFT folder as a checkpoint leaves it, and its version."""
    folder = state / "adapters" / f"v{step}"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"step": {step}}}')
    (folder / "adapter_model.safetensors").write_bytes(bytes([step]) * 600_000)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "secret.txt").write_text("not for clients")
    return folder, content_hash(folder)


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()
    app.state.store = Store(tmp_path / "state")
    install_error_handlers(app)
    app.include_router(routes_job_files.router)
    return app


@pytest.fixture
def job_id(app: FastAPI, tmp_path: Path) -> str:
    """A job that has published steps 2 and 4; step 2 is the best."""
    store: Store = app.state.store
    (tmp_path / "train.jsonl").write_text("{}\n")
    file = add_file(store, tmp_path / "train.jsonl", "train.jsonl", "fine-tune")
    job = create_job(store, JobRequest(model="base", training_file=file.id, suffix="lora"))
    for step in (2, 4):
        folder, version = folder_of(store.state_dir, step)
        store.adapters.publish("lora", step, version, str(folder), job.id)
    store.adapters.set_current("lora", 2)
    return job.id


@pytest.fixture
def http(app: FastAPI) -> Iterator[Any]:
    with TestClient(app) as client:
        yield client


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_the_served_version_is_listed_unless_a_step_is_asked_for(http: Any, job_id: str, app: FastAPI) -> None:
    listed = http.get(f"{ROOT}/{job_id}/adapter").json()
    assert (listed["model"], listed["step_number"]) == ("lora@2", 2)
    assert {file["name"]: file["bytes"] for file in listed["files"]} == {
        "adapter_config.json": 11, "adapter_model.safetensors": 600_000, "chat_template.jinja": 14,
    }  # fmt: skip
    newest = http.get(f"{ROOT}/{job_id}/adapter", params={"step": "4"}).json()
    assert newest["model"] == "lora@4" and newest["adapter_version"] != listed["adapter_version"]
    content = http.get(f"{ROOT}/{job_id}/adapter/adapter_model.safetensors", params={"step": "4"})
    assert content.content == bytes([4]) * 600_000 and content.headers["content-length"] == "600000"
    with app.state.store.db.transaction():  # a job that serves nothing before its end
        app.state.store.db.execute("UPDATE adapters SET current = 0")
    assert http.get(f"{ROOT}/{job_id}/adapter").json()["model"] == "lora@4"


@pytest.mark.parametrize("name", ["secret.txt", "..%2Fsecret.txt", "%2Fetc%2Fpasswd", "adapter_config.json%00"])
def test_only_the_files_of_an_adapter_go_out(http: Any, job_id: str, name: str) -> None:
    error(http.get(f"{ROOT}/{job_id}/adapter/{name}"), 404)


def test_what_is_not_there_is_said(http: Any, job_id: str, app: FastAPI) -> None:
    assert error(http.get(f"{ROOT}/ftjob-9/adapter"), 404)["code"] == "job_not_found"
    missing = error(http.get(f"{ROOT}/{job_id}/adapter", params={"step": "3"}), 404)
    assert missing["code"] == "adapter_not_found" and "steps with one: 2, 4" in missing["message"]
    for step in ("x", "-1", "1" * 40, "²"):
        assert error(http.get(f"{ROOT}/{job_id}/adapter", params={"step": step}), 400)["param"] == "step"
    (app.state.store.state_dir / "adapters" / "v2" / "chat_template.jinja").unlink()
    assert len(http.get(f"{ROOT}/{job_id}/adapter").json()["files"]) == 2
    gone = error(http.get(f"{ROOT}/{job_id}/adapter/chat_template.jinja"), 404)
    assert gone["code"] == "file_not_found"
    app.state.store.adapters.delete("lora")
    assert "none yet" in error(http.get(f"{ROOT}/{job_id}/adapter"), 404)["message"]


def test_the_client_finds_the_version_of_the_server(http: Any, job_id: str, tmp_path: Path, app: FastAPI) -> None:
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="k", http_client=http, max_retries=0)
    route = f"/fine_tuning/jobs/{job_id}/adapter"
    listed = client.get(route, cast_to=dict[str, Any])
    (tmp_path / "got").mkdir()
    ft_download._fetch_all(client, route, listed, tmp_path / "got")
    assert content_hash(tmp_path / "got") == listed["adapter_version"]
    (app.state.store.state_dir / "adapters" / "v2" / "adapter_config.json").write_text('{"step": 3}')
    (tmp_path / "again").mkdir()
    with pytest.raises(CliError, match="what came has the hash"):
        ft_download._fetch_all(client, route, listed, tmp_path / "again")


def test_the_route_is_part_of_the_server() -> None:
    from fineinfer.server.app import _ROUTES

    assert routes_job_files in _ROUTES
    assert main(["ft", "download", "--help"]) == 0
