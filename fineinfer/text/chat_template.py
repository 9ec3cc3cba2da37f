"""Messages -> token ids by the model's own chat template, such that no user text can forge a control token (no torch).

A special token's string inside a message (``<|im_end|>`` typed by a user) is taken out before the template runs, put
back afterwards and encoded as ordinary text. Everything else is encoded in one go, so that for ordinary messages the
ids are exactly those of ``tokenizer.apply_chat_template``. Serving and training-data preparation both use this, so a
model is trained on the very ids that it is asked with.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
    source: str | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: A fast transformers tokenizer with a chat template; used by one thread at a time.
        messages: ``{"role", "content", ...}`` with string contents.
        add_generation_prompt: End with the header of an assistant turn.
        template_kwargs: Extra variables of the template, for example ``enable_thinking`` or ``tools``.
        source: Another template than the tokenizer's: the one that an adapter was trained in.

    Raises:
        ChatTemplateError: No template, or the template refuses these messages.
    """
    conversation = Conversation(ChatTemplate(tokenizer, source), messages, template_kwargs or {})
    return conversation.encode(conversation.text(add_generation_prompt=add_generation_prompt))[0]


class ChatTemplate:
    """The chat template of a tokenizer, ready to render many conversations.

    Args:
        tokenizer: A fast transformers tokenizer; used by one thread at a time.
        source: Jinja text of another template than the tokenizer's own.

    Attributes:
        tokenizer: The same.
        foreign: ``source`` as given.
        source: The template's Jinja text; empty if the model has none.
    """

    def __init__(self, tokenizer: Any, source: str | None = None) -> None:
        self.tokenizer, self.foreign = tokenizer, source
        given = source or tokenizer.chat_template or ""
        self.source: str = given if isinstance(given, str) else given.get("default", "")
        self._backend = tokenizer._tokenizer
        # settings that tokenizer.json or an earlier caller may have left
        self._backend.no_truncation()
        self._backend.no_padding()
        # unguessable, so that user text cannot hold it; the noncharacters keep templates' string methods off it
        self.nonce = secrets.token_hex(8)
        self.place = re.compile(f"\ufdd0{self.nonce}:([0-9]+)\ufdd1")
        added = list(tokenizer.added_tokens_decoder.values())
        special = [token.content for token in added if token.special] + list(tokenizer.all_special_tokens)
        # Tokens such as <tool_response> or <think> are not flagged special, yet they steer the model: the template
        # writes them. The assistant's own text may hold them (a thinking model's history and training data do).
        steering = [token.content for token in added if not token.content.isspace() and token.content in self.source]
        self.special = _any_of(special)
        self.control = _any_of(special + steering)

    def encode(self, text: str) -> tuple[list[int], Sequence[int]]:
        """Ids of a text and, for each, where it ends in the text, in characters."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        return encoded.ids, _Ends(encoded)

    def encode_inside(self, text: str) -> tuple[list[int], Sequence[int]]:
        """The same for a text that follows another one.

        SentencePiece-like tokenizers put a space before the first word of what they encode: encode after a character
        and cut its ids off again, unless it joins the text's own first ones.
        """
        if not text:
            return [], []
        for lead in "\n0":
            head = self.encode(lead)[0]
            ids, ends = self.encode(lead + text)
            if ids[: len(head)] == head:
                return ids[len(head) :], [end - 1 for end in ends][len(head) :]
        return self.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a control token's text as ordinary tokens.

        Raises:
            ChatTemplateError: This tokenizer knows it only as the token.
        """
        head = self.encode("\n")[0]
        ids = self._model_ids(f"\n{text}")
        ids = ids[len(head) :] if ids[: len(head)] == head else self._model_ids(text)
        if self.tokenizer.convert_tokens_to_ids(text) in ids:
            raise ChatTemplateError("The tokenizer cannot encode a control token's text as ordinary text.")
        return ids

    def _model_ids(self, text: str) -> list[int]:
        # only flagged tokens obey split_special_tokens, so go round the added tokens altogether
        backend = self._backend
        text = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


class _Ends(Sequence[int]):
    """Where the tokens of an encoding end; masks ask for few of them, so no list is made (a tenth of a row's time)."""

    def __init__(self, encoded: Any) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: Any) -> Any:
        return self._encoded.token_to_chars(index)[1]

    def __iter__(self) -> Iterator[int]:
        return (end for _, end in self._encoded.offsets)


class Conversation:
    """Messages with place holders for the control-token strings in them.

    The texts it renders, of all messages or of the first ones, can be compared with each other and encoded.

    Args:
        template: The model's.
        messages: See ``render_chat``.
        variables: Extra variables of the template.
    """

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> None:
        self._template = template
        self._taken: list[str] = []
        self._messages = [
            {key: self._mark(value, message["role"]) for key, value in message.items()} for message in messages
        ]
        self._variables = {key: self._mark(value, "user") for key, value in variables.items()}

    def text(
        self, num_messages: int | None = None, *, add_generation_prompt: bool = False, blank: int | None = None
    ) -> str:
        """What the template makes of the first ``num_messages`` (None: all) messages.

        The content of message ``blank`` is left out, so that the text differs from the whole where that content begins.

        Raises:
            ChatTemplateError: No template, no messages, or the template refuses them.
        """
        messages, tokenizer = self._messages[:num_messages], self._template.tokenizer
        if blank is not None:
            messages[blank] = {**messages[blank], "content": self._template.nonce}
        if not self._template.source:
            raise ChatTemplateError("The model has no chat template.")
        if not messages:
            raise ChatTemplateError("At least one message is needed.")
        try:
            text: str = tokenizer.apply_chat_template(
                messages,
                chat_template=self._template.foreign,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template raises whatever it likes: Jinja errors, TypeError on missing keys, …
            raise ChatTemplateError(f"The chat template refused these messages: {str(error)[:500]}") from error
        return text

    def encode(self, text: str) -> tuple[list[int], Sequence[int]]:
        """Ids of a rendered text, the strings taken out as ordinary tokens in their places; and each id's end in it.

        Raises:
            ChatTemplateError: The template cut a place holder to pieces.
        """
        template, position = self._template, 0
        if template.nonce not in text:
            return template.encode(text)
        ids: list[int] = []
        ends: list[int] = []
        for match in [*template.place.finditer(text), None]:
            piece = text[position : len(text) if match is None else match.start()]
            if template.nonce in piece:
                raise ChatTemplateError("The chat template cut a control token's text into pieces.")
            more, places = template.encode_inside(piece) if position else template.encode(piece)
            ids += more
            ends += [position + place for place in places]
            if match is not None:
                plain = template.encode_plain(self._taken[int(match[1])])
                position = match.end()
                ids += plain
                ends += [position] * len(plain)
        return ids, ends

    def _mark(self, value: Any, role: str) -> Any:
        """Replace each control-token string in ``value`` (strings, lists, dicts) by a place holder."""
        if isinstance(value, str):
            pattern = self._template.special if role == "assistant" else self._template.control
            return pattern.sub(self._take, value)
        if isinstance(value, Mapping):
            return {self._mark(key, role): self._mark(item, role) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, role) for item in value]
        return value

    def _take(self, match: re.Match[str]) -> str:
        self._taken.append(match.group())
        return f"\ufdd0{self._template.nonce}:{len(self._taken) - 1}\ufdd1"


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
