"""The device's copies of the request table: slots and tokens of every sequence by position, kept up to date row by row.

A decode step whose input tokens were chosen on the device reads them here, so the host need not know them to launch it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fineinfer.kernels.launch import cdiv

BLOCK = 128


def enter_rows(
    fields: torch.Tensor, slot_table: torch.Tensor, token_table: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Enter a step's rows into both tables and resolve their input tokens.

    Args:
        fields: [>= 4, num_tokens] int32: token id (negative: take the one in the table), position, slot (negative: a
            padding row, nothing is entered), table row.
        slot_table: [table_size, max_length] int32.
        token_table: As ``slot_table``.
        ids: [num_tokens] int32, gets the token ids.

    Returns:
        ``ids``.

    Raises:
        ValueError: Tables of different strides.
    """
    if slot_table.stride() != token_table.stride():
        raise ValueError("slot table and token table must be laid out alike")
    num_tokens = fields.shape[1]
    if num_tokens:
        _enter_kernel[(cdiv(num_tokens, BLOCK),)](
            fields, fields.stride(0), slot_table, token_table, slot_table.stride(0), ids, num_tokens, BLOCK=BLOCK
        )
    return ids


def enter_tokens(
    tokens: torch.Tensor, sample_rows: torch.Tensor, fields: torch.Tensor, token_table: torch.Tensor
) -> None:
    """Write sampled tokens behind the rows that chose them; one past the table's end is dropped.

    Args:
        tokens: [num_samples] int32.
        sample_rows: [num_samples] int32, each token's column in ``fields``; negative: the token is nobody's.
        fields: As for ``enter_rows``.
        token_table: [table_size, max_length] int32.
    """
    num_samples = tokens.shape[0]
    if num_samples:
        _enter_tokens_kernel[(cdiv(num_samples, BLOCK),)](
            tokens,
            sample_rows,
            fields,
            fields.stride(0),
            token_table,
            token_table.stride(0),
            token_table.shape[1],
            num_samples,
            BLOCK=BLOCK,
        )


# sizes and places change from step to step: compile once
@triton.jit(do_not_specialize=["field_stride", "num_tokens"])  # type: ignore[untyped-decorator]
def _enter_kernel(  # type: ignore[no-untyped-def]
    fields, field_stride, slot_table, token_table, table_stride, ids, num_tokens, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_tokens
    token = tl.load(fields + index, mask=exists, other=0)
    position = tl.load(fields + field_stride + index, mask=exists, other=0)
    slot = tl.load(fields + 2 * field_stride + index, mask=exists, other=-1)
    row = tl.load(fields + 3 * field_stride + index, mask=exists, other=0)
    place = row.to(tl.int64) * table_stride + position
    live = exists & (slot >= 0)
    stored = tl.load(token_table + place, mask=live & (token < 0), other=0)
    tl.store(slot_table + place, slot, mask=live)
    tl.store(token_table + place, token, mask=live & (token >= 0))
    tl.store(ids + index, tl.where(token >= 0, token, stored), mask=exists)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["field_stride", "num_samples"], do_not_specialize_on_alignment=["tokens", "sample_rows"]
)
def _enter_tokens_kernel(  # type: ignore[no-untyped-def]
    tokens,
    sample_rows,
    fields,
    field_stride,
    token_table,
    table_stride,
    max_length,
    num_samples,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_samples
    column = tl.load(sample_rows + index, mask=exists, other=-1)
    exists = column >= 0
    position = tl.load(fields + field_stride + column, mask=exists, other=0) + 1
    row = tl.load(fields + 3 * field_stride + column, mask=exists, other=0)
    token = tl.load(tokens + index, mask=exists, other=0)
    tl.store(token_table + row.to(tl.int64) * table_stride + position, token, mask=exists & (position < max_length))
