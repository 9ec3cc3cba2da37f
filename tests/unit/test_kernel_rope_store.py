"""Head norms, RoPE and the write to the pool against their torch twin."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fineinfer.kernels import reference
from fineinfer.kernels.lora import AdapterPart
from fineinfer.kernels.rope_store import MAX_HEAD_DIM, rope_and_store

EPS = 1e-6
NAN = float("nan")
NUM_SLOTS = 30


class Inputs(NamedTuple):
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    pool: torch.Tensor
    num_heads: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = EPS
    part: AdapterPart | None = None

    @property
    def of_twin(self) -> tuple[object, ...]:
        """What the twin, which knows no adapters, takes."""
        return self[:-1]

    def wide(self) -> Inputs:
        """The same in fp64, nothing shared."""
        return self._replace(
            qkv=self.qkv.double(),
            cos=self.cos.double(),
            sin=self.sin.double(),
            pool=self.pool.double(),
            q_norm=None if self.q_norm is None else self.q_norm.double(),
            k_norm=None if self.k_norm is None else self.k_norm.double(),
        )


def make(
    rows: int, heads: tuple[int, int, int], norms: bool, dtype: torch.dtype, device: torch.device, layers: int = 1
) -> Inputs:
    """Random inputs with a pool of NaN, the second layer of several that lie side by side within a slot."""
    num_heads, num_kv_heads, head_dim = heads

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    pool = torch.full((NUM_SLOTS, layers, 2, num_kv_heads, head_dim), NAN, device=device, dtype=dtype)[:, layers - 1]
    slots = torch.randperm(NUM_SLOTS, device=device)[:rows]
    weights = (rand(head_dim), rand(head_dim)) if norms else (None, None)
    qkv = rand(rows, num_heads + 2 * num_kv_heads, head_dim)
    # no angle's cosine and sine: their two halves are independent here, so that a swap shows
    cos, sin = (torch.rand(rows, head_dim, device=device, dtype=dtype) * 2 - 1 for _ in range(2))
    return Inputs(qkv, cos, sin, slots, pool, num_heads, *weights)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and kernel_device.type == "cpu":
        pytest.skip("bf16 only on a GPU")
    return getattr(torch, request.param)


def check(ours: torch.Tensor, expected: torch.Tensor, norms: bool) -> None:
    """One rounding to half an ulp; norms add two to each of the rotated pair (scaled values below 12 or so)."""
    eps = torch.finfo(ours.dtype).eps
    rtol, atol = (0.51 * eps, 2 * 12 * eps) if norms else (0.51 * eps, 1e-6)
    torch.testing.assert_close(ours.double(), expected, rtol=max(rtol, 2e-6), atol=max(atol, 1e-5), equal_nan=True)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (5, 1, 80), (4, 4, 96), (2, 1, 2), (1, 1, MAX_HEAD_DIM)])
def test_rope_and_store(
    heads: tuple[int, int, int], rows: int, norms: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    inputs = make(rows, heads, norms, dtype, kernel_device, layers=2)
    before, wide = inputs.qkv.clone(), inputs.wide()
    reference.rope_and_store(*wide.of_twin)
    rope_and_store(*inputs)
    check(inputs.qkv[:, : heads[0]], wide.qkv[:, : heads[0]], norms)
    check(inputs.pool[:, 0], wide.pool[:, 0], norms)  # NaN where no slot was written
    torch.testing.assert_close(inputs.pool[:, 1].double(), wide.pool[:, 1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(inputs.qkv[:, heads[0] :], before[:, heads[0] :], rtol=0, atol=0)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 64), (5, 1, 80)])
def test_adapters_add_to_all_heads_of_their_rows(
    heads: tuple[int, int, int], norms: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    inputs = make(7, heads, norms, dtype, kernel_device)
    row_slots = torch.tensor([3, -1, 0, -5, 1, 1, -1], dtype=torch.int32, device=kernel_device)
    inputs.slots[4] = -1  # padding
    has_adapter, flat = row_slots >= 0, inputs.qkv.flatten(1)
    values = torch.full_like(flat, NAN)
    values[has_adapter] = torch.randn_like(flat)[has_adapter]
    added = (flat.float() + values.float().where(has_adapter[:, None], 0.0)).to(dtype).view_as(inputs.qkv)
    plain = inputs._replace(qkv=added.clone(), pool=inputs.pool.clone())
    rope_and_store(*plain)
    before = inputs.qkv.clone()
    rope_and_store(*inputs._replace(part=AdapterPart(values, row_slots)))
    rows = inputs.slots >= 0
    torch.testing.assert_close(inputs.pool, plain.pool, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(inputs.qkv[rows, : heads[0]], plain.qkv[rows, : heads[0]], rtol=0, atol=0)
    torch.testing.assert_close(inputs.qkv[:, heads[0] :], before[:, heads[0] :], rtol=0, atol=0)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_rows_store_nothing(index_dtype: torch.dtype, kernel_device: torch.device) -> None:
    inputs = make(5, (4, 2, 64), True, torch.float32, kernel_device)
    inputs.slots[1], inputs.slots[4] = -1, -7
    wide = inputs.wide()
    reference.rope_and_store(*wide.of_twin)
    assert int(wide.pool.isnan().logical_not().sum()) == 3 * 2 * 2 * 64
    rope_and_store(*inputs._replace(slots=inputs.slots.to(index_dtype)))
    check(inputs.pool, wide.pool, True)
    check(inputs.qkv[[0, 2, 3]], wide.qkv[[0, 2, 3]], True)


def test_head_norms_are_rounded_where_torch_rounds_them(dtype: torch.dtype, kernel_device: torch.device) -> None:
    if dtype == torch.float32:
        pytest.skip("nothing to round")
    inputs = make(9, (4, 4, 64), True, dtype, kernel_device)
    inputs.cos.fill_(1), inputs.sin.fill_(0)  # what is left is the norm
    twin = inputs._replace(qkv=inputs.qkv.clone(), pool=inputs.pool.clone())
    reference.rope_and_store(*twin.of_twin)
    rope_and_store(*inputs)
    for ours, expected in ((inputs.qkv, twin.qkv), (inputs.pool[inputs.slots], twin.pool[inputs.slots])):
        assert (ours != expected).double().mean() < 0.01  # one rounding less differs in a quarter of the values


def test_offsets_past_two_to_the_31(kernel_device: torch.device) -> None:
    inputs = make(2, (2, 1, 64), False, torch.float16, kernel_device)
    far = 2**31 // (2 * 1024) + 3
    # 4 GB, of which a CPU maps a few pages; only the first of the room for 16 heads is used
    pool = torch.empty(far + 1, 2, 16, 64, device=kernel_device, dtype=torch.float16)[:, :, :1]
    near, slots = inputs._replace(qkv=inputs.qkv.clone(), slots=torch.tensor([0, 1])), torch.tensor([far, far - 1])
    rope_and_store(*near._replace(slots=near.slots.to(kernel_device)))
    rope_and_store(*inputs._replace(pool=pool, slots=slots.to(kernel_device)))
    assert torch.equal(pool[[far, far - 1]], near.pool[:2])


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    good = make(3, (4, 2, 8), True, torch.float32, kernel_device)
    odd, huge = (make(3, (4, 2, size), False, torch.float32, kernel_device) for size in (7, MAX_HEAD_DIM + 2))
    bad = [
        odd,
        huge,
        good._replace(num_heads=3),
        good._replace(qkv=good.qkv[..., :6]),
        good._replace(qkv=good.qkv.half()),
        good._replace(qkv=good.qkv.transpose(0, 1).contiguous().transpose(0, 1)),
        good._replace(cos=good.cos[:2]),
        good._replace(sin=good.sin.T.contiguous().T),
        good._replace(slots=good.slots[:2]),
        good._replace(slots=good.slots.float()),
        good._replace(pool=good.pool[:, :1]),
        good._replace(pool=good.pool.transpose(2, 3).contiguous().transpose(2, 3)),
        good._replace(pool=good.pool.half()),
        good._replace(q_norm=None),
        good._replace(k_norm=torch.ones(7, device=kernel_device)),
        good._replace(part=AdapterPart(good.qkv.flatten(1)[:, 1:], good.slots.int())),
    ]
    for inputs in bad:
        with pytest.raises(ValueError):
            rope_and_store(*inputs)
