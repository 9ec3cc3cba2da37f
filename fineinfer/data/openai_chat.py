"""Checks rows of the OpenAI chat format: ``{"messages": [{"role", "content", "weight"?}, …]}``."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from fineinfer.data.problems import Problem

ROLES = ("system", "developer", "user", "assistant")
_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant"}
_OTHER_FORMATS = {
    "prompt": "prompt/completion",
    "completion": "prompt/completion",
    "instruction": "Alpaca",
    "conversations": "ShareGPT",
    "text": "plain text",
    "chosen": "preference",
    "preferred_output": "preference",
    "input_ids": "pre-tokenised",
}
_ROW_KEYS_REFUSED = ("tools", "functions")
_MESSAGE_KEYS_REFUSED = ("tool_calls", "function_call", "tool_call_id")


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; ``train`` says whether its tokens carry loss."""

    role: str
    content: str
    train: bool
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        """The form chat templates take, the same as for served requests."""
        plain = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return plain if self.name is None else {**plain, "name": self.name}


class RowError(ValueError):
    """A row that cannot be trained on; ``problems`` says why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def parse_row(row: Any, line: int) -> list[ChatMessage]:
    """Check one row and turn it into messages.

    Raises:
        RowError: With every problem of the row, not only the first.
    """
    if not isinstance(row, dict):
        raise _refuse(line, "not_an_object", f"a row must be a JSON object, not {_kind(row)}")
    raw = row.get("messages")
    other = next((key for key in _OTHER_FORMATS if row.get(key) is not None), None)
    if raw is None:
        looks = f"; '{other}' looks like the {_OTHER_FORMATS[other]} format" if other else ""
        raise _refuse(line, "missing_messages", f"'messages' is missing{looks}", "messages")
    if other is not None:
        message = f"the row has both 'messages' and '{other}' ({_OTHER_FORMATS[other]}); use one format"
        raise _refuse(line, "ambiguous_format", message, other)
    for key in _ROW_KEYS_REFUSED:
        if row.get(key):
            raise _refuse(line, "unsupported_field", f"'{key}' is not supported yet", key)
    if not isinstance(raw, list) or not raw:
        raise _refuse(line, "invalid_type", f"messages must be a non-empty list, not {_kind(raw)}", "messages")
    problems: list[Problem] = []
    messages = [_message(item, line, f"messages[{i}]", problems) for i, item in enumerate(raw)]
    if problems:
        raise RowError(problems)
    if messages[-1].role != "assistant":
        message = f"the last message must be the assistant's, not the {messages[-1].role}'s"
        raise _refuse(line, "last_not_assistant", message, f"messages[{len(messages) - 1}].role")
    if not any(message.train for message in messages):
        raise _refuse(line, "no_trainable_tokens", "every assistant message has weight 0", "messages")
    return messages


def _message(item: Any, line: int, param: str, problems: list[Problem]) -> ChatMessage:
    """The message; what is wrong with it is appended to ``problems``."""

    def wrong(code: str, text: str, field: str | None = None) -> None:
        where = param if field is None else f"{param}.{field}"
        problems.append(Problem(line=line, code=code, message=f"{where} {text}", param=where))

    if not isinstance(item, dict):
        wrong("invalid_type", f"must be an object, not {_kind(item)}")
        return ChatMessage("user", "", False)
    for key in _MESSAGE_KEYS_REFUSED:
        if item.get(key) is not None:
            wrong("unsupported_field", "is not supported yet", key)
    role, weight = item.get("role"), item.get("weight")
    if role is None:
        wrong("missing_role", "is missing", "role")
    elif not isinstance(role, str):
        wrong("invalid_type", f"must be a string, not {_kind(role)}", "role")
    elif role not in ROLES:
        near = _ALIASES.get(role.lower()) or next(iter(difflib.get_close_matches(role.lower(), ROLES, n=1)), None)
        hint = f' (did you mean "{near}"?)' if near else ""
        wrong("invalid_role", f'"{role[:40]}" is not one of {"|".join(ROLES)}{hint}', "role")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        wrong("invalid_weight", f"must be 0 or 1, not {msgspec.json.encode(weight).decode()[:40]}", "weight")
    elif weight is not None and role != "assistant":
        wrong("invalid_weight", "is only allowed on assistant messages", "weight")
    content = _content(item, wrong)
    if content == "" and role in ("user", "assistant"):
        wrong("empty_content", "is empty", "content")
    name = item.get("name")
    if name is not None and not isinstance(name, str):
        wrong("invalid_type", f"must be a string, not {_kind(name)}", "name")
        name = None
    return ChatMessage(str(role), content or "", role == "assistant" and weight != 0, name)


def _content(item: dict[str, Any], wrong: Any) -> str | None:
    """Text of the message; a list of ``{"type": "text", "text"}`` parts is joined."""
    content = item.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            wrong("invalid_type", 'may only have parts {"type": "text", "text": …}', "content")
            return None
        return "".join(str(text) for text in texts)
    if content is None:
        wrong("missing_content", "is null" if "content" in item else "is missing", "content")
        return None
    if not isinstance(content, str):
        wrong("invalid_type", f"must be a string, not {_kind(content)}", "content")
        return None
    return content


def _refuse(line: int, code: str, message: str, param: str | None = None) -> RowError:
    return RowError([Problem(line=line, code=code, message=message, param=param)])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")
