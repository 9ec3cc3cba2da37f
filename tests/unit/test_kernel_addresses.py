"""Tests on a CPU notice a kernel that leaves its tensors; on a GPU `make test-memcheck` does."""

from __future__ import annotations

import pytest
import torch

from ..interpreting import extent

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _copy(source, target, first, count, BLOCK: tl.constexpr):
    place = first + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < count, other=0.0), mask=place < count)


@pytest.mark.parametrize(("first", "count"), [(0, 9), (-1, 8), (7, 10)])
def test_a_kernel_that_leaves_its_tensors_fails(kernel_device: torch.device, first: int, count: int) -> None:
    if kernel_device.type == "cuda":
        pytest.skip("only memcheck sees it on a GPU")
    whole, target = torch.arange(20.0), torch.zeros(20)
    _copy[(1,)](whole[4:12], target[4:12], 0, 8, 16)
    assert torch.equal(target[4:12], whole[4:12]) and not target[12:].any()
    with pytest.raises(Exception, match="of no tensor that it was given"):  # within the allocation all the same
        _copy[(1,)](whole[4:12], target, first, count, 16)
    with pytest.raises(Exception, match="of no tensor that it was given"):
        _copy[(1,)](whole, target[4:12], first, count, 16)


def test_the_extent_of_a_view() -> None:
    whole = torch.zeros(6, 10, dtype=torch.float16)
    start = whole.data_ptr()
    assert extent(whole) == (start, start + 120)
    assert extent(whole[1:3, 2:5]) == (start + 24, start + 24 + 26)
    assert extent(whole[::2].T) == (start, start + 100)
    first, end = extent(whole[:0])
    assert first == end
