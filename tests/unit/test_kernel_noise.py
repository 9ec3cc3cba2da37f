"""Hashes and exponential numbers of draws: kernel, twin and plain arithmetic agree."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from fineinfer.kernels import reference_noise as reference
from fineinfer.kernels.noise import exponential, token_hash

BLOCK = 256
EDGES = [0, 1, 2, 2**23 - 1, 2**23, 2**27 - 1, 2**27, 2**27 + 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]


def plain_hash(token: int, word0: int, word1: int) -> int:
    """Two rounds of Wellons' lowbias32 in whole numbers."""
    bits = token
    for word in (word0, word1):
        bits ^= word % 2**32
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D % 2**32
        bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
        bits ^= bits >> 16
    return bits


@triton.jit
def hash_kernel(tokens, words, hashes, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    bits = token_hash(tl.load(tokens + lane), tl.load(words), tl.load(words + 1))
    tl.store(hashes + lane, bits.to(tl.int32, bitcast=True))


@triton.jit
def exponential_kernel(bits, numbers, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(numbers + lane, exponential(tl.load(bits + lane).to(tl.uint32, bitcast=True)))


@pytest.mark.parametrize("words", [(0, 0), (-1, 1), (2**31 - 1, -(2**31)), (123456789, -987654321)])
def test_hashes_of_kernel_twin_and_plain_arithmetic_are_the_same_bits(kernel_device, words):
    tokens = torch.randint(0, 2**31 - 1, (BLOCK,), generator=torch.Generator().manual_seed(2)).int()
    tokens[:100] = torch.arange(100)
    want = [plain_hash(token, *words) for token in tokens.tolist()]
    assert [bits % 2**32 for bits in reference.token_hash(tokens, *words).tolist()] == want
    hashes = torch.zeros(BLOCK, dtype=torch.int32, device=kernel_device)
    key = torch.tensor(words, dtype=torch.int32, device=kernel_device)
    hash_kernel[(1,)](tokens.to(kernel_device), key, hashes, BLOCK)
    assert [bits % 2**32 for bits in hashes.tolist()] == want


def test_exponential_numbers_are_fine_at_both_ends(kernel_device):
    bits = EDGES + [2**n + 3 for n in range(32)]
    bits += torch.randint(0, 2**32, (BLOCK - len(bits),), generator=torch.Generator().manual_seed(3)).tolist()
    given = torch.tensor([reference.signed(number) for number in bits], dtype=torch.int32)
    want = [-math.log1p(-min((number + 0.5) * 2.0**-32, 1 - 2.0**-24)) for number in bits]
    ours = torch.zeros(BLOCK, device=kernel_device)
    exponential_kernel[(1,)](given.to(kernel_device), ours, BLOCK)
    before = given.clone()
    for numbers in (reference.exponential(given), ours.cpu()):
        assert numbers.dtype == torch.float32 and (numbers > 0).all()
        for got, expected in zip(numbers.tolist(), want, strict=True):
            # u is rounded to 2^-24 near 1, and so is 1 - u from u = 1/32 on
            tolerance = 1e-5 * expected if expected < 1.0 else 1e-6 + 2.0**-24 * math.exp(expected)
            assert abs(got - expected) <= tolerance
    assert given.equal(before)


def test_one_bit_of_token_or_key_changes_half_of_the_hash():
    generator = torch.Generator().manual_seed(4)
    token, word0, word1 = torch.randint(-(2**31), 2**31, (3, 2000), generator=generator).int()
    hashes = reference.token_hash(token, word0, word1)
    for place in range(32):
        flip = reference.signed(1 << place)
        for case in ((token ^ flip, word0, word1), (token, word0 ^ flip, word1), (token, word0, word1 ^ flip)):
            changed = hashes ^ reference.token_hash(*case)
            share = torch.stack([(changed >> bit) & 1 for bit in range(32)]).float().mean(dim=1)  # of each bit
            assert ((share - 0.5).abs() < 0.06).all(), place  # 5 standard deviations
