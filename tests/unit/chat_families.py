"""Chat templates after the common families', each with a rendering written a second time in plain Python.

The Python side gives segments ``(text, generated)``: what the model writes when it is asked, and what stands around it.
It shares nothing with the product: no Jinja, no prefixes, no search for end tokens.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Segments = list[tuple[str, bool]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A template, its tokens and its second rendering.

    Attributes:
        special, eos, bos: The family's special tokens, and which of them end and begin a text.
        segments: (messages, tools) -> the text in pieces.
        system, tools: Whether the family has system messages and tool calls.
        sentencepiece: A tokenizer like Llama 2's instead of a byte-level one.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    segments: Callable[[list[Row], list[Row] | None], Segments]
    bos: str | None = None
    system: bool = True
    tools: bool = False
    sentencepiece: bool = False


GENERATION = "{% if add_generation_prompt %}%s{% endif %}"


# ---------------------------------------------------------------- ChatML and its relatives

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION.replace("%s", "<|im_start|>assistant\n")
)
MARKED = CHATML.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}",
)


def chatml(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = []
    if messages[0]["role"] != "system":
        out.append(("<|im_start|>system\nYou are helpful.<|im_end|>\n", False))
    for m in messages:
        out.append((f"<|im_start|>{m['role']}\n", False))
        out.append((f"{m['content']}<|im_end|>", m["role"] == "assistant"))
        out.append(("\n", False))
    return out


# Qwen 2.5's way with tools: they stand in the system message, results are a user turn, neighbours share one.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are "
    "Qwen.{% endif %}{{ '\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    + GENERATION.replace("%s", "<|im_start|>assistant\n")
)


def qwen(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = f"{'You are Qwen.' if system is None else system}\n\n# Tools\n<tools>{lines}\n</tools>"
        out.append((f"<|im_start|>system\n{text}<|im_end|>\n", False))
    elif system is not None:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for index, m in enumerate(messages):
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content']}<|im_end|>\n", False))
        elif m["role"] == "assistant":
            parts = [m["content"]] if m.get("content") else []
            for call in m.get("tool_calls", []):
                arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
                text = f'{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}'
                parts.append(f"<tool_call>\n{text}\n</tool_call>")
            out += [("<|im_start|>assistant\n", False), ("\n".join(parts) + "<|im_end|>", True), ("\n", False)]
        elif m["role"] == "tool":
            before = messages[index - 1]["role"]
            after = messages[index + 1]["role"] if index + 1 < len(messages) else ""
            head = "" if before == "tool" else "<|im_start|>user"
            tail = "" if after == "tool" else "<|im_end|>\n"
            out.append((f"{head}\n<tool_response>\n{m['content']}\n</tool_response>{tail}", False))
    return out


# Qwen 3: only what follows the last user message keeps its thoughts, if it has none they are written empty.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '') | trim }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION.replace("%s", "<|im_start|>assistant\n")
)


def qwen3(messages: list[Row], tools: list[Row] | None) -> Segments:
    last = max(index for index, m in enumerate(messages) if m["role"] == "user")
    out: Segments = []
    for index, m in enumerate(messages):
        thought = ""
        if m["role"] == "assistant" and index > last:
            thought = f"<think>\n{m.get('reasoning_content', '').strip()}\n</think>\n\n"
        out.append((f"<|im_start|>{m['role']}\n", False))
        out += [(f"{thought}{m['content']}<|im_end|>", m["role"] == "assistant"), ("\n", False)]
    return out


# ---------------------------------------------------------------- Meta

LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set head = '<<SYS>>\n' + messages[0].content "
    "+ '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages %}{% set head = '' %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ (head if loop.first else '') + m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)


def llama2(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = []
    head = ""
    if messages[0]["role"] == "system":
        head, messages = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    for m in messages:
        if m["role"] == "user":
            out.append((f"<s>[INST] {head}{m['content'].strip()} [/INST]", False))
            head = ""
        else:
            out.append((f" {m['content'].strip()} </s>", True))
    return out


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    + GENERATION.replace("%s", "<|start_header_id|>assistant<|end_header_id|>\n\n")
)


def llama3(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = [("<|begin_of_text|>", False)]
    for m in messages:
        out.append((f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False))
        out.append((f"{m['content'].strip()}<|eot_id|>", m["role"] == "assistant"))
    return out


# ---------------------------------------------------------------- others

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def mistral(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = [("<s>", False)]
    for m in messages:
        if m["role"] == "user":
            out.append((f"[INST] {m['content']}[/INST]", False))
        else:
            out.append((f" {m['content'].strip()}</s>", True))
    return out


GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + GENERATION.replace("%s", "<start_of_turn>model\n")
)


def gemma(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = [("<bos>", False)]
    for m in messages:
        model = m["role"] == "assistant"
        out.append((f"<start_of_turn>{'model' if model else 'user'}\n", False))
        out += [(f"{m['content'].strip()}<end_of_turn>", model), ("\n", False)]
    return out


def _simple(head: str, end: str, after: str = "", names: dict[str, str] | None = None, begin: str = "") -> Any:
    """Second rendering of templates that write ``head(role) content end after`` for each message."""

    def segments(messages: list[Row], tools: list[Row] | None) -> Segments:
        out: Segments = [(begin, False)]
        for m in messages:
            out.append((head.replace("ROLE", (names or {}).get(m["role"], m["role"])), False))
            out += [(m["content"] + end, m["role"] == "assistant"), (after, False)]
        return out

    return segments


PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + GENERATION.replace(
    "%s", "<|assistant|>\n"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    + GENERATION.replace("%s", "<|im_start|>assistant<|im_sep|>")
)
ZEPHYR = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}" + GENERATION.replace(
    "%s", "<|assistant|>\n"
)
TULU = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% if not loop.last or m.role != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    + GENERATION.replace("%s", "<|assistant|>\n")
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    + GENERATION.replace("%s", "<|start_of_role|>assistant<|end_of_role|>")
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'system': 'SYSTEM', "
    "'assistant': 'CHATBOT'}[m.role] }}_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    + GENERATION.replace("%s", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    + GENERATION.replace("%s", "<｜Assistant｜>")
)
VICUNA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}A chat.{% endif %} "
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: "
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}" + GENERATION.replace("%s", "ASSISTANT:")
)
# gpt-oss: an answer is closed by another token when it is the last, and its channel stands before it.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant{% if loop.last and m.reasoning_content %}"
    "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}" + GENERATION.replace("%s", "<|start|>assistant")
)


def tulu(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = [("<|endoftext|>", False)]
    for m in messages:
        out.append((f"<|{m['role']}|>\n", False))
        if m["role"] == "assistant":
            out += [(m["content"] + "<|endoftext|>", True), ("" if m is messages[-1] else "\n", False)]
        else:
            out.append((m["content"] + "\n", False))
    return out


def deepseek(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = [("<｜begin▁of▁sentence｜>", False)]
    for m in messages:
        out.append(({"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"}[m["role"]], False))
        model = m["role"] == "assistant"
        out.append((m["content"] + ("<｜end▁of▁sentence｜>" if model else ""), model))
    return out


def vicuna(messages: list[Row], tools: list[Row] | None) -> Segments:
    system = messages[0]["role"] == "system"
    out: Segments = [(f"<s>{messages[0]['content'] if system else 'A chat.'} ", False)]
    for m in messages[system:]:
        if m["role"] == "user":
            out.append((f"USER: {m['content']} ", False))
        else:
            out += [("ASSISTANT:", False), (f" {m['content']}</s>", True)]
    return out


def harmony(messages: list[Row], tools: list[Row] | None) -> Segments:
    out: Segments = []
    for index, m in enumerate(messages):
        if m["role"] != "assistant":
            out.append((f"<|start|>{m['role']}<|message|>{m['content']}<|end|>", False))
            continue
        last, thought = index + 1 == len(messages), m.get("reasoning_content", "")
        text = f"<|channel|>final<|message|>{m['content']}{'<|return|>' if last else '<|end|>'}"
        if last and thought:
            text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{text}"
        out += [("<|start|>assistant", False), (text, True)]
    return out


_IM = ("<|im_start|>", "<|im_end|>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_COMMAND_NAMES = {"user": "USER", "system": "SYSTEM", "assistant": "CHATBOT"}
FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, _IM, "<|im_end|>", chatml),
    "chatml-marked": Family(MARKED, _IM, "<|im_end|>", chatml),
    # Qwen's base tokenizers name another end token than the template's
    "qwen2.5": Family(QWEN, (*_IM, "<|endoftext|>"), "<|endoftext|>", qwen, tools=True),
    "qwen3": Family(QWEN3, _IM, "<|im_end|>", qwen3),
    "llama2": Family(LLAMA2, ("<s>", "</s>"), "</s>", llama2, bos="<s>", sentencepiece=True),
    "llama3": Family(
        LLAMA3, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>", llama3, bos="<|begin_of_text|>"),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", mistral, bos="<s>", system=False,
                      sentencepiece=True),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", gemma, bos="<bos>",
                    system=False),
    "phi3": Family(PHI3, (*_ROLES, "<|end|>", "<|endoftext|>"), "<|endoftext|>",
                   _simple("<|ROLE|>\n", "<|end|>", "\n")),
    "phi4": Family(PHI4, (*_IM, "<|im_sep|>", "<|endoftext|>"), "<|im_end|>",
                   _simple("<|im_start|>ROLE<|im_sep|>", "<|im_end|>")),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), "</s>", _simple("<|ROLE|>\n", "</s>", "\n"), bos="<s>",
                     sentencepiece=True),
    "tulu": Family(TULU, ("<|endoftext|>", *_ROLES), "<|endoftext|>", tulu, bos="<|endoftext|>"),
    "granite": Family(GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>",
                      _simple("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>", "\n")),
    "command-r": Family(
        COMMAND_R, ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
                    "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"), "<|END_OF_TURN_TOKEN|>",
        _simple("<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "", _COMMAND_NAMES, "<BOS_TOKEN>"),
        bos="<BOS_TOKEN>"),
    "deepseek": Family(DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
                       "<｜end▁of▁sentence｜>", deepseek, bos="<｜begin▁of▁sentence｜>"),
    "vicuna": Family(VICUNA, ("<s>", "</s>"), "</s>", vicuna, bos="<s>", sentencepiece=True),
    "harmony": Family(HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), "<|return|>",
                      harmony),
}  # fmt: skip
# how Llama 3, Qwen 2 and gpt-oss cut text into words: line ends stay together
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = [
    "the quick brown fox says hello world, stop here\n\n",
    "what is 1 + 1? It is 2.\n",
    "a b c ; if x: y()\n",
] * 20


@functools.cache
def family_tokenizer(name: str) -> Any:
    """A small tokenizer with the family's tokens and template; it adds its BOS to raw text, as the real ones do."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    if family.sentencepiece:
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no token goes over the end of a word
        trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
        model = json.loads(trained.to_str())["model"]
        vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
        vocab |= {token: index + 257 for token, index in model["vocab"].items()}
        merges = [tuple(pair) for pair in model["merges"]]
        backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    if family.bos is not None:
        bos = (family.bos, backend.token_to_id(family.bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
    extra = {} if family.bos is None else {"bos_token": family.bos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, **extra)
    tokenizer.chat_template = family.template
    return tokenizer


_TEXTS = [
    "hello world", "What is 1 + 1?", "It is 2.", "a\nb\n\nc", "  indented, with an end \n", "日本語と 한국어",
    "\U0001f600 ok", "if x:\n    y()\n", "1", "!", "é", "tab\there", "{{ not a template }}", "x" * 90,
    "<b>bold</b> & more", "the end",
]  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds é things", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "a": {"type": "integer"}}}}}  # fmt: skip


def conversations(name: str, count: int, seed: int = 0, texts: list[str] = _TEXTS) -> list[Row]:
    """Rows in OpenAI's format that the family can render: 1 to 4 turns, systems, weights, thoughts and tools."""
    family, draw = FAMILIES[name], random.Random(f"{name} {seed}")
    rows = []
    for number in range(count):
        messages: list[Row] = []
        if family.system and draw.random() < 0.5:
            messages.append({"role": "system", "content": draw.choice(texts)})
        tools = [_TOOL] if family.tools and number % 2 else None
        for turn in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": draw.choice(texts)})
            if tools and draw.random() < 0.6:
                calls = [
                    {"id": f"c{turn}{i}", "type": "function", "function": {
                        "name": "look_up", "arguments": json.dumps({"city": draw.choice(texts), "a": i})}}
                    for i in range(draw.randint(1, 2))
                ]  # fmt: skip
                messages.append({"role": "assistant", "content": draw.choice([None, "so"]), "tool_calls": calls})
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": draw.choice(texts)} for c in calls]
            answer: Row = {"role": "assistant", "content": draw.choice(texts)}
            if name in ("qwen3", "harmony") and draw.random() < 0.5:
                answer["reasoning_content"] = draw.choice(["hm", "let me\nsee"])
            if draw.random() < 0.2:
                answer["weight"] = draw.choice([0, 1])
            messages.append(answer)
        messages[-1]["weight"] = 1
        rows.append({"messages": messages, **({"tools": tools} if tools else {})})
    return rows
