"""Runs one forward of the shared decoder over serving rows and returns logits where they are needed."""

from __future__ import annotations

import time

import torch

from fineinfer.adapters.batch import serving_project
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.kernels import reference
from fineinfer.memory.kv_cache import KVCache
from fineinfer.model.decoder import Decoder
from fineinfer.runner.forward_batch import DecodeEach, ForwardBatch, build_forward_batch
from fineinfer.runner.prompt_logprobs import collect_prompt_logprobs
from fineinfer.runner.results import ChunkResult, FinishedStep
from fineinfer.runner.sampler import Choice, Sampler
from fineinfer.scheduler.plan import Chunk


class ModelRunner:
    """Serving forward over the base model, its adapters and the KV pool.

    Args:
        decoder: The base model, shared with training.
        kv_cache: Pool and tables.
        adapters: Adapter slots.
        device: Where it all lives.

    Attributes:
        max_in_flight: None: every step has run when ``launch`` returns.
        progress: Layers finished since start; a stuck engine shows as a standing count.
    """

    max_in_flight = 0

    def __init__(self, decoder: Decoder, kv_cache: KVCache, adapters: AdapterRegistry, device: torch.device) -> None:
        self._decoder = decoder
        if kv_cache.pool is None:
            raise ValueError("the runner needs a KV cache with a pool")
        self._kv = kv_cache
        self._pool = kv_cache.pool
        self._adapters = adapters
        self._device = device
        self._windows = frozenset(decoder.spec.sliding_windows)
        self._sampler = Sampler(decoder.spec.vocab_size, decoder.spec.eos_token_ids, device)
        self.progress = 0

    def launch(self, chunks: tuple[Chunk, ...]) -> FinishedStep:
        """Run all chunks in one forward."""
        started_s = time.perf_counter()
        results = self.run(chunks)
        num_rows = sum(chunk.length for chunk in chunks)
        return FinishedStep(results, time.perf_counter() - started_s, num_rows, num_rows == len(chunks))

    def run(self, chunks: tuple[Chunk, ...]) -> list[ChunkResult]:
        """Run all chunks in one forward.

        Returns:
            One result per chunk, in the batch's order.
        """
        with torch.inference_mode():
            batch = build_forward_batch(chunks, self._kv, self._windows, self._device)
            hidden = self.forward(batch)
            collect_prompt_logprobs(self._decoder, batch.chunks, hidden)
            sampling = [chunk for chunk in batch.chunks if chunk.samples]
            sampled: dict[str, Choice] = {}
            if sampling:
                logits = self._decoder.head(hidden.index_select(0, batch.sample_rows))
                ids = [chunk.sequence.request_id for chunk in sampling]
                sampled = dict(zip(ids, self._sampler.sample(logits, sampling), strict=True))
        results = []
        for chunk in batch.chunks:
            choice = sampled.get(chunk.sequence.request_id)
            if choice is None:
                results.append(ChunkResult(chunk, None))
            else:
                results.append(ChunkResult(chunk, choice.token_id, choice.logprob, choice.failed))
        return results

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the last layer; K and V of all rows are in the pool afterwards."""
        decoder = self._decoder
        rows = decoder.rope.rows(batch.positions, batch.rope_lengths)
        project = serving_project(self._adapters, batch.adapter_segments)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pool = self._pool.layer(layer)
            window = decoder.spec.sliding_windows[layer]
            reference.store_kv(pool, batch.slots, k, v)
            out = torch.empty_like(q)
            for span in batch.prefills:
                own = q[span.first : span.first + span.length]
                attended = reference.attention_prefill(own, pool, span.kv, span.start, window, span.masks[window])
                out[span.first : span.first + span.length] = attended
            for group in batch.decodes:
                own = q.index_select(0, group.rows)
                if isinstance(group, DecodeEach):
                    attended = reference.attention_decode_each(own, pool, group.kv, window)
                else:
                    attended = reference.attention_decode(own, pool, group.slot_table, group.lengths, window)
                out.index_copy_(0, group.rows, attended)
            self.progress += 1
            return out

        hidden = decoder.stream(batch.ids)
        for layer in range(decoder.spec.num_layers):
            hidden = decoder.layer(layer, hidden, rows, project, attend)
        return hidden
