"""The linear map of a few rows against torch."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.few_rows_linear import MAX_ROWS, few_rows_gated, few_rows_linear


@pytest.mark.parametrize(("out_features", "in_features"), [(16, 512), (100, 576), (65, 80), (1, 1537)])
def test_equals_torch(out_features: int, in_features: int, kernel_device: torch.device) -> None:
    for dtype in [torch.float16] + [torch.bfloat16] * (kernel_device.type == "cuda"):
        for num_rows in (0, 1, 3, MAX_ROWS):
            x = torch.randn(num_rows, in_features, device=kernel_device).to(dtype)
            weight = torch.randn(out_features, in_features, device=kernel_device).to(dtype)
            bias = torch.randn(out_features, device=kernel_device).to(dtype)
            for added in (None, bias):
                expected = x.double() @ weight.double().T + (0 if added is None else added.double())
                ours = few_rows_linear(x, weight, added)
                tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
                torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)
                assert ours.dtype == dtype and ours.shape == (num_rows, out_features)
                wide = few_rows_linear(x, weight, added, torch.float32)
                assert wide.dtype == torch.float32
                torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5 * in_features**0.5)
                given = torch.full_like(wide, float("nan"))
                assert few_rows_linear(x, weight, added, out=given) is given and torch.equal(given, wide)


@pytest.mark.parametrize(("intermediate", "in_features"), [(16, 256), (100, 576), (33, 80)])
def test_gated_equals_its_two_steps(intermediate: int, in_features: int, kernel_device: torch.device) -> None:
    for dtype in [torch.float16] + [torch.bfloat16] * (kernel_device.type == "cuda"):
        for num_rows in (0, 1, 5, MAX_ROWS):
            x = torch.randn(num_rows, in_features, device=kernel_device).to(dtype)
            weight = torch.randn(2 * intermediate, in_features, device=kernel_device).to(dtype) / in_features**0.5
            expected = reference.silu_and_mul(x.float() @ weight.float().T)
            tolerance = 4e-3 if dtype == torch.float16 else 3e-2
            ours = few_rows_gated(x, weight)
            torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)
            assert ours.dtype == dtype and ours.shape == (num_rows, intermediate)


def test_refuses_what_it_cannot_serve(kernel_device: torch.device) -> None:
    x, weight = torch.zeros(2, 32, device=kernel_device).half(), torch.zeros(8, 32, device=kernel_device).half()
    with pytest.raises(ValueError, match="by a weight"):
        few_rows_linear(x, weight, out=x.new_empty(1, 8))
    for bad_x, bad_weight in ((x[:, :16], weight), (x, weight.float()), (x.repeat(9, 1), weight)):
        with pytest.raises(ValueError, match="by a weight"):
            few_rows_linear(bad_x, bad_weight)
        with pytest.raises(ValueError, match="by a weight"):
            few_rows_gated(bad_x, bad_weight)
