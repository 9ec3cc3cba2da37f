"""Counts of the engine and the snapshot that the peers get."""

from __future__ import annotations

from dataclasses import dataclass

from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.engine.inbox import now_s
from fineinfer.engine.memory_ladder import MemoryLadder
from fineinfer.engine.training_host import TrainingHost
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.kv_cache import KVCache
from fineinfer.messages import EngineStats
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.scheduler import Scheduler


@dataclass
class Counters:
    """Totals since start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    training_units: int = 0


@dataclass(frozen=True)
class StatisticsSource:
    """Everything a snapshot reads."""

    boot_id: str
    counters: Counters
    scheduler: Scheduler
    kv_cache: KVCache
    governor: MemoryGovernor
    ladder: MemoryLadder
    latency: LatencyModel

    def snapshot(self, training: TrainingHost, adapters: AdapterRegistry, num_unslotted: int) -> EngineStats:
        """The engine's state now.

        Args:
            training: The running job.
            adapters: What is served.
            num_unslotted: Requests that wait for an adapter slot.
        """
        num_cached = self.kv_cache.num_cached
        progress = None if training.job is None else training.reports.last_progress
        trainer = training.trainer
        return EngineStats(
            boot_id=self.boot_id,
            time_s=now_s(),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + num_unslotted,
            kv_slots_used=self.kv_cache.num_used - num_cached,
            kv_slots_cached=num_cached,
            prefix_queries_total=self.scheduler.rows.num_queries,
            prefix_hits_total=self.scheduler.rows.num_hits,
            kv_slots_now=self.kv_cache.num_slots,
            kv_slots_max=self.kv_cache.max_slots,
            prompt_tokens_total=self.counters.prompt_tokens,
            generation_tokens_total=self.counters.generation_tokens,
            num_preemptions_total=self.scheduler.num_preemptions,
            memory_bytes=self.governor.snapshot() | {"adapter_copies": adapters.reader.num_bytes},
            train_job_id=None if training.job is None else training.job.job_id,
            train_step=0 if trainer is None else trainer.step,
            train_total_steps=0 if trainer is None else trainer.total_steps,
            train_loss=None if progress is None else progress.loss,
            train_learning_rate=None if progress is None else progress.learning_rate,
            train_grad_norm=None if progress is None else progress.grad_norm,
            train_tokens_total=training.reports.total_tokens,
            train_tokens_per_s=0.0 if progress is None else progress.tokens_per_s,
            train_eta_s=None if progress is None else progress.eta_s,
            train_yielded_s_total=training.yielded_s,
            train_device_s_total=self.latency.trained_s,
            train_job_device_s=training.job_device_s,
            kept_layers_dropped_total=self.ladder.num_dropped_layers,
            ladder_steps_total=dict(self.ladder.steps_taken),
            kv_resizes_total=self.ladder.num_resizes,
            adapters=adapters.names(),
            adapter_versions=adapters.current(),
            adapter_tiers=adapters.tiers(),
            adapter_slots=adapters.stacks.num_slots,
            adapter_slots_used=adapters.num_used,
            adapter_loads_total=adapters.num_loads,
            adapter_evictions_total=adapters.num_evictions,
            slice_times_ms=self.latency.averages_ms(),
        )
