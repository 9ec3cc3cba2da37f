"""LoRA dropout: masks that depend on places only, gradients as PEFT's, the same bits however a step was run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from fineinfer.adapters.config import MODULES
from fineinfer.kernels.reference_training import dropout
from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.model.loader import load_model
from fineinfer.training.dropout import Dropout, row_keys
from fineinfer.training.ops import REFERENCE_OPS, TrainingOps
from fineinfer.training.parking import ParkableTrainer
from fineinfer.training.trainer import Trainer

from .test_training_fused import ALL, World
from .test_training_parity import count_targets, fp64_norm, peft_loss, rows_of
from .test_training_parity import start_job as start_rows
from .test_training_pieces import splitmix64
from .test_training_step import SETTINGS, run_updates, start_job, tiny_decoder

# PEFT asks transformers 5.24 for a name that is going away
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

RATE = 0.3
DROPPING = msgspec.structs.replace(SETTINGS, lora=msgspec.structs.replace(SETTINGS.lora, lora_dropout=RATE))


def lowbias32(x: int) -> int:
    """As published by Wellons."""
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


def test_a_mask_is_kept_for_good() -> None:
    """A job resumed by a later release must drop the same elements; computed here in whole numbers of Python."""
    keys = row_keys(seed=-3, step=5, example=7, length=6)
    of_example = splitmix64(splitmix64(splitmix64(-3 % 2**64) ^ 5) ^ 7)
    expected_keys = [splitmix64(of_example ^ t) for t in range(6)]
    assert (keys.view(np.uint32) == [key >> 32 for key in expected_keys]).all()
    kept = dropout(torch.ones(6, 9), torch.from_numpy(keys), 11, RATE) == 1
    for row, key in enumerate(expected_keys):
        for column in range(9):
            bits = lowbias32(key >> 32 ^ 11) ^ lowbias32(column)
            bits = bits * 0x7FEB352D % 2**32
            bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
            signed = bits - 2**32 if bits >= 2**31 else bits
            assert kept[row, column] == (signed + 2**31 >= RATE * 2**32)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_masks_have_the_share_asked_for_and_nothing_in_common(rate: float) -> None:
    rows, width, places = 400, 300, [(0, 0), (0, 1), (1, 0), (0, 7), (3, 0), (3, 600)]
    masks = []
    for step, salt in places:
        keys = torch.from_numpy(np.concatenate([row_keys(1, step, example, rows // 4) for example in range(4)]))
        drop = Dropout(keys, rate, dropout)
        x = torch.full((rows, width), 2.0)
        kept = drop(x, salt) == 2.0
        off = 4 * (rate / (1 - rate) / (rows * width)) ** 0.5  # four standard deviations
        assert float((drop(x, salt) * drop.scale).mean()) == pytest.approx(2.0, rel=off)  # the mean is kept
        masks.append(kept.double())
    sigma = (rate * (1 - rate)) ** 0.5
    for mask in masks:
        assert abs(float(1 - mask.mean()) - rate) < 4 * sigma / (rows * width) ** 0.5
        for axis, count in ((0, rows), (1, width)):  # no row and no column is favoured
            z = (1 - mask.mean(axis) - rate) / (sigma / count**0.5)
            assert float(z.abs().max()) < 5 and float(z.std()) == pytest.approx(1.0, abs=0.15)
    for shift in ((0, 1), (1, 0), (100, 0)):  # neighbours, and the same position of the next example
        pairs = [(mask, mask.roll(shift, (0, 1))) for mask in masks]
        pairs += [(masks[i], masks[j]) for i in range(len(masks)) for j in range(i)]
        for one, other in pairs:
            correlation = float(((one - one.mean()) * (other - other.mean())).mean()) / sigma**2
            assert abs(correlation) < 5 / (rows * width) ** 0.5


class Masked(torch.nn.Module):
    """Takes the place of PEFT's nn.Dropout."""

    def __init__(self, salt: int, keys: list[torch.Tensor]) -> None:
        super().__init__()
        self.salt, self.keys = salt, keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * dropout(torch.ones_like(x[0]), self.keys[-1], self.salt, RATE) / (1 - RATE)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp64_loss_and_gradients_equal_peft_s_with_the_same_masks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    sizes = dict(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=256, initializer_range=0.2, head_dim=12,
    )  # fmt: skip
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family](**sizes)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    reference.save_pretrained(tmp_path / "model")
    for layer in reference.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(layer), "forward", fp64_norm)
    lora = LoraSpec(r=4, lora_alpha=12, lora_dropout=RATE)
    settings = TrainingSettings(lora=lora, batch_size=4, n_epochs=1, gradient_accumulation_steps=2, seed=9)
    rows = rows_of([5, 31, 12, 9], config.vocab_size, seed=3)
    decoder = load_model(tmp_path / "model", dtype="float64").decoder
    for name, ops in (("autograd", None), ("fused", REFERENCE_OPS)):
        trainer = Trainer(decoder, start_rows(tmp_path / name, rows, settings), lambda _t, i: i == 0, 7, ops)
        trainer._state.masters.flat.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
        model = get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64),
            LoraConfig(r=4, lora_alpha=12, lora_dropout=RATE, target_modules=list(lora.target_modules)),
        )
        ours = dict(trainer._state.masters.named_tensors())
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(ours[key.replace(".default", "")])
        keys: list[torch.Tensor] = []  # of the rows that PEFT has run, the present one last
        num_masked = 0
        for key, module in model.named_modules():
            if hasattr(module, "lora_dropout"):
                *_, index, _, name_ = key.split(".")
                module.lora_dropout["default"] = Masked(int(index) * len(MODULES) + MODULES.index(name_), keys)
                num_masked += 1
        assert num_masked == 2 * len(MODULES)
        total = 0.0
        for example, row in enumerate(rows):
            keys.append(torch.from_numpy(row_keys(settings.seed, 0, example, len(row[0]))))
            loss = peft_loss(model.train(), [row], count_targets(rows))
            loss.backward()
            total += loss.item()
        (gradient,) = run_updates(trainer, 1)
        assert trainer.log_history[0]["loss"] == pytest.approx(total, rel=1e-9)
        gradients = dict(type(trainer._state.grads)(trainer._state.grads.layout, gradient).named_tensors())
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                expected, got = parameter.grad, gradients.pop(key.replace(".default", ""))
                assert expected is not None and float(expected.abs().max()) > 1e-4
                assert float((got - expected).abs().max()) <= 1e-9 * float(expected.abs().max())
        assert not gradients


@pytest.mark.parametrize("targets", [ALL, ("k_proj", "up_proj", "down_proj")], ids=len)
def test_written_out_layers_drop_as_autograd_s(tiny_model, targets: tuple[str, ...]) -> None:
    _, folder = tiny_model("Qwen3", head_dim=16)
    world = World(load_model(folder, dtype="float64").decoder, targets)
    plain = world.run(1, fused=True, keep=True)[0]
    keys = torch.from_numpy(row_keys(0, 0, 0, world.x.shape[0]))
    segments = dataclasses.replace(world.segments, dropout=Dropout(keys, RATE, REFERENCE_OPS.dropout))
    world.segments = segments
    for layer in (0, 2):
        expected, ours = world.run(layer, fused=False, keep=True), world.run(layer, fused=True, keep=False)
        for theirs, own in zip(expected, ours, strict=True):
            if own is not None and theirs is not None:
                torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(world.run(1, fused=True, keep=True)[0], plain)


@pytest.mark.parametrize("ops", [None, REFERENCE_OPS], ids=["autograd", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_recomputed_dropped_aborted_and_resumed_give_the_same_bits(
    tmp_path: Path, dtype: str, ops: TrainingOps | None
) -> None:
    decoder = tiny_decoder(tmp_path / "model", dtype)
    results = []
    for name in ("kept", "recomputed", "dropped", "aborted", "resumed"):
        job = start_job(tmp_path / name, DROPPING)

        def make(job=job, name: str = name) -> ParkableTrainer:
            return ParkableTrainer(decoder, job, lambda _t, i: name != "recomputed" or i == 1, 5, ops)

        trainer, aborted = make(), 0
        unit = 0
        while not trainer.finished:
            trainer.advance()
            unit += 1
            if name == "dropped" and unit % 4 == 0:
                trainer.drop_kept(1)
            if name == "aborted" and unit % 11 == 10 and trainer.micro_batch_open and aborted < 8:
                trainer.abort_micro_batch()
                aborted += 1
            if name == "resumed" and unit in (40, 70):
                trainer.save_resume_point()
                trainer.close()
                trainer = make()
        assert name != "aborted" or aborted == 8
        results.append((trainer._state.masters.flat.clone(), trainer.log_history))
    for masters, log in results[1:]:
        assert torch.equal(masters, results[0][0]) and log == results[0][1]
    plain = Trainer(decoder, start_job(tmp_path / "plain", SETTINGS), lambda _t, _i: True, 5, ops)
    run_updates(plain, plain.total_steps)
    assert not torch.equal(plain._state.masters.flat, results[0][0])
    assert (
        json.loads((tmp_path / "kept/checkpoints/step-00000006/adapter_config.json").read_text())["lora_dropout"]
        == RATE
    )


def test_masks_do_not_depend_on_how_an_update_is_cut(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model", "float64")
    gradients = []
    for name, accumulation, split in (("one", 1, 0), ("three", 3, 0), ("split", 1, 12)):
        settings = msgspec.structs.replace(DROPPING, gradient_accumulation_steps=accumulation)
        trainer = Trainer(decoder, start_job(tmp_path / name, settings), lambda _t, _i: True, 5)
        before: Callable[[int], object] = lambda _u, t=trainer, s=split: s and t.split_next_micro_batch(s)  # noqa: E731
        gradients.append(run_updates(trainer, 2, before))
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            assert float((one - two).abs().max()) <= 1e-9 * float(one.abs().max())
