"""Log-probabilities in the three shapes that clients read: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fineinfer.messages import TokenLogprob
from fineinfer.text.tokenizer import TokenTexts

_SMALLEST = -9999.0  # JSON has no -inf; vLLM's stand-in


def chat_content(texts: TokenTexts, entries: Sequence[TokenLogprob], num_top: int) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat choice."""
    return [
        {
            **_chat_entry(texts, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(texts, *alternative) for alternative in entry.top[:num_top]],
        }
        for entry in entries
    ]


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    raw = texts.bytes_of(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def completion_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], offsets: Sequence[int]
) -> dict[str, Any]:
    """``logprobs`` of a completions choice; an entry of None (a prompt's first token) reads null.

    As at OpenAI the chosen token is always among ``top_logprobs``, which evaluation harnesses rely on.
    """
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        alternatives = {texts.text_of(token_id): _finite(logprob) for token_id, logprob in entry.top}
        top.append({**alternatives, texts.text_of(entry.token_id): _finite(entry.logprob)})
    return {
        "tokens": [texts.text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def prompt_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each prompt token a map from token id to its log-probability."""
    return [None if entry is None else _prompt_entry(texts, entry) for entry in entries]


def _prompt_entry(texts: TokenTexts, entry: TokenLogprob) -> dict[str, Any]:
    ranks: dict[int, int | None] = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    values = {entry.token_id: entry.logprob} | dict(entry.top)
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": texts.text_of(token_id),
        }
        for token_id, logprob in values.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, _SMALLEST)
