"""What a fine-tuning request may ask for: OpenAI's body plus the extended hyperparameters, checked and resolved."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from fineinfer.data.prepare import DataSettings
from fineinfer.messages import EarlyStopping, LoraSpec, TrainingSettings
from fineinfer.request import InvalidRequestError
from fineinfer.server.job_integrations import parse_integrations
from fineinfer.server.job_settings import (
    HYPERPARAMETERS,
    NEED_EVALUATION,
    Limits,
    Number,
    as_object,
    check_known,
    parse_hyperparameters,
    show,
    unsupported,
)

__all__ = ["JobRequest", "Limits", "parse_hyperparameters", "parse_job_request"]

MAX_AUTO_STEPS = 10_000  # `n_epochs: auto` never asks for more updates than this
MIN_AUTO_BATCH = 4  # below, an update of short chats is too few rows for a GEMM and pays the optimizer too often
SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request; ``hyperparameters`` holds what the user set, ``auto`` still unresolved.

    Attributes:
        serve: off | checkpoint | live: what is served under the adapter's name while the job runs.
        publish: always | if_better: whether the name moves to a checkpoint that is not the best so far.
        priority: Lower is trained earlier.
        max_share: Of the engine's time, at most, while requests run.
        init_from: PEFT folder whose weights the job begins with.
        integrations: As OpenAI has them, checked.
    """

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
    integrations: list[dict[str, Any]] = []


_DATA_KEYS = ("format", "train_on", "excess_length_strategy", "skip_invalid")  # for the data child, not the trainer
# hyperparameters that are not the trainer's, by the field of JobRequest that carries each
_FIELDS = {
    "serve_while_training": "serve",
    "publish": "publish",
    "priority": "priority",
    "max_gpu_share": "max_share",
}
_TOP_LEVEL = ("model", "training_file", "validation_file", "suffix", "seed", "metadata", "integrations", "method",
              "hyperparameters")  # fmt: skip
_NESTED = "method.supervised.hyperparameters."


def parse_job_request(body: object, limits: Limits) -> JobRequest:
    """Check the body of ``POST /v1/fine_tuning/jobs``.

    Hyperparameters may stand in ``method.supervised.hyperparameters``, in the older ``hyperparameters`` or flat at
    the top level; the first of these that names a key wins.

    Raises:
        InvalidRequestError: With the offending field as ``param``.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    check_known(body, (*_TOP_LEVEL, *HYPERPARAMETERS), "")
    model = _string(body, "model", required=True)
    if model != limits.base_model:
        message = f"Fine-tuning starts from the served base model '{limits.base_model}', not '{model}'."
        if model and body.get("from_checkpoint") is None:
            message += " An adapter to go on from is named in from_checkpoint."
        raise InvalidRequestError(message, "model", "model_not_found")
    flat = {key: value for key, value in body.items() if key in HYPERPARAMETERS}
    older = as_object(body.get("hyperparameters"), "hyperparameters")
    nested = _method_hyperparameters(body.get("method"))
    merged: dict[str, Any] = {}
    places: dict[str, str] = {}
    for source, prefix in ((flat, ""), (older, "hyperparameters."), (nested, _NESTED)):
        found = parse_hyperparameters(source, limits, prefix)
        merged.update(found)
        places.update({key: prefix + key for key in found})
    request = make_request(
        merged,
        model=str(model),
        training_file=str(_string(body, "training_file", required=True)),
        validation_file=_string(body, "validation_file"),
        suffix=parse_suffix(_string(body, "suffix"), limits.base_model),
        seed=_seed(body.get("seed")),
        metadata=_metadata(body.get("metadata")),
        integrations=parse_integrations(body.get("integrations")),
    )
    check_together(request, places)
    return request


def make_request(hyperparameters: Mapping[str, Any], **fields: Any) -> JobRequest:
    """A request from checked hyperparameters and fields of ``JobRequest``."""
    moved = {field: hyperparameters[key] for key, field in _FIELDS.items() if key in hyperparameters}
    return JobRequest(hyperparameters=dict(hyperparameters), **moved, **fields)


def check_together(request: JobRequest, places: Mapping[str, str] | None = None) -> None:
    """Refuse settings that contradict each other or need something that is not there.

    Args:
        request: The request as a whole.
        places: Where each hyperparameter stood, for the error's ``param``; default: its name.

    Raises:
        InvalidRequestError: Naming one of the settings.
    """
    asked, places = request.hyperparameters, places or {}

    def refuse(key: str, message: str) -> None:
        raise InvalidRequestError(f"{places.get(key, key)} {message}", places.get(key, key))

    split = asked.get("validation_split", 0)
    if request.validation_file is not None and split:
        refuse("validation_split", "and validation_file are both given; which rows are to be evaluated?")
    if request.validation_file is None and not split:
        for key in NEED_EVALUATION:
            if asked.get(key, False) not in (False, "always"):
                refuse(key, "needs an evaluation set: give validation_file or validation_split.")
    if "learning_rate" in asked and asked.get("learning_rate_multiplier", 1.0) != 1.0:
        refuse("learning_rate_multiplier", "multiplies the automatic learning rate, and learning_rate is given too.")
    if asked.get("min_lr_ratio") and asked.get("lr_scheduler") == "constant":
        refuse("min_lr_ratio", "needs an lr_scheduler that falls, cosine or linear.")
    if asked.get("serve_while_training") == "live" and asked.get("publish") == "if_better":
        refuse("publish", "if_better cannot go with serve_while_training live: that serves every update.")


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


def data_settings(request: JobRequest) -> DataSettings:
    """How the job's files are to be read."""
    return msgspec.convert({key: v for key, v in request.hyperparameters.items() if key in _DATA_KEYS}, DataSettings)


def resolve_settings(request: JobRequest, num_examples: int, defaults: TrainingSettings) -> TrainingSettings:
    """Turn every ``auto`` into a number.

    The rules: rank 16, alpha twice the rank, all linear layers; batch 0.2 % of the examples within MIN_AUTO_BATCH
    to 64; 3 epochs, fewer when that is more than MAX_AUTO_STEPS updates; learning rate ``defaults.learning_rate`` times
    ``learning_rate_multiplier``; sequences up to ``defaults.max_seq_length``.
    """
    fields = set(TrainingSettings.__struct_fields__)
    values = {key: value for key, value in request.hyperparameters.items() if key in fields}
    lora = values.pop("lora", {})
    r = lora.get("r", defaults.lora.r)
    multiplier = request.hyperparameters.get("learning_rate_multiplier", 1.0)
    values.setdefault("learning_rate", defaults.learning_rate * multiplier)
    batch_size = values.setdefault(
        "batch_size", min(num_examples, max(MIN_AUTO_BATCH, min(64, round(0.002 * num_examples))))
    )
    steps_per_epoch = math.ceil(num_examples / batch_size)
    values.setdefault("n_epochs", max(1, min(3, MAX_AUTO_STEPS // max(1, steps_per_epoch))))
    stopping = values.pop("early_stopping", None)
    spec = LoraSpec(
        r=r,
        lora_alpha=lora.get("alpha", 2.0 * r),
        target_modules=tuple(lora.get("target_modules", defaults.lora.target_modules)),
        use_rslora=lora.get("rslora", False),
        lora_dropout=lora.get("dropout", 0.0),
        rank_pattern=lora.get("rank_pattern", {}),
        alpha_pattern=lora.get("alpha_pattern", {}),
    )
    return msgspec.structs.replace(
        defaults,
        **values,
        lora=spec,
        seed=request.seed,
        early_stopping=EarlyStopping(**stopping) if stopping else None,
    )


def echo_hyperparameters(
    request: JobRequest, settings: TrainingSettings | None, examples: int | None = None
) -> dict[str, Any]:
    """The job object's ``hyperparameters``: what was asked for until the file is validated, then resolved values.

    Args:
        request: What was asked for.
        settings: Resolved, once the file is validated.
        examples: Rows that are trained, then.
    """
    asked = request.hyperparameters
    shown: dict[str, Any] = {key: "auto" for key in ("n_epochs", "batch_size", "learning_rate_multiplier")}
    shown.update({key: value for key, value in asked.items() if key != "lora"})
    shown.update(
        serve_while_training=request.serve, publish=request.publish, priority=request.priority,
        max_gpu_share=request.max_share,
    )  # fmt: skip
    if settings is not None:
        if shown["learning_rate_multiplier"] == "auto":
            shown["learning_rate_multiplier"] = 1.0
        names = ("n_epochs", "batch_size", "learning_rate", "lr_scheduler", "min_lr_ratio", "warmup_ratio",
                 "weight_decay", "max_grad_norm", "max_seq_length")  # fmt: skip
        shown.update({name: getattr(settings, name) for name in names})
        shown["gradient_accumulation_steps"] = settings.gradient_accumulation_steps or "auto"
        an_epoch = "auto" if examples is None else math.ceil(examples / settings.batch_size)
        shown["save_steps"] = settings.save_steps or an_epoch
        if request.validation_file is not None or asked.get("validation_split"):
            shown["eval_steps"] = settings.eval_steps or an_epoch
            shown["load_best_model_at_end"] = settings.load_best_model_at_end
            shown.setdefault("early_stopping", False)
    return shown


def echo_lora(request: JobRequest, settings: TrainingSettings | None) -> dict[str, Any]:
    """The job object's ``lora``."""
    names = ("r", "alpha", "target_modules", "rslora", "dropout", "rank_pattern", "alpha_pattern")
    if settings is None:
        return {key: request.hyperparameters.get("lora", {}).get(key, "auto") for key in names}
    spec = settings.lora
    values = (spec.r, spec.lora_alpha, list(spec.target_modules), spec.use_rslora, spec.lora_dropout, spec.rank_pattern,
              spec.alpha_pattern)  # fmt: skip
    return dict(zip(names, values, strict=True))


def _method_hyperparameters(method: object) -> dict[str, Any]:
    values = as_object(method, "method")
    kind = values.get("type", "supervised")
    if kind != "supervised":
        raise unsupported("method.type", f'method.type {show(kind)} is not supported; only "supervised" is.')
    check_known(values, ("type", "supervised", "dpo", "reinforcement"), "method.")
    for other in ("dpo", "reinforcement"):
        if values.get(other) is not None:
            raise unsupported(f"method.{other}", f"method.{other} is not supported; only supervised training is.")
    supervised = as_object(values.get("supervised"), "method.supervised")
    check_known(supervised, ("hyperparameters",), "method.supervised.")
    return as_object(supervised.get("hyperparameters"), _NESTED[:-1])


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
    return int(Number(True, 0, 2**31 - 1).parse(value, "seed"))


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    pairs = as_object(value, "metadata")
    if len(pairs) > 16:
        raise InvalidRequestError("metadata may have at most 16 pairs.", "metadata")
    for key, text in pairs.items():
        if not isinstance(text, str) or len(text) > 512 or not 1 <= len(key) <= 64:
            raise InvalidRequestError(
                "metadata keys have 1 to 64 characters, values are strings of up to 512.", "metadata"
            )
    return pairs
