"""Pause, resume and the end of a job: every order of what users ask for, engines that die, full disks, crashes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from fineinfer.messages import CancelJob, JobEnded, JobStarted, PauseJob, SetAdapter, StartJob
from fineinfer.server import job_endings, job_manager
from fineinfer.store import JobStateConflictError, JobStatus

from .jobs_world import World, checkpoint, evaluation, progress, quick_child, run, world

__all__ = ["quick_child"]  # a fixture


async def trained(w: World, name: str = "lora", steps: int = 1, **request: Any) -> Any:
    """A job that runs and has a checkpoint of each of its first steps."""
    job = w.submit(name, **request)
    await w.up()
    await w.running(job)
    await w.tell(started(job))
    for step in range(1, steps + 1):
        await w.tell(progress(job.id, step), checkpoint(job.id, name, step))
    return job


def started(job: Any) -> JobStarted:
    return JobStarted(job_id=job.id, step=0, total_steps=4, steps_per_epoch=4, num_trainable_parameters=7)


def paused(job: Any, **why: str) -> JobEnded:
    return JobEnded(job_id=job.id, status="paused", **why)


# ---------------------------------------------------------------- pause and resume


def test_a_queued_job_is_paused_at_once_and_keeps_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            first, second, third = (w.submit(name) for name in "abc")
            await w.up()
            await w.running(first)
            await w.until(lambda: w.status(third) is JobStatus.QUEUED)
            assert w.ask("pause", second).status is JobStatus.PAUSED
            assert w.store.jobs.queue() == [third.id]
            await w.tell(JobEnded(job_id=first.id, status="failed"))
            await w.running(third)
            w.ask("pause", third)
            await w.until(lambda: PauseJob(job_id=third.id) in w.sent)
            await w.tell(started(third), paused(third))
            assert second.id not in w.started()
            w.ask("resume", second)
            await w.running(second)

    run(scenario())


def test_a_running_job_is_paused_when_the_engine_let_go_and_goes_on_when_its_turn_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job, other = await trained(w), w.submit("other")
            assert w.ask("pause", job).status is JobStatus.PAUSING
            await w.until(lambda: PauseJob(job_id=job.id) in w.sent)
            await w.tell(progress(job.id, 2), checkpoint(job.id, "lora", 2))  # what was on its way counts
            assert w.status(job) is JobStatus.PAUSING and other.id not in w.started()
            await w.tell(paused(job), paused(job))
            assert w.status(job) is JobStatus.PAUSED and w.sent.count(PauseJob(job_id=job.id)) == 1
            assert w.store.jobs.require(job.id).finished_at is None
            assert "The job has been paused after step 2" in w.messages(job)
            assert w.served("lora") == 2 and [e.step for e in w.store.jobs.metrics(job.id)] == [1, 2]
            await w.running(other)
            assert w.ask("resume", job).status is JobStatus.QUEUED
            w.manager.wake()
            assert w.store.jobs.queue_position(w.store.jobs.require(job.id)) == 1
            await w.tell(JobEnded(job_id=other.id, status="failed"))
            await w.until(lambda: w.started().count(job.id) == 2)

    run(scenario())


def test_a_job_that_is_pausing_can_be_cancelled_or_come_to_its_own_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            for name, end in (("a", None), ("b", "succeeded"), ("c", "failed")):
                job = await trained(w, name)
                w.ask("pause", job)
                await w.until(lambda job=job: PauseJob(job_id=job.id) in w.sent)
                if end is None:
                    w.ask("cancel", job)
                    await w.until(lambda job=job: CancelJob(job_id=job.id) in w.sent)
                    await w.tell(paused(job))  # the answer to what it heard first
                else:
                    await w.tell(JobEnded(job_id=job.id, status=end))
                assert w.status(job) is JobStatus(end or "cancelled")

    run(scenario())


@pytest.mark.parametrize("whole_server", [False, True])
def test_an_engine_that_dies_while_a_job_is_pausing_has_paused_it(tmp_path: Path, whole_server: bool) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w)
            w.ask("pause", job)
            if whole_server:
                await w.restart_server()
            else:
                w.manager.on_engine_down()
            await w.until(lambda: w.status(job) is JobStatus.PAUSED)
            assert w.store.jobs.require(job.id).num_engine_deaths == 0
            await w.up("boot-2")
            w.ask("resume", job)
            await w.until(lambda: w.started()[-1:] == [job.id] and isinstance(w.sent[-1], StartJob))

    run(scenario())


def test_a_late_answer_to_a_pause_does_not_end_the_next_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w)
            w.ask("pause", job)
            await w.until(lambda: PauseJob(job_id=job.id) in w.sent)
            await w.tell(paused(job, error_code="disk_full", error_message="full"))  # it had before it heard of it
            w.ask("resume", job)
            await w.until(lambda: w.started().count(job.id) == 2)
            await w.tell(paused(job), started(job), progress(job.id, 2), paused(job))
            assert w.status(job) is JobStatus.RUNNING
            w.sent.clear()
            w.ask("pause", job)
            await w.until(lambda: PauseJob(job_id=job.id) in w.sent)
            await w.tell(paused(job))
            assert w.status(job) is JobStatus.PAUSED

    run(scenario())


def test_a_full_disk_pauses_the_job_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w)
            await w.tell(paused(job, error_code="disk_full", error_message="3 MiB are needed, 1 MiB is free"))
            found = w.store.jobs.require(job.id)
            assert found.status is JobStatus.PAUSED and found.error is None
            event = w.store.jobs.events(job.id)[0][0]
            assert event.level == "error" and "after step 1: 3 MiB are needed, 1 MiB is free" in event.message

    run(scenario())


def test_what_a_job_cannot_do_now_is_refused_with_what_it_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            jobs = w.store.jobs

            def refused(*actions: Any, doing: str) -> None:
                for action in actions:
                    with pytest.raises(JobStateConflictError, match=f"Job {job.id} {doing} and cannot be "):
                        action(job.id)

            refused(jobs.pause, jobs.resume, doing="is validating its files")
            await w.up()
            await w.running(job)
            refused(jobs.resume, doing="is running")
            w.ask("pause", job)
            refused(jobs.pause, jobs.resume, doing="is pausing")
            await w.until(lambda: PauseJob(job_id=job.id) in w.sent)
            await w.tell(started(job), paused(job))
            refused(jobs.pause, doing="is paused")
            w.ask("cancel", job)
            refused(jobs.pause, jobs.resume, jobs.cancel, doing="has already been cancelled")

    run(scenario())


# ---------------------------------------------------------------- the end


def test_a_crash_in_finalizing_is_finished_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w, steps=3)
            with monkeypatch.context() as patch:
                patch.setattr(job_endings, "write_result_file", killed)
                with pytest.raises(Killed):
                    await w.tell(JobEnded(job_id=job.id, status="succeeded", best_step=2, early_stopped=True))
            assert w.status(job) is JobStatus.FINALIZING and w.served("lora") == 3
            await w.restart_server()
            await w.until(lambda: w.status(job) is JobStatus.SUCCEEDED)  # no engine is needed
            assert w.served("lora") == 2 and len(w.store.jobs.require(job.id).result_files) == 1
            assert len([m for m in w.messages(job) if m.startswith("Training stopped early")]) == 1
            assert "New fine-tuned model created: lora, its checkpoint of step 2" in w.messages(job)
            await w.up("boot-2")
            assert w.sent[-1] == SetAdapter(name="lora", version="sha-2", step=2, directory="/adapters/sha-2")

    run(scenario())


def test_a_result_file_that_finds_no_room_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [False]

    def fsync(_: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fineinfer.server.job_results.os.fsync", fsync)
    monkeypatch.setattr(job_manager, "RETRY_S", 0.02)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            job, other = await trained(w), w.submit("other")
            await w.until(lambda: w.status(other) is JobStatus.QUEUED)
            num_files = len(list((w.store.state_dir / "files").iterdir()))
            full[0] = True
            await w.tell(JobEnded(job_id=job.id, status="succeeded"))
            await w.running(other)  # which is not held up
            assert w.status(job) is JobStatus.FINALIZING
            assert len(list((w.store.state_dir / "files").iterdir())) == num_files, "nothing is left of it"
            full[0] = False
            await w.until(lambda: w.status(job) is JobStatus.SUCCEEDED)
            assert sum("No space left" in message for message in w.messages(job)) == 1

    run(scenario())


def test_a_cancel_in_finalizing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w, asked={"serve": "off"})
            write = job_endings.write_result_file

            def cancelled_meanwhile(store: Any, record: Any) -> Any:
                result = write(store, record)
                store.jobs.cancel(record.id)
                return result

            monkeypatch.setattr(job_endings, "write_result_file", cancelled_meanwhile)
            files = sorted((w.store.state_dir / "files").iterdir())
            await w.tell(JobEnded(job_id=job.id, status="succeeded"))
            assert w.status(job) is JobStatus.CANCELLED and w.store.jobs.require(job.id).result_files == []
            assert sorted((w.store.state_dir / "files").iterdir()) == files and w.served("lora") is None

    run(scenario())


# ---------------------------------------------------------------- evaluations and what is served


def test_an_evaluation_joins_the_metrics_of_its_step_however_often_it_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w)
            for _ in range(2):  # an engine that died repeats what followed its checkpoint
                await w.tell(progress(job.id, 2), evaluation(job.id, 2, 1.25), checkpoint(job.id, "lora", 2))
            await w.tell(progress(job.id, 3))
            events = w.store.jobs.metrics(job.id)
            assert [event.data.get("valid_loss") for event in events] == [None, 1.25, None]
            assert events[1].data["valid_mean_token_accuracy"] == 0.25 and events[1].data["train_loss"] == 2.0
            assert events[1].message == "Step 2/4: training loss=2.0000, validation loss=1.2500"
            said = [m for m in w.messages(job) if m.startswith("Evaluation")]
            assert said == ["Evaluation at step 2: loss=1.2500, token accuracy=0.2500, the best so far"]
            shown = w.store.jobs.require(job.id).progress
            assert shown is not None and (shown["step"], shown["eval_step"], shown["eval_loss"]) == (3, 2, 1.25)
            newest, oldest = w.store.jobs.checkpoints(job.id)[0]
            assert newest.metrics == {
                "step": 2, "train_loss": 1.5, "train_mean_token_accuracy": 0.5, "valid_loss": 1.25,
                "valid_mean_token_accuracy": 0.25, "full_valid_loss": 1.25, "full_valid_mean_token_accuracy": 0.25,
            }  # fmt: skip
            assert "valid_loss" not in oldest.metrics
            w.ask("cancel", job)
            await w.tell(evaluation(job.id, 3, 0.5))
            assert "valid_loss" not in w.store.jobs.metrics_of(job.id, 3), "an ended job stays as it was"

    run(scenario())


@pytest.mark.parametrize(
    ("request_fields", "best_step", "names", "end"),
    [
        ({}, None, [1, 2, 3, 4], 4),
        ({}, 2, [1, 2, 3, 4], 2),
        ({"serve": "off"}, None, [None] * 4, 4),
        ({"serve": "off"}, 3, [None] * 4, 3),
        ({"serve": "off"}, 9, [None] * 4, 4),  # of which there is no checkpoint
        ({"publish": "if_better"}, None, [1, 2, 2, 2], 2),
        ({"publish": "if_better", "serve": "off"}, None, [None] * 4, 2),
    ],
)
def test_which_version_the_name_means(
    tmp_path: Path, request_fields: dict[str, str], best_step: int | None, names: list[int | None], end: int
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = await trained(w, steps=0, asked=request_fields)
            losses = [None, 1.0, 1.5, 1.0]  # one not evaluated, the best, worse, not better
            for step, (loss, name) in enumerate(zip(losses, names, strict=True), 1):
                evals = [] if loss is None else [evaluation(job.id, step, loss)]
                await w.tell(progress(job.id, step), *evals, checkpoint(job.id, "lora", step))
                assert w.served("lora") == name and w.served(f"lora@{step}") == step
                text = f"served as lora@{step}" + (" and lora" if name == step else "")
                assert w.messages(job)[-1] == f"Checkpoint created at step {step}; {text}"
            await w.tell(JobEnded(job_id=job.id, status="succeeded", best_step=best_step))
            assert w.status(job) is JobStatus.SUCCEEDED and w.served("lora") == end
            await w.until(lambda: [m.step for m in w.sent if isinstance(m, SetAdapter) and m.current][-1:] == [end])

    run(scenario())


def test_the_engine_is_told_what_the_job_asks_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            asked = {"serve": "live", "max_share": 0.25, "init_from": "/adapters/x"}
            await trained(w, asked=asked)
            start = next(message for message in w.sent if isinstance(message, StartJob))
            assert (start.serve, start.max_share, start.init_from, start.eval_sha256) == (
                "live",
                0.25,
                "/adapters/x",
                None,
            )

    run(scenario())


def test_watchers_hear_what_counted_and_cannot_hold_up_the_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            heard: list[tuple[str, str]] = []

            def broken(*_: Any) -> None:
                raise RuntimeError("no connection")

            w.manager.reports.watchers += [broken, lambda job, m: heard.append((type(m).__name__, job.status.value))]
            job = await trained(w)
            await w.tell(evaluation(job.id, 1, 1.0), evaluation("stranger", 1, 1.0))
            await w.tell(JobEnded(job_id=job.id, status="succeeded"), progress(job.id, 2))
            assert heard == [
                ("JobStarted", "running"), ("JobProgress", "running"), ("JobCheckpoint", "running"),
                ("JobEval", "running"), ("JobEnded", "finalizing"),
            ]  # fmt: skip
            assert w.status(job) is JobStatus.SUCCEEDED

    run(scenario())
