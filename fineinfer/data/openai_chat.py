"""Chat messages of training rows: OpenAI's, with tool calls and weights, and ShareGPT's, which are made OpenAI's."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

import msgspec

from fineinfer.data.problems import RowCheck

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "ai": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool",
    "function_response": "tool", **{role: role for role in ROLES},
}  # fmt: skip

_Name = Annotated[str, msgspec.Meta(min_length=1)]


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: _Name
    arguments: str | dict[str, Any]


class _Call(msgspec.Struct):
    id: _Name
    function: _Function


class _Message(msgspec.Struct):
    """A message as the file has it; ``train`` is axolotl's name for ``weight``."""

    role: str | None = None
    content: str | list[_Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    weight: float | None = None
    train: bool | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class _ToolFunction(msgspec.Struct):
    name: _Name
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction


class ChatMessage(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        plain: What chat templates take, the same as for served requests; arguments of tool calls are objects.
        train: Whether its tokens carry loss; only the assistant's may.
    """

    plain: dict[str, Any]
    train: bool

    @property
    def role(self) -> str:
        """system, user, assistant or tool."""
        return str(self.plain["role"])


def parse_messages(items: Any, where: str, check: RowCheck) -> list[ChatMessage]:
    """The messages of a list; what is wrong with their content goes to the check.

    Raises:
        RowError: Something has a wrong type.
    """
    given = check.convert(items, Annotated[list[_Message], msgspec.Meta(min_length=1)], where)
    call_ids: set[str] = set()
    return [_checked(message, f"{where}[{index}]", check, call_ids) for index, message in enumerate(given)]


def _checked(message: _Message, where: str, check: RowCheck, call_ids: set[str]) -> ChatMessage:
    def wrong(code: str, field: str, text: str) -> None:
        check.wrong(code, f"{where}.{field}", text)

    role, text = message.role, message.content
    if role is None:
        wrong("missing_role", "role", "is missing")
    elif role not in ROLES:
        close = difflib.get_close_matches(role.lower()[:40], ROLES, n=1)
        near = SHAREGPT_ROLES.get(role.lower()) or next(iter(close), None)
        hint = f' (did you mean "{near}"?)' if near else ""
        wrong("invalid_role", "role", f'"{role[:40]}" is not one of {"|".join(ROLES)}{hint}')
    if isinstance(text, list):
        text = "".join(part.text for part in text)
    if text is None and not message.tool_calls:
        wrong("missing_content", "content", "is missing or null")
    elif text == "" and not message.tool_calls and role in ("user", "assistant"):
        wrong("empty_content", "content", "is empty")
    if message.weight not in (None, 0, 1):
        wrong("invalid_weight", "weight", f"must be 0 or 1, not {message.weight:g}")
    if role != "assistant":
        for key in ("weight", "train", "tool_calls"):
            if getattr(message, key):
                wrong("not_assistant", key, "is only allowed on assistant messages")
    if message.function_call is not None:
        wrong("unsupported_field", "function_call", "is not supported; use tool_calls")
    # templates write None as a word
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text or ""}
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]", check)
                               for index, call in enumerate(message.tool_calls)]  # fmt: skip
        call_ids |= {call.id for call in message.tool_calls}
    if role == "tool":
        plain["tool_call_id"] = message.tool_call_id
        if message.tool_call_id not in call_ids:
            wrong("unknown_tool_call", "tool_call_id", "is no id of a tool call before it")
    for key in ("name", "reasoning_content"):
        if getattr(message, key) is not None:
            plain[key] = getattr(message, key)
    return ChatMessage(plain, role == "assistant" and message.weight != 0 and message.train is not False)


def _tool_call(call: _Call, where: str, check: RowCheck) -> dict[str, Any]:
    """With the arguments as an object: templates write it as JSON themselves, and would quote a string once more."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        arguments = check.decode(arguments, f"{where}.function.arguments")
        check.convert(arguments, dict[str, Any], f"{where}.function.arguments")
    else:
        check.note("arguments of a tool call is an object, which OpenAI takes only as a JSON string")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def openai_messages(items: Any, check: RowCheck) -> Any:
    """ShareGPT's ``from`` and ``value`` -> messages for ``parse_messages``, which refuses what is no message.

    A ``function_call`` holds ``{"name", "arguments"}`` or a list of them as JSON, and ``observation`` its results.
    """
    if not isinstance(items, list):
        return items
    messages: list[Any] = []
    calls: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            return items
        role, value = item.get("from", item.get("role")), item.get("value", item.get("content"))
        message = {**item, "role": SHAREGPT_ROLES.get(role.lower(), role) if isinstance(role, str) else role}
        message["content"] = value
        if role == "function_call":
            decoded = check.decode(value, f"conversations[{index}].value") if isinstance(value, str) else value
            decoded = decoded if isinstance(decoded, list) else [decoded]
            calls = [{"id": f"call_{index}_{number}", "function": call} for number, call in enumerate(decoded)]
            message |= {"content": None, "tool_calls": calls}
        elif message["role"] == "tool" and calls:
            message.setdefault("tool_call_id", calls[0]["id"])
            calls = calls[1:] or calls
        messages.append(message)
    return messages


def parse_tools(row: dict[str, Any], check: RowCheck) -> list[dict[str, Any]] | None:
    """``tools`` of a row, each as ``{"type": "function", "function": {"name", …}}``; ShareGPT has them as JSON text."""
    if row.get("functions") is not None:
        check.wrong("unsupported_field", "functions", "is not supported; use tools")
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        tools = check.decode(tools, "tools")
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [tool if not isinstance(tool, dict) or "function" in tool else {"type": "function", "function": tool}
                 for tool in tools]  # fmt: skip
    check.convert(tools, list[_Tool], "tools")
    made: list[dict[str, Any]] = tools
    return made
