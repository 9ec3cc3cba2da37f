"""Checkpoints: bit-exact resume at every place, whole or absent through every failing system call."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fineinfer.adapters.peft_io import content_hash
from fineinfer.data.packed import write_dataset
from fineinfer.messages import JobCheckpoint, LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model
from fineinfer.training import checkpoint as checkpoint_module
from fineinfer.training.checkpoint import CheckpointError, read_newest
from fineinfer.training.errors import TrainingError
from fineinfer.training.reports import Cursor
from fineinfer.training.trainer import Trainer
from fineinfer.training.trainer_checkpoints import TrainerCheckpoints

from ..waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 53,
    "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = TrainingSettings(
    lora=LoraSpec(r=2, lora_alpha=4, target_modules=("q_proj", "v_proj", "down_proj")), batch_size=2,
    n_epochs=3, learning_rate=1e-2, save_steps=2, micro_batch_tokens=16, warmup_ratio=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny_decoder(tmp_path_factory.mktemp("model"))


def load_tiny_decoder(folder: Path) -> Decoder:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(folder, dtype="float32", load_format="dummy").decoder


def start_job(folder: Path, settings: TrainingSettings = SETTINGS, seed: int = 2) -> StartJob:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 14, 6)
    rows = [(random.integers(0, CONFIG["vocab_size"], n).tolist(), [1] * int(n)) for n in lengths]
    digest = write_dataset(folder, rows)
    return StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder.parent / "adapters"), dataset_sha256=digest,
    )  # fmt: skip


def trainer_for(decoder: Decoder, job: StartJob) -> Trainer:
    return Trainer(decoder, job, lambda _t, i: i == 0)


def run(trainer: Trainer, until_step: int) -> list[JobCheckpoint]:
    """Until ``until_step`` is done and what is due there is written."""
    while trainer.step < until_step or (trainer.at_update_boundary and trainer.checkpoint_due):
        trainer.advance()
    return trainer.take_checkpoints()


def state_of(trainer: Trainer) -> dict[str, Any]:
    state = trainer._state
    tensors = {"p": state.masters.flat, "m": state.optimizer.exp_avg, "v": state.optimizer.exp_avg_sq}
    digests = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in tensors.items()}
    return digests | {"t": state.optimizer.num_updates, "log": trainer.log_history, "cursor": trainer.cursor}


@pytest.fixture(scope="module")
def uninterrupted(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trainer = trainer_for(decoder, start_job(tmp_path_factory.mktemp("whole") / "job"))
    checkpoints = run(trainer, trainer.total_steps)
    assert trainer.finished and trainer.total_steps == 9
    assert [(c.step, c.final) for c in checkpoints] == [(2, False), (4, False), (6, False), (8, False), (9, True)]
    return state_of(trainer)


@pytest.mark.parametrize("units_after", [0, 1, 3, 7])
@pytest.mark.parametrize("killed_at", [1, 2, 5, 8])
def test_resume_is_bit_exact(
    decoder: Decoder, uninterrupted: dict[str, Any], killed_at: int, units_after: int, tmp_path: Path
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, killed_at)
    for _ in range(units_after):  # dies somewhere in the next update
        trainer.advance()
    del trainer
    resumed = trainer_for(decoder, job)
    assert resumed.step == killed_at // 2 * 2
    run(resumed, resumed.total_steps)
    assert state_of(resumed) == uninterrupted


def test_parked_job_resumes_from_the_last_update_not_the_last_checkpoint(
    decoder: Decoder, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    trainer.save_resume_point()
    assert not (tmp_path / "job/checkpoints").exists()  # nothing to save yet
    run(trainer, 5)
    trainer.advance()
    trainer.advance()
    trainer.save_resume_point()
    trainer.close()
    resumed = trainer_for(decoder, job)
    assert resumed.step == 5
    assert [progress.step for progress in resumed.take_progress()] == [1, 2, 3, 4, 5]  # may have been lost
    assert "update 5" in resumed.take_notes()[0].message
    run(resumed, resumed.total_steps)
    assert state_of(resumed) == uninterrupted


def test_resume_differs_from_a_cold_start_with_the_same_weights(
    decoder: Decoder, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, 4)
    warm = trainer_for(decoder, job)
    cold = trainer_for(decoder, job)
    cold._state.optimizer.exp_avg.zero_()
    cold._state.optimizer.exp_avg_sq.zero_()
    cold._state.optimizer.num_updates = 0
    for each in (trainer, warm, cold):
        run(each, 5)
    assert state_of(warm) == state_of(trainer)
    assert state_of(cold)["p"] != state_of(trainer)["p"]


def test_checkpoint_that_was_written_but_not_announced_is_announced_on_resume(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    first = run(trainer_for(decoder, job), 9)[-1]
    again = trainer_for(decoder, job)
    assert not again.finished and again.next_update_units() == {("publish", 0): 1}
    assert again.advance().kind == "publish"
    assert again.finished
    assert again.take_checkpoints() == [first]
    with pytest.raises(TrainingError, match="finished"):
        again.advance()


def test_published_adapter_is_content_addressed_and_only_two_checkpoints_stay(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    checkpoints = run(trainer_for(decoder, job), 9)
    for checkpoint in checkpoints:
        assert Path(checkpoint.directory) == Path(job.adapters_dir) / checkpoint.version
        assert content_hash(Path(checkpoint.directory)) == checkpoint.version
    assert len({c.version for c in checkpoints}) == 5
    assert sorted(p.name for p in (tmp_path / "job/checkpoints").iterdir()) == ["step-00000008", "step-00000009"]
    state = json.loads((tmp_path / "job/checkpoints/step-00000009/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == list(range(1, 10))


def damage(folder: Path, how: str) -> None:
    name, _, action = how.partition(":")
    path = folder / name
    if action == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif action == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif action == "gone":
        path.unlink()
    else:
        path.write_text(action)


@pytest.mark.parametrize("action", ["cut", "flip", "gone"])
@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "trainer_state.json",
        "manifest.json",
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_older(
    decoder: Decoder, uninterrupted: dict[str, Any], name: str, action: str, tmp_path: Path
) -> None:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 4)
    damage(tmp_path / "job/checkpoints/step-00000004", f"{name}:{action}")
    resumed = trainer_for(decoder, job)
    assert resumed.step == 2
    assert "checkpoint of update 4 is damaged; the job goes on from update 2" in resumed.take_notes()[0].message
    run(resumed, 4)
    assert state_of(resumed)["log"] == uninterrupted["log"][:4]
    saved = read_newest(tmp_path / "job", decoder.spec, 2)  # written anew over the damaged one
    assert saved is not None and saved.step == 4


@pytest.mark.parametrize("manifest", ["", "{}", "[]", "null", '{"files": {}}', '{"files": []}', '{"files": 1}'])
def test_a_manifest_that_says_nothing(decoder: Decoder, manifest: str, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 4)
    damage(tmp_path / "job/checkpoints/step-00000004", f"manifest.json:{manifest}")
    resumed = trainer_for(decoder, job)
    assert resumed.step == 2
    resumed.advance()
    while resumed.step < 3:
        resumed.advance()
    resumed.save_resume_point()
    assert steps_on_disk(job) == [2, 3], "a damaged one is not among those that are kept"


def steps_on_disk(job: StartJob) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(job.job_dir).glob("checkpoints/step-*"))


def test_the_older_one_stays_until_two_newer_ones_are_whole(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    run(trainer, 4)
    damage(tmp_path / "job/checkpoints/step-00000004", "optimizer.safetensors:flip")
    run(trainer, 6)
    assert steps_on_disk(job) == [2, 6]
    run(trainer, 8)
    assert steps_on_disk(job) == [6, 8]


def test_a_checkpoint_that_does_not_read_back_is_not_kept(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(tmp_path / "job")
    trainer, publish = trainer_for(decoder, job), checkpoint_module._publish
    run(trainer, 4)

    def bad_disk(target: Path, *args: Any) -> None:
        publish(target, *args)
        damage(target, "optimizer.safetensors:flip")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_publish", bad_disk)
        assert run(trainer, 6) == []
    assert steps_on_disk(job) == [2, 4] and "SHA-256" in trainer.take_notes()[0].message
    run(trainer, 8)
    assert steps_on_disk(job) == [4, 8]


def test_when_no_checkpoint_is_whole_the_job_says_that_it_begins_anew(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 4)
    for step in (2, 4):
        damage(tmp_path / f"job/checkpoints/step-{step:08d}", "trainer_state.json:cut")
    resumed = trainer_for(decoder, job)
    (note,) = resumed.take_notes()
    assert resumed.step == 0 and note.level == "warn" and "goes on from update 0" in note.message


def test_a_save_that_fails_at_any_call_leaves_the_last_good_checkpoint(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    base = start_job(tmp_path / "base" / "job")
    trainer = trainer_for(decoder, base)
    run(trainer, 2)
    while trainer.step < 4:
        trainer.advance()
    assert trainer.checkpoint_due
    calls = {"left": 10**9, "made": 0}

    def failing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls["left"] -= 1
            calls["made"] += 1
            if calls["left"] < 0:
                raise OSError(5, "Input/output error")
            return real(*args, **kwargs)

        return call

    names = [(os, "fsync"), (os, "rename"), (os, "open"), (shutil, "copyfile"), (shutil, "rmtree")]
    names += [(Path, "mkdir"), (Path, "write_text"), (checkpoint_module, "save_file")]
    for index in range(60):
        folder = tmp_path / f"{index}"
        folder.mkdir()
        shutil.copytree(tmp_path / "base/job", folder / "job")
        trainer._job = msgspec.structs.replace(base, job_dir=str(folder / "job"), adapters_dir=str(folder / "adapters"))
        trainer._saved, trainer._announced_step = Cursor(step=2), 2
        calls.update(left=index, made=0)
        with monkeypatch.context() as patch:
            for owner, name in names:
                patch.setattr(owner, name, failing(getattr(owner, name)))
            while trainer.checkpoint_due:
                trainer.advance()
        done = calls["made"] <= index
        saved = read_newest(folder / "job", decoder.spec, 2)
        assert saved is not None and saved.step in (2, 4)
        for version in (folder / "adapters").glob("*") if (folder / "adapters").is_dir() else []:
            assert version.name.startswith(".tmp-") or content_hash(version) == version.name
        if done:
            assert [c.step for c in trainer.take_checkpoints()] == [4]
            break
        assert not trainer.take_checkpoints()
        assert any("Input/output error" in note.message for note in trainer.take_notes())
        resumed = trainer_for(decoder, trainer._job)  # a new process takes it from there
        assert [c.step for c in run(resumed, 4)] == ([2, 4] if saved.step == 2 else [4])
    else:
        pytest.fail("never came to the end of a save")
    assert index > 15  # that many calls could fail


def test_broken_disk_costs_a_checkpoint_but_only_at_the_end_the_job(
    decoder: Decoder, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    trainer = trainer_for(decoder, start_job(tmp_path / "job"))
    monkeypatch.setattr(os, "fsync", broken)
    assert run(trainer, 8) == []
    assert len(trainer.take_notes()) == 4
    with pytest.raises(CheckpointError) as error:
        run(trainer, 9)
    assert error.value.code == "checkpoint_failed"
    monkeypatch.undo()
    assert [c.step for c in run(trainer, 9)] == [9]
    assert state_of(trainer) == uninterrupted


@pytest.mark.parametrize("change", ["settings", "dataset"])
def test_a_checkpoint_of_another_job_is_refused(decoder: Decoder, change: str, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 2)
    if change == "settings":
        job = msgspec.structs.replace(job, settings=msgspec.structs.replace(SETTINGS, learning_rate=2e-2))
    else:
        job = start_job(tmp_path / "job", seed=5)
    with pytest.raises(TrainingError, match=f"another {change}") as error:
        trainer_for(decoder, job)
    assert error.value.code == "checkpoint_mismatch"


def test_state_survives_in_bf16_through_its_fp32_masters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decoder = load_model(tmp_path, dtype="bfloat16", load_format="dummy").decoder
    whole = trainer_for(decoder, start_job(tmp_path / "a"))
    run(whole, 6)
    job = start_job(tmp_path / "b")
    run(trainer_for(decoder, job), 4)
    resumed = trainer_for(decoder, job)
    run(resumed, 6)
    assert state_of(resumed) == state_of(whole)
    assert resumed._state.masters.flat.dtype == torch.float32 and resumed._state.compute.flat.dtype == torch.bfloat16


# ---------------------------------------------------------------- written beside training, as on a GPU


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checkpoints in a thread, which begins to write when the event is set."""
    may_write, real = threading.Event(), TrainerCheckpoints._save

    def save(self: Any, *args: Any) -> None:
        assert may_write.wait(LIMIT_S)
        real(self, *args)

    monkeypatch.setattr(TrainerCheckpoints, "_save", save)
    begin = TrainerCheckpoints._begin_checkpoints
    monkeypatch.setattr(TrainerCheckpoints, "_begin_checkpoints", lambda self: (begin(self), self._write_beside()))
    yield may_write
    may_write.set()


def files_of(job: StartJob) -> dict[str, bytes]:
    """Of both checkpoints, but for the manifest, which follows from them."""
    root = Path(job.job_dir) / "checkpoints"
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if not name.endswith("README.md")}


def test_training_goes_on_while_a_checkpoint_is_written(
    decoder: Decoder, tmp_path: Path, beside: threading.Event
) -> None:
    beside.set()
    at_once_job = start_job(tmp_path / "a")
    at_once = trainer_for(decoder, at_once_job)
    at_once._writer = None
    total = at_once.total_steps
    told = [message for step in range(1, total + 1) for message in run(at_once, step)]
    beside.clear()
    job = start_job(tmp_path / "b")
    trainer = trainer_for(decoder, job)
    every = SETTINGS.save_steps
    while trainer.step < every:
        trainer.advance()
    assert trainer.checkpoint_due and trainer.advance().kind == "checkpoint" and not trainer.checkpoint_due
    while trainer.step < 2 * every:
        assert trainer.advance().kind not in ("checkpoint", "publish")
    assert trainer.checkpoint_due and trainer.advance().kind == "checkpoint", "the next one waits for the first"
    assert trainer.take_checkpoints() == [] and not list(Path(job.job_dir).glob("checkpoints/step-*"))
    beside.set()
    got = []
    while not trainer.finished:
        trainer.advance()
        got += trainer.take_checkpoints()
    assert [(m.step, m.version, m.loss, m.final) for m in got] == [(m.step, m.version, m.loss, m.final) for m in told]
    assert files_of(job) == files_of(at_once_job)
    assert state_of(trainer) == state_of(at_once)


def test_a_checkpoint_that_fails_beside_training_costs_itself_only(
    decoder: Decoder, tmp_path: Path, beside: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside.set()
    trainer = trainer_for(decoder, start_job(tmp_path / "job"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "broken")))
        while not any(note.level == "error" for note in trainer.take_notes()):
            trainer.advance()
            assert trainer.step < trainer.total_steps
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(TrainingError, match="Input/output error"):
            while not trainer.finished:
                trainer.advance()


def test_a_resume_point_waits_for_the_checkpoint_that_is_being_written(
    decoder: Decoder, tmp_path: Path, beside: threading.Event
) -> None:
    job = start_job(tmp_path / "job")
    trainer = trainer_for(decoder, job)
    while not trainer.checkpoint_due:
        trainer.advance()
    trainer.advance()
    step = trainer.step
    threading.Timer(0.1, beside.set).start()
    trainer.save_resume_point()
    saved = read_newest(Path(job.job_dir), decoder.spec, 2)
    assert saved is not None and saved.step == step
    trainer.close()
    resumed = trainer_for(decoder, job)
    assert resumed.step == step and resumed.checkpoint_due, "it is announced by whoever resumes"
