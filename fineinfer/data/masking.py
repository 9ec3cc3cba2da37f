"""Which tokens of a conversation carry loss: what the assistant said and the token that ends its turn.

With ``{% generation %}`` marks in the chat template the marks decide. Without them the conversation is rendered up to
each assistant message, and the longest common token prefix with the whole tells where the answer begins; it goes up
to the first end token. Control tokens are safe landmarks, since text can never encode to them (text/chat_template.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fineinfer.data.openai_chat import ChatMessage
from fineinfer.text.chat_template import ChatTemplateError, render_chat

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# How chat models end a turn, where it is not the tokenizer's own end token.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>")
_MERGED_TOKENS = 2  # the last tokens of a prompt may merge with the first characters of the answer


class TokenMasker:
    """Turns conversations into token ids and a loss mask.

    Args:
        tokenizer: A fast transformers tokenizer with a chat template.

    Attributes:
        method: ``generation_marks`` or ``prefix``.
        num_unended: Trained messages without an end token so far; a model trained on them may not stop.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        marked = isinstance(tokenizer.chat_template, str) and _GENERATION_MARK.search(tokenizer.chat_template)
        self.method = "generation_marks" if marked else "prefix"
        self.num_unended = 0
        special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._end_ids = {special[text] for text in _END_TOKENS if text in special}
        if tokenizer.eos_token_id is not None:
            self._end_ids.add(tokenizer.eos_token_id)

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
        """(input_ids, loss_mask) of one conversation; mask 1 at t: token t is a target.

        What follows the last target is cut off: no loss depends on it.

        Raises:
            ChatTemplateError: The template refuses the messages or does not tell where an answer begins.
        """
        plain = [message.as_dict() for message in messages]
        ids = render_chat(self._tokenizer, plain, False)
        spans = self._marked_spans(plain, ids) if self.method == "generation_marks" else None
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        mask = [0] * len(ids)
        for number, index in enumerate(answers):
            if not messages[index].train:
                continue
            if spans is not None and len(spans) == len(answers):
                start, end = spans[number]
            else:
                start, end = self._prefix_span(plain, ids, index)
            self.num_unended += ids[end - 1] not in self._end_ids
            mask[start:end] = [1] * (end - start)
        length = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
        return ids[:length], mask[:length]

    def _marked_spans(self, plain: list[dict[str, str]], ids: list[int]) -> list[tuple[int, int]] | None:
        """Half-open ranges inside the template's generation marks, the end token behind each included."""
        encoded = self._tokenizer.apply_chat_template(
            plain, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if encoded["input_ids"] != ids:  # a control token's string was in the text: the safe ids count
            return None
        flags = [*encoded["assistant_masks"], 0]
        spans, start = [], None
        for position, flag in enumerate(flags):
            if flag and start is None:
                start = position
            elif not flag and start is not None:
                end = position
                if ids[end - 1] not in self._end_ids and end < len(ids) and ids[end] in self._end_ids:
                    end += 1
                spans.append((start, end))
                start = None
        return spans

    def _prefix_span(self, plain: list[dict[str, str]], ids: list[int], index: int) -> tuple[int, int]:
        """Half-open range of assistant message ``index``."""
        if index == 0:
            raise ChatTemplateError("messages[0] is the assistant's: put a message before it or give it weight 0.")
        before = render_chat(self._tokenizer, plain[:index], True)
        start = _common_prefix(ids, before)
        if start < len(before) - _MERGED_TOKENS:
            raise ChatTemplateError(f"The chat template changes what stands before messages[{index}] later on.")
        through = render_chat(self._tokenizer, plain[: index + 1], False) if index + 1 < len(plain) else ids
        limit = _common_prefix(ids, through)
        if limit <= start:  # the template shortens older answers (thinking models): only the end token can tell
            limit = len(ids)
        end = next((position + 1 for position in range(start, limit) if ids[position] in self._end_ids), limit)
        return start, end


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))
