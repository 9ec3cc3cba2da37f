"""Moving slots against its torch twin."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.slot_move import move_slots


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("bf16 only on a GPU")
    return getattr(torch, request.param)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_moves", [0, 1, 13])
@pytest.mark.parametrize("heads", [(1, 4), (3, 80), (8, 128), (5, 65), (20, 100)])
def test_move_slots(
    heads: tuple[int, int], num_moves: int, index_dtype: torch.dtype, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    # one layer of several that lie side by side within a slot, with a gap after each head
    layers = torch.randn(40, 2, 2, heads[0], heads[1] + 3, device=kernel_device, dtype=dtype)
    expected = layers.clone()
    order = torch.randperm(40, device=kernel_device)
    src, dst = order[:num_moves], order[num_moves : 2 * num_moves]
    reference.move_slots(expected[:, 1, ..., :-3], src, dst)
    move_slots(layers[:, 1, ..., :-3], src.to(index_dtype), dst.to(index_dtype))
    torch.testing.assert_close(layers, expected, rtol=0, atol=0)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_offsets_past_two_to_the_31(index_dtype: torch.dtype, kernel_device: torch.device) -> None:
    far = 2**31 // (2 * 4 * 128) + 3
    pool = torch.empty(far + 1, 2, 4, 128, device=kernel_device, dtype=torch.int8)  # 2 GB, of which a CPU maps pages
    values = torch.randint(-100, 100, (2, 2, 4, 128), device=kernel_device, dtype=torch.int8)
    pool[0], pool[far] = values[0], values[1]
    moves = torch.tensor([[far, 0], [1, far - 1]], device=kernel_device, dtype=index_dtype)
    move_slots(pool, *moves)
    assert torch.equal(pool[1], values[1]) and torch.equal(pool[far - 1], values[0])


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    pool = torch.zeros(4, 2, 2, 8, device=kernel_device)
    src, dst = (torch.tensor(slots, device=kernel_device) for slots in ([0, 1], [2, 3]))
    for call in (
        lambda: move_slots(pool[:, :1], src, dst),
        lambda: move_slots(pool.transpose(2, 3), src, dst),
        lambda: move_slots(pool, src, dst[:1]),
        lambda: move_slots(pool, src[None], dst[None]),
        lambda: move_slots(pool, src.float(), dst),
        lambda: move_slots(pool, src, torch.zeros(4, device=kernel_device, dtype=torch.int64)[::2]),
    ):
        with pytest.raises(ValueError):
            call()
