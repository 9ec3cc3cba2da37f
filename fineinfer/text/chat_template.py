"""Messages -> token ids by the model's own chat template, such that no user text can forge a control token (no torch).

A special token's string inside a message (``<|im_end|>`` typed by a user) is taken out before the template runs, put
back afterwards and encoded as ordinary text. Everything else is encoded in one go, so that for ordinary messages the
ids are exactly those of ``tokenizer.apply_chat_template``. Serving and training-data preparation both use this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the message is for the user."""


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model can chat at all."""
    return bool(tokenizer.chat_template)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: A fast transformers tokenizer with a chat template; used by one thread at a time.
        messages: ``{"role", "content", ...}`` with string contents.
        add_generation_prompt: End with the header of an assistant turn.
        template_kwargs: Extra variables of the template, for example ``enable_thinking``.

    Raises:
        ChatTemplateError: No template, or the template refuses these messages.
    """
    marker = _Marker(tokenizer)
    marked = [{key: marker.mark(value, message["role"]) for key, value in message.items()} for message in messages]
    kwargs = {key: marker.mark(value, "user") for key, value in (template_kwargs or {}).items()}
    return marker.encode(_render(tokenizer, marked, add_generation_prompt, kwargs))


def assistant_spans(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a whole conversation and, for each assistant message, the half-open range of the tokens it generated.

    A range holds what the model would have produced when asked: the content and the end token, not the header of the
    turn and not what the template writes after the end token. Found by rendering prefixes of the conversation.

    Raises:
        ChatTemplateError: A prefix does not render to a prefix (the template rewrites history), so no mask exists.
    """
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(tokenizer, messages[:index], add_generation_prompt=True)
        through = render_chat(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if ids[: len(through)] != through or through[: len(before)] != before:
            raise ChatTemplateError(f"The chat template does not keep messages[{index}] as it was generated.")
        end = len(through)
        eos_id = tokenizer.eos_token_id
        if eos_id is not None and eos_id in through[len(before) :]:
            end -= through[::-1].index(eos_id)
        spans.append((len(before), end))
    return ids, spans


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]
) -> str:
    if not has_chat_template(tokenizer):
        raise ChatTemplateError("The model has no chat template.")
    if not messages:
        raise ChatTemplateError("At least one message is needed.")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except Exception as error:  # a template raises whatever it likes: Jinja errors, TypeError on missing keys, …
        raise ChatTemplateError(f"The chat template refused these messages: {str(error)[:500]}") from error
    return text


class _Marker:
    """Takes control-token strings out of user text, and encodes a rendered text with them as ordinary text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # unguessable, so that user text cannot hold it; the noncharacters keep templates' string methods off it
        self._nonce = secrets.token_hex(8)
        self._place = re.compile(f"\ufdd0{self._nonce}:([0-9]+)\ufdd1")
        self._taken: list[str] = []
        added = list(tokenizer.added_tokens_decoder.values())
        special = [token.content for token in added if token.special] + list(tokenizer.all_special_tokens)
        # Tokens such as <tool_response> or <think> are not flagged special, yet they steer the model: the template
        # writes them. The assistant's own text may hold them (a thinking model's history and training data do).
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        steering = [token.content for token in added if not token.content.isspace() and token.content in template]
        self._special = _any_of(special)
        self._control = _any_of(special + steering)

    def mark(self, value: Any, role: str) -> Any:
        """Replace each control-token string in ``value`` (strings, lists, dicts) by a place holder."""
        if isinstance(value, str):
            pattern = self._special if role == "assistant" else self._control
            return pattern.sub(self._take, value)
        if isinstance(value, Mapping):
            return {key: self.mark(item, role) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, role) for item in value]
        return value

    def _take(self, match: re.Match[str]) -> str:
        self._taken.append(match.group())
        return f"\ufdd0{self._nonce}:{len(self._taken) - 1}\ufdd1"

    def encode(self, rendered: str) -> list[int]:
        """Ids of the rendered text; the strings taken out become ordinary tokens in their places."""
        # [text, index, text, index, …, text]
        pieces = self._place.split(rendered)
        if self._nonce in "".join(pieces):
            raise ChatTemplateError("The chat template cut a control token's text into pieces.")
        ids: list[int] = self._tokenizer.encode(pieces[0], add_special_tokens=False)
        for index in range(1, len(pieces), 2):
            ids += self._encode_inside(self._taken[int(pieces[index])], plain=True)
            ids += self._encode_inside(pieces[index + 1], plain=False)
        return ids

    def _encode_inside(self, text: str, plain: bool) -> list[int]:
        # SentencePiece-like tokenizers put a space before the first word of what they encode: encode after a newline
        # and cut its ids off again
        if not text:
            return []
        head = self._tokenizer.encode("\n", add_special_tokens=False)
        ids: list[int] = self._encode(f"\n{text}", plain)
        ids = ids[len(head) :] if ids[: len(head)] == head else self._encode(text, plain)
        if plain and self._tokenizer.convert_tokens_to_ids(text) in ids:
            raise ChatTemplateError("The tokenizer cannot encode a control token's text as ordinary text.")
        return ids

    def _encode(self, text: str, plain: bool) -> list[int]:
        if plain:
            # only flagged tokens obey split_special_tokens, so go round the added tokens altogether
            backend = self._tokenizer._tokenizer
            text = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
            words = [text]
            if backend.pre_tokenizer is not None:
                words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
            return [token.id for word in words for token in backend.model.tokenize(word)]
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
