"""LoRA in the norm and in the activation, against the twins after ``reference.lora_grouped``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.lora import RowExpansion, lora_expand, lora_shrink
from fineinfer.kernels.lora_epilogue import add_rms_norm_lora, silu_and_mul_lora
from fineinfer.kernels.norm import MAX_HIDDEN, add_rms_norm

EPS = 1e-5
NAN = float("nan")
MAX_RANK = 40
RANKS = [[4, 16, 7], [MAX_RANK, 0, 16], [0, 0, 0], [17, 1, MAX_RANK], [0, MAX_RANK, 3]]  # by slot, then module
SCALES = [[2.0, 0.5, 1.0], [0.25, 0.0, -2.0], [0.0, 0.0, 0.0], [-1.5, 0.7, 0.3], [0.0, 1.0, 3.0]]
# values of order 1 to 10: fp32 sums of up to 40 products; half types round the sum over the parts, the base output with
# the adapter, the stream and the normed value, each by half a unit in the last place
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("the interpreter's bf16 dot is wrong")
    return getattr(torch, request.param)


@dataclass
class Adapters:
    """Shrunk rows and B of one block; what no adapter owns is NaN, so that using it shows."""

    shrunk: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor
    segments: list[tuple[int, int, int]]  # slot, first row, end row
    row_slots: torch.Tensor
    widths: list[int]  # columns of each module

    @classmethod
    def random(
        cls,
        segments: list[tuple[int, int, int]],
        rows: int,
        widths: list[int],
        dtype: torch.dtype,
        device: torch.device,
        splits: int = 4,
    ) -> Adapters:
        modules = len(widths)
        ranks = torch.tensor(RANKS, dtype=torch.int32)[:, :modules].contiguous()
        shrunk = torch.full((splits, rows, modules * MAX_RANK), NAN)
        b = torch.full((len(RANKS), MAX_RANK, sum(widths)), NAN)
        row_slots = torch.full((rows,), -1, dtype=torch.int32)
        for slot, start, end in segments:
            row_slots[start:end] = slot
        for module, width in enumerate(widths):
            first, column = module * MAX_RANK, sum(widths[:module])
            for slot, own in enumerate(RANKS):
                b[slot, : own[module], column : column + width] = torch.randn(own[module], width) / MAX_RANK**0.5
            for slot, start, end in segments:
                rank = RANKS[slot][module]
                shrunk[:, start:end, first : first + rank] = torch.randn(splits, end - start, rank) / splits**0.5
        scales = torch.tensor(SCALES)[:, :modules].contiguous()
        tensors = shrunk.to(device), b.to(device, dtype), scales.to(device), ranks.to(device)
        return cls(*tensors, segments, row_slots.to(device), widths)

    @property
    def by_row(self) -> RowExpansion:
        """As kernels that expand row by row take it."""
        return RowExpansion(self.shrunk, self.b, self.scales, self.ranks, self.row_slots, MAX_RANK)

    def added_to(self, y: torch.Tensor) -> torch.Tensor:
        """``y`` with every adapter's part by the twin, in fp32: the summed rows are its input, A the identity."""
        out, eye = y.float().clone(), torch.eye(MAX_RANK, device=y.device).expand(len(RANKS), -1, -1)
        modules = self.ranks.shape[1]
        runs = [(start, end, slot) for slot, start, end in self.segments]
        for module, columns in enumerate(out.split(self.widths, dim=1)):
            own_b = self.b.split(self.widths, dim=2)[module].float().nan_to_num().transpose(1, 2)
            rows = self.shrunk.sum(0).chunk(modules, dim=1)[module].nan_to_num()
            reference.lora_grouped(rows, columns, runs, eye, own_b, self.scales[:, module].tolist())
        return out

    def tiles(self, rows: int, block_m: int) -> torch.Tensor:
        """Tiles of all rows, padding between them."""
        cut, covered = [(0, 0, 0)], 0
        for slot, start, end in [*self.segments, (-1, rows, rows)]:
            for owner, first, last in ((-1, covered, start), (slot, start, end)):
                cut += [(row, min(block_m, last - row), owner) for row in range(first, last, block_m)]
            covered = end
            cut.append((0, 0, 0))
        return torch.tensor(cut, dtype=torch.int32, device=self.b.device)


def strided(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows with a gap of five columns between them."""
    return torch.randn(rows, columns + 5, device=device).to(dtype)[:, :columns]


MIXED = [(0, 1, 3), (1, 3, 5), (2, 5, 6), (3, 6, 8), (4, 9, 10)]  # rows 0 and 8 have no adapter


@pytest.mark.parametrize(
    ("rows", "hidden", "segments"),
    [
        (1, 576, [(1, 0, 1)]),
        (12, 100, MIXED),
        (11, 65, MIXED),
        (10, 3, MIXED),
        (2, 5120, [(3, 1, 2)]),
        (2, MAX_HIDDEN, [(0, 1, 2)]),
        (3, 64, []),
    ],
)  # fmt: skip
def test_norm(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, hidden: int, segments: list[tuple[int, int, int]]
) -> None:
    adapters = Adapters.random(segments, rows, [hidden], dtype, kernel_device)
    x, delta = (strided(rows, hidden, dtype, kernel_device) for _ in range(2))
    weight = torch.randn(hidden, device=kernel_device).to(dtype)
    plain_x, untouched = x.clone(), delta.clone()
    added = adapters.added_to(delta)
    normed, summed = reference.add_rms_norm(x.float(), added, weight.float(), EPS)
    tolerance = TOLERANCE[dtype]
    out = torch.full_like(strided(rows, hidden, dtype, kernel_device), NAN)
    again = x.clone()
    assert add_rms_norm_lora(x, delta, weight, EPS, adapters.by_row, out=out) is out
    torch.testing.assert_close(x.float(), summed, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.float(), normed, rtol=tolerance, atol=tolerance)
    assert torch.equal(delta, untouched)
    # without an adapter: what the plain kernel gives, bit for bit in the stream
    plain = add_rms_norm(plain_x, delta, weight, EPS)
    base = (adapters.row_slots < 0).nonzero().flatten().tolist()
    base += [row for slot, start, end in segments if RANKS[slot][0] == 0 for row in range(start, end)]
    assert torch.equal(x[base], plain_x[base])
    torch.testing.assert_close(out[base], plain[base], rtol=max(1.1 * torch.finfo(dtype).eps, 1e-5), atol=1e-6)
    if segments:
        assert float((out.float() - plain.float()).abs().max()) > 0.01  # the adapters do something
    assert add_rms_norm_lora(again, delta, weight, EPS, adapters.by_row, out=delta) is delta  # onto delta itself
    assert torch.equal(delta, out) and torch.equal(again, x)


@pytest.mark.parametrize("wide_delta", [False, True])
def test_norm_of_an_fp32_stream(kernel_device: torch.device, dtype: torch.dtype, wide_delta: bool) -> None:
    adapters = Adapters.random(MIXED, 10, [576], dtype, kernel_device)
    x = strided(10, 576, torch.float32, kernel_device)
    delta = strided(10, 576, torch.float32 if wide_delta else dtype, kernel_device)
    weight, before = torch.randn(576, device=kernel_device).to(dtype), x.clone()
    added = adapters.added_to(delta)
    out = add_rms_norm_lora(x, delta, weight, EPS, adapters.by_row)
    assert out.dtype == dtype and x.dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(x - before, added.to(delta.dtype).float(), rtol=tolerance, atol=tolerance)
    base = adapters.row_slots < 0
    torch.testing.assert_close(x[base], (before + delta.float())[base], rtol=0, atol=0)  # no bit of the sum is lost
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    torch.testing.assert_close(out.double(), exact, rtol=max(0.51 * torch.finfo(dtype).eps, 1e-5), atol=1e-6)


@pytest.mark.parametrize("splits", [1, 16])
def test_norm_rounds_where_a_separate_expansion_does(
    kernel_device: torch.device, dtype: torch.dtype, splits: int
) -> None:
    adapters = Adapters.random(MIXED, 10, [576], dtype, kernel_device, splits)
    x, delta = (strided(10, 576, dtype, kernel_device) for _ in range(2))
    weight = torch.randn(576, device=kernel_device).to(dtype)
    expected_x, expanded = x.clone(), delta.clone()
    operands = adapters.shrunk, adapters.b, adapters.scales, adapters.ranks
    lora_expand(*operands, adapters.tiles(10, 16), MAX_RANK, 16, (0, 576), expanded)
    expected = add_rms_norm(expected_x, expanded, weight, EPS)
    got = add_rms_norm_lora(x, delta, weight, EPS, adapters.by_row)
    if dtype == torch.float32:
        torch.testing.assert_close(x, expected_x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:  # another order of the fp32 sums now and then falls on the other side of a rounding
        assert (x != expected_x).double().mean() < 0.02 and (got != expected).double().mean() < 0.05


@pytest.mark.parametrize(
    ("rows", "inner", "block_m", "segments"),
    [
        (1, 576, 16, [(1, 0, 1)]),
        (12, 100, 16, MIXED),
        (90, 65, 16, [(0, 3, 40), (3, 41, 58), (4, 58, 59), (1, 70, 71)]),
        (150, 130, 64, [(0, 3, 75), (3, 80, 82), (4, 82, 90), (2, 90, 91)]),
        (10, 3, 64, MIXED),
        (20, 300, 16, []),
    ],
)  # fmt: skip
def test_activation(
    kernel_device: torch.device,
    dtype: torch.dtype,
    rows: int,
    inner: int,
    block_m: int,
    segments: list[tuple[int, int, int]],
) -> None:
    adapters = Adapters.random(segments, rows, [inner, inner], dtype, kernel_device)
    gate_up = strided(rows, 2 * inner, dtype, kernel_device)
    before = gate_up.clone()
    out = torch.full_like(strided(rows, inner, dtype, kernel_device), NAN)
    operands = adapters.shrunk, adapters.b, adapters.scales, adapters.ranks, adapters.tiles(rows, block_m)
    assert silu_and_mul_lora(gate_up, *operands, MAX_RANK, block_m, out=out) is out
    expected = reference.silu_and_mul(adapters.added_to(gate_up))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(gate_up, before)
    assert torch.equal(silu_and_mul_lora(gate_up, *operands, MAX_RANK, block_m), out)
    if segments:
        assert float((expected - reference.silu_and_mul(before.float())).abs().max()) > 0.01


@pytest.mark.parametrize("splits", [1, 8])
def test_activation_after_the_shrink_kernel(kernel_device: torch.device, dtype: torch.dtype, splits: int) -> None:
    adapters = Adapters.random(MIXED, 10, [48, 48], dtype, kernel_device)
    tiles = adapters.tiles(10, 16)
    x = torch.randn(10, 200, device=kernel_device).to(dtype)
    a = (torch.randn(len(RANKS), 2 * MAX_RANK, 200, device=kernel_device) / 200**0.5).to(dtype)
    shrunk = torch.full((splits, 10, 2 * MAX_RANK), NAN, device=kernel_device)
    lora_shrink(x, a, adapters.ranks, tiles, MAX_RANK, 16, shrunk)
    assert shrunk[:, [0, 8]].isnan().all()  # tiles of no adapter
    gate_up = strided(10, 96, dtype, kernel_device)
    operands = shrunk, adapters.b, adapters.scales, adapters.ranks, tiles, MAX_RANK, 16
    got = silu_and_mul_lora(gate_up, *operands)
    lora_expand(*operands, (0, 48, 96), gate_up)
    expected = reference.silu_and_mul(gate_up.float())
    torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_no_rows_and_no_tiles(kernel_device: torch.device) -> None:
    adapters = Adapters.random([], 0, [8], torch.float32, kernel_device)
    x, weight = torch.empty(0, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    assert add_rms_norm_lora(x, x.clone(), weight, EPS, adapters.by_row).shape == (0, 8)
    adapters = Adapters.random([], 2, [8, 8], torch.float32, kernel_device)
    tiles, gate_up = adapters.tiles(0, 16), torch.ones(2, 16, device=kernel_device)
    out = torch.full((2, 8), 7.0, device=kernel_device)
    for some in (tiles, tiles[:0]):
        silu_and_mul_lora(
            gate_up, adapters.shrunk, adapters.b, adapters.scales, adapters.ranks, some, MAX_RANK, 16, out
        )
        assert (out == 7.0).all()  # padding is nobody's row


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    one = Adapters.random([(0, 0, 2)], 2, [8], torch.float32, kernel_device)
    two = Adapters.random([(0, 0, 2)], 2, [8, 8], torch.float32, kernel_device)
    x, weight = torch.ones(2, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    gate_up, tiles = torch.ones(2, 16, device=kernel_device), two.tiles(2, 16)

    def norm(changes: dict[str, torch.Tensor]) -> None:
        own = {name: value for name, value in changes.items() if name in RowExpansion._fields}
        operands = {"x": x, "delta": x.clone(), "weight": weight, "lora": one.by_row._replace(**own)}
        others = {name: value for name, value in changes.items() if name not in own}
        add_rms_norm_lora(eps=EPS, **{**operands, **others})

    def activation(changes: dict[str, torch.Tensor], block_m: int = 16) -> None:
        operands = {"gate_up": gate_up, "shrunk": two.shrunk, "b": two.b, "scales": two.scales, "ranks": two.ranks}
        silu_and_mul_lora(max_rank=MAX_RANK, block_m=block_m, **{**operands, "tiles": tiles, **changes})

    norm({})
    activation({})
    wrong_norms = [
        {"delta": x[:1]},
        {"delta": x.half()},
        {"weight": weight[:7]},
        {"shrunk": one.shrunk[:, :1]},
        {"shrunk": one.shrunk[:3].contiguous()},
        {"b": one.b.half()},
        {"b": one.b[:, :, :7]},
        {"scales": one.scales[:2]},
        {"ranks": two.ranks},
        {"row_slots": one.row_slots.long()},
        {"row_slots": one.row_slots[:1]},
        {"out": x},
        {"out": x[:1]},
        {"x": torch.ones(2, MAX_HIDDEN + 1, device=kernel_device)},
    ]
    wrong_activations = [
        {"gate_up": torch.ones(2, 15, device=kernel_device)},
        {"gate_up": gate_up.half()},
        {"shrunk": one.shrunk},
        {"ranks": one.ranks},
        {"ranks": two.ranks.long()},
        {"tiles": tiles[:, :2]},
        {"tiles": tiles.long()},
        {"out": x.half()},
    ]
    for call, changes in [*((norm, wrong) for wrong in wrong_norms), *((activation, w) for w in wrong_activations)]:
        with pytest.raises(ValueError):
            call(changes)
    with pytest.raises(ValueError):
        activation({}, block_m=24)
