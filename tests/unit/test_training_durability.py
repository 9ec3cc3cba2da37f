"""What is whole on the disk stays: through a checkpoint written again, errors that pass, jobs that share a folder."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fineinfer.adapters.peft_io import content_hash
from fineinfer.messages import StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.training import checkpoint as checkpoint_module
from fineinfer.training import trainer_checkpoints
from fineinfer.training.checkpoint import checkpoint_folder, end_replacements, publish_adapter, read_newest
from fineinfer.training.reports import Cursor
from fineinfer.training.trainer import Trainer

from ..waiting import LIMIT_S
from .test_training_checkpoint import beside, damage, decoder, run, start_job, steps_on_disk, trainer_for

__all__ = ["beside", "decoder"]  # fixtures


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def finish(trainer: Trainer, until_step: int) -> list[int]:
    """Steps announced until ``until_step`` is done and written, beside training or at once."""
    told = run(trainer, until_step)
    while trainer._write is not None:
        trainer._write.written.exception(LIMIT_S)
        trainer.advance()
    return [message.step for message in [*told, *trainer.take_checkpoints()]]


# ---------------------------------------------------------------- written again


@pytest.mark.parametrize("how", ["beside", "at once"])
def test_a_resume_at_a_checkpoint_publishes_it_and_writes_nothing(
    decoder: Decoder, tmp_path: Path, how: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "beside":
        request.getfixturevalue("beside").set()
    job = start_job(tmp_path / "job")
    first = trainer_for(decoder, job)
    assert finish(first, 2) == [2]
    first.close()
    written: list[int] = []
    real = trainer_checkpoints.write_checkpoint
    monkeypatch.setattr(
        trainer_checkpoints, "write_checkpoint", lambda *args: (written.append(args[-1]["step"]), real(*args))
    )
    resumed = trainer_for(decoder, job)
    assert resumed.step == 2 and resumed.next_update_units()["publish", 0] == 1
    assert finish(resumed, 2) == [2] and written == []
    assert finish(resumed, 4) == [4] and written == [4]


def evaluated_since(trainer: Trainer) -> None:
    """The state of the last update is no longer all that there is."""
    trainer.log_history.append({"step": trainer.step, "eval_loss": None})
    trainer.cursor.evaluated = trainer.cursor.evaluated.after(trainer.step, 2.0, None)


def test_writing_again_that_fails_at_any_call_leaves_the_checkpoint(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, left = trainer_for(decoder, start_job(tmp_path / "job")), 0
    run(trainer, 2)
    old = Cursor.of(trainer._durable_state()["cursor"])
    evaluated_since(trainer)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:  # once: it passes
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        return call

    names = [(os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree"), (checkpoint_module, "_verify")]
    names += [(Path, "mkdir"), (Path, "write_text"), (checkpoint_module, "save_file")]
    job_dir = tmp_path / "job"
    shutil.copytree(job_dir, tmp_path / "kept")
    for index in range(60):
        shutil.rmtree(job_dir)
        shutil.copytree(tmp_path / "kept", job_dir)
        trainer._saved, left = old, index
        with monkeypatch.context() as patch:
            for owner, name in names:
                patch.setattr(owner, name, failing(getattr(owner, name)))
            try:
                trainer.save_resume_point()
                failed = False
            except checkpoint_module.CheckpointError:
                failed = True
        saved = read_newest(job_dir, decoder.spec, 2)
        assert saved is not None and saved.step == 2, "without a start that puts something back"
        assert Cursor.of(saved.trainer_state["cursor"]) in ([old, trainer.cursor] if failed else [trainer.cursor])
        if left >= 0:
            break
    assert 15 < index < 59


@pytest.mark.parametrize("newer", ["absent", "damaged", "whole"])
def test_a_start_ends_what_a_crash_has_cut_short(decoder: Decoder, tmp_path: Path, newer: str) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, 2)
    folder = checkpoint_folder(tmp_path / "job", 2)
    shutil.copytree(folder, tmp_path / "replaced")
    evaluated_since(trainer)
    trainer.save_resume_point()
    (tmp_path / "replaced").rename(folder.with_name(".old-step-00000002"))
    if newer == "absent":
        shutil.rmtree(folder)
    elif newer == "damaged":
        damage(folder, "optimizer.safetensors:cut")
    resumed = trainer_for(decoder, job)
    assert resumed.step == 2 and not any("damaged" in note.message for note in resumed.take_notes())
    assert resumed.cursor.evaluated.step == (2 if newer == "whole" else 0)
    assert names_in(folder.parent) == {folder.name}


def test_a_checkpoint_that_cannot_be_read_now_takes_no_other_one_away(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(trainer_for(decoder, start_job(tmp_path / "job")), 2)
    folder = checkpoint_folder(tmp_path / "job", 2)
    shutil.copytree(folder, folder.with_name(".old-step-00000002"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_verify", passing(errno.EMFILE, {1}))
        end_replacements(tmp_path / "job")
    assert {folder.name, ".old-step-00000002"} <= names_in(folder.parent)
    end_replacements(tmp_path / "job")
    assert ".old-step-00000002" not in names_in(folder.parent)


# ---------------------------------------------------------------- errors that pass


def passing(code: int, at: set[int]) -> Callable[[Path], None]:
    """A ``_verify`` that fails with an errno at some of its calls, counted from 1."""
    real, count = checkpoint_module._verify, 0

    def verify(directory: Path) -> None:
        nonlocal count
        count += 1
        if count in at:
            raise OSError(code, os.strerror(code))
        real(directory)

    return verify


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_while_older_ones_are_looked_at_removes_nothing_whole(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: int
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, 4)
    run(trainer, 5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_verify", passing(code, {call}))
        try:
            trainer.save_resume_point()
            written = True
        except checkpoint_module.CheckpointError:
            written = False
    assert written == (call != 1), "it did not read back"
    # 4 is read after 5; if it cannot be, 2 is the other one that is kept
    assert steps_on_disk(job) == {1: [2, 4], 2: [2, 4, 5], 3: [4, 5]}[call]
    run(trainer, 8)
    assert steps_on_disk(job) == [6, 8]


def test_the_checkpoint_just_written_stays_though_newer_ones_are_there(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 6)
    assert steps_on_disk(job) == [4, 6]
    for step in (4, 6):
        checkpoint_folder(tmp_path / "job", step).rename(tmp_path / f"{step}")
    trainer = trainer_for(decoder, job)
    assert trainer.step == 0
    for step in (4, 6):
        (tmp_path / f"{step}").rename(checkpoint_folder(tmp_path / "job", step))
    run(trainer, 2)
    assert steps_on_disk(job) == [2, 6]


def test_what_cannot_be_removed_does_not_undo_the_checkpoint(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, 4)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_remove", refuse)
        assert [message.step for message in run(trainer, 6)] == [6]
    assert steps_on_disk(job) == [2, 4, 6] and not any(note.level == "error" for note in trainer.take_notes())
    run(trainer, 8)
    assert steps_on_disk(job) == [6, 8]


# ---------------------------------------------------------------- jobs that share a folder


def two_checkpoints(decoder: Decoder, tmp_path: Path, second_seed: int) -> tuple[StartJob, StartJob]:
    jobs = start_job(tmp_path / "a"), start_job(tmp_path / "a-b", seed=second_seed)
    for job in jobs:
        trainer = trainer_for(decoder, job)
        run(trainer, 1)
        trainer.save_resume_point()
    return jobs


@pytest.mark.parametrize("second_seed", [5, 2], ids=["two versions", "the same version"])
@pytest.mark.parametrize("order", [1, -1])
def test_two_jobs_publish_at_the_same_time(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_seed: int, order: int
) -> None:
    first, second = two_checkpoints(decoder, tmp_path, second_seed)[::order]
    adapters, real = Path(first.adapters_dir), shutil.copyfile
    in_first, go_on = threading.Event(), threading.Event()

    def slowly(source: Path, target: Path) -> None:
        real(source, target)
        if Path(source).is_relative_to(first.job_dir):
            in_first.set()
            assert go_on.wait(LIMIT_S)

    monkeypatch.setattr(shutil, "copyfile", slowly)
    done: list[tuple[str, Path]] = []
    cancelled = threading.Thread(
        target=lambda: done.append(publish_adapter(checkpoint_folder(Path(first.job_dir), 1), adapters))
    )
    cancelled.start()
    assert in_first.wait(LIMIT_S)
    done.append(publish_adapter(checkpoint_folder(Path(second.job_dir), 1), adapters))
    go_on.set()
    cancelled.join(LIMIT_S)
    assert len(done) == 2 and names_in(adapters) == {version for version, _ in done}
    assert all(content_hash(folder) == version for version, folder in done)


def test_leftovers_of_a_life_that_was_killed_are_removed(decoder: Decoder, tmp_path: Path) -> None:
    first, second = two_checkpoints(decoder, tmp_path, 5)
    adapters = Path(first.adapters_dir)
    digits = "0123456789abcdef" * 2
    own, unnamed, other = f".tmp-a-{digits}", f".tmp-{digits}", f".tmp-a-b-{digits}"
    for root in (adapters, tmp_path / "a/checkpoints"):
        for name in (own, unnamed, other):
            (root / name).mkdir(parents=True)
    trainer = trainer_for(decoder, first)
    run(trainer, 2)
    assert own not in names_in(tmp_path / "a/checkpoints") and unnamed not in names_in(tmp_path / "a/checkpoints")
    assert {name for name in names_in(adapters) if name.startswith(".tmp-")} == {other}, "of a job that may be alive"
    second_version, _ = publish_adapter(checkpoint_folder(Path(second.job_dir), 1), adapters)
    assert second_version in names_in(adapters) and other not in names_in(adapters)
