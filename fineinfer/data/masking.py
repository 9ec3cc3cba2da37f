"""Which tokens of an example carry loss: by default what the assistant said and the token that ends its turn.

With ``{% generation %}`` marks in the chat template the marks decide. Without them the conversation is rendered up to
each assistant message, as text, and where that prompt ends in the whole the answer begins. It goes up to its last end
token. Control tokens are safe landmarks, since text can never encode to them (text/chat_template.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

from fineinfer.data.formats import Chat, Example, Text, Tokens
from fineinfer.text.chat_template import ChatTemplate, ChatTemplateError, Conversation
from fineinfer.text.tokenizer import encode_text

TRAIN_ON = ("assistant", "last_assistant", "completion", "all")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# How chat models end a turn, where it is not the tokenizer's own end token.
_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>", "<|endoftext|>", "<|end_of_text|>", "</s>",
)  # fmt: skip


class TokenMasker:
    """Turns examples into token ids and a loss mask.

    Args:
        tokenizer: A fast transformers tokenizer.
        train_on: One of TRAIN_ON: every answer of the assistant, its last one, what the row has as completion (in a
            conversation: the answers after the last user message), or all tokens. None: ``completion`` where the row
            has one, else ``assistant``. The weights of single messages hold besides.
        longest: Tokens behind this place are cut off or refused later, so it does not matter which of them are trained.

    Attributes:
        template: The chat template.
        method: ``generation_marks`` or ``prefix``.
        num_unended: Trained messages without an end token so far; a model trained on them may not stop.
        num_other_prompts: Trained messages so far that follow something else than what a request would end with.
    """

    def __init__(self, tokenizer: Any, train_on: str | None = None, longest: int = 1 << 30) -> None:
        self._tokenizer, self._train_on, self._longest = tokenizer, train_on, longest
        self.template = ChatTemplate(tokenizer)
        self.method = "generation_marks" if _GENERATION_MARK.search(self.template.source) else "prefix"
        self.num_unended = self.num_other_prompts = 0
        special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._end_ids = {special[text] for text in _END_TOKENS if text in special}
        if tokenizer.eos_token_id is not None:
            self._end_ids.add(tokenizer.eos_token_id)

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """(input_ids, loss_mask) of one example; mask 1 at t: token t is a target.

        What follows the last target is cut off: no loss depends on it.

        Raises:
            ChatTemplateError: The template refuses the messages or does not tell where an answer begins; or an id is
                no token.
        """
        read: dict[type[Example], Any] = {Chat: self._chat, Text: self._text, Tokens: self._tokens}
        ids, mask = read[type(example)](example)
        mask = [0, *mask[1:]]  # nothing stands before the first token to predict it from
        length = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
        return ids[:length], mask[:length]

    def _tokens(self, example: Tokens) -> tuple[list[int], list[int]]:
        if not all(0 <= token < len(self._tokenizer) for token in example.input_ids):
            raise ChatTemplateError(f"input_ids must be tokens of the model, 0 to {len(self._tokenizer) - 1}.")
        return example.input_ids, example.loss_mask

    def _text(self, example: Text) -> tuple[list[int], list[int]]:
        """The ids that ``/v1/completions`` makes of the prompt, then the completion, then the end token."""
        prompt, completion = example.prompt or "", example.completion
        head = self._encode(prompt)
        ids = self._encode(prompt + completion)
        if ids[: len(head)] != head:  # tokens that join prompt and completion: a request never has them
            ids = head + self.template.encode_inside(completion)[0]
        eos = self._tokenizer.eos_token_id
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        trained_from = 0 if self._train_on == "all" or example.prompt is None else len(head)
        return ids, [0] * trained_from + [1] * (len(ids) - trained_from)

    def _encode(self, text: str) -> list[int]:
        """Ids with exactly one BOS where the tokenizer adds one, even if the text begins with its own."""
        ids, bos = encode_text(self._tokenizer, text), self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _chat(self, chat: Chat) -> tuple[list[int], list[int]]:
        variables = {"tools": chat.tools} if chat.tools else {}
        plain = [message.plain for message in chat.messages]
        rendered = _Rendered(Conversation(self.template, plain, variables))
        functions = [*(chat.tools or ()), *(call for message in plain for call in message.get("tool_calls", ()))]
        if missing := [item["function"]["name"] for item in functions if item["function"]["name"] not in rendered.text]:
            raise ChatTemplateError(f"The chat template of this model leaves tools out, such as {missing[0]!r}.")
        answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        trained = self._trained(chat, answers)
        usual = int(self._train_on == "all")
        mask = [usual] * len(rendered.ids)
        spans = self._marked_spans(plain, variables, rendered.ids) if self.method == "generation_marks" else None
        for number, index in enumerate(answers):
            if (index in trained) == bool(usual):
                continue
            if spans is not None and len(spans) == len(answers):
                start, end = spans[number]
            else:
                start, end = self._prefix_span(rendered, index, index + 1 == len(plain))
            self.num_unended += rendered.ids[end - 1] not in self._end_ids
            mask[start:end] = [1 - usual] * (end - start)
            if start >= self._longest:  # each answer costs a rendering of all before it
                break
        return rendered.ids, mask

    def _trained(self, chat: Chat, answers: list[int]) -> set[int]:
        """Which messages carry loss."""
        start = 0
        train_on = self._train_on or ("assistant" if chat.completion_start is None else "completion")
        if train_on == "last_assistant":
            start = answers[-1]
        elif train_on == "completion":
            asked = [0] + [index for index, message in enumerate(chat.messages) if message.role == "user"]
            start = asked[-1] if chat.completion_start is None else chat.completion_start
        return {index for index in answers if index >= start and chat.messages[index].train}

    def _marked_spans(
        self, plain: list[dict[str, Any]], variables: dict[str, Any], ids: list[int]
    ) -> list[tuple[int, int]] | None:
        """Half-open ranges inside the template's generation marks, the end token behind each included."""
        encoded = self._tokenizer.apply_chat_template(
            plain, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        if encoded["input_ids"] != ids:  # a control token's string was in the text: the safe ids count
            return None
        spans = [mark.span() for mark in re.finditer("1+", "".join(map(str, encoded["assistant_masks"])))]
        after, ends = [*ids, -1], self._end_ids
        return [(start, end + (ids[end - 1] not in ends and after[end] in ends)) for start, end in spans]

    def _prefix_span(self, rendered: _Rendered, index: int, is_last: bool) -> tuple[int, int]:
        """Half-open range of the tokens of assistant message ``index``."""
        conversation = rendered.conversation
        start = bisect_right(rendered.ends, self._begin(rendered, index))
        through = rendered.text if is_last else conversation.text(index + 1)
        limit = bisect_right(rendered.ends, _common_prefix(rendered.text, through))
        end = next((p + 1 for p in reversed(range(start, limit)) if rendered.ids[p] in self._end_ids), 0)
        if end:
            return start, end
        if not is_last:  # the template writes older answers in another way (without the thoughts, for example)
            next_content = _common_prefix(rendered.text, conversation.text(blank=index + 1))
            before_next = range(max(start, limit), bisect_right(rendered.ends, next_content))
            limit = next((p + 1 for p in before_next if rendered.ids[p] in self._end_ids), limit)
        return start, max(start, limit)

    def _begin(self, rendered: _Rendered, index: int) -> int:
        """Where in the text the model would have begun to write message ``index``."""
        if index == 0 and self._train_on != "all":
            raise ChatTemplateError("messages[0] is the assistant's: put a message before it or give it weight 0.")
        before = rendered.conversation.text(index, add_generation_prompt=True) if index else ""
        begins = _common_prefix(rendered.text, before)
        if begins < len(before):
            if begins < len(rendered.conversation.text(index).rstrip()):
                changed = f"The chat template changes what stands before messages[{index}] later on"
                raise ChatTemplateError(f"{changed}: give it weight 0, or train on last_assistant.")
            self.num_other_prompts += 1
        return begins


class _Rendered:
    """A whole conversation as text and as ids, with the place in the text where each id ends."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.text = conversation.text()
        self.ids, self.ends = conversation.encode(self.text)


def _common_prefix(left: str, right: str) -> int:
    """Length of the longest common prefix, in characters."""
    if left.startswith(right):
        return len(right)
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low
