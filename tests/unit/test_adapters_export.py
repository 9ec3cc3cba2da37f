"""``fineinfer models export``: PEFT folders and merged models that transformers loads, and nothing written over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from fineinfer.cli.app import main
from fineinfer.hashing import adapter_hash
from fineinfer.server.adapter_files import import_adapter
from fineinfer.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = torch.tensor([[5, 9, 2, 33, 71, 8, 8, 1, 64, 20]])
OPTIONS: dict[str, Any] = {
    "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"layers.1.mlp.down_proj": 32}, "use_rslora": True,
}  # fmt: skip


def trained(base: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Write a PEFT adapter with random weights; the logits of base and adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(OPTIONS | options)))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with torch.inference_mode():
        return model(IDS).logits[0]


@pytest.fixture
def base(tiny_model: Callable[..., tuple[Any, Path]]) -> Path:
    folder = tiny_model("Qwen2", shard_size="20KB")[1]
    assert (folder / "model.safetensors.index.json").exists(), "several weight files"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("the base's")
    (folder / "old.bin").write_text("not copied")
    (folder / "original").mkdir()
    return folder


def state_with(tmp_path: Path, adapter: Path, name: str = "lora") -> Path:
    store = Store(tmp_path / "state")
    version, directory = import_adapter(adapter, store.state_dir / "adapters")
    store.adapters.load(name, version, str(directory))
    store.close()
    return store.state_dir


def test_a_merged_model_is_the_base_with_the_adapter(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, before = trained(base, tmp_path / "adapter"), {path: path.read_bytes() for path in base.glob("*.*")}
    state = state_with(tmp_path, tmp_path / "adapter")
    out = tmp_path / "deep/merged"
    capsys.readouterr()  # transformers' progress bars
    flags = ["--merge", "--model", str(base), "--state-dir", str(state), "-o", str(out)]
    assert main(["models", "export", "lora@1", *flags, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"name": "lora@1", "path": str(out), "merged": True} and said.err == ""
    merged = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(merged(IDS).logits[0], expected, rtol=0, atol=1e-4)
    assert {path.name for path in out.iterdir()} == {path.name for path in base.glob("*.*")} - {"old.bin"}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert {path: path.read_bytes() for path in base.glob("*.*")} == before
    assert [path.name for path in out.parent.iterdir()] == ["merged"], "no temporary folder is left"


def test_a_merge_is_rounded_once_into_the_base_s_own_dtype(
    tiny_model: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    model, _ = tiny_model("Llama")
    base = tmp_path / "bf16"
    model.to(torch.bfloat16).save_pretrained(base)
    trained(base, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    expected = peft.merge_and_unload().state_dict()
    assert main(["models", "export", str(tmp_path / "adapter"), "--merge", "--model", str(base), "-o",
                 str(tmp_path / "out"), "--state-dir", str(tmp_path / "none")]) == 0  # fmt: skip
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.dtype == torch.bfloat16
    for name, tensor in merged.state_dict().items():
        error = (tensor.float() - expected[name]).abs() / expected[name].abs().clamp(min=1e-3)
        assert float(error.max()) <= 2**-8, name  # half a step of bf16


def test_the_server_s_own_model_is_the_default(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(base, tmp_path / "adapter")
    state = state_with(tmp_path, tmp_path / "adapter")
    store = Store(state)
    store.set_meta("model", [str(base), None])
    store.close()
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "org/another"}))
    assert main(["models", "export", str(tmp_path / "adapter"), "--merge", "--state-dir", str(state), "-o",
                 str(tmp_path / "out")]) == 0  # fmt: skip
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "out") and "names 'org/another' as its base" in said.err
    assert (tmp_path / "out/config.json").exists()


def test_without_merge_it_is_the_peft_folder(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "adapter")
    state = state_with(tmp_path, tmp_path / "adapter")
    (tmp_path / "out").mkdir()  # empty: that is fine
    assert main(["models", "export", "lora", "--state-dir", str(state), "-o", str(tmp_path / "out")]) == 0
    assert adapter_hash(tmp_path / "out") == adapter_hash(tmp_path / "adapter")
    assert (tmp_path / "out/chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("not empty", "not empty"), ("unknown", "no adapter 'nobody'"), ("another shape", "shape"),
        ("no model", "config.json"), ("quantised", "plain floats"), ("missing weight", "lacks"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_says_why_and_writes_nothing(
    base: Path, tmp_path: Path, tiny_model: Callable[..., tuple[Any, Path]], capsys: pytest.CaptureFixture[str],
    how: str, said: str,
) -> None:  # fmt: skip
    from safetensors.torch import load_file, save_file

    trained(base, tmp_path / "adapter")
    out, name, model = tmp_path / "out", str(tmp_path / "adapter"), base
    if how == "not empty":
        out.mkdir()
        (out / "mine").write_text("kept")
    elif how == "unknown":
        name = "nobody"
    elif how == "another shape":
        model = tiny_model("Qwen2", hidden_size=64)[1]
    elif how == "no model":
        model = tmp_path / "adapter"
    else:
        for file in base.glob("*.safetensors"):
            tensors = load_file(file)
            for key in [key for key in tensors if key.endswith("layers.0.self_attn.q_proj.weight")]:
                tensors[key] = tensors[key].to(torch.int8)
                if how == "missing weight":
                    del tensors[key]
            save_file(tensors, file, metadata={"format": "pt"})
    code = main(["models", "export", name, "--merge", "--model", str(model), "-o", str(out), "--state-dir",
                 str(tmp_path / "none")])  # fmt: skip
    assert code == 1 and said in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"] if how == "not empty" else not out.exists()
    assert not list(tmp_path.glob(".out*"))
