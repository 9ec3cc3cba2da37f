"""The written-out layers over the torch twins of their kernels, against the same layers as autograd graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model
from fineinfer.training.fused_layers import make_layers
from fineinfer.training.layers import Segments
from fineinfer.training.ops import REFERENCE_OPS, pick_ops
from fineinfer.training.projection import adapted_blocks
from fineinfer.training.trainer import Trainer

from .test_training_step import SETTINGS, run_updates, start_job, tiny_decoder

LENGTHS = [1, 17, 5, 9]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = {
    "Llama": dict(),
    "Llama with biases": dict(attention_bias=True),
    "Qwen2": dict(),
    "Qwen3": dict(head_dim=16),
    "Mistral": dict(sliding_window=4),
}
TARGETS = [ALL, ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj"), ("o_proj",)]


class World:
    """One layer's inputs and an adapter whose every matrix is random."""

    def __init__(self, decoder: Decoder, targets: tuple[str, ...]) -> None:
        torch.manual_seed(3)
        self.decoder, dtype = decoder, decoder.dtype
        layout = LoraLayout.uniform(decoder.spec, LoraSpec(r=3, lora_alpha=5, target_modules=targets))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.compute = LoraWeights(layout, torch.randn(layout.num_parameters).mul_(0.2).to(dtype))
        self.grads = LoraWeights.zeros(layout, wide)
        self.blocks = adapted_blocks(self.compute, self.grads)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
        lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
        self.segments = Segments.make(decoder, positions, lengths, bounds)
        self.x, self.grad = torch.randn(2, bounds[-1], decoder.spec.hidden_size).to(dtype)

    def run(self, layer: int, fused: bool, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(output, gradient of the input, gradient of the adapter) of one layer."""
        layers = make_layers(self.decoder, self.blocks, REFERENCE_OPS if fused else None)
        self.grads.flat.fill_(0.25)  # gradients are added
        before = self.x.clone(), self.grad.clone()
        y, saved = layers.forward(layer, self.x, self.segments, keep)
        assert (saved is not None) == keep
        grad_x = layers.backward(layer, self.x, self.segments, saved, self.grad)
        assert torch.equal(self.x, before[0]) and torch.equal(self.grad, before[1])
        return y, grad_x, self.grads.flat - 0.25


def load(tiny_model: Callable[..., tuple[object, Path]], name: str, dtype: str) -> Decoder:
    _, folder = tiny_model(name.split()[0], **MODELS[name])
    return load_model(folder, dtype=dtype).decoder


@pytest.mark.parametrize("targets", TARGETS, ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_fp64_output_and_gradients_equal_autograd_s(tiny_model, name: str, targets: tuple[str, ...]) -> None:
    world = World(load(tiny_model, name, "float64"), targets)
    for layer in (0, 2):
        expected, ours = world.run(layer, fused=False, keep=True), world.run(layer, fused=True, keep=True)
        if layer == 0:
            assert ours[1] is None and expected[1] is not None
        for theirs, own in zip(expected, ours, strict=True):
            if own is not None and theirs is not None:
                assert float(theirs.abs().max()) > 1e-3
                torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-11)


def test_fp32_is_as_near_to_fp64_as_autograd(tiny_model) -> None:
    exact = World(load(tiny_model, "Qwen3", "float64"), ALL)
    single = World(load(tiny_model, "Qwen3", "float32"), ALL)
    single.x, single.grad = exact.x.float(), exact.grad.float()
    truth = exact.run(1, fused=False, keep=True)

    def off(fused: bool) -> list[float]:
        return [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(single.run(1, fused, True), truth, strict=True)
        ]

    for own, theirs in zip(off(True), off(False), strict=True):
        assert own < 2 * theirs + 1e-7 < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama with biases", "Qwen3"])
def test_kept_and_recomputed_give_equal_bits(tiny_model, name: str, dtype: str) -> None:
    world = World(load(tiny_model, name, dtype), ALL)
    for layer in (0, 1):
        kept, recomputed = world.run(layer, fused=True, keep=True), world.run(layer, fused=True, keep=False)
        for one, other in zip(kept, recomputed, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def test_a_whole_job_follows_the_reference(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model")
    finals, losses = [], []
    for name, ops in (("reference", None), ("fused", REFERENCE_OPS)):
        trainer = Trainer(decoder, start_job(tmp_path / name, SETTINGS), lambda _t, i: i % 2 == 0, 5, ops)
        run_updates(trainer, trainer.total_steps)
        finals.append(trainer._state.masters.flat.clone())
        losses.append([entry["loss"] for entry in trainer.log_history])
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(finals[1], finals[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_job_does_not_depend_on_what_was_kept_or_dropped(tmp_path: Path, dtype: str) -> None:
    decoder = tiny_decoder(tmp_path / "model", dtype)
    results = []
    for name, recompute in (("kept", "never"), ("recomputed", "always"), ("dropped", "auto")):
        settings = TrainingSettings(
            lora=SETTINGS.lora, batch_size=3, gradient_accumulation_steps=2, n_epochs=1, learning_rate=1e-2,
            recompute=recompute,
        )  # fmt: skip
        trainer = Trainer(decoder, start_job(tmp_path / name, settings), lambda _t, _i: True, 5, REFERENCE_OPS)
        run_updates(trainer, trainer.total_steps, lambda unit, t=trainer: unit % 3 or t.drop_kept(1))
        results.append((trainer._state.masters.flat.clone(), [entry["loss"] for entry in trainer.log_history]))
    for final, losses in results[1:]:
        assert torch.equal(final, results[0][0]) and losses == results[0][1]


def test_the_size_of_a_kept_layer_is_what_it_saves(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "model", "bfloat16")
    job = start_job(tmp_path / "job", SETTINGS)
    trainer = Trainer(decoder, job, lambda _t, _i: True, 5, REFERENCE_OPS)
    sizes, spec = trainer._context.sizes, decoder.spec
    ranks = 4 * len(ALL)
    heads = spec.num_heads * spec.head_dim
    values = spec.qkv_size + heads + spec.hidden_size + 2 * spec.intermediate_size + ranks
    assert sizes.graph_per_token == 2 * values
    assert sizes.graph_per_square == sizes.packing_per_token == 0
    assert sizes.head_workspace == 5 * spec.vocab_size * 2


def test_kernels_train_only_where_they_serve() -> None:
    assert pick_ops("triton", torch.device("cpu")) is None
    assert pick_ops("reference", torch.device("cuda")) is None
