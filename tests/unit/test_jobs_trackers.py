"""TensorBoard's files as TensorBoard reads them, and trackers that may do what they like without touching the job."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fineinfer.messages import FromEngine, JobEnded, JobEval, JobProgress
from fineinfer.server import job_trackers
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_params import JobRequest
from fineinfer.server.job_trackers import METRICS_FILE, TENSORBOARD_DIR, JobTrackers
from fineinfer.store import JobRecord, JobStatus, Store

from ..waiting import until
from .jobs_world import checkpoint, progress, quick_child, run, world

__all__ = ["quick_child"]  # a fixture

# A package that writes down what it is told; what it does besides is in the environment: it hangs or breaks.
STUB = """
import json, os, sys, time
KIND = os.path.basename(__file__)[:-3]
def note(*what):
    with open(os.path.join(os.path.dirname(__file__), KIND + ".calls"), "a") as out:
        out.write(json.dumps(what) + "\\n")
def act(where):
    for line in open(os.path.join(os.path.dirname(__file__), "behaviour")):
        if line.strip() == where + " hangs": time.sleep(600)
        if line.strip() == where + " breaks": raise RuntimeError("no such\\nproject")
        if line.strip() == where + " ends": os._exit(7)
class Run:
    class info: run_id = "run-1"
    def log(self, values, step=None): act("log"); note("log", values, step)
    def finish(self): act("finish"); note("finish")
def init(**options): note("init", options, dict(os.environ), os.getpid()); act("init"); return Run()
def finish(): Run().finish()
def set_tracking_uri(uri): note("uri", uri)
def set_experiment(name): note("experiment", name)
def start_run(**options): return init(**options)
def set_tags(tags): note("tags", tags)
def log_params(params): note("params", params)
log_metrics, end_run = Run().log, finish
"""


def evaluation(job_id: str, step: int, loss: float) -> JobEval:
    return JobEval(job_id=job_id, step=step, loss=loss, mean_token_accuracy=0.25, num_tokens=7, best=True)


class Desk:
    """A running job, its trackers and what the stub packages were told."""

    def __init__(self, folder: Path, behaviour: str = "", outbound: bool = False) -> None:
        self.folder = folder
        (folder / "behaviour").write_text(behaviour)
        for kind in ("wandb", "mlflow", "trackio"):
            (folder / f"{kind}.py").write_text(STUB)
        self.store = Store(folder / "state")
        self.trackers = JobTrackers(self.store, outbound)

    def job(self, *kinds: str, name: str = "lora") -> JobRecord:
        path = self.folder / "rows"
        path.write_text("{}\n")
        integrations = [{"type": kind, kind: {"project": "p"}} for kind in kinds]
        file = add_file(self.store, path, "x", "fine-tune").id
        job = create_job(
            self.store, JobRequest(model="base", training_file=file, suffix=name, integrations=integrations)
        )
        for status in (JobStatus.QUEUED, JobStatus.RUNNING):
            job = self.store.jobs.transition(job, status, settings={"lora": {"r": 4}})
        return job

    def send(self, job: JobRecord, *messages: FromEngine) -> None:
        for message in messages:
            self.trackers.see(job, message)

    def end(self, job: JobRecord, timeout_s: float = 30.0) -> None:
        self.send(job, JobEnded(job_id=job.id, status="succeeded"))
        self.trackers.close(timeout_s)
        assert not any(sink.is_alive() for sink in self.trackers._ending)

    def calls(self, kind: str) -> list[Any]:
        """What the package was told so far: nothing before it is imported; a line still being written is not there."""
        path = self.folder / f"{kind}.calls"
        written = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]

    def warnings(self, job: JobRecord) -> list[str]:
        return [event.message for event in self.store.jobs.events(job.id, limit=100)[0] if event.level == "warn"]

    def scalars(self, job: JobRecord) -> dict[str, list[tuple[int, float]]]:
        """Tag -> (step, value) as TensorBoard itself reads the folder."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.store.job_dir(job.id) / TENSORBOARD_DIR), size_guidance={"scalars": 0})
        found.Reload()
        return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    def lines(self, job: JobRecord) -> list[Any]:
        path = self.store.job_dir(job.id) / TENSORBOARD_DIR / METRICS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("FINEINFER_API_KEY", "secret")


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


# ---------------------------------------------------------------- TensorBoard


def test_tensorboard_reads_what_a_job_wrote_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    job = desk.job()
    desk.send(job, *(progress(job.id, step, loss=8.0 / step) for step in (1, 2, 3, 4)), evaluation(job.id, 2, 1.5))
    desk.trackers.close()  # the server stops
    desk.trackers = JobTrackers(desk.store)
    desk.send(job, progress(job.id, 3, loss=5.0), progress(job.id, 4, loss=math.nan), evaluation(job.id, 4, 1.25))
    desk.end(job)
    assert len(list((desk.store.job_dir(job.id) / TENSORBOARD_DIR).glob("events.out.tfevents.*"))) == 2
    scalars = desk.scalars(job)
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4], "replayed steps replace those before"
    assert [value for _, value in scalars["train/loss"][:3]] == [8.0, 4.0, 5.0] and math.isnan(
        scalars["train/loss"][3][1]
    )
    assert scalars["eval/loss"] == [(2, 1.5), (4, 1.25)] and scalars["eval/mean_token_accuracy"][0] == (2, 0.25)
    assert {tag for tag in scalars if tag.startswith("train/")} == {
        f"train/{name}"
        for name in ("loss", "learning_rate", "grad_norm", "epoch", "mean_token_accuracy", "tokens_per_second")
    }
    lines = desk.lines(job)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 2, 3, 4, 4] and lines[-2]["train/loss"] is None
    assert lines[4] == {"step": 2, "time": lines[4]["time"], "eval/loss": 1.5, "eval/mean_token_accuracy": 0.25}
    assert desk.warnings(job) == []


def test_jobs_have_files_of_their_own(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first, second = desk.job(), desk.job(name="other")
    desk.send(first, progress(first.id, 1))  # its engine dies, and it is cancelled before another is up: no JobEnded
    desk.send(second, progress(second.id, 1), progress(second.id, 2))
    desk.end(second)
    assert [line["step"] for line in desk.lines(first)] == [1] and [line["step"] for line in desk.lines(second)] == [
        1,
        2,
    ]


def test_a_full_disk_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, step: int, time_s: float, values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_trackers.TensorBoardWriter, "write", full)
    desk = Desk(tmp_path)
    job = desk.job()
    desk.send(job, *(progress(job.id, step) for step in range(5)))
    desk.end(job)
    assert (
        len(desk.warnings(job)) == 1 and "TensorBoard" in desk.warnings(job)[0] and "No space" in desk.warnings(job)[0]
    )


def test_the_manager_feeds_files_and_result_csv(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            trackers = JobTrackers(w.store)
            w.manager.reports.watchers.append(trackers.see)
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(progress(job.id, 1))
            await w.manager.on_engine_message(progress(job.id, 2))
            await w.manager.on_engine_message(evaluation(job.id, 2, 1.5))
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 2, final=True))
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="succeeded"))
            trackers.close()
            lines = (w.store.job_dir(job.id) / TENSORBOARD_DIR / METRICS_FILE).read_text().splitlines()
            assert [json.loads(line).get("eval/loss") for line in lines] == [None, None, 1.5]
            await w.until(lambda: w.status(job) is JobStatus.SUCCEEDED)
            result = w.store.file_path(w.store.jobs.require(job.id).result_files[0])
            with result.open(newline="") as file:
                rows = list(csv.DictReader(file))
            assert [(row["step"], row["valid_loss"], row["valid_mean_token_accuracy"]) for row in rows] == [
                ("1", "", ""), ("2", "1.5", "0.25")]  # fmt: skip

    run(scenario())


# ---------------------------------------------------------------- trackers


def test_trackers_get_the_metrics_offline(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    job = desk.job("wandb", "mlflow", "trackio")
    desk.send(job, progress(job.id, 1, loss=3.0), progress(job.id, 2, loss=math.inf), evaluation(job.id, 2, 1.5))
    desk.end(job)
    assert desk.warnings(job) == []
    name = f"lora-{job.id[6:12]}"
    for kind in ("wandb", "mlflow", "trackio"):
        calls = desk.calls(kind)
        logged = [call[1:] for call in calls if call[0] == "log"]
        assert logged[0][0]["train/loss"] == 3.0 and "train/loss" not in logged[1][0] and len(logged[1][0]) == 5
        assert [step for _, step in logged] == [1, 2, 2] and logged[2][0]["eval/loss"] == 1.5
        assert calls[-1] == ["finish"]
        environment = next(call for call in calls if call[0] == "init")[2]
        assert environment["WANDB_MODE"] == "offline" and environment["HF_HUB_OFFLINE"] == "1"
        assert not {"WANDB_API_KEY", "FINEINFER_API_KEY"} & set(environment)
    options = next(call[1] for call in desk.calls("wandb") if call[0] == "init")
    assert options["mode"] == "offline" and options["dir"] == str(tmp_path / "state" / "trackers")
    assert (options["project"], options["id"], options["resume"], options["name"]) == ("p", job.id, "allow", name)
    mlflow = desk.calls("mlflow")
    assert mlflow[0] == ["uri", f"sqlite:///{tmp_path}/state/trackers/mlflow.db"] and mlflow[1] == ["experiment", "p"]
    assert ["params", {"model": "base", "settings.lora.r": "4"}] in mlflow and mlflow[2][1] == {
        "run_id": None,
        "run_name": name,
    }
    desk.send(job, progress(job.id, 3))  # resumed
    desk.end(job)
    assert [call[1] for call in desk.calls("mlflow") if call[0] == "init"][1] == {"run_id": "run-1", "run_name": None}


def test_allow_outbound_hands_over_the_keys_of_trackers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracker.example")
    desk = Desk(tmp_path, outbound=True)
    job = desk.job("wandb", "mlflow")
    desk.send(job, progress(job.id, 1))
    desk.end(job)
    options, environment = next(call[1:3] for call in desk.calls("wandb") if call[0] == "init")
    assert options["mode"] == "online" and environment["WANDB_API_KEY"] == "secret" and "WANDB_MODE" not in environment
    assert "FINEINFER_API_KEY" not in environment
    assert "uri" not in [call[0] for call in desk.calls("mlflow")], "its own variable says where"


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("init breaks", "RuntimeError: no such"), ("log breaks", "RuntimeError: no such"), ("log ends", "status 7"),
     ("finish breaks", "RuntimeError: no such"), ("import breaks", "No module named")],
)  # fmt: skip
def test_a_tracker_that_breaks_costs_one_warning(tmp_path: Path, behaviour: str, words: str) -> None:
    desk = Desk(tmp_path, behaviour)
    job = desk.job("wandb")
    if behaviour.startswith("import"):
        (tmp_path / "wandb.py").write_text("import nothing_of_this_name")
    for step in range(1, 4):
        desk.send(job, progress(job.id, step))
        time.sleep(0.05)
    desk.end(job)
    (warning,) = desk.warnings(job)
    assert warning.startswith("wandb gets no more metrics") and (words in warning or "project" in warning)
    assert len(desk.lines(job)) == 3


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_trackers, "MAX_WAITING", 50)
    desk = Desk(tmp_path, "init hangs")
    job = desk.job("wandb")
    desk.send(job, progress(job.id, 1))
    pid = until(lambda: desk.calls("wandb"))[0][3]
    step = 1
    while not desk.warnings(job):  # its pipe fills up, then its queue
        step += 1
        desk.send(job, progress(job.id, step))
        time.sleep(0.001)
        assert step < 5000
    assert "50 points behind" in desk.warnings(job)[0]
    until(lambda: gone(pid))
    desk.end(job)
    assert len(desk.warnings(job)) == 1 and len(desk.lines(job)) == step


def test_a_tracker_that_does_not_finish_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_trackers, "FINISH_S", 0.3)
    desk = Desk(tmp_path, "finish hangs")
    job = desk.job("trackio")
    desk.send(job, progress(job.id, 1))
    until(lambda: len(desk.calls("trackio")) == 2)
    desk.end(job)
    assert "did not finish within 0.3 s" in desk.warnings(job)[0] and gone(desk.calls("trackio")[0][3])


def test_the_server_stops_whatever_a_tracker_does(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "log hangs")
    job = desk.job("wandb")
    desk.send(job, progress(job.id, 1))
    begun_s = time.monotonic()
    desk.trackers.close(0.2)
    assert time.monotonic() - begun_s < 10
    os.kill(until(lambda: desk.calls("wandb"))[0][3], 9)  # in a server the parent's end does this


def test_watching_costs_the_loop_microseconds(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    job = desk.job()
    desk.send(job, progress(job.id, 1))
    messages: list[JobProgress] = [progress(job.id, step) for step in range(2, 502)]
    begun_s = time.thread_time()
    desk.send(job, *messages)
    assert (time.thread_time() - begun_s) / len(messages) < 1e-3  # of this thread; measured 5 us
    desk.end(job)
    assert len(desk.lines(job)) == 501
