"""Serving on a GPU: fused kernels, captured decode steps, sampling on the device, one step in flight behind another.

Tokens never wait for the host: a decode row reads its input in the device's token table, where the step before wrote
it. The host lays out step i + 1 while the device runs step i, and waits only for the results of steps it collects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.adapters.batch import DeviceProjection, RowAdapters, lora_tiles, make_workspace, max_tiles
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.kernels import attention_decode, attention_prefill, rope_store, token_tables
from fineinfer.memory.kv_cache import KVCache
from fineinfer.model.decoder import Decoder, LayerOps
from fineinfer.model.rope import Rows
from fineinfer.runner.base_projection import BaseProjection
from fineinfer.runner.device_batch import (
    ADAPTERS,
    LENGTHS,
    NUM_FIELDS,
    POSITIONS,
    ROPE_LENGTHS,
    SLOTS,
    TABLE_ROWS,
    DeviceBatch,
    InputBuffer,
    lay_out,
    pinned,
)
from fineinfer.runner.device_sampler import DeviceSampler, SampledRows
from fineinfer.runner.prompt_logprobs import collect_prompt_logprobs, wants_prompt_logprobs
from fineinfer.runner.results import ChunkResult
from fineinfer.runner.step_graphs import SERVING_PRIORITY, GraphKey, Results, StepGraphs
from fineinfer.scheduler.plan import Chunk

SMALL_LORA_TILE, LARGE_LORA_TILE = 16, 64  # rows; small in captured steps, whose tile count is fixed
_Projection = BaseProjection | DeviceProjection
MAX_CAPTURED_SPANS = 64  # prefill spans of one captured step; more run kernel by kernel


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

    @property
    def is_done(self) -> bool:
        """See ``Launched``."""
        return self.events is None or self.events[1].query()

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
        self._device, self._base = device, BaseProjection(decoder)
        self._sink_row = table.max_rows  # padding rows belong to it
        max_rows = max(max_num_batched_tokens, table.max_rows)
        self._tables = torch.zeros(2, table.max_rows + 1, table.max_len, dtype=torch.int32, device=device)
        self._max_mixed_rows = max_num_batched_tokens
        # fields, sampling rows, attention tiles of at least one row each, LoRA tiles
        num_lora_tiles = max_tiles(max_rows, 2 * adapters.stacks.num_slots, SMALL_LORA_TILE)
        numbers = (NUM_FIELDS + 1 + 4) * max_rows + 4 * MAX_CAPTURED_SPANS + 3 * num_lora_tiles
        self._inputs = InputBuffer(numbers, device)
        self._ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._workspace = make_workspace(max_rows, adapters.stacks, device)
        self._plans = {
            window: attention_decode.DecodePlan.allocate(
                table.max_rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, window, device
            )
            for window in set(spec.sliding_windows)
        }
        rope = decoder.rope
        self._rope_table = None if rope.needs_lengths else rope.rows(torch.arange(table.max_len, device=device))
        self._sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, table.max_rows, device)
        self._side = torch.cuda.Stream(device, priority=SERVING_PRIORITY) if device.type == "cuda" else None
        self._graphs: StepGraphs | None = None
        self._logits: torch.Tensor | None = None  # of whichever captured step ran last: 262 MB of 512 rows of 128k
        self._epoch = kv_cache.epoch
        self.progress = 0

    def capture_graphs(self) -> StepGraphs:
        """Capture decode steps and small mixed steps; later steps of their sizes replay them."""
        self._graphs = self._capture(None)
        with torch.inference_mode():
            self._graphs.drop_slower()
        return self._graphs

    def capture_largest(self) -> int:
        """Capture the largest step and forget it; bytes of device memory that it held."""
        return self._capture(1).pool_bytes

    def _capture(self, count: int | None) -> StepGraphs:
        with torch.inference_mode():
            size = (self._kv.table.max_rows, self._decoder.spec.vocab_size)
            self._logits = torch.empty(size, dtype=torch.float32, device=self._device)
            graphs = StepGraphs(self._enter_padding, self._captured_step, self._kv.table.max_rows, self._max_mixed_rows)
            graphs.capture(graphs.keys()[:count])
        return graphs

    def warm_up(self) -> None:
        """Compile every kernel that an uncaptured step can ask for, so that no request waits for a compiler."""
        tiles = torch.zeros(1, 4, dtype=torch.int32, device=self._device)  # padding
        lora_tile = torch.zeros(1, 3, dtype=torch.int32, device=self._device)
        self._pool.move([0], [1])  # no request has slots yet
        windows = self._decoder.spec.sliding_windows
        layers = sorted({0, *(windows.index(window, 1) for window in windows[1:])})  # no other has kernels of its own
        with torch.inference_mode():
            for adapted, tile_rows in ((False, SMALL_LORA_TILE), (True, SMALL_LORA_TILE), (True, LARGE_LORA_TILE)):
                num_rows = self._ids.shape[0]
                while num_rows:  # how long sums are split differs with the number of rows
                    padding, _ = self._padding(GraphKey(num_rows, False, False))
                    fields = self._inputs.upload(padding).view(NUM_FIELDS, -1)
                    project = self._project(adapted, fields, lora_tile, tile_rows)
                    num_samples = min(num_rows, self._kv.table.max_rows)
                    x, delta = self._layers(fields, num_samples, tiles, project, layers)
                    logits = self._base.head(x[:num_samples], delta[:num_samples])
                    num_rows //= 2
            token_tables.enter_tokens(self._ids[:1], self._ids[:1], fields, self._tables[1])
            self._sampler.warm_up(logits, self._tables[1])

    def launch(self, chunks: tuple[Chunk, ...]) -> DeviceStep:
        """Start one forward over all chunks and the sampling of its tokens."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._follow_moves()
            for chunk in chunks:
                if 0 < chunk.start == chunk.sequence.num_cached:
                    self._enter_prefix(chunk)
            batch = lay_out(chunks, self._kv)
            begin = self._event()
            key = self._captured_key(batch)
            fields, sample_rows, results = self._run(batch) if key is None else self._replay(batch, key)
            sampling, sampled = [chunk for chunk in batch.chunks if chunk.samples], None
            if sampling:
                drawn = self._sampler.draw(results.logits, sampling, self._tables[1])
                if drawn is not None:
                    token_tables.enter_tokens(drawn[0], sample_rows, fields, self._tables[1])
                sampled = self._sampler.send(results.logits, results.greedy if drawn is None else drawn, sampling)
            end = self._event()
        self.progress += self._decoder.spec.num_layers
        events = None if begin is None or end is None else (begin, end)
        return DeviceStep(batch.chunks, sampled, batch.num_rows, started_s, events)

    # ------------------------------------------------------------ one forward

    def _run(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor, Results]:
        """Any batch, kernel by kernel; the fields, the rows that sample, and what they gave."""
        tiles = attention_prefill.tiles(batch.spans, attention_prefill.block_rows(self._decoder.dtype))
        tile_rows = LARGE_LORA_TILE if batch.spans else SMALL_LORA_TILE
        num_lora = max_tiles(batch.num_rows, len(batch.segments), tile_rows) if batch.segments else 0
        adapted = lora_tiles(batch.segments, batch.num_rows if batch.segments else 0, tile_rows, num_lora)
        sent = self._inputs.upload(batch.fields, np.array(batch.sample_rows, dtype=np.int32), tiles, adapted)
        sizes = (batch.fields.size, len(batch.sample_rows), tiles.size, adapted.size)
        flat_fields, sample_rows, flat_tiles, flat_adapted = sent.split(sizes)
        fields = flat_fields.view(NUM_FIELDS, -1)
        project = self._project(bool(batch.segments), fields, flat_adapted.view(-1, 3), tile_rows)
        x, delta = self._layers(fields, batch.num_decodes, flat_tiles.view(-1, 4), project)
        if any(wants_prompt_logprobs(chunk) for chunk in batch.chunks):
            collect_prompt_logprobs(self._decoder, batch.chunks, x + delta)
        x, delta = x.index_select(0, sample_rows), delta.index_select(0, sample_rows)
        return fields, sample_rows, self._choose(x, delta, sample_rows, fields)

    def _captured_key(self, batch: DeviceBatch) -> GraphKey | None:
        """The captured step that runs this batch, if any."""
        if self._graphs is None or len(batch.spans) > MAX_CAPTURED_SPANS:
            return None
        if any(wants_prompt_logprobs(chunk) for chunk in batch.chunks):
            return None
        if not batch.spans and len(batch.sample_rows) < batch.num_rows:  # the end of a chunk of a prompt
            return None
        return self._graphs.find(batch.num_rows, bool(batch.spans), bool(batch.segments))

    def _replay(self, batch: DeviceBatch, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor, Results]:
        """A batch padded to a captured step; as ``_run``."""
        if self._graphs is None:
            raise RuntimeError("nothing was captured")
        padded, sample_rows = self._padding(key)
        padded[:, : batch.num_rows] = batch.fields
        num_samples = len(batch.sample_rows)
        sample_rows[:num_samples] = batch.sample_rows
        parts = [padded, sample_rows]
        if key.mixed:
            tiles = np.zeros((self._num_tiles(key), 4), dtype=np.int32)
            used = attention_prefill.tiles(batch.spans, attention_prefill.block_rows(self._decoder.dtype))
            tiles[: len(used)] = used
            parts.append(tiles)
        if key.adapted:
            parts.append(lora_tiles(batch.segments, key.num_rows, SMALL_LORA_TILE, self._num_lora_tiles(key)))
        self._inputs.upload(*parts)
        logits, greedy = self._graphs.replay(key)
        fields, sent_rows, _, _ = self._captured_inputs(key)
        return fields, sent_rows[:num_samples], Results(logits[:num_samples], greedy[:, :num_samples])

    def _enter_padding(self, key: GraphKey) -> None:
        rest = sum(tensor.numel() for tensor in self._captured_inputs(key)[2:])
        self._inputs.upload(*self._padding(key), np.zeros(rest, dtype=np.int32))

    def _captured_step(self, key: GraphKey) -> Results:
        """The step that is captured; the greedy tokens go into the token table, others may overwrite them there."""
        fields, sample_rows, tiles, adapted = self._captured_inputs(key)
        project = self._project(key.adapted, fields, adapted, SMALL_LORA_TILE, self._side)
        x, delta = self._layers(fields, self._num_sample_rows(key), tiles if key.mixed else None, project)
        if key.mixed:
            rows = sample_rows.clamp_min(0)
            x, delta = x.index_select(0, rows), delta.index_select(0, rows)
        out = None if self._logits is None else self._logits[: len(x)]
        return self._choose(x, delta, sample_rows, fields, out)

    def _choose(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        sample_rows: torch.Tensor,
        fields: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> Results:
        """Logits of the sampling rows, in ``out`` if given, and their greedy tokens, which are entered."""
        logits = self._base.head(x, delta, out)
        greedy = self._sampler.greedy(logits)
        token_tables.enter_tokens(greedy[0], sample_rows, fields, self._tables[1])
        return Results(logits, greedy)

    def _captured_inputs(self, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fields, sampling rows, attention tiles and LoRA tiles of a captured step, at their fixed places."""
        sizes = [NUM_FIELDS * key.num_rows, self._num_sample_rows(key)]
        sizes += [4 * self._num_tiles(key), 3 * self._num_lora_tiles(key)]
        fields, samples, tiles, adapted = self._inputs.device[: sum(sizes)].split(sizes)
        return fields.view(NUM_FIELDS, -1), samples, tiles.view(-1, 4), adapted.view(-1, 3)

    def _num_sample_rows(self, key: GraphKey) -> int:
        return min(key.num_rows, self._kv.table.max_rows)

    def _num_tiles(self, key: GraphKey) -> int:
        if not key.mixed:
            return 0
        return key.num_rows // attention_prefill.block_rows(self._decoder.dtype) + MAX_CAPTURED_SPANS

    def _num_lora_tiles(self, key: GraphKey) -> int:
        # an adapter may have one segment among the decode rows and one among the spans
        segments = self._stacks.num_slots * (2 if key.mixed else 1)
        return max_tiles(key.num_rows, segments, SMALL_LORA_TILE) if key.adapted else 0

    def _layers(
        self,
        fields: torch.Tensor,
        num_decodes: int,
        tiles: torch.Tensor | None,
        project: _Projection,
        layers: Iterable[int] | None = None,
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
            norms = weights.q_norm, weights.k_norm
            part, eps = project.take_part(), spec.rms_norm_eps
            rope_store.rope_and_store(qkv, *rows, fields[SLOTS], pool, spec.num_heads, *norms, eps, part)
            q = qkv[:, : spec.num_heads]
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if num_decodes:
                attention_decode.attention_decode(
                    q[:num_decodes], pool, slot_table, table_rows, lengths, self._plans[window], out[:num_decodes]
                )
            if tiles is not None:
                attention_prefill.attention_prefill(q, pool, slot_table, tiles, out, window)
            return out

        x = decoder.stream(ids)
        delta: torch.Tensor | None = None
        ops = LayerOps(project.add_norm, project.gated)
        for layer in range(spec.num_layers) if layers is None else layers:
            x, delta = decoder.layer_parts(layer, x, delta, project, attend, ops)
        if delta is None:
            raise RuntimeError("a model without layers")
        return x, project.flush(delta)

    # ------------------------------------------------------------ inputs

    def _rope_rows(self, fields: torch.Tensor) -> Rows:
        positions = fields[POSITIONS]
        if self._rope_table is None:
            return self._decoder.rope.rows(positions, fields[ROPE_LENGTHS])
        return Rows(*(table.index_select(0, positions) for table in self._rope_table))

    def _project(
        self,
        adapted: bool,
        fields: torch.Tensor,
        tiles: torch.Tensor,
        tile_rows: int,
        side: torch.cuda.Stream | None = None,
    ) -> _Projection:
        if not adapted:
            return self._base
        rows = RowAdapters(tiles, fields[ADAPTERS], tile_rows)
        return DeviceProjection(self._stacks, rows, self._workspace, self._base, side)

    def _padding(self, key: GraphKey) -> tuple[np.ndarray, np.ndarray]:
        """Fields of rows that store nothing, see nothing and belong to nobody, and the rows that sample."""
        fields = np.zeros((NUM_FIELDS, key.num_rows), dtype=np.int32)
        fields[SLOTS] = fields[ADAPTERS] = -1
        fields[TABLE_ROWS], fields[ROPE_LENGTHS] = self._sink_row, 1
        count = self._num_sample_rows(key)
        return fields, np.full(count, -1, dtype=np.int32) if key.mixed else np.arange(count, dtype=np.int32)

    def _enter_prefix(self, chunk: Chunk) -> None:
        """Copy what the prefix cache gave a row into the tables, at its first chunk."""
        row = chunk.sequence.row
        if row is None:
            return
        slots = self._kv.slots(row)[: chunk.start]
        tokens = np.array(chunk.sequence.tokens(0, chunk.start), dtype=np.int32)
        self._tables[:, row, : chunk.start].copy_(pinned(np.stack((slots, tokens)), self._device), non_blocking=True)

    def _follow_moves(self) -> None:
        """Copy the slot table again after live slots have moved: behind the steps in flight and the move itself."""
        if self._epoch == self._kv.epoch:
            return
        self._epoch = self._kv.epoch
        table = self._kv.table
        rows = table.open_rows()
        if rows:  # closed rows between them go along
            part = np.s_[: rows[-1] + 1, : max(map(table.length, rows))]
            self._tables[0][part].copy_(pinned(table.slots[part].copy(), self._device), non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
