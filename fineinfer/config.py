"""Configuration: frozen dataclasses from environment (``FINEINFER_*``) < YAML < flags; resolved once (no torch)."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineinfer.memory_config import AdapterConfig, MemoryConfig
from fineinfer.parse import file_path, metrics_prefix, names, number, numbers, one_of, size, switch, text, whole
from fineinfer.parse import setting as _setting

ENV_PREFIX = "FINEINFER_"


class ConfigError(ValueError):
    """A value, key or combination that cannot be used; the message is one line for the user."""


# ---------------------------------------------------------------- groups; every field is a flag of `fineinfer serve`


@dataclass(frozen=True)
class ModelConfig:
    """Which weights are served and how they are loaded."""

    model: str | None = _setting(None, text, "MODEL", "Folder, .gguf file or hub id; without it the embedded model.")
    served_model_name: str | None = _setting(None, text, "NAME", "Name of the base model in the API.")
    dtype: str = _setting(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "TYPE",
        "auto | float32 | bfloat16 | float16; auto: the checkpoint's type on CUDA, float32 on the CPU.",
    )
    device: str = _setting("auto", one_of("auto", "cpu", "cuda"), "DEVICE", "auto | cpu | cuda.")
    load_format: str = _setting(
        "auto", one_of("auto", "dummy"), "FORMAT", "auto | dummy; dummy: random weights of the model's shape."
    )
    revision: str | None = _setting(None, text, "REV", "Branch, tag or commit of a hub model.")
    max_model_len: int | None = _setting(None, whole(1), "TOKENS", "Longest prompt + output; default: the model's own.")
    num_threads: int | None = _setting(None, whole(1), "N", "CPU threads of one operation in the engine.")
    enforce_eager: bool = _setting(False, switch, "", "Launch every operation; no CUDA graphs (for debugging).")
    attention_backend: str = _setting(
        "auto", one_of("auto", "reference", "triton"), "NAME", "auto | reference | triton; auto: triton on CUDA."
    )
    deterministic: bool = _setting(
        False, switch, "", "Training gives the same bits in every run, whatever the load, on a GPU too."
    )
    seed: int = _setting(0, whole(0, 2**32 - 1), "N", "Seed of dummy weights and of the --lora-train job.")


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs when: requests beside each other, and training between them."""

    policy: str = _setting(
        "slo",
        one_of("slo", "deferred", "inference-first", "train-first"),
        "NAME",
        "slo | deferred | inference-first | train-first: how training and requests share the engine.",
    )
    deferral_bound_s: float = _setting(
        1.0, number(0), "SECONDS", "deferred: longest a waiting request may be held back for training."
    )
    slo_ttft_ms: float | None = _setting(
        None, number(0, low_open=True), "MS", "slo: time to first token at p99; default: 3 times one without training."
    )
    slo_tpot_ms: float | None = _setting(
        None,
        number(0, low_open=True),
        "MS",
        "slo: time per output token at p99; default: 3 times one without training.",
    )
    train_share_min: float = _setting(
        0.05, number(0, 1), "FRACTION", "slo: part of the time that a job gets whatever the load."
    )
    train_share_max: float = _setting(1.0, number(0, 1), "FRACTION", "Part of the time that jobs never exceed.")
    no_training_overlap: bool = _setting(
        False, switch, "", "slo on CUDA: train between the steps of requests, not beside them."
    )
    max_num_seqs: int | None = _setting(
        None, whole(1), "N", "Most requests that run at once; default: 64 on the CPU, by memory on CUDA."
    )
    max_num_batched_tokens: int | None = _setting(
        None, whole(1), "TOKENS", "Most tokens of one engine step; default: chosen by device."
    )


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side and the life of the processes."""

    host: str = _setting("127.0.0.1", text, "ADDRESS", "Address to listen on; others than loopback need --api-key.")
    port: int = _setting(8000, whole(1, 65535), "PORT", "TCP port to listen on.")
    api_key: tuple[str, ...] = _setting(
        (), names, "KEY", "Key that clients must send; may be repeated. Prefer FINEINFER_API_KEY."
    )
    admin_api_key: tuple[str, ...] = _setting(
        (),
        names,
        "KEY",
        "Key that loading, unloading and rolling back adapters and the memory budget need; default: any.",
    )
    api_server_count: int = _setting(1, whole(1, 64), "N", "Number of API worker processes.")
    state_dir: Path = _setting(
        Path("~/.fineinfer"), file_path, "DIR", "Where jobs, files and adapters are kept; default: ~/.fineinfer."
    )
    max_file_size: int = _setting(2 << 30, size, "SIZE", "Largest file that may be uploaded (default: 2GiB).")
    files_quota: int = _setting(20 << 30, size, "SIZE", "Most bytes of uploaded files kept at a time (default: 20GiB).")
    shutdown_timeout: float = _setting(
        30.0, number(0), "SECONDS", "Time that running requests get to finish after the first Ctrl-C."
    )
    allow_outbound: bool = _setting(
        False, switch, "", "Let the trackers of jobs (wandb, mlflow, trackio) send; otherwise they write files."
    )
    metrics_prefix: str = _setting(
        "fineinfer:", metrics_prefix, "PREFIX", "Prefix of metric names; vllm: fits vLLM's dashboards."
    )
    log_level: str = _setting(
        "info", one_of("debug", "info", "warning", "error"), "LEVEL", "debug | info | warning | error."
    )


@dataclass(frozen=True)
class TrainConfig:
    """The adapter that is trained from the start; None means ``auto``, resolved from the data at job creation."""

    lora_train: Path | None = _setting(None, file_path, "FILE", "Chat JSONL to train an adapter on beside serving.")
    validation_file: Path | None = _setting(
        None, file_path, "FILE", "Rows to evaluate that adapter on while it trains."
    )
    lora_train_name: str = _setting("my-lora", text, "NAME", "Name under which that adapter is served.")
    lora_r: int | None = _setting(None, whole(1, 512), "N", "Adapter rank (default 16).")
    lora_alpha: float | None = _setting(None, number(0, low_open=True), "X", "Adapter alpha (default 2 x rank).")
    lora_target_modules: tuple[str, ...] | None = _setting(
        None, names, "NAMES", "Layers to adapt, such as q_proj,v_proj (default: all linear layers)."
    )
    lora_dropout: float | None = _setting(None, number(0, 1), "P", "Dropout of what the adapter reads (default 0).")
    lora_rslora: bool = _setting(False, switch, "", "Scale the adapter by alpha / sqrt(rank), not alpha / rank.")
    lora_rank_pattern: dict[str, float] | None = _setting(None, numbers, "PAIRS", "Other ranks, as down_proj=32.")
    lora_alpha_pattern: dict[str, float] | None = _setting(None, numbers, "PAIRS", "Other alphas, as down_proj=64.")
    epochs: int | None = _setting(None, whole(1), "N", "Passes over the data (default 3).")
    batch_size: int | None = _setting(None, whole(1), "N", "Examples of one optimizer update.")
    gradient_accumulation_steps: int | None = _setting(None, whole(1), "N", "Micro-batches of one optimizer update.")
    max_seq_length: int | None = _setting(None, whole(1), "TOKENS", "Longest example (default 2048).")
    data_format: str | None = _setting(
        None, text, "NAME", "Format of the training file (default: found from its rows)."
    )
    train_on: str | None = _setting(None, one_of("assistant", "last_assistant", "completion", "all"), "PARTS",
        "assistant | last_assistant | completion | all: which tokens carry loss.")  # fmt: skip
    excess_length_strategy: str | None = _setting(
        None, one_of("raise", "drop", "truncate"), "NAME", "raise | drop | truncate: examples that are too long."
    )
    skip_invalid: bool = _setting(False, switch, "", "Leave bad rows out instead of refusing the file.")
    save_steps: int | None = _setting(None, whole(1), "N", "Updates between checkpoints (default: each epoch).")
    validation_split: float | None = _setting(None, number(0, 0.5), "FRACTION", "Part of the rows kept for evaluation.")
    eval_steps: int | None = _setting(None, whole(1), "N", "Updates between evaluations (default: each epoch).")
    early_stopping_patience: int | None = _setting(
        None, whole(1), "N", "End after N evaluations without a better loss."
    )
    early_stopping_min_delta: float | None = _setting(None, number(0), "X", "How much better that must be (default 0).")
    early_stopping_warmup_evals: int | None = _setting(
        None, whole(0), "N", "Evaluations that do not count (default 1)."
    )
    load_best_model_at_end: bool = _setting(False, switch, "", "Serve the version with the lowest evaluation loss.")
    from_checkpoint: str | None = _setting(None, text, "NAME", "Start from this adapter or NAME@STEP, not from zero.")
    serve_while_training: str | None = _setting(None, one_of("off", "checkpoint", "live"), "WHAT",
        "off | checkpoint | live: what is served before the end (default checkpoint).")  # fmt: skip
    publish: str | None = _setting(None, one_of("always", "if_better"), "WHEN",
        "always | if_better: whether a version is only served if it evaluates better.")  # fmt: skip
    recompute: str | None = _setting(
        None,
        one_of("auto", "never", "always"),
        "MODE",
        "auto | never | always: recompute layers in backward.",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of the adapter that is trained from the start; None means ``auto``."""

    learning_rate: float | None = _setting(None, number(0, low_open=True), "LR", "Peak learning rate (default 2e-4).")
    lr_scheduler: str | None = _setting(
        None, one_of("cosine", "linear", "constant"), "NAME", "cosine | linear | constant (default cosine)."
    )
    learning_rate_multiplier: float | None = _setting(None, number(0, low_open=True), "X", "Times the default rate.")
    min_lr_ratio: float | None = _setting(
        None, number(0, 1), "FRACTION", "Where the rate ends, of the peak (default 0)."
    )
    warmup_ratio: float | None = _setting(None, number(0, 1), "FRACTION", "Part of the updates that warm up (0.03).")
    weight_decay: float | None = _setting(None, number(0), "X", "Decoupled weight decay (default 0).")
    max_grad_norm: float | None = _setting(None, number(0, low_open=True), "X", "Clip the gradient here (default 1).")


@dataclass(frozen=True)
class Config:
    """Everything `fineinfer serve` was told, resolved; each group says what its fields mean."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    adapters: AdapterConfig = AdapterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    def hyperparameters(self) -> dict[str, Any]:
        """The ``method.supervised.hyperparameters`` of the ``--lora-train`` job: what was set, under REST names.

        And ``validation_file``, a path.
        """
        flat = dataclasses.asdict(self.train) | dataclasses.asdict(self.optimizer)
        for name in ("lora_train", "lora_train_name"):
            del flat[name]
        values: dict[str, Any] = {}
        for key, given in flat.items():
            if given is None or given is False:
                continue
            value = list(given) if isinstance(given, tuple) else given
            part = next((part for part in ("lora", "early_stopping") if key.startswith(part + "_")), None)
            if part is not None:
                values.setdefault(part, {})[key.removeprefix(part + "_")] = value
            else:
                values[{"epochs": "n_epochs", "data_format": "format"}.get(key, key)] = value
        return values


_GROUPS: dict[str, type] = {group.name: type(group.default) for group in dataclasses.fields(Config)}


@dataclass(frozen=True)
class Setting:
    """One setting as the command line sees it."""

    name: str
    metavar: str
    help: str
    default: Any
    parse: Callable[[object], Any]
    group: str

    @property
    def flag(self) -> str:
        """Its flag, such as ``--max-model-len``."""
        return "--" + self.name.replace("_", "-")


SETTINGS: dict[str, Setting] = {
    item.name: Setting(
        item.name, item.metadata["metavar"], item.metadata["help"], item.default, item.metadata["parse"], group
    )
    for group, cls in _GROUPS.items()
    for item in dataclasses.fields(cls)
}


# ---------------------------------------------------------------- loading


def load_config(
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> Config:
    """Merge the three sources and check the result.

    Args:
        flags: Setting name -> value as typed by the user; None values count as not given. Strongest.
        env: The environment; ``FINEINFER_PORT=9000`` sets ``port``. Weakest.
        config_file: YAML file with setting names (``max-model-len`` or ``max_model_len``) as keys.

    Raises:
        ConfigError: Unknown key, bad value, missing file, or an open address without an API key.
    """
    values: dict[str, Any] = {}
    for name, raw in (env or {}).items():
        setting = SETTINGS.get(name.removeprefix(ENV_PREFIX).lower()) if name.startswith(ENV_PREFIX) else None
        if setting is not None and raw != "":
            values[setting.name] = _parse(setting, raw, name)
    if config_file is not None:
        values |= _read_yaml(Path(config_file))
    for name, raw in (flags or {}).items():
        if raw is not None:
            setting = _lookup(name, "flag")
            values[name] = _parse(setting, raw, setting.flag if name != "model" else "MODEL")
    values["state_dir"] = file_path(values.get("state_dir", SETTINGS["state_dir"].default))
    groups = {
        group: cls(**{name: value for name, value in values.items() if SETTINGS[name].group == group})
        for group, cls in _GROUPS.items()
    }
    config = Config(**groups)
    _check(config)
    return config


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(config: Config) -> None:
    if not is_loopback(config.server.host) and not config.server.api_key:
        raise ConfigError(
            f"--host {config.server.host} is reachable from other machines: set --api-key or FINEINFER_API_KEY, "
            "or listen on 127.0.0.1"
        )
    shares = config.scheduler
    if shares.train_share_min > shares.train_share_max:
        raise ConfigError(
            f"--train-share-min {shares.train_share_min} is above --train-share-max {shares.train_share_max}"
        )
    slots = config.memory
    if slots.max_cpu_loras is not None and slots.max_cpu_loras < slots.max_loras:
        raise ConfigError(f"--max-cpu-loras {slots.max_cpu_loras} is below --max-loras {slots.max_loras}")
    if config.train.lora_train is None:
        return
    for flag, path in (("--lora-train", config.train.lora_train), ("--validation-file", config.train.validation_file)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{flag}: no such file: {path}")
    if config.train.lora_r is not None and config.train.lora_r > config.memory.max_lora_rank:
        raise ConfigError(
            f"--lora-r {config.train.lora_r} is above --max-lora-rank {config.memory.max_lora_rank}: "
            "the adapter could not be served"
        )


def _lookup(name: str, kind: str) -> Setting:
    setting = SETTINGS.get(name.replace("-", "_"))
    if setting is None:
        known = [key.replace("_", "-") if "-" in name else key for key in SETTINGS]  # in the user's spelling
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(f"unknown {kind} '{name}'" + (f" (did you mean '{close[0]}'?)" if close else ""))
    return setting


def _parse(setting: Setting, raw: object, source: str) -> Any:
    try:
        return setting.parse(raw)
    except (ValueError, OverflowError) as error:
        shown = "***" if setting.name.endswith("api_key") else repr(raw)
        raise ConfigError(f"{source}: {error}, got {shown}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # 20 ms that `--help` does not need

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    values = {}
    for key, raw in document.items():
        try:
            setting = _lookup(str(key), "key")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        if raw is not None:
            values[setting.name] = _parse(setting, raw, f"{path}: {key}")
    return values
