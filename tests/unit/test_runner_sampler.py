"""Sampling against transformers' logits processors, seeds, penalties, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fineinfer.request import InvalidRequestError, SamplingParams
from fineinfer.runner.sampler import SMALLEST_LOGPROB, Sampler, draw_keys, top_logprobs
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

from .test_kernel_noise import plain_hash

VOCAB = 64
CPU = torch.device("cpu")


def logits_of(seed: int) -> torch.Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def sequence(prompt: list[int], output: list[int], **params: object) -> Sequence:
    made = Sequence("r", b"p", prompt, SamplingParams(**params), 1000, 0.0, seed=5)
    made.output = output
    return made


def choose(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    chunks = [Chunk(item, item.num_tokens - 1, 1, samples=True) for item in sequences]
    return [choice.token_id for choice in Sampler(VOCAB, (2,), CPU).sample(logits, chunks)]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.3, "top_p": 0.8}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 0.9, "top_k": 9, "top_p": 0.7},
            [TemperatureLogitsWarper(0.9), TopKLogitsWarper(9), TopPLogitsWarper(0.7)],
        ),
    ],
)
def test_draws_follow_the_distribution_of_transformers(params, warpers):
    logits, num_draws = logits_of(1), 4000
    want = torch.softmax(LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0], -1)
    counts = torch.zeros(VOCAB)
    for seed in range(num_draws // 500):
        items = [sequence([1], [3] * position, **params) for position in range(500)]
        for item in items:
            item.seed = seed
        counts += torch.bincount(torch.tensor(choose(logits.expand(500, -1), *items)), minlength=VOCAB)
    assert counts[want == 0].sum() == 0, "a token that is cut off was drawn"
    error = (counts / num_draws - want).abs()
    assert (error < 5 * torch.sqrt(want * (1 - want) / num_draws) + 1e-3).all()


def test_repetition_penalty_equals_transformers_and_counts_the_prompt():
    logits, prompt, output = logits_of(2), [4, 9, 9], [11, 30]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]]), logits.clone())
    assert choose(logits, sequence(prompt, output, temperature=0.0, repetition_penalty=1.7)) == [int(want.argmax())]


def test_presence_and_frequency_penalties_act_on_the_output_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    assert choose(logits, sequence([7], [], temperature=0.0, presence_penalty=1.0)) == [7]
    assert choose(logits, sequence([1], [7], temperature=0.0, presence_penalty=1.0)) == [8]
    assert choose(logits, sequence([1], [7], temperature=0.0, frequency_penalty=0.3)) == [7]
    assert choose(logits, sequence([1], [7, 7], temperature=0.0, frequency_penalty=0.3)) == [8]


def test_bias_and_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 5] = 4.0, 1.0
    assert choose(logits, sequence([1], [], temperature=0.0)) == [2]
    assert choose(logits, sequence([1], [], temperature=0.0, min_tokens=1)) == [5]
    assert choose(logits, sequence([1], [9], temperature=0.0, min_tokens=1)) == [2]
    assert choose(logits, sequence([1], [], temperature=0.0, min_tokens=1, stop_token_ids=(5,))) != [5]
    assert choose(logits, sequence([1], [], temperature=0.0, logit_bias={40: 50.0})) == [40]


def test_a_seeded_request_does_not_depend_on_its_neighbours():
    rows = torch.cat([logits_of(n) for n in range(6)])
    alone = choose(rows[:1], sequence([1], [3, 4], temperature=1.0))
    others = [sequence([n], [n], temperature=1.0, top_p=0.5) for n in range(1, 6)]
    assert choose(rows, sequence([1], [3, 4], temperature=1.0), *others)[:1] == alone
    keys = np.concatenate([draw_keys(9, n, 1) for n in range(2000)])
    assert keys.shape == (2000, 2) and len({key.tobytes() for key in keys}) == 2000
    shares = np.stack([(keys >> bit) & 1 for bit in range(32)]).mean(axis=1)  # of ones among each bit
    assert (abs(shares - 0.5) < 0.06).all()  # 5 standard deviations


@pytest.mark.parametrize("seed", [0, 9, -1, 2**64 - 1])
def test_a_run_of_keys_is_the_single_ones(seed):
    for first, count in [(0, 0), (0, 1), (3, 7), (2**33, 100)]:
        numbers = [int(np.random.Philox(key=seed % 2**64, counter=first + n).random_raw()) for n in range(count)]
        keys = draw_keys(seed, first, count)
        assert keys.dtype == np.int32 and keys.shape == (count, 2)
        assert [(low % 2**32) + (high % 2**32) * 2**32 for low, high in keys.tolist()] == numbers
        assert keys.tolist() == [draw_keys(seed, first + n, 1)[0].tolist() for n in range(count)]


def test_masked_logits_are_usable_unless_all_are():
    rows = torch.full((4, VOCAB), float("-inf"))
    rows[0, 9] = rows[1, 9] = 1.0
    rows[3, 0], rows[3, 9] = float("inf"), 1.0
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0}
    sequences = [sequence([1], [], **params) for params in (greedy, drawn, drawn, greedy)]
    chunks = [Chunk(item, 0, 1, samples=True) for item in sequences]
    choices = Sampler(VOCAB, (2,), CPU).sample(rows, chunks)
    assert [(choice.token_id, choice.failed) for choice in choices] == [(9, False), (9, False), (0, True), (0, True)]


def test_of_equal_logits_the_token_of_the_smallest_hash_is_drawn():
    logits = torch.zeros(1, VOCAB)
    for count in range(20):
        item = sequence([1], [3] * count, temperature=1.0)
        key = draw_keys(item.seed, count, 1)[0].tolist()
        assert choose(logits, item) == [min(range(VOCAB), key=lambda token, key=key: plain_hash(token, *key))]


def test_non_finite_logits_fail_their_request_only():
    rows = torch.cat([logits_of(1), logits_of(2), logits_of(3)])
    rows[1, 7] = float("nan")
    sequences = [sequence([1], [], temperature=0.0) for _ in range(3)]
    chunks = [Chunk(item, 0, 1, samples=True) for item in sequences]
    choices = Sampler(VOCAB, (2,), CPU).sample(rows, chunks)
    assert [choice.failed for choice in choices] == [False, True, False]


def test_logprobs_are_finite_and_sum_to_one():
    logits = logits_of(4)
    logits[0, 3] = float("-inf")
    entry = top_logprobs(logits, [3], 20)[0]
    assert entry.logprob == SMALLEST_LOGPROB
    full = top_logprobs(logits_of(4), [5], 20)[0]
    want = torch.log_softmax(logits_of(4)[0], -1)
    assert full.logprob == pytest.approx(float(want[5]), abs=1e-6)
    assert [i for i, _ in full.top] == torch.topk(want, 20).indices.tolist()
    assert sum(math.exp(p) for _, p in full.top) <= 1 + 1e-5


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params, field):
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**params).check(VOCAB)
    assert refused.value.param == field
