"""The engine's memory at start: what is measured, what is planned, and what is left for the KV pool."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from fineinfer.engine.settings import EngineSettings
from fineinfer.memory.kv_pool import KVPool

GIB = 1 << 30
CPU_BUDGET_SHARE = 0.5  # of the memory available at start: a laptop's owner keeps the other half
FIXED_TRAINING_SHARE = 0.5  # of what weights, workspace and adapters leave, where the pool cannot shrink for training
CPU_MAX_NUM_SEQS = 64
# of CUDA: as many requests as the pool holds at a mean length, within what one decode step serves well
MEAN_REQUEST_TOKENS, MIN_NUM_SEQS, MAX_NUM_SEQS = 512, 16, 512
WORKSPACE_SHARE = 0.25  # of what weights and adapters leave; a larger one halves the rows of a forward
# rows of one forward: a CPU prefill chunk of 512 rows of a 135M model takes about half a second, the bound on how
# long one prompt may hold up the others' tokens
DEFAULT_MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}
# rows of a forward that also decodes: 13 ms of matrix products for an 8B model on an H100
DEFAULT_MAX_MIXED_TOKENS: dict[str, int | None] = {"cpu": None, "cuda": 512}
MIN_SLOTS = 64


class MemoryPlanError(Exception):
    """The budget cannot hold the model and a usable pool; the message shows the arithmetic."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by owner, and the pool's maximum in slots.

    Attributes:
        budget: All memory the engine may use.
        weights: Base weights.
        workspace: Peak of the largest serving forward above the weights, measured by a dry run.
        adapters: Adapter slots, and on a CPU what is kept besides them.
        kv_slots_max: Most slots the pool can ever have.
        kv_now: The pool at start.
        kv_min: The smallest that the pool can become.
        bytes_per_slot: K and V of one token over all layers.
        elastic: Whether the pool can shrink and grow.
    """

    budget: int
    weights: int
    workspace: int
    adapters: int
    kv_slots_max: int
    kv_now: int
    kv_min: int
    bytes_per_slot: int
    elastic: bool

    @property
    def budget_min(self) -> int:
        """Smallest budget that the engine can follow: everything fixed, and the smallest pool."""
        return self.budget - self.pool_room + self.kv_min

    @property
    def pool_room(self) -> int:
        """Bytes that weights, workspace and adapters leave."""
        return self.budget - self.weights - self.workspace - self.adapters

    def with_pool(self, pool: KVPool) -> MemoryPlan:
        """The plan with the sizes of the pool that was made for it, whose memory may come in large steps.

        Raises:
            MemoryPlanError: The pool got too little memory.
        """
        if pool.num_slots < MIN_SLOTS:
            raise MemoryPlanError(
                f"the KV pool got {pool.mapped_bytes / GIB:.2f} GiB of the {self.pool_room / GIB:.2f} GiB in the plan, "
                f"its smallest size is {pool.bytes_for(MIN_SLOTS) / GIB:.2f} GiB: raise --memory-budget, or free the "
                "device's memory, which other programs may hold"
            )
        kv_min = pool.bytes_for(MIN_SLOTS) if pool.elastic else pool.held_bytes
        return dataclasses.replace(self, kv_slots_max=pool.max_slots, kv_now=pool.held_bytes, kv_min=kv_min)

    def as_dict(self) -> dict[str, int]:
        """For EngineInfo: bytes by owner."""
        return {
            "budget": self.budget,
            "budget_min": self.budget_min,
            "weights": self.weights,
            "workspace": self.workspace,
            "adapters": self.adapters,
            "kv_max": self.kv_slots_max * self.bytes_per_slot,
            "kv_now": self.kv_now,
        }


def memory_budget(settings: EngineSettings, device: torch.device) -> int:
    """Bytes the engine may use: as told, else a share of what is there."""
    if settings.memory_budget is not None:
        return settings.memory_budget
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        taken_by_others = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        return int(total * settings.gpu_memory_utilization) - max(0, taken_by_others)
    return int(psutil.virtual_memory().available * CPU_BUDGET_SHARE)


def pick_max_num_seqs(
    settings: EngineSettings, device: torch.device, left: int, bytes_per_slot: int, elastic: bool
) -> int:
    """Most requests at once: as told, else what memory, device and the rows of a forward can serve.

    Args:
        settings: For explicit numbers or KV size.
        device: Where requests run.
        left: Bytes that weights and adapters leave.
        bytes_per_slot: K and V of one token over all layers.
        elastic: Whether all of that can be the pool's at times.

    Raises:
        ValueError: A forward could not hold one row of every request, so prompts might never get one.
    """
    most_rows = settings.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS[device.type]
    if settings.max_num_seqs is not None:
        if settings.max_num_seqs > most_rows:
            raise ValueError(
                f"--max-num-seqs {settings.max_num_seqs} is above the {most_rows} rows of --max-num-batched-tokens: "
                "every request must find a row in a step"
            )
        return settings.max_num_seqs
    if device.type == "cpu":
        return min(CPU_MAX_NUM_SEQS, most_rows)
    pool = settings.kv_cache_memory_bytes or (left if elastic else int(left * (1 - FIXED_TRAINING_SHARE)))
    fitting = pool // bytes_per_slot // MEAN_REQUEST_TOKENS
    return min(MAX_NUM_SEQS, most_rows, max(MIN_NUM_SEQS, fitting // MIN_NUM_SEQS * MIN_NUM_SEQS))


def num_adapter_copies(settings: EngineSettings, on_gpu: bool) -> int:
    """Adapters kept in host memory besides the slots on a CPU, which are there already; see ``--max-cpu-loras``."""
    if on_gpu:
        return settings.max_cpu_loras or 2 * settings.max_loras
    return max(0, (settings.max_cpu_loras or 0) - settings.max_loras)


def adapter_memory(settings: EngineSettings, slots_bytes: int, on_gpu: bool) -> int:
    """Bytes of the budget for adapters: all slots and, on a CPU, copies, each at most as large as a slot."""
    copies = 0 if on_gpu else num_adapter_copies(settings, on_gpu)
    return slots_bytes + copies * slots_bytes // settings.max_loras


def measure_workspace(forward: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that a forward takes above what is held before it.

    Args:
        forward: Runs the largest forward that serving can ask for.
        device: Where it runs.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        forward()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    forward()  # once unmeasured: thread pools and library buffers are not workspace
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    except OSError:
        return 256 << 20  # no way to measure here: more than the 512-row forward of a 1B model takes
    before = _status_bytes("VmRSS")
    forward()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def make_plan(
    settings: EngineSettings, budget: int, fixed: dict[str, int], bytes_per_slot: int, max_slots: int, elastic: bool
) -> MemoryPlan:
    """Divide the budget.

    Args:
        settings: For an explicit KV size.
        budget: Bytes in all.
        fixed: Bytes of ``weights``, ``workspace`` and ``adapters``.
        bytes_per_slot: K and V of one token.
        max_slots: More than this the requests could never use.
        elastic: Whether the pool can give memory to training later.

    Raises:
        MemoryPlanError: Nothing usable is left for the pool.
    """
    left = budget - sum(fixed.values())
    kv_bytes = left if elastic else int(left * (1 - FIXED_TRAINING_SHARE))
    if settings.kv_cache_memory_bytes is not None:
        kv_bytes = settings.kv_cache_memory_bytes
    slots = min(max_slots, max(0, kv_bytes) // bytes_per_slot)
    if slots < MIN_SLOTS or slots * bytes_per_slot > left:
        arithmetic = " - ".join(f"{name} {size / GIB:.2f}" for name, size in fixed.items())
        raise MemoryPlanError(
            f"memory budget {budget / GIB:.2f} GiB - {arithmetic} = {left / GIB:.2f} GiB, but the KV pool needs "
            f"{max(slots, MIN_SLOTS) * bytes_per_slot / GIB:.2f} GiB; raise --memory-budget or lower "
            "--max-num-batched-tokens, --max-loras or --max-lora-rank"
        )
    return MemoryPlan(
        budget=budget,
        kv_slots_max=slots,
        kv_now=slots * bytes_per_slot,
        kv_min=(MIN_SLOTS if elastic else slots) * bytes_per_slot,
        bytes_per_slot=bytes_per_slot,
        elastic=elastic,
        **fixed,
    )
