"""Random numbers that are hashes of where they are used: nothing is drawn in turn, so each can be made alone.

Twins: ``reference_noise``; hashes are equal to the bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from fineinfer.kernels.reference_noise import HASH_STEPS, LARGEST_UNIFORM

_FIRST, _SECOND = (tl.constexpr(factor) for factor in HASH_STEPS)
_LARGEST_UNIFORM = tl.constexpr(LARGEST_UNIFORM)
_STEP = tl.constexpr(2.0**-32)


@triton.jit
def mixed(bits):
    """The finaliser, on uint32."""
    bits ^= bits >> 16
    bits *= _FIRST
    bits ^= bits >> 15
    bits *= _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def token_hash(token, word0, word1):
    """Hash [n] uint32 of token ids [n] and the two int32 words of a key."""
    word0, word1 = word0.to(tl.uint32, bitcast=True), word1.to(tl.uint32, bitcast=True)
    return mixed(mixed(token.to(tl.uint32, bitcast=True) ^ word0) ^ word1)


@triton.jit
def exponential(bits):
    """Exponential number fp32 of mean 1 that belongs to each uint32, small ones as fine as large ones."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * _STEP, _LARGEST_UNIFORM)
    # -log(1 - u): below 1/32 the subtraction would round away what tells small numbers apart, the series does not
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 32, series, -tl.log(1.0 - u))
