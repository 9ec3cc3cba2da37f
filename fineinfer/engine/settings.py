"""What the supervisor hands the engine process at start: one resolved, immutable value (no torch)."""

from __future__ import annotations

import msgspec

from fineinfer.config import Config


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved settings of the engine; sizes in bytes, None where the engine measures for itself.

    Attributes:
        model: Local folder or hub id, None for the embedded model.
        base_model: Name the base model is served under.
        engine_address: ``ipc://`` address to bind.
        policy: Name of the co-scheduling policy.
        deterministic: Training gives the same bits in every run.
    """

    model: str | None
    base_model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    memory_budget: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_loras: int = 8
    max_lora_rank: int = 64
    max_cpu_loras: int | None = None
    policy: str = "slo"
    deferral_bound_s: float = 1.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    train_share_min: float = 0.05
    train_share_max: float = 1.0
    num_threads: int | None = None
    enforce_eager: bool = False
    attention_backend: str = "auto"
    deterministic: bool = False
    no_enable_prefix_caching: bool = False
    no_training_overlap: bool = False
    engine_address: str


def engine_settings(config: Config, base_model: str, engine_address: str) -> EngineSettings:
    """What the engine needs of a resolved configuration; its settings have the names they have there."""
    resolved = vars(config.model) | vars(config.memory) | vars(config.scheduler)
    own = {name: resolved[name] for name in EngineSettings.__struct_fields__ if name in resolved}
    return EngineSettings(**own, base_model=base_model, engine_address=engine_address)
