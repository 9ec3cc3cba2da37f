"""Malformed training files are refused by line, with true numbers, in constant memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fineinfer.data.formats import Chat, parse_row
from fineinfer.data.problems import MAX_SHOWN, Problem, ProblemLog, RowError
from fineinfer.data.reader import read_rows

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
GOOD = {"messages": [USER, ANSWER]}


def call(name: str, arguments: Any, call_id: Any = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_chat(row: Any, line: int = 1) -> Chat:
    example = parse_row(row, line, "openai_chat")
    assert isinstance(example, Chat)
    return example


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    return path


def test_bom_crlf_blank_lines_and_missing_last_newline_are_fine(tmp_path: Path) -> None:
    row = json.dumps(GOOD).encode()
    path = write(tmp_path, b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n" + row + b"\n" + row)
    assert [(line, row == GOOD) for line, row in read_rows(path)] == [(1, True), (4, True), (5, True)]


def test_unicode_line_separators_do_not_split_rows(tmp_path: Path) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "a\u2028b\x85c\x0bd"}]}
    path = write(tmp_path, json.dumps(row, ensure_ascii=False).encode() + b"\n")
    assert [(line, value == row) for line, value in read_rows(path)] == [(1, True)]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{broken", "invalid_json"),
        (b'{"a": 1} trailing', "invalid_json"),
        (b"\xff\xfe{\x00}\x00", "not_utf8"),
        (b'{"a": "caf\xe9"}', "not_utf8"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"\x00\x01", "invalid_json"),
    ],
)
def test_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path, raw: bytes, code: str) -> None:
    good = json.dumps(GOOD).encode()
    rows = list(read_rows(write(tmp_path, good + b"\n" + raw + b"\n" + good + b"\n")))
    assert [line for line, _ in rows] == [1, 2, 3]
    assert isinstance(rows[1][1], Problem)
    assert (rows[1][1].line, rows[1][1].code) == (2, code)
    assert rows[2][1] == GOOD


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Once upon a time\n\nthere was a row.\n", 'plain text goes in as {"text": "..."} rows'),
        (b"instruction,output\na,b\n", "plain text goes in as"),
        (json.dumps([GOOD, GOOD], indent=2).encode(), "one row a line, without a list around them"),
        (b"[" + json.dumps(GOOD).encode() + b",\n" + json.dumps(GOOD).encode() + b"]", "without a list around them"),
        (json.dumps(GOOD, indent=2).encode(), "one row a line"),
    ],
)
def test_files_of_another_kind_are_told_what_to_do(tmp_path: Path, content: bytes, words: str) -> None:
    _, first = next(read_rows(write(tmp_path, content)))
    assert isinstance(first, Problem) and (first.code, first.line) == ("invalid_json", 1) and words in first.message
    _, broken = next(read_rows(write(tmp_path, b'{"a": "b",}\n')))
    assert isinstance(broken, Problem) and "one row" not in broken.message and "plain" not in broken.message


def test_a_huge_line_is_skipped_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with path.open("wb") as out:
        out.write(b"{}\n")
        for _ in range(64):
            out.write(b"x" * (1 << 20))
        out.write(b"\n{}\n")
    tracemalloc.start()
    rows = list(read_rows(path, max_line_bytes=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line for line, _ in rows] == [1, 2, 3]
    assert isinstance(rows[1][1], Problem) and rows[1][1].code == "line_too_long"
    assert peak < 8 << 20


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66, 128])
def test_the_line_limit_counts_bytes_exactly(tmp_path: Path, length: int) -> None:
    line = b'"' + b"x" * (length - 2) + b'"'
    for end in (b"", b"\n"):
        rows = list(read_rows(write(tmp_path, line + end + (b"1\n" if end else b"")), max_line_bytes=64))
        assert isinstance(rows[0][1], Problem) == (length > 64)
        assert len(rows) == (2 if end else 1)


BAD_ROWS: list[tuple[Any, str, str | None]] = [
    ([], "invalid_type", None),
    ("text", "invalid_type", None),
    ({}, "missing_field", "messages"),
    ({"messages": None, "prompt": "x"}, "missing_field", "messages"),
    ({"conversations": []}, "ambiguous_format", "conversations"),
    ({**GOOD, "text": "x"}, "ambiguous_format", "text"),
    ({**GOOD, "tools": [{}]}, "invalid_type", "tools[0].function"),
    ({**GOOD, "tools": "get_weather"}, "invalid_json", "tools"),
    ({**GOOD, "tools": {"name": "f"}}, "invalid_type", "tools"),
    ({**GOOD, "tools": [5]}, "invalid_type", "tools[0]"),
    ({**GOOD, "tools": [{"name": "f", "parameters": [1]}]}, "invalid_type", "tools[0].function.parameters"),
    ({**GOOD, "functions": [{"name": "f"}]}, "unsupported_field", "functions"),
    ({**GOOD, "parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
    ({"messages": []}, "invalid_type", "messages"),
    ({"messages": {"role": "user"}}, "invalid_type", "messages"),
    ({"messages": ["x"]}, "invalid_type", "messages[0]"),
    ({"messages": [{"content": "x"}]}, "missing_role", "messages[0].role"),
    ({"messages": [{"role": 3, "content": "x"}]}, "invalid_type", "messages[0].role"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "invalid_role", "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "invalid_role", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "unknown_tool_call", "messages[0].tool_call_id"),
    ({"messages": [{"role": "user"}]}, "missing_content", "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "missing_content", "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty_content", "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "content": 5}]}, "invalid_type", "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "invalid_type",
     "messages[1].content[0].type"),
    ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "invalid_weight", "messages[1].weight"),
    ({"messages": [USER, {**ANSWER, "weight": True}]}, "invalid_type", "messages[1].weight"),
    ({"messages": [USER, {**ANSWER, "weight": "1"}]}, "invalid_type", "messages[1].weight"),
    ({"messages": [USER, {**ANSWER, "weight": [1]}]}, "invalid_type", "messages[1].weight"),
    ({"messages": [USER, {**ANSWER, "train": 1}]}, "invalid_type", "messages[1].train"),
    ({"messages": [{**USER, "weight": 1}, ANSWER]}, "not_assistant", "messages[0].weight"),
    ({"messages": [{**USER, "tool_calls": [call("f", "{}")]}, ANSWER]}, "not_assistant", "messages[0].tool_calls"),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, "invalid_type", "messages[1].tool_calls[0]"),
    ({"messages": [USER, {**ANSWER, "tool_calls": {}}]}, "invalid_type", "messages[1].tool_calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "{}", None)]}]}, "invalid_type",
     "messages[1].tool_calls[0].id"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("", "{}")]}]}, "invalid_type",
     "messages[1].tool_calls[0].function.name"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "{")]}]}, "invalid_json",
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "[]")]}]}, "invalid_type",
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "missing_content", "messages[1].content"),
    ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, "unsupported_field",
     "messages[1].function_call"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "{}")]},
                   {"role": "tool", "tool_call_id": "other", "content": "x"}, ANSWER]}, "unknown_tool_call",
     "messages[2].tool_call_id"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "{}"), call("g", "{}", "2")]}],
      "parallel_tool_calls": False}, "parallel_tool_calls", "parallel_tool_calls"),
    ({"messages": [USER]}, "last_not_assistant", "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "a", "weight": 0}]}, "no_trainable_tokens", "messages"),
    ({"messages": [USER, {**ANSWER, "train": False}]}, "no_trainable_tokens", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "code", "param"), BAD_ROWS)
def test_bad_rows_name_field_and_code(row: Any, code: str, param: str | None) -> None:
    with pytest.raises(RowError) as caught:
        parse_chat(row, 17)
    first = caught.value.problems[0]
    assert (first.line, first.code, first.param) == (17, code, param)
    assert str(first).startswith("line 17: ")


def test_the_nearest_role_is_suggested() -> None:
    with pytest.raises(RowError, match='did you mean "assistant"'):
        parse_chat({"messages": [USER, {"role": "bot", "content": "x"}]})
    with pytest.raises(RowError, match='did you mean "user"'):
        parse_chat({"messages": [{"role": "User", "content": "x"}]})


def test_every_problem_of_a_row_is_reported() -> None:
    with pytest.raises(RowError) as caught:
        parse_chat({"messages": [{"role": "bot"}, {"role": "assistant", "content": "a", "weight": 7}]})
    assert [problem.code for problem in caught.value.problems] == ["invalid_role", "missing_content", "invalid_weight"]


def test_good_rows_keep_text_weights_and_roles() -> None:
    row = {
        "messages": [
            {"role": "developer", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Bo"},
            {"role": "assistant", "content": "x", "weight": 0},
            USER,
            {"role": "assistant", "content": "y", "weight": 1.0},
        ]
    }
    messages = parse_chat(row).messages
    assert messages[0].plain == {"role": "system", "content": ""}
    assert messages[1].plain == {"role": "user", "content": "ab", "name": "Bo"}
    assert [message.train for message in messages] == [False, False, False, False, True]


def test_tool_calls_become_what_templates_take() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    calls = [call("weather", '{"z": 1, "a": [2]}'), call("weather", {"city": "Rome"}, "c2")]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    answers = [{"role": "tool", "tool_call_id": key, "content": ""} for key in ("c1", "c2")]
    notes: Counter[str] = Counter()
    row = {"messages": [USER, asked, *answers, ANSWER], "tools": tools, "parallel_tool_calls": True}
    chat = parse_row(row, 1, "openai_chat", notes=notes)
    assert isinstance(chat, Chat) and chat.tools == tools
    made = chat.messages[1].plain
    assert made["content"] == "" and [list(item["function"]["arguments"]) for item in made["tool_calls"]] == [
        ["z", "a"], ["city"]]  # fmt: skip
    assert [message.train for message in chat.messages] == [False, True, False, False, True]
    assert len(notes) == 1 and "JSON string" in next(iter(notes))


def test_the_log_keeps_the_first_and_counts_all() -> None:
    log = ProblemLog()
    for line in range(50):
        log.add(Problem(line=line, code="a" if line % 2 else "b", message="m"))
    assert [problem.line for problem in log.first] == list(range(MAX_SHOWN))
    assert log.counts == {"a": 25, "b": 25}


def test_the_demo_data_is_good_and_its_questions_are_held_out() -> None:
    demo = resources.files("fineinfer.data") / "demo"
    with resources.as_file(demo / "train.jsonl") as path:
        rows = [parse_chat(row, line).messages for line, row in read_rows(path)]
    assert 60 <= len(rows) <= 100
    asked = {messages[0].plain["content"] for messages in rows}
    answers = " ".join(messages[-1].plain["content"] for messages in rows)
    held_out = [json.loads(line) for line in (demo / "held_out.jsonl").read_text().splitlines()]
    assert 6 <= len(held_out) <= 8
    for item in held_out:
        assert item["question"] not in asked and item["expected"] in answers
        assert item["expected"] not in item["question"]
