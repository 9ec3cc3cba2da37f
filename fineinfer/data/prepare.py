"""The data child: ``python -m fineinfer.data.prepare JOB.json`` validates, tokenises and packs the files of a job.

A process of its own, so that a hostile file can neither stall nor crash the server. It ends when its stdin closes,
that is, with its parent. Exit status 0: dataset.safetensors (with eval.safetensors, if asked for) and dataset.json are
complete; 2: problems.json says what is wrong with which file; anything else: it broke, and stderr says why.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.data.formats import FORMATS, Example, Tokens, detect_format, parse_row
from fineinfer.data.masking import TokenMasker
from fineinfer.data.packed import EVAL_FILE, DatasetSummary, EvalSummary, PackedWriter, write_summary
from fineinfer.data.problems import Problem, ProblemLog, ProblemReport, RowError
from fineinfer.data.reader import read_rows
from fineinfer.hashing import CHAT_TEMPLATE_FILE, file_sha256
from fineinfer.text.chat_template import ChatTemplateError
from fineinfer.text.tokenizer import forgo_torch, load_tokenizer

PROBLEMS_FILE = "problems.json"
EXIT_BAD_FILE = 2
FEW_EXAMPLES = 10
_SEEN_BYTES = 8 << 20
_LABELLED = {"text": "all", "tokenized": None}  # what `train_on` may be where the rows have no messages


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a job wants its file to be read.

    Attributes:
        format: A name of FORMATS; None: found from the first rows.
        train_on: See TokenMasker.
        skip_invalid: Bad rows are left out and counted instead of refusing the file.
        excess_length_strategy: What becomes of rows above ``max_seq_length`` (axolotl's name): ``raise`` makes them bad
            rows, ``drop`` leaves them out, ``truncate`` cuts them at the right.
    """

    format: str | None = None
    train_on: str | None = None
    skip_invalid: bool = False
    excess_length_strategy: str = "raise"


class PrepareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told. ``validation`` and ``validation_split`` exclude each other."""

    source: str  # the training file
    job_dir: str  # where the data set goes
    model_path: str  # folder (or .gguf file) with tokenizer and chat template
    max_seq_length: int
    data: DataSettings = DataSettings()
    validation: str | None = None  # the validation file
    validation_split: float = 0.0  # this part of the training file's rows is evaluated instead of trained
    seed: int = 0  # of the split


class SeenRows:
    """Finds rows that come again, in constant memory: a row is forgotten for one that shares its slot.

    Args:
        other: Rows of another file.

    Attributes:
        repeated: Rows that were there before, at least.
        shared: Rows that the other file has too, at least.
    """

    def __init__(self, other: SeenRows | None = None) -> None:
        self._hashes, self._other = array("q", bytes(_SEEN_BYTES)), other
        self.repeated = self.shared = 0

    def add(self, raw: bytes) -> None:
        """One more row."""
        number = hash(raw)
        slot = number % len(self._hashes)
        self.repeated += self._hashes[slot] == number
        self._hashes[slot] = number
        if self._other is not None:
            self.shared += self._other._hashes[slot] == number


class Judge:
    """Reads a file once, row by row, in constant memory.

    Args:
        source: The file.
        settings: How to read it.
        max_seq_length: Longest example in tokens.
        load: Gives the tokenizer, when the first well-formed row is there (its import takes seconds). None: the rows
            are judged without looking at tokens.
        other: Of a validation file: the training file, which has been read.

    Attributes:
        problems: What is wrong so far.
        rows, skipped, truncated: Numbers of rows so far.
        seen: Rows so far, to find those that come again.
        masker: Made with the first well-formed row.
    """

    def __init__(
        self,
        source: Path,
        settings: DataSettings,
        max_seq_length: int,
        load: Callable[[], Any] | None,
        other: Judge | None = None,
    ) -> None:
        self._source, self._settings, self._max_seq_length, self._load = source, settings, max_seq_length, load
        self.problems = ProblemLog()
        self.rows = self.skipped = self.truncated = 0
        self.masker: TokenMasker | None = None
        self.format: str | None = None
        self._notes: Counter[str] = Counter()
        self.seen: SeenRows = SeenRows(None if other is None else other.seen)

    def examples(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """(line, input_ids, loss_mask) of each good row; both lists are empty without a tokenizer."""
        found = self._settings.format or detect_format(read_rows(self._source))
        if isinstance(found, Problem):
            return self._refuse_file(found)
        self.format = found
        train_on, alone = self._settings.train_on, self._settings.format is None
        if train_on is not None and train_on != _LABELLED.get(self.format, train_on):
            message = f"train_on {train_on} has no meaning for {self.format} rows; leave it out"
            return self._refuse_file(Problem(line=None, code="invalid_train_on", message=message, param="train_on"))
        for line, row in read_rows(self._source, on_line=self.seen.add):
            self.rows += 1
            try:
                if isinstance(row, Problem):
                    raise RowError([row])
                ids, mask = self._encode(parse_row(row, line, self.format, alone=alone, notes=self._notes), line)
            except RowError as error:
                self.skipped += 1
                for problem in error.problems:
                    self.problems.add(problem)
            else:
                yield line, ids, mask
        if not self.rows:
            self.problems.add(Problem(line=None, code="empty_file", message="the file has no rows"))

    def _refuse_file(self, problem: Problem) -> None:
        self.problems.add(problem)
        self.rows = self.skipped = sum(1 for _ in read_rows(self._source))

    def _encode(self, example: Example, line: int) -> tuple[list[int], list[int]]:
        if self._load is None:
            return [], []
        if self.masker is None:
            self.masker = TokenMasker(self._load(), self._settings.train_on, self._max_seq_length)
        where = FORMATS[str(self.format)].signs[-1]
        try:
            ids, mask = self.masker.encode(example)
        except ChatTemplateError as error:
            code = "invalid_token" if isinstance(example, Tokens) else "template_error"
            raise RowError([Problem(line=line, code=code, message=str(error), param=where)]) from None
        longest = self._max_seq_length
        if too_long := len(ids) > longest:
            if self._settings.excess_length_strategy != "truncate":
                message = f"{len(ids)} tokens are more than max_seq_length {longest}"
                raise RowError([Problem(line=line, code="too_long", message=message, param=where)])
            ids, mask = ids[:longest], mask[:longest]
        if not any(mask[1:]):
            message = f"no trainable token is left {f'in {longest} tokens' if too_long else 'after the chat template'}"
            raise RowError([Problem(line=line, code="no_trainable_tokens", message=message, param=where)])
        self.truncated += too_long
        return ids, mask

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, for people."""
        return "" if self.masker is None else str(self.masker.template.tokenizer.decode(token_ids))

    @property
    def refused(self) -> bool:
        """Whether the file cannot be trained on as the settings stand."""
        dropped = self.problems.counts["too_long"] if self._settings.excess_length_strategy == "drop" else 0
        return self.skipped == self.rows or (self.skipped > dropped and not self._settings.skip_invalid)

    def report(self) -> ProblemReport:
        """The verdict so far."""
        return ProblemReport(
            first=list(self.problems.first), counts=dict(self.problems.counts), rows=self.rows, bad_rows=self.skipped,
            format=self.format, warnings=self.warnings(),
        )  # fmt: skip

    def warnings(self) -> list[str]:
        """What is odd about the file, for the user."""
        good, masker = self.rows - self.skipped, self.masker
        counted = [
            (self.seen.repeated, "rows are the same as an earlier one"),
            (self.seen.shared, "rows are in the training file too: evaluation will look better than it is"),
            *((number, f"times: {note}") for note, number in self._notes.most_common()),
            (masker.num_unended if masker else 0, "trained answers have no end token: the adapter may not stop"),
            (masker.num_other_prompts if masker else 0, "trained answers begin otherwise than this template opens one"),
        ]
        few = [f"only {good} examples: at least {FEW_EXAMPLES} are advisable"] if good < FEW_EXAMPLES else []
        return few + [f"{number} {text}" for number, text in counted if number]


def held_out(index: int, fraction: float, seed: int) -> bool:
    """Whether an example is evaluated instead of trained: of each ``1 / fraction`` in a row one, drawn by hash.

    So the share is exact to one example, and a file with a period in its rows is still split at random.

    Args:
        index: Number of the good row, from 0.
        fraction: Of the examples, 0 to 0.5.
        seed: Of the draw.
    """
    if not fraction:
        return False
    block = int(index * fraction)
    while math.ceil(block / fraction) > index:  # by how much division rounds
        block -= 1
    while math.ceil((block + 1) / fraction) <= index:
        block += 1
    first, end = math.ceil(block / fraction), math.ceil((block + 1) / fraction)
    digest = hashlib.sha256(f"{seed}:{block}".encode()).digest()
    return first + int.from_bytes(digest[:8]) % (end - first) == index


def prepare(settings: PrepareSettings, load: Callable[[], Any]) -> DatasetSummary | ProblemReport:
    """Judge whole files; the data sets are there afterwards only if the job may be trained.

    Args:
        settings: What to prepare.
        load: Gives the tokenizer; called only if a row is well formed.

    Returns:
        The summary, which is on disk then, or the report of everything that is wrong with one of the files.
    """
    load = functools.cache(load)
    source, job_dir = Path(settings.source), Path(settings.job_dir)
    judge = Judge(source, settings.data, settings.max_seq_length, load)
    fraction = settings.validation_split
    with PackedWriter(job_dir) as writer, PackedWriter(job_dir, EVAL_FILE) as eval_writer:
        for index, (_, ids, mask) in enumerate(judge.examples()):
            (eval_writer if held_out(index, fraction, settings.seed) else writer).add(ids, mask)
        if judge.refused or judge.masker is None:
            return judge.report()
        if fraction and not (writer.examples and eval_writer.examples):
            message = (
                f"validation_split {fraction:g} of {writer.examples + eval_writer.examples} examples leaves too few"
            )
            judge.problems.add(Problem(line=None, code="split_too_small", message=message, param="validation_split"))
            return judge.report()
        evaluation = _split_summary(eval_writer, source) if fraction else None
        warnings = judge.warnings()
        if settings.validation is not None:
            other = Judge(Path(settings.validation), settings.data, settings.max_seq_length, load, judge)
            for _, ids, mask in other.examples():
                eval_writer.add(ids, mask)
            if other.refused:
                return msgspec.structs.replace(other.report(), file="validation_file")
            evaluation = _eval_summary(eval_writer, other, Path(settings.validation))
            warnings += [f"validation file: {text}" for text in other.warnings()]
        summary = DatasetSummary(
            sha256=writer.finish(), source_sha256=file_sha256(source), examples=writer.examples, tokens=writer.tokens,
            trainable_tokens=writer.trainable_tokens, longest=writer.longest, max_seq_length=settings.max_seq_length,
            masking=judge.masker.method, format=str(judge.format), skipped=judge.skipped,
            problems=dict(judge.problems.counts), truncated=judge.truncated, warnings=warnings, eval=evaluation,
        )  # fmt: skip
    # it travels with the adapter: an answer is only right in the template that was trained
    if judge.masker.template.source:
        (job_dir / CHAT_TEMPLATE_FILE).write_text(judge.masker.template.source, encoding="utf-8")
    write_summary(job_dir, summary)
    return summary


def _split_summary(writer: PackedWriter, source: Path) -> EvalSummary:
    return EvalSummary(
        sha256=writer.finish(), source_sha256=file_sha256(source), examples=writer.examples, tokens=writer.tokens,
        trainable_tokens=writer.trainable_tokens, longest=writer.longest,
    )  # fmt: skip


def _eval_summary(writer: PackedWriter, judge: Judge, source: Path) -> EvalSummary:
    return msgspec.structs.replace(
        _split_summary(writer, source), skipped=judge.skipped, problems=dict(judge.problems.counts),
        truncated=judge.truncated, overlap=judge.seen.shared,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    """Entry of the child; see the module."""
    settings = msgspec.json.decode(Path(argv[0]).read_bytes(), type=PrepareSettings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    forgo_torch()
    verdict = prepare(settings, lambda: load_tokenizer(Path(settings.model_path)))
    if isinstance(verdict, DatasetSummary):
        return 0
    (Path(settings.job_dir) / PROBLEMS_FILE).write_bytes(msgspec.json.encode(verdict))
    return EXIT_BAD_FILE


def _end_with_parent() -> None:
    # not sys.stdin: a thread blocked in its lock makes the interpreter abort at exit
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
