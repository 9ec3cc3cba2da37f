"""Sampling on the device against the sampler of the CPU runner, whose semantics it has."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from fineinfer.request import SamplingParams
from fineinfer.runner import device_sampler
from fineinfer.runner.device_sampler import DRAWS_AHEAD, DeviceSampler
from fineinfer.runner.sampler import SMALLEST_LOGPROB, Choice, Sampler, draw_keys
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

from .test_kernel_noise import plain_hash

VOCAB, EOS = 100, (2, 3)
MAX_ROWS, MAX_LENGTH = 12, 24
INF, NAN = float("inf"), float("nan")


def sequence(seed: int, prompt: list[int], output: list[int], **params: object) -> Sequence:
    made = Sequence(f"r{seed}", b"p", prompt, SamplingParams(**params), MAX_LENGTH, 0.0, seed=seed)
    made.output = list(output)
    return made


def newest(made: Sequence) -> Chunk:
    return Chunk(made, made.num_tokens - 1, 1, samples=True)


def random_sequences(generator: torch.Generator, *params: dict[str, object]) -> list[Sequence]:
    def tokens(low: int) -> list[int]:
        count = int(torch.randint(low, 9, (1,), generator=generator))
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    made = [sequence(7 + index, tokens(1), tokens(0), **own) for index, own in enumerate(params)]
    for row, item in zip(torch.randperm(MAX_ROWS, generator=generator).tolist(), made, strict=False):
        item.row = row
    return made


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    """Distinct in every row, in half types too, so that nothing hangs on the order of ties."""
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(num_rows)]) - 5.0


def table_of(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """The device's tokens by row and position; what is not known to be there is a token that would show."""
    table = torch.full((MAX_ROWS + 1, MAX_LENGTH), VOCAB - 1, dtype=torch.int32)
    for item in sequences:
        ids = item.prompt + item.output
        table[item.row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table.to(device)


def sampler_on(device: torch.device) -> DeviceSampler:
    return DeviceSampler(VOCAB, EOS, MAX_ROWS, device)


def choose(device: torch.device, logits: torch.Tensor, sequences: list[Sequence]) -> list[Choice]:
    """As the runner does: what was drawn, or the greedy tokens, sent to the host."""
    sampler, chunks = sampler_on(device), [newest(item) for item in sequences]
    before = logits.to(device)
    given = before.clone()
    drawn = sampler.draw(given, chunks, table_of(sequences, device))
    sent = sampler.send(given, sampler.greedy(given) if drawn is None else drawn, chunks)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)  # reported are the model's own
    return sent.choices()


def expect_the_cpu_samplers_choices(device: torch.device, logits: torch.Tensor, sequences: list[Sequence]) -> None:
    chunks = [newest(item) for item in sequences]
    want = Sampler(VOCAB, EOS, torch.device("cpu")).sample(logits.float(), chunks)
    got = choose(device, logits, sequences)
    assert [(item.token_id, item.failed) for item in got] == [(item.token_id, item.failed) for item in want]
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None and theirs.logprob is not None:
            assert ours.logprob.token_id == theirs.logprob.token_id
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-5)
            assert [token for token, _ in ours.logprob.top] == [token for token, _ in theirs.logprob.top]
            values = [value for _, value in theirs.logprob.top]
            assert [value for _, value in ours.logprob.top] == pytest.approx(values, abs=1e-5)


GREEDY: dict[str, object] = {"temperature": 0.0}
KINDS: dict[str, list[dict[str, object]]] = {
    "greedy": [GREEDY] * 4,
    "draws": [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 2**31 - 1, "top_p": 0.95, "min_p": 0.01},
        GREEDY,
    ],
    "penalties": [
        {"temperature": 0.0, "repetition_penalty": 1.83},
        {"temperature": 0.0, "presence_penalty": 1.97, "frequency_penalty": 1.53},
        {"temperature": 1.0, "repetition_penalty": 0.6, "frequency_penalty": -1.0, "top_p": 0.9},
        GREEDY,
        {"temperature": 1.0},
    ],
    "bias": [
        {"temperature": 0.0, "logit_bias": {5: 100.0, 90: -100.0}},
        {"temperature": 1.0, "logit_bias": {index: 9.0 for index in range(40, 60)}},
        GREEDY,
    ],
    "min_tokens": [
        {"temperature": 0.0, "min_tokens": 24, "stop_token_ids": (11,)},
        {"temperature": 1.0, "min_tokens": 24, "stop_token_ids": (2, 11, 12), "logit_bias": {2: 100.0, 50: 4.0}},
        {"temperature": 0.0, "min_tokens": 1},
    ],
    "logprobs": [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 1.0, "logprobs": 5, "repetition_penalty": 1.5},
        GREEDY,
        {"temperature": 0.0, "logprobs": 20, "logit_bias": {50: 100.0}},
        {"temperature": 1.0, "logprobs": 1, "top_k": 1},
    ],
    "plain_logprobs": [{"temperature": 0.0, "logprobs": 0}, {"temperature": 0.0, "logprobs": 0}],
}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_those_of_the_cpu_sampler(kind: str, half: bool, kernel_device: torch.device) -> None:
    for seed in range(3):
        sequences = random_sequences(torch.Generator().manual_seed(seed), *KINDS[kind])
        logits = random_logits(len(sequences), seed)
        logits[:, list(EOS)] += 4.05  # so that masking them changes a token
        expect_the_cpu_samplers_choices(kernel_device, logits.half() if half else logits, sequences)


def test_everything_at_once_in_one_step(kernel_device: torch.device) -> None:
    params = [own for kind in KINDS.values() for own in kind][-MAX_ROWS:]
    sequences = random_sequences(torch.Generator().manual_seed(5), *params)
    expect_the_cpu_samplers_choices(kernel_device, random_logits(len(sequences), 5), sequences)


@pytest.mark.parametrize("params", [GREEDY, {"temperature": 1.0}, {"temperature": 1.0, "presence_penalty": 0.5}])
def test_unusable_rows_fail_alone(params: dict[str, object], kernel_device: torch.device) -> None:
    sequences = random_sequences(torch.Generator().manual_seed(1), *[{**params, "logprobs": 2}] * 5)
    logits = random_logits(5)
    logits[1, 60], logits[2, 60], logits[3] = NAN, INF, -INF
    logits[4, 1:] = -INF
    expect_the_cpu_samplers_choices(kernel_device, logits, sequences)
    choices = choose(kernel_device, logits, sequences)
    assert [item.failed for item in choices] == [False, True, True, True, False]
    assert all(item.token_id == 0 and item.logprob is None for item in choices[1:4])
    assert choices[4].logprob is not None and choices[4].logprob.top[1][1] == SMALLEST_LOGPROB


def test_a_row_whose_only_usable_tokens_are_masked_fails(kernel_device: torch.device) -> None:
    logits = torch.full((2, VOCAB), -INF)
    logits[:, EOS[0]] = 1.0
    sequences = random_sequences(
        torch.Generator().manual_seed(1), {"temperature": 0.0, "min_tokens": 24}, {"temperature": 0.0}
    )
    expect_the_cpu_samplers_choices(kernel_device, logits, sequences)
    assert [item.failed for item in choose(kernel_device, logits, sequences)] == [True, False]


def test_tokens_in_flight_count_as_generated(kernel_device: torch.device) -> None:
    """One known to the device only is penalised, moves the draw on and counts towards ``min_tokens``."""
    params: list[dict[str, object]] = [
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 0.0, "repetition_penalty": 9.0},
    ]
    known = [sequence(n, [4, 5], [6, 7, 8], **own) for n, own in enumerate(params)]
    for row, item in enumerate(known):
        item.row = row
    logits = torch.zeros(4, VOCAB)
    logits[0, [8, 9]] = torch.tensor([1.5, 1.0])
    logits[2, [EOS[0], 9]] = torch.tensor([1.5, 1.0])
    logits[3, [8, 9]] = torch.tensor([1.5, 1.0])
    table = table_of(known, kernel_device)
    chunks = [newest(item) for item in known]
    want = Sampler(VOCAB, EOS, torch.device("cpu")).sample(logits, chunks)
    for item in known:
        item.output, item.num_in_flight = item.output[:2], 1
    drawn = sampler_on(kernel_device).draw(logits.to(kernel_device), chunks, table)
    assert drawn is not None and drawn[0].tolist() == [item.token_id for item in want]
    assert drawn[0].tolist()[0] == 9 and drawn[0].tolist()[2:] == [EOS[0], 9]


ADJUSTED: list[dict[str, object]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"logit_bias": {4: 1.0}},
    {"min_tokens": 24},
]


@pytest.mark.parametrize("params", [{"temperature": 1e-3}, *({"temperature": 0.0, **own} for own in ADJUSTED)], ids=str)
def test_one_row_that_is_not_plain_greedy_is_drawn_for(params: dict[str, object], kernel_device: torch.device) -> None:
    for position in range(3):
        own: list[dict[str, object]] = [GREEDY] * 3
        own[position] = params
        sequences = random_sequences(torch.Generator().manual_seed(2), *own)
        chunks = [newest(item) for item in sequences]
        drawn = sampler_on(kernel_device).draw(
            random_logits(3).to(kernel_device), chunks, table_of(sequences, kernel_device)
        )
        assert drawn is not None and drawn.shape == (2, 3) and drawn.dtype == torch.int32


def test_plain_greedy_rows_are_not_drawn_for(kernel_device: torch.device) -> None:
    plain: list[dict[str, object]] = [
        GREEDY,
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.3},  # cuts leave the most likely token
        {"temperature": 0.0, "logprobs": 3, "stop_token_ids": (4,)},
        {"temperature": 0.0, "ignore_eos": True},
    ]
    sequences = random_sequences(torch.Generator().manual_seed(2), *plain)
    reached = sequence(9, [1], [5, 6], temperature=0.0, min_tokens=2)
    reached.row = next(row for row in range(MAX_ROWS) if row not in {item.row for item in sequences})
    chunks = [newest(item) for item in [*sequences, reached]]
    table = table_of([*sequences, reached], kernel_device)
    assert sampler_on(kernel_device).draw(random_logits(5).to(kernel_device), chunks, table) is None


def test_draws_made_ahead_are_those_of_the_stream(kernel_device: torch.device, monkeypatch) -> None:
    """Flat logits: the token is that of the smallest hash."""
    made_at: list[int] = []

    def counted(seed: int, first: int, count: int) -> np.ndarray:
        made_at.append(first)
        return draw_keys(seed, first, count)

    monkeypatch.setattr(device_sampler, "draw_keys", counted)
    sampler, item = sampler_on(kernel_device), sequence(77, [1], [], temperature=1.0)
    item.row = 0
    logits = torch.zeros(1, VOCAB, device=kernel_device)
    table = table_of([item], kernel_device)
    # in order over the borders, and back: a row that was preempted may draw for a token again
    for counter in [*range(2 * DRAWS_AHEAD + 3), 5]:
        item.output = [0] * counter
        drawn = sampler.draw(logits, [Chunk(item, counter, 1, True)], table)
        assert drawn is not None
        key = draw_keys(77, counter, 1)[0].tolist()
        assert drawn[0].tolist() == [min(range(VOCAB), key=lambda token, key=key: plain_hash(token, *key))], counter
    assert made_at == [0, DRAWS_AHEAD, 2 * DRAWS_AHEAD, 5]


def test_parameters_arrive_bit_by_bit(kernel_device: torch.device, monkeypatch) -> None:
    """Words of a key may have the bits of a NaN or of a denormal number, and a large top-k those of none in fp32."""
    words = np.array([[0x7F800001, 1], [-1, -(2**31)]], dtype=np.int32)
    monkeypatch.setattr(device_sampler, "draw_keys", lambda seed, first, count: words[seed : seed + 1])
    given: list[torch.Tensor] = []
    monkeypatch.setattr(device_sampler.sampling, "sample", lambda logits, *rest: given.extend(rest))
    params: list[dict[str, object]] = [
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1, "top_k": 9},
        {"temperature": 1.0, "top_k": 2**31 - 1},
        GREEDY,
    ]
    items = [sequence(seed, [1], [], **own) for seed, own in enumerate(params)]
    vocab = 2**24 + 1
    logits = torch.zeros(3, 1, device=kernel_device)
    DeviceSampler(vocab, EOS, MAX_ROWS, kernel_device).draw(logits, [newest(item) for item in items], logits)
    temperature, top_k, top_p, min_p, keys = (item.cpu() for item in given[:5])
    assert temperature.equal(torch.tensor([0.7, 1.0, 0.0])) and top_k.tolist() == [9, vocab, 0]
    assert top_p.equal(torch.tensor([0.8, 1.0, 1.0])) and min_p.equal(torch.tensor([0.1, 0.0, 0.0]))
    assert keys.dtype == torch.int32 and keys.tolist() == [*words.tolist(), [0, 0]]


def test_two_requests_of_one_seed_draw_alike_and_of_another_do_not(kernel_device: torch.device) -> None:
    sampler, logits = sampler_on(kernel_device), torch.zeros(3, VOCAB, device=kernel_device)
    items = [sequence(seed, [1], [], temperature=1.0) for seed in (3, 3, 4)]
    chosen = []
    for counter in range(6):
        for item in items:
            item.output = [0] * counter
        drawn = sampler.draw(logits, [newest(item) for item in items], logits)
        assert drawn is not None
        chosen.append(drawn[0].tolist())
    first, second, other = zip(*chosen, strict=True)
    assert first == second != other


def test_nothing_is_kept_of_a_request_that_is_gone(kernel_device: torch.device) -> None:
    sampler, logits = sampler_on(kernel_device), random_logits(2).to(kernel_device)
    items = [sequence(seed, [1], [], temperature=1.0) for seed in (3, 4)]
    sampler.draw(logits, [newest(item) for item in items], logits)
    assert len(sampler._draws) == 2
    gone = weakref.ref(items.pop())
    gc.collect()
    assert gone() is None and list(sampler._draws) == items
