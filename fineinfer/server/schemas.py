"""Request bodies with OpenAI's and vLLM's field names, and the rules that types alone cannot say.

Fields that are known but not implemented are declared as ``Any`` and refused by name when they would change the answer:
ignoring them in silence would be misbehaviour. Unknown fields are accepted, as OpenAI's SDK passes anything through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from fineinfer.request import MAX_LOGPROBS, InvalidRequestError, SamplingParams
from fineinfer.server.errors import ApiError, unsupported_parameter

MAX_N = 8
MAX_STOP_STRINGS = 8
MAX_STOP_CHARS = 128
MAX_SEQUENCES = 1024
MAX_PRIORITY = 100
BATCH_PRIORITY = 1
DEFAULT_COMPLETION_TOKENS = 16

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(msgspec.Struct, kw_only=True):
    """One chat message; content parts are joined, only text parts are known."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    tool_call_id: Any = None


class _Sampled(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    # known, not implemented
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    best_of: int | None = None
    prompt_embeds: Any = None


class ChatRequest(_Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known, not implemented
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    thinking_token_budget: Any = None
    store: Any = None
    echo: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None


class CompletionRequest(_Sampled, kw_only=True):
    """POST /v1/completions. ``prompt`` is text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    # known, not implemented
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    chat_template: Any = None
    continue_final_message: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# Values (besides null, false and empty) with which a field that is not implemented changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "length_penalty": (1, 1.0),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
_NOT_IMPLEMENTED = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "use_beam_search", "length_penalty", "early_stopping", "bad_words", "allowed_token_ids", "truncate_prompt_tokens",
    "prompt_embeds", "tools", "tool_choice", "functions", "function_call", "audio", "modalities",
    "moderation", "web_search_options", "reasoning_effort", "thinking_token_budget", "store", "echo", "chat_template",
    "continue_final_message", "documents", "suffix",
)  # fmt: skip
# arguments of apply_chat_template and of the template itself that a client must not set by chat_template_kwargs
_TEMPLATE_RESERVED = frozenset({
    "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """How the answer is shown.

    Attributes:
        n: Sequences for each prompt.
        stops: Stop strings.
        include_stop: Show the stop string that matched.
        include_usage: One last chunk with the usage.
        continuous_usage: Usage on every chunk.
    """

    n: int
    stream: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def refuse_not_implemented(body: msgspec.Struct) -> None:
    """400 ``unsupported_parameter`` for the first field that asks for something this server does not do."""
    for name in _NOT_IMPLEMENTED:
        value = getattr(body, name, None)
        if name == "echo" and isinstance(body, CompletionRequest):
            continue
        if value not in (None, False, "", [], {}) and value not in _NEUTRAL.get(name, ()):
            raise unsupported_parameter(name)


def output_options(body: ChatRequest | CompletionRequest) -> OutputOptions:
    """Check and collect what concerns the answer's form.

    Raises:
        InvalidRequestError: A value is out of its limits.
    """
    refuse_not_implemented(body)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {n}.", "n")
    if body.best_of is not None and body.best_of != n:
        raise unsupported_parameter("best_of", "other than n is not supported by this server")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed with stream=true.", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs are not available with stream=true.", "prompt_logprobs")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOP_STRINGS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequestError(
            f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters.", "stop"
        )
    options = body.stream_options or StreamOptions()
    return OutputOptions(
        n=n,
        stream=bool(body.stream),
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
    )


def scheduling_priority(body: ChatRequest | CompletionRequest) -> int:
    """vLLM's ``priority`` (lower is served earlier); without it OpenAI's ``service_tier``, of which "flex" is batch."""
    if body.priority is not None:
        return body.priority
    return BATCH_PRIORITY if body.service_tier == "flex" else 0


def sampling_params(
    body: ChatRequest | CompletionRequest, vocab_size: int, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The engine's sampling parameters, checked.

    Args:
        max_tokens: From the field that the route uses.
        logprobs: Number of alternatives for each token, or None.

    Raises:
        InvalidRequestError: A value is out of range; its name is the request's field name.
    """
    given: dict[str, Any] = {
        name: getattr(body, name)
        for name in (
            "min_tokens", "temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "ignore_eos", "prompt_logprobs",
        )
    }  # fmt: skip
    given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's old way of saying "all"
    given["logit_bias"] = _logit_bias(body.logit_bias)
    given["stop_token_ids"] = tuple(body.stop_token_ids or ())
    given["max_tokens"], given["logprobs"] = max_tokens, logprobs
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    params.check(vocab_size)
    return params


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    for key in given or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError("The keys of logit_bias must be token ids.", "logit_bias")
    return {int(key): bias for key, bias in (given or {}).items()}


def chat_logprobs(body: ChatRequest) -> int | None:
    """``logprobs`` and ``top_logprobs`` of chat -> number of alternatives, or None."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}.", "top_logprobs")
    return top if body.logprobs else None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Checked messages as chat templates expect them.

    Raises:
        ApiError: Content that is no text, or something only tool calling needs.
    """
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported_parameter(f"{path}.role", f"'{message.role}' is not supported by this server")
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise unsupported_parameter(f"{path}.{name}")
    if message.content is None:
        raise ApiError(400, "content must be a string or a list of text parts.", param=f"{path}.content")
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": _text_of(message.content, f"{path}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _text_of(content: str | list[dict[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise unsupported_parameter(f"{path}[{index}].type", "must be 'text': other content is not supported")
        text = part.get("text")
        if not isinstance(text, str):
            raise ApiError(400, "text must be a string.", param=f"{path}[{index}].text")
        texts.append(text)
    return "".join(texts)


def template_kwargs(given: dict[str, Any] | None, tokenizer: Any) -> Mapping[str, Any]:
    """``chat_template_kwargs``, as far as they only switch what the model's own template offers.

    Raises:
        InvalidRequestError: A name that would change how the template is run.
    """
    for name in given or ():
        if name in _TEMPLATE_RESERVED or name in tokenizer.special_tokens_map:
            raise InvalidRequestError(f"'{name[:100]}' cannot be set.", "chat_template_kwargs")
    return given or {}


def completion_prompts(prompt: str | list[str | int | list[int]] | None) -> list[str] | list[list[int]]:
    """``prompt`` in its four forms -> texts or lists of token ids, none empty.

    Raises:
        InvalidRequestError: Empty, mixed or too many.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompt = [prompt]  # type: ignore[list-item]
    if not prompt or not all(prompt):
        raise InvalidRequestError("The prompt must not be empty.", "prompt")
    if len(prompt) > MAX_SEQUENCES:
        raise InvalidRequestError(f"At most {MAX_SEQUENCES} prompts are allowed.", "prompt")
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt  # type: ignore[return-value]
    raise InvalidRequestError("prompt must be a text, texts, token ids or lists of token ids.", "prompt")
