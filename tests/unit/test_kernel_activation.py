"""The SiLU kernel against its torch twin."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.activation import MAX_BLOCK, silu_and_mul
from fineinfer.kernels.lora import AdapterPart

NAN = float("nan")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("bf16 only on a GPU")
    return getattr(torch, request.param)


@pytest.mark.parametrize(
    "shape", [(1, 1536), (0, 64), (3, 65), (9, 100), (5, 1), (2, MAX_BLOCK), (3, MAX_BLOCK + 1), (1, 14336)]
)
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    rows, intermediate = shape
    gate_up = torch.randn(rows, 2 * intermediate + 3, device=kernel_device, dtype=dtype)[:, :-3] * 4
    expected = reference.silu_and_mul(gate_up.double())
    wider = torch.full((rows, intermediate + 3), NAN, device=kernel_device, dtype=dtype)
    out = wider[:, :intermediate]
    assert silu_and_mul(gate_up, out) is out
    # rounded once, by half an ulp; exp in fp32 is good to a few ulps of fp32; fp16 has no small values below 6e-8
    rtol, atol = max(0.51 * torch.finfo(dtype).eps, 1e-5), 1e-7
    for ours in (out, silu_and_mul(gate_up)):
        torch.testing.assert_close(ours.double(), expected, rtol=rtol, atol=atol)
    assert wider[:, intermediate:].isnan().all()


@pytest.mark.parametrize("shape", [(1, 1536), (0, 64), (3, 65), (7, 100), (5, 1), (3, MAX_BLOCK + 1)])
def test_adapters_add_to_gate_and_up_of_their_rows(
    shape: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    rows, width = shape[0], 2 * shape[1]
    gate_up = torch.randn(rows, width + 3, device=kernel_device, dtype=dtype)[:, :-3] * 4
    row_slots = torch.tensor([3, -1, 0, -5, 1, 1, -1], dtype=torch.int32, device=kernel_device)[:rows]
    values = torch.full((rows, width), NAN, device=kernel_device, dtype=dtype)
    values[row_slots >= 0] = torch.randn(rows, width, device=kernel_device).to(dtype)[row_slots >= 0]
    added = (gate_up.float() + values.float().where((row_slots >= 0)[:, None], 0.0)).to(dtype)
    before = gate_up.clone()
    got = silu_and_mul(gate_up, part=AdapterPart(values, row_slots))
    torch.testing.assert_close(got, silu_and_mul(added), rtol=0, atol=0)
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter: exp gives inf, as it should
def test_extreme_gates(dtype: torch.dtype, kernel_device: torch.device) -> None:
    gate = torch.tensor([-30000.0, -100.0, -0.0, 100.0, 30000.0], device=kernel_device, dtype=dtype)
    ours = silu_and_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(ours, gate.clamp(min=0))


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    gate_up = torch.ones(2, 8, device=kernel_device)
    calls = [
        lambda: silu_and_mul(gate_up[:, :7]),
        lambda: silu_and_mul(gate_up[:, :0]),
        lambda: silu_and_mul(gate_up.T),
        lambda: silu_and_mul(gate_up, gate_up[:, :3]),
        lambda: silu_and_mul(gate_up, gate_up[:, :4].half()),
        lambda: silu_and_mul(gate_up, gate_up[:, ::2]),
        lambda: silu_and_mul(gate_up, part=AdapterPart(gate_up[:1], torch.zeros(2, device=kernel_device).int())),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
