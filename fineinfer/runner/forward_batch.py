"""The tensors of one inference forward, built from a plan's chunks; passed explicitly, never global."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.adapters.batch import AdapterSegment
from fineinfer.memory.kv_cache import KVCache
from fineinfer.scheduler.plan import Chunk


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows ``[first, first + length)`` of the batch belong to one sequence at positions from ``start``.

    ``kv`` names the sequence's slots for positions ``[0, start + length)``: a slice when they are one run.
    """

    first: int
    length: int
    start: int
    kv: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """All single-row spans as one padded batch, for devices where per-sequence launches cost too much.

    Attributes:
        rows: [num_decodes] rows of the batch.
        slot_table: [num_decodes, max_length] slots by position, padded with 0.
        lengths: [num_decodes] tokens that each may see.
    """

    rows: torch.Tensor
    slot_table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward over ``T`` flat token rows, grouped by adapter.

    Attributes:
        chunks: The plan's chunks in row order.
        ids: [T] token ids.
        positions: [T] position of each row in its sequence.
        rope_lengths: [T] length that sets the base of dynamic RoPE for each row.
        slots: [T] pool slot that each row's K and V go to.
        spans: One per chunk, same order; those in ``decode_group`` are not in ``spans``.
        decode_group: The single-row spans on a GPU, else None.
        sample_rows: [S] rows whose logits choose a token, in order of the sampling chunks.
        adapter_segments: Row ranges by adapter slot; empty when no row has one.
    """

    chunks: tuple[Chunk, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    slots: torch.Tensor
    spans: tuple[RowSpan, ...]
    decode_group: DecodeGroup | None
    sample_rows: torch.Tensor
    adapter_segments: tuple[AdapterSegment, ...]


def build_forward_batch(chunks: tuple[Chunk, ...], kv_cache: KVCache, device: torch.device) -> ForwardBatch:
    """Lay a plan's chunks out as flat rows, sorted by adapter so that each adapter's rows are one segment."""
    order = sorted(chunks, key=lambda c: (-1 if c.sequence.adapter_slot is None else c.sequence.adapter_slot, -c.start))
    ids: list[int] = []
    positions: list[np.ndarray] = []
    rope_lengths: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    spans: list[RowSpan] = []
    decodes: list[tuple[int, np.ndarray]] = []
    sample_rows: list[int] = []
    segments: list[AdapterSegment] = []
    for chunk in order:
        sequence, first, stop = chunk.sequence, len(ids), chunk.start + chunk.length
        if sequence.row is None:
            raise RuntimeError(f"request {sequence.request_id} was planned without a table row")
        ids.extend(sequence.tokens(chunk.start, stop))
        span_positions = np.arange(chunk.start, stop, dtype=np.int64)
        positions.append(span_positions)
        # positions of the prompt were rotated for the whole prompt, later ones for their own length (as transformers)
        rope_lengths.append(np.maximum(len(sequence.prompt), span_positions + 1))
        row_slots = kv_cache.slots(sequence.row)[:stop]
        slots.append(row_slots[chunk.start :])
        if device.type != "cpu" and chunk.length == 1:
            decodes.append((first, row_slots))
        else:
            spans.append(
                RowSpan(first, chunk.length, chunk.start, _kv_index(kv_cache, sequence.row, row_slots, device))
            )
        if chunk.samples:
            sample_rows.append(stop - chunk.start + first - 1)
        if sequence.adapter_slot is not None:
            end = first + chunk.length
            if segments and segments[-1].slot == sequence.adapter_slot:
                segments[-1] = segments[-1]._replace(end=end)
            else:
                segments.append(AdapterSegment(sequence.adapter_slot, first, end))

    def on_device(values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.int64)).to(device, non_blocking=True)

    return ForwardBatch(
        chunks=tuple(order),
        ids=torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True),
        positions=on_device(positions),
        rope_lengths=on_device(rope_lengths),
        slots=on_device(slots),
        spans=tuple(spans),
        decode_group=_group(decodes, device) if decodes else None,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64).to(device, non_blocking=True),
        adapter_segments=tuple(segments),
    )


def _kv_index(kv_cache: KVCache, row: int, row_slots: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    run = kv_cache.run(row)
    if run is not None:
        return slice(run.start, run.start + len(row_slots))
    return torch.from_numpy(row_slots.astype(np.int64)).to(device, non_blocking=True)


def _group(decodes: list[tuple[int, np.ndarray]], device: torch.device) -> DecodeGroup:
    lengths = np.array([len(row_slots) for _, row_slots in decodes], dtype=np.int64)
    table = np.zeros((len(decodes), int(lengths.max())), dtype=np.int64)
    for index, (_, row_slots) in enumerate(decodes):
        table[index, : len(row_slots)] = row_slots
    rows = np.array([first for first, _ in decodes], dtype=np.int64)
    return DecodeGroup(*(torch.from_numpy(a).to(device, non_blocking=True) for a in (rows, table, lengths)))
