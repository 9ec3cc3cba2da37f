"""A plan's chunks as int32 fields for one copy to the device: every single-row chunk first, then the prefill spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.adapters.batch import AdapterSegment
from fineinfer.memory.kv_cache import KVCache
from fineinfer.scheduler.plan import Chunk

NUM_HOST_COPIES = 3  # a host array is written again only after the step that read it was collected
# what each row is; IDS: token id, negative where only the device knows it; SLOTS: negative for a padding row; LENGTHS:
# tokens that a decode row sees, 0 for every other; ADAPTERS: slot, negative for none
IDS, POSITIONS, SLOTS, TABLE_ROWS, LENGTHS, ROPE_LENGTHS, ADAPTERS = range(7)
NUM_FIELDS = 7
Fields = np.ndarray  # [NUM_FIELDS, num_rows] int32


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array from which a copy to the device need not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class InputBuffer:
    """One int32 array on the device and pinned ones on the host that take turns in filling it.

    Args:
        capacity: Numbers.
        device: Where the kernels run.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pin) for _ in range(NUM_HOST_COPIES)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._turn = 0

    def upload(self, *parts: np.ndarray) -> torch.Tensor:
        """Copy arrays one after the other (fp32 ones bit by bit), asynchronously.

        Returns:
            [sum of sizes] int32 view of the device's array.
        """
        self._turn = (self._turn + 1) % NUM_HOST_COPIES
        array, end = self._arrays[self._turn], 0
        for part in parts:
            begin, end = end, end + part.size
            array[begin:end] = part.reshape(-1).view(np.int32)
        target = self.device[:end]
        target.copy_(self._hosts[self._turn][:end], non_blocking=True)
        return target


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Host side of one forward.

    Attributes:
        chunks: In row order.
        fields: [NUM_FIELDS, num_rows].
        num_decodes: Rows that are chunks of their own; they come first.
        spans: (first row, length, position, table row) of every longer chunk.
        sample_rows: Rows whose logits choose a token, in order of the sampling chunks.
        segments: Row ranges by adapter slot; an adapter may have one among the decodes and one among the spans.
    """

    chunks: tuple[Chunk, ...]
    fields: Fields
    num_decodes: int
    spans: list[tuple[int, int, int, int]]
    sample_rows: list[int]
    segments: list[AdapterSegment]

    @property
    def num_rows(self) -> int:
        """Token rows."""
        return int(self.fields.shape[1])


def lay_out(chunks: tuple[Chunk, ...], kv_cache: KVCache) -> DeviceBatch:
    """Order chunks and fill the fields.

    Raises:
        RuntimeError: A chunk's sequence has no table row.
    """
    decodes = [chunk for chunk in chunks if chunk.length == 1]
    longer = [chunk for chunk in chunks if chunk.length > 1]
    for group in (decodes, longer):
        if any(chunk.sequence.adapter_slot is not None for chunk in group):
            group.sort(key=_adapter_of)
    num_rows = len(decodes) + sum(chunk.length for chunk in longer)
    fields = np.empty((NUM_FIELDS, num_rows), dtype=np.int32)
    _fill_decodes(fields[:, : len(decodes)], decodes, kv_cache)
    spans, first = [], len(decodes)
    for chunk in longer:
        end, row = first + chunk.length, _row_of(chunk)
        _fill_span(fields[:, first:end], chunk, row, kv_cache)
        spans.append((first, chunk.length, chunk.start, row))
        first = end
    ordered = (*decodes, *longer)
    ends = [*range(1, len(decodes) + 1), *(first + length for first, length, _, _ in spans)]
    sample_rows = [end - 1 for chunk, end in zip(ordered, ends, strict=True) if chunk.samples]
    return DeviceBatch(ordered, fields, len(decodes), spans, sample_rows, _segments(ordered, ends))


def _adapter_of(chunk: Chunk) -> int:
    slot = chunk.sequence.adapter_slot
    return -1 if slot is None else slot


def _row_of(chunk: Chunk) -> int:
    if chunk.sequence.row is None:
        raise RuntimeError(f"request {chunk.sequence.request_id} was planned without a table row")
    return chunk.sequence.row


def _newest_id(chunk: Chunk) -> int:
    known = chunk.sequence.tokens(chunk.start, chunk.start + 1)
    return known[0] if known else -1


def _fill_decodes(fields: Fields, chunks: list[Chunk], kv_cache: KVCache) -> None:
    rows = np.array([_row_of(chunk) for chunk in chunks], dtype=np.int32)
    positions = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    fields[IDS] = [_newest_id(chunk) for chunk in chunks]
    fields[POSITIONS] = positions
    fields[SLOTS] = kv_cache.table.slots[rows, positions]
    fields[TABLE_ROWS] = rows
    fields[LENGTHS] = positions + 1
    fields[ADAPTERS] = [_adapter_of(chunk) for chunk in chunks]
    # positions of the prompt were rotated for the whole prompt, later ones for their own length (as transformers)
    fields[ROPE_LENGTHS] = np.maximum([len(chunk.sequence.prompt) for chunk in chunks], positions + 1)


def _fill_span(fields: Fields, chunk: Chunk, row: int, kv_cache: KVCache) -> None:
    stop = chunk.start + chunk.length
    positions = np.arange(chunk.start, stop, dtype=np.int32)
    fields[IDS] = chunk.sequence.tokens(chunk.start, stop)
    fields[POSITIONS] = positions
    fields[SLOTS] = kv_cache.table.slots[row, chunk.start : stop]
    fields[TABLE_ROWS] = row
    fields[LENGTHS] = 0
    fields[ADAPTERS] = _adapter_of(chunk)
    fields[ROPE_LENGTHS] = np.maximum(len(chunk.sequence.prompt), positions + 1)


def _segments(chunks: tuple[Chunk, ...], ends: list[int]) -> list[AdapterSegment]:
    segments: list[AdapterSegment] = []
    for chunk, end in zip(chunks, ends, strict=True):
        slot, first = chunk.sequence.adapter_slot, end - chunk.length
        if slot is None:
            continue
        if segments and segments[-1].slot == slot and segments[-1].end == first:
            segments[-1] = segments[-1]._replace(end=end)
        else:
            segments.append(AdapterSegment(slot, first, end))
    return segments
