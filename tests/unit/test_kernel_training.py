"""The kernels of the training step against their torch twins."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import activation_training, adamw, cross_entropy, dropout, reference, reference_training, rope
from fineinfer.kernels.norm_backward import rms_norm_backward
from fineinfer.kernels.reference_training import Expansion

EPS = 1e-5


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("bf16 only on a GPU")
    return getattr(torch, request.param)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once to the tensor's dtype; sums and exponentials in fp32 are good to a few of its ulps."""
    eps = torch.finfo(ours.dtype).eps
    scale = max(1e-6, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(ours.double(), expected.double(), rtol=max(0.51 * eps, 2e-5), atol=4e-6 * scale)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", [(3, 576), (0, 64), (2, 65), (1, 5120), (5, 3), (40, 16)])
def test_rms_norm_backward(
    shape: tuple[int, int], with_residual: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    grad, x, residual = (torch.randn(*shape, device=kernel_device, dtype=dtype) for _ in range(3))
    weight = torch.randn(shape[1], device=kernel_device, dtype=dtype)
    wide = [tensor.double() for tensor in (grad, x, weight)]
    expected_h = reference_training.rms_norm_backward(*wide, EPS, residual.double() if with_residual else None)
    ours = rms_norm_backward(grad, x, weight, EPS, residual if with_residual else None)
    close(grad, wide[0])
    torch.testing.assert_close(ours.double(), expected_h, rtol=max(1.1 * torch.finfo(dtype).eps, 1e-5), atol=1e-6)


def expansions(
    ranks: tuple[int, int], rows: int, intermediate: int, device: torch.device, dtype: torch.dtype
) -> list[Expansion | None]:
    """Of gate and up; rank 0 has none. Both have their ranks in one tensor."""
    xa, found = torch.randn(rows, sum(ranks), device=device, dtype=dtype), []
    for rank, columns in zip(ranks, xa.split(ranks, dim=1), strict=True):
        b = torch.randn(intermediate, rank, device=device, dtype=dtype) / 8
        found.append(Expansion(columns, b, 0.75) if rank else None)
    return found


@pytest.mark.parametrize("ranks", [(16, 16), (0, 0), (0, 5), (4, 0), (100, 33)])
@pytest.mark.parametrize("shape", [(3, 192), (0, 64), (65, 65), (9, 100), (5, 1)])
def test_silu_and_mul_with_an_adapter(
    shape: tuple[int, int], ranks: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    rows, intermediate = shape
    gate_up = torch.randn(rows, 2 * intermediate, device=kernel_device, dtype=dtype) * 4
    grad = torch.randn(rows, intermediate, device=kernel_device, dtype=dtype)
    parts = expansions(ranks, rows, intermediate, kernel_device, dtype)
    wide = [None if part is None else Expansion(part.xa.double(), part.b.double(), part.scaling) for part in parts]
    wide_gate_up, wide_grad = gate_up.double(), grad.double()
    forward = activation_training.silu_and_mul(gate_up, *parts)
    close(forward, reference_training.silu_and_mul(wide_gate_up, *wide))
    reference_training.silu_and_mul_backward(wide_grad, wide_gate_up, *wide)
    activation_training.silu_and_mul_backward(grad, gate_up, *parts)
    close(grad, forward)
    close(gate_up, wide_gate_up)


def heads(num_tokens: int, count: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, count, head_dim, device=device, dtype=dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", [(3, 9, 3, 64), (0, 4, 2, 8), (7, 1, 1, 2), (2, 5, 5, 96), (1, 32, 8, 128)])
def test_rope(shape: tuple[int, int, int, int], normed: bool, dtype: torch.dtype, kernel_device: torch.device) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    qkv = heads(num_tokens, num_heads + 2 * num_kv_heads, head_dim, kernel_device, dtype)
    cos, sin = (torch.randn(num_tokens, head_dim, device=kernel_device, dtype=dtype) for _ in range(2))
    norms = [torch.randn(head_dim, device=kernel_device, dtype=dtype) if normed else None for _ in range(2)]
    expected = qkv.clone()
    reference_training.rope(expected, cos, sin, num_heads, *norms, EPS)
    rope.rope(qkv, cos, sin, num_heads, *norms, EPS)
    tolerance = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(qkv, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 9, 3, 64), (0, 4, 2, 8), (7, 1, 1, 2), (2, 5, 5, 96), (1, 32, 8, 128)])
def test_rope_backward(shape: tuple[int, int, int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    wider = heads(num_tokens, num_heads + 3, head_dim, kernel_device, dtype)
    grads = (
        wider[:, 2:-1],  # tokens may be strided
        heads(num_tokens, num_kv_heads, head_dim, kernel_device, dtype),
        heads(num_tokens, num_kv_heads, head_dim, kernel_device, dtype),
    )
    cos, sin = (torch.randn(num_tokens, head_dim, device=kernel_device, dtype=dtype) for _ in range(2))
    ours = rope.rope_backward(*grads, cos, sin)
    close(ours, reference_training.rope_backward(*(tensor.double() for tensor in (*grads, cos, sin))))


@pytest.mark.parametrize("shape", [(3, 61), (0, 7), (2, 4096), (5, 9001), (4, 1)])
def test_cross_entropy(shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    num_rows, vocab = shape
    wider = torch.randn(num_rows, vocab + 3, device=kernel_device, dtype=dtype) * 6
    logits = wider[:, :vocab]
    targets = torch.randint(0, vocab, (num_rows,), device=kernel_device)
    if num_rows > 1:
        targets[1] = logits[1].argmax()
    expected = reference_training.cross_entropy(logits.double(), targets)
    beside = wider[:, vocab:].clone()
    losses, correct, gradient = cross_entropy.cross_entropy(logits, targets)
    assert gradient is logits and torch.equal(wider[:, vocab:], beside)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, expected[1]) and (num_rows < 2 or bool(correct[1]))
    # a target's gradient is its probability less 1: near 1 that has the absolute error of a number near 1
    atol = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(gradient.double(), expected[2], rtol=max(torch.finfo(dtype).eps, 2e-5), atol=atol)


def test_cross_entropy_of_one_id_far_above_the_others(kernel_device: torch.device) -> None:
    logits = torch.full((2, 300), -1e4, device=kernel_device)
    logits[:, 7] = 1e4
    losses, correct, gradient = cross_entropy.cross_entropy(logits, torch.tensor([7, 8], device=kernel_device))
    assert losses.tolist() == [0.0, 2e4] and correct.tolist() == [True, False]
    assert gradient[0].abs().max() == 0 and gradient[1, [7, 8]].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("count", [1, 1024, 5000])
def test_adamw(count: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    options = dict(learning_rate=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    copies = [torch.zeros(count, device=kernel_device, dtype=dtype) for _ in range(2)]
    states = [[torch.zeros(count, device=kernel_device) for _ in range(2)] for _ in range(2)]
    params = [torch.linspace(-2, 2, count, device=kernel_device) for _ in range(2)]
    for num_updates in (1, 2, 3):
        grads = torch.randn(count, device=kernel_device)
        grads[: count // 3] *= 1e-12
        given = grads.clone()
        options |= dict(grad_scale=0.3 * num_updates, num_updates=num_updates)
        copy = copies[0] if dtype != torch.float32 else None
        adamw.adamw(params[0], grads, *states[0], copy, **options)
        assert torch.equal(grads, given)
        reference_training.adamw(params[1], grads, *states[1], copies[1], **options)
        # tiny gradients move a parameter as far as others
        torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(states[0][0], states[1][0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(states[0][1], states[1][1], rtol=1e-6, atol=0)
        if copy is not None:
            assert torch.equal(copy, params[0].to(dtype))


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    qkv, turn = torch.ones(2, 4, 8, device=kernel_device), torch.ones(2, 8, device=kernel_device)
    ids, flat = torch.zeros(2, dtype=torch.int64, device=kernel_device), torch.ones(8, device=kernel_device)
    options = dict(grad_scale=1.0, learning_rate=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0, num_updates=1)
    calls = [
        lambda: rms_norm_backward(x[:1], x, weight, EPS),
        lambda: rms_norm_backward(x, x, weight.half(), EPS),
        lambda: rms_norm_backward(x, x, weight, EPS, x.half()),
        lambda: rms_norm_backward(x.T, x.T, weight[:2], EPS),
        lambda: activation_training.silu_and_mul_backward(x[:, :3], x, None, None),
        lambda: activation_training.silu_and_mul_backward(x[:, :4], x, None, None),
        lambda: activation_training.silu_and_mul(x, Expansion(x[:, :2], x[:, :2], 1.0), None),
        lambda: activation_training.silu_and_mul(x, None, Expansion(x[:, :2], x.view(8, 2)[:4].half(), 1.0)),
        lambda: activation_training.silu_and_mul(x, Expansion(x.T[:2, :2], x.view(8, 2)[:4], 1.0), None),
        lambda: rope.rope(qkv, turn, turn, 3),
        lambda: rope.rope(qkv, turn, turn[:1], 2),
        lambda: rope.rope(qkv, turn, turn.half(), 2),
        lambda: rope.rope(qkv, turn, turn, 2, weight),
        lambda: rope.rope(qkv, turn, turn, 2, weight, weight[:4]),
        lambda: rope.rope(qkv[..., :7], turn, turn, 2),
        lambda: rope.rope_backward(qkv, qkv, qkv[:, :2], turn, turn),
        lambda: rope.rope_backward(qkv, qkv.half(), qkv, turn, turn),
        lambda: rope.rope_backward(qkv, qkv.transpose(0, 1).contiguous().transpose(0, 1), qkv, turn, turn),
        lambda: cross_entropy.cross_entropy(x, ids[:1]),
        lambda: cross_entropy.cross_entropy(x, ids.int()),
        lambda: cross_entropy.cross_entropy(x.T, ids),
        lambda: adamw.adamw(flat, flat[:4], flat, flat, None, **options),
        lambda: adamw.adamw(flat, flat.half(), flat, flat, None, **options),
        lambda: adamw.adamw(flat, flat, flat, flat, flat[:4], **options),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


def test_the_twins_are_the_derivatives() -> None:
    x, weight, grad, residual = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6), (6,), (5, 6), (5, 6)))
    leaf = x.clone().requires_grad_()
    out = reference.rms_norm(leaf, weight, EPS)
    (expected,) = torch.autograd.grad(out, leaf, grad)
    again = reference_training.rms_norm_backward(grad, x, weight, EPS, residual)
    torch.testing.assert_close(grad, expected + residual)
    torch.testing.assert_close(again, out.detach())

    gate_up, grad = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    leaf = gate_up.clone().requires_grad_()
    out = reference.silu_and_mul(leaf)
    (expected,) = torch.autograd.grad(out, leaf, grad)
    reference_training.silu_and_mul_backward(grad, gate_up, None, None)
    torch.testing.assert_close(gate_up, expected)
    torch.testing.assert_close(grad, out.detach())

    logits, targets = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, 8, 3, 3])
    leaf = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    losses, _, gradient = reference_training.cross_entropy(logits, targets)
    torch.testing.assert_close(losses, loss.detach())
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("shape", [(3, 576), (0, 64), (4, 65), (5, 1), (2, 2500), (40, 16)])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 0.999])
def test_dropout_equals_its_twin_to_the_bit(
    shape: tuple[int, int], rate: float, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x = torch.randn(shape[0], shape[1] + 3, device=kernel_device, dtype=dtype)[:, :-3]  # rows may be strided
    keys = torch.randint(-(2**31), 2**31, shape[:1], device=kernel_device).to(torch.int32)
    before = x.clone()
    for salt in (0, 1, 16, 881):
        ours = dropout.dropout(x, keys, salt, rate)
        assert torch.equal(ours, reference_training.dropout(x, keys, salt, rate)) and ours.dtype == dtype
        assert torch.equal(x, before) and (rate > 0 or torch.equal(ours, x))


def test_dropout_leaves_what_is_not_finite_where_it_is_dropped(kernel_device: torch.device) -> None:
    keys = torch.arange(50, device=kernel_device, dtype=torch.int32) * 7919
    x = torch.full((50, 40), float("inf"), device=kernel_device)
    for op in (dropout.dropout, reference_training.dropout):
        ours = op(x, keys, 3, 0.5)
        assert not ours.isnan().any() and 0.4 < float(ours.isinf().double().mean()) < 0.6
    for wrong in (keys[:3], keys.long(), keys.repeat(2)[::2]):
        with pytest.raises(ValueError):
            dropout.dropout(x, wrong, 3, 0.5)
    with pytest.raises(ValueError):
        dropout.dropout(x.t(), keys[:40], 3, 0.5)
