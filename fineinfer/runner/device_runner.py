"""Serving on a GPU: fused kernels, captured decode steps, sampling on the device, one step in flight behind another.

Tokens never wait for the host: a decode row reads its input in the device's token table, where the step before wrote
it. The host lays out step i + 1 while the device runs step i, and waits only for the results of steps it collects.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fineinfer.adapters.batch import AdapterSegment, DeviceProjection, lora_tiles, make_workspace, max_tiles
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.kernels import activation, attention_decode, attention_prefill, norm, rope_store, token_tables
from fineinfer.memory.kv_cache import KVCache
from fineinfer.model.decoder import Decoder, LayerOps, Project, plain_project
from fineinfer.model.rope import Rows
from fineinfer.runner.decode_graphs import DecodeGraphs
from fineinfer.runner.device_batch import (
    IDS,
    LENGTHS,
    NUM_FIELDS,
    POSITIONS,
    ROPE_LENGTHS,
    SLOTS,
    TABLE_ROWS,
    DeviceBatch,
    InputBuffer,
    lay_out,
)
from fineinfer.runner.device_sampler import DeviceSampler, SampledRows
from fineinfer.runner.prompt_logprobs import collect_prompt_logprobs, wants_prompt_logprobs
from fineinfer.runner.results import ChunkResult
from fineinfer.scheduler.plan import Chunk

DECODE_TILE_ROWS, PREFILL_TILE_ROWS = 16, 64  # of LoRA tiles


def _add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm.rms_norm(x, weight, eps) if delta is None else norm.add_rms_norm(x, delta, weight, eps), x


FUSED_OPS = LayerOps(_add_norm, activation.silu_and_mul)


@dataclass(frozen=True)
class DeviceStep:
    """A launched step; see ``Launched``."""

    chunks: tuple[Chunk, ...]
    sampled: SampledRows | None
    num_rows: int
    started_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one row."""
        return self.num_rows == len(self.chunks)

    def collect(self) -> tuple[list[ChunkResult], float]:
        """Wait for the step's end; one result per chunk, and the seconds it took on the device."""
        seconds = time.perf_counter() - self.started_s
        if self.events is not None:
            begin, end = self.events
            end.synchronize()
            seconds = 1e-3 * begin.elapsed_time(end)
        choices = iter(() if self.sampled is None else self.sampled.choices())
        results = []
        for chunk in self.chunks:
            if chunk.samples:
                choice = next(choices)
                results.append(ChunkResult(chunk, choice.token_id, choice.logprob, choice.failed))
            else:
                results.append(ChunkResult(chunk, None))
        return results, seconds


class DeviceRunner:
    """Runs plans with the Triton kernels; see ``Runner``.

    Args:
        decoder: The base model, shared with training.
        kv_cache: Pool and tables.
        adapters: Adapter slots.
        max_num_batched_tokens: Most rows of a step.
        device: Where it all lives; on a CPU only in Triton's interpreter, for tests.

    Raises:
        ValueError: A shape that the kernels cannot serve.
    """

    max_in_flight = 1

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        adapters: AdapterRegistry,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        if kv_cache.pool is None:
            raise ValueError("the runner needs a KV cache with a pool")
        spec, table = decoder.spec, kv_cache.table
        if spec.head_dim % 2 or spec.head_dim > rope_store.MAX_HEAD_DIM:
            raise ValueError(
                f"the Triton kernels serve even head sizes up to {rope_store.MAX_HEAD_DIM}: {spec.head_dim}"
            )
        self._decoder, self._kv, self._pool, self._stacks = decoder, kv_cache, kv_cache.pool, adapters.stacks
        self._device = device
        self._sink_row = table.max_rows  # padding rows belong to it
        max_rows = max(max_num_batched_tokens, table.max_rows)
        self._tables = torch.zeros(2, table.max_rows + 1, table.max_len, dtype=torch.int32, device=device)
        self._inputs = InputBuffer((NUM_FIELDS + 1) * max_rows + 4 * (max_rows + adapters.stacks.num_slots), device)
        self._ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(table.max_rows, dtype=torch.int32, device=device)
        self._workspace = make_workspace(max_rows, adapters.stacks, device)
        self._plans = {
            window: attention_decode.DecodePlan.allocate(table.max_rows, spec.num_heads, spec.head_dim, window, device)
            for window in set(spec.sliding_windows)
        }
        rope = decoder.rope
        self._rope_table = None if rope.needs_lengths else rope.rows(torch.arange(table.max_len, device=device))
        self._sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, table.max_rows, device)
        self._graphs: DecodeGraphs | None = None
        self._epoch = kv_cache.epoch
        self.progress = 0

    def capture_graphs(self) -> DecodeGraphs:
        """Capture decode steps of every bucket, with adapters and without; later decode steps replay them."""
        with torch.inference_mode():
            graphs = DecodeGraphs(self._bucket_logits, self._kv.table.max_rows)
            graphs.capture((False, True))
        self._graphs = graphs
        return graphs

    def capture_largest(self) -> int:
        """Capture the largest decode step and forget it; bytes of device memory that it held."""
        with torch.inference_mode():
            graphs = DecodeGraphs(self._bucket_logits, self._kv.table.max_rows)
            graphs.capture((False, True), num_buckets=1)
        return graphs.pool_bytes

    def launch(self, chunks: tuple[Chunk, ...]) -> DeviceStep:
        """Start one forward over all chunks and the sampling of its tokens."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._follow_moves()
            batch = lay_out(chunks, self._kv)
            begin = self._event()
            if self._graphs is None or batch.spans or any(wants_prompt_logprobs(chunk) for chunk in chunks):
                fields, logits, sample_rows = self._run(batch)
            else:
                fields, logits, sample_rows = self._replay(batch, self._graphs)
            sampling = [chunk for chunk in batch.chunks if chunk.samples]
            sampled = None
            if sampling:
                tokens, sampled = self._sampler.launch(logits, sampling, self._tables[1])
                token_tables.enter_tokens(tokens, sample_rows, fields, self._tables[1])
            end = self._event()
        self.progress += self._decoder.spec.num_layers
        events = None if begin is None or end is None else (begin, end)
        return DeviceStep(batch.chunks, sampled, batch.num_rows, started_s, events)

    # ------------------------------------------------------------ one forward

    def _run(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Any batch, kernel by kernel; the fields, the sampling rows' logits, and those rows."""
        tiles = attention_prefill.tiles(batch.spans, attention_prefill.block_rows(self._decoder.dtype))
        tile_rows = PREFILL_TILE_ROWS if batch.spans else DECODE_TILE_ROWS
        num_lora = sum(-(-(segment.end - segment.start) // tile_rows) for segment in batch.segments)
        adapted = lora_tiles(batch.segments, tile_rows, num_lora)
        sent = self._inputs.upload(batch.fields, np.array(batch.sample_rows, dtype=np.int32), tiles, adapted)
        sizes = (batch.fields.size, len(batch.sample_rows), tiles.size, adapted.size)
        flat_fields, sample_rows, flat_tiles, flat_adapted = sent.split(sizes)
        fields = flat_fields.view(NUM_FIELDS, -1)
        project = self._project(batch.segments, flat_adapted.view(-1, 3), tile_rows)
        x, delta = self._layers(fields, batch.num_decodes, flat_tiles.view(-1, 4), project)
        if any(wants_prompt_logprobs(chunk) for chunk in batch.chunks):
            collect_prompt_logprobs(self._decoder, batch.chunks, x + delta)
        if not batch.sample_rows:
            return fields, x[:0], sample_rows
        return fields, self._head(x.index_select(0, sample_rows), delta.index_select(0, sample_rows)), sample_rows

    def _replay(self, batch: DeviceBatch, graphs: DecodeGraphs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch of single rows, padded to its bucket."""
        num_rows, bucket = batch.num_rows, graphs.bucket(batch.num_rows)
        padded = self._padding(bucket)
        padded[:, :num_rows] = batch.fields
        parts = [padded]
        if batch.segments:
            parts.append(lora_tiles(batch.segments, DECODE_TILE_ROWS, self._max_tiles(bucket)))
        if len(batch.sample_rows) < num_rows:
            parts.append(np.array(batch.sample_rows, dtype=np.int32))
        sent = self._inputs.upload(*parts)
        logits = graphs.replay(bucket, bool(batch.segments))[:num_rows]
        sample_rows = self._all_rows[:num_rows]
        if len(batch.sample_rows) < num_rows:
            sample_rows = sent[sent.shape[0] - len(batch.sample_rows) :]
            logits = logits.index_select(0, sample_rows)
        return self._bucket_fields(bucket), logits, sample_rows

    def _bucket_logits(self, bucket: int, with_adapters: bool) -> torch.Tensor:
        """The decode step that is captured: inputs at fixed addresses, padding where nothing was uploaded."""
        if not torch.cuda.is_current_stream_capturing():
            padding_tiles = np.zeros(3 * self._max_tiles(bucket), dtype=np.int32)
            self._inputs.upload(self._padding(bucket), padding_tiles)
        fields = self._bucket_fields(bucket)
        project: Project = plain_project
        if with_adapters:
            start, count = NUM_FIELDS * bucket, self._max_tiles(bucket)
            tiles = self._inputs.device[start : start + 3 * count].view(count, 3)
            project = DeviceProjection(self._stacks, tiles, DECODE_TILE_ROWS, self._workspace)
        x, delta = self._layers(fields, bucket, None, project)
        return self._head(x, delta)

    def _layers(
        self, fields: torch.Tensor, num_decodes: int, tiles: torch.Tensor | None, project: Project
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last residual stream and what the last layer adds to it; K and V of all rows are in the pool afterwards."""
        decoder, num_rows = self._decoder, fields.shape[1]
        spec, slot_table = decoder.spec, self._tables[0]
        ids = token_tables.enter_rows(fields, slot_table, self._tables[1], self._ids[:num_rows])
        lengths, table_rows = fields[LENGTHS, :num_decodes], fields[TABLE_ROWS, :num_decodes]
        for work in self._plans.values():
            attention_decode.plan(lengths, work)
        rows = self._rope_rows(fields)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            pool, weights, window = self._pool.layer(layer), decoder.weights(layer), spec.sliding_windows[layer]
            rope_store.rope_and_store(
                qkv, *rows, fields[SLOTS], pool, spec.num_heads, weights.q_norm, weights.k_norm, spec.rms_norm_eps
            )
            q = qkv[:, : spec.num_heads]
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if num_decodes:
                attention_decode.attention_decode(
                    q[:num_decodes], pool, slot_table, table_rows, lengths, self._plans[window], out[:num_decodes]
                )
            if tiles is not None:
                attention_prefill.attention_prefill(q, pool, slot_table, tiles, out, window)
            return out

        x = decoder.embed(ids)
        delta: torch.Tensor | None = None
        for layer in range(spec.num_layers):
            x, delta = decoder.layer_parts(layer, x, delta, project, attend, FUSED_OPS)
        if delta is None:
            raise RuntimeError("a model without layers")
        return x, delta

    def _head(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] in the model's dtype."""
        normed, _ = _add_norm(x, delta, self._decoder.norm, self._decoder.spec.rms_norm_eps)
        return F.linear(normed, self._decoder.head_weight)

    # ------------------------------------------------------------ inputs

    def _rope_rows(self, fields: torch.Tensor) -> Rows:
        positions = fields[POSITIONS]
        if self._rope_table is None:
            return self._decoder.rope.rows(positions, fields[ROPE_LENGTHS])
        return Rows(*(table.index_select(0, positions) for table in self._rope_table))

    def _project(self, segments: list[AdapterSegment], tiles: torch.Tensor, tile_rows: int) -> Project:
        return DeviceProjection(self._stacks, tiles, tile_rows, self._workspace) if segments else plain_project

    def _bucket_fields(self, bucket: int) -> torch.Tensor:
        return self._inputs.device[: NUM_FIELDS * bucket].view(NUM_FIELDS, bucket)

    def _max_tiles(self, bucket: int) -> int:
        return max_tiles(bucket, self._stacks.num_slots, DECODE_TILE_ROWS)

    def _padding(self, num_rows: int) -> np.ndarray:
        """Fields of rows that store nothing, see nothing and belong to nobody."""
        fields = np.zeros((NUM_FIELDS, num_rows), dtype=np.int32)
        fields[SLOTS], fields[TABLE_ROWS] = -1, self._sink_row
        fields[IDS], fields[ROPE_LENGTHS] = 0, 1
        return fields

    def _follow_moves(self) -> None:
        """Copy the table of open rows again after live slots have moved."""
        if self._epoch == self._kv.epoch:
            return
        self._epoch = self._kv.epoch
        for row in self._kv.table.open_rows():
            slots = torch.from_numpy(self._kv.slots(row).copy())
            if self._device.type == "cuda":
                slots = slots.pin_memory()
            self._tables[0, row, : len(slots)].copy_(slots, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
