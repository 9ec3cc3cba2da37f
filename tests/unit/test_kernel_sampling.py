"""Sampling kernels against their torch twins and against the probabilities themselves."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference_sampling as reference
from fineinfer.kernels import sampling

NAN, INF = float("nan"), float("inf")
POISON = -7


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.float16, *([torch.bfloat16] if device.type == "cuda" else [])]


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    token, ok = torch.full((2, num_rows), POISON, dtype=torch.int32, device=device)
    return token, ok


def run(logits: torch.Tensor, device: torch.device, settings: list[tuple], uniform: torch.Tensor) -> tuple[list, list]:
    """Tokens and flags of the kernel; ``settings`` are (temperature, top_k, top_p, min_p) of each row."""
    heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    parameters = (heat.float(), top_k.int(), top_p.float(), min_p.float(), uniform.float())
    token, ok = outputs(len(logits), device)
    sampling.sample(logits.to(device), *(item.to(device) for item in parameters), token, ok)
    return token.tolist(), ok.tolist()


def check_draw(logits: torch.Tensor, setting: tuple, uniform: float, token: int) -> None:
    """The token is kept, and its share of the cumulative mass holds the uniform number, give or take rounding."""
    heat, top_k, top_p, min_p = torch.tensor(setting, dtype=torch.float32).tolist()
    weights = reference.kept_weights(logits, heat, int(top_k), top_p, min_p).double()
    cumulative = weights.cumsum(0) / weights.sum()
    assert weights[token] > 0
    assert cumulative[token] - weights[token] / weights.sum() - 2e-6 <= uniform <= cumulative[token] + 2e-6


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
    for dtype in dtypes(kernel_device):
        logits = randn(rows, vocab, seed=vocab).to(dtype)
        uniform = torch.rand(rows, generator=torch.Generator().manual_seed(vocab))
        uniform[::7], uniform[1::7] = 0.0, 1.0
        tokens, ok = run(logits, kernel_device, settings, uniform)
        heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
        want, want_ok = outputs(rows, torch.device("cpu"))
        reference.sample(logits, heat, top_k, top_p, min_p, uniform, want, want_ok)
        assert ok == want_ok.tolist() == [1] * rows
        for row, token in enumerate(tokens):
            if token != want[row]:  # rounding at a boundary only
                check_draw(logits[row], settings[row], float(uniform[row]), token)
        assert sum(token == int(other) for token, other in zip(tokens, want, strict=True)) >= rows - 1


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (1.3, 7, 0.8, 0.0), (0.7, 0, 0.9, 0.05)])
def test_draws_over_a_grid_of_uniforms_have_the_probabilities_of_the_kept_set(kernel_device, setting):
    vocab, draws = 65, 256 if kernel_device.type == "cuda" else 20
    logits = randn(1, vocab, seed=3)
    uniform = (torch.arange(draws) + 0.5) / draws
    tokens, _ = run(logits.expand(draws, vocab), kernel_device, [setting] * draws, uniform)
    for token, number in zip(tokens, uniform.tolist(), strict=True):
        check_draw(logits[0], setting, number, token)
    assert tokens == sorted(tokens), "the draw is in vocabulary order"
    weights = reference.kept_weights(logits[0], *setting)
    share = torch.bincount(torch.tensor(tokens), minlength=vocab) / draws
    assert ((share - weights / weights.sum()).abs() <= 1.01 / draws).all()


def test_tied_logits_are_kept_together_and_zeros_are_one(kernel_device):
    logits = torch.full((1, 100), -5.0)
    logits[0, [10, 20, 30]] = torch.tensor([0.0, -0.0, 0.0])
    uniform = torch.arange(6) / 6
    for setting in [(1.0, 1, 1.0, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 2, 0.1, 1.0)]:
        tokens, _ = run(logits.expand(6, 100), kernel_device, [setting] * 6, uniform)
        assert set(tokens) == {10, 20, 30}


def test_the_nucleus_is_what_transformers_keep(kernel_device):
    from transformers import TopPLogitsWarper

    logits = randn(1, 300, seed=4, scale=2.0)
    kept = TopPLogitsWarper(0.7)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())[0] > -INF
    draws = 400 if kernel_device.type == "cuda" else 16
    tokens, _ = run(logits.expand(draws, 300), kernel_device, [(1.0, 0, 0.7, 0.0)] * draws, torch.arange(draws) / draws)
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
        tokens, ok = run(logits, kernel_device, [(0.0, 3, 0.5, 0.1)] * 5, torch.zeros(5))
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
    uniform = torch.rand(7, generator=torch.Generator().manual_seed(1))
    for setting in [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0)]:
        tokens, ok = run(logits, kernel_device, [setting] * 7, uniform)
        assert ok == want
        assert all(token == 0 for token, usable in zip(tokens, ok, strict=True) if not usable)
        assert tokens[4] >= 4990
        for row in (0, 6):
            alone, _ = run(logits[row : row + 1], kernel_device, [setting], uniform[row : row + 1])
            assert alone == [tokens[row]]
    token, ok = outputs(7, kernel_device)
    sampling.argmax(logits.to(kernel_device), token, ok)
    assert ok.tolist() == want and token.tolist() == run(logits, kernel_device, [(0.0, 0, 1.0, 0.0)] * 7, uniform)[0]


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
    sampling.sample(logits, real, none, real, real, real, none, none)
    sampling.argmax(logits, none, none)
    sampling.penalize(logits, torch.zeros(4, 9, dtype=torch.int32, device=kernel_device), none, none, none, *[real] * 3)
    with pytest.raises(ValueError, match="logits"):
        sampling.argmax(logits.double(), none, none)
    with pytest.raises(ValueError, match="int32"):
        sampling.argmax(logits, none.long(), none)
    with pytest.raises(ValueError, match="workspace"):
        sampling.argmax(logits, none, none, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens"):
        sampling.penalize(logits, none, none, none, none, real, real, real)
    with pytest.raises(ValueError, match="float32"):
        sampling.add_at(logits, none, none, real.half())
