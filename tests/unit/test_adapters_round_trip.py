"""60 adapter configurations: PEFT's files served with equal logits, and our exports read by PEFT with equal logits."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from fineinfer.adapters.batch import AdapterSegment, serving_project
from fineinfer.adapters.peft_io import content_hash, load_adapter, save_adapter
from fineinfer.adapters.registry import AdapterRegistry, AdapterVersion
from fineinfer.engine.export import export_adapter
from fineinfer.kernels.reference import attention_varlen
from fineinfer.messages import LoraSpec
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model

from .tagged_engine import one_thread  # noqa: F401 - a fixture

IDS = torch.tensor([5, 9, 2, 33, 71, 8, 8, 1, 64, 20])
MAX_RANK = 64
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SHAPE = dict(
    hidden_size=64, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, initializer_range=0.1,
)  # fmt: skip


def configurations() -> list[tuple[str, dict[str, Any]]]:
    """(family, LoraConfig's options, and ``dtype`` of the file)."""
    made: list[dict[str, Any]] = []
    targets: list[Any] = [["q_proj", "v_proj"], ATTENTION, MLP, ATTENTION + MLP, "all-linear", ["down_proj"]]
    ranks, alphas = [1, 2, 3, 4, 8, 16, 32, 64], [1, 8, 16, 7.5, 64]
    for index in range(28):  # ranks, alphas, scalings, targets and dtypes against each other
        r, alpha, target = ranks[index % 8], alphas[index % 5], targets[index % 6]
        made.append({"r": r, "lora_alpha": alpha, "target_modules": target, "use_rslora": index % 3 == 0})
    for dtype, r in itertools.product(("bfloat16", "float16"), (4, 64)):
        made.append({"r": r, "lora_alpha": 16, "target_modules": ATTENTION + MLP, "dtype": dtype})
    every = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP}
    rank_patterns: list[dict[str, int]] = [
        {"q_proj": 2}, {"down_proj": 16, "q_proj": 1}, {"layers.1.mlp.up_proj": 9}, {"model.layers.0.mlp.up_proj": 9},
        {"^model.layers.2.self_attn.v_proj": 7}, {"layers.1.self_attn.q_proj": 3, "q_proj": 5}, {"[qk]_proj": 2},
        {r"layers\.[01]\..*_proj": 6}, {"(gate|up)_proj": 12}, {"mlp.*": 3},
    ]  # fmt: skip
    made += [every | {"rank_pattern": pattern} for pattern in rank_patterns]
    # PEFT sorts the keys of its file, and of two that match the first one counts: these are sorted already
    alpha_patterns: list[dict[str, float]] = [
        {"q_proj": 32}, {"layers.2.self_attn.v_proj": 64, "v_proj": 2}, {r".*self_attn.*": 1}, {"v_proj": 0.5},
    ]  # fmt: skip
    made += [every | {"alpha_pattern": pattern} for pattern in alpha_patterns]
    made.append(every | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}, "use_rslora": True})
    made.append(every | {"rank_pattern": {"o_proj": 64}, "lora_dropout": 0.1})
    made += [every | {"layers_to_transform": layers} for layers in ([1], [0, 2], 2)]
    made.append(every | {"layers_to_transform": [1], "layers_pattern": "layers"})
    made += [every | {"exclude_modules": excluded} for excluded in (["q_proj"], ["layers.0.mlp.down_proj"], r".*mlp.*")]
    made.append(every | {"target_modules": r".*layers\.[02]\.self_attn\.(q|o)_proj"})
    made.append(every | {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"]})
    made.append(every | {"lora_dropout": 0.2, "target_modules": ["gate_proj"]})
    made.append(every | {"init_lora_weights": "gaussian"})
    made.append(every | {"r": 64, "lora_alpha": 128, "use_rslora": True})
    return [(("Llama", "Qwen2")[index % 2], options) for index, options in enumerate(made)]


CONFIGURATIONS = configurations()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Decoder]]:
    """By family: transformers' model and ours, of the same random weights."""
    made = {}
    for family in ("Llama", "Qwen2"):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SHAPE)).eval()
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        made[family] = model, load_model(folder, dtype="float32").decoder
    return made


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's: dropout of an unusual init, and names that transformers will drop
        yield


def make_peft(model: Any, options: dict[str, Any], folder: Path) -> torch.Tensor:
    """Save a PEFT adapter of random weights; its logits [tokens, vocabulary]."""
    dtype = getattr(torch, options.get("dtype", "float32"))
    own = {key: value for key, value in options.items() if key != "dtype"}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **own)).eval()
    torch.manual_seed(3)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    strength = 0.1 / max(1.0, options["lora_alpha"] / options["r"]) ** 0.5  # fp32 resolves 1e-5 of moderate logits
    for parameter in parameters:
        parameter.data.normal_(0, strength).copy_(parameter.data.to(dtype))
    with torch.inference_mode():
        logits = adapted(IDS[None]).logits[0]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    adapted.save_pretrained(folder)
    return logits


def served(decoder: Decoder, folder: Path) -> torch.Tensor:
    """Our logits, through the registry's slots and the serving projection."""
    registry = AdapterRegistry(decoder.spec, 1, MAX_RANK, torch.float32, torch.device("cpu"))
    version = content_hash(folder)
    assert registry.register(AdapterVersion("lora", 1, version, folder))
    slot = registry.acquire(version)
    assert slot is not None
    project = serving_project(registry, [AdapterSegment(slot, 0, len(IDS))])
    with torch.inference_mode():
        rows, x = decoder.rope.rows(torch.arange(len(IDS))), decoder.embed(IDS)
        for layer in range(decoder.spec.num_layers):
            x = decoder.layer(layer, x, rows, project, lambda _i, q, k, v: attention_varlen(q, k, v, [0, len(IDS)]))
        return decoder.head(x)


def export(decoder: Decoder, options: dict[str, Any], folder: Path, target: Path) -> None:
    """What we read written by us: as our trainer writes it where its settings can say it, else by `models export`."""
    config = json.loads((folder / "adapter_config.json").read_text())
    regex = any(set("[](|)*\\^") & set(name) for key in ("rank_pattern", "alpha_pattern") for name in config[key])
    whole = isinstance(config["target_modules"], list) and set(config["target_modules"]) <= {*ATTENTION, *MLP}
    if regex or not whole or config["layers_to_transform"] is not None or config["exclude_modules"]:
        export_adapter(folder, target)
        return
    spec = LoraSpec(
        r=config["r"], lora_alpha=config["lora_alpha"], target_modules=tuple(config["target_modules"]),
        use_rslora=config["use_rslora"], lora_dropout=config["lora_dropout"], rank_pattern=config["rank_pattern"],
        alpha_pattern=config["alpha_pattern"],
    )  # fmt: skip
    target.mkdir()
    save_adapter(load_adapter(folder, decoder.spec, MAX_RANK), spec, "some/base", target)


def test_there_are_60() -> None:
    assert len({repr(one) for one in CONFIGURATIONS}) == len(CONFIGURATIONS) == 60


@pytest.mark.parametrize("index", range(60))
def test_round_trip(bases: dict[str, Any], index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = CONFIGURATIONS[index]
    model, decoder = bases[family]
    expected = make_peft(model, options, tmp_path / "theirs")
    with torch.inference_mode():
        plain = model(IDS[None]).logits[0]
    assert float((expected - plain).abs().max()) > 1e-3, "the adapter does something"
    torch.testing.assert_close(served(decoder, tmp_path / "theirs"), expected, rtol=0, atol=1e-5)

    export(decoder, options, tmp_path / "theirs", tmp_path / "ours")
    loaded: list[Any] = []
    load = PeftModel.load_adapter
    monkeypatch.setattr(PeftModel, "load_adapter", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1])
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
    assert [key for key in loaded[0].missing_keys if "lora" in key] == []
    assert loaded[0].unexpected_keys == []
    with torch.inference_mode():
        torch.testing.assert_close(again(IDS[None]).logits[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        (".weight", ".default.weight"),
        (".weight", ".my_adapter.weight"),
    ],
)
def test_keys_as_other_tools_write_them(bases: dict[str, Any], tmp_path: Path, old: str, new: str) -> None:
    model, decoder = bases["Llama"]
    expected = make_peft(model, {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP}, tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({key.replace(old, new): tensor for key, tensor in load_file(file).items()}, file)
    config = tmp_path / "a/adapter_config.json"
    nameless = json.loads(config.read_text()) | {"base_model_name_or_path": None, "some_new_key": 1}
    config.write_text(json.dumps(nameless))
    torch.testing.assert_close(served(decoder, tmp_path / "a"), expected, rtol=0, atol=1e-5)
