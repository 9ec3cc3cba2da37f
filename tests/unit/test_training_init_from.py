"""A job that begins from another adapter, and jobs whose modules differ in rank and alpha."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fineinfer.adapters.peft_io import load_adapter, save_adapter
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.training.errors import TrainingError
from fineinfer.training.ops import REFERENCE_OPS
from fineinfer.training.parking import ParkableTrainer

from .test_training_step import SETTINGS, start_job, tiny_decoder

PATTERNS = LoraSpec(
    r=4, lora_alpha=8, target_modules=("q_proj", "v_proj", "down_proj"),
    rank_pattern={"v_proj": 6, "layers.0.mlp.down_proj": 1}, alpha_pattern={"q_proj": 3.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("model"))


def settings_of(lora: LoraSpec) -> TrainingSettings:
    return msgspec.structs.replace(SETTINGS, lora=lora)


def make(decoder: Decoder, job: StartJob, **options: Any) -> ParkableTrainer:
    return ParkableTrainer(decoder, job, lambda _t, i: i > 1, 5, **options)


def run(trainer: ParkableTrainer, until_step: int | None = None) -> None:
    while not trainer.finished if until_step is None else trainer.step < until_step:
        trainer.advance()


def write_adapter(decoder: Decoder, folder: Path, lora: LoraSpec, dtype: torch.dtype = torch.float32) -> LoraWeights:
    weights = LoraWeights.zeros(LoraLayout.uniform(decoder.spec, lora), dtype)
    weights.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    folder.mkdir()
    save_adapter(weights, lora, "another/base", folder)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [SETTINGS.lora, PATTERNS], ids=["uniform", "patterns"])
def test_masters_begin_with_its_weights_and_a_fresh_optimizer(
    decoder: Decoder, tmp_path: Path, lora: LoraSpec, dtype: torch.dtype
) -> None:
    weights = write_adapter(decoder, tmp_path / "a", lora, dtype)
    job = msgspec.structs.replace(start_job(tmp_path / "job", settings_of(lora)), init_from=str(tmp_path / "a"))
    trainer = make(decoder, job)
    assert torch.equal(trainer._state.masters.flat, weights.flat.float())
    assert not trainer._state.optimizer.exp_avg.any() and trainer._state.optimizer.num_updates == trainer.step == 0
    trainer.park()  # nothing was written yet: what comes back is what it began with
    trainer.unpark()
    assert torch.equal(trainer._state.masters.flat, weights.flat.float())
    run(trainer, 1)
    cold = make(decoder, start_job(tmp_path / "cold", settings_of(lora)))
    run(cold, 1)
    assert trainer.log_history[0]["loss"] != cold.log_history[0]["loss"]
    run(trainer)
    assert not torch.equal(trainer._state.masters.flat, weights.flat.float())


def test_a_resumed_job_ignores_it_and_one_killed_before_its_first_checkpoint_begins_there_again(
    decoder: Decoder, tmp_path: Path
) -> None:
    write_adapter(decoder, tmp_path / "a", SETTINGS.lora)
    whole = make(decoder, msgspec.structs.replace(start_job(tmp_path / "w", SETTINGS), init_from=str(tmp_path / "a")))
    run(whole)
    job = msgspec.structs.replace(start_job(tmp_path / "job", SETTINGS), init_from=str(tmp_path / "a"))
    run(make(decoder, job), 2)
    again = make(decoder, job)
    assert again.step == 0
    run(again, 3)
    again.advance()  # the checkpoint of the first epoch
    shutil.rmtree(tmp_path / "a")
    resumed = make(decoder, job)
    assert resumed.step == 3
    run(resumed)
    assert torch.equal(resumed._state.masters.flat, whole._state.masters.flat)
    assert resumed.log_history == whole.log_history


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"r": 2}, r"r: its rank of model.layers.0.self_attn.q_proj is 2, the job's 4"),
        ({"lora_alpha": 16}, r"lora_alpha: its scaling of model.layers.0.self_attn.q_proj is 4.0, the job's 2.0"),
        ({"use_rslora": True}, r"lora_alpha: its scaling"),
        ({"rank_pattern": {"layers.2.mlp.up_proj": 3}}, r"r: its rank of model.layers.2.mlp.up_proj is 3, the job's 4"),
        ({"target_modules": ("q_proj", "o_proj")}, r"target_modules: it has no model.layers.0.mlp.down_proj"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_by_what_differs(
    decoder: Decoder, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_adapter(decoder, tmp_path / "a", msgspec.structs.replace(SETTINGS.lora, **change))
    job = msgspec.structs.replace(start_job(tmp_path / "job", SETTINGS), init_from=str(tmp_path / "a"))
    with pytest.raises(TrainingError, match=named) as error:
        make(decoder, job)
    assert error.value.code == "invalid_hyperparameters" and "from_checkpoint" in str(error.value)


def test_more_modules_than_the_job_s_or_no_adapter_are_refused_too(decoder: Decoder, tmp_path: Path) -> None:
    write_adapter(decoder, tmp_path / "a", SETTINGS.lora)
    fewer = settings_of(msgspec.structs.replace(SETTINGS.lora, target_modules=("q_proj",)))
    for settings, folder, named in ((fewer, "a", "it has a model.layers.0"), (SETTINGS, "gone", "missing")):
        job = msgspec.structs.replace(start_job(tmp_path / "job", settings), init_from=str(tmp_path / folder))
        with pytest.raises(TrainingError, match=named):
            make(decoder, job)


@pytest.mark.parametrize("ops", [None, REFERENCE_OPS], ids=["autograd", "fused"])
def test_a_job_with_patterns_trains_resumes_and_publishes(decoder: Decoder, tmp_path: Path, ops: Any) -> None:
    whole = make(decoder, start_job(tmp_path / "whole", settings_of(PATTERNS)), ops=ops)
    run(whole)
    assert whole.log_history[-1]["loss"] < whole.log_history[0]["loss"]
    job = start_job(tmp_path / "job", settings_of(PATTERNS))
    run(make(decoder, job, ops=ops), 4)
    resumed = make(decoder, job, ops=ops)
    assert resumed.step == 3
    run(resumed)
    assert torch.equal(resumed._state.masters.flat, whole._state.masters.flat)
    (checkpoint,) = [message for message in resumed.take_checkpoints() if message.final]
    published = load_adapter(Path(checkpoint.directory), decoder.spec, max_rank=6)
    assert torch.equal(published.flat, resumed._state.masters.flat)
    published.layout.check_same(resumed._state.masters.layout)
    ranks = {(module.layer, module.name): module.rank for module in published.layout.modules()}
    assert (ranks[0, "down_proj"], ranks[1, "down_proj"], ranks[0, "v_proj"], ranks[0, "q_proj"]) == (1, 4, 6, 4)
