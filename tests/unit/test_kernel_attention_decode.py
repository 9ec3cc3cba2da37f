"""Decode attention kernel against its torch twin."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import attention_decode as kernel
from fineinfer.kernels import reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def dtypes(device: torch.device) -> list[torch.dtype]:
    half = [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]
    return [torch.float32, *half]


class Case:
    """A batch over a shuffled pool; the kernel's result and the twin's in fp32."""

    def __init__(
        self,
        lengths: list[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        num_slots: int = 0,
    ) -> None:
        heads, kv_heads, head_dim = shape
        torch.manual_seed(len(lengths) + sum(lengths))
        batch, longest, count = len(lengths), max(lengths, default=0), max(sum(lengths), 1)
        self.pool = torch.full((max(count, num_slots), 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        order = torch.randperm(len(self.pool))[:count] if num_slots == 0 else len(self.pool) - 1 - torch.randperm(count)
        self.pool[order.to(device)] = torch.randn(count, 2, kv_heads, head_dim, device=device).to(dtype)
        self.table = torch.zeros(batch + 3, longest + 5, dtype=torch.int32, device=device)
        self.rows = (torch.randperm(batch + 3)[:batch]).to(torch.int32).to(device)
        first = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.table[row, :length] = order[first : first + length].to(torch.int32).to(device)
            first += length
        qkv = torch.randn(batch, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
        self.q = qkv[:, :heads]  # strided, as the runner hands it over
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.plan = kernel.DecodePlan.allocate(batch + 2, heads, kv_heads, head_dim, window, device)
        self.out = torch.full((batch, heads, head_dim), float("nan"), dtype=dtype, device=device)
        self.window = window

    def run(self) -> torch.Tensor:
        kernel.plan(self.lengths, self.plan)
        return kernel.attention_decode(self.q, self.pool, self.table, self.rows, self.lengths, self.plan, self.out)

    def check(self) -> None:
        live = self.lengths > 0
        expected = reference.attention_decode(
            self.q[live].float(),
            self.pool.float(),
            self.table[self.rows.long()[live]],
            self.lengths[live],
            self.window,
        )
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(self.out[live].float(), expected, atol=tolerance, rtol=tolerance)
        assert self.out[~live].isnan().all()  # padding rows are not touched


SHAPES = [(4, 2, 64), (9, 3, 80), (2, 2, 16), (32, 1, 128), (3, 3, 96)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_twin(shape, kernel_device: torch.device) -> None:
    for dtype in dtypes(kernel_device):
        for lengths in ([1], [64, 1, 65, 0, 300], [127, 128, 129]):
            case = Case(lengths, shape, dtype, kernel_device)
            case.run()
            case.check()


def test_one_long_row_is_cut_into_many_chunks(kernel_device: torch.device) -> None:
    case = Case([2, 5000, 7], (4, 2, 32), torch.float32, kernel_device)
    case.run()
    case.check()
    assert case.plan.rows[1, 1] > 30
    assert int(case.plan.sizes[0]) == int(case.plan.rows[:3, 1].sum()) <= case.plan.target + 3


@pytest.mark.parametrize("window", [1, 64, 100, 1000])
def test_window(window: int, kernel_device: torch.device) -> None:
    case = Case([1, 99, 100, 101, 400, 0], (4, 2, 64), torch.float32, kernel_device, window)
    case.run()
    case.check()


def test_a_plan_is_used_again_for_other_lengths(kernel_device: torch.device) -> None:
    case = Case([500, 3, 600], (4, 2, 64), torch.float32, kernel_device)
    case.run()
    case.lengths.copy_(torch.tensor([2, 3, 0]))
    case.out.fill_(float("nan"))
    case.run()
    case.check()


def test_no_rows_and_wrong_shapes(kernel_device: torch.device) -> None:
    case = Case([], (4, 2, 64), torch.float32, kernel_device)
    assert case.run().shape == (0, 4, 64)
    case = Case([3, 4], (4, 2, 64), torch.float32, kernel_device)
    with pytest.raises(ValueError, match="does not fit"):
        kernel.attention_decode(case.q[..., :32], case.pool, case.table, case.rows, case.lengths, case.plan, case.out)
    with pytest.raises(ValueError, match="rows in a plan"):
        kernel.plan(torch.ones(9, dtype=torch.int32, device=kernel_device), case.plan)


@pytest.mark.gpu
def test_huge_slot_indices() -> None:
    """Offsets past 2^31 elements: 9 GB of pool of which the last slots are used."""
    case = Case([70, 1, 200], (8, 8, 128), torch.bfloat16, torch.device("cuda"), num_slots=2_200_000)
    case.run()
    expected = reference.attention_decode(case.q, case.pool, case.table[case.rows.long()], case.lengths)
    torch.testing.assert_close(case.out, expected, atol=1.6e-2, rtol=1.6e-2)
