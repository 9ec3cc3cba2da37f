"""Which runner serves on this device, and what its largest step takes of memory."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.engine.memory_plan import WORKSPACE_SHARE, measure_workspace
from fineinfer.engine.settings import EngineSettings
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec
from fineinfer.model.decoder import Decoder
from fineinfer.request import SamplingParams
from fineinfer.runner.model_runner import ModelRunner
from fineinfer.runner.results import Runner
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.scheduler import SchedulerLimits
from fineinfer.scheduler.sequence import Sequence
from fineinfer.training.ops import pick_ops
from fineinfer.training.warm_up import warm_up

if TYPE_CHECKING:
    from fineinfer.runner.device_runner import DeviceRunner

MIN_BATCHED_TOKENS = 512
SAMPLING_BYTES_PER_LOGIT = 12  # logits, an fp32 copy for penalties, log-probabilities


@dataclass(frozen=True)
class RunnerParts:
    """What every runner of one engine is made of, besides its KV cache.

    Attributes:
        decoder: The base model.
        adapters: Adapter slots.
        limits: Bounds of one forward.
        device: Where they live.
        backend: ``reference`` or ``triton``.
        enforce_eager: No CUDA graphs.
    """

    decoder: Decoder
    adapters: AdapterRegistry
    limits: SchedulerLimits
    device: torch.device
    backend: str
    enforce_eager: bool

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured."""
        return self.backend == "triton" and self.device.type == "cuda" and not self.enforce_eager


def pick_backend(settings: EngineSettings, device: torch.device) -> str:
    """``auto`` is the Triton kernels on CUDA and the reference operations elsewhere.

    Raises:
        ValueError: Triton was asked for where it cannot run.
    """
    if settings.attention_backend != "auto":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if settings.attention_backend == "triton" and device.type == "cpu" and not interpreted:
            raise ValueError("--attention-backend triton needs a CUDA device (or TRITON_INTERPRET=1, for debugging)")
        return settings.attention_backend
    return "triton" if device.type == "cuda" else "reference"


def make_runner(parts: RunnerParts, kv_cache: KVCache) -> Runner:
    """The runner that serves, without its graphs.

    Raises:
        ValueError: A shape that the chosen kernels cannot serve.
    """
    if parts.backend == "reference":
        return ModelRunner(parts.decoder, kv_cache, parts.adapters, parts.device)
    return _device_runner(parts, kv_cache)


def _device_runner(parts: RunnerParts, kv_cache: KVCache) -> DeviceRunner:
    from fineinfer.runner.device_runner import DeviceRunner  # imports Triton

    return DeviceRunner(parts.decoder, kv_cache, parts.adapters, parts.limits.max_num_batched_tokens, parts.device)


def prepare(parts: RunnerParts, runner: Runner) -> str | None:
    """Compile and capture what serving will run; a line that says what it took, None where there is nothing to do."""
    if parts.backend != "triton" or parts.device.type != "cuda":
        return None
    started_s = time.perf_counter()
    _warm_up(parts, runner)  # compiled before the dry run
    torch.cuda.synchronize(parts.device)
    said = f"kernels ready in {time.perf_counter() - started_s:.1f} s"
    if parts.enforce_eager:
        return said
    graphs = runner.capture_graphs()  # type: ignore[attr-defined]
    mib = graphs.pool_bytes / 2**20
    return f"{said}; {graphs.num_graphs} steps captured in {graphs.capture_s:.1f} s, {mib:.0f} MiB"


def _compile(parts: RunnerParts, runner: Runner) -> None:
    """Compile every kernel of serving and training on all cores; loads those that were compiled before."""
    from fineinfer.runner.compiling import compiling_only  # imports Triton

    with compiling_only():
        _warm_up(parts, runner)


def _warm_up(parts: RunnerParts, runner: Runner) -> None:
    runner.warm_up()  # type: ignore[attr-defined]
    ops = pick_ops(parts.backend, parts.device)
    if ops is not None:
        warm_up(parts.decoder, ops)


def fit_serving(
    settings: EngineSettings, parts: RunnerParts, max_model_len: int, spec: KVSpec, left: int
) -> tuple[RunnerParts, int]:
    """Measure the workspace; unless they were asked for, halve the rows of a forward until it takes a fair share.

    Args:
        settings: For an explicit number of rows.
        parts: With the limits to begin with.
        max_model_len: Longest sequence.
        spec: Of the KV pool.
        left: Bytes that weights and adapters leave.

    Returns:
        The parts with the limits that fit, and the bytes that serving needs besides weights, adapters and pool.
    """
    while True:
        workspace = measure_serving(parts, max_model_len, spec)
        rows = parts.limits.max_num_batched_tokens
        if settings.max_num_batched_tokens or rows <= MIN_BATCHED_TOKENS or workspace <= WORKSPACE_SHARE * left:
            return parts, workspace
        limits = dataclasses.replace(parts.limits, max_num_batched_tokens=max(MIN_BATCHED_TOKENS, rows // 2))
        parts = dataclasses.replace(parts, limits=limits)


def measure_serving(parts: RunnerParts, max_model_len: int, spec: KVSpec) -> int:
    """Bytes that serving needs besides weights, adapters and the pool: measured on a throw-away pool.

    Runs the largest prefill and, where decode is captured, the largest decode step.
    """
    limits = parts.limits
    num_rows = min(limits.max_num_batched_tokens, max_model_len)
    max_seqs = limits.max_num_seqs if parts.backend == "triton" else 1
    trial = KVCache(
        num_rows,
        max_seqs,
        max(num_rows, max_model_len if parts.backend == "triton" else 0),
        pool=KVPool(spec, num_rows, parts.device),
    )
    graph_bytes = 0
    if parts.backend == "triton" and parts.device.type == "cuda":
        _compile(parts, make_runner(parts, trial))

    def largest_forward() -> None:
        nonlocal graph_bytes
        runner = make_runner(parts, trial)
        sequence = Sequence("dry-run", b"", [0] * num_rows, SamplingParams(temperature=0.0), num_rows, 0.0)
        sequence.row = trial.open_row(num_rows)
        runner.launch((Chunk(sequence, 0, num_rows, samples=True),)).collect()
        if sequence.row is not None:
            trial.close_row(sequence.row)
        if parts.captures:
            graph_bytes = runner.capture_largest()  # type: ignore[attr-defined]

    workspace = measure_workspace(largest_forward, parts.device)
    if parts.backend == "triton":
        workspace += graph_bytes + max_seqs * parts.decoder.spec.vocab_size * SAMPLING_BYTES_PER_LOGIT
    return workspace
