"""In a captured step what follows waits for the base product and for the adapters beside it, whichever ends last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fineinfer.kernels import activation, lora, norm, rope_store

pytestmark = pytest.mark.gpu
ROWS, HIDDEN, RANK, SLOTS, EPS, HEAD_DIM = 64, 4096, 16, 8, 1e-5, 128


def activate(y: torch.Tensor, part: lora.AdapterPart) -> torch.Tensor:
    return activation.silu_and_mul(y, part=part)


def normalise(y: torch.Tensor, part: lora.AdapterPart) -> torch.Tensor:
    stream, weight = torch.zeros_like(y, dtype=torch.float32), torch.ones_like(y[0])
    return norm.add_rms_norm(stream, y, weight, EPS, part=part)


def rotate(y: torch.Tensor, part: lora.AdapterPart) -> torch.Tensor:
    qkv = y.view(ROWS, -1, HEAD_DIM)
    pool = torch.zeros(ROWS, 2, 1, HEAD_DIM, device="cuda", dtype=y.dtype)
    cos = torch.full((ROWS, HEAD_DIM), 0.5, device="cuda", dtype=y.dtype)
    slots = torch.arange(ROWS, device="cuda")
    rope_store.rope_and_store(qkv, cos, cos, slots, pool, qkv.shape[1] - 2, part=part)
    return torch.cat((qkv[:, :-2].flatten(), pool.flatten()))


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

    def expand(self, shrunk: torch.Tensor, y: torch.Tensor, add: bool) -> torch.Tensor:
        columns = tuple(range(0, y.shape[1] + 1, y.shape[1] // self.modules))
        operands = shrunk, self.b, self.scales, self.ranks, self.tiles
        return lora.lora_expand(*operands, RANK, 16, columns, y, add)

    def values(self) -> torch.Tensor:
        """What the adapters add, in memory that held something else."""
        y = torch.full((ROWS, self.b.shape[2]), torch.nan, device="cuda", dtype=torch.bfloat16)
        return self.expand(self.shrink(), y, add=False)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(("finish", "modules"), [(None, 2), (activate, 2), (normalise, 1), (rotate, 1)])
def test_a_replay_reads_neither_old_adapters_nor_an_old_product(
    finish: Callable[[torch.Tensor, lora.AdapterPart], torch.Tensor] | None, modules: int, short: bool
) -> None:
    if finish is normalise and not short:
        pytest.skip("rows of 28,672 are wider than the norm takes")
    block, side = Block(short, modules), torch.cuda.Stream()

    def fork_and_join(beside: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cuda.current_stream()
        side.wait_stream(own)
        with torch.cuda.stream(side):
            result = beside()
        y = F.linear(block.x, block.weight)
        own.wait_stream(side)
        return result, y

    def step() -> torch.Tensor:
        if finish is None:
            shrunk, y = fork_and_join(block.shrink)
            return block.expand(shrunk, y, add=True)
        values, y = fork_and_join(block.values)
        return finish(y, lora.AdapterPart(values, block.row_slots))

    def one_after_the_other() -> torch.Tensor:
        results = []
        for compute in (block.shrink if finish is None else block.values, lambda: F.linear(block.x, block.weight)):
            results.append(compute())
            torch.cuda.synchronize()
        first, y = results
        return (
            block.expand(first, y, add=True) if finish is None else finish(y, lora.AdapterPart(first, block.row_slots))
        )

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
        assert torch.equal(got, one_after_the_other()), f"replay {seed}"
