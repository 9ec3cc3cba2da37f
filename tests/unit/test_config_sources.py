"""fineinfer.config: precedence, parsing, and errors that say what to do."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from fineinfer.config import SETTINGS, Config, ConfigError, is_loopback, load_config
from fineinfer.parse import size

PRESETS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    config = load_config()
    assert config.server.host == "127.0.0.1" and config.server.port == 8000
    assert config.scheduler.policy == "slo" and config.scheduler.deferral_bound_s == 1.0
    assert config.model.model is None and config.memory.memory_budget is None
    assert config.server.state_dir == Path.home() / ".fineinfer"
    assert config.hyperparameters() == {}


def test_flag_beats_yaml_beats_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 2\nmax-num-seqs: 20\n")
    env = {"FINEINFER_PORT": "1", "FINEINFER_MAX_NUM_SEQS": "10", "FINEINFER_MAX_LORAS": "5"}
    config = load_config({"port": "3", "dtype": None}, env, path)
    assert config.server.port == 3
    assert config.scheduler.max_num_seqs == 20
    assert config.memory.max_loras == 5


def test_every_setting_has_one_group_and_is_described() -> None:
    groups: list[Any] = [type(group.default) for group in dataclasses.fields(Config)]
    names = [item.name for group in groups for item in dataclasses.fields(group)]
    assert len(names) == len(set(names)) == len(SETTINGS)
    for setting in SETTINGS.values():
        assert setting.help.strip() and setting.flag.startswith("--")
        assert setting.metavar == "" if setting.default is False else setting.metavar.isupper()  # a switch has no value


def test_every_setting_is_read_by_some_component() -> None:
    # The supervisor hands settings to the processes it starts; those of a job travel as hyperparameters.
    root = Path(__file__).resolve().parents[2] / "fineinfer"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (root / "server").glob("*.py")]
    trees += [ast.parse(path.read_text(encoding="utf-8")) for path in (root / "engine").glob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for setting in SETTINGS.values():
        if setting.group not in ("train", "optimizer"):
            assert setting.name in read, f"{setting.flag} does nothing"
    every = {name: "1" for name, item in SETTINGS.items() if item.group in ("train", "optimizer")}
    every |= {name: "true" for name in every if SETTINGS[name].default is False}
    every |= {
        "lr_scheduler": "linear",
        "recompute": "never",
        "train_on": "all",
        "excess_length_strategy": "drop",
        "serve_while_training": "live",
        "publish": "if_better",
        "validation_split": "0.5",
        "lora_rank_pattern": "a=1",
        "lora_alpha_pattern": "a=1",
    }
    del every["lora_train"], every["lora_train_name"]
    chosen = load_config(every).hyperparameters()
    assert len(chosen) + len(chosen["lora"]) + len(chosen["early_stopping"]) - 2 == len(every)


@pytest.mark.parametrize("key", ["max-model-len", "max_model_len"])
def test_yaml_keys_may_be_spelled_as_flags(tmp_path: Path, key: str) -> None:
    assert load_config(config_file=write(tmp_path, f"{key}: 512")).model.max_model_len == 512


def test_unknown_yaml_key_names_a_close_match(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml: unknown key 'max-num-seq' \(did you mean 'max-num-seqs'\?\)"):
        load_config(config_file=write(tmp_path, "max-num-seq: 3"))


def test_unrelated_environment_is_ignored() -> None:
    assert load_config(env={"FINEINFER_CACHE": "/x", "FINEINFER_URL": "http://x", "PORT": "1"}) == load_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- port", "expected 'key: value' lines"),
        ("port: [", "not valid YAML"),
        ("port: true", "expected a whole number"),
        ("port: 70000", "between 1 and 65535"),
        ("policy: fastest", "expected one of slo, deferred, inference-first, train-first"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(config_file=write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(config_file=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("port", "x"),
        ("port", "0"),
        ("deferral_bound_s", "nan"),
        ("deferral_bound_s", "-1"),
        ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.1"),
        ("learning_rate", "0"),
        ("memory_budget", "4 parsecs"),
        ("max_num_seqs", "0"),
        ("seed", "-1"),
        ("epochs", "1.5"),
        ("metrics_prefix", "no spaces:"),
        ("lora_target_modules", ","),
    ],
)
def test_bad_flags_name_the_flag(name: str, raw: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: "):
        load_config({name: raw})


def test_unknown_flag_names_a_close_match() -> None:
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        load_config({"polcy": "deferred"})


@pytest.mark.parametrize(
    ("raw", "num_bytes"),
    [("1024", 1024), (2048, 2048), ("4GiB", 4 << 30), ("4g", 4 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536)],
)
def test_sizes(raw: object, num_bytes: int) -> None:
    assert size(raw) == num_bytes


@pytest.mark.parametrize("raw", ["", "GiB", "-1", "0", "4GiBs", "1e9", True])
def test_bad_sizes(raw: object) -> None:
    with pytest.raises(ValueError, match=r"size|0 bytes"):
        size(raw)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.5.5.5", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")),
    ],
)
def test_open_address_needs_a_key(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    assert load_config({"host": host, "api_key": ["k"]}).server.host == host
    if local:
        load_config({"host": host})
    else:
        with pytest.raises(ConfigError, match="--api-key"):
            load_config({"host": host})


def test_api_keys_come_as_list_or_commas_and_stay_out_of_errors(tmp_path: Path) -> None:
    assert load_config(env={"FINEINFER_API_KEY": "a, b"}).server.api_key == ("a", "b")
    assert load_config(config_file=write(tmp_path, "api-key: [a, b]")).server.api_key == ("a", "b")
    with pytest.raises(ConfigError) as caught:
        load_config(env={"FINEINFER_API_KEY": " , "})
    assert "***" in str(caught.value)


def test_training_flags_become_rest_hyperparameters(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    flags = {"lora_train": str(data), "lora_r": "8", "lora_target_modules": "q_proj,v_proj", "epochs": "2"}
    config = load_config(flags | {"learning_rate": "1e-3", "recompute": "always"})
    assert config.train.lora_train == data
    assert config.hyperparameters() == {
        "n_epochs": 2,
        "learning_rate": 1e-3,
        "recompute": "always",
        "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    }
    flags = {"lora_rank_pattern": "down_proj=32, q_proj=4", "lora_alpha_pattern": "q_proj=4.5", "lora_rslora": True}
    config = load_config(flags | {"early_stopping_patience": "2", "warmup_ratio": "0", "lora_dropout": "0.1"})
    assert config.hyperparameters() == {
        "warmup_ratio": 0,
        "early_stopping": {"patience": 2},
        "lora": {"rank_pattern": {"down_proj": 32, "q_proj": 4}, "alpha_pattern": {"q_proj": 4.5}, "rslora": True,
                 "dropout": 0.1},
    }  # fmt: skip
    for raw in ("q_proj", "q_proj=x", "q_proj=nan"):
        with pytest.raises(ConfigError, match="--lora-rank-pattern: "):
            load_config({"lora_rank_pattern": raw})


def test_training_that_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-train: no such file"):
        load_config({"lora_train": str(tmp_path / "none.jsonl")})
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    with pytest.raises(ConfigError, match="--max-lora-rank 64"):
        load_config({"lora_train": str(data), "lora_r": "128"})


def test_config_cannot_be_changed() -> None:
    config = load_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_begin_with_their_command(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# fineinfer serve") and f"--config {path.stem}" in first
    config = load_config(config_file=path)
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        setting = SETTINGS[key.replace("-", "_")]
        assert getattr(getattr(config, setting.group), setting.name) == setting.parse(value)


def test_there_are_presets() -> None:
    assert {"embedded-cpu", "llama-8b-h100", "qwen3-cpu"} <= {path.stem for path in PRESETS}


def test_a_switch_is_on_by_its_flag_or_by_true() -> None:
    assert load_config({}).model.enforce_eager is False
    assert load_config({"enforce_eager": True}).model.enforce_eager is True
    assert load_config({}, {"FINEINFER_ENFORCE_EAGER": "true"}).model.enforce_eager is True
    with pytest.raises(ConfigError, match="true or false"):
        load_config({}, {"FINEINFER_ENFORCE_EAGER": "yes"})


@pytest.mark.parametrize(
    "raw",
    [
        ["sql=/a", "de=/b"],
        "sql=/a,de=/b",
        ['{"name": "sql", "path": "/a", "base_model_name": "x"}', "de=/b"],
        '[{"name": "sql", "path": "/a"}, {"name": "de", "path": "/b"}]',
    ],
)
def test_lora_modules_as_vllm_takes_them(raw: object) -> None:
    adapters = load_config({"lora_modules": raw}).adapters
    assert adapters.lora_modules == (("sql", Path("/a")), ("de", Path("/b")))


@pytest.mark.parametrize("raw", [["sql"], ["=x"], ["sql="], ['{"name": "sql"}'], "{", ["a=/x", "a=/y"]])
def test_lora_modules_that_name_nothing_are_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        load_config({"lora_modules": raw})


def test_copies_in_host_memory_are_no_fewer_than_slots_and_admin_keys_are_not_shown() -> None:
    assert load_config({"max_loras": "2", "max_cpu_loras": "2"}).memory.max_cpu_loras == 2
    with pytest.raises(ConfigError, match="--max-cpu-loras 2 is below --max-loras 8"):
        load_config({"max_cpu_loras": "2"})
    with pytest.raises(ConfigError) as caught:
        load_config({"admin_api_key": ["", " "]})
    assert "***" in str(caught.value)
