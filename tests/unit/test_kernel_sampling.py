"""Sampling kernels against their torch twins and against the probabilities themselves."""

from __future__ import annotations

import math

import pytest
import torch

from fineinfer.kernels import reference_noise, sampling
from fineinfer.kernels import reference_sampling as reference

NAN, INF = float("nan"), float("inf")
POISON = -7


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.float16, *([torch.bfloat16] if device.type == "cuda" else [])]


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    token, ok = torch.full((2, num_rows), POISON, dtype=torch.int32, device=device)
    return token, ok


def random_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count, 2), generator=torch.Generator().manual_seed(seed)).int()


def run(logits: torch.Tensor, device: torch.device, settings: list[tuple], keys: torch.Tensor) -> tuple[list, list]:
    """Tokens and flags of the kernel; ``settings`` are (temperature, top_k, top_p, min_p) of each row."""
    heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    parameters = (heat.float(), top_k.int(), top_p.float(), min_p.float(), keys)
    token, ok = outputs(len(logits), device)
    sampling.sample(logits.to(device), *(item.to(device) for item in parameters), token, ok)
    return token.tolist(), ok.tolist()


def arrivals(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Times [draws, V] at which tokens of these weights [V] arrive in the race of each key."""
    tokens = torch.arange(len(weights), dtype=torch.int32)
    hashes = reference_noise.token_hash(tokens, keys[:, :1], keys[:, 1:])
    return reference_noise.exponential(hashes).double() / weights.double()


def check_draw(logits: torch.Tensor, setting: tuple, key: torch.Tensor, token: int) -> None:
    """The token is kept, and none arrives before it, give or take rounding."""
    heat, top_k, top_p, min_p = torch.tensor(setting, dtype=torch.float32).tolist()
    weights = reference.kept_weights(logits, heat, int(top_k), top_p, min_p)
    times = arrivals(weights, key[None])[0]
    assert weights[token] > 0
    assert times[token] <= times.min() * (1 + 1e-5)


def check_frequencies(tokens: list[int], weights: torch.Tensor) -> None:
    """Pearson's test, at 5 standard deviations of its statistic; tokens expected less than 5 times count as one."""
    want = weights.double() / weights.double().sum() * len(tokens)
    got = torch.bincount(torch.tensor(tokens), minlength=len(weights)).double()
    assert (got[want == 0] == 0).all(), "a token that is cut off was drawn"
    rare = want < 5
    want, got = (torch.cat((item[~rare], item[rare].sum()[None])) for item in (want, got))
    want, got = want[want > 0], got[want > 0]
    statistic, freedom = float(((got - want) ** 2 / want).sum()), len(want) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom), (statistic, freedom)


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.7, 0, 0.8, 0.0),
    (0.9, 0, 1.0, 0.2),
    (1.1, 40, 0.6, 0.02),
    (0.8, 10_000, 0.999, 0.0),
    (1e-30, 0, 0.5, 0.0),
    (2.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("vocab", [1, 3, 65, 576, 5000])
def test_sample_equals_the_twin(kernel_device, vocab):
    rows = len(SETTINGS) * (6 if kernel_device.type == "cuda" else 2)
    settings = (SETTINGS * rows)[:rows]
    keys = random_keys(rows, vocab)
    keys[::7], keys[1::7], keys[2::7, 1] = 0, -1, -(2**31)
    for dtype in dtypes(kernel_device):
        strided = randn(rows, vocab + 3, seed=vocab).to(kernel_device, dtype)[:, 1:-2]
        tokens, ok = run(strided, kernel_device, settings, keys)
        logits = strided.cpu()
        heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
        want, want_ok = outputs(rows, torch.device("cpu"))
        reference.sample(logits, heat, top_k, top_p, min_p, keys, want, want_ok)
        assert ok == want_ok.tolist() == [1] * rows
        for row, token in enumerate(tokens):
            if token != want[row]:  # rounding at a boundary only
                check_draw(logits[row], settings[row], keys[row], token)
        assert sum(token == int(other) for token, other in zip(tokens, want, strict=True)) >= rows - 1


CUTS = [(1.0, 0, 1.0, 0.0), (1.3, 7, 0.8, 0.0), (0.7, 0, 0.9, 0.05)]


@pytest.mark.parametrize("setting", CUTS)
def test_draws_of_the_kernel_have_the_probabilities_of_the_kept_set(kernel_device, setting):
    vocab, draws = 50, 20_000
    if kernel_device.type == "cpu":  # searching for thresholds takes the interpreter long
        draws = 400 if setting == CUTS[0] else 40
    logits = randn(1, vocab, seed=3, scale=1.5)
    keys = random_keys(draws, seed=5)
    tokens, _ = run(logits.expand(draws, vocab), kernel_device, [setting] * draws, keys)
    weights = reference.kept_weights(logits[0], *setting)
    check_frequencies(tokens, weights)
    assert sum(token != want for token, want in zip(tokens, arrivals(weights, keys).argmin(1), strict=True)) <= 1


@pytest.mark.parametrize("setting", CUTS)
def test_draws_of_the_twin_have_the_probabilities_of_the_kept_set_down_to_rare_tokens(setting):
    vocab, draws = 50, 400_000
    logits = torch.linspace(0.0, math.log(1e-4), vocab)[torch.randperm(vocab, generator=torch.manual_seed(6))]
    weights, keys = reference.kept_weights(logits, *setting), random_keys(draws, seed=7)
    tokens = arrivals(weights, keys).argmin(dim=1).tolist()
    check_frequencies(tokens, weights)
    if setting == CUTS[0]:
        share = weights / weights.sum()
        rare = [token for token in tokens if share[token] < 1e-3]
        assert share.min() < 3e-5 and len(rare) > 1000  # so that the test above looks at them
        check_frequencies(rare, torch.where(share < 1e-3, share, 0.0))
    some, ok = outputs(300, torch.device("cpu"))
    parameters = (torch.tensor(value).expand(300) for value in setting)
    reference.sample(logits.expand(300, vocab), *parameters, keys[:300], some, ok)
    assert some.tolist() == tokens[:300]


def test_rounding_of_the_logits_does_not_change_draws():
    """In another batch logits are rounded otherwise; 2 % of the mass is in 49,000 tokens that weigh 4e-7 each."""
    vocab, draws, generator = 49_152, 1000, torch.Generator().manual_seed(8)
    logits = torch.randn(vocab, generator=generator) + 20.0
    logits[torch.randperm(vocab, generator=generator)[:3]] += 14.0
    again = (logits.double() * (1 + 1e-7 * torch.randn(vocab, generator=generator, dtype=torch.float64))).float()
    first, second = (reference.kept_weights(item, 1.0, 0, 1.0, 0.0) for item in (logits, again))
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
    walked = []
    for weights in (first, second):
        cumulative = weights.double().cumsum(0)
        walked.append(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    assert int((walked[0] != walked[1]).sum()) >= 5, "these logits do not tell one way to draw from the other"
    drawn = [[reference.race(weights, *key) for key in random_keys(draws, 9).tolist()] for weights in (first, second)]
    assert sum(logits[token] < 30.0 for token in drawn[0]) >= 5, "no draw fell into the tail"
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (100.0, 0, 1.0, 0.0), (2.0, 3, 0.9, 0.1)])
def test_what_is_masked_is_never_drawn_and_what_is_left_alone_always(kernel_device, setting):
    vocab, draws = 9001, 200 if kernel_device.type == "cuda" else 6
    masked = torch.zeros(1, vocab)
    masked[0, ::2], masked[0, 4200:] = -INF, -INF
    alone = torch.full((1, vocab), -INF)
    alone[0, 8999] = -50.0
    logits, keys = torch.cat((masked.expand(draws, vocab), alone.expand(draws, vocab))), random_keys(2 * draws)
    tokens, ok = run(logits, kernel_device, [setting] * 2 * draws, keys)
    want, want_ok = outputs(2 * draws, torch.device("cpu"))
    reference.sample(logits, *(torch.tensor(value).expand(2 * draws) for value in setting), keys, want, want_ok)
    for chosen, usable in ((tokens, ok), (want.tolist(), want_ok.tolist())):
        assert all(token % 2 == 1 and token < 4200 for token in chosen[:draws]) and usable == [1] * 2 * draws
        assert len(set(chosen[:draws])) > draws // 2
        assert chosen[draws:] == [8999] * draws
    assert tokens == want.tolist()


def test_blocks_that_hold_unlikely_tokens_only_take_part(kernel_device):
    vocab, draws = 3 * sampling.SPLIT - 5, 12
    logits = torch.full((1, vocab), -5.0)
    logits[0, 7] = 0.0
    keys = random_keys(draws)
    tokens, _ = run(logits.expand(draws, vocab), kernel_device, [(1.0, 0, 1.0, 0.0)] * draws, keys)
    assert tokens == arrivals(logits[0].exp(), keys).argmin(dim=1).tolist()
    assert {token // sampling.SPLIT for token in tokens} == {0, 1, 2}


def test_tied_logits_are_kept_together_and_zeros_are_one(kernel_device):
    logits = torch.full((1, 100), -5.0)
    logits[0, [10, 20, 30]] = torch.tensor([0.0, -0.0, 0.0])
    keys = random_keys(20)
    for setting in [(1.0, 1, 1.0, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 2, 0.1, 1.0)]:
        tokens, _ = run(logits.expand(20, 100), kernel_device, [setting] * 20, keys)
        assert set(tokens) == {10, 20, 30}


def test_the_nucleus_is_what_transformers_keep(kernel_device):
    from transformers import TopPLogitsWarper

    logits = randn(1, 300, seed=4, scale=2.0)
    kept = TopPLogitsWarper(0.7)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0] > -INF
    draws = 400 if kernel_device.type == "cuda" else 16
    tokens, _ = run(logits.expand(draws, 300), kernel_device, [(1.0, 0, 0.7, 0.0)] * draws, random_keys(draws))
    assert set(tokens) <= set(kept.nonzero()[:, 0].tolist())
    assert kept.equal(reference.kept_weights(logits[0], 1.0, 0, 0.7, 0.0) > 0)


@pytest.mark.parametrize("vocab", [1, 3, 100, 4096, 9001])
def test_argmax_equals_greedy_rows_and_takes_the_lowest_of_ties(kernel_device, vocab):
    for dtype in dtypes(kernel_device):
        # rows are strided, values are few: every row has ties, across the splits too
        logits = torch.randint(-9, 4, (5, vocab + 3), generator=torch.Generator().manual_seed(vocab)).to(dtype)[:, 1:-2]
        logits[3] = -0.0
        logits[3, ::2] = 0.0
        logits[4] -= 20.0
        want, want_ok = outputs(5, torch.device("cpu"))
        reference.argmax(logits, want, want_ok)
        on_device = logits.to(kernel_device)
        workspace = torch.full((6, sampling.num_splits(vocab)), POISON, dtype=torch.int64, device=kernel_device)
        for space in (None, workspace):
            token, ok = outputs(5, kernel_device)
            sampling.argmax(on_device, token, ok, space)
            assert token.tolist() == want.tolist() and ok.tolist() == want_ok.tolist() == [1] * 5
        tokens, ok = run(logits, kernel_device, [(0.0, 3, 0.5, 0.1)] * 5, random_keys(5))
        assert tokens == want.tolist() and ok == [1] * 5


def test_unusable_rows_are_told_and_leave_their_neighbours_alone(kernel_device):
    vocab = 5000
    logits = randn(7, vocab, seed=5)
    logits[1, 4999] = NAN
    logits[2, 17] = INF
    logits[3] = -INF
    logits[4, :4990] = -INF
    logits[5, 0], logits[5, 1] = -NAN, INF
    want = [1, 0, 0, 0, 1, 0, 1]
    keys = random_keys(7)
    for setting in [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0)]:
        tokens, ok = run(logits, kernel_device, [setting] * 7, keys)
        assert ok == want
        assert all(token == 0 for token, usable in zip(tokens, ok, strict=True) if not usable)
        assert tokens[4] >= 4990
        for row in (0, 6):
            alone, _ = run(logits[row : row + 1], kernel_device, [setting], keys[row : row + 1])
            assert alone == [tokens[row]]
    token, ok = outputs(7, kernel_device)
    sampling.argmax(logits.to(kernel_device), token, ok)
    assert ok.tolist() == want and token.tolist() == run(logits, kernel_device, [(0.0, 0, 1.0, 0.0)] * 7, keys)[0]


def penalty_case(length: int, vocab: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Tokens, rows, prompt lengths, total lengths and the three penalties of six rows over a table of seven."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (7, length + 2), generator=generator, dtype=torch.int32)[:, :length]
    rows = torch.tensor([6, 0, 3, 2, 5, 1], dtype=torch.int32)
    total = torch.tensor([length, length // 2, length, 1, 0, length], dtype=torch.int32)
    prompt = torch.minimum(torch.tensor([length // 3, 0, length, 1, 0, length // 2], dtype=torch.int32), total)
    factors = torch.tensor(
        [[1.3, 1.0, 0.7, 2.0, 1.5, 1.0], [0.5, 0.9, 1.0, -0.4, 1.0, 0.0], [0.1, 0.0, 0.3, 0.2, 1.0, 0.0]]
    )
    return tokens, rows, prompt, total, *factors.unbind()


@pytest.mark.parametrize(("length", "vocab"), [(1, 3), (65, 20), (100, 576), (130, 5)])
def test_penalties_equal_the_twin(kernel_device, length, vocab):
    case = penalty_case(length, vocab, seed=length)
    logits = randn(6, vocab + 3, seed=length)[:, :vocab]  # strided rows
    want = logits.clone()
    reference.penalize(want, *case)
    padded = torch.full((6, vocab + 3), NAN, device=kernel_device)
    got = padded[:, :vocab].copy_(logits)
    sampling.penalize(got, *(item.to(kernel_device) for item in case))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=2e-6)  # a few operations in fp32
    assert got[5].cpu().equal(logits[5]), "a row without penalties does not change"
    assert padded[:, vocab:].isnan().all()


def test_added_values_equal_the_twin(kernel_device):
    logits = randn(9, 65)
    for num_entries in (0, 1, 300):
        order = torch.randperm(9 * 65, generator=torch.Generator().manual_seed(num_entries))[:num_entries]
        values = randn(num_entries, seed=1)
        values[::5] = -INF
        case = ((order // 65).int(), (order % 65).int(), values)
        want, got = logits.clone(), logits.to(kernel_device, copy=True)
        reference.add_at(want, *case)
        sampling.add_at(got, *(item.to(kernel_device) for item in case))
        assert got.cpu().equal(want)


def test_no_rows_and_wrong_arguments(kernel_device):
    none = torch.zeros(0, dtype=torch.int32, device=kernel_device)
    real = torch.zeros(0, device=kernel_device)
    logits = torch.zeros(0, 65, device=kernel_device)
    keys = torch.zeros(0, 2, dtype=torch.int32, device=kernel_device)
    sampling.sample(logits, real, none, real, real, keys, none, none)
    sampling.argmax(logits, none, none)
    sampling.penalize(logits, torch.zeros(4, 9, dtype=torch.int32, device=kernel_device), none, none, none, *[real] * 3)
    with pytest.raises(ValueError, match="logits"):
        sampling.argmax(logits.double(), none, none)
    with pytest.raises(ValueError, match="int32"):
        sampling.argmax(logits, none.long(), none)
    two = torch.zeros(2, dtype=torch.int32, device=kernel_device)
    for wrong in (keys.float(), none, torch.zeros(2, 2, dtype=torch.int32).T[:2], two[:, None].expand(2, 2)):
        rows = 2 if len(wrong) else 0
        with pytest.raises(ValueError, match="keys"):
            sampling.sample(
                logits.new_zeros(rows, 65), *(x.new_zeros(rows) for x in (real, none, real, real)), wrong, two[:rows],
                two[:rows],
            )  # fmt: skip
    with pytest.raises(ValueError, match="workspace"):
        sampling.argmax(logits, none, none, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens"):
        sampling.penalize(logits, none, none, none, none, real, real, real)
    with pytest.raises(ValueError, match="float32"):
        sampling.add_at(logits, none, none, real.half())
