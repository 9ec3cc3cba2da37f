"""The preemptible step: same bits whatever was kept, memory really freed, honest plans; non-finite updates."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fineinfer.data.packed import write_dataset
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import base_weights_hash, load_model
from fineinfer.training.errors import TrainingError
from fineinfer.training.projection import TrainingProjection
from fineinfer.training.trainer import Trainer

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61,
    "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = TrainingSettings(
    lora=LoraSpec(r=4, lora_alpha=8), batch_size=3, gradient_accumulation_steps=2, n_epochs=2, learning_rate=1e-2
)


def tiny_decoder(folder: Path, dtype: str = "float32") -> Decoder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(folder, dtype=dtype, load_format="dummy").decoder


def start_job(folder: Path, settings: TrainingSettings, num_rows: int = 7) -> StartJob:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(2)
    lengths = random.integers(2, 20, num_rows)
    rows = [
        (random.integers(0, CONFIG["vocab_size"], n).tolist(), [int(t >= n // 3) for t in range(n)]) for n in lengths
    ]
    digest = write_dataset(folder, rows)
    return StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder / "adapters"), dataset_sha256=digest,
    )  # fmt: skip


def run_updates(trainer: Trainer, num_updates: int, before_unit: Callable[[int], object] = id) -> list[torch.Tensor]:
    """Gradients (before clipping) of each update."""
    gradients, unit = [], 0
    while len(gradients) < num_updates:
        if list(trainer.remaining_units()) and next(iter(trainer.remaining_units()))[0] == "optimizer":
            gradients.append(trainer._state.grads.flat.clone())
        before_unit(unit)
        trainer.advance()
        unit += 1
    return gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_recomputed_mixed_and_dropped_layers_give_the_same_bits(tmp_path: Path, dtype: str) -> None:
    decoder = tiny_decoder(tmp_path / "model", dtype)
    before = base_weights_hash(decoder)
    results = {}
    for name, keep, recompute in (
        ("kept", lambda _t, _i: True, "auto"),
        ("recomputed", lambda _t, _i: False, "auto"),
        ("mixed", lambda tokens, i: (tokens + i) % 3 > 0, "auto"),
        ("dropped", lambda _t, _i: True, "auto"),
        ("always", lambda _t, _i: pytest.fail("not asked"), "always"),
    ):
        settings = TrainingSettings(
            lora=SETTINGS.lora, batch_size=3, gradient_accumulation_steps=2, n_epochs=2, learning_rate=1e-2,
            recompute=recompute,
        )  # fmt: skip
        trainer = Trainer(decoder, start_job(tmp_path / name, settings), keep, head_chunk_tokens=5)
        dropped: list[int] = []

        def maybe_drop(unit: int, trainer: Trainer = trainer, dropped: list[int] = dropped, name: str = name) -> None:
            if name == "dropped" and unit % 3 == 2:
                dropped.append(trainer.drop_kept(1)[0])

        gradients = run_updates(trainer, trainer.total_steps, maybe_drop)
        results[name] = (gradients, trainer._state.masters.flat.clone(), [e["loss"] for e in trainer.log_history])
        if name == "dropped":
            assert sum(dropped) > 4 and 0 in dropped  # at embed and head there may be nothing to drop
    gradients, final, losses = results["kept"]
    assert losses[-1] < losses[0]
    assert float(gradients[0].abs().max()) > 0
    for name, (other_gradients, other_final, other_losses) in results.items():
        assert all(torch.equal(x, y) for x, y in zip(gradients, other_gradients, strict=True)), name
        assert torch.equal(final, other_final), name
        assert losses == other_losses, name
    assert base_weights_hash(decoder) == before


def test_abandoned_update_runs_again_with_the_same_result(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    alone = Trainer(decoder, start_job(tmp_path / "a", SETTINGS), lambda _t, _i: True)
    run_updates(alone, 2)
    other = Trainer(decoder, start_job(tmp_path / "b", SETTINGS), lambda _t, _i: True)
    run_updates(other, 1)
    for _ in range(15):
        other.advance()
    other.abandon_update()
    assert other.at_update_boundary and other.held_bytes() == 0
    run_updates(other, 1)
    assert torch.equal(alone._state.masters.flat, other._state.masters.flat)
    assert alone.log_history == other.log_history


def test_dropped_and_finished_activations_are_really_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    trainer = Trainer(decoder, start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    alive: list[weakref.ref[object]] = []
    project = TrainingProjection.__call__

    def spy(self: TrainingProjection, layer: int, block: str, *rest: Any) -> torch.Tensor:
        out = project(self, layer, block, *rest)
        if block in ("qkv", "down"):  # the first and the last node of a layer's graph
            alive.append(weakref.ref(out.grad_fn))
        return out

    def num_alive() -> int:
        return sum(ref() is not None for ref in alive)

    monkeypatch.setattr(TrainingProjection, "__call__", spy)
    gc.disable()  # nothing may wait for the cycle collector
    try:
        for _ in range(5):  # embed and four layers
            trainer.advance()
        assert num_alive() == 8 and trainer.num_kept_layers() == 4
        held = trainer.held_bytes()
        dropped, freed = trainer.drop_kept(1)
        assert dropped == 1 and freed == (held - 4 * 32 * 4 * trainer.micro_batch_tokens) // 4 > 0
        assert num_alive() == 6 and trainer.num_kept_layers() == 3
        assert trainer.drop_kept()[0] == 3
        assert num_alive() == 0
        assert trainer.held_bytes() == 4 * 32 * 4 * trainer.micro_batch_tokens  # the layers' inputs
        while trainer.micro_batch_open:
            trainer.advance()
        assert num_alive() == 0 and trainer.held_bytes() == 0
        run_updates(trainer, 1)
        assert num_alive() == 0
        for _ in range(4):
            trainer.advance()
        assert num_alive() > 0
        trainer.close()
        assert num_alive() == 0
    finally:
        gc.enable()


def test_no_layer_is_dropped_when_the_job_forbids_it(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    settings = TrainingSettings(lora=SETTINGS.lora, batch_size=3, recompute="never")
    trainer = Trainer(decoder, start_job(tmp_path / "job", settings), lambda _t, _i: False)
    for _ in range(3):
        trainer.advance()
    assert trainer.num_kept_layers() == 2
    assert trainer.drop_kept() == (0, 0)


def test_plans_name_exactly_the_units_that_run(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    keep = lambda _t, i: i != 1  # noqa: E731
    trainer = Trainer(decoder, start_job(tmp_path / "job", SETTINGS), keep, head_chunk_tokens=4)
    planned = trainer.next_update_units()
    num_begun, ran = 0, Counter[tuple[str, int]]()
    while trainer.step == 0:
        assert trainer.begins_micro_batch == (not trainer.micro_batch_open and num_begun < 2)
        if trainer.begins_micro_batch:
            num_begun += 1
            tokens = trainer.next_micro_batch_tokens()
        left = trainer.remaining_units()
        report = trainer.advance()
        if report.kind == "embed":
            assert report.num_tokens == trainer.micro_batch_tokens == tokens <= trainer.max_micro_batch_tokens
        if left and report.kind != "recompute":
            assert left[report.kind, report.num_tokens] > 0
            after = left - Counter([(report.kind, report.num_tokens)])
            if report.kind != "forward":  # a layer's forward decides what its backward will be
                assert trainer.remaining_units() == (after if trainer.step == 0 else Counter())
        ran[report.kind, report.num_tokens] += 1
    recomputed = {key: count for key, count in ran.items() if key[0] == "recompute"}
    assert sum(recomputed.values()) == 2 == num_begun
    for (_, tokens), count in recomputed.items():
        ran["backward", tokens] += count
        del ran["recompute", tokens]
    assert ran == planned
    assert trainer.at_update_boundary and not trainer.remaining_units()


def test_step_runs_under_the_caller_s_inference_mode_and_leaves_grad_mode_alone(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    results = []
    for name, mode in (("a", torch.inference_mode), ("b", torch.no_grad)):
        trainer = Trainer(decoder, start_job(tmp_path / name, SETTINGS), lambda _t, i: i > 1)
        while trainer.step < 2:
            with mode():
                trainer.advance()
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        results.append(trainer._state.masters.flat.clone())
    assert torch.equal(*results)


def test_activation_estimate_is_made_of_what_a_layer_must_save(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    trainer = Trainer(decoder, start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    sizes = trainer._context.sizes
    assert sizes.graph_per_square == 0  # attention keeps no score matrix
    assert sizes.packing_per_token == 4 * 4 * 8  # joined sequences are one more copy of the attention's output
    assert sizes.graph([10, 20]) == pytest.approx(sizes.graph([30]) + 30 * sizes.packing_per_token)
    assert trainer.bytes_if_all_kept(64) > trainer.bytes_if_recomputed(64) > 4 * sizes.inputs(64)
    spec = decoder.spec
    # at least: qkv input and output, attention output, gate and up, their product, and the norms' inputs
    least = 4 * (2 * spec.hidden_size + 2 * spec.qkv_size + 3 * spec.intermediate_size)
    assert least < sizes.graph_per_token < 6 * least


# ---------------------------------------------------------------- updates that are not finite


def poison(trainer: Trainer, value: float) -> None:
    """Make the gradient of the update under way not finite just before the optimizer."""
    while sum(trainer.remaining_units().values()) != 1:
        trainer.advance()
    trainer._state.grads.flat[3] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(tmp_path: Path, value: float) -> None:
    trainer = Trainer(tiny_decoder(tmp_path / "model"), start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    run_updates(trainer, 1)
    state = trainer._state
    before = [t.clone() for t in (state.masters.flat, state.optimizer.exp_avg, state.optimizer.exp_avg_sq)]
    poison(trainer, value)
    trainer.advance()
    after = (state.masters.flat, state.optimizer.exp_avg, state.optimizer.exp_avg_sq)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert (trainer.step, trainer.cursor.num_skipped, state.optimizer.num_updates) == (2, 1, 1)
    assert [progress.step for progress in trainer.take_progress()] == [1]
    assert any("update 2 was skipped" in note.message for note in trainer.take_notes())
    run_updates(trainer, 1)
    assert (trainer.cursor.num_skipped, trainer.cursor.bad_in_a_row, state.optimizer.num_updates) == (1, 0, 2)
    assert json.loads(json.dumps(trainer.log_history, allow_nan=False)) == trainer.log_history


def test_a_loss_that_is_not_finite_skips_the_update(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    trainer = Trainer(decoder, start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    before = trainer._state.masters.flat.clone()
    decoder.norm.data[0] = float("nan")
    while trainer.step == 0:
        trainer.advance()
    assert trainer.log_history[0]["loss"] is None and trainer.log_history[0]["skipped"]
    assert torch.equal(before, trainer._state.masters.flat)


def test_three_bad_updates_in_a_row_end_the_job(tmp_path: Path) -> None:
    trainer = Trainer(tiny_decoder(tmp_path / "model"), start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    for _ in range(2):
        poison(trainer, float("nan"))
        trainer.advance()
    run_updates(trainer, 1)  # a good one in between starts the count anew
    while trainer.checkpoint_due:
        trainer.advance()
    for _ in range(2):
        poison(trainer, float("nan"))
        trainer.advance()
    poison(trainer, float("nan"))
    with pytest.raises(TrainingError, match="3 updates in a row") as error:
        trainer.advance()
    assert error.value.code == "non_finite"


def test_an_adapter_that_is_not_finite_is_never_published(tmp_path: Path) -> None:
    trainer = Trainer(tiny_decoder(tmp_path / "model"), start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
    run_updates(trainer, 3)  # an epoch: a checkpoint is due
    trainer._state.masters.flat[0] = float("inf")
    with pytest.raises(TrainingError, match="not finite"):
        trainer.advance()
    assert trainer.take_checkpoints() == []
    assert not (tmp_path / "job/adapters").exists() and not (tmp_path / "job/checkpoints").exists()


def test_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="bfloat16"):
        Trainer(tiny_decoder(tmp_path / "model", "float16"), start_job(tmp_path / "job", SETTINGS), lambda _t, _i: True)
