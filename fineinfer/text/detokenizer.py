"""Token ids -> text, piece by piece: the pieces put together equal the text decoded in one go (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAX_HELD = 16
_MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, so at most four byte tokens
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one sequence.

    Text that ends in U+FFFD may be a character still being spelled byte by byte, so it is held back. The idea is
    ``tokenizers.decoders.DecodeStream``'s; done here because that holds (and decodes again, at every token) an endless
    run of invalid bytes: 3.8 s for 3,000 of them, which a client can ask for by ``logit_bias``.

    Args:
        tokenizer: A fast transformers tokenizer.
        skip_special_tokens: Leave special tokens out of the text.
        prompt_ids: Tokens before the first one. They decide whether a SentencePiece decoder strips the first space.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._backend = tokenizer._tokenizer
        self._skip = skip_special_tokens
        # window = context (its text is out already) + held tokens (of whose text the first _num_out characters are out)
        self._context = list(prompt_ids[-_MAX_CHARACTER_TOKENS:])
        self._held: list[int] = []
        self._num_out = 0

    def step(self, token_id: int) -> str:
        """Text that became certain with this token; often empty."""
        self._held.append(token_id)
        text = self._held_text()
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) == len(text) and text:
            piece = text[self._num_out :]
            self._context, self._held, self._num_out = self._held, [], 0
            return piece
        piece = certain[self._num_out :]
        self._num_out = max(self._num_out, len(certain))
        return piece + (self._let_go() if len(self._held) > _MAX_HELD else "")

    def flush(self) -> str:
        """Text still held back, at the end of the sequence."""
        piece = self._held_text()[self._num_out :]
        self._context, self._held, self._num_out = self._held, [], 0
        return piece

    def _let_go(self) -> str:
        """Give out the older part of a long run that never becomes certain (invalid bytes, skipped tokens)."""
        text = self._held_text()
        newest_cut = len(self._held) - _MAX_CHARACTER_TOKENS
        for cut in range(newest_cut, newest_cut - _MAX_CHARACTER_TOKENS, -1):
            older, newer = self._held[:cut], self._held[cut:]
            head = self._text_after(self._context, older)
            if head + self._text_after(older, newer) == text:  # no character lies across the cut
                piece = head[self._num_out :]
                self._context, self._held, self._num_out = older[-_MAX_CHARACTER_TOKENS:], newer, 0
                return piece
        return ""

    def _held_text(self) -> str:
        return self._text_after(self._context, self._held)

    def _text_after(self, context: list[int], ids: list[int]) -> str:
        if not context:
            return self._decode(ids)
        return self._decode(context + ids)[len(self._decode(context)) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text
