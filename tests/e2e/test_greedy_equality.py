"""Greedy fp32 tokens over HTTP equal transformers' batched generate, prompt by prompt, past any end token."""

from __future__ import annotations

import concurrent.futures
import random
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.e2e
NUM_PROMPTS, NUM_NEW = 64, 32


def prompts(tokenizer) -> list[list[int]]:
    """Mixed lengths of real text: this repository's own documents."""
    root = Path(__file__).resolve().parents[2]
    text = "\n\n".join((root / name).read_text() for name in ("README.md", "LICENSE", "CONTRIBUTING.md"))
    ids, rng = tokenizer(text)["input_ids"], random.Random(11)
    about = rng.choices([5, 17, 40, 90, 180, 300], weights=[12, 12, 8, 4, 1, 1], k=NUM_PROMPTS)
    lengths = [length + rng.randrange(9) for length in about]
    return [ids[start : start + n] for n in lengths for start in [rng.randrange(len(ids) - n)]]


def transformers_tokens(model_path: Path, batch: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs: list[list[int]] = []
    order = sorted(range(len(batch)), key=lambda i: len(batch[i]))
    results: dict[int, list[int]] = {}
    for group in (order[i : i + 16] for i in range(0, len(order), 16)):
        width = max(len(batch[i]) for i in group)
        ids = torch.tensor([[0] * (width - len(batch[i])) + batch[i] for i in group])
        mask = torch.tensor([[0] * (width - len(batch[i])) + [1] * len(batch[i]) for i in group])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        results |= {i: row[width:].tolist() for i, row in zip(group, out, strict=True)}
    outputs = [results[i] for i in range(len(batch))]
    return outputs


def test_every_prompt_gives_the_tokens_of_transformers(embedded_server, embedded_model, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    batch = prompts(tokenizer)
    base = embedded_server.base_model

    def ask(index: int) -> list[int]:
        body = {
            "model": base,
            "prompt": batch[index],
            "max_tokens": NUM_NEW,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        response = embedded_server.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    order = list(range(NUM_PROMPTS))
    random.Random(5).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        got = dict(zip(order, pool.map(ask, order), strict=True))
    want = transformers_tokens(embedded_model, batch)
    equal = sum(got[i] == want[i] for i in range(NUM_PROMPTS))
    with capsys.disabled():
        print(f"\ngreedy fp32: {equal} of {NUM_PROMPTS} prompts token-equal to transformers, {NUM_NEW} tokens each")
    assert equal == NUM_PROMPTS
