"""The groups of the configuration that say what memory is for, and which adapters are served (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fineinfer.parse import file_path, lora_modules, number, size, switch, whole
from fineinfer.parse import setting as _setting


@dataclass(frozen=True)
class MemoryConfig:
    """How much memory the engine may use and what for; sizes in bytes."""

    memory_budget: int | None = _setting(
        None, size, "SIZE", "All memory the engine may use, such as 4GiB; default: measured at start."
    )
    gpu_memory_utilization: float = _setting(
        0.9, number(0, 1, low_open=True), "FRACTION", "Part of the GPU's memory taken when no budget is given."
    )
    kv_cache_memory_bytes: int | None = _setting(
        None, size, "SIZE", "Size of the KV pool; default: what the budget leaves."
    )
    no_enable_prefix_caching: bool = _setting(
        False, switch, "", "Do not keep the KV of finished requests for later ones."
    )
    max_loras: int = _setting(8, whole(1, 1024), "N", "Adapters in memory at once.")
    max_lora_rank: int = _setting(64, whole(1, 512), "N", "Largest adapter rank that can be served.")
    max_cpu_loras: int | None = _setting(
        None,
        whole(1),
        "N",
        "Adapters kept in host memory; default: on CUDA twice --max-loras, on the CPU none besides those.",
    )


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters that come from elsewhere than a job of this server."""

    lora_modules: tuple[tuple[str, Path], ...] = _setting(
        (), lora_modules, "NAME=PATH", "PEFT folder to serve under a name from the start; may be repeated."
    )
    adapter_root: Path | None = _setting(
        None, file_path, "DIR", "Folder below which POST /v1/load_lora_adapter may load; without it the route is off."
    )
