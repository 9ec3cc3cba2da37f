"""Dropout and evaluation over the training kernels on a GPU: against the reference operations, and without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fineinfer.data.packed import DATASET_FILE, EVAL_FILE, write_dataset
from fineinfer.messages import JobEval, LoraSpec, StartJob, TrainingSettings
from fineinfer.model.loader import load_model
from fineinfer.training.ops import pick_ops
from fineinfer.training.parking import ParkableTrainer

pytestmark = pytest.mark.gpu
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 208,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331,
    "max_position_embeddings": 512, "initializer_range": 0.1, "tie_word_embeddings": True,
}  # fmt: skip


def rows_of(seed: int, lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(seed)
    return [(random.integers(0, 331, n).tolist(), [int(t >= n // 3) for t in range(n)]) for n in lengths]


def train(
    folder: Path, *, backend: str = "triton", dropout: float = 0.0, evaluated: bool = False, keep: bool = True
) -> tuple[list[dict[str, Any]], list[JobEval], torch.Tensor]:
    """Run a whole job; its log without evaluations, the evaluations, and the adapter."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    decoder = load_model(folder, dtype="float32", device="cuda", load_format="dummy").decoder
    digest = None
    if evaluated:
        (folder / "eval").mkdir()
        digest = write_dataset(folder / "eval", rows_of(3, [50, 9, 120, 33]))
        (folder / "eval" / DATASET_FILE).rename(folder / EVAL_FILE)
    rows = rows_of(2, [40, 2, 77, 128, 13, 64])
    settings = TrainingSettings(
        lora=LoraSpec(r=8, lora_alpha=16, lora_dropout=dropout), batch_size=3, n_epochs=2, learning_rate=5e-3,
        micro_batch_tokens=128, eval_steps=2,
    )  # fmt: skip
    job = StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder), eval_sha256=digest,
        adapters_dir=str(folder / "adapters"), dataset_sha256=write_dataset(folder, rows),
    )  # fmt: skip
    ops = pick_ops(backend, torch.device("cuda"))
    trainer = ParkableTrainer(decoder, job, lambda _t, _layer: keep, None, ops, True)
    evaluations = []
    while not trainer.finished:
        trainer.advance()
        evaluations += trainer.take_evals()
    torch.cuda.synchronize()
    log = [entry for entry in trainer.log_history if "loss" in entry]
    return log, evaluations, trainer._state.masters.flat.clone()


def test_dropout_is_that_of_the_reference_operations(tmp_path: Path) -> None:
    ours, _, adapter = train(tmp_path / "ours", dropout=0.3)
    theirs, _, _ = train(tmp_path / "theirs", dropout=0.3, backend="reference")
    without, _, _ = train(tmp_path / "without")
    losses = [[entry["loss"] for entry in log] for log in (ours, theirs, without)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][1:] != pytest.approx(losses[2][1:], rel=1e-4), "dropout does something"
    _, _, recomputed = train(tmp_path / "recomputed", dropout=0.3, keep=False)
    assert torch.equal(adapter, recomputed), "a layer that runs again drops the same"


def test_evaluations_are_those_of_the_reference_operations_and_change_nothing(tmp_path: Path) -> None:
    ours, evaluations, adapter = train(tmp_path / "ours", dropout=0.1, evaluated=True)
    _, expected, _ = train(tmp_path / "theirs", dropout=0.1, evaluated=True, backend="reference")
    assert [one.step for one in evaluations] == [one.step for one in expected] == [2, 4]
    for one, other in zip(evaluations, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.mean_token_accuracy == pytest.approx(other.mean_token_accuracy, abs=0.02)
    alone, none, same = train(tmp_path / "alone", dropout=0.1)
    assert not none and alone == ours and torch.equal(adapter, same)
