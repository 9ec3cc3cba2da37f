"""The formats of training files: which one a file has, and its rows as conversations, texts or tokens.

A file has one format. It is found from the first rows by the fields that only that format has; ``format`` in the job
names it where a file's rows fit two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from fineinfer.data.openai_chat import ChatMessage, openai_messages, parse_messages, parse_tools
from fineinfer.data.problems import Problem, RowCheck, RowError

DETECTION_ROWS = 200
IGNORED_LABEL = -100  # what transformers' losses leave out
_Filled = Annotated[str, msgspec.Meta(min_length=1)]


class Chat(msgspec.Struct, frozen=True):
    """A conversation; the completion begins at message ``completion_start`` if the row says so."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    completion_start: int | None = None


class Text(msgspec.Struct, frozen=True):
    """Raw text without a chat template: a prompt (None: there is none, all is trained) and what follows it."""

    prompt: str | None
    completion: str


class Tokens(msgspec.Struct, frozen=True):
    """Token ids as they are, with a flag each: trained or not."""

    input_ids: list[int]
    loss_mask: list[int]


Example = Chat | Text | Tokens


class _Alpaca(msgspec.Struct):
    instruction: str
    output: _Filled
    input: str | None = None
    system: str | None = None
    history: list[tuple[_Filled, _Filled]] | None = None


class _Tokenized(msgspec.Struct):
    input_ids: list[int]
    labels: list[int] | None = None
    attention_mask: list[int] | None = None


def _openai_chat(row: dict[str, Any], check: RowCheck) -> Chat:
    return _chat(parse_messages(row["messages"], "messages", check), row, check)


def _sharegpt(row: dict[str, Any], check: RowCheck) -> Chat:
    messages = parse_messages(openai_messages(row["conversations"], check), "conversations", check)
    return _chat(_plain([("system", row.get("system"))]) + messages, row, check)


def _prompt_completion(row: dict[str, Any], check: RowCheck) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Text(prompt, check.convert(completion, _Filled, "completion"))
    before = parse_messages(prompt, "prompt", check)
    return _chat(before + parse_messages(completion, "completion", check), row, check, len(before))


def _alpaca(row: dict[str, Any], check: RowCheck) -> Chat:
    """Instruction and input make one user turn, so that it is asked for as it is served (as LLaMA-Factory does)."""
    given = check.convert(row, _Alpaca, "")
    asked = "\n".join(filter(None, (given.instruction, given.input)))
    if not asked:
        check.wrong("empty_content", "instruction", "is empty")
    turns = [*(given.history or ()), (asked, given.output)]
    said = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    messages = _plain([("system", given.system), *said])
    return Chat(messages, completion_start=len(messages) - 1)


def _text(row: dict[str, Any], check: RowCheck) -> Text:
    return Text(None, check.convert(row["text"], _Filled, "text"))


def _tokenized(row: dict[str, Any], check: RowCheck) -> Tokens:
    given = check.convert(row, _Tokenized, "")
    ids = given.input_ids
    for key, values in (("labels", given.labels), ("attention_mask", given.attention_mask)):
        if values is not None and len(values) != len(ids):
            check.refuse("invalid_length", f"{key} has {len(values)} entries, input_ids {len(ids)}", key)
    if not all(given.attention_mask or ()):
        check.wrong("padded", "attention_mask", "must be all 1: rows are packed, so padding only costs time")
    labels = ids if given.labels is None else given.labels
    if any(label not in (token, IGNORED_LABEL) for label, token in zip(labels, ids, strict=True)):
        check.wrong("invalid_labels", "labels", f"must equal input_ids or be {IGNORED_LABEL} (they are not shifted)")
    return Tokens(ids, [int(label != IGNORED_LABEL) for label in labels])


class Format(NamedTuple):
    """How rows of a format look: the fields that tell, the others it reads, the parser."""

    signs: tuple[str, ...]
    others: tuple[str, ...]
    parse: Callable[[dict[str, Any], RowCheck], Example]


_TOOLS = ("tools", "parallel_tool_calls", "functions")
FORMATS: dict[str, Format] = {
    "openai_chat": Format(("messages",), _TOOLS, _openai_chat),
    "prompt_completion": Format(("prompt", "completion"), _TOOLS, _prompt_completion),
    "alpaca": Format(("instruction", "output"), ("input", "system", "history"), _alpaca),
    "sharegpt": Format(("conversations",), (*_TOOLS, "system"), _sharegpt),
    "text": Format(("text",), (), _text),
    "tokenized": Format(("input_ids",), ("labels", "attention_mask"), _tokenized),
}
_PREFERENCE = ("chosen", "rejected", "preferred_output")


def formats_of(row: Any) -> list[str]:
    """The formats whose fields a row has."""
    if not isinstance(row, dict):
        return []
    return [name for name, form in FORMATS.items() if all(row.get(key) is not None for key in form.signs)]


def detect_format(rows: Iterable[tuple[int, Any]]) -> str | Problem:
    """The one format of a file, from its first rows as ``read_rows`` gives them; or why there is none."""
    seen = [(line, row) for line, row in itertools.islice(rows, DETECTION_ROWS) if not isinstance(row, Problem)]
    if not seen:  # no rows, or none that can be read: each of them will say so
        return "openai_chat"
    found: dict[tuple[str, ...], int] = {}  # the formats that a row fits -> the first such line
    for line, row in seen:
        found.setdefault(tuple(formats_of(row)), line)
    sure = [fitting for fitting in found if len(fitting) == 1]
    if len(sure) == 1:
        return sure[0][0]
    if torn := sure[:2] or [fitting for fitting in found if fitting][:1]:
        names = " and ".join(itertools.chain(*torn))
        message = f"the rows up to here have the formats {names}: a file has one; `format` may say which"
        return Problem(line=found[torn[-1]], code="ambiguous_format", message=message)
    line, row = seen[0]
    message = f"the row fits none of {'; '.join(f'{name}: ' + '+'.join(form.signs) for name, form in FORMATS.items())}"
    if isinstance(row, dict) and any(key in row for key in _PREFERENCE):
        message = "the row holds a preference (DPO), and only supervised training is supported"
    return Problem(line=line, code="unknown_format", message=message)


def parse_row(row: Any, line: int, name: str, *, alone: bool = True, notes: Counter[str] | None = None) -> Example:
    """Check one row and say what is trained.

    Args:
        row: A JSON value.
        line: Its line number.
        name: The file's format.
        alone: Refuse rows that fit another format too; off where the user named the format.
        notes: Counts what is odd and accepted.

    Raises:
        RowError: With the problems of the row.
    """
    check = RowCheck(line, Counter() if notes is None else notes)
    row = check.convert(row, dict[str, Any], "")
    form = FORMATS[name]
    for other in formats_of(row) if alone else ():
        if other != name:
            message = f"the row has the format {other}, the file {name}: a file has one format"
            check.refuse("ambiguous_format", message, FORMATS[other].signs[0])
    for key in form.signs:
        if row.get(key) is None:
            check.refuse("missing_field", f"'{key}' is {'null' if key in row else 'missing'}", key)
    for key in row.keys() - {*form.signs, *form.others}:
        check.note(f"the field '{key[:40]}' is not used")
    example = form.parse(row, check)
    if check.problems:
        raise RowError(check.problems)
    return example


def _chat(messages: list[ChatMessage], row: dict[str, Any], check: RowCheck, start: int | None = None) -> Chat:
    """The conversation, after the checks that need all of it."""
    parallel = check.convert(row.get("parallel_tool_calls"), bool | None, "parallel_tool_calls")
    if parallel is False and any(len(message.plain.get("tool_calls", ())) > 1 for message in messages):
        check.wrong("parallel_tool_calls", "parallel_tool_calls", "is false, but a message has more than one call")
    tools, last = parse_tools(row, check), messages[-1].role
    where = next(key for key in ("messages", "conversations", "completion") if key in row)
    if last != "assistant" and not check.problems:
        check.refuse("last_not_assistant", f"the last message must be the assistant's, not the {last}'s", where)
    if not any(message.train for message in messages) and not check.problems:
        check.refuse("no_trainable_tokens", "every assistant message has weight 0", where)
    return Chat(messages, tools, start)


def _plain(said: list[tuple[str, str | None]]) -> list[ChatMessage]:
    return [ChatMessage({"role": role, "content": text}, role == "assistant") for role, text in said if text]
