"""The norm kernels against their torch twins."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.lora import AdapterPart
from fineinfer.kernels.norm import MAX_HIDDEN, add_rms_norm, rms_norm

EPS = 1e-5
SHAPES = [(1, 576), (0, 64), (3, 65), (2, 5120), (5, 3), (7, 100), (1, MAX_HIDDEN)]
NAN = float("nan")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("bf16 only on a GPU")
    return getattr(torch, request.param)


def rtol(dtype: torch.dtype) -> float:
    """Two roundings of half an ulp each, and a little for the fp32 sum (of up to 16,384 squares)."""
    return max(1.1 * torch.finfo(dtype).eps, 1e-5)


def strided(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows with a gap of five columns between them."""
    return torch.randn(rows, columns + 5, device=device, dtype=dtype)[:, :columns]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    x, weight = strided(*shape, dtype, kernel_device) * 3, torch.randn(shape[1], device=kernel_device, dtype=dtype)
    expected = reference.rms_norm(x.double(), weight.double(), EPS)
    poisoned = torch.full_like(strided(*shape, dtype, kernel_device), NAN)
    assert rms_norm(x, weight, EPS, out=poisoned) is poisoned
    for ours in (poisoned, rms_norm(x, weight, EPS)):
        torch.testing.assert_close(ours.double(), expected, rtol=rtol(dtype), atol=1e-6)
    torch.testing.assert_close(rms_norm(x, weight, EPS, out=x), poisoned, rtol=0, atol=0)  # in place


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    x, delta = strided(*shape, dtype, kernel_device), torch.randn(*shape, device=kernel_device, dtype=dtype)
    weight = torch.randn(shape[1], device=kernel_device, dtype=dtype)
    _, summed = reference.add_rms_norm(x, delta, weight, EPS)
    expected = reference.rms_norm(summed.double(), weight.double(), EPS)
    ours = add_rms_norm(x, delta, weight, EPS)
    torch.testing.assert_close(x, summed, rtol=0, atol=0)
    torch.testing.assert_close(ours.double(), expected, rtol=rtol(dtype), atol=1e-6)
    x.sub_(x)
    normed = reference.rms_norm(delta, weight, EPS)
    assert add_rms_norm(x, delta, weight, EPS, out=delta) is delta  # onto delta itself
    torch.testing.assert_close(delta, normed, rtol=rtol(dtype), atol=1e-6)


@pytest.mark.parametrize("wide", [False, True])  # the stream and what is added to it fp32
@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_add_to_the_delta_of_their_rows(
    shape: tuple[int, int], wide: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    stream = torch.float32 if wide else dtype
    x, delta = strided(*shape, stream, kernel_device), strided(*shape, stream, kernel_device)
    weight = torch.randn(shape[1], device=kernel_device).to(dtype)
    row_slots = torch.tensor([3, -1, 0, -5, 1, 1, -1], dtype=torch.int32, device=kernel_device)[: shape[0]]
    has_adapter = (row_slots >= 0)[:, None]
    values = torch.full(shape, NAN, device=kernel_device, dtype=dtype)
    values[row_slots >= 0] = torch.randn(shape, device=kernel_device).to(dtype)[row_slots >= 0]
    expected_x, added = x.clone(), (delta.float() + values.float().where(has_adapter, 0.0)).to(stream)
    expected = add_rms_norm(expected_x, added, weight, EPS)
    got = add_rms_norm(x, delta, weight, EPS, part=AdapterPart(values, row_slots))
    torch.testing.assert_close(x, expected_x, rtol=0, atol=0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_halves_are_rounded_where_torch_rounds_them(dtype: torch.dtype, kernel_device: torch.device) -> None:
    if dtype == torch.float32:
        pytest.skip("nothing to round")
    x, delta = (torch.randn(9, 576, device=kernel_device, dtype=dtype) for _ in range(2))
    weight = torch.randn(576, device=kernel_device, dtype=dtype)
    expected, _ = reference.add_rms_norm(x, delta, weight, EPS)
    # one rounding less differs in a quarter of the values, another order of the fp32 sum in less than one of a thousand
    assert (add_rms_norm(x, delta, weight, EPS) != expected).double().mean() < 0.01


@pytest.mark.parametrize("wide_delta", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_fp32_stream_under_half_weights_is_rounded_once(
    shape: tuple[int, int], wide_delta: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    if dtype == torch.float32:
        pytest.skip("nothing to round")
    x = strided(*shape, torch.float32, kernel_device) * 3
    delta, weight = torch.randn(*shape, device=kernel_device), torch.randn(shape[1]).to(kernel_device, dtype)
    delta = delta if wide_delta else delta.to(dtype)
    normed, summed = reference.add_rms_norm(x, delta, weight, EPS)
    assert normed.dtype == dtype and summed.dtype == torch.float32
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    plain, ours = rms_norm(x, weight, EPS), add_rms_norm(x, delta, weight, EPS)
    assert plain.dtype == ours.dtype == dtype
    torch.testing.assert_close(x, summed, rtol=0, atol=0)  # no bit of the sum is lost
    half_ulp = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(plain.double(), exact, rtol=half_ulp, atol=1e-6)
    exact = reference.rms_norm(summed.double(), weight.double(), EPS)
    for found in (ours, normed):
        torch.testing.assert_close(found.double(), exact, rtol=half_ulp, atol=1e-6)


def test_the_twin_has_gradients() -> None:
    x, delta, weight = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (3, 4), (4,)))
    assert torch.autograd.gradcheck(lambda *inputs: reference.add_rms_norm(*inputs, EPS), (x, delta, weight))


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    wide, slots = torch.ones(1, MAX_HIDDEN + 1, device=kernel_device), torch.zeros(2, device=kernel_device).int()
    calls = [
        lambda: rms_norm(x, weight[:7], EPS),
        lambda: rms_norm(x.half(), weight, EPS),
        lambda: rms_norm(x, weight.half(), EPS, out=x),
        lambda: add_rms_norm(x.half(), x, weight.half(), EPS),
        lambda: rms_norm(x.T, weight[:2], EPS),
        lambda: rms_norm(x, weight, EPS, out=x[:1]),
        lambda: rms_norm(x, weight, EPS, out=x.half()),
        lambda: rms_norm(wide, wide[0], EPS),
        lambda: add_rms_norm(x, x[:1], weight, EPS),
        lambda: add_rms_norm(x, x.half(), weight, EPS),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, out=x),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, part=AdapterPart(x[:1], slots)),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, part=AdapterPart(x.double(), slots)),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, part=AdapterPart(x.T.contiguous().T, slots)),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, part=AdapterPart(x.clone(), slots[:1])),
        lambda: add_rms_norm(x, x.clone(), weight, EPS, part=AdapterPart(x.clone(), slots.long())),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
