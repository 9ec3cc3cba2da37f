"""Six formats are found, read and trained; every row is trained or reported, under its true line number."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fineinfer.data.formats import FORMATS, Chat, Example, Text, Tokens, detect_format, parse_row
from fineinfer.data.packed import DatasetSummary
from fineinfer.data.prepare import DataSettings, Judge, PrepareSettings, prepare
from fineinfer.data.problems import Problem, RowError
from fineinfer.hashing import CHAT_TEMPLATE_FILE
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from tests.unit.chat_families import family_tokenizer

OWN_FILES = Path(__file__).parents[1] / "data" / "formats"
# and those of a folder of one's own: FINEINFER_FORMAT_FILES=folder pytest tests/unit/test_data_formats.py
FILES = [
    path
    for folder in (OWN_FILES, os.environ.get("FINEINFER_FORMAT_FILES"))
    if folder
    for path in sorted(Path(folder).glob("*.jsonl"))
]
FORMAT_OF = {"openai_chat_weights": "openai_chat", "openai_chat_tools": "openai_chat"}

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD: dict[str, Any] = {
    "openai_chat": {"messages": [USER, ANSWER]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "text": {"text": "q a"},
    "tokenized": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
}


def shown(example: Example) -> Any:
    """An example for comparison: (role, text, trained) of the messages and where the completion begins."""
    if isinstance(example, Chat):
        messages = [(m.role, m.plain["content"], m.train) for m in example.messages]
        return messages, example.completion_start
    return example


def read(row: Any, name: str) -> Example:
    return parse_row(row, 1, name)


# ---------------------------------------------------------------- what rows mean


def test_prompt_and_completion_are_texts_or_messages() -> None:
    assert read({"prompt": "q ", "completion": "a"}, "prompt_completion") == Text("q ", "a")
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    messages = [("user", "q", False), ("assistant", "a", True)]
    assert shown(read(row, "prompt_completion")) == (messages * 2, 3)


def test_alpaca_is_one_user_turn_after_system_and_history() -> None:
    row = {"instruction": "Do", "input": "this", "output": "done", "system": "s", "history": [["a", "b"]]}
    assert shown(read(row, "alpaca")) == ([
        ("system", "s", False), ("user", "a", False), ("assistant", "b", True), ("user", "Do\nthis", False),
        ("assistant", "done", True)], 4)  # fmt: skip
    for row in ({"instruction": "Do", "output": "x"}, {"instruction": "", "input": "Do", "output": "x"}):
        assert shown(read(row, "alpaca"))[0][0] == ("user", "Do", False)


def test_sharegpt_roles_and_tools_become_openais() -> None:
    tools = [{"name": "look_up", "description": "d", "parameters": {"type": "object"}}]
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "look_up", "arguments": {"b": 1, "a": "x"}}'},
        {"from": "observation", "value": "42"},
        {"from": "GPT", "value": "a", "weight": 0},
        {"role": "user", "content": "q2"},
        {"from": "function_call", "value": '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]'},
        {"from": "tool", "value": "1"},
        {"from": "tool", "value": "2"},
        {"from": "model", "value": "b"},
    ]
    row = {"conversations": said, "system": "s", "tools": json.dumps(tools)}
    chat = read(row, "sharegpt")
    assert isinstance(chat, Chat) and chat.tools == [{"type": "function", "function": tools[0]}]
    assert shown(chat)[0] == [
        ("system", "s", False), ("user", "q", False), ("assistant", "", True), ("tool", "42", False),
        ("assistant", "a", False), ("user", "q2", False), ("assistant", "", True), ("tool", "1", False),
        ("tool", "2", False), ("assistant", "b", True)]  # fmt: skip
    calls = [m.plain["tool_calls"] for m in chat.messages if "tool_calls" in m.plain]
    assert [[call["function"]["name"] for call in group] for group in calls] == [["look_up"], ["f", "g"]]
    assert list(calls[0][0]["function"]["arguments"]) == ["b", "a"]
    ids = [m.plain["tool_call_id"] for m in chat.messages if m.role == "tool"]
    assert ids == [call["id"] for group in calls for call in group]


def test_tokens_keep_their_labels() -> None:
    assert read({"input_ids": [1, 2, 3]}, "tokenized") == Tokens([1, 2, 3], [1, 1, 1])
    row = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}
    assert read(row, "tokenized") == Tokens([1, 2, 3], [0, 1, 1])
    assert read({"text": " x"}, "text") == Text(None, " x")


BAD_ROWS: list[tuple[str, Any, str, str | None]] = [
    ("prompt_completion", {"prompt": "q", "completion": ""}, "invalid_type", "completion"),
    ("prompt_completion", {"prompt": "q", "completion": [ANSWER]}, "invalid_type", "completion"),
    ("prompt_completion", {"prompt": [USER], "completion": "a"}, "invalid_type", "completion"),
    ("prompt_completion", {"prompt": 5, "completion": "a"}, "invalid_type", "prompt"),
    ("prompt_completion", {"prompt": [USER], "completion": [USER]}, "last_not_assistant", "completion"),
    ("prompt_completion", {"prompt": "q"}, "missing_field", "completion"),
    ("alpaca", {"instruction": "", "input": None, "output": "a"}, "empty_content", "instruction"),
    ("alpaca", {"instruction": "q", "output": ""}, "invalid_type", "output"),
    ("alpaca", {"instruction": "q", "output": ["a"]}, "invalid_type", "output"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["a"]]}, "invalid_type", "history[0]"),
    ("alpaca", {"instruction": "q", "output": "a", "system": 1}, "invalid_type", "system"),
    ("sharegpt", {"conversations": [{"from": "alien", "value": "q"}]}, "invalid_role", "conversations[0].role"),
    ("sharegpt", {"conversations": [{"from": "human", "value": "q"}]}, "last_not_assistant", "conversations"),
    ("sharegpt", {"conversations": [{"from": "human"}]}, "missing_content", "conversations[0].content"),
    ("sharegpt", {"conversations": ["q"]}, "invalid_type", "conversations[0]"),
    ("sharegpt", {"conversations": "q"}, "invalid_type", "conversations"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "{"}]}, "invalid_json",
     "conversations[0].value"),
    ("sharegpt", {"conversations": [{"from": "observation", "value": "x"}]}, "unknown_tool_call",
     "conversations[0].tool_call_id"),
    ("text", {"text": ""}, "invalid_type", "text"),
    ("text", {"text": ["a"]}, "invalid_type", "text"),
    ("tokenized", {"input_ids": "abc"}, "invalid_type", "input_ids"),
    ("tokenized", {"input_ids": [1, 2.5]}, "invalid_type", "input_ids[1]"),
    ("tokenized", {"input_ids": [1, True]}, "invalid_type", "input_ids[1]"),
    ("tokenized", {"input_ids": [1, 2], "labels": [1]}, "invalid_length", "labels"),
    ("tokenized", {"input_ids": [1, 2], "labels": [2, -100]}, "invalid_labels", "labels"),
    ("tokenized", {"input_ids": [1, 2], "attention_mask": [1, 0]}, "padded", "attention_mask"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "code", "param"), BAD_ROWS)
def test_bad_rows_name_field_and_code(name: str, row: Any, code: str, param: str | None) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row, 9, name)
    first = caught.value.problems[0]
    assert (first.line, first.code, first.param) == (9, code, param) and first.message


def test_what_is_not_used_is_counted() -> None:
    notes: Counter[str] = Counter()
    for number in range(200):
        parse_row({**GOOD["alpaca"], "id": number, f"key{number}": 1}, 1, "alpaca", notes=notes)
    assert notes["the field 'id' is not used"] == 200 and len(notes) <= 50


# ---------------------------------------------------------------- which format a file has


def detected(*rows: Any) -> str | Problem:
    return detect_format(enumerate(rows, 1))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_found(name: str) -> None:
    assert detected(GOOD[name]) == name
    assert detected(Problem(line=1, code="invalid_json", message=""), {"other": 1}, GOOD[name]) == name
    assert isinstance(parse_row(GOOD[name], 1, name), Chat | Text | Tokens)


@pytest.mark.parametrize("one", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_two_formats_are_named_both(one: str, other: str) -> None:
    if one == other:
        return
    mixed = detected({}, GOOD[one], GOOD[other])
    assert isinstance(mixed, Problem) and (mixed.code, mixed.line) == ("ambiguous_format", 3)
    torn = detected(GOOD[one] | GOOD[other])
    assert isinstance(torn, Problem) and (torn.code, torn.line) == ("ambiguous_format", 1)
    assert all(name in problem.message for problem in (mixed, torn) for name in (one, other))
    assert detected(GOOD[one], GOOD[one] | GOOD[other]) == one
    with pytest.raises(RowError, match=other):
        parse_row(GOOD[one] | GOOD[other], 1, one)
    parse_row(GOOD[one] | GOOD[other], 1, one, alone=False)


def test_preferences_and_strangers_are_refused_as_such() -> None:
    preference = detected({"prompt": "q", "chosen": "a", "rejected": "b"})
    assert isinstance(preference, Problem) and "DPO" in preference.message and preference.line == 1
    strange = detected({"question": "q", "answer": "a"})
    assert isinstance(strange, Problem) and strange.code == "unknown_format" and "messages" in strange.message


@pytest.mark.parametrize(("format_name", "examples"), [(None, 0), ("alpaca", 3), ("text", 3), ("sharegpt", 0)])
def test_the_named_format_overrides(tmp_path: Path, format_name: str | None, examples: int) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD["alpaca"] | GOOD["text"]) + "\n")
    path.write_text(path.read_text() * 3)
    judge = Judge(path, DataSettings(format=format_name), 512, None)
    assert len(list(judge.examples())) == examples and judge.refused == (not examples)
    assert (judge.rows, judge.skipped) == (3, 3 - examples)
    codes = {None: {"ambiguous_format": 1}, "sharegpt": {"missing_field": 3}}
    assert judge.report().counts == codes.get(format_name, {})


@pytest.mark.parametrize("format_name", ["text", "tokenized"])
def test_train_on_means_nothing_without_messages(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD[format_name]) + "\n")
    judge = Judge(path, DataSettings(train_on="assistant"), 512, None)
    assert list(judge.examples()) == [] and judge.refused and judge.report().counts == {"invalid_train_on": 1}


# ---------------------------------------------------------------- whole files


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[2].name}-{path.stem}")
def test_every_format_trains(path: Path, tmp_path: Path) -> None:
    import torch

    from fineinfer.model.loader import load_model
    from fineinfer.training.trainer import Trainer

    tokenizer = family_tokenizer("qwen2.5")
    told = PrepareSettings(source=str(path), job_dir=str(tmp_path), model_path="", max_seq_length=8192)
    summary = prepare(told, lambda: tokenizer)
    assert isinstance(summary, DatasetSummary), summary
    assert summary.format == FORMAT_OF.get(path.stem, path.stem)
    assert summary.examples == len(path.read_text().splitlines()) and summary.skipped == summary.truncated == 0
    few = tmp_path / "few.jsonl"
    few.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    summary = prepare(msgspec.structs.replace(told, source=str(few)), lambda: tokenizer)
    assert isinstance(summary, DatasetSummary)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = StartJob(
        job_id="job", name="lora", base_model="base", job_dir=str(tmp_path), adapters_dir=str(tmp_path / "adapters"),
        settings=TrainingSettings(lora=LoraSpec(r=2), n_epochs=4, batch_size=3, learning_rate=0.01, warmup_ratio=0.0),
        dataset_sha256=summary.sha256,
    )  # fmt: skip
    decoder = load_model(tmp_path, dtype="float32", load_format="dummy").decoder
    trainer = Trainer(decoder, job, lambda tokens, layer: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: more threads would only wait for each other
    try:
        while not trainer.finished:
            trainer.advance()
    finally:
        torch.set_num_threads(threads)
    losses = [entry["loss"] for entry in trainer.log_history]
    assert min(losses[1:]) < losses[0] and not any(entry["skipped"] for entry in trainer.log_history)
    adapter = Path(trainer.take_checkpoints()[-1].directory)
    assert (adapter / CHAT_TEMPLATE_FILE).read_text() == tokenizer.chat_template


KINDS: dict[str, tuple[bytes, bool]] = {
    "good": (json.dumps(GOOD["openai_chat"]).encode(), True),
    "other good": (json.dumps({"messages": [USER, {**ANSWER, "weight": 1}], "id": 3}).encode(), True),
    "broken": (b'{"messages": [', False),
    "not utf-8": (b'{"a": "\xe9"}', False),
    "two problems": (b'{"messages": [{"role": "bot"}]}', False),
    "no object": (b"7", False),
    "too long": (json.dumps({"messages": [USER, {**ANSWER, "content": "word " * 400}]}).encode(), False),
    "no answer": (json.dumps({"messages": [USER]}).encode(), False),
    "refused by the template": (json.dumps({"messages": [ANSWER, USER, ANSWER]}).encode(), False),
    "another format": (json.dumps(GOOD["text"]).encode(), False),
    "blank": (b" ", True),
}


@given(kinds=st.lists(st.sampled_from(list(KINDS)), max_size=30), skip=st.booleans(), drop=st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_in_are_rows_trained_and_rows_reported(tmp_path: Path, kinds: list[str], skip: bool, drop: bool) -> None:
    kinds = ["good", *kinds]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(KINDS[kind][0] for kind in kinds))
    strategy = "drop" if drop else "raise"
    asked = DataSettings(skip_invalid=skip, excess_length_strategy=strategy, format="openai_chat")
    told = PrepareSettings(source=str(path), job_dir=str(tmp_path), model_path="", max_seq_length=256, data=asked)
    verdict = prepare(told, lambda: family_tokenizer("chatml"))
    bad = [line for line, kind in enumerate(kinds, 1) if not KINDS[kind][1]]
    num_rows = sum(kind != "blank" for kind in kinds)
    if isinstance(verdict, DatasetSummary):
        assert skip or (drop and all(kinds[line - 1] == "too long" for line in bad)) or not bad
        assert verdict.examples + verdict.skipped == num_rows and verdict.skipped == len(bad)
        assert sum(verdict.problems.values()) >= verdict.skipped
    else:
        assert bad and not skip
        assert (verdict.rows, verdict.bad_rows) == (num_rows, len(bad))
        lines = [problem.line for problem in verdict.first]
        assert list(dict.fromkeys(lines)) == bad[: len(set(lines))]
        assert len(lines) == min(20, verdict.total) and verdict.total >= len(bad)


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        ({"input_ids": [1, 10**6]}, "invalid_token", "input_ids"),
        ({"input_ids": [1, -1]}, "invalid_token", "input_ids"),
        ({"input_ids": []}, "no_trainable_tokens", "input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [1, -100, -100]}, "no_trainable_tokens", "input_ids"),
        ({"text": "x" * 900}, "too_long", "text"),
        ({"prompt": "q", "completion": "x" * 900}, "too_long", "completion"),
        ({"messages": [ANSWER, USER, ANSWER]}, "template_error", "messages"),
    ],
)
def test_what_only_tokens_show(tmp_path: Path, row: dict[str, Any], code: str, param: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n" + json.dumps(row))
    judge = Judge(path, DataSettings(), 64, lambda: family_tokenizer("chatml"))
    assert list(judge.examples()) == [] and judge.refused
    assert [(problem.line, problem.code, problem.param) for problem in judge.report().first] == [(2, code, param)]
