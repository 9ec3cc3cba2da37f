"""The training step over its kernels on a GPU: against the reference operations, against itself, within its plan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fineinfer.data.packed import write_dataset
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model
from fineinfer.training.ops import TrainingOps, pick_ops
from fineinfer.training.trainer import Trainer

pytestmark = pytest.mark.gpu
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 208,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331,
    "max_position_embeddings": 512, "initializer_range": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
TINY_QWEN = TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIDDLE = TINY | {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128,
    "vocab_size": 4096, "initializer_range": 0.03,
}  # fmt: skip
WIDE = TINY | {  # the 8B shape with few layers
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 8192, "initializer_range": 0.02,
}  # fmt: skip
LENGTHS = [40, 1, 77, 128, 13, 64]
CUDA = torch.device("cuda")


@pytest.fixture
def kernels() -> TrainingOps:
    ops = pick_ops("triton", CUDA)
    assert ops is not None
    return ops


def decoder_of(folder: Path, config: dict[str, object], dtype: str) -> Decoder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder, dtype=dtype, device="cuda", load_format="dummy").decoder


def trainer_of(
    folder: Path,
    decoder: Decoder,
    lengths: list[int],
    ops: TrainingOps | None,
    deterministic: bool = False,
    **settings: object,
) -> Trainer:
    """A trainer whose adapter is random all over, so that every gradient is more than noise."""
    folder.mkdir()
    random = np.random.default_rng(2)
    vocab = decoder.spec.vocab_size
    rows = [(random.integers(0, vocab, n).tolist(), [int(t >= n // 3) for t in range(n)]) for n in lengths]
    own = {"batch_size": len(lengths), "gradient_accumulation_steps": 1, "n_epochs": 8, "learning_rate": 1e-3}
    job = StartJob(
        job_id="job", name="lora", base_model="base", job_dir=str(folder), adapters_dir=str(folder / "adapters"),
        settings=TrainingSettings(lora=LoraSpec(r=16, lora_alpha=32), **(own | {"save_steps": 99} | settings)),
        dataset_sha256=write_dataset(folder, rows),
    )  # fmt: skip
    trainer = Trainer(decoder, job, lambda _t, layer: layer % 2 == 0, ops=ops, deterministic=deterministic)
    masters = trainer._state.masters.flat
    masters.copy_(torch.randn(masters.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    trainer._state.refresh_compute()
    return trainer


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the first update, before clipping; the update is then finished."""
    trainer.advance()
    while trainer.remaining_units().total() > 1:
        trainer.advance()
    found = {name: tensor.clone() for name, tensor in trainer._state.grads.named_tensors()}
    trainer.advance()
    return found


def run(trainer: Trainer, num_updates: int) -> None:
    while trainer.step < num_updates:
        trainer.advance()
    torch.cuda.synchronize()


@pytest.mark.parametrize("config", [TINY, TINY_QWEN], ids=["llama", "qwen3"])
def test_fp32_follows_the_reference_operations(tmp_path: Path, config: dict[str, object], kernels: TrainingOps) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    decoder = decoder_of(tmp_path / "model", config, "float32")
    ours, theirs = (trainer_of(tmp_path / name, decoder, LENGTHS, ops) for name, ops in (("a", kernels), ("b", None)))
    for (name, own), expected in zip(gradients(ours).items(), gradients(theirs).values(), strict=True):
        assert float((own - expected).norm() / expected.norm()) < 1e-5, name
    for trainer in (ours, theirs):
        run(trainer, 6)
    losses = [[entry["loss"] for entry in trainer.log_history] for trainer in (ours, theirs)]
    assert losses[1][-1] < losses[1][0] and losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_bf16_gradients_point_where_fp32_ones_do(tmp_path: Path, window: int | None, kernels: TrainingOps) -> None:
    """A product of bf16 values is 2^-9 off, and some dozens of them are between a parameter and the loss: a few percent
    of noise, so a cosine of 0.999; 0.99 would be 14 %."""
    config = MIDDLE if window is None else MIDDLE | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window,
    }  # fmt: skip
    half, single = (decoder_of(tmp_path / dtype, config, dtype) for dtype in ("bfloat16", "float32"))
    with torch.no_grad():
        for wide, narrow in zip(single.parameters(), half.parameters(), strict=True):
            wide.copy_(narrow)
    lengths = [300, 17, 200, 129]
    ours = gradients(trainer_of(tmp_path / "a", half, lengths, kernels))
    exact = gradients(trainer_of(tmp_path / "b", single, lengths, None))
    cosines = {
        name: float(torch.nn.functional.cosine_similarity(ours[name].flatten(), exact[name].flatten(), dim=0))
        for name in exact
    }
    print(f"lowest cosine {min(cosines.values()):.5f}")
    assert min(cosines.values()) > 0.99, min(cosines.items(), key=lambda item: item[1])
    for name, expected in exact.items():
        assert float(ours[name].norm() / expected.norm()) == pytest.approx(1.0, abs=0.05), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kept_and_recomputed_give_equal_bits(
    tmp_path: Path, dtype: str, kernels: TrainingOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deterministic mode; flash attention's backward adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    decoder = decoder_of(tmp_path / "model", MIDDLE, dtype)
    results = []
    for name, recompute in (("kept", "never"), ("recomputed", "always"), ("mixed", "auto")):
        lengths = [300, 17, 200, 129]
        trainer = trainer_of(tmp_path / name, decoder, lengths, kernels, recompute=recompute, deterministic=True)
        run(trainer, 3)
        results.append((trainer._state.masters.flat.clone(), [entry["loss"] for entry in trainer.log_history]))
    for masters, losses in results[1:]:
        assert losses == results[0][1]
        assert torch.equal(masters, results[0][0])


@pytest.mark.parametrize(
    ("lengths", "recompute"),
    [([1024] * 4, "never"), ([1024] * 4, "always"), ([8192], "never"), ([8192], "always")],
    ids=["4x1024 kept", "4x1024 recomputed", "8192 kept", "8192 recomputed"],
)
def test_the_plan_bounds_the_peak(tmp_path: Path, lengths: list[int], recompute: str, kernels: TrainingOps) -> None:
    decoder = decoder_of(tmp_path / "model", WIDE, "bfloat16")
    trainer = trainer_of(tmp_path / "job", decoder, lengths, kernels, recompute=recompute)
    run(trainer, 1)  # compiles, and the libraries take their workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(trainer, 3)
    peak = torch.cuda.max_memory_allocated() - before
    num_tokens = sum(lengths)
    plan = trainer.bytes_if_all_kept(num_tokens) if recompute == "never" else trainer.bytes_if_recomputed(num_tokens)
    print(f"{len(lengths)} x {lengths[0]} {recompute}: peak {peak / 2**20:.0f} MiB, plan {plan / 2**20:.0f} MiB")
    assert 0.5 * plan < peak <= plan
    assert all(np.isfinite(entry["loss"]) for entry in trainer.log_history) and trainer.cursor.num_skipped == 0


def test_the_state_of_a_job_is_what_it_says(tmp_path: Path, kernels: TrainingOps) -> None:
    decoder = decoder_of(tmp_path / "model", WIDE, "bfloat16")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(tmp_path / "job", decoder, [64], kernels)
    run(trainer, 1)
    held = torch.cuda.memory_allocated() - before
    assert held <= trainer.state_bytes + (64 << 20)  # cuBLAS keeps a workspace
