"""In a captured step the expansion waits for the base product and for the shrink beside it, whichever ends last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fineinfer.kernels import lora, lora_epilogue

pytestmark = pytest.mark.gpu
ROWS, HIDDEN, RANK, SLOTS, EPS = 64, 4096, 16, 8, 1e-5


def expand(shrunk: torch.Tensor, y: torch.Tensor, block: Block) -> torch.Tensor:
    columns = 0, y.shape[1] // 2, y.shape[1]
    return lora.lora_expand(shrunk, block.b, block.scales, block.ranks, block.tiles, RANK, 16, columns, y)


def activate(shrunk: torch.Tensor, y: torch.Tensor, block: Block) -> torch.Tensor:
    return lora_epilogue.silu_and_mul_lora(y, shrunk, block.b, block.scales, block.ranks, block.tiles, RANK, 16)


def norm(shrunk: torch.Tensor, y: torch.Tensor, block: Block) -> torch.Tensor:
    rows = lora.RowExpansion(shrunk, block.b, block.scales, block.ranks, block.row_slots, RANK)
    stream, weight = torch.zeros_like(y, dtype=torch.float32), torch.ones_like(y[0])
    return lora_epilogue.add_rms_norm_lora(stream, y, weight, EPS, rows)


class Block:
    """A base weight and adapters; ``short`` is whether its product ends long before the shrink, or the other way."""

    def __init__(self, short: bool, modules: int) -> None:
        out = 512 if short else 28_672
        self.splits, self.modules = 1 if short else 16, modules
        self.x = torch.zeros(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.weight = self._random(out, HIDDEN)
        self.a, self.b = self._random(SLOTS, modules * RANK, HIDDEN), self._random(SLOTS, RANK, out)
        self.ranks = torch.full((SLOTS, modules), RANK, dtype=torch.int32, device="cuda")
        self.scales = torch.full((SLOTS, modules), 2.0, device="cuda")
        tiles = [[8 * slot, 8, slot] for slot in range(SLOTS)] + [[0, 0, 0]] * 25
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device="cuda")
        self.row_slots = torch.arange(ROWS, device="cuda", dtype=torch.int32) // 8

    @staticmethod
    def _random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").mul_(0.02).bfloat16()

    def shrink(self) -> torch.Tensor:
        shrunk = torch.empty(self.splits, ROWS, self.modules * RANK, device="cuda")
        return lora.lora_shrink(self.x, self.a, self.ranks, self.tiles, RANK, 16, shrunk)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(("finish", "modules"), [(expand, 2), (activate, 2), (norm, 1)])
def test_a_replay_reads_neither_an_old_shrink_nor_an_old_product(
    finish: Callable[..., torch.Tensor], modules: int, short: bool
) -> None:
    if finish is norm and not short:
        pytest.skip("rows of 28,672 are wider than the norm takes")
    block, side = Block(short, modules), torch.cuda.Stream()

    def step() -> torch.Tensor:
        own = torch.cuda.current_stream()
        side.wait_stream(own)
        with torch.cuda.stream(side):
            shrunk = block.shrink()
        y = F.linear(block.x, block.weight)
        own.wait_stream(side)
        return finish(shrunk, y, block)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in range(20):
        generator = torch.Generator("cuda").manual_seed(seed)
        block.x.copy_(torch.randn(ROWS, HIDDEN, device="cuda", generator=generator))
        graph.replay()
        torch.cuda.synchronize()
        shrunk = block.shrink()
        torch.cuda.synchronize()
        y = F.linear(block.x, block.weight)
        torch.cuda.synchronize()
        assert torch.equal(got, finish(shrunk, y, block)), f"replay {seed}"
