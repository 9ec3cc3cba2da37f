"""Plain torch twins of ``noise``: random numbers that are hashes of where they are used.

int32 stands for unsigned numbers, for which torch has no arithmetic; products wrap around all the same.
"""

from __future__ import annotations

import torch

HASH_STEPS = (0x7FEB352D, 0x846CA68B)  # of Wellons' lowbias32, the 32-bit finaliser with the least bias known
LARGEST_UNIFORM = 1.0 - 2.0**-24  # largest fp32 below 1


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser."""
    first, second = (signed(factor) for factor in HASH_STEPS)
    bits = (bits ^ ((bits >> 16) & 0xFFFF)).mul_(first)  # in place: a row of 49,152 takes half as long
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits.mul_(second)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def token_hash(token: torch.Tensor, word0: int, word1: int) -> torch.Tensor:
    """Hash [n] int32 of token ids [n] int32 and the two signed words of a key: the finaliser for one, then the other.

    Two words, because 2^32 keys would be few: among 77,000 draws two would be likely to have the same.
    """
    return mixed(mixed(token ^ word0) ^ word1)


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """Exponential number fp32 of mean 1 that belongs to each 32 bits, from 2^-33 to 17, small ones as fine as large."""
    u = bits.long().bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return u.neg_().log1p_().neg_()


def signed(factor: int) -> int:
    """The int32 that has the bits of an unsigned number."""
    return factor - 2**32 if factor >= 2**31 else factor
