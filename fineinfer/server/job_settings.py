"""The hyperparameters of a fine-tuning request: which there are, their ranges, and why others are refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fineinfer.data.formats import FORMATS
from fineinfer.data.masking import TRAIN_ON
from fineinfer.messages import EarlyStopping, LoraSpec
from fineinfer.request import InvalidRequestError
from fineinfer.server.job_names import INITS, LORA_NAMES, OUR_NAMES, REFUSED

TARGET_MODULES = LoraSpec().target_modules
MAX_VALIDATION_SPLIT = 0.5
KEPT_CHECKPOINTS = 2
PRIORITIES = {"high": -10, "normal": 0, "low": 10}
MAX_PATTERNS = 512


@dataclass(frozen=True)
class Limits:
    """What this server can train.

    Attributes:
        base_model: Served name of the base model.
        max_lora_rank: Largest rank the engine serves.
        max_model_len: Longest sequence in tokens, or None while the engine has not started.
    """

    base_model: str
    max_lora_rank: int = 64
    max_model_len: int | None = None


@dataclass(frozen=True)
class Number:
    """A number and its range."""

    integer: bool
    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def parse(self, value: object, param: str) -> Any:
        """The value as int or float.

        Raises:
            InvalidRequestError: It is no such number.
        """
        kinds = (int,) if self.integer else (int, float)
        kind = "a whole number" if self.integer else "a number"
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise InvalidRequestError(f'{param} must be {kind} or "auto", not {show(value)}.', param)
        below = value < self.low or (self.low_open and value == self.low)
        above = value > self.high or (self.high_open and value == self.high)
        if below or above:
            low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
            high = f"below {self.high:g}" if self.high_open else f"at most {self.high:g}"
            raise InvalidRequestError(f"{param} must be {low} and {high}, not {show(value)}.", param)
        return value if self.integer else float(value)


NUMBERS: dict[str, Number] = {
    "n_epochs": Number(True, 1, 1000),
    "batch_size": Number(True, 1, 4096),
    "learning_rate_multiplier": Number(False, 0, 1000, low_open=True),
    "learning_rate": Number(False, 0, 1, low_open=True),
    "min_lr_ratio": Number(False, 0, 1),
    "warmup_ratio": Number(False, 0, 1),
    "weight_decay": Number(False, 0, 10),
    "max_grad_norm": Number(False, 0, 1e6, low_open=True),
    "gradient_accumulation_steps": Number(True, 1, 4096),
    "max_seq_length": Number(True, 8, 1 << 20),
    "save_steps": Number(True, 1, 1 << 30),
    "eval_steps": Number(True, 1, 1 << 30),
    "validation_split": Number(False, 0, MAX_VALIDATION_SPLIT),
    "max_gpu_share": Number(False, 0, 1, low_open=True),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "lr_scheduler": ("cosine", "linear", "constant"),
    "recompute": ("auto", "never", "always"),
    "format": tuple(FORMATS),
    "train_on": TRAIN_ON,
    "excess_length_strategy": ("raise", "drop", "truncate"),
    "serve_while_training": ("off", "checkpoint", "live"),
    "publish": ("always", "if_better"),
}
SWITCHES = ("skip_invalid", "load_best_model_at_end")
_OTHERS = ("lora", "early_stopping", "from_checkpoint", "priority", "packing", "save_total_limit")
HYPERPARAMETERS = (*NUMBERS, *CHOICES, *SWITCHES, *_OTHERS)
LORA_KEYS = ("r", "alpha", "dropout", "target_modules", "rslora", "rank_pattern", "alpha_pattern", "init")
EARLY_STOPPING: dict[str, Number] = {
    "patience": Number(True, 1, 1000),
    "min_delta": Number(False, 0, 1e6),
    "warmup_evals": Number(True, 0, 1000),
}
NEED_EVALUATION = ("eval_steps", "early_stopping", "load_best_model_at_end", "publish")


def parse_hyperparameters(values: Mapping[str, Any], limits: Limits, prefix: str = "") -> dict[str, Any]:
    """Check one set of hyperparameters; ``auto`` and null entries are left out.

    Args:
        values: As in ``method.supervised.hyperparameters``.
        limits: What this server can train.
        prefix: Where the values stood, for error messages; ends with a dot.

    Raises:
        InvalidRequestError: A key is unknown or unsupported, or a value is out of range.
    """
    check_known(values, HYPERPARAMETERS, prefix)
    parsed = {
        key: _value(key, value, limits, prefix + key)
        for key, value in values.items()
        if key in HYPERPARAMETERS and value is not None and value != "auto"
    }
    longest = limits.max_model_len
    if longest is not None and parsed.get("max_seq_length", 0) > longest:
        raise InvalidRequestError(
            f"{prefix}max_seq_length is above the model's context of {longest} tokens.", prefix + "max_seq_length"
        )
    return {key: value for key, value in parsed.items() if value is not None}


def _value(key: str, value: Any, limits: Limits, param: str) -> Any:
    """One checked value; None: as if it was not there."""
    if key in NUMBERS:
        return NUMBERS[key].parse(value, param)
    if key in CHOICES:
        return _choice(value, CHOICES[key], param)
    if key in SWITCHES:
        return _switch(value, param)
    if key == "lora":
        return _lora(as_object(value, param), limits, param + ".")
    parse: Callable[[Any, str], Any] = _PARSERS[key]
    return parse(value, param)


def _choice(value: Any, choices: tuple[str, ...], param: str) -> Any:
    if value not in choices:
        raise InvalidRequestError(f"{param} must be one of {', '.join(choices)}, not {show(value)}.", param)
    return value


def _switch(value: Any, param: str) -> Any:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{param} must be true or false, not {show(value)}.", param)
    return value


def _packing(value: Any, param: str) -> None:
    if value is not True:
        raise unsupported(param, f"{param} can only be true: rows are always packed, with boundaries kept.")


def _save_total_limit(value: Any, param: str) -> None:
    # what a checkpoint is good for needs exactly this: the newest, and the one before until that is verified
    if value is True or value != KEPT_CHECKPOINTS:
        reason = f"a job keeps its {KEPT_CHECKPOINTS} newest checkpoints to go on from; its published versions all stay"
        raise unsupported(param, f"{param} can only be {KEPT_CHECKPOINTS}: {reason}.")


def _priority(value: Any, param: str) -> Any:
    if isinstance(value, str):
        return PRIORITIES[_choice(value, tuple(PRIORITIES), param)]
    return Number(True, -100, 100).parse(value, param)


def _early_stopping(value: Any, param: str) -> Any:
    if value is False:  # kept: nested it wins over an object elsewhere
        return False
    given = {} if value is True else as_object(value, param)
    given = {key: item for key, item in given.items() if key != "enabled" or item is not True}
    check_known(given, EARLY_STOPPING, param + ".")
    checked = {
        key: EARLY_STOPPING[key].parse(item, f"{param}.{key}") for key, item in given.items() if item is not None
    }
    return {key: getattr(EarlyStopping(), key) for key in EARLY_STOPPING} | checked


def _from_checkpoint(value: Any, param: str) -> Any:
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        kinds = "the name of an adapter, name@step, or the id of a checkpoint or job"
        raise InvalidRequestError(f"{param} must be {kinds}, not {show(value)}.", param)
    return value


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "packing": _packing,
    "save_total_limit": _save_total_limit,
    "priority": _priority,
    "early_stopping": _early_stopping,
    "from_checkpoint": _from_checkpoint,
}


# ---------------------------------------------------------------- lora


def _lora(values: dict[str, Any], limits: Limits, prefix: str) -> dict[str, Any]:
    check_known(values, LORA_KEYS, prefix, LORA_NAMES)
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        param = prefix + key
        if value is None or value == "auto":
            continue
        if key == "r":
            parsed[key] = _rank(value, limits, param)
        elif key == "alpha":
            parsed[key] = _ALPHA.parse(value, param)
        elif key == "dropout":
            parsed[key] = Number(False, 0, 1, high_open=True).parse(value, param)
        elif key == "target_modules":
            parsed[key] = _targets(value, param)
        elif key == "rslora":
            parsed[key] = _switch(value, param)
        elif key in ("rank_pattern", "alpha_pattern"):
            parsed[key] = _pattern(value, limits, param)
        elif key == "init" and value not in ("default", True):
            reason = INITS.get(str(value).lower().split("_")[0], "adapters begin with PEFT's default, B = 0")
            raise unsupported(param, f"{param} {show(value)} is not supported: {reason}.")
    return parsed


_ALPHA = Number(False, 0, 1e6, low_open=True)


def _rank(value: Any, limits: Limits, param: str) -> Any:
    rank = Number(True, 1, 1 << 20).parse(value, param)
    if rank > limits.max_lora_rank:
        message = (
            f"{param} {rank} is above {limits.max_lora_rank}, the largest that this server serves (--max-lora-rank)."
        )
        raise InvalidRequestError(message, param)
    return rank


def _targets(value: object, param: str) -> list[str]:
    if value == "all-linear":
        return list(TARGET_MODULES)
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f'{param} must be "all-linear" or a list of module names.', param)
    for name in names:
        if name not in TARGET_MODULES:
            raise InvalidRequestError(f"{param}: {_unknown(name, TARGET_MODULES, 'module')}", param)
    return [name for name in TARGET_MODULES if name in names]


def _pattern(value: Any, limits: Limits, param: str) -> dict[str, Any]:
    """A module's name, or a path's end such as ``layers.3.mlp.down_proj`` -> rank or alpha; regexes are refused."""
    values = as_object(value, param)
    if len(values) > MAX_PATTERNS:
        raise InvalidRequestError(f"{param} may have at most {MAX_PATTERNS} entries.", param)
    for name in values:
        parts = name.split(".")
        if parts[-1] not in TARGET_MODULES or not all(part.isidentifier() or part.isdecimal() for part in parts):
            hint = (
                "a module name, or the end of its path such as layers.3.mlp.down_proj; regular expressions are not read"
            )
            raise InvalidRequestError(f"{param}: '{name[:80]}' is not {hint}.", param)
    if param.endswith("rank_pattern"):
        return {name: _rank(item, limits, f"{param}.{name}") for name, item in values.items()}
    return {name: _ALPHA.parse(item, f"{param}.{name}") for name, item in values.items()}


# ---------------------------------------------------------------- errors


def check_known(
    values: Mapping[str, Any], known: Iterable[str], prefix: str, other_names: Mapping[str, str] = OUR_NAMES
) -> None:
    """Refuse fields that there are not, with what may have been meant.

    Raises:
        InvalidRequestError: A field is unknown, or known elsewhere and not supported here.
    """
    names = tuple(known)
    for key, value in values.items():
        if key in names:
            continue
        if key in other_names:
            meant = other_names[key] if other_names is OUR_NAMES else prefix + other_names[key]
            raise InvalidRequestError(f"unknown field '{prefix}{key}'; did you mean '{meant}'?", prefix + key)
        if key in REFUSED:
            _refuse(key, value, prefix + key)
            continue
        raise InvalidRequestError(_unknown(prefix + key, [prefix + name for name in names]), prefix + key)


def _refuse(key: str, value: Any, param: str) -> None:
    harmless, reason = REFUSED[key]
    if value is not None and value not in harmless:
        raise unsupported(param, f"{param} {show(value)} is not supported: {reason}.")


def _unknown(name: str, known: Iterable[str], kind: str = "field") -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}."
    return f"unknown {kind} '{name}'; {hint}"


def unsupported(param: str, message: str) -> InvalidRequestError:
    """The error of something that exists elsewhere and not here."""
    return InvalidRequestError(message, param, "unsupported_parameter")


def as_object(value: object, param: str) -> dict[str, Any]:
    """The value as a JSON object; null is an empty one.

    Raises:
        InvalidRequestError: It is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object, not {show(value)}.", param)
    return value


def show(value: object) -> str:
    """A value as JSON for an error message, cut at 60 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
