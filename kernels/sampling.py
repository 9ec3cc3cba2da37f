"""Choosing tokens on the device: penalties, bias, greedy and seeded draws, without a sort and without waiting.

A draw never sorts its row. Thresholds (the k-th largest logit, the edge of the nucleus) are searched over integer keys
that order like the fp32 logits: each pass over the row, which stays in L2, weighs the tokens above three pivots, so 16
passes find any threshold exactly. Logits are compared before the temperature divides them; it changes no order.

The draw itself is a race (the Gumbel-max trick, told by exponential numbers instead of their logarithms): each kept
token arrives after a time that is exponential with the token's weight as rate, and the first is drawn. The times are
hashes of the token and a key from the caller, so a row's token depends on nothing but its own logits and parameters,
and on their rounding only where two tokens arrive together. Walking the cumulative mass to a random number instead
ends, among tokens less likely than that rounding, at another one each time the row is computed in another batch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv, next_power_of_2
from fineinfer.kernels.noise import exponential, token_hash

LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPLIT = 4096  # logits read at once; a program of the split argmax reads no more, so 128k of them keep 32 busy
POSITIONS = 32  # tokens that a program of the penalties owns
TILE = 64  # tokens that it compares them with at once
ENTRIES = 256  # added values a program

_LOG2E = tl.constexpr(1.4426950408889634)
_MOST_SCALE = tl.constexpr(1e30)  # keeps 0 * scale at 0 where the temperature is next to nothing
_MINUS_INF_KEY = tl.constexpr(-2139095041)
_INF_KEY = tl.constexpr(2139095040)
_NAN_KEY = tl.constexpr(2147483647)
_LAST_INDEX = tl.constexpr(2147483647)
_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _key(x):
    """Integer that orders like the fp32 ``x``; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row, start, vocab, BLOCK: tl.constexpr):
    """Logits ``start`` ... of a row as fp32 [BLOCK], minus infinity past the vocabulary."""
    index = start + tl.arange(0, BLOCK)
    return tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _peak(row, vocab, BLOCK: tl.constexpr):
    """Largest logit of a row, its first index, and 1 if the row is usable."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _load(row, start, vocab, BLOCK)
        where = tl.where(x > best, start + lane, where)
        best = tl.where(x > best, x, best)
        bad = tl.where(x != x, 1, bad)
    peak = tl.max(best, axis=0)
    first = tl.min(tl.where(best == peak, where, _LAST_INDEX), axis=0)
    usable = (tl.max(bad, axis=0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    return peak, first, usable.to(tl.int32)


@triton.jit
def _weights(row, start, vocab, cut, peak, scale, floor, BLOCK: tl.constexpr):
    """Keys [BLOCK] of logits, and ``exp((x - peak) / temperature)``, 0 below the cut or the floor."""
    x = _load(row, start, vocab, BLOCK)
    key = _key(x)
    weight = tl.exp2((x - peak) * scale)
    return key, tl.where((key >= cut) & (weight >= floor), weight, 0.0)


@triton.jit
def _threshold(row, vocab, low, high, limit, peak, scale, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key in ``low`` ... ``high`` (int64) such that the tokens from it on weigh more than ``limit``.

    ``low`` itself is taken to do so. A token weighs 1 if COUNT, else its probability's numerator. If COUNT, any key
    that cuts off the same tokens may be returned.
    """
    cut = low.to(tl.int32)
    while low < high:
        span = high - low
        pivot1 = low + (span + 3) // 4
        pivot2 = low + (span * 2 + 3) // 4
        pivot3 = low + (span * 3 + 3) // 4
        above1 = tl.zeros([BLOCK], tl.float32)
        above2 = tl.zeros([BLOCK], tl.float32)
        above3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            if COUNT:
                key = _key(_load(row, start, vocab, BLOCK))
                weight = tl.full([BLOCK], 1.0, tl.float32)
            else:
                key, weight = _weights(row, start, vocab, cut, peak, scale, floor, BLOCK)
            above1 += tl.where(key >= pivot1.to(tl.int32), weight, 0.0)
            above2 += tl.where(key >= pivot2.to(tl.int32), weight, 0.0)
            above3 += tl.where(key >= pivot3.to(tl.int32), weight, 0.0)
        sum1 = tl.sum(above1, axis=0)
        sum2 = tl.sum(above2, axis=0)
        sum3 = tl.sum(above3, axis=0)
        below = tl.where(sum2 > limit, pivot3, tl.where(sum1 > limit, pivot2, pivot1)) - 1
        high = tl.where(sum3 > limit, high, below)
        low = tl.where(sum3 > limit, pivot3, tl.where(sum2 > limit, pivot2, tl.where(sum1 > limit, pivot1, low)))
        if COUNT:  # just as many as wanted: what lies between is no token
            taken = tl.where(sum3 > limit, sum3, tl.where(sum2 > limit, sum2, sum1))
            high = tl.where(taken == limit + 1.0, low, high)
    return low


@triton.jit
def _draw(row, vocab, peak, temperature, top_k, top_p, min_p, word0, word1, BLOCK: tl.constexpr):
    """Token of a usable row at a temperature above 0."""
    # Triton 3.7's interpreter cannot divide a constant by a tensor
    scale = tl.minimum(tl.full((), _LOG2E, tl.float32) / temperature, _MOST_SCALE)
    cut = tl.full((), _MINUS_INF_KEY, tl.int64)
    high = _key(peak).to(tl.int64)
    if (top_k > 0) & (top_k < vocab):
        cut = _threshold(row, vocab, cut, high, (top_k - 1).to(tl.float32), peak, scale, min_p, True, BLOCK)
    if top_p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            _, weight = _weights(row, start, vocab, cut.to(tl.int32), peak, scale, min_p, BLOCK)
            kept += weight
        limit = top_p * tl.sum(kept, axis=0)
        cut = _threshold(row, vocab, cut, high, limit, peak, scale, min_p, False, BLOCK)
    best = tl.zeros([BLOCK], tl.float32)  # inverse arrival times: the earliest is the largest
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        _, weight = _weights(row, start, vocab, cut.to(tl.int32), peak, scale, min_p, BLOCK)
        if tl.max(weight, axis=0) > 0.0:
            token = start + tl.arange(0, BLOCK)
            speed = weight / exponential(token_hash(token, word0, word1))
            where = tl.where(speed > best, token, where)
            best = tl.maximum(best, speed)
    return tl.min(tl.where(best == tl.max(best, axis=0), where, _LAST_INDEX), axis=0)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "keys", "token_out", "ok_out"])
def _sample_kernel(
    logits, row_stride, vocab, temperature, top_k, top_p, min_p, keys, token_out, ok_out, BLOCK: tl.constexpr
):
    """One row of ``logits`` [S, V]; ``keys`` are [S, 2], other parameters and results [S]."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    peak, first, ok = _peak(row, vocab, BLOCK)
    heat = tl.load(temperature + index)
    token = tl.where(ok != 0, first, 0)
    if (ok != 0) & (heat > 0.0):
        k, nucleus, floor = tl.load(top_k + index), tl.load(top_p + index), tl.load(min_p + index)
        word0, word1 = tl.load(keys + 2 * index), tl.load(keys + 2 * index + 1)
        token = _draw(row, vocab, peak, heat, k, nucleus, floor, word0, word1, BLOCK)
    tl.store(token_out + index, token)
    tl.store(ok_out + index, ok)


@triton.jit
def _argmax_split_kernel(logits, row_stride, vocab, partial, num_splits, BLOCK: tl.constexpr):
    """Each split's winner as one integer: its key above (NaN's is the largest), below what falls with its index."""
    index = tl.program_id(0)
    split = tl.program_id(1)
    start = split * BLOCK
    x = _load(logits + index.to(tl.int64) * row_stride, start, vocab, BLOCK)
    key = tl.where(x != x, _NAN_KEY, _key(x))
    peak = tl.max(key, axis=0)
    first = tl.min(tl.where(key == peak, start + tl.arange(0, BLOCK), _LAST_INDEX), axis=0)
    tl.store(partial + index * num_splits + split, (peak.to(tl.int64) << 32) + (_LAST_INDEX - first))


@triton.jit(do_not_specialize_on_alignment=["token_out", "ok_out"])
def _argmax_join_kernel(partial, num_splits, token_out, ok_out, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    best = tl.max(tl.load(partial + index * num_splits + split, mask=split < num_splits, other=_LOWEST), axis=0)
    key = best >> 32
    ok = (key > _MINUS_INF_KEY) & (key < _INF_KEY)
    token = _LAST_INDEX - (best & 0xFFFFFFFF)
    tl.store(token_out + index, tl.where(ok, token, 0).to(tl.int32))
    tl.store(ok_out + index, ok.to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["rows", "prompt_lens", "total_lens", "repetition", "presence", "frequency"])
def _penalize_kernel(
    logits,  # [S, V]
    row_stride,
    tokens,  # [R, L]
    table_stride,
    rows,  # this and the rest: [S]
    prompt_lens,
    total_lens,
    repetition,
    presence,
    frequency,
    POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first occurrence of a token owns it: it counts the others and alone writes the token's logit."""
    index = tl.program_id(0)
    start = tl.program_id(1) * POSITIONS
    factor = tl.load(repetition + index)
    once = tl.load(presence + index)
    each = tl.load(frequency + index)
    prompt = tl.load(prompt_lens + index)
    total = tl.load(total_lens + index)
    counts_output = (once != 0.0) | (each != 0.0)
    begin = tl.where(factor != 1.0, 0, prompt)  # without a repetition penalty the prompt does not matter
    end = tl.where(counts_output, total, tl.minimum(start + POSITIONS, total))
    active = counts_output | (factor != 1.0)
    if active & (start < total) & (start + POSITIONS > begin):
        table = tokens + tl.load(rows + index).to(tl.int64) * table_stride
        mine = start + tl.arange(0, POSITIONS)
        token = tl.load(table + mine, mask=mine < total, other=-1)
        earlier = tl.zeros([POSITIONS, TILE], tl.int32)
        count = tl.zeros([POSITIONS, TILE], tl.int32)
        for tile in range(begin, end, TILE):
            place = tile + tl.arange(0, TILE)
            other = tl.load(table + place, mask=place < total, other=-2)
            same = token[:, None] == other[None, :]  # [POSITIONS, TILE]
            earlier += (same & (place[None, :] < mine[:, None])).to(tl.int32)
            count += (same & (place[None, :] >= prompt)).to(tl.int32)
        owns = (mine >= begin) & (mine < total) & (tl.sum(earlier, axis=1) == 0)
        times = tl.sum(count, axis=1).to(tl.float32)
        at = logits + index.to(tl.int64) * row_stride + token
        score = tl.load(at, mask=owns, other=0.0)
        score = tl.where(score < 0.0, score * factor, score / factor)
        score -= tl.where(times > 0.0, once + each * times, 0.0)
        tl.store(at, score, mask=owns)


@triton.jit(do_not_specialize=["num_entries"])  # changes from step to step: compile once
def _add_at_kernel(logits, row_stride, row_index, token_ids, values, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    row = tl.load(row_index + entry, mask=mask, other=0).to(tl.int64)
    at = logits + row * row_stride + tl.load(token_ids + entry, mask=mask, other=0)
    tl.store(at, tl.load(at, mask=mask, other=0.0) + tl.load(values + entry, mask=mask, other=0.0), mask=mask)


def num_splits(vocab_size: int) -> int:
    """Columns of ``argmax``'s workspace."""
    return cdiv(vocab_size, SPLIT)


def argmax(
    logits: torch.Tensor, token_out: torch.Tensor, ok_out: torch.Tensor, workspace: torch.Tensor | None = None
) -> None:
    """Lowest index of each row's maximum, exactly as ``sample`` at temperature 0, with many programs a row.

    Args:
        logits: [S, V] fp32, fp16 or bf16; rows may be strided.
        token_out: [S] int32, written; 0 for an unusable row.
        ok_out: [S] int32, written: 1 if the row has no NaN, no plus infinity and not only minus infinity.
        workspace: Contiguous int64 [at least S, ``num_splits(V)``], overwritten; made here if None.

    Raises:
        ValueError: Wrong dtypes or shapes.
    """
    num_rows, vocab = _check_logits(logits, LOGIT_DTYPES)
    _check_vectors(num_rows, token_out, ok_out)
    splits = num_splits(vocab)
    if workspace is None:
        workspace = torch.empty((num_rows, splits), dtype=torch.int64, device=logits.device)
    elif workspace.dtype != torch.int64 or workspace.shape[1] != splits or workspace.shape[0] < num_rows:
        raise ValueError(f"workspace must be int64 [{num_rows}, {splits}], not {workspace.dtype} {workspace.shape}")
    if num_rows == 0:
        return
    block = min(SPLIT, next_power_of_2(vocab))
    _argmax_split_kernel[(num_rows, splits)](logits, logits.stride(0), vocab, workspace, splits, block)
    _argmax_join_kernel[(num_rows,)](workspace, splits, token_out, ok_out, next_power_of_2(splits), num_warps=1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    token_out: torch.Tensor,
    ok_out: torch.Tensor,
) -> None:
    """Choose a token for each row: the lowest index of the maximum, or a draw from what the cuts leave.

    ``top_k`` keeps the logits not below the k-th largest; of these ``min_p`` keeps what is at least ``min_p`` times as
    likely as the best; of these ``top_p`` keeps a token if those that are more likely hold at most ``top_p`` of the
    mass. A kept token is drawn with its share of the mass, by a race that the row's key decides.

    Args:
        logits: [S, V] fp32, fp16 or bf16, only read; rows may be strided.
        temperature: [S] fp32, 0 for greedy.
        top_k: [S] int32; 0, or V and above, keeps all.
        top_p: [S] fp32; 1 keeps all.
        min_p: [S] fp32; 0 keeps all.
        keys: [S, 2] int32, contiguous: random bits. Rows of the same key and logits draw the same token.
        token_out: [S] int32, written; 0 for an unusable row.
        ok_out: [S] int32, written: 1 if the row has no NaN, no plus infinity and not only minus infinity.

    Raises:
        ValueError: Wrong dtypes or shapes.
    """
    num_rows, vocab = _check_logits(logits, LOGIT_DTYPES)
    _check_vectors(num_rows, top_k, token_out, ok_out)
    _check_vectors(num_rows, temperature, top_p, min_p, dtype=torch.float32)
    if keys.dtype != torch.int32 or keys.shape != (num_rows, 2) or not keys.is_contiguous():
        raise ValueError(f"keys must be contiguous int32 [{num_rows}, 2], not {keys.dtype} {tuple(keys.shape)}")
    if num_rows == 0:
        return
    block = min(SPLIT, next_power_of_2(vocab))
    parameters = (temperature, top_k, top_p, min_p, keys)
    warps = 16 if block == SPLIT else 4
    _sample_kernel[(num_rows,)](logits, logits.stride(0), vocab, *parameters, token_out, ok_out, block, num_warps=warps)


def penalize(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalties as transformers (repetition) and OpenAI (presence, frequency) define them, in that order, in place.

    Repetition acts once on every distinct token of prompt and output: it multiplies a negative logit and divides any
    other. Presence is taken off once for a token of the output, frequency for each of its occurrences there.

    Args:
        logits: [S, V] fp32; rows may be strided.
        tokens: [R, L] int32, all tokens of each request by position.
        rows: [S] int32, the row of ``tokens`` that belongs to each row of logits.
        prompt_lens: [S] int32, tokens of the prompt.
        total_lens: [S] int32, tokens of prompt and output.
        repetition: [S] fp32, 1 for none.
        presence: [S] fp32, 0 for none.
        frequency: [S] fp32, 0 for none.

    Raises:
        ValueError: Wrong dtypes or shapes.
    """
    num_rows, _ = _check_logits(logits, (torch.float32,))
    _check_vectors(num_rows, rows, prompt_lens, total_lens)
    _check_vectors(num_rows, repetition, presence, frequency, dtype=torch.float32)
    if tokens.dtype != torch.int32 or tokens.ndim != 2 or tokens.stride(1) != 1:
        raise ValueError(f"tokens must be int32 rows, not {tokens.dtype} {tuple(tokens.shape)}")
    if num_rows == 0 or tokens.shape[1] == 0:
        return
    parameters = (rows, prompt_lens, total_lens, repetition, presence, frequency)
    _penalize_kernel[(num_rows, cdiv(tokens.shape[1], POSITIONS))](
        logits, logits.stride(0), tokens, tokens.stride(0), *parameters, POSITIONS, TILE
    )


def add_at(logits: torch.Tensor, row_index: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """``logits[row_index[i], token_ids[i]] += values[i]`` in place: biases, and minus infinity to mask a token.

    Args:
        logits: [S, V] fp32; rows may be strided.
        row_index: [E] int32.
        token_ids: [E] int32; no (row, token) pair twice.
        values: [E] fp32.

    Raises:
        ValueError: Wrong dtypes or shapes.
    """
    _check_logits(logits, (torch.float32,))
    num_entries = len(values)
    _check_vectors(num_entries, row_index, token_ids)
    _check_vectors(num_entries, values, dtype=torch.float32)
    if num_entries == 0:
        return
    _add_at_kernel[(cdiv(num_entries, ENTRIES),)](
        logits, logits.stride(0), row_index, token_ids, values, num_entries, ENTRIES
    )


def _check_logits(logits: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    if logits.ndim != 2 or logits.dtype not in dtypes or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of {dtypes}, not {logits.dtype} {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def _check_vectors(length: int, *vectors: torch.Tensor, dtype: torch.dtype = torch.int32) -> None:
    for vector in vectors:
        if vector.dtype != dtype or vector.shape != (length,) or (length > 1 and vector.stride(0) != 1):
            raise ValueError(f"expected {dtype} [{length}], not {vector.dtype} {tuple(vector.shape)}")
