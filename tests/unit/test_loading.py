"""Loading: what is read, what is refused in one sentence, and that weights are never held twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fineinfer.model import resolve
from fineinfer.model.errors import ModelLoadError, UnsupportedModelError
from fineinfer.model.files import INDEX_FILE, SINGLE_FILE
from fineinfer.model.loader import base_weights_hash, load_model, read_spec
from fineinfer.model.resolve import resolve_model_path


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    tensors.update({name.replace("__", "."): value for name, value in changes.items()})
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / SINGLE_FILE)


def test_parameters_are_frozen_and_hashed(tiny_model) -> None:
    _, folder = tiny_model("Qwen2")
    decoder = load_model(folder).decoder
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not decoder.training
    before = base_weights_hash(decoder)
    assert before == base_weights_hash(load_model(folder).decoder)
    assert before != base_weights_hash(load_model(folder, dtype="bfloat16").decoder)
    decoder.layers[1].down[3, 4] += 1e-6
    assert base_weights_hash(decoder) != before


def test_sharded_equals_single(tiny_model) -> None:
    _, single = tiny_model("Llama")
    _, sharded = tiny_model("Llama", shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert base_weights_hash(load_model(single).decoder) == base_weights_hash(load_model(sharded).decoder)
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=lost.name):
        load_model(sharded)


def test_a_head_of_its_own_wins_over_tie_as_in_transformers(tiny_model) -> None:
    from transformers import AutoModelForCausalLM

    _, folder = tiny_model("Llama", tie_word_embeddings=True)
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=embedding.clone())
    assert load_model(folder).spec.tie_embeddings
    edit_tensors(folder, lm_head__weight=embedding + 1)
    loaded = load_model(folder)
    assert not loaded.spec.tie_embeddings
    hf = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.decoder.head_weight, hf.lm_head.weight)


def test_end_tokens_join_both_configs(tiny_model) -> None:
    _, folder = tiny_model("Llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    edit_config(folder, eos_token_id=7)
    assert read_spec(folder)[1].eos_token_ids == (5, 2, 7)
    (folder / "generation_config.json").unlink()
    assert read_spec(folder)[1].eos_token_ids == (7,)


def test_dummy_needs_a_config_only(tmp_path: Path, tiny_model) -> None:
    _, folder = tiny_model("Qwen3", attention_bias=True)
    (folder / SINGLE_FILE).unlink()
    one = load_model(folder, load_format="dummy", seed=1).decoder
    same = load_model(folder, load_format="dummy", seed=1).decoder
    other = load_model(folder, load_format="dummy", seed=2).decoder
    assert base_weights_hash(one) == base_weights_hash(same) != base_weights_hash(other)
    assert all(not parameter.is_meta for parameter in one.parameters())
    assert bool((one.layers[0].q_norm == 1).all())
    assert float(one.head_weight.std()) == pytest.approx(0.02, rel=0.1)


def test_dtype_auto_and_wrong_values(tiny_model) -> None:
    _, folder = tiny_model("Llama")
    assert load_model(folder).decoder.dtype == torch.float32
    with pytest.raises(ModelLoadError, match="'int8' is unknown; choose one of auto, float32"):
        load_model(folder, dtype="int8")
    with pytest.raises(ModelLoadError, match="'pickle' is unknown"):
        load_model(folder, load_format="pickle")


def test_missing_extra_and_misshaped_tensors_are_named(tiny_model) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    for changes, message in (
        ({name: None}, f"lacks tensor {name}"),
        ({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}, "has tensor model.layers.3.mlp.up_proj.weight"),
        ({name: torch.zeros(32, 33)}, rf"tensor {name} of .* has shape \[32, 33\], the config says \[32, 32\]"),
        ({name: torch.zeros(32, 32, dtype=torch.int8)}, f"tensor {name} of .* is I8"),
    ):
        _, folder = tiny_model("Llama")
        edit_tensors(folder, **changes)
        with pytest.raises(ModelLoadError, match=message):
            load_model(folder)


def test_old_frequency_tensors_are_no_fault(tiny_model) -> None:
    _, folder = tiny_model("Llama")
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, Mis"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"architectures": ["X"], "auto_map": {"AutoConfig": "code.Config"}}, "X is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "RoPE kind 'spiral'"),
    ],
)
def test_unsupported_configs_are_named(tiny_model, changes: dict, message: str) -> None:
    _, folder = tiny_model("Llama")
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder)


def test_model_type_stands_in_for_architectures(tiny_model) -> None:
    _, folder = tiny_model("Mistral")
    edit_config(folder, architectures=None)
    assert load_model(folder).spec.architecture == "MistralForCausalLM"


def test_wrong_folders_are_named_without_asking_a_hub(tiny_model, tmp_path: Path, monkeypatch) -> None:
    def ask(*_, **__):
        pytest.fail("the hub was asked")

    monkeypatch.setattr(resolve, "snapshot_download", ask)
    with pytest.raises(ModelLoadError, match=r"there is no model folder or \.gguf file /no/such/folder"):
        load_model("/no/such/folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=r"empty has no config\.json"):
        load_model(empty)
    _, folder = tiny_model("Llama")
    with pytest.raises(ModelLoadError, match="is a file; name its folder"):
        load_model(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickle weights"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadError, match=f"has no {SINGLE_FILE} and no {INDEX_FILE}"):
        load_model(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is a LoRA adapter"):
        load_model(folder)
    (folder / SINGLE_FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(ModelLoadError, match="is not valid"):
        load_model(folder)


def test_hub_cache_comes_before_the_hub(tiny_model, monkeypatch) -> None:
    _, folder = tiny_model("Llama")
    asked: list[bool] = []

    def snapshot(repo: str, *, local_files_only: bool, **_) -> str:
        asked.append(local_files_only)
        if not local_files_only and repo == "org/away":
            raise OSError("unreachable")
        return str(folder)

    monkeypatch.setattr(resolve, "snapshot_download", snapshot)
    assert resolve_model_path("org/model") == folder
    assert asked == [True]
    (folder / SINGLE_FILE).unlink()  # only config and tokenizer were fetched before: the weights are needed now
    assert resolve_model_path("org/model", need_weights=False) == folder
    resolve_model_path("org/model")
    assert asked == [True, True, True, False]
    with pytest.raises(ModelLoadError, match=r"no folder org/away here, .* the hub cannot be reached"):
        resolve_model_path("org/away")


_MEASURE = """
import sys
from pathlib import Path
import torch
from fineinfer.kernels.linear import linear
from fineinfer.model.loader import load_model, read_spec
torch.set_num_threads(1)

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

read_spec(Path(sys.argv[1]))  # every import is done
Path("/proc/self/clear_refs").write_text("5")  # peak := now
before = status("VmRSS")
loaded = load_model(sys.argv[1], dtype="float32")
weights = sum(p.numel() * p.element_size() for p in loaded.decoder.parameters())
print(weights, status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_the_weights_once(embedded_model) -> None:
    command = [sys.executable, "-c", _MEASURE, str(embedded_model)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    weights, peak, after = (int(number) / 2**20 for number in output.split())
    print(f"weights {weights:.0f} MiB, peak growth {peak:.0f} MiB, growth {after:.0f} MiB (anonymous and file pages)")
    assert weights > 500
    assert after < weights + 24  # modules loaded on the way
    assert peak < 1.10 * weights
