"""500 good files with something broken in them: what is wrong is named by its true line, and nothing else is."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fineinfer.data.formats import FORMATS
from fineinfer.data.prepare import DataSettings, Judge
from fineinfer.data.reader import MAX_LINE_BYTES
from tests.unit.chat_families import conversations, family_tokenizer

FILES = sorted((Path(__file__).parents[1] / "data" / "formats").glob("*.jsonl"))
NUM_FILES, NUM_ROWS = 500, 10

Row = dict[str, Any]
# The new bytes of a row and which of their lines is wrong in what way: (offset from the row's first line, codes).
Mutant = tuple[bytes, list[tuple[int, set[str]]]]
# Where the text of a row stands that must be there, and the codes of: another type, emptiness, absence.
TEXT_AT: dict[str, tuple[list[Any], str, str, str]] = {
    "openai_chat": (["messages", -1, "content"], "invalid_type", "empty_content", "missing_content"),
    "sharegpt": (["conversations", -1, "value"], "invalid_type", "empty_content", "missing_content"),
    "prompt_completion": (["completion"], "invalid_type", "invalid_type", "missing_field"),
    "alpaca": (["output"], "invalid_type", "invalid_type", "missing_field"),
    "text": (["text"], "invalid_type", "invalid_type", "missing_field"),
    "tokenized": (["input_ids"], "invalid_type", "invalid_type", "missing_field"),
}
ROLE_AT = {"openai_chat": ["messages", -1, "role"], "sharegpt": ["conversations", -1, "from"]}
OTHER = {
    "text": {"text": "a"},
    "openai_chat": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
}


def dumped(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def changed(row: Row, path: list[Any], value: Any) -> bytes:
    """The row with ``value`` at ``path``; KeyError takes the key out."""
    row = json.loads(json.dumps(row))
    target: Any = row
    for key in path[:-1]:
        target = target[key]
    if value is KeyError:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return dumped(row)


def other_format(name: str) -> Row:
    return OTHER["openai_chat" if name == "text" else "text"]


# ---------------------------------------------------------------- mutations of a row: (row, format, draw) -> mutant


def wrong_type(row: Row, name: str, draw: random.Random) -> Mutant:
    value = draw.choice([5, True, {"a": 1}, 1e30])
    return changed(row, TEXT_AT[name][0], value), [(0, {TEXT_AT[name][1]})]


def empty_text(row: Row, name: str, draw: random.Random) -> Mutant:
    return changed(row, TEXT_AT[name][0], ""), [(0, {TEXT_AT[name][2]})]


def missing_text(row: Row, name: str, draw: random.Random) -> Mutant:
    gone = changed(row, TEXT_AT[name][0], draw.choice([KeyError, None]))
    return gone, [(0, {TEXT_AT[name][3]})]


def role_typo(row: Row, name: str, draw: random.Random) -> Mutant:
    if name not in ROLE_AT:
        return dumped(row), []
    typo = draw.choice(["asistant", "Assistant ", "", "agent", "usr"])
    return changed(row, ROLE_AT[name], typo), [(0, {"invalid_role"})]


def no_object(row: Row, name: str, draw: random.Random) -> Mutant:
    return dumped(draw.choice([None, 5, [row], "row", True, []])), [(0, {"invalid_type"})]


def two_formats(row: Row, name: str, draw: random.Random) -> Mutant:
    return dumped(row | other_format(name)), [(0, {"ambiguous_format"})]


def harmless(row: Row, name: str, draw: random.Random) -> Mutant:
    deep: Any = 0
    for _ in range(50):
        deep = [deep]
    more = draw.choice([{"id": 10**30}, {"deep": deep}, {"note": "a\u2028b\x85c"}, {"é": None}, {"big": 10**300}])
    return dumped(row | more), []


def bad_number(row: Row, name: str, draw: random.Random) -> Mutant:
    number = draw.choice([b"NaN", b"-Infinity", b"1e999", b"01", b"+1", b"0x1", b"1.", b"9" * 5000])
    return dumped(row)[:-1] + b', "score": ' + number + b"}", [(0, {"invalid_json"})]


def repeated_key(row: Row, name: str, draw: random.Random) -> Mutant:
    """The last one counts, as for every JSON reader that does not refuse them."""
    key, line = json.dumps(FORMATS[name].signs[0]).encode(), dumped(row)
    if draw.random() < 0.5:
        return b"{" + key + b": 5, " + line[1:], []
    return line[:-1] + b", " + key + b": 5}", [(0, {"invalid_type"})]


# ---------------------------------------------------------------- of its bytes


def truncated(row: Row, name: str, draw: random.Random) -> Mutant:
    line = dumped(row)
    return line[: draw.randrange(1, len(line))], [(0, {"invalid_json", "not_utf8"})]


def twice_on_a_line(row: Row, name: str, draw: random.Random) -> Mutant:
    return dumped(row) + draw.choice([b"", b" ", b","]) + dumped(row), [(0, {"invalid_json"})]


def spread_over_lines(row: Row, name: str, draw: random.Random) -> Mutant:
    return dumped(row).replace(b": ", b":\n", 1), [(0, {"invalid_json"}), (1, {"invalid_json", "invalid_type"})]


def bad_utf8(row: Row, name: str, draw: random.Random) -> Mutant:
    bad = draw.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf"])
    return dumped(row).replace(b'"', b'"' + bad, 1), [(0, {"not_utf8"})]


def bad_escape(row: Row, name: str, draw: random.Random) -> Mutant:
    bad = draw.choice([b"\\ud800", b"\\x41", b"\\u12", b"\x00", b"\x01", b"\\q"])
    return dumped(row).replace(b'"', b'"' + bad, 1), [(0, {"invalid_json"})]


def null_bytes(row: Row, name: str, draw: random.Random) -> Mutant:
    line = dumped(row)
    return draw.choice([b"\0" * 40, line + b"\0", b"\0" + line]), [(0, {"invalid_json"})]


def inner_mark(row: Row, name: str, draw: random.Random) -> Mutant:
    """A byte order mark where no file begins."""
    return b"\n\xef\xbb\xbf" + dumped(row), [(1, {"invalid_json"})]


def deep(row: Row, name: str, draw: random.Random) -> Mutant:
    return draw.choice([b"[", b'{"a":']) * 20_000, [(0, {"invalid_json"})]


def single_quotes(row: Row, name: str, draw: random.Random) -> Mutant:
    return dumped(row).replace(b'"', b"'"), [(0, {"invalid_json"})]


def blank_lines(row: Row, name: str, draw: random.Random) -> Mutant:
    return draw.choice([b"\n\n", b" \t\r\n", b"\r\n\n"]) + b"  " + dumped(row) + b" \t\r", []


def flipped(row: Row, name: str, draw: random.Random) -> Mutant:
    """One to four bits: Python's own reader says whether it is still JSON, and the same."""
    line = bytearray(dumped(row))
    for _ in range(draw.randint(1, 4)):
        line[draw.randrange(len(line))] ^= 1 << draw.randrange(8)
    made = bytes(line).replace(b"\n", b" ")

    def refused(constant: str) -> None:
        raise ValueError(constant)

    try:
        read = json.loads(made.decode(), parse_constant=refused)
    except ValueError:
        return made, [(0, {"invalid_json", "not_utf8"})]
    return made, [] if read == row else [(0, {"any, or none"})]


MUTATIONS: list[Callable[[Row, str, random.Random], Mutant]] = [
    wrong_type, empty_text, missing_text, role_typo, no_object, two_formats, harmless, bad_number, repeated_key,
    truncated, twice_on_a_line, spread_over_lines, bad_utf8, bad_escape, null_bytes, inner_mark, deep, single_quotes,
    blank_lines, flipped,
]  # fmt: skip


def rows_of(path: Path) -> list[Row]:
    rows: list[Row] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return (rows * NUM_ROWS)[:NUM_ROWS]


def judged(path: Path, settings: DataSettings, with_tokens: bool) -> tuple[Judge, list[int]]:
    judge = Judge(path, settings, 8192, (lambda: family_tokenizer("qwen2.5")) if with_tokens else None)
    return judge, [line for line, _, _ in judge.examples()]


@pytest.mark.parametrize("part", range(5))
def test_500_mutated_files_get_the_right_verdict(part: int, tmp_path: Path) -> None:
    used: Counter[str] = Counter()
    path = tmp_path / "train.jsonl"
    for number in range(part, NUM_FILES, 5):
        draw = random.Random(number)
        source = FILES[number // 5 % len(FILES)]
        name = "openai_chat" if source.stem.startswith("openai_chat") else source.stem
        chosen = set(draw.sample(range(NUM_ROWS), draw.randint(0, 3)))
        line, lines = 1, []
        want: dict[int, set[str]] = {}
        for index, row in enumerate(rows_of(source)):
            made, wrong = dumped(row), []
            if index in chosen:
                mutate = draw.choice(MUTATIONS)
                used[mutate.__name__] += 1
                made, wrong = mutate(row, name, draw)
            want |= {line + offset: codes for offset, codes in wrong}
            lines.append(made)
            line += made.count(b"\n") + 1
        start, end = draw.choice([b"", b"\xef\xbb\xbf"]), draw.choice([b"\n", b"\r\n"])
        path.write_bytes(start + end.join(lines) + draw.choice([b"", end, end * 3]))
        judge, good = judged(path, DataSettings(), with_tokens=number % 4 == 0)
        report = judge.report()
        found: dict[int, str] = {}
        for problem in report.first:
            assert problem.line is not None and problem.message
            found.setdefault(problem.line, problem.code)
        for line_number, codes in want.items():
            if codes != {"any, or none"}:
                assert found.get(line_number) in codes, (number, line_number, codes, report, lines)
        assert set(found) <= set(want), (number, report, lines)
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert sorted([*good, *found]) == [n for n, text in enumerate(content, 1) if text.strip()]
        assert (report.rows, report.bad_rows) == (len(good) + len(found), len(found))
        assert judge.refused == bool(found)
    assert set(used) == {mutate.__name__ for mutate in MUTATIONS}


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_a_row_of_another_format_refuses_the_file(source: Path, tmp_path: Path) -> None:
    path, rows = tmp_path / "train.jsonl", rows_of(source)
    name = "openai_chat" if source.stem.startswith("openai_chat") else source.stem
    for index in (0, 1, NUM_ROWS - 1):
        mixed = [*rows[:index], other_format(name), *rows[index + 1 :]]
        path.write_bytes(b"\n".join(map(dumped, mixed)))
        judge, good = judged(path, DataSettings(skip_invalid=True), with_tokens=False)
        (problem,) = judge.report().first
        assert (problem.code, problem.line) == ("ambiguous_format", max(index, 1) + 1)
        assert name in problem.message and not good and judge.refused
        assert judge.report().rows == judge.report().bad_rows == NUM_ROWS
        if index:  # told which, the stranger is one bad row
            judge, good = judged(path, DataSettings(format=name), with_tokens=False)
            assert [p.line for p in judge.report().first] == [index + 1] and len(good) == NUM_ROWS - 1


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_a_gigantic_line_is_one_bad_row(source: Path, tmp_path: Path) -> None:
    path, rows = tmp_path / "train.jsonl", list(map(dumped, rows_of(source)))
    rows[4] = rows[4][:-1] + b', "x": "' + b"y" * MAX_LINE_BYTES + b'"}'
    path.write_bytes(b"\n".join(rows))
    judge, good = judged(path, DataSettings(), with_tokens=False)
    assert [(p.line, p.code) for p in judge.report().first] == [(5, "line_too_long")]
    assert good == [1, 2, 3, 4, *range(6, NUM_ROWS + 1)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1"])
def test_another_encoding_is_refused_line_by_line(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(dumped({"text": f"café {n}"}) for n in range(5)).decode().encode(encoding))
    judge, good = judged(path, DataSettings(), with_tokens=False)
    report = judge.report()
    assert not good and judge.refused and report.rows == report.bad_rows >= 5
    assert set(report.counts) <= {"not_utf8", "invalid_json"}


@pytest.mark.parametrize("name", FORMATS)
def test_random_bytes_crash_nothing_and_blame_no_other_line(name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    path = tmp_path / "train.jsonl"
    source = next(file for file in FILES if file.stem.startswith(name))
    rows = conversations("qwen2.5", NUM_ROWS) if name == "openai_chat" else rows_of(source)
    for _ in range(60):
        lines = list(map(dumped, rows))
        index = draw.randrange(NUM_ROWS)
        broken = bytearray(lines[index])
        for _ in range(draw.randint(1, 6)):
            broken[draw.randrange(len(broken))] = draw.choice(b'\0":,[]{}0\xff' + bytes([draw.randrange(256)]))
        lines[index] = bytes(broken).replace(b"\n", b" ")
        path.write_bytes(b"\n".join(lines))
        judge, good = judged(path, DataSettings(format=name), with_tokens=True)
        blamed = {problem.line for problem in judge.report().first}
        assert blamed <= {index + 1} and sorted([*good, *blamed]) == list(range(1, NUM_ROWS + 1))
