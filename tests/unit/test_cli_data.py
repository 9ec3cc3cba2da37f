"""`fineinfer data check` and `preview`: verdicts by line, exit codes, and what is trained, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fineinfer.cli.app import main
from tests.unit.chat_families import family_tokenizer

ROW = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world 漢字"}]}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model folder with only a tokenizer in it."""
    folder = tmp_path / "model"
    family_tokenizer("chatml").save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


def write(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_check_without_a_model_judges_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = "transformers" in sys.modules
    assert main(["data", "check", write(tmp_path, *[ROW] * 12)]) == 0
    shown = capsys.readouterr().out
    assert "12 rows (openai_chat), 0 of them bad" in shown and "11 rows are the same as an earlier" in shown
    assert ("transformers" in sys.modules) == loaded
    assert main(["data", "check", write(tmp_path, ROW, {"messages": []}, ROW)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("line 2: messages: expected") and "3 rows (openai_chat), 1 of them bad" in shown
    assert main(["data", "check", write(tmp_path, ROW, {"messages": []}), "--skip-invalid"]) == 0


def test_check_with_a_model_looks_at_tokens(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "check", write(tmp_path, ROW, ROW), "--model", model, "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["rows"] == 2 and report["tokens"] > 20 and report["truncated"] == 0
    assert main([*arguments, "--max-seq-length", "9"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["counts"] == {"too_long": 2} and report["bad_rows"] == 2
    assert {"line", "code", "message", "param"} == set(report["first"][0])


def test_preview_marks_what_is_trained(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["data", "preview", write(tmp_path, ROW, {"messages": []}, ROW, ROW), "--model", model, "--rows", "2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.count("<|im_start|>assistant\n[[world 漢字<|im_end|>]]") == 2 and "[[hello" not in out
    assert "line 3:" in out and "line 4:" not in out and err.startswith("line 2: ")
    assert main([*arguments, "--json", "--train-on", "all"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in rows] == [1, 3] and all(all(row["loss_mask"][1:]) for row in rows)
    assert len(rows[0]["input_ids"]) == len(rows[0]["loss_mask"]) and rows[0]["spans"][1]["trained"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(arguments) == 0
    assert "[[" not in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 0
    assert "[[world" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.jsonl"], 1, "no such file"),
        (["FILE", "--data-format", "parquet"], 1, "format must be one of"),
        (["FILE", "--train-on", "user"], 2, "--train-on"),
        (["FILE", "--model", "/nowhere"], 1, "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    path = write(tmp_path, ROW)
    assert main(["data", "check", *[path if item == "FILE" else item for item in arguments]]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
