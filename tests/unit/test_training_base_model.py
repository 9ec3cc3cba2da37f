"""A checkpoint belongs to the base model that it was trained on, whatever that is called."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from fineinfer.messages import StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model
from fineinfer.training import checkpoint as checkpoint_module
from fineinfer.training.base_model import base_model_sha256
from fineinfer.training.checkpoint import read_newest
from fineinfer.training.errors import TrainingError

from .test_training_checkpoint import CONFIG, decoder, run, start_job, state_of, trainer_for, uninterrupted

__all__ = ["decoder", "uninterrupted"]  # fixtures


def load(folder: Path, seed: int = 0, **changes: object) -> Decoder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return load_model(folder, dtype="float32", load_format="dummy", seed=seed).decoder


def begun(decoder: Decoder, tmp_path: Path) -> StartJob:
    job = start_job(tmp_path / "job")
    run(trainer_for(decoder, job), 2)
    return job


def as_older_versions_wrote(job: StartJob) -> None:
    folder = Path(job.job_dir) / "checkpoints/step-00000002"
    state = json.loads((folder / "trainer_state.json").read_text())
    del state["base_model_sha256"]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": checkpoint_module._measure(folder)}))


def test_a_model_served_under_another_name_is_the_same(
    decoder: Decoder, uninterrupted: dict[str, object], tmp_path: Path
) -> None:
    job = msgspec.structs.replace(begun(decoder, tmp_path), base_model="another/name")
    resumed = trainer_for(load(tmp_path / "moved"), job)
    assert resumed.step == 2
    run(resumed, resumed.total_steps)
    assert state_of(resumed) == uninterrupted
    saved = read_newest(tmp_path / "job", decoder.spec, 2)
    assert saved is not None
    config = json.loads((saved.directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == saved.trainer_state["base_model"] == "another/name"


def test_other_weights_under_the_same_name_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    job = begun(decoder, tmp_path)
    with pytest.raises(TrainingError, match="update 2 is of another base_model_sha256") as error:
        trainer_for(load(tmp_path / "other", seed=1), job)
    assert error.value.code == "checkpoint_mismatch"


@pytest.mark.parametrize("name", ["base", "other"])
def test_of_a_checkpoint_of_an_older_version_the_name_decides(decoder: Decoder, name: str, tmp_path: Path) -> None:
    job = msgspec.structs.replace(begun(decoder, tmp_path), base_model=name)
    as_older_versions_wrote(job)
    if name == "other":
        with pytest.raises(TrainingError, match="another base_model"):
            trainer_for(decoder, job)
        return
    resumed = trainer_for(decoder, job)
    assert resumed.step == 2
    run(resumed, 4)
    saved = read_newest(tmp_path / "job", decoder.spec, 2)
    assert saved is not None and saved.trainer_state["base_model_sha256"] == base_model_sha256(decoder)


def test_every_weight_and_constant_counts_and_nothing_else(tmp_path: Path) -> None:
    known = base_model_sha256(load(tmp_path / "a"))
    assert known == base_model_sha256(load(tmp_path / "b", eos_token_id=7))
    rope = {"rope_type": "default", "rope_theta": 77.0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}  # weights of the same shapes
    others = {"rope_parameters": rope}, {"rms_norm_eps": 1e-3}, heads
    assert known == base_model_sha256(load(tmp_path / "a").to(torch.bfloat16))
    hashes = {known} | {
        base_model_sha256(load(tmp_path / f"{index}", **changes)) for index, changes in enumerate(others)
    }
    changed = load(tmp_path / "a")
    weights = list(changed.parameters())
    for weight in weights:
        before = weight.detach().clone()
        with torch.inference_mode():
            weight.copy_(weight * 1.01 + 0.01)
        hashes.add(base_model_sha256(changed))
        with torch.inference_mode():
            weight.copy_(before)
    assert len(hashes) == 1 + len(others) + len(weights) and base_model_sha256(changed) == known
