"""What a fine-tuning request may ask for: OpenAI's body plus the extended hyperparameters, checked and resolved."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fineinfer.data.formats import FORMATS
from fineinfer.data.masking import TRAIN_ON
from fineinfer.data.prepare import DataSettings
from fineinfer.messages import LoraSpec, TrainingSettings
from fineinfer.request import InvalidRequestError

MAX_AUTO_STEPS = 10_000  # `n_epochs: auto` never asks for more updates than this
MIN_AUTO_BATCH = 4  # below, an update of short chats is too few rows for a GEMM and pays the optimizer too often
SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TARGET_MODULES = LoraSpec().target_modules


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


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request; ``hyperparameters`` holds what the user set, ``auto`` still unresolved."""

    model: str
    training_file: str
    suffix: str | None = None
    seed: int = 42
    metadata: dict[str, str] | None = None
    hyperparameters: dict[str, Any] = {}
    serve: str = "checkpoint"
    publish: str = "always"
    priority: int = 0
    max_share: float = 1.0
    validation_file: str | None = None
    init_from: str | None = None


@dataclass(frozen=True)
class _Number:
    """A numeric hyperparameter and its range."""

    integer: bool
    low: float
    high: float
    low_open: bool = False

    def parse(self, value: object, param: str) -> int | float:
        kinds = (int,) if self.integer else (int, float)
        kind = "a whole number" if self.integer else "a number"
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise InvalidRequestError(f'{param} must be {kind} or "auto", not {_show(value)}.', param)
        if not self.low <= value <= self.high or (self.low_open and value == self.low):
            low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
            raise InvalidRequestError(f"{param} must be {low} and at most {self.high:g}, not {_show(value)}.", param)
        return value if self.integer else float(value)


NUMBERS: dict[str, _Number] = {
    "n_epochs": _Number(True, 1, 1000),
    "batch_size": _Number(True, 1, 4096),
    "learning_rate_multiplier": _Number(False, 0, 1000, low_open=True),
    "learning_rate": _Number(False, 0, 1, low_open=True),
    "warmup_ratio": _Number(False, 0, 1),
    "weight_decay": _Number(False, 0, 10),
    "max_grad_norm": _Number(False, 0, 1e6, low_open=True),
    "gradient_accumulation_steps": _Number(True, 1, 4096),
    "max_seq_length": _Number(True, 8, 1 << 20),
    "save_steps": _Number(True, 1, 1 << 30),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "lr_scheduler": ("cosine", "linear", "constant"),
    "recompute": ("auto", "never", "always"),
    "format": tuple(FORMATS),
    "train_on": TRAIN_ON,
    "excess_length_strategy": ("raise", "drop", "truncate"),
}
_DATA_KEYS = ("format", "train_on", "excess_length_strategy", "skip_invalid")  # for the data child, not the trainer
_HYPERPARAMETERS = (*NUMBERS, *CHOICES, "lora", "skip_invalid", "packing")
_LORA_KEYS = ("r", "alpha", "target_modules", "rslora", "dropout", "dora", "init")
_TOP_LEVEL = ("model", "training_file", "validation_file", "suffix", "seed", "metadata", "integrations", "method",
              "hyperparameters")  # fmt: skip
# Known elsewhere and not here: the reason is the answer. `None` and `false` count as not asked for.
_UNSUPPORTED: dict[str, str] = {
    "eval_steps": "there is no validation during training yet",
    "save_total_limit": "the two newest checkpoints are kept",
    "early_stopping": "there is no validation during training yet",
    "from_checkpoint": "a job starts from the base model",
    "priority": "jobs run in the order of their creation",
    "max_gpu_share": "the scheduling policy decides how training shares the engine",
}


def parse_job_request(body: object, limits: Limits) -> JobRequest:
    """Check the body of ``POST /v1/fine_tuning/jobs``.

    Hyperparameters may stand in ``method.supervised.hyperparameters``, in the older ``hyperparameters`` or flat at
    the top level; the first of these that names a key wins.

    Raises:
        InvalidRequestError: With the offending field as ``param``.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    _check_known(body, (*_TOP_LEVEL, *_HYPERPARAMETERS, "serve_while_training"), "")
    model = _string(body, "model", required=True)
    if model != limits.base_model:
        message = f"Fine-tuning starts from the served base model '{limits.base_model}', not '{model}'."
        raise InvalidRequestError(message, "model", "model_not_found")
    _refuse_unsupported_parts(body)
    flat = {key: value for key, value in body.items() if key in _HYPERPARAMETERS}
    older = _object(body.get("hyperparameters"), "hyperparameters")
    nested = _method_hyperparameters(body.get("method"))
    merged: dict[str, Any] = {}
    for source, prefix in ((flat, ""), (older, "hyperparameters."), (nested, _NESTED)):
        merged.update(parse_hyperparameters(source, limits, prefix))
    return JobRequest(
        model=str(model),
        training_file=str(_string(body, "training_file", required=True)),
        suffix=parse_suffix(_string(body, "suffix"), limits.base_model),
        seed=_seed(body.get("seed")),
        metadata=_metadata(body.get("metadata")),
        hyperparameters=merged,
    )


def parse_suffix(suffix: str | None, base_model: str, param: str = "suffix") -> str | None:
    """Check a name for the adapter; it may not be the base model's, hold ``@`` or look like a path."""
    if suffix is None:
        return None
    if not SUFFIX.fullmatch(suffix):
        raise InvalidRequestError(
            f"{param} may have 1 to 64 letters, digits, '.', '_' and '-' and must begin with a letter or digit.", param
        )
    if suffix == base_model:
        raise InvalidRequestError(f"{param} '{suffix}' is the name of the base model.", param)
    return suffix


def parse_hyperparameters(values: Mapping[str, Any], limits: Limits, prefix: str = "") -> dict[str, Any]:
    """Check one set of hyperparameters; ``auto`` and null entries are left out.

    Args:
        values: As in ``method.supervised.hyperparameters``.
        limits: What this server can train.
        prefix: Where the values stood, for error messages; ends with a dot.

    Raises:
        InvalidRequestError: A key is unknown or unsupported, or a value is out of range.
    """
    _check_known(values, _HYPERPARAMETERS, prefix)
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        param = prefix + key
        if value is None or value == "auto":
            continue
        if key in NUMBERS:
            parsed[key] = NUMBERS[key].parse(value, param)
        elif key in CHOICES:
            if value not in CHOICES[key]:
                raise InvalidRequestError(
                    f"{param} must be one of {', '.join(CHOICES[key])}, not {_show(value)}.", param
                )
            parsed[key] = value
        elif key == "lora":
            parsed[key] = _lora(_object(value, param), limits, param + ".")
        elif key == "skip_invalid":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{param} must be true or false, not {_show(value)}.", param)
            parsed[key] = value
        elif key == "packing" and value is not True:
            raise _unsupported(param, f"{param} can only be true: rows are always packed, with boundaries kept.")
    longest = limits.max_model_len
    if longest is not None and parsed.get("max_seq_length", 0) > longest:
        raise InvalidRequestError(
            f"{prefix}max_seq_length is above the model's context of {longest} tokens.", prefix + "max_seq_length"
        )
    return parsed


def data_settings(request: JobRequest) -> DataSettings:
    """How the job's file is to be read."""
    return msgspec.convert({key: v for key, v in request.hyperparameters.items() if key in _DATA_KEYS}, DataSettings)


def resolve_settings(request: JobRequest, num_examples: int, defaults: TrainingSettings) -> TrainingSettings:
    """Turn every ``auto`` into a number.

    The rules: rank 16, alpha twice the rank, all linear layers; batch 0.2 % of the examples within MIN_AUTO_BATCH
    to 64; 3 epochs, fewer when that is more than MAX_AUTO_STEPS updates; learning rate ``defaults.learning_rate`` times
    ``learning_rate_multiplier``; sequences up to ``defaults.max_seq_length``.
    """
    values = {key: value for key, value in request.hyperparameters.items() if key not in _DATA_KEYS}
    lora = values.pop("lora", {})
    r = lora.get("r", defaults.lora.r)
    multiplier = values.pop("learning_rate_multiplier", 1.0)
    values.setdefault("learning_rate", defaults.learning_rate * multiplier)
    batch_size = values.setdefault(
        "batch_size", min(num_examples, max(MIN_AUTO_BATCH, min(64, round(0.002 * num_examples))))
    )
    steps_per_epoch = math.ceil(num_examples / batch_size)
    values.setdefault("n_epochs", max(1, min(3, MAX_AUTO_STEPS // max(1, steps_per_epoch))))
    spec = LoraSpec(
        r=r,
        lora_alpha=lora.get("alpha", 2.0 * r),
        target_modules=tuple(lora.get("target_modules", defaults.lora.target_modules)),
        use_rslora=lora.get("rslora", False),
    )
    return msgspec.structs.replace(defaults, **values, lora=spec, seed=request.seed)


def echo_hyperparameters(request: JobRequest, settings: TrainingSettings | None) -> dict[str, Any]:
    """The job object's ``hyperparameters``: what was asked for until the file is validated, then resolved values."""
    asked = request.hyperparameters
    shown: dict[str, Any] = {key: "auto" for key in ("n_epochs", "batch_size", "learning_rate_multiplier")}
    shown.update({key: value for key, value in asked.items() if key != "lora"})
    if settings is not None:
        shown.setdefault("learning_rate_multiplier", 1.0)
        if shown["learning_rate_multiplier"] == "auto":
            shown["learning_rate_multiplier"] = 1.0
        names = ("n_epochs", "batch_size", "learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay",
                 "max_grad_norm", "max_seq_length")  # fmt: skip
        shown.update({name: getattr(settings, name) for name in names})
        shown["gradient_accumulation_steps"] = settings.gradient_accumulation_steps or "auto"
        shown["save_steps"] = settings.save_steps or "auto"
    return shown


def echo_lora(request: JobRequest, settings: TrainingSettings | None) -> dict[str, Any]:
    """The job object's ``lora``."""
    if settings is None:
        return {key: request.hyperparameters.get("lora", {}).get(key, "auto") for key in _LORA_KEYS[:4]}
    spec = settings.lora
    return {
        "r": spec.r,
        "alpha": spec.lora_alpha,
        "target_modules": list(spec.target_modules),
        "rslora": spec.use_rslora,
        "dropout": 0.0,
    }


_NESTED = "method.supervised.hyperparameters."


def _lora(values: dict[str, Any], limits: Limits, prefix: str) -> dict[str, Any]:
    _check_known(values, _LORA_KEYS, prefix)
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        param = prefix + key
        if value is None or value == "auto":
            continue
        if key == "r":
            parsed[key] = _Number(True, 1, limits.max_lora_rank).parse(value, param)
        elif key == "alpha":
            parsed[key] = _Number(False, 0, 1e6, low_open=True).parse(value, param)
        elif key == "target_modules":
            parsed[key] = _targets(value, param)
        elif key == "rslora":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{param} must be true or false, not {_show(value)}.", param)
            parsed[key] = value
        elif key == "dropout" and value != 0:
            raise _unsupported(param, f"{param} must be 0: dropout is not supported, so that training is repeatable.")
        elif key == "dora" and value is not False:
            raise _unsupported(param, f"{param} is not supported: it slows serving down, and other engines refuse it.")
        elif key == "init" and value not in ("default", True):
            reason = "other initialisations change the base weights, which all adapters share"
            raise _unsupported(param, f"{param} {_show(value)} is not supported: {reason}.")
    return parsed


def _targets(value: object, param: str) -> list[str]:
    if value == "all-linear":
        return list(TARGET_MODULES)
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f'{param} must be "all-linear" or a list of module names.', param)
    for name in names:
        if name not in TARGET_MODULES:
            raise InvalidRequestError(f"{param}: {_unknown(name, TARGET_MODULES)}", param)
    return [name for name in TARGET_MODULES if name in names]


def _refuse_unsupported_parts(body: dict[str, Any]) -> None:
    if body.get("validation_file") is not None:
        raise _unsupported("validation_file", "validation_file is not supported yet: there is no validation run.")
    if body.get("integrations"):
        raise _unsupported("integrations", "integrations are not supported: the server contacts no other service.")
    serve = body.get("serve_while_training")
    if serve not in (None, "checkpoint"):
        message = f'serve_while_training {_show(serve)} is not supported: each checkpoint is served ("checkpoint").'
        raise _unsupported("serve_while_training", message)


def _method_hyperparameters(method: object) -> dict[str, Any]:
    values = _object(method, "method")
    kind = values.get("type", "supervised")
    if kind != "supervised":
        raise _unsupported("method.type", f'method.type {_show(kind)} is not supported; only "supervised" is.')
    _check_known(values, ("type", "supervised", "dpo", "reinforcement"), "method.")
    for other in ("dpo", "reinforcement"):
        if values.get(other) is not None:
            raise _unsupported(f"method.{other}", f"method.{other} is not supported; only supervised training is.")
    supervised = _object(values.get("supervised"), "method.supervised")
    _check_known(supervised, ("hyperparameters",), "method.supervised.")
    return _object(supervised.get("hyperparameters"), _NESTED[:-1])


def _check_known(values: Mapping[str, Any], known: Iterable[str], prefix: str) -> None:
    names = tuple(known)
    for key, value in values.items():
        if key in names:
            continue
        if key in _UNSUPPORTED:
            if value is None or value is False:
                continue
            raise _unsupported(prefix + key, f"{prefix}{key} is not supported: {_UNSUPPORTED[key]}.")
        raise InvalidRequestError(_unknown(prefix + key, [prefix + name for name in names]), prefix + key)


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}."
    return f"unknown field '{name}'; {hint}"


def _unsupported(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param, "unsupported_parameter")


def _object(value: object, param: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object, not {_show(value)}.", param)
    return value


def _string(body: Mapping[str, Any], key: str, *, required: bool = False) -> str | None:
    value = body.get(key)
    if value is None and not required:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{key} must be a non-empty string.", key)
    return value


def _seed(value: object) -> int:
    if value is None:
        return JobRequest(model="", training_file="").seed
    return int(_Number(True, 0, 2**31 - 1).parse(value, "seed"))


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    pairs = _object(value, "metadata")
    if len(pairs) > 16:
        raise InvalidRequestError("metadata may have at most 16 pairs.", "metadata")
    for key, text in pairs.items():
        if not isinstance(text, str) or len(text) > 512 or not 1 <= len(key) <= 64:
            raise InvalidRequestError(
                "metadata keys have 1 to 64 characters, values are strings of up to 512.", "metadata"
            )
    return pairs


def _show(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
