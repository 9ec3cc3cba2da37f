"""Evaluation in units: right numbers at the right steps, no bit of training changed, early stopping, the best step."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fineinfer.data.packed import write_dataset
from fineinfer.engine.memory_ladder import ACTIVATIONS, STATE
from fineinfer.messages import (
    EarlyStopping,
    JobCheckpoint,
    JobEval,
    JobNote,
    JobProgress,
    LoraSpec,
    StartJob,
    TrainingSettings,
)
from fineinfer.model.decoder import Decoder
from fineinfer.training.checkpoint import CheckpointError
from fineinfer.training.errors import TrainingError
from fineinfer.training.evaluation import RunningEvaluation
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps
from fineinfer.training.parking import ParkableTrainer
from fineinfer.training.reports import Cursor

from .engine_harness import Harness
from .test_training_step import CONFIG, tiny_decoder
from .training_job import SETTINGS as ENGINE_SETTINGS
from .training_job import Told, write_job

SETTINGS = TrainingSettings(
    lora=LoraSpec(r=4, lora_alpha=8), batch_size=3, gradient_accumulation_steps=2, n_epochs=3, learning_rate=1e-2,
    micro_batch_tokens=48,
)  # fmt: skip
Row = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("model"))


def rows_of(num_rows: int, seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 30, num_rows)
    return [
        (random.integers(0, CONFIG["vocab_size"], n).tolist(), [int(t >= n // 3) for t in range(n)]) for n in lengths
    ]


def write_eval(folder: Path, rows: list[Row]) -> str:
    (folder / "eval").mkdir(exist_ok=True)
    digest = write_dataset(folder / "eval", rows)
    (folder / "eval/dataset.safetensors").rename(folder / "eval.safetensors")
    return digest


def start_job(folder: Path, settings: TrainingSettings = SETTINGS, evaluated: bool = True) -> StartJob:
    folder.mkdir(exist_ok=True)
    return StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder / "adapters"), dataset_sha256=write_dataset(folder, rows_of(7, 2)),
        eval_sha256=write_eval(folder, rows_of(9, 3)) if evaluated else None,
    )  # fmt: skip


def make(decoder: Decoder, job: StartJob, ops: TrainingOps | None = None) -> ParkableTrainer:
    return ParkableTrainer(decoder, job, lambda _t, i: i % 2 == 0, 5, ops)


def run(trainer: ParkableTrainer) -> list[Any]:
    """To the end; messages in the order in which the host would send them."""
    told: list[Any] = []
    while not trainer.finished:
        trainer.advance()
        for take in (trainer.take_progress, trainer.take_evals, trainer.take_notes, trainer.take_checkpoints):
            told += take()
    return told


def of(told: list[Any], kind: type) -> list[Any]:
    return [message for message in told if isinstance(message, kind)]


def training_log(trainer: ParkableTrainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.log_history if "loss" in entry]


def script(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Evaluations come out as these."""
    left = iter(losses)
    monkeypatch.setattr(RunningEvaluation, "totals", lambda _self: (next(left), 0.5))


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize("ops", [None, REFERENCE_OPS], ids=["autograd", "fused"])
def test_loss_and_accuracy_are_those_of_the_whole_set_without_dropout(
    decoder: Decoder, tmp_path: Path, ops: TrainingOps | None
) -> None:
    settings = msgspec.structs.replace(SETTINGS, lora=msgspec.structs.replace(SETTINGS.lora, lora_dropout=0.4))
    trainer = make(decoder, start_job(tmp_path / "job", settings), ops)
    (first, *_) = of(run(trainer), JobEval)
    # the same set as the training data of a job that begins where the evaluated one was
    again = make(decoder, start_job(tmp_path / "again", settings), ops)
    while again.step < first.step:
        again.advance()
    weights = again._state.masters.flat.clone()
    whole = msgspec.structs.replace(SETTINGS, batch_size=9, gradient_accumulation_steps=1, n_epochs=1)
    other = start_job(tmp_path / "other", whole, evaluated=False)
    other = msgspec.structs.replace(other, dataset_sha256=write_dataset(tmp_path / "other", rows_of(9, 3)))
    reference = make(decoder, other, ops)
    reference._state.masters.flat.copy_(weights)
    while reference.step < 1:
        reference.advance()
    assert first.loss == pytest.approx(reference.log_history[0]["loss"], rel=1e-6)
    assert first.mean_token_accuracy == reference.log_history[0]["mean_token_accuracy"]
    assert first.num_tokens == sum(sum(mask[1:]) for _, mask in rows_of(9, 3))
    entry = next(entry for entry in trainer.log_history if "eval_loss" in entry)
    assert entry["eval_loss"] == first.loss and (entry["step"], entry["epoch"]) == (3, 1.0)


@pytest.mark.parametrize("ops", [None, REFERENCE_OPS], ids=["autograd", "fused"])
def test_evaluating_changes_no_bit_of_training(decoder: Decoder, tmp_path: Path, ops: TrainingOps | None) -> None:
    plain = make(decoder, start_job(tmp_path / "plain", evaluated=False), ops)
    run(plain)
    settings = msgspec.structs.replace(SETTINGS, eval_steps=1)
    evaluated = make(decoder, start_job(tmp_path / "evaluated", settings), ops)
    assert len(of(run(evaluated), JobEval)) == evaluated.total_steps == 9
    assert training_log(evaluated) == plain.log_history
    assert torch.equal(evaluated._state.masters.flat, plain._state.masters.flat)
    assert torch.equal(evaluated._state.optimizer.exp_avg_sq, plain._state.optimizer.exp_avg_sq)


# ---------------------------------------------------------------- when


@pytest.mark.parametrize(("eval_steps", "expected"), [(0, [3, 6, 9]), (2, [2, 4, 6, 8, 9]), (4, [4, 8, 9]), (20, [9])])
def test_it_runs_each_eval_steps_or_epoch_and_at_the_end_between_progress_and_checkpoint(
    decoder: Decoder, tmp_path: Path, eval_steps: int, expected: list[int]
) -> None:
    settings = msgspec.structs.replace(SETTINGS, eval_steps=eval_steps, save_steps=3)
    told = run(make(decoder, start_job(tmp_path / "job", settings)))
    evals = of(told, JobEval)
    assert [message.step for message in evals] == expected
    assert [message.step for message in of(told, JobCheckpoint)] == [3, 6, 9]
    lowest = math.inf
    for message in evals:
        assert message.best == (message.loss < lowest)
        lowest = min(lowest, message.loss)
    order = {JobProgress: 0, JobEval: 1, JobCheckpoint: 2}
    keys = [(message.step, order[type(message)]) for message in told if type(message) in order]
    assert keys == sorted(keys)


def test_units_are_as_planned_and_each_micro_batch_is_one_to_the_scheduler(decoder: Decoder, tmp_path: Path) -> None:
    trainer = make(decoder, start_job(tmp_path / "job"))
    while trainer.step < 3:
        trainer.advance()
    assert not trainer.finished and trainer.checkpoint_due  # which waits for the evaluation
    num_batches = 0
    while trainer.take_evals() == []:
        assert trainer.at_update_boundary and not trainer.remaining_units()
        planned, ran = trainer.next_update_units(), Counter[tuple[str, int]]()
        if planned == {("eval_end", 0): 1}:
            assert not trainer.begins_micro_batch and trainer.next_unit_waits
            assert trainer.advance().kind == "eval_end"
            continue
        num_batches += 1
        assert trainer.begins_micro_batch and not trainer.next_unit_waits
        tokens = trainer.next_micro_batch_tokens()
        assert tokens <= 48
        least, most = trainer.next_micro_batch_bytes()
        assert least <= trainer.bytes_if_recomputed(trainer.max_micro_batch_tokens)
        assert least == most < trainer.bytes_if_recomputed(tokens)
        while not ran or trainer.micro_batch_open:
            report = trainer.advance()
            ran[report.kind, report.num_tokens] += 1
            if trainer.micro_batch_open:
                assert trainer.remaining_units() == planned - ran == trainer.left_of_micro_batch()
                assert trainer.lost_by_abort() == trainer.lost_by_park() == ran
                assert trainer.held_bytes() == 32 * 4 * tokens and trainer.num_kept_layers() == 0
                assert trainer.drop_kept() == (0, 0) and not trainer.next_unit_waits
        assert ran == planned and {kind for kind, _ in ran} == {"eval_embed", "eval_forward", "eval_head"}
        assert sum(count for (kind, _), count in ran.items() if kind == "eval_forward") == 4
    assert num_batches > 2
    assert trainer.advance().kind == "checkpoint"


def test_a_long_validation_example_counts_for_the_memory_that_a_job_needs(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    plain = make(decoder, job).max_micro_batch_tokens
    assert plain == make(decoder, start_job(tmp_path / "plain", evaluated=False)).max_micro_batch_tokens
    long = [([1] * 120, [1] * 120)]
    trainer = make(decoder, msgspec.structs.replace(job, eval_sha256=write_eval(tmp_path / "job", long)))
    assert trainer.max_micro_batch_tokens == 120 > plain


def test_what_is_given_up_in_mid_evaluation_runs_again_with_the_same_result(decoder: Decoder, tmp_path: Path) -> None:
    quiet = make(decoder, start_job(tmp_path / "quiet"))
    expected = run(quiet)
    trainer = make(decoder, start_job(tmp_path / "other"))
    told: list[Any] = []
    disturbed: Counter[str] = Counter()
    unit = 0
    while not trainer.finished:
        report = trainer.advance()
        unit += 1
        if report.kind.startswith("eval_"):
            if unit % 7 == 0 and disturbed["abort"] < 9:
                trainer.abort_micro_batch()
                assert trainer.held_bytes() == 0
                disturbed["abort"] += 1
            elif unit % 11 == 0 and disturbed["park"] < 4:
                trainer.park()
                trainer.unpark()
                trainer.take_notes(), trainer.take_progress()
                trainer._reports = [r for r in trainer._reports if not isinstance(r, JobEval)]  # told again, on a CPU
                disturbed["park"] += 1
        told += trainer.take_evals()
    assert disturbed == {"abort": 9, "park": 4}
    assert told == of(expected, JobEval)
    assert trainer.log_history == quiet.log_history
    assert torch.equal(trainer._state.masters.flat, quiet._state.masters.flat)


@pytest.mark.parametrize("units_after", [0, 1, 9])
def test_a_kill_in_mid_evaluation_runs_it_again(decoder: Decoder, tmp_path: Path, units_after: int) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, eval_steps=2, save_steps=1, early_stopping=EarlyStopping(patience=1, min_delta=0.05)
    )
    whole = make(decoder, start_job(tmp_path / "whole", settings))
    expected = run(whole)
    job = start_job(tmp_path / "job", settings)
    trainer = make(decoder, job)
    while trainer._evaluation is None or trainer.step < 4:
        trainer.advance()
    for _ in range(units_after):
        trainer.advance()
    assert trainer._evaluation is not None
    if units_after:
        trainer.save_resume_point()  # as a pause or a park does
    resumed = make(decoder, job)
    assert resumed.step == (4 if units_after else 3)
    evals = {message.step: message for message in of(run(resumed), JobEval)}
    assert [evals[message.step] for message in of(expected, JobEval)] == of(expected, JobEval)  # the older one again
    assert resumed.log_history == whole.log_history and resumed.cursor == whole.cursor
    assert torch.equal(resumed._state.masters.flat, whole._state.masters.flat)


STOPPING = msgspec.structs.replace(
    SETTINGS, n_epochs=6, save_steps=100, eval_steps=2, learning_rate=3e-2,
    early_stopping=EarlyStopping(patience=1, min_delta=0.05),
)  # fmt: skip


def park(trainer: ParkableTrainer, job: StartJob, decoder: Decoder) -> ParkableTrainer:
    trainer.park()
    trainer.unpark()
    return trainer


def pause(trainer: ParkableTrainer, job: StartJob, decoder: Decoder) -> ParkableTrainer:
    trainer.save_and_leave()
    trainer.close()
    return make(decoder, job)


def written_log(job: StartJob) -> dict[str, Any]:
    newest = max(Path(job.job_dir, "checkpoints").glob("step-*"))
    return dict(json.loads((newest / "trainer_state.json").read_text()))


def check_same_end(trainer: ParkableTrainer, job: StartJob, quiet: ParkableTrainer, quiet_job: StartJob) -> None:
    assert trainer.cursor == quiet.cursor and trainer.log_history == quiet.log_history
    assert torch.equal(trainer._state.masters.flat, quiet._state.masters.flat)
    assert written_log(job) == written_log(quiet_job)


@pytest.mark.parametrize("second", [park, pause])
@pytest.mark.parametrize("first", [park, pause])
def test_an_evaluation_whose_update_is_on_disk_already_is_written_too(
    decoder: Decoder, tmp_path: Path, first: Any, second: Any
) -> None:
    quiet_job, job = start_job(tmp_path / "quiet", STOPPING), start_job(tmp_path / "job", STOPPING)
    quiet = make(decoder, quiet_job)
    run(quiet)
    assert quiet.early_stopped and 2 < quiet.step < quiet.total_steps
    trainer = make(decoder, job)
    while trainer.step < 2 or not trainer.micro_batch_open:
        trainer.advance()
    trainer = first(trainer, job, decoder)  # in mid-evaluation: the update is written, the evaluation is not
    while trainer.step < 2 or trainer._evaluation is not None or not trainer.micro_batch_open:
        trainer.advance()
    told = trainer.cursor.evaluated
    trainer = second(trainer, job, decoder)  # in the update after it
    assert trainer.cursor.evaluated == told and told.step == 2 and trainer._evaluation is None
    run(trainer)
    check_same_end(trainer, job, quiet, quiet_job)


@pytest.mark.parametrize("leave", [park, pause])
def test_the_last_evaluation_is_in_the_last_checkpoint(decoder: Decoder, tmp_path: Path, leave: Any) -> None:
    quiet_job, job = start_job(tmp_path / "quiet", STOPPING), start_job(tmp_path / "job", STOPPING)
    quiet, trainer = make(decoder, quiet_job), make(decoder, job)
    run(quiet)
    while trainer.step < quiet.step or not trainer.micro_batch_open:
        trainer.advance()
    trainer = leave(trainer, job, decoder)
    run(trainer)
    assert written_log(job)["cursor"]["evaluated"]["stopped"]
    check_same_end(trainer, job, quiet, quiet_job)


@pytest.mark.parametrize("seed", range(3))
def test_parks_and_pauses_at_any_unit_change_no_verdict(decoder: Decoder, tmp_path: Path, seed: int) -> None:
    quiet_job, job = start_job(tmp_path / "quiet", STOPPING), start_job(tmp_path / "job", STOPPING)
    quiet, trainer = make(decoder, quiet_job), make(decoder, job)
    run(quiet)
    rng, num_left = np.random.default_rng(seed), 0
    while not trainer.finished:
        trainer.advance()
        if rng.random() < 0.04 and not trainer.finished:
            trainer = (park if rng.random() < 0.7 else pause)(trainer, job, decoder)
            num_left += 1
    assert num_left > 3
    check_same_end(trainer, job, quiet, quiet_job)


@pytest.mark.parametrize("lost", [2, 3])
def test_going_back_behind_an_evaluation_runs_it_again(decoder: Decoder, tmp_path: Path, lost: int) -> None:
    """Parked in the evaluation after update ``lost``, or in the update after it, and its checkpoint is damaged."""
    settings = msgspec.structs.replace(STOPPING, save_steps=1)
    quiet_job, job = start_job(tmp_path / "quiet", settings), start_job(tmp_path / "job", settings)
    quiet, trainer = make(decoder, quiet_job), make(decoder, job)
    run(quiet)
    while trainer.step < lost or not trainer.micro_batch_open:
        trainer.advance()
    assert (trainer._evaluation is not None) == (lost == 2)
    trainer.park()
    (tmp_path / f"job/checkpoints/step-{lost:08d}/optimizer.safetensors").write_bytes(b"")
    trainer.unpark()
    assert trainer.step == lost - 1 and trainer._evaluation is None
    run(trainer)
    check_same_end(trainer, job, quiet, quiet_job)


# ---------------------------------------------------------------- what it decides


def plain_verdict(losses: list[float], rule: EarlyStopping) -> tuple[int | None, int | None]:
    """(best evaluation, evaluation after which it ends), from 1, written as one would say it."""
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    best = None if min(finite) == math.inf else finite.index(min(finite)) + 1
    bad = 0
    for index, loss in enumerate(finite):
        marks = [math.inf]  # losses that counted as better when they came
        for earlier in finite[:index]:
            if earlier < marks[-1] - rule.min_delta or (marks[-1] == math.inf and earlier < math.inf):
                marks.append(earlier)
        better = loss < math.inf and (marks[-1] == math.inf or loss < marks[-1] - rule.min_delta)
        bad = 0 if better else bad + (index >= rule.warmup_evals)
        if bad >= rule.patience:
            best = None if min(finite[: index + 1]) == math.inf else finite.index(min(finite[: index + 1])) + 1
            return best, index + 1
    return best, None


@given(
    losses=st.lists(st.sampled_from([1.0, 1.1, 1.5, 2.0, 2.05, math.nan, math.inf]), min_size=1, max_size=12),
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.07, 0.5]),
    warmup=st.integers(0, 3),
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_verdicts_follow_the_rule_and_survive_json(
    losses: list[float], patience: int, min_delta: float, warmup: int
) -> None:
    rule = EarlyStopping(patience=patience, min_delta=min_delta, warmup_evals=warmup)
    cursor = Cursor()
    stopped_at = None
    for index, loss in enumerate(losses, 1):
        cursor.evaluated = cursor.evaluated.after(index, loss, rule)
        saved = json.loads(json.dumps(msgspec.to_builtins(cursor), allow_nan=False))
        assert Cursor.of(saved) == cursor
        if cursor.evaluated.stopped:
            stopped_at = index
            break
    assert (cursor.evaluated.best_step, stopped_at) == plain_verdict(losses, rule)


def test_a_job_stops_early_and_names_its_best_step(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, eval_steps=1, early_stopping=EarlyStopping(patience=2), load_best_model_at_end=True
    )
    script(monkeypatch, [3.0, 2.0, 2.5, 1.5, 1.6, 1.5])
    job = start_job(tmp_path / "job", settings)
    trainer = make(decoder, job)
    told = run(trainer)
    assert (trainer.step, trainer.best_step, trainer.early_stopped) == (6, 4, True)
    assert [message.step for message in of(told, JobEval) if message.best] == [1, 2, 4]
    # each best step has a version, besides those of the epochs; the last one is final
    assert [(m.step, m.final) for m in of(told, JobCheckpoint)] == [
        (1, False), (2, False), (3, False), (4, False), (6, True),
    ]  # fmt: skip
    assert any("stopped early after update 6" in note.message and "1.5" in note.message for note in of(told, JobNote))
    with pytest.raises(TrainingError, match="finished"):
        trainer.advance()
    again = make(decoder, job)  # the answer to it was lost: it only says again what it is
    assert not again.next_update_units() - Counter({("publish", 0): 1})
    assert [type(message) for message in of(run(again), JobCheckpoint)] == [JobCheckpoint]
    assert (again.step, again.best_step, again.early_stopped) == (6, 4, True)


def test_disk_space_is_asked_for_the_best_versions_too(decoder: Decoder, tmp_path: Path) -> None:
    counted = []
    for wanted in ({}, {"load_best_model_at_end": True}, {"early_stopping": EarlyStopping()}):
        settings = msgspec.structs.replace(SETTINGS, eval_steps=2, **wanted)
        counted.append(sorted(make(decoder, start_job(tmp_path / "job", settings))._publishing_steps(3)))
    assert counted == [[3, 6, 9], [3, 4, 6, 8, 9], [3, 4, 6, 8, 9]]


def test_without_a_wish_for_the_best_no_checkpoint_is_written_for_it(decoder: Decoder, tmp_path: Path) -> None:
    trainer = make(decoder, start_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, eval_steps=1)))
    assert [message.step for message in of(run(trainer), JobCheckpoint)] == [3, 6, 9]
    assert trainer.best_step is None and not trainer.early_stopped


def test_a_loss_that_is_not_finite_is_told_but_never_best(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(SETTINGS, load_best_model_at_end=True)
    script(monkeypatch, [math.nan, 2.0, -math.inf])
    trainer = make(decoder, start_job(tmp_path / "job", settings))
    told = run(trainer)
    assert [(message.step, message.loss, message.best) for message in of(told, JobEval)] == [(6, 2.0, True)]
    assert trainer.best_step == 6
    assert ["not finite" in note.message for note in of(told, JobNote)] == [True, True]
    assert [entry["eval_loss"] for entry in trainer.log_history if "eval_loss" in entry] == [None, 2.0, None]
    state = json.loads((tmp_path / "job/checkpoints/step-00000009/trainer_state.json").read_text())
    assert state["log_history"] == trainer.log_history


def test_a_best_step_whose_checkpoint_failed_is_not_named(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(SETTINGS, load_best_model_at_end=True)
    script(monkeypatch, [1.0, 2.0, 3.0])
    trainer = make(decoder, start_job(tmp_path / "job", settings))
    save = ParkableTrainer._save
    failing = [True]

    def fail_once(self: ParkableTrainer, *args: Any) -> None:
        if failing.pop() if failing else False:
            raise CheckpointError("no")
        save(self, *args)

    monkeypatch.setattr(ParkableTrainer, "_save", fail_once)
    assert [message.step for message in of(run(trainer), JobCheckpoint)] == [6, 9]
    assert trainer.best_step == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"early_stopping": EarlyStopping()}, "validation data"),
        ({"load_best_model_at_end": True}, "validation data"),
        ({"early_stopping": EarlyStopping(patience=0)}, "patience"),
        ({"early_stopping": EarlyStopping(min_delta=-1.0)}, "min_delta"),
        ({"early_stopping": EarlyStopping(warmup_evals=-1)}, "warmup_evals"),
        ({"eval_steps": -1}, "eval_steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    decoder: Decoder, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(TrainingError, match=named) as error:
        make(decoder, start_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, **change), evaluated=False))
    assert error.value.code == "invalid_hyperparameters"


def test_another_validation_set_is_refused_and_empty_rows_are_told(decoder: Decoder, tmp_path: Path) -> None:
    job = start_job(tmp_path / "job")
    trainer = make(decoder, job)
    while trainer.step < 3 or trainer.checkpoint_due:
        trainer.advance()
    other = msgspec.structs.replace(job, eval_sha256=write_eval(tmp_path / "job", [*rows_of(3, 8), ([4], [1])]))
    with pytest.raises(TrainingError, match="another eval_sha256"):
        make(decoder, other)
    with pytest.raises(TrainingError, match=r"eval\.safetensors has SHA-256"):
        make(decoder, job)
    fresh = msgspec.structs.replace(other, job_dir=str(tmp_path / "job"))
    for folder in (tmp_path / "job/checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    assert any("1 validation examples" in note.message for note in make(decoder, fresh).take_notes())
    bad = msgspec.structs.replace(job, eval_sha256=write_eval(tmp_path / "job", [([1, 61], [1, 1])]))
    with pytest.raises(TrainingError, match="outside 0 to 60"):
        make(decoder, bad)


def test_the_engine_evaluates_beside_requests_and_tells_how_the_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(
        ENGINE_SETTINGS, n_epochs=4, eval_steps=1, early_stopping=EarlyStopping(patience=1), load_best_model_at_end=True
    )
    script(monkeypatch, [2.0, 1.0, 1.5])
    harness = Harness(tmp_path, policy="slo")
    told = Told(harness)
    job = write_job(tmp_path / "job", settings)
    job = msgspec.structs.replace(job, eval_sha256=write_eval(tmp_path / "job", rows_of(5, 3)))
    training, kinds = harness.parts.training, set()
    training.start(job)

    def request_in_mid_evaluation(turn: int) -> None:
        trainer = training.trainer
        if trainer is not None and trainer._evaluation is not None:
            kinds.add(next(iter(trainer.remaining_units() or trainer.next_update_units()))[0])
            if trainer.micro_batch_open and len(harness.outputs) < 4:
                harness.add(f"r{len(harness.outputs)}", [5, 6, 7], max_tokens=20)

    harness.add("first", [5, 6, 7], max_tokens=20)
    for _ in range(2000):
        harness.run(request_in_mid_evaluation)
        if training.trainer is None:
            break
        request_in_mid_evaluation(0)
        training.run_unit()
    assert len({tuple(harness.tokens(name)) for name in harness.outputs}) == 1 and len(harness.outputs) == 4
    ended = told.end()
    assert (ended.status, ended.best_step, ended.early_stopped) == ("succeeded", 2, True)
    assert [(message.step, message.loss) for message in told.of(JobEval)] == [(1, 2.0), (2, 1.0), (3, 1.5)]
    assert kinds == {"eval_embed", "eval_forward", "eval_head", "eval_end"} <= set(training._latency.averages_ms())
    governor = harness.parts.ladder._governor
    assert governor.leased(ACTIVATIONS) == governor.leased(STATE) == 0
    harness.close()
