"""Grouped LoRA kernels against their torch twin and a direct computation in fp64; the projection that launches them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fineinfer.adapters import batch
from fineinfer.adapters.batch import (
    AdapterSegment,
    DeviceProjection,
    RowAdapters,
    ServingProjection,
    lora_tiles,
    make_workspace,
    max_tiles,
)
from fineinfer.adapters.config import BLOCK_MODULES, MODULES
from fineinfer.adapters.registry import AdapterRegistry, AdapterStacks
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.kernels import reference
from fineinfer.kernels.lora import lora_expand, lora_shrink, shrink_splits, shrunk_elements
from fineinfer.model.decoder import plain_project

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# against fp64 on the same inputs, values of order 1: fp32 sums of up to 576 products; half types round the shrunk
# values once and the result once, each by half a unit in the last place
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RANKS = [[4, 16, 64], [64, 0, 3], [0, 0, 0], [16, 17, 1], [0, 64, 16]]  # by slot, then module
SCALES = [[2.0, 0.5, 1.0], [0.25, 0.0, 3.0], [0.0, 0.0, 0.0], [1.0, -1.5, 0.7], [0.0, 1.0, 2.0]]


def skip_unless_supported(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bf16 dot is wrong")


@dataclass
class Case:
    """One fused block; what no adapter owns is NaN, so that reading it shows."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    ranks: torch.Tensor
    max_rank: int
    columns: tuple[int, ...]

    @classmethod
    def random(
        cls, rows: int, width_in: int, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device, top: int = 64
    ) -> Case:
        generator = torch.Generator().manual_seed(rows * 1000 + width_in)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        modules, slots = len(columns) - 1, len(RANKS)
        ranks = torch.tensor(RANKS, dtype=torch.int32)[:, :modules].clamp(max=top).contiguous()
        scales = torch.tensor(SCALES)[:, :modules].contiguous()
        a = torch.full((slots, modules * top, width_in), float("nan"))
        b = torch.full((slots, top, columns[-1]), float("nan"))
        for slot in range(slots):
            for module in range(modules):
                rank, first, end = int(ranks[slot, module]), columns[module], columns[module + 1]
                a[slot, module * top : module * top + rank] = normal(rank, width_in) / width_in**0.5
                b[slot, :rank, first:end] = normal(rank, end - first) / max(1, rank) ** 0.5
        x = normal(rows, width_in)
        moved = [tensor.to(device, dtype) for tensor in (x, a, b)]
        return cls(*moved, scales.to(device), ranks.to(device), top, columns)

    def run(
        self, y: torch.Tensor, tiles: torch.Tensor, block_m: int, num_splits: int | None = None, add: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        splits = num_splits or shrink_splits(*self.x.shape, self.columns[-1], block_m)
        out = torch.full((splits, len(self.x), self.a.shape[1]), float("nan"), device=y.device)
        if num_splits is None:  # as what a freed tensor left may be: adding up what is not written shows
            out.fill_(float("inf"))[1::2] = -float("inf")
        shrunk = lora_shrink(self.x, self.a, self.ranks, tiles, self.max_rank, block_m, out)
        operands = shrunk, self.b, self.scales, self.ranks, tiles
        result = lora_expand(*operands, self.max_rank, block_m, self.columns, y, add)
        return shrunk, result

    def exact(self, y: torch.Tensor, segments: list[AdapterSegment]) -> torch.Tensor:
        """In fp64, straight from the definition."""
        expected = y.double().clone()
        for slot, start, end in segments:
            for module, first in enumerate(self.columns[:-1]):
                rank, stop = int(self.ranks[slot, module]), self.columns[module + 1]
                a = self.a[slot, module * self.max_rank : module * self.max_rank + rank].double()
                delta = self.x[start:end].double() @ a.T @ self.b[slot, :rank, first:stop].double()
                expected[start:end, first:stop] += float(self.scales[slot, module]) * delta
        return expected

    def twin(self, y: torch.Tensor, segments: list[AdapterSegment]) -> torch.Tensor:
        """``reference.lora_grouped`` module by module in fp32; it wants zeros past the ranks."""
        expected, a, b = y.float().clone(), self.a.float().nan_to_num(), self.b.float().nan_to_num()
        runs = [(start, end, slot) for slot, start, end in segments]
        for module, first in enumerate(self.columns[:-1]):
            stop = self.columns[module + 1]
            own_a = a[:, module * self.max_rank : (module + 1) * self.max_rank]
            own_b = b[:, :, first:stop].transpose(1, 2)
            scales = self.scales[:, module].tolist()
            reference.lora_grouped(self.x.float(), expected[:, first:stop], runs, own_a, own_b, scales)
        return expected


def on_device(segments: list[AdapterSegment], rows: int, block_m: int, device: torch.device) -> torch.Tensor:
    """Tiles, two of them padding at least."""
    room = max_tiles(rows, len(segments), block_m) + 2
    return torch.from_numpy(lora_tiles(segments, rows, block_m, room)).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width_in", "columns", "block_m", "segments"),
    [
        (1, 576, (0, 576, 768, 960), 16, [(0, 0, 1)]),
        (65, 100, (0, 130, 195, 260), 16, [(0, 3, 20), (1, 20, 21), (2, 25, 30), (3, 30, 65)]),
        (100, 576, (0, 65, 130), 64, [(3, 1, 70), (1, 80, 99)]),
        (3, 65, (0, 3), 16, [(1, 1, 2), (4, 2, 3)]),
        (67, 256, (0, 160), 64, [(1, 0, 67)]),
    ],
)  # fmt: skip
def test_mixed_ranks_scales_and_missing_modules_match_the_twin(
    kernel_device: torch.device,
    dtype: torch.dtype,
    rows: int,
    width_in: int,
    columns: tuple[int, ...],
    block_m: int,
    segments: list[tuple[int, int, int]],
) -> None:
    skip_unless_supported(dtype, kernel_device)
    case = Case.random(rows, width_in, columns, dtype, kernel_device)
    runs = [AdapterSegment(*segment) for segment in segments]
    base = torch.randn(rows, columns[-1]).to(kernel_device, dtype)
    y = base.clone()
    _, got = case.run(y, on_device(runs, rows, block_m, kernel_device), block_m)
    assert got is y
    tolerance = TOLERANCE[dtype]
    exact = case.exact(base, runs)
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.float(), case.twin(base, runs), rtol=tolerance, atol=tolerance)
    assert float((exact - base.double()).abs().max()) > 0.1  # the adapters do something
    unowned = torch.ones(rows, dtype=torch.bool)
    for _, start, end in runs:
        unowned[start:end] = False
    assert torch.equal(got[unowned], base[unowned])
    for slot, start, end in runs:
        for module, first in enumerate(columns[:-1]):
            if int(case.ranks[slot, module]) == 0:
                own = (slice(start, end), slice(first, columns[module + 1]))
                assert torch.equal(got[own], base[own])


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_every_split_is_written_where_it_is_read(kernel_device: torch.device, num_splits: int) -> None:
    # 300 features are 3 blocks of 128, so most of 8 parts are empty and must still say 0
    case = Case.random(20, 300, (0, 40, 80), torch.float32, kernel_device)
    runs = [AdapterSegment(0, 0, 18), AdapterSegment(1, 18, 19)]
    tiles = on_device(runs, 20, 16, kernel_device)
    base = torch.randn(20, 80, device=kernel_device)
    shrunk, got = case.run(base.clone(), tiles, 16, num_splits)
    torch.testing.assert_close(got.double(), case.exact(base, runs), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(shrunk[:, :18, :16]).all() and torch.isfinite(shrunk[:, :18, 64:80]).all()
    assert shrunk[:, 19].isnan().all()  # a row of no adapter
    assert shrunk[:, :18, 16:64].isnan().all() and shrunk[:, 18, 64:].isnan().all()  # past the ranks
    wanted = case.x[:18].double() @ case.a[0, :4].double().T
    torch.testing.assert_close(shrunk[:, :18, :4].sum(0).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "block_m"), [(65, (0, 130, 195, 260), 16), (100, (0, 65), 64)])
def test_the_part_alone(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, columns: tuple[int, ...], block_m: int
) -> None:
    skip_unless_supported(dtype, kernel_device)
    case = Case.random(rows, 100, columns, dtype, kernel_device)
    runs = [AdapterSegment(*segment) for segment in [(0, 3, 20), (1, 20, 21), (2, 25, 30), (4, 31, 32), (3, 32, 65)]]
    nothing = torch.zeros(rows, columns[-1], device=kernel_device, dtype=dtype)
    values = torch.full_like(nothing, float("nan"))
    _, got = case.run(values, on_device(runs, rows, block_m, kernel_device), block_m, add=False)
    assert got is values
    unowned = torch.ones(rows, dtype=torch.bool)
    for _, start, end in runs:
        unowned[start:end] = False
    assert got[unowned].isnan().all()  # as it was
    exact, tolerance = case.exact(nothing, runs), TOLERANCE[dtype]
    torch.testing.assert_close(got[~unowned].double(), exact[~unowned], rtol=tolerance, atol=tolerance)
    assert not got[25:30].any() and not got[31, : columns[1]].any()  # an adapter of rank 0, and one without a module


def test_a_largest_rank_below_a_block_and_strided_rows(kernel_device: torch.device) -> None:
    case = Case.random(9, 48, (0, 20, 33, 50), torch.float32, kernel_device, top=6)
    wide_x = torch.full((9, 60), float("nan"), device=kernel_device)
    wide_x[:, 5:53] = case.x
    case.x = wide_x[:, 5:53]
    wide_y = torch.randn(9, 70, device=kernel_device)
    before = wide_y.clone()
    runs = [AdapterSegment(1, 0, 4), AdapterSegment(3, 5, 9)]
    case.run(wide_y[:, 10:60], on_device(runs, 9, 16, kernel_device), 16, 2)
    torch.testing.assert_close(wide_y[:, 10:60].double(), case.exact(before[:, 10:60], runs), rtol=1e-5, atol=1e-5)
    assert torch.equal(wide_y[:, :10], before[:, :10]) and torch.equal(wide_y[:, 60:], before[:, 60:])


def test_no_rows_no_tiles_and_padding_change_nothing(kernel_device: torch.device) -> None:
    case = Case.random(5, 64, (0, 40), torch.float32, kernel_device)
    y = torch.randn(5, 40, device=kernel_device)
    before = y.clone()
    padding = torch.zeros(3, 3, dtype=torch.int32, device=kernel_device)
    case.run(y, padding, 16)
    case.run(y, padding[:0], 16)
    assert torch.equal(y, before)
    case.x = case.x[:0]
    shrunk, got = case.run(y[:0], padding, 16)
    assert shrunk.shape[1:] == (0, 64) and got.shape == (0, 40)


def test_operands_that_do_not_fit_are_refused(kernel_device: torch.device) -> None:
    case = Case.random(5, 64, (0, 40), torch.float32, kernel_device)
    y, tiles = torch.zeros(5, 40, device=kernel_device), on_device([AdapterSegment(0, 0, 5)], 5, 16, kernel_device)
    shrunk, _ = case.run(y, tiles, 16)
    top, columns = case.max_rank, case.columns
    refused = [
        lambda: lora_shrink(case.x.half(), case.a, case.ranks, tiles, top, 16),
        lambda: lora_shrink(case.x, case.a, case.ranks, tiles, 32, 16),
        lambda: lora_shrink(case.x, case.a, case.ranks.long(), tiles, top, 16),
        lambda: lora_shrink(case.x, case.a, case.ranks, tiles[:, :2], top, 16),
        lambda: lora_shrink(case.x, case.a, case.ranks, tiles, top, 24),
        lambda: lora_shrink(case.x, case.a, case.ranks, tiles, top, 16, shrunk[:, :4]),
        lambda: lora_shrink(case.x.T.contiguous().T, case.a, case.ranks, tiles, top, 16),
        lambda: lora_expand(shrunk, case.b, case.scales, case.ranks, tiles, top, 16, (0, 20, 40), y),
        lambda: lora_expand(shrunk, case.b, case.scales, case.ranks, tiles, top, 16, columns, y[:4]),
        lambda: lora_expand(shrunk, case.b, case.scales, case.ranks, tiles, top, 16, columns, y.half()),
        lambda: lora_expand(shrunk, case.b, case.scales[:2], case.ranks, tiles, top, 16, columns, y),
        lambda: lora_expand(shrunk.half(), case.b, case.scales, case.ranks, tiles, top, 16, columns, y),
        lambda: lora_expand(shrunk.repeat(3, 1, 1), case.b, case.scales, case.ranks, tiles, top, 16, columns, y),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(ValueError):
            call()


def test_splits_fill_a_gpu_for_decode_and_stop_for_prefill() -> None:
    assert shrink_splits(64, 4096, 4096, 16) == 16
    assert shrink_splits(64, 4096, 6144, 16) == 8
    assert shrink_splits(64, 4096, 28672, 16) == 2  # a wide product takes long, and every block of columns sums them up
    assert shrink_splits(8192, 4096, 4096, 64) == 1
    assert shrink_splits(16, 14336, 4096, 16) == 16
    assert shrink_splits(1, 100, 100, 16) == 1 == shrink_splits(0, 100, 200_000, 16)


@given(
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.integers(1, 30_000),
    st.integers(1, 300_000),
    st.sampled_from([16, 64]),
)
def test_the_shrunk_batch_fits_its_room(rows: int, more: int, width_in: int, width_out: int, block_m: int) -> None:
    splits = shrink_splits(rows, width_in, width_out, block_m)
    assert splits & (splits - 1) == 0
    assert splits * rows * 24 <= shrunk_elements(rows + more, width_in, 24)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=6),
    st.integers(0, 70),
    st.sampled_from([16, 64]),
)
def test_tiles_cover_all_rows_and_fit_the_bound(runs: list[tuple[int, int]], rest: int, block_m: int) -> None:
    segments, owners = [], []
    for slot, (gap, length) in enumerate(runs):
        owners += [-1] * gap + [slot] * length
        segments.append(AdapterSegment(slot, len(owners) - length, len(owners)))
    owners += [-1] * rest
    bound = max_tiles(len(owners), len(segments), block_m)
    tiles = lora_tiles(segments[::-1], len(owners), block_m, bound)
    assert tiles.dtype == np.int32 and tiles.shape == (bound, 3)
    covered = [(first + i, slot) for first, count, slot in tiles.tolist() for i in range(count)]
    assert covered == list(enumerate(owners))
    assert (tiles[:, 1] <= block_m).all()


@pytest.mark.parametrize(("rows", "slots", "block_m"), [(1, 8, 16), (7, 3, 16), (64, 8, 16), (40, 2, 16), (9, 0, 16)])
def test_the_bound_on_tiles_is_reached(rows: int, slots: int, block_m: int) -> None:
    runs = min(rows, 2 * slots + 1)  # a gap, a segment, ... of one row each; the last has all other rows
    starts = range(1, runs, 2)
    segments = [AdapterSegment(slot, row, rows if row == runs - 1 else row + 1) for slot, row in enumerate(starts)]
    bound = max_tiles(rows, slots, block_m)
    assert (lora_tiles(segments, rows, block_m, bound)[:, 1] > 0).all()
    with pytest.raises(ValueError, match="tiles"):
        lora_tiles(segments, rows, block_m, bound - 1)


@pytest.mark.parametrize("segments", [[(0, 0, 4), (1, 3, 5)], [(0, 2, 7)], [(0, 3, 2)]])
def test_segments_that_are_no_disjoint_runs_of_the_batch_are_refused(segments: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="row"):
        lora_tiles([AdapterSegment(*segment) for segment in segments], 6, 16, 9)


@dataclass(frozen=True)
class Shape:
    num_layers: int = 2
    hidden_size: int = 48
    intermediate_size: int = 80
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 12


def random_weights(shape: Shape, ranks: dict[tuple[int, str], tuple[int, float]], seed: int) -> LoraWeights:
    weights = LoraWeights.zeros(LoraLayout(shape, ranks), torch.float32)
    weights.flat.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    return weights


def registry_of(shape: Shape, adapters: list[LoraWeights], dtype: torch.dtype, device: torch.device) -> AdapterRegistry:
    registry = AdapterRegistry(shape, len(adapters), 64, dtype, device)
    for slot, weights in enumerate(adapters):
        registry.stacks.fill(slot, weights)
    return registry


def adapters_of(shape: Shape) -> list[LoraWeights]:
    layers = range(shape.num_layers)
    return [
        random_weights(shape, {(i, name): (4, 2.0) for i in layers for name in MODULES}, 0),
        random_weights(shape, {(i, name): (64, 0.5) for i in layers for name in ("k_proj", "up_proj", "down_proj")}, 1),
        random_weights(shape, {(1, "q_proj"): (16, 1.0), (1, "v_proj"): (5, 3.0), (0, "o_proj"): (16, -1.0)}, 2),
    ]


SEGMENTS = [AdapterSegment(2, 24, 25), AdapterSegment(0, 2, 5), AdapterSegment(1, 5, 23)]  # 0, 1, 23 and 25: base
ROWS, EPS = 26, 1e-5


@dataclass
class Layers:
    """The same adapters in the model's dtype on the device and in fp32 on the CPU, and what draws numbers."""

    dtype: torch.dtype
    device: torch.device
    block_m: int = 16
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        adapters = adapters_of(self.shape)
        self.stacks = registry_of(self.shape, adapters, self.dtype, self.device).stacks
        exact = registry_of(self.shape, adapters, torch.float32, torch.device("cpu"))
        self.expect = ServingProjection(exact, SEGMENTS)
        self.generator = torch.Generator().manual_seed(4)
        row_slots = torch.full((ROWS,), -1, dtype=torch.int32)
        for slot, start, end in SEGMENTS:
            row_slots[start:end] = slot
        tiles = on_device(SEGMENTS, ROWS, self.block_m, self.device)
        workspace = make_workspace(ROWS, self.stacks, self.device)
        for room in workspace:
            room.fill_(float("nan"))
        rows = RowAdapters(tiles, row_slots.to(self.device), self.block_m)
        self.project = DeviceProjection(self.stacks, rows, workspace, plain_project)

    def draw(self, *size: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The same numbers for the device and, in fp32, for the CPU."""
        values = (torch.randn(*size, generator=self.generator) * scale).to(self.dtype)
        return values.to(self.device), values.float()

    def check(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Values up to the largest, rounded a few times."""
        scale, tolerance = float(wanted.abs().max()), TOLERANCE[self.dtype]
        torch.testing.assert_close(got.float().cpu() / scale, wanted / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_m", "beside"), [(16, True), (64, False)])  # as a decode and a long prefill
def test_a_layer_computes_what_the_serving_projection_and_the_reference_operations_do(
    kernel_device: torch.device, dtype: torch.dtype, block_m: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_supported(dtype, kernel_device)
    monkeypatch.setattr(batch, "MAX_BESIDE_ROWS", ROWS if beside else ROWS - 1)
    layers = Layers(dtype, kernel_device, block_m)
    project, expect, shape = layers.project, layers.expect, layers.shape
    hidden, inner = shape.hidden_size, shape.intermediate_size
    norm, exact_norm = layers.draw(hidden)
    for layer in range(shape.num_layers):
        x, exact_x = layers.draw(ROWS, hidden)
        stream = exact_x.clone()
        h, same = project.add_norm(x, None, norm, EPS)
        assert same is x
        layers.check(h, reference.rms_norm(exact_x, exact_norm, EPS))

        weight, exact = layers.draw(shape.num_heads * shape.head_dim + 2 * 24, hidden, scale=hidden**-0.5)
        bias, exact_bias = layers.draw(len(weight))
        qkv = project(layer, "qkv", h, weight, bias)
        part = project.take_part()
        assert (part is not None) == beside and project.take_part() is None
        if part is not None:
            qkv += part.values.where((part.row_slots >= 0)[:, None], 0.0)
        layers.check(qkv, expect(layer, "qkv", h.float().cpu(), exact, exact_bias))

        weight, exact = layers.draw(hidden, hidden, scale=hidden**-0.5)
        delta = project(layer, "o", h, weight, None)
        added = expect(layer, "o", h.float().cpu(), exact, None)
        normed, same = project.add_norm(x, delta, norm, EPS)
        wanted, stream = reference.add_rms_norm(stream, added, exact_norm, EPS)
        assert same is x
        layers.check(x, stream)
        layers.check(normed, wanted)

        weight, exact = layers.draw(2 * inner, hidden, scale=hidden**-0.5)
        activated = project.gated(project, layer, normed, weight)
        gate_up = expect(layer, "gate_up", normed.float().cpu(), exact, None)
        layers.check(activated, reference.silu_and_mul(gate_up))

        weight, exact = layers.draw(hidden, inner, scale=inner**-0.5)
        for flushed in (True, False):
            delta = project(layer, "down", activated, weight, None)
            added = expect(layer, "down", activated.float().cpu(), exact, None)
            if flushed:
                assert project.flush(delta) is delta
                assert project.flush(delta) is delta  # once
                layers.check(delta, added)
                if kernel_device.type == "cuda" or dtype != torch.float32:  # fp32 on a CPU may take oneDNN's linear
                    plain = torch.nn.functional.linear(activated, weight)
                    assert torch.equal(delta[[0, 1, 23, 25]], plain[[0, 1, 23, 25]])
            normed, _ = project.add_norm(x, delta, norm, EPS)
            wanted, stream = reference.add_rms_norm(stream, added, exact_norm, EPS)
            layers.check(x, stream)
            layers.check(normed, wanted)


def test_what_a_block_lacks_is_never_lost(kernel_device: torch.device) -> None:
    layers = Layers(torch.float32, kernel_device)
    project, hidden = layers.project, layers.shape.hidden_size
    (x, _), (weight, _) = layers.draw(ROWS, hidden), layers.draw(hidden, hidden)
    delta = project(0, "o", x, weight, None)
    before = delta.clone()
    calls = [
        lambda: project(0, "o", x, weight, None),
        lambda: project(0, "qkv", x, weight, None),
        lambda: project.gated(project, 0, x, weight),
        lambda: project.add_norm(x, None, weight[0], EPS),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="lacks"):
            call()
    assert torch.equal(delta, before)
    project.flush(delta)
    assert not torch.equal(delta[2:5], before[2:5])  # the adapter of slot 0
    project.add_norm(x, None, weight[0], EPS)
    with pytest.raises(ValueError, match="workspace"):
        project(0, "o", torch.zeros(5000, hidden, device=kernel_device), weight, None)


def test_refilling_a_slot_leaves_addresses_and_nothing_of_the_old_adapter() -> None:
    shape = Shape()
    stacks = AdapterStacks(shape, 2, 64, torch.float32, torch.device("cpu"))
    large, small = adapters_of(shape)[1], adapters_of(shape)[2]
    blocks = [stacks.block(layer, block) for layer in range(shape.num_layers) for block in BLOCK_MODULES]
    for block in blocks:
        assert not block.ranks.any() and not block.scales.any()
        block.a.fill_(float("nan"))
        block.b.fill_(float("nan"))
    stacks.fill(1, large)
    assert stacks.block(1, "qkv").ranks.tolist() == [[0, 0, 0], [0, 64, 0]]
    stacks.fill(1, small)
    assert stacks.block(1, "qkv").ranks.tolist() == [[0, 0, 0], [16, 0, 5]]
    assert stacks.block(1, "qkv").scales.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 3.0]]
    assert stacks.block(0, "qkv").ranks.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert stacks.scales(0, "o_proj") == [0.0, -1.0] and stacks.scales(1, "k_proj") == [0.0, 0.0]
    left = sum(int(block.a[1].count_nonzero() + block.b[1].count_nonzero()) for block in blocks)
    assert left == small.layout.num_parameters
    for module in small.layout.modules():
        assert torch.equal(stacks.a(module.layer, module.name)[1, : module.rank], small.a(module))
        assert torch.equal(stacks.b(module.layer, module.name)[1, :, : module.rank], small.b(module))
    assert all(block.a[0].isnan().all() and block.b[0].isnan().all() for block in blocks)  # not touched
    again = [stacks.block(layer, block) for layer in range(shape.num_layers) for block in BLOCK_MODULES]
    for before, after in zip(blocks, again, strict=True):
        assert [t.data_ptr() for t in before[:4]] == [t.data_ptr() for t in after[:4]]
