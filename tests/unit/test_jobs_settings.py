"""Hyperparameters of a job: what is taken, resolved and echoed, what is refused and why, and whose names get ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fineinfer.messages import EarlyStopping, LoraSpec, TrainingSettings
from fineinfer.request import InvalidRequestError
from fineinfer.server import job_integrations
from fineinfer.server.job_creation import add_file, check_references, create_job
from fineinfer.server.job_names import OUR_NAMES, REFUSED
from fineinfer.server.job_object import job_object
from fineinfer.server.job_params import JobRequest, Limits, parse_job_request, resolve_settings
from fineinfer.server.job_settings import HYPERPARAMETERS, LORA_KEYS
from fineinfer.store import CheckpointRecord, JobStatus, Store, new_id, now

LIMITS = Limits("base", max_lora_rank=64, max_model_len=2048)
BODY = {"model": "base", "training_file": "file-1"}
EVALUATED = {"validation_file": "file-2"}


def parse(**fields: Any) -> JobRequest:
    return parse_job_request({**BODY, **fields}, LIMITS)


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**fields)
    return caught.value


def resolve(**fields: Any) -> TrainingSettings:
    return resolve_settings(parse(**fields), 100, TrainingSettings())


# ---------------------------------------------------------------- what is taken


def test_the_extended_set_reaches_the_trainer() -> None:
    settings = resolve(
        **EVALUATED, min_lr_ratio=0.1, eval_steps=5, load_best_model_at_end=True, lr_scheduler="linear", seed=9,
        early_stopping={"patience": 4, "min_delta": 0.01},
        lora={"r": 8, "dropout": 0.05, "rslora": True, "rank_pattern": {"down_proj": 32, "layers.3.mlp.up_proj": 4},
              "alpha_pattern": {"q_proj": 16}},
    )  # fmt: skip
    assert settings.lora == LoraSpec(
        r=8, lora_alpha=16.0, use_rslora=True, lora_dropout=0.05, alpha_pattern={"q_proj": 16.0},
        rank_pattern={"down_proj": 32, "layers.3.mlp.up_proj": 4},
    )  # fmt: skip
    assert settings.early_stopping == EarlyStopping(patience=4, min_delta=0.01, warmup_evals=1)
    assert (settings.min_lr_ratio, settings.eval_steps, settings.load_best_model_at_end) == (0.1, 5, True)
    assert (settings.lr_scheduler, settings.seed) == ("linear", 9)
    # what goes over the wire and into the store comes back the same
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(settings))), TrainingSettings) == settings


def test_what_is_not_the_trainers_has_fields_of_its_own() -> None:
    request = parse(**EVALUATED, serve_while_training="off", publish="if_better", priority="high", max_gpu_share=0.25)
    assert (request.serve, request.publish, request.priority, request.max_share) == ("off", "if_better", -10, 0.25)
    assert request.validation_file == "file-2" and request.init_from is None
    plain = parse()
    assert (plain.serve, plain.publish, plain.priority, plain.max_share) == ("checkpoint", "always", 0, 1.0)
    assert resolve_settings(plain, 100, TrainingSettings()).early_stopping is None


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (True, EarlyStopping()),
        (False, None),
        ({}, EarlyStopping()),
        ({"enabled": True, "patience": 1, "warmup_evals": 0}, EarlyStopping(patience=1, warmup_evals=0)),
        (None, None),
        ("auto", None),
    ],
)
def test_early_stopping_is_a_switch_or_an_object(given_value: Any, expected: EarlyStopping | None) -> None:
    assert resolve(**EVALUATED, early_stopping=given_value).early_stopping == expected


def test_nested_wins_even_when_it_says_no() -> None:
    nested = {"type": "supervised", "supervised": {"hyperparameters": {"early_stopping": False, "priority": 3}}}
    request = parse(**EVALUATED, early_stopping=True, priority="low", method=nested)
    assert resolve_settings(request, 10, TrainingSettings()).early_stopping is None and request.priority == 3


@pytest.mark.parametrize("value", [2, 2.0, None])
def test_two_checkpoints_are_what_there_is(value: Any) -> None:
    assert "save_total_limit" not in parse(save_total_limit=value).hyperparameters


NO_SET = "needs an evaluation set: give validation_file or validation_split"
REFUSED_SETTINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"eval_steps": 5}, "eval_steps", NO_SET),
    ({"early_stopping": True}, "early_stopping", NO_SET),
    ({"early_stopping": {"patience": 2}, "validation_split": 0}, "early_stopping", NO_SET),
    ({"load_best_model_at_end": True}, "load_best_model_at_end", NO_SET),
    ({"hyperparameters": {"publish": "if_better"}}, "hyperparameters.publish", NO_SET),
    ({**EVALUATED, "validation_split": 0.1}, "validation_split", "both given"),
    ({**EVALUATED, "publish": "if_better", "serve_while_training": "live"}, "publish", "live"),
    ({"learning_rate": 1e-4, "learning_rate_multiplier": 2}, "learning_rate_multiplier", "learning_rate is given too"),
    ({"validation_split": 0.6}, "validation_split", "at most 0.5"),
    ({"validation_split": -0.1}, "validation_split", "at least 0"),
    ({"validation_file": 3}, "validation_file", "non-empty string"),
    ({**EVALUATED, "early_stopping": {"patience": 0}}, "early_stopping.patience", "at least 1"),
    ({**EVALUATED, "early_stopping": {"patiance": 1}}, "early_stopping.patiance", "'early_stopping.patience'"),
    ({**EVALUATED, "early_stopping": 3}, "early_stopping", "must be an object"),
    ({"min_lr_ratio": 1.5}, "min_lr_ratio", "at most 1"),
    ({"min_lr_ratio": 0.1, "lr_scheduler": "constant"}, "min_lr_ratio", "cosine or linear"),
    ({"eval_steps": 0}, "eval_steps", "at least 1"),
    ({"load_best_model_at_end": "yes"}, "load_best_model_at_end", "true or false"),
    ({"serve_while_training": "always"}, "serve_while_training", "off, checkpoint, live"),
    ({"publish": "never"}, "publish", "always, if_better"),
    ({"priority": 101}, "priority", "at most 100"),
    ({"priority": "urgent"}, "priority", "high, normal, low"),
    ({"max_gpu_share": 0}, "max_gpu_share", "above 0"),
    ({"max_gpu_share": 1.1}, "max_gpu_share", "at most 1"),
    ({"from_checkpoint": 7}, "from_checkpoint", "name of an adapter"),
    ({"save_total_limit": 3}, "save_total_limit", "keeps its 2 newest"),
    ({"save_total_limit": True}, "save_total_limit", "keeps its 2 newest"),
    ({"packing": False}, "packing", "always packed"),
    ({"lora": {"dropout": 1}}, "lora.dropout", "below 1"),
    ({"lora": {"dropout": -0.1}}, "lora.dropout", "at least 0"),
    ({"lora": {"r": 65}}, "lora.r", "--max-lora-rank"),
    ({"lora": {"rank_pattern": {"q_proj": 65}}}, "lora.rank_pattern.q_proj", "--max-lora-rank"),
    ({"lora": {"rank_pattern": {"q_proj": 0}}}, "lora.rank_pattern.q_proj", "at least 1"),
    ({"lora": {"rank_pattern": {".*q_proj": 8}}}, "lora.rank_pattern", "regular expressions"),
    ({"lora": {"rank_pattern": {"lm_head": 8}}}, "lora.rank_pattern", "'lm_head' is not a module name"),
    ({"lora": {"rank_pattern": [8]}}, "lora.rank_pattern", "must be an object"),
    ({"lora": {"alpha_pattern": {"q_proj": 0}}}, "lora.alpha_pattern.q_proj", "above 0"),
    ({"lora": {"init": "pissa"}}, "lora.init", "changes the base weights"),
    ({"lora": {"init": "pissa_niter_16"}}, "lora.init", "changes the base weights"),
    ({"lora": {"init": "olora"}}, "lora.init", "changes the base weights"),
    ({"lora": {"init": "corda"}}, "lora.init", "changes the base weights"),
    ({"lora": {"init": "loftq"}}, "lora.init", "changes the base weights"),
    ({"lora": {"init": "eva"}}, "lora.init", "pass over the data"),
    ({"lora": {"init": "gaussian"}}, "lora.init", "PEFT's default"),
    ({"lora": {"init": False}}, "lora.init", "PEFT's default"),
    ({"lora": {"dora": True}}, "lora.dora", "slows serving"),
    ({"lora": {"bias": "all"}}, "lora.bias", "biases belong to the base model"),
    ({"lora": {"lora_bias": True}}, "lora.lora_bias", "stock servers"),
    ({"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save", "whole layers"),
    ({"lora": {"layer_replication": [[0, 2]]}}, "lora.layer_replication", "shared"),
    ({"lora": {"trainable_token_indices": [1]}}, "lora.trainable_token_indices", "embeddings"),
    ({"lora": {"layers_to_transform": [1]}}, "lora.layers_to_transform", "every layer"),
    ({"load_in_4bit": True}, "load_in_4bit", "not quantised"),
    ({"quantization": "nf4"}, "quantization", "not quantised"),
    ({"adapter": "qlora"}, "adapter", "QLoRA"),
    ({"finetuning_type": "full"}, "finetuning_type", "train adapters"),
    ({"optimizer": "lion"}, "optimizer", "AdamW"),
    ({"max_steps": 100}, "max_steps", "n_epochs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED_SETTINGS, ids=lambda value: str(value)[:40])
def test_what_is_refused_names_the_field_and_the_reason(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param and words in error.message and param.split(".")[-1] in error.message, error.message


def test_every_refusal_has_values_that_ask_for_nothing() -> None:
    for key, (harmless, reason) in REFUSED.items():
        for value in (None, *harmless):
            assert parse(**{key: value}) == parse() and parse(lora={key: value}).hyperparameters == {"lora": {}}
        error = refusal(**{key: "something else"})
        assert error.param == key and error.code == "unsupported_parameter" and reason in error.message


@pytest.mark.parametrize("theirs", sorted(OUR_NAMES))
def test_names_of_other_tools_are_answered_with_ours(theirs: str) -> None:
    ours = OUR_NAMES[theirs]
    assert f"did you mean '{ours}'" in refusal(**{theirs: 1}).message
    top = {*HYPERPARAMETERS, "seed", "model", "training_file", "validation_file", "suffix", "integrations"}
    place, _, leaf = ours.partition(".")
    assert place in top and theirs not in HYPERPARAMETERS
    assert not leaf or leaf in {"lora": LORA_KEYS, "early_stopping": ("patience", "min_delta", "warmup_evals")}[place]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("lora_alpha", "lora.alpha"), ("rank", "lora.r"), ("init_lora_weights", "lora.init"),
     ("targt_modules", "lora.target_modules")],
)  # fmt: skip
def test_pefts_names_inside_lora_too(theirs: str, ours: str) -> None:
    assert f"did you mean '{ours}'" in refusal(lora={theirs: 1}).message


TEXT = st.text("ab.é_", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([*HYPERPARAMETERS, "integrations", "metadata", "method", "seed", *list(OUR_NAMES)[:5]])
LORA = st.dictionaries(st.sampled_from(LORA_KEYS), JSON, max_size=3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(NAMES, JSON, max_size=4), lora=LORA)
def test_any_body_is_taken_or_refused_by_name(fields: dict[str, Any], lora: dict[str, Any]) -> None:
    body = {**BODY, "validation_file": "f", **fields, "lora": lora}
    try:
        request = parse_job_request(body, LIMITS)
    except InvalidRequestError as error:
        assert error.param and error.param.split(".")[0].split("[")[0] in body
    else:
        resolved = resolve_settings(request, 20, TrainingSettings())
        assert msgspec.convert(msgspec.to_builtins(resolved), TrainingSettings) == resolved


# ---------------------------------------------------------------- echo


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def make_job(store: Store, **fields: Any) -> dict[str, Any]:
    """The job object after validation of 100 rows."""
    path = store.state_dir / "rows"
    path.write_text("{}\n")
    files = {name: add_file(store, path, "x", "fine-tune").id for name in ("training_file", "validation_file")}
    if fields.pop("unevaluated", False):
        del files["validation_file"]
    request = check_references(store, parse(**{**files, **fields}), LIMITS)
    job = create_job(store, request)
    settings = resolve_settings(request, 100, TrainingSettings())
    dataset = {"sha256": "d", "examples": 100, "format": "openai_chat", "tokens": 9, "trainable_tokens": 5,
               "eval": {"sha256": "e", "examples": 7, "tokens": 3, "trainable_tokens": 2}}  # fmt: skip
    job = store.jobs.transition(job, JobStatus.QUEUED, settings=msgspec.to_builtins(settings), dataset=dataset)
    return job_object(store, job)


def test_every_auto_is_a_number_in_the_echo(store: Store) -> None:
    shown = make_job(store, early_stopping=True, lora={"dropout": 0.1, "rank_pattern": {"q_proj": 4}}, suffix="x")
    assert shown["hyperparameters"] == {
        "n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 1.0, "learning_rate": 2e-4,
        "lr_scheduler": "cosine",
        "min_lr_ratio": 0.0, "warmup_ratio": 0.03, "weight_decay": 0.0, "max_grad_norm": 1.0, "max_seq_length": 2048,
        "gradient_accumulation_steps": "auto", "save_steps": 25, "eval_steps": 25, "load_best_model_at_end": False,
        "early_stopping": {"patience": 2, "min_delta": 0.0, "warmup_evals": 1}, "serve_while_training": "checkpoint",
        "publish": "always", "priority": 0, "max_gpu_share": 1.0,
    }  # fmt: skip
    assert shown["lora"] == {
        "r": 16, "alpha": 32.0, "dropout": 0.1, "rslora": False, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {},
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    assert shown["data"]["eval"]["examples"] == 7 and shown["validation_file"].startswith("file-")
    alone = make_job(store, unevaluated=True)["hyperparameters"]
    assert "eval_steps" not in alone and "early_stopping" not in alone


def test_what_is_echoed_can_be_sent_again(store: Store) -> None:
    shown = make_job(store, early_stopping={"patience": 3}, priority="low", lora={"r": 4}, eval_steps=7)
    method = {"type": "supervised", "supervised": {"hyperparameters": shown["hyperparameters"]}}
    again = make_job(store, method=method, lora=shown["lora"], seed=shown["seed"])
    for key in ("hyperparameters", "lora", "seed"):
        assert again[key] == shown[key]


# ---------------------------------------------------------------- from_checkpoint

PEFT_CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "target_modules": ["v_proj", "q_proj"], "use_rslora": True,
               "lora_dropout": 0.2, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {}, "bias": "none"}  # fmt: skip


def publish(store: Store, name: str, step: int, job_id: str | None = None, **config: Any) -> str:
    """An adapter version on disk and in the registry; the id of its checkpoint."""
    folder = store.state_dir / "adapters" / f"{name}-{step}"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **config}))
    store.adapters.publish(name, step, f"sha-{step}", str(folder), job_id)
    made = CheckpointRecord(id=new_id("ftckpt"), job_id=job_id or "", created_at=now(), step=step, version="v",
                            name=f"{name}@{step}", metrics={})  # fmt: skip
    store.jobs.add_checkpoint(made)
    return made.id


def references(store: Store, **fields: Any) -> JobRequest:
    path = store.state_dir / "rows"
    path.write_text("{}\n")
    training = add_file(store, path, "x", "fine-tune").id
    return check_references(store, parse(training_file=training, **fields), LIMITS)


def test_a_job_starts_from_what_is_named_and_takes_its_shape(store: Store) -> None:
    parent = make_job(store, suffix="parent")["id"]
    publish(store, "parent", 5, parent)
    checkpoint = publish(store, "parent", 9, parent)
    for wanted, step in (("parent", 9), ("parent@5", 5), (checkpoint, 9), (parent, 9)):
        request = references(store, from_checkpoint=wanted)
        assert request.init_from == str(store.state_dir / "adapters" / f"parent-{step}")
        assert request.hyperparameters["from_checkpoint"] == f"parent@{step}"
    settings = resolve_settings(request, 10, TrainingSettings())
    assert settings.lora == LoraSpec(r=8, lora_alpha=4.0, target_modules=("q_proj", "v_proj"), use_rslora=True,
                                     lora_dropout=0.2, rank_pattern={"q_proj": 2})  # fmt: skip
    same = {"r": 8, "alpha": 4, "dropout": 0, "target_modules": ["q_proj", "v_proj"], "alpha_pattern": {}}
    request = references(store, from_checkpoint="parent", lora=same)
    assert resolve_settings(request, 10, TrainingSettings()).lora.lora_dropout == 0.0


@pytest.mark.parametrize(
    ("lora", "param"),
    [({"r": 16}, "lora.r"), ({"alpha": 8}, "lora.alpha"), ({"rslora": False}, "lora.rslora"),
     ({"target_modules": "all-linear"}, "lora.target_modules"), ({"rank_pattern": {}}, "lora.rank_pattern")],
)  # fmt: skip
def test_another_shape_than_the_starting_points_is_refused(store: Store, lora: dict[str, Any], param: str) -> None:
    publish(store, "parent", 1)
    with pytest.raises(InvalidRequestError, match="parent@1") as caught:
        references(store, from_checkpoint="parent", lora=lora)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("config", "words"),
    [({"r": 128}, "--max-lora-rank"), ({"target_modules": ".*proj"}, "unknown module"),
     ({"use_dora": True}, "use_dora"),
     ({"layers_to_transform": [0]}, "layers_to_transform"), ({"rank_pattern": {"^q": 2}}, "regular expressions")],
)  # fmt: skip
def test_adapters_that_cannot_be_trained_are_refused(store: Store, config: dict[str, Any], words: str) -> None:
    publish(store, "odd", 1, **config)
    with pytest.raises(InvalidRequestError, match="from_checkpoint: 'odd@1' cannot be trained on") as caught:
        references(store, from_checkpoint="odd")
    assert words in caught.value.message and caught.value.param == "from_checkpoint"


def test_starting_points_that_are_not_there(store: Store) -> None:
    job = make_job(store, suffix="young")["id"]
    gone = publish(store, "gone", 1)
    store.adapters.delete("gone")
    for wanted, words in (("nobody", "checkpoint."), ("nobody@3", "checkpoint."), (job, "yet"), (gone, "any more")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            references(store, from_checkpoint=wanted)
        assert caught.value.code == "checkpoint_not_found"
    publish(store, "broken", 1)
    (store.state_dir / "adapters" / "broken-1" / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidRequestError, match="cannot be trained on"):
        references(store, from_checkpoint="broken")


def test_files_are_checked_by_the_field_that_names_them(store: Store) -> None:
    path = store.state_dir / "rows"
    path.write_text("{}\n")
    batch = add_file(store, path, "x", "batch").id
    for value, code in (("file-none", "file_not_found"), (batch, "invalid_file_purpose")):
        with pytest.raises(InvalidRequestError) as caught:
            references(store, validation_file=value)
        assert (caught.value.param, caught.value.code) == ("validation_file", code)


# ---------------------------------------------------------------- integrations


def test_integrations_are_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_integrations, "is_installed", lambda kind: True)
    asked = [{"type": "wandb", "wandb": {"project": "p", "name": None, "entity": "e", "tags": ["a"]}},
             {"type": "mlflow", "mlflow": {"project": "p"}}, {"type": "trackio", "trackio": {"project": "p"}},
             ]  # fmt: skip
    kept = parse(integrations=asked).integrations
    assert (
        kept[0] == {"type": "wandb", "wandb": {"project": "p", "entity": "e", "tags": ["a"]}} and kept[1:] == asked[1:]
    )
    assert parse(integrations=[]).integrations == parse(integrations=None).integrations == []
    for bad, param in (
        ({}, "integrations"),
        (["wandb"], "integrations[0]"),
        ([{"type": "aim"}], "integrations[0].type"),
        ([asked[0], {"type": "wandb", "wandb": {"project": "q"}}], "integrations[1].type"),
        ([{"type": "wandb"}], "integrations[0].wandb.project"),
        ([{"type": "wandb", "wandb": {"project": "p", "tags": "a"}}], "integrations[0].wandb.tags"),
        ([{"type": "wandb", "wandb": {"projct": "p"}}], "integrations[0].wandb.projct"),
        ([{"type": "trackio", "trackio": {"project": "p", "entity": "e"}}], "integrations[0].trackio.entity"),
        ([{"type": "wandb", "mlflow": {"project": "p"}}], "integrations[0].mlflow"),
    ):
        assert refusal(integrations=bad).param == param


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_integrations, "is_installed", lambda kind: False)
    error = refusal(integrations=[{"type": "mlflow", "mlflow": {"project": "p"}}])
    assert "pip install mlflow" in error.message and error.code == "integration_not_installed"
