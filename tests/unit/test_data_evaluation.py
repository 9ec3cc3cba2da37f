"""Evaluation sets: a file of its own or a split, counted to the last row, never trained."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fineinfer.data.packed import DATASET_FILE, EVAL_FILE, DatasetSummary, read_summary
from fineinfer.data.prepare import EXIT_BAD_FILE, PROBLEMS_FILE, DataSettings, PrepareSettings, held_out, main, prepare
from fineinfer.data.problems import ProblemReport
from fineinfer.hashing import file_sha256


def rows(count: int, word: str = "row") -> list[Any]:
    return [{"messages": [{"role": "user", "content": f"{word} {i}"}, {"role": "assistant", "content": f"{i}!"}]}
            for i in range(count)]  # fmt: skip


def write(path: Path, content: list[Any]) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in content))
    return str(path)


class Files:
    """Training and validation file of one job."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder, self.tokenizer = folder, tokenizer

    def told(self, train: list[Any], evaluated: list[Any] | None = None, **changes: Any) -> PrepareSettings:
        validation = None if evaluated is None else write(self.folder / "v.jsonl", evaluated)
        return PrepareSettings(source=write(self.folder / "t.jsonl", train), job_dir=str(self.folder), model_path="",
                               max_seq_length=64, validation=validation, **changes)  # fmt: skip

    def prepare(self, *args: Any, **changes: Any) -> DatasetSummary | ProblemReport:
        return prepare(self.told(*args, **changes), lambda: self.tokenizer)

    def good(self, *args: Any, **changes: Any) -> DatasetSummary:
        summary = self.prepare(*args, **changes)
        assert isinstance(summary, DatasetSummary)
        assert read_summary(self.folder) == summary
        return summary

    def texts(self, name: str) -> list[str]:
        """The user's words of each example in a file."""
        data = load_file(self.folder / name)
        ends = data["offsets"]
        texts = [self.tokenizer.decode(data["input_ids"][a:b]) for a, b in itertools.pairwise(ends)]
        return [text.split("user\n")[1].split("<|im_end|>")[0] for text in texts]


@pytest.fixture
def files(tmp_path: Path, tiny_tokenizer: Any) -> Files:
    return Files(tmp_path, tiny_tokenizer)


def test_a_validation_file_is_prepared_beside_and_never_trained(files: Files) -> None:
    summary = files.good(rows(12), rows(10, "other"))
    assert summary.eval is not None and (summary.examples, summary.eval.examples) == (12, 10)
    assert summary.eval.sha256 == file_sha256(files.folder / EVAL_FILE)
    assert summary.eval.source_sha256 == file_sha256(files.folder / "v.jsonl")
    assert files.texts(DATASET_FILE) == [f"row {i}" for i in range(12)]
    assert files.texts(EVAL_FILE) == [f"other {i}" for i in range(10)]
    data = load_file(files.folder / EVAL_FILE)
    assert summary.eval.tokens == len(data["input_ids"]) and summary.eval.trainable_tokens == data["loss_mask"].sum()
    assert summary.eval.longest == np.diff(data["offsets"]).max() and summary.warnings == []
    assert files.good(rows(12)).eval is None


def test_every_row_of_both_files_is_counted(files: Files) -> None:
    bad = ['{"messages": 1}\n', "{broken\n"]
    long = {"messages": [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "a"}]}
    asked = DataSettings(skip_invalid=True)
    summary = files.good([*rows(11), *bad], [*rows(3, "v"), bad[0], long], data=asked)
    assert summary.eval is not None
    assert (summary.examples, summary.skipped) == (11, 2) and summary.problems == {"invalid_type": 1, "invalid_json": 1}
    assert (summary.eval.examples, summary.eval.skipped) == (3, 2)
    assert summary.eval.problems == {"invalid_type": 1, "too_long": 1}
    assert "validation file: only 3 examples: at least 10 are advisable" in summary.warnings


def test_problems_name_the_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    report = files.prepare(rows(11), [*rows(1), "{broken\n"])
    assert isinstance(report, ProblemReport)
    assert (report.file, report.first[0].line, report.bad_rows) == ("validation_file", 2, 1)
    report = files.prepare(["{broken\n"], ["{broken\n"])
    assert isinstance(report, ProblemReport) and report.file == "training_file"
    empty = files.prepare(rows(11), [])
    assert isinstance(empty, ProblemReport) and (empty.file, empty.first[0].code) == ("validation_file", "empty_file")
    # the child's way of saying so
    told = files.folder / "told.json"
    told.write_bytes(msgspec.json.encode(files.told(rows(11), ["{broken\n"])))
    monkeypatch.setattr(sys.modules["fineinfer.data.prepare"], "load_tokenizer", lambda path: files.tokenizer)
    monkeypatch.setattr(sys.modules["fineinfer.data.prepare"], "_end_with_parent", lambda: None)
    assert main([str(told)]) == EXIT_BAD_FILE
    assert msgspec.json.decode((files.folder / PROBLEMS_FILE).read_bytes())["file"] == "validation_file"


def test_rows_in_both_files_are_warned_of_with_their_number(files: Files) -> None:
    summary = files.good(rows(20), [*rows(15, "v"), *rows(4)])
    assert summary.eval is not None and summary.eval.overlap == 4
    assert summary.warnings == [
        "validation file: 4 rows are in the training file too: evaluation will look better than it is"
    ]


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_a_split_parts_the_rows(files: Files, fraction: float) -> None:
    summary = files.good(
        [*rows(40), "{broken\n"], validation_split=fraction, seed=3, data=DataSettings(skip_invalid=True)
    )
    assert summary.eval is not None
    trained, evaluated = files.texts(DATASET_FILE), files.texts(EVAL_FILE)
    assert sorted([*trained, *evaluated]) == sorted(f"row {i}" for i in range(40)) and len(evaluated) == 40 * fraction
    assert summary.examples + summary.eval.examples + summary.skipped == 41
    assert summary.eval.source_sha256 == summary.source_sha256
    again = files.good(
        [*rows(40), "{broken\n"], validation_split=fraction, seed=3, data=DataSettings(skip_invalid=True)
    )
    assert again == summary
    files.good(rows(40), validation_split=fraction, seed=4)
    assert files.texts(EVAL_FILE) != evaluated


@pytest.mark.parametrize(("count", "fraction"), [(3, 0.1), (1, 0.5)])
def test_a_split_that_leaves_nothing_is_refused(files: Files, count: int, fraction: float) -> None:
    for seed in range(4):
        report = files.prepare(rows(count), validation_split=fraction, seed=seed)
        if count == 1 or isinstance(report, ProblemReport):
            assert isinstance(report, ProblemReport)
            assert report.first[0].code == "split_too_small" and report.first[0].param == "validation_split"
            break
    else:
        pytest.fail("never refused")


@given(count=st.integers(2, 400), fraction=st.floats(0.01, 0.5), seed=st.integers(0, 99))
def test_a_split_has_its_share_and_spares_no_stretch(count: int, fraction: float, seed: int) -> None:
    taken = [index for index in range(count) if held_out(index, fraction, seed)]
    assert abs(len(taken) - count * fraction) <= 1 and len(taken) < count
    assert taken or count * fraction < 1 + fraction
    gaps = np.diff([-1, *taken, count])
    assert gaps.max() <= 2 / fraction + 2
