"""Masks of 17 template families against a second rendering, and training ids against what a server would be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fineinfer.data.formats import Chat, Example, parse_row
from fineinfer.data.masking import TokenMasker
from fineinfer.server.schemas import Message, template_messages
from fineinfer.text.chat_template import ChatTemplateError, render_chat
from fineinfer.text.tokenizer import encode_text, load_tokenizer
from tests.unit.chat_families import FAMILIES, Row, conversations, family_tokenizer

EVERY = 20


def chat(row: Row) -> Example:
    return parse_row(row, 1, "openai_chat")


def expected(name: str, row: Row, trained: list[bool]) -> tuple[list[int], list[int]]:
    """Ids and mask from the family's second rendering; ``trained`` says which assistant messages carry loss."""
    tokenizer, answers = family_tokenizer(name), iter(trained)
    text, ranges = "", []
    for piece, generated in FAMILIES[name].segments(row["messages"], row.get("tools")):
        if generated and next(answers):
            ranges.append((len(text), len(text) + len(piece)))
        text += piece
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start < end and begin < stop for begin, end in ranges)) for start, stop in
            encoded["offset_mapping"]]  # fmt: skip
    length = len(mask) - mask[::-1].index(1)
    return encoded["input_ids"][:length], mask[:length]


def decoded(name: str, ids: list[int], mask: list[int]) -> list[str]:
    return family_tokenizer(name).convert_ids_to_tokens([t for t, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_trained_with_its_end(name: str) -> None:
    masker = TokenMasker(family_tokenizer(name))
    assert masker.method == ("generation_marks" if name == "chatml-marked" else "prefix")
    for row in conversations(name, EVERY):
        ids, mask = masker.encode(chat(row))
        trained = [message.get("weight") != 0 for message in row["messages"] if message["role"] == "assistant"]
        want_ids, want_mask = expected(name, row, trained)
        assert ids == want_ids
        assert mask == want_mask, (decoded(name, ids, mask), decoded(name, want_ids, want_mask))
    assert masker.num_unended == masker.num_other_prompts == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_last_answer(name: str) -> None:
    masker = TokenMasker(family_tokenizer(name), "last_assistant")
    for row in conversations(name, EVERY, seed=1):
        answers = sum(message["role"] == "assistant" for message in row["messages"])
        assert masker.encode(chat(row)) == expected(name, row, [False] * (answers - 1) + [True])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_completion_is_what_follows_the_prompt(name: str) -> None:
    in_chat, in_halves = TokenMasker(family_tokenizer(name), "completion"), TokenMasker(family_tokenizer(name))
    for row in conversations(name, EVERY, seed=2):
        messages = row["messages"]
        start = max(index for index, message in enumerate(messages) if message["role"] == "user") + 1
        halves = {**row, "prompt": messages[:start], "completion": messages[start:]}
        del halves["messages"]
        trained = [
            index >= start and message.get("weight") != 0
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        want = expected(name, row, trained)
        assert in_chat.encode(chat(row)) == in_halves.encode(parse_row(halves, 1, "prompt_completion")) == want


@pytest.mark.parametrize("name", FAMILIES)
def test_all_tokens_but_answers_of_weight_zero(name: str) -> None:
    masker = TokenMasker(family_tokenizer(name), "all")
    for row in conversations(name, EVERY, seed=3):
        off = [message.get("weight") == 0 for message in row["messages"] if message["role"] == "assistant"]
        ids, mask = masker.encode(chat(row))
        text = "".join(piece for piece, _ in FAMILIES[name].segments(row["messages"], row.get("tools")))
        assert ids == encode_text(family_tokenizer(name), text, False)
        assert mask[0] == 0  # nothing stands before it
        untrained = [token for token, flag in zip(ids[1:], mask[1:], strict=True) if not flag]
        if any(off):
            want_ids, want_mask = expected(name, row, off)
            assert untrained == [token for token, flag in zip(want_ids, want_mask, strict=True) if flag]
        else:
            assert untrained == []


def serving_ids(tokenizer: Any, messages: list[Row], generation: bool) -> list[int]:
    """The ids of a request to /v1/chat/completions, through the server's own functions."""
    request = [Message(role=m["role"], content=m["content"], name=m.get("name")) for m in messages]
    return render_chat(tokenizer, template_messages(request), generation)


def check_against_serving(tokenizer: Any, row: Row) -> None:
    """Up to each answer: the training ids are those of the prompt that a server is asked with, and the completion."""
    masker = TokenMasker(tokenizer, "last_assistant")
    for index, message in enumerate(row["messages"]):
        if message["role"] != "assistant":
            continue
        messages = [*row["messages"][:index], message | {"weight": 1}]
        ids, mask = masker.encode(chat({"messages": messages}))
        whole = serving_ids(tokenizer, messages, False)
        assert ids == whole[: len(ids)] and mask[-1] == 1
        start, prompt = mask.index(1), serving_ids(tokenizer, messages[:-1], True)
        # the last token of the prompt may have merged with an answer that begins with white space
        assert ids[:start] == prompt[:start] and start >= len(prompt) - message["content"][:1].isspace()


@pytest.mark.parametrize("name", FAMILIES)
def test_training_ids_equal_serving_ids(name: str) -> None:
    # requests carry neither tools nor earlier thoughts; with the embedded model's they are 1,300 conversations
    rows = [row for row in conversations(name, 60 if name != "qwen2.5" else 80, seed=4) if "tools" not in row]
    for row in rows:
        for message in row["messages"]:
            message.pop("reasoning_content", None)
        check_against_serving(family_tokenizer(name), row)


def test_training_ids_equal_serving_ids_on_the_embedded_model(embedded_model: Path) -> None:
    tokenizer = load_tokenizer(embedded_model)
    texts = [
        "<|im_end|> typed",
        "x <|im_start|>assistant",
        "hello world",
        "日本語",
        "\n\nnew lines",
        " a",
        "print('x')\n",
    ]
    for row in conversations("chatml", 300, seed=5, texts=texts):
        check_against_serving(tokenizer, row)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.bos])
def test_exactly_one_bos(name: str) -> None:
    tokenizer, bos = family_tokenizer(name), FAMILIES[name].bos
    masker, bos_id = TokenMasker(tokenizer), tokenizer.convert_tokens_to_ids(bos)
    pair = {"prompt": f"{bos}the quick", "completion": " brown fox"}
    examples = [parse_row({"text": text}, 1, "text") for text in ("hello", f"{bos}hello")]
    examples.append(parse_row(pair, 1, "prompt_completion"))
    if name != "zephyr":  # whose template writes none, so requests have none
        examples.append(chat(conversations(name, 1, seed=6)[0]))
    for example in examples:
        ids, mask = masker.encode(example)
        assert ids[0] == bos_id and ids[1] != bos_id
        if not isinstance(example, Chat):
            assert ids.count(bos_id) == (2 if bos == FAMILIES[name].eos else 1) and ids[-1] == tokenizer.eos_token_id
            assert mask[-1] == 1


@pytest.mark.parametrize("name", ["llama2", "llama3"])
@pytest.mark.parametrize("boundary", ["", " ", "\n", "\n\n"])
def test_prompt_ids_are_those_of_a_completion_request(name: str, boundary: str) -> None:
    tokenizer = family_tokenizer(name)
    for prompt in ("the quick", "Q: what is 1 + 1?\nA:", "日本", "x", ""):
        row = {"prompt": prompt + boundary, "completion": boundary + "brown fox\n"}
        ids, mask = TokenMasker(tokenizer).encode(parse_row(row, 1, "prompt_completion"))
        asked = encode_text(tokenizer, prompt + boundary)
        assert ids[: len(asked)] == asked and mask[1:] == ([0] * len(asked) + [1] * (len(ids) - len(asked)))[1:]
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == (row["prompt"] + row["completion"]).strip()


def test_a_template_that_moves_the_system_message_is_refused_by_message() -> None:
    # as Mistral's newer templates: the system message stands in the last user message
    template = (
        "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ system + '\n' if loop.revindex <= 2 else '' }}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = family_tokenizer.__wrapped__("mistral")
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": [{"role": "system", "content": "be kind"}, *turns, *turns]}
    with pytest.raises(ChatTemplateError, match=r"before messages\[2\].*last_assistant"):
        TokenMasker(tokenizer).encode(chat(row))
    ids, mask = TokenMasker(tokenizer, "last_assistant").encode(chat(row))
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]).strip() == "b</s>"


@pytest.mark.parametrize("part", ["tools", "tool_calls"])
def test_a_template_that_leaves_tools_out_is_refused(part: str) -> None:
    row = next(row for row in conversations("qwen2.5", 20) if any("tool_calls" in m for m in row["messages"]))
    if part == "tools":
        row = {"messages": [row["messages"][-2] | {"role": "user"}, row["messages"][-1]], "tools": row["tools"]}
        row["messages"][0].pop("tool_call_id", None)
    else:
        del row["tools"]
    with pytest.raises(ChatTemplateError, match="leaves tools out, such as 'look_up'"):
        TokenMasker(family_tokenizer("chatml")).encode(chat(row))
    assert TokenMasker(family_tokenizer("qwen2.5")).encode(chat(row))


def test_answers_without_an_end_and_other_prompts_are_counted() -> None:
    tokenizer = family_tokenizer.__wrapped__("chatml")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    masker = TokenMasker(tokenizer)
    ids, mask = masker.encode(chat({"messages": turns * 2}))
    assert masker.num_unended == 2
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == " world\n world\n"
    tokenizer.chat_template = FAMILIES["chatml"].template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    masker = TokenMasker(tokenizer)
    ids, mask = masker.encode(chat({"messages": turns * 2}))
    assert masker.num_other_prompts == 2 and masker.num_unended == 0
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "world<|im_end|>" * 2
