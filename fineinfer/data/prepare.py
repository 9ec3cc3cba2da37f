"""The data child: ``python -m fineinfer.data.prepare JOB.json`` validates, templates, tokenises and packs one file.

A process of its own, so that a hostile file can neither stall nor crash the server. It ends when its stdin closes,
that is, with its parent. Exit status 0: dataset.safetensors and dataset.json are complete; 2: problems.json says what
is wrong with the file; anything else: it broke, and stderr says why.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.data.masking import TokenMasker
from fineinfer.data.openai_chat import ChatMessage, RowError, parse_row
from fineinfer.data.packed import DatasetSummary, PackedWriter, write_summary
from fineinfer.data.problems import Problem, ProblemLog, ProblemReport
from fineinfer.data.reader import read_rows
from fineinfer.hashing import file_sha256
from fineinfer.text.chat_template import ChatTemplateError
from fineinfer.text.tokenizer import load_tokenizer

PROBLEMS_FILE = "problems.json"
EXIT_BAD_FILE = 2
FEW_EXAMPLES = 10


class PrepareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told."""

    source: str  # the training file
    job_dir: str  # where the data set goes
    model_path: str  # folder (or .gguf file) with tokenizer and chat template
    max_seq_length: int


def prepare(settings: PrepareSettings, load: Callable[[], Any]) -> DatasetSummary | ProblemReport:
    """Judge the whole file first; write the data set only if every line is good.

    Args:
        settings: What to prepare.
        load: Gives the tokenizer; called only for a well-formed file, since its import takes seconds.

    Returns:
        The summary, which is on disk then, or the report of everything that is wrong.
    """
    source, job_dir = Path(settings.source), Path(settings.job_dir)
    problems = ProblemLog()
    examples = sum(1 for _ in _good_rows(source, problems))
    if not examples and not problems:
        problems.add(Problem(line=None, code="empty_file", message="the file has no rows"))
    if problems:
        return problems.report()
    masker = TokenMasker(load())
    with PackedWriter(job_dir) as writer:
        for line, messages in _good_rows(source, problems):
            try:
                ids, mask = masker.encode(messages)
            except ChatTemplateError as error:
                problems.add(Problem(line=line, code="template_error", message=str(error), param="messages"))
                continue
            if (problem := _token_problem(line, ids, mask, settings.max_seq_length)) is not None:
                problems.add(problem)
            elif not problems:
                writer.add(ids, mask)
        if problems:
            return problems.report()
        summary = DatasetSummary(
            sha256=writer.finish(),
            source_sha256=file_sha256(source),
            examples=writer.examples,
            tokens=writer.tokens,
            trainable_tokens=writer.trainable_tokens,
            longest=writer.longest,
            max_seq_length=settings.max_seq_length,
            masking=masker.method,
            warnings=_warnings(writer.examples, masker),
        )
    write_summary(job_dir, summary)
    return summary


def _good_rows(source: Path, problems: ProblemLog) -> Iterator[tuple[int, list[ChatMessage]]]:
    """(line, messages) of the rows that are well formed; the others are logged."""
    for line, row in read_rows(source):
        if isinstance(row, Problem):
            problems.add(row)
            continue
        try:
            yield line, parse_row(row, line)
        except RowError as error:
            for problem in error.problems:
                problems.add(problem)


def _token_problem(line: int, ids: list[int], mask: list[int], max_seq_length: int) -> Problem | None:
    if len(ids) > max_seq_length:
        message = f"{len(ids)} tokens are more than max_seq_length {max_seq_length}"
        return Problem(line=line, code="too_long", message=message, param="messages")
    if not any(mask[1:]):
        message = "no trainable token is left after the chat template"
        return Problem(line=line, code="no_trainable_tokens", message=message, param="messages")
    return None


def _warnings(examples: int, masker: TokenMasker) -> list[str]:
    warnings = []
    if examples < FEW_EXAMPLES:
        warnings.append(f"only {examples} examples: at least {FEW_EXAMPLES} are advisable")
    if masker.num_unended:
        warnings.append(
            f"{masker.num_unended} trained answers have no end token in this chat template: the adapter may not stop"
        )
    return warnings


def main(argv: list[str]) -> int:
    """Entry of the child; see the module."""
    settings = msgspec.json.decode(Path(argv[0]).read_bytes(), type=PrepareSettings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
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
