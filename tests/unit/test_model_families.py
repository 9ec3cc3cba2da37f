"""Logits of every family and RoPE kind against transformers, whole and step by step through a KV pool."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels.reference import (
    attention_decode,
    attention_decode_each,
    attention_prefill,
    attention_varlen,
    store_kv,
)
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
    },
}
TOLERANCE = 1e-5


def whole_sequence_logits(decoder: Decoder, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [num_tokens, vocab] of one sequence, as training computes them, or of the stream given."""
    length = len(ids)
    rows = decoder.rope.rows(torch.arange(length), torch.full((length,), length))
    x = decoder.embed(ids) if stream is None else stream
    for index, window in enumerate(decoder.spec.sliding_windows):
        x = decoder.layer(
            index, x, rows, attend=lambda _, q, k, v, window=window: attention_varlen(q, k, v, [0, length], window)
        )
    return decoder.head(x)


def random_ids(length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny_model, family: str, rope: str) -> None:
    hf, folder = tiny_model(family, rope_parameters=dict(ROPES[rope]))
    decoder = load_model(folder).decoder
    for length in (7, 100):  # within and past the maximum position
        ids = random_ids(length)
        with torch.no_grad():
            expected = hf(ids[None]).logits[0]
        assert expected.std() > 0.3  # so that the tolerance means something
        torch.testing.assert_close(whole_sequence_logits(decoder, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "head_dim": 12}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("Mistral", {"sliding_window": 5, "head_dim": 20}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 4, "tie_word_embeddings": True}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "attention_bias": True}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_options_equal_transformers(tiny_model, family: str, options: dict) -> None:
    hf, folder = tiny_model(family, seed=1, **options)
    loaded = load_model(folder)
    ids = random_ids(40)
    with torch.no_grad():
        expected = hf(ids[None]).logits[0]
    torch.testing.assert_close(whole_sequence_logits(loaded.decoder, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(tiny_model, dtype: str) -> None:
    hf, folder = tiny_model("Qwen3")
    ids = random_ids(20)
    loaded = load_model(folder, dtype=dtype)
    ours, own = whole_sequence_logits(loaded.decoder, ids), getattr(torch, dtype)
    assert ours.dtype == torch.promote_types(own, torch.float32)
    with torch.no_grad():
        expected = hf(ids[None]).logits[0]
        half = hf.to(own)(ids[None]).logits[0].to(expected.dtype)
    error = (half - expected).abs().max()  # transformers' own in this dtype
    assert (ours.to(expected.dtype) - expected).abs().max() < max(2 * error, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_stream_keeps_half_types_nearer_to_fp32(tiny_model, dtype: torch.dtype) -> None:
    """Many layers, as serving runs them, against a stream that is rounded at each addition."""
    _, folder = tiny_model("Llama", num_hidden_layers=24)
    exact, half = (load_model(folder, dtype=name).decoder for name in ("float32", str(dtype).removeprefix("torch.")))
    ids = random_ids(60)
    assert half.stream(ids).dtype == exact.stream(ids).dtype == torch.float32
    assert load_model(folder, dtype="float64").decoder.stream(ids).dtype == torch.float64
    wanted = whole_sequence_logits(exact, ids)
    rounded = (whole_sequence_logits(half, ids) - wanted).std()
    kept = (whole_sequence_logits(half, ids, half.stream(ids)) - wanted).std()
    assert kept < (0.75 if dtype == torch.bfloat16 else 0.85) * rounded


class PoolSession:
    """A toy runner: one sequence in a KV pool, prefilled in chunks, then decoded token by token."""

    def __init__(self, decoder: Decoder, prompt: torch.Tensor, slots: torch.Tensor, batched: bool) -> None:
        spec = decoder.spec
        self.decoder, self.prompt, self.slots, self.batched = decoder, prompt, slots, batched
        shape = (int(slots.max()) + 1, 2, spec.num_kv_heads, spec.head_dim)
        self.pool = [torch.full(shape, float("nan")) for _ in range(spec.num_layers)]  # stale slots must not matter

    def _forward(self, ids: torch.Tensor, start: int, attend) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))
        lengths = torch.clamp(positions + 1, min=len(self.prompt))
        rows = self.decoder.rope.rows(positions, lengths)
        x = self.decoder.embed(ids)
        for index in range(self.decoder.spec.num_layers):
            x = self.decoder.layer(index, x, rows, attend=attend)
        return self.decoder.head(x[-1:])[0]

    def prefill(self, chunk: int) -> torch.Tensor:
        for start in range(0, len(self.prompt), chunk):
            end = min(start + chunk, len(self.prompt))

            def attend(index, q, k, v, start=start, end=end):
                store_kv(self.pool[index], self.slots[start:end], k, v)
                window = self.decoder.spec.sliding_windows[index]
                return attention_prefill(q, self.pool[index], self.slots[:end], start, window)

            logits = self._forward(self.prompt[start:end], start, attend)
        return logits

    def decode(self, token: int, position: int) -> torch.Tensor:
        def attend(index, q, k, v):
            store_kv(self.pool[index], self.slots[position : position + 1], k, v)
            window = self.decoder.spec.sliding_windows[index]
            if self.batched:
                table = torch.cat((self.slots[: position + 1], torch.tensor([self.slots.max()])))[None]
                return attention_decode(q, self.pool[index], table, torch.tensor([position + 1]), window)
            return attention_decode_each(q, self.pool[index], [self.slots[: position + 1]], window)

        return self._forward(torch.tensor([token]), position, attend)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 16}),
        ("Qwen3", {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 16}),
        ("Mistral", {"sliding_window": 6}),
        ("Qwen2", {"rope_parameters": ROPES["yarn"]}),
    ],
)
@pytest.mark.parametrize("prompt_length", [9, 21])  # dynamic: shorter and longer than the maximum position of 16
def test_cached_generation_equals_transformers(
    tiny_model, family: str, options: dict, batched: bool, prompt_length: int
) -> None:
    hf, folder = tiny_model(family, seed=2, **options)
    decoder = load_model(folder).decoder
    prompt = random_ids(prompt_length)
    generated = hf.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    session = PoolSession(decoder, prompt, slots, batched)
    logits = session.prefill(chunk=4)
    for step, expected in enumerate(generated.logits):
        torch.testing.assert_close(logits, expected[0], atol=TOLERANCE, rtol=0)
        token = int(generated.sequences[0, prompt_length + step])
        logits = session.decode(token, prompt_length + step)


def test_embedded_model_equals_transformers(embedded_model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = load_model(None)
    assert loaded.path == embedded_model
    assert loaded.spec.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    message = [{"role": "user", "content": "Why is the sky blue, and why is it red in the evening?"}]
    ids = torch.tensor(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    hf = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    with torch.no_grad():
        expected = hf(ids[None]).logits[0]
    ours = whole_sequence_logits(loaded.decoder, ids)
    torch.testing.assert_close(ours, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
