"""The tensors of one inference forward, built from a plan's chunks; passed explicitly, never global."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from fineinfer.adapters.batch import AdapterSegment
from fineinfer.kernels.reference import prefill_mask
from fineinfer.memory.kv_cache import KVCache
from fineinfer.scheduler.plan import Chunk

KVIndex = slice | torch.Tensor  # a sequence's slots in order: a slice where they are one run
SMALLEST_BUCKET = 256  # padded decode groups: lengths up to 256, 512, 1024, ...; padding costs less than twice


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows ``[first, first + length)`` of the batch are positions ``[start, start + length)`` of one sequence.

    Attributes:
        kv: The sequence's slots for positions ``[0, start + length)``.
        masks: Attention mask by sliding window, made once for all layers.
    """

    first: int
    length: int
    start: int
    kv: KVIndex
    masks: dict[int | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class DecodeEach:
    """Single-row spans that are attended one by one: the fast way on a CPU.

    Attributes:
        rows: [num_decodes] rows of the batch.
        kv: Each row's slots, its own last.
    """

    rows: torch.Tensor
    kv: list[KVIndex]


@dataclass(frozen=True, slots=True)
class DecodePadded:
    """Single-row spans of similar length as one padded batch, for devices where launches cost more than padding.

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
        prefills: Spans of several rows.
        decodes: All other rows.
        sample_rows: [S] rows whose logits choose a token, in order of the sampling chunks.
        adapter_segments: Row ranges by adapter slot; empty when no row has one.
    """

    chunks: tuple[Chunk, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    slots: torch.Tensor
    prefills: tuple[PrefillSpan, ...]
    decodes: tuple[DecodeEach | DecodePadded, ...]
    sample_rows: torch.Tensor
    adapter_segments: tuple[AdapterSegment, ...]


@dataclass(slots=True)
class _Builder:
    """Host-side lists of a batch that is being laid out."""

    ids: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    rope_lengths: list[np.ndarray] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    prefills: list[PrefillSpan] = field(default_factory=list)
    decodes: list[tuple[int, np.ndarray, slice | None]] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    segments: list[AdapterSegment] = field(default_factory=list)


def build_forward_batch(
    chunks: tuple[Chunk, ...], kv_cache: KVCache, windows: frozenset[int | None], device: torch.device
) -> ForwardBatch:
    """Lay a plan's chunks out as flat rows, sorted by adapter so that each adapter's rows are one segment.

    Args:
        chunks: What runs.
        kv_cache: Tables of the sequences.
        windows: The sliding windows that occur among the model's layers.
        device: Where the tensors go.
    """
    order = sorted(chunks, key=lambda c: (-1 if c.sequence.adapter_slot is None else c.sequence.adapter_slot, -c.start))
    build = _Builder()
    for chunk in order:
        _add_chunk(build, chunk, kv_cache, windows, device)

    def on_device(values: list[np.ndarray]) -> torch.Tensor:
        return _to_device(np.concatenate(values), device)

    return ForwardBatch(
        chunks=tuple(order),
        ids=_to_device(np.array(build.ids), device),
        positions=on_device(build.positions),
        rope_lengths=on_device(build.rope_lengths),
        slots=on_device(build.slots),
        prefills=tuple(build.prefills),
        decodes=_group_decodes(build.decodes, device),
        sample_rows=_to_device(np.array(build.sample_rows), device),
        adapter_segments=tuple(build.segments),
    )


def _add_chunk(
    build: _Builder, chunk: Chunk, kv_cache: KVCache, windows: frozenset[int | None], device: torch.device
) -> None:
    sequence, first, stop = chunk.sequence, len(build.ids), chunk.start + chunk.length
    if sequence.row is None:
        raise RuntimeError(f"request {sequence.request_id} was planned without a table row")
    build.ids.extend(sequence.tokens(chunk.start, stop))
    positions = np.arange(chunk.start, stop, dtype=np.int64)
    build.positions.append(positions)
    # positions of the prompt were rotated for the whole prompt, later ones for their own length (as transformers)
    build.rope_lengths.append(np.maximum(len(sequence.prompt), positions + 1))
    row_slots, run = kv_cache.slots(sequence.row)[:stop], kv_cache.run(sequence.row)
    build.slots.append(row_slots[chunk.start :])
    contiguous = None if run is None else slice(run.start, run.start + stop)
    if chunk.length == 1:
        build.decodes.append((first, row_slots, contiguous))
    else:
        kv = _to_device(row_slots, device) if contiguous is None else contiguous
        masks = {window: prefill_mask(chunk.length, chunk.start, window, device) for window in windows}
        build.prefills.append(PrefillSpan(first, chunk.length, chunk.start, kv, masks))
    if chunk.samples:
        build.sample_rows.append(first + chunk.length - 1)
    if sequence.adapter_slot is not None:
        end = first + chunk.length
        if build.segments and build.segments[-1].slot == sequence.adapter_slot:
            build.segments[-1] = build.segments[-1]._replace(end=end)
        else:
            build.segments.append(AdapterSegment(sequence.adapter_slot, first, end))


def _group_decodes(
    decodes: list[tuple[int, np.ndarray, slice | None]], device: torch.device
) -> tuple[DecodeEach | DecodePadded, ...]:
    if not decodes:
        return ()
    if device.type == "cpu":
        rows = _to_device(np.array([first for first, _, _ in decodes]), device)
        kv = [_to_device(row_slots, device) if run is None else run for _, row_slots, run in decodes]
        return (DecodeEach(rows, kv),)
    buckets: dict[int, list[tuple[int, np.ndarray]]] = {}
    for first, row_slots, _ in decodes:
        bucket = max(SMALLEST_BUCKET, 1 << (len(row_slots) - 1).bit_length())
        buckets.setdefault(bucket, []).append((first, row_slots))
    return tuple(_pad(members, device) for members in buckets.values())


def _pad(members: list[tuple[int, np.ndarray]], device: torch.device) -> DecodePadded:
    lengths = np.array([len(row_slots) for _, row_slots in members])
    table = np.zeros((len(members), -(-int(lengths.max()) // 16) * 16), dtype=np.int64)
    for index, (_, row_slots) in enumerate(members):
        table[index, : len(row_slots)] = row_slots
    rows = np.array([first for first, _ in members])
    return DecodePadded(_to_device(rows, device), _to_device(table, device), _to_device(lengths, device))


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values.astype(np.int64))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # a plain copy would wait for the device
