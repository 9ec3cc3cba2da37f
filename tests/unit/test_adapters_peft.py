"""Adapter files: PEFT reads ours, we read PEFT's, and everything that cannot be served is refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from fineinfer.adapters.batch import AdapterSegment, serving_project
from fineinfer.adapters.config import AdapterError, module_path
from fineinfer.adapters.peft_io import content_hash, load_adapter, save_adapter
from fineinfer.adapters.registry import AdapterRegistry, AdapterVersion
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.kernels.reference import attention_varlen
from fineinfer.messages import LoraSpec
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model

# PEFT asks transformers 5.24 for a name that is going away
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

IDS = torch.tensor([5, 9, 2, 33, 71, 8, 8, 1, 64, 20])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(base: Path) -> Decoder:
    return load_model(base, dtype="float32").decoder


def reference_model(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def random_adapter(decoder: Decoder, spec: LoraSpec, folder: Path, seed: int = 0) -> LoraWeights:
    weights = LoraWeights.init(LoraLayout.uniform(decoder.spec, spec), torch.float32, "cpu", seed)
    weights.flat.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    folder.mkdir()
    save_adapter(weights, spec, "some/base", folder)
    return weights


def served_logits(decoder: Decoder, folder: Path) -> torch.Tensor:
    registry = AdapterRegistry(decoder.spec, 2, 8, torch.float32, torch.device("cpu"))
    version = content_hash(folder)
    registry.register(AdapterVersion("lora", 1, version, folder))
    slot = registry.acquire(version)
    assert slot is not None
    project = serving_project(registry, [AdapterSegment(slot, 0, len(IDS))])
    with torch.inference_mode():
        rows = decoder.rope.rows(torch.arange(len(IDS)))
        x = decoder.embed(IDS)
        for layer in range(decoder.spec.num_layers):
            x = decoder.layer(layer, x, rows, project, lambda _i, q, k, v: attention_varlen(q, k, v, [0, len(IDS)]))
        return decoder.head(x)


@pytest.mark.parametrize(
    "spec",
    [
        LoraSpec(r=4, lora_alpha=8),
        LoraSpec(r=3, lora_alpha=7.5, target_modules=("v_proj", "q_proj"), use_rslora=True),
        LoraSpec(r=8, lora_alpha=16, target_modules=("down_proj",)),
        LoraSpec(
            r=4,
            lora_alpha=6,
            lora_dropout=0.25,
            rank_pattern={"down_proj": 7, "self_attn.k_proj": 1},
            alpha_pattern={"model.layers.1.self_attn.v_proj": 40.5, "up_proj": 1},
        ),
        # of two patterns that match the first one counts, also where the alphabet has them the other way round
        LoraSpec(
            r=2,
            target_modules=("q_proj", "k_proj"),
            rank_pattern={"q_proj": 3, "layers.0.self_attn.q_proj": 5},
            alpha_pattern={"layers.0.self_attn.q_proj": 9.0, "q_proj": 64.0},
            use_rslora=True,
        ),
    ],
)
def test_peft_loads_our_export_and_computes_the_same(
    base: Path, decoder: Decoder, spec: LoraSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_adapter(decoder, spec, tmp_path / "a")
    results = []
    load = PeftModel.load_adapter

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        results.append(load(self, *args, **kwargs))
        return results[-1]

    monkeypatch.setattr(PeftModel, "load_adapter", spy)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(reference_model(base), tmp_path / "a")
    assert [str(w.message) for w in seen if "is_gradient_checkpointing" not in str(w.message)] == []
    assert len(results) == 1
    assert [key for key in results[0].missing_keys if "lora" in key] == []
    assert results[0].unexpected_keys == []
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
        plain = model.disable_adapter()
        with plain:
            base_logits = model(IDS[None]).logits[0]
    got = served_logits(decoder, tmp_path / "a")
    assert float((expected - base_logits).abs().max()) > 0.1  # the adapter does something
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_our_config_has_exactly_peft_s_keys_and_values(decoder: Decoder, tmp_path: Path) -> None:
    random_adapter(decoder, LoraSpec(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj")), tmp_path / "a")
    theirs = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", inference_mode=True,
        base_model_name_or_path="some/base",
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    expected = json.loads((tmp_path / "theirs/adapter_config.json").read_text())
    expected["target_modules"].sort()
    assert json.loads((tmp_path / "a/adapter_config.json").read_text()) == expected


@pytest.mark.parametrize(
    "options",
    [
        dict(r=4, lora_alpha=8, target_modules="all-linear"),
        dict(r=8, lora_alpha=4, target_modules=["q_proj", "o_proj"], use_rslora=True, layers_to_transform=[1]),
        dict(
            r=4, lora_alpha=8, target_modules=["k_proj", "up_proj"], rank_pattern={"k_proj": 2},
            alpha_pattern={"layers.0.mlp.up_proj": 32},
        ),
    ],
)  # fmt: skip
def test_we_serve_what_peft_saved(base: Path, decoder: Decoder, options: dict[str, Any], tmp_path: Path) -> None:
    model = get_peft_model(reference_model(base), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "a")
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
    torch.testing.assert_close(served_logits(decoder, tmp_path / "a"), expected, rtol=0, atol=1e-5)


def test_save_load_save_is_byte_equal(decoder: Decoder, tmp_path: Path) -> None:
    spec = LoraSpec(r=4, lora_alpha=8, target_modules=("o_proj", "gate_proj"))
    random_adapter(decoder, spec, tmp_path / "a")
    loaded = load_adapter(tmp_path / "a", decoder.spec, 8)
    (tmp_path / "b").mkdir()
    save_adapter(loaded, spec, "some/base", tmp_path / "b")
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    versions = {content_hash(tmp_path / "a")}
    for template in ("{{ messages }}", "{{ messages[0] }}"):  # the same weights give other answers in another template
        (tmp_path / "b" / "chat_template.jinja").write_text(template)
        versions.add(content_hash(tmp_path / "b"))
    assert len(versions) == 3


def test_a_fresh_adapter_starts_as_peft_s(decoder: Decoder) -> None:
    layout = LoraLayout.uniform(decoder.spec, LoraSpec(r=8))
    weights = LoraWeights.init(layout, torch.float32, "cpu", seed=1)
    for module in layout.modules():
        a, bound = weights.a(module), module.in_features**-0.5
        assert float(a.abs().max()) <= bound
        assert float(a.std()) == pytest.approx(bound / 3**0.5, rel=0.2)
        assert not weights.b(module).any()
    assert torch.equal(weights.flat, LoraWeights.init(layout, torch.float32, "cpu", seed=1).flat)
    assert not torch.equal(weights.flat, LoraWeights.init(layout, torch.float32, "cpu", seed=2).flat)


def test_patterns_mean_to_us_what_they_mean_to_peft(base: Path, decoder: Decoder) -> None:
    spec = LoraSpec(
        r=4, lora_alpha=6, rank_pattern={"layers.1.mlp.up_proj": 2, "proj": 8, "mlp.up_proj": 3, "q_proj": 5},
        alpha_pattern={"0.self_attn.o_proj": 7.0, "self_attn.o_proj": 1.5},
    )  # fmt: skip
    with pytest.raises(AdapterError, match="'proj' matches no module"):  # an end of a name is not an end of a path
        LoraLayout.uniform(decoder.spec, spec)
    ranks = {name: rank for name, rank in spec.rank_pattern.items() if name != "proj"}
    spec = msgspec.structs.replace(spec, rank_pattern=ranks)
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=list(spec.target_modules), rank_pattern=ranks,
        alpha_pattern=spec.alpha_pattern,
    )  # fmt: skip
    model = get_peft_model(reference_model(base), config)
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    layout = LoraLayout.uniform(decoder.spec, spec)
    ours = {module_path(module.layer, module.name): (module.rank, module.scaling) for module in layout.modules()}
    assert ours == theirs and layout.max_rank == 5 == max(rank for rank, _ in ours.values())
    assert len({value for value in ours.values()}) == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank_pattern": {"lm_head": 4}}, "'lm_head' matches no module"),
        ({"rank_pattern": {"layers.2.mlp.up_proj": 4}}, "matches no module"),
        ({"alpha_pattern": {"o_proj": 4.0}}, "alpha_pattern: 'o_proj' matches no module"),
        ({"alpha_pattern": {".*_proj": 4.0}}, "not a module name"),
        ({"alpha_pattern": {"": 4.0}}, "not a module name"),
        ({"rank_pattern": {"^q_proj": 4}}, "not a module name"),
        ({"rank_pattern": {"q_proj": 0}}, "at least 1"),
        ({"r": 0}, "at least 1"),
    ],
)
def test_patterns_that_match_nothing_are_refused(decoder: Decoder, change: dict[str, Any], named: str) -> None:
    spec = LoraSpec(r=4, target_modules=("q_proj", "up_proj"))
    with pytest.raises(AdapterError, match=named):
        LoraLayout.uniform(decoder.spec, msgspec.structs.replace(spec, **change))


REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora"),
    ({"bias": "lora_only"}, "bias"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"r": 0}, "r=0"),
    ({"r": 16}, "rank 16"),
    ({"r": 2}, "shape"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ({"target_modules": ["q_proj"]}, "does not name"),
    ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, "down_proj"),
    ({"rank_pattern": {"(a+)+$": 4}}, "regular expression"),
    ({"alpha_pattern": {"q_proj": "big"}}, "alpha_pattern"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED_OPTIONS)
def test_options_that_cannot_be_served_are_refused(
    decoder: Decoder, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    random_adapter(decoder, LoraSpec(r=4, target_modules=("q_proj", "v_proj")), tmp_path / "a")
    path = tmp_path / "a/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AdapterError, match=named):
        load_adapter(tmp_path / "a", decoder.spec, 8)


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def break_tensors(folder: Path, how: str) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    if how == "missing":
        del tensors[KEY]
    elif how == "shape":
        tensors[KEY] = torch.zeros(5, 4)
    elif how == "nan":
        tensors[KEY][0, 0] = float("nan")
    elif how == "foreign":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 32)
    elif how == "layer":
        tensors[KEY.replace("layers.1.", "layers.7.")] = tensors[KEY].clone()
    elif how == "integer":
        tensors = {key: tensor.to(torch.int32) for key, tensor in tensors.items()}
    save_file(tensors, path)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "header":
        path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    elif how == "pickle":
        path.rename(folder / "adapter_model.bin")
    elif how == "no config":
        (folder / "adapter_config.json").unlink()
    elif how == "broken config":
        (folder / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("missing", "q_proj.lora_B"), ("shape", "q_proj.lora_B"), ("nan", "q_proj.lora_B"), ("foreign", "lm_head"),
        ("layer", "layers.7"), ("integer", "int32"), ("truncated", "damaged"), ("header", "damaged"),
        ("pickle", "pickle"), ("no config", "missing"), ("broken config", "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_adapters_are_refused_and_never_registered(
    decoder: Decoder, how: str, named: str, tmp_path: Path
) -> None:
    random_adapter(decoder, LoraSpec(r=4, target_modules=("q_proj", "v_proj")), tmp_path / "a")
    break_tensors(tmp_path / "a", how)
    with pytest.raises(AdapterError, match=named):
        load_adapter(tmp_path / "a", decoder.spec, 8)
    registry = AdapterRegistry(decoder.spec, 1, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError):
        registry.register(AdapterVersion("bad", 1, "0" * 64, tmp_path / "a"))
    assert registry.names() == []
    assert registry.resolve("bad") is None


def test_registry_pins_versions_and_reuses_the_least_recently_used_slot(decoder: Decoder, tmp_path: Path) -> None:
    registry = AdapterRegistry(decoder.spec, 2, 8, torch.float32, torch.device("cpu"))
    versions = []
    for step in range(3):
        random_adapter(decoder, LoraSpec(r=4, target_modules=("q_proj",)), tmp_path / f"{step}", seed=step)
        versions.append(content_hash(tmp_path / f"{step}"))
        registry.register(AdapterVersion("lora", step, versions[step], tmp_path / f"{step}"), current=step < 2)
    current, by_step = registry.resolve("lora"), registry.resolve("lora@2")
    assert current is not None and (current.step, current.version) == (1, versions[1])
    assert by_step is not None and by_step.version == versions[2]
    assert registry.resolve("lora@9") is None and registry.resolve("lora@") is None and registry.resolve("x") is None

    first, second = registry.acquire(versions[0]), registry.acquire(versions[1])
    assert {first, second} == {0, 1}
    assert registry.acquire(versions[2]) is None  # both slots are pinned
    registry.remove("lora")
    assert registry.names() == [] and registry.resolve("lora@1") is None
    assert registry.acquire(versions[1]) == second  # who holds a version keeps it
    registry.release(versions[0])
    assert registry.acquire(versions[2]) == first
    for version in (versions[1], versions[1], versions[2]):
        registry.release(version)
    assert registry.num_pinned() == 0
    with pytest.raises(ValueError, match="not pinned"):
        registry.release(versions[1])
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(AdapterError, match="missing"):
        registry.acquire(versions[0])


def test_mixed_ranks_targets_and_base_rows_in_one_batch(decoder: Decoder, tmp_path: Path) -> None:
    registry = AdapterRegistry(decoder.spec, 3, 8, torch.float32, torch.device("cpu"))
    specs = [
        LoraSpec(r=8, lora_alpha=8, target_modules=("q_proj", "v_proj")),
        LoraSpec(r=2, lora_alpha=9, target_modules=("v_proj", "k_proj")),
    ]
    adapters, slots = [], []
    for index, spec in enumerate(specs):
        adapters.append(random_adapter(decoder, spec, tmp_path / f"{index}", seed=index))
        version = content_hash(tmp_path / f"{index}")
        registry.register(AdapterVersion(f"lora{index}", 1, version, tmp_path / f"{index}"))
        slot = registry.acquire(version)
        assert slot is not None
        slots.append(slot)
    layer, x = decoder.layers[1], torch.randn(9, 32)
    weight, bias = layer.qkv, layer.qkv_bias
    project = serving_project(registry, [AdapterSegment(slots[0], 1, 4), AdapterSegment(slots[1], 4, 7)])
    got = project(1, "qkv", x, weight, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    for weights, rows in ((adapters[0], slice(1, 4)), (adapters[1], slice(4, 7))):
        for module in weights.layout.blocks[1, "qkv"].modules:
            delta = module.scaling * x[rows] @ weights.a(module).T @ weights.b(module).T
            expected[rows, module.out_start : module.out_end] += delta
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    plain = serving_project(registry, [])(1, "qkv", x, weight, bias)
    assert torch.equal(plain[[0, 7, 8]], got[[0, 7, 8]])
