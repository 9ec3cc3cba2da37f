"""The streamed text equals the text decoded in one go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fineinfer.text.detokenizer import Detokenizer

TEXTS = [
    "",
    "hello world",
    "héllo",
    "👩‍👩‍👧‍👦 family",
    "漢字かな交じり文",
    "mixed 🎉漢a�b",
    "\ufffd",
    "tab\tnl\n",
    "مرحبا",
]


def _stream(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return "".join([detokenizer.step(token_id) for token_id in ids]) + detokenizer.flush()


@pytest.fixture(scope="module")
def sentencepiece_like() -> Any:
    """Llama 2's kind: spaces as U+2581, bytes as <0xNN>, the first space stripped."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "lo", "▁a", "b", "漢"]
    vocab = [(word, -float(index)) for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_ids(tiny_tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    last = len(tiny_tokenizer) - 1  # single bytes and special tokens (at the end) more often than their share
    ids = data.draw(
        st.lists(st.one_of(st.integers(0, last), st.integers(0, 255), st.integers(last - 5, last)), max_size=60)
    )
    assert _stream(tiny_tokenizer, ids, skip) == tiny_tokenizer._tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)), cut=st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_texts_cut_anywhere(tiny_tokenizer: Any, text: str, cut: int) -> None:
    ids = tiny_tokenizer.encode(text)
    ids = ids[: max(0, len(ids) - cut)]
    assert _stream(tiny_tokenizer, ids) == tiny_tokenizer._tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sentencepiece_with_whole_characters(sentencepiece_like: Any, data: st.DataObject) -> None:
    spelled = [[10 + byte for byte in character.encode()] for character in "é漢🎉"]
    pieces = data.draw(st.lists(st.sampled_from([[i] for i in range(2, 10)] + spelled), max_size=30))
    ids = [token_id for piece in pieces for token_id in piece]
    assert _stream(sentencepiece_like, ids) == sentencepiece_like._tokenizer.decode(ids)


def test_first_space_counts_when_a_prompt_is_continued(sentencepiece_like: Any) -> None:
    hello, world = 4, 5
    alone = Detokenizer(sentencepiece_like)
    after = Detokenizer(sentencepiece_like, prompt_ids=[hello])
    assert (alone.step(world), after.step(world)) == ("world", " world")


def test_no_half_characters_and_no_delay(tiny_tokenizer: Any) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    pieces = [detokenizer.step(token_id) for token_id in tiny_tokenizer.encode("a🎉b")]
    assert [piece for piece in pieces if piece] == ["a", "🎉", "b"]


def test_endless_invalid_bytes_cost_linear_time(tiny_tokenizer: Any) -> None:
    invalid = tiny_tokenizer.convert_tokens_to_ids("È")  # byte 0xC8: always waits for a second byte
    for token_id, text in ((invalid, "\ufffd" * 4000), (tiny_tokenizer.eos_token_id, "")):
        detokenizer, pieces, most_held = Detokenizer(tiny_tokenizer), [], 0
        for _ in range(4000):
            pieces.append(detokenizer.step(token_id))
            most_held = max(most_held, len(detokenizer._held))  # each step decodes all of them again
        assert "".join(pieces) + detokenizer.flush() == text and most_held < 32
