"""Entry of the engine process: load, measure, plan, wire the parts, run the loop."""

from __future__ import annotations

import cProfile
import gc
import logging
import os
import secrets
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fineinfer.adapters.reader import AdapterReader
from fineinfer.adapters.registry import AdapterRegistry
from fineinfer.engine.adapter_traffic import AdapterTraffic
from fineinfer.engine.inbox import Inbox, RequestDesk
from fineinfer.engine.loop import EngineLoop, EngineParts
from fineinfer.engine.memory_ladder import KV, MemoryLadder
from fineinfer.engine.memory_plan import (
    DEFAULT_MAX_BATCHED_TOKENS,
    DEFAULT_MAX_MIXED_TOKENS,
    MemoryPlan,
    MemoryPlanError,
    adapter_memory,
    make_plan,
    memory_budget,
    num_adapter_copies,
    pick_max_num_seqs,
)
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.rungs import Rungs
from fineinfer.engine.runners import RunnerParts, fit_serving, make_runner, pick_backend, prepare
from fineinfer.engine.settings import EngineSettings
from fineinfer.engine.start_times import StartTimes
from fineinfer.engine.statistics import Counters, StatisticsSource
from fineinfer.engine.training_host import TrainingHost, TrainingWay
from fineinfer.ipc import Router
from fineinfer.memory.cuda_memory import open_driver
from fineinfer.memory.freed_memory import return_freed_memory
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.host import set_malloc_thresholds
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec
from fineinfer.messages import EngineInfo, FromEngine, ToEngine
from fineinfer.model.errors import ModelLoadError
from fineinfer.model.loader import LoadedModel, load_model
from fineinfer.model.spec import ModelSpec
from fineinfer.parent_death import die_with_parent
from fineinfer.runner.step_graphs import SERVING_PRIORITY
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.scheduler import Scheduler, SchedulerLimits
from fineinfer.scheduler.slo import SloTargets, make_policy
from fineinfer.training.determinism import prepare_determinism


@dataclass(frozen=True)
class Base:
    """What the parts of the loop are made of."""

    model: LoadedModel
    adapters: AdapterRegistry
    max_model_len: int
    device: torch.device
    runner_parts: RunnerParts
    training_stream: torch.cuda.Stream | None
    times: StartTimes


def main() -> None:
    """Run the engine whose settings file is argv[1]; the ipc token is in the environment."""
    die_with_parent(os.getppid())
    logging.basicConfig(level=logging.WARNING, format="engine: %(message)s")
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineSettings)
    token = bytes.fromhex(os.environ["FINEINFER_IPC_TOKEN"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor drains; a terminal's Ctrl-C must not break a step
    try:
        loop = build_engine(settings, token)
    except (ModelLoadError, MemoryPlanError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)
    gc.collect()
    gc.freeze()  # going through all that is loaded takes a fifth of a second, which some request would wait for
    profile_path = os.environ.get("FINEINFER_ENGINE_PROFILE")
    if profile_path is None:
        loop.run()
        return
    profile = cProfile.Profile()  # where the host's time goes; read it with `python -m pstats FILE`
    try:
        profile.runcall(loop.run)
    finally:
        profile.dump_stats(profile_path)


def build_engine(settings: EngineSettings, token: bytes) -> EngineLoop:
    """Load the model, size the pool by a measured dry run and wire the loop.

    Raises:
        ModelLoadError: The model cannot be loaded.
        MemoryPlanError: The memory budget is too small.
        ValueError: A setting that only the model can judge, such as a context length beyond its own.
    """
    times = StartTimes()
    set_malloc_thresholds()
    if settings.deterministic:
        prepare_determinism()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = pick_device(settings.device)
    stream = pick_training_stream(settings, device)
    budget = memory_budget(settings, device)
    model = load_model(
        settings.model,
        dtype=settings.dtype,
        device=device.type,
        load_format=settings.load_format,
        revision=settings.revision,
        seed=settings.seed,
    )
    times.ended("weights")
    max_model_len = pick_context_length(settings, model)
    spec, dtype = model.spec, next(model.decoder.parameters()).dtype
    adapters = make_adapters(settings, spec, dtype, device)
    kv_spec = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    weights = sum(p.numel() * p.element_size() for p in model.decoder.parameters())
    fixed = {"weights": weights, "adapters": adapter_memory(settings, adapters.stacks.num_bytes, device.type == "cuda")}
    left = budget - sum(fixed.values())
    driver = open_driver(device)
    elastic = device.type == "cpu" or driver is not None
    limits = SchedulerLimits(
        pick_max_num_seqs(settings, device, left, kv_spec.bytes_per_slot, elastic),
        settings.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS[device.type],
        settings.deferral_bound_s,
        DEFAULT_MAX_MIXED_TOKENS[device.type],
    )
    backend = pick_backend(settings, device)
    parts = RunnerParts(model.decoder, adapters, limits, device, backend, settings.enforce_eager)
    parts, workspace = fit_serving(settings, parts, max_model_len, kv_spec, left)
    times.ended("dry run")
    gc.collect()
    return_freed_memory(device)  # of the dry run: the pool takes it
    fixed["workspace"] = workspace
    plan = make_plan(settings, budget, fixed, kv_spec.bytes_per_slot, limits.max_num_seqs * max_model_len, elastic)
    pool = KVPool(kv_spec, plan.kv_slots_max, device, driver)
    kv_cache = KVCache(
        pool.slots_within(plan.pool_room),
        limits.max_num_seqs,
        min(max_model_len, pool.max_slots),
        pool=pool,
        # the base of dynamic RoPE depends on the whole prompt, so its keys serve no other prompt
        keep_prefixes=not settings.no_enable_prefix_caching and not model.decoder.rope.needs_lengths,
    )
    base = Base(model, adapters, max_model_len, device, parts, stream, times)
    return wire(settings, token, base, kv_cache, plan.with_pool(pool))


def make_adapters(
    settings: EngineSettings, shape: ModelSpec, dtype: torch.dtype, device: torch.device
) -> AdapterRegistry:
    """The adapter slots. Beside a GPU folders are read on a thread and copies kept in pinned host memory."""
    on_gpu = device.type == "cuda"
    reader = AdapterReader(shape, settings.max_lora_rank, dtype, num_adapter_copies(settings, on_gpu), on_gpu)
    return AdapterRegistry(shape, settings.max_loras, settings.max_lora_rank, dtype, device, reader)


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one; asking for CUDA without one is an error."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_training_stream(settings: EngineSettings, device: torch.device) -> torch.cuda.Stream | None:
    """A stream for training beside steps; serving then gets one that goes before it. None: training between steps.

    Only policy ``slo`` trains while requests run.
    """
    if device.type != "cuda" or settings.policy != "slo" or settings.no_training_overlap or settings.deterministic:
        return None
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=SERVING_PRIORITY))  # type: ignore[no-untyped-call]
    return torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]


def pick_context_length(settings: EngineSettings, model: LoadedModel) -> int:
    """The model's own context length, or a shorter one as asked."""
    own = model.spec.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > own:
        raise ValueError(f"--max-model-len {settings.max_model_len} exceeds the model's {own} positions")
    return settings.max_model_len or own


def lease_plan(plan: MemoryPlan) -> MemoryGovernor:
    """A governor with the plan's bytes leased.

    Raises:
        MemoryPlanError: The plan does not fit its own budget.
    """
    governor = MemoryGovernor(plan.budget)
    owners = {"weights": plan.weights, "workspace": plan.workspace, "adapters": plan.adapters}
    for owner, size in (owners | {KV: plan.kv_now}).items():
        if not governor.lease(owner, size):
            raise MemoryPlanError(f"the memory plan exceeds its budget at {owner}: {plan.as_dict()}")
    return governor


def wire(settings: EngineSettings, token: bytes, base: Base, kv_cache: KVCache, plan: MemoryPlan) -> EngineLoop:
    """Connect the parts of the loop; the only place that knows all of them."""
    model, adapters, device = base.model, base.adapters, base.device
    governor = lease_plan(plan)
    latency, counters = LatencyModel(), Counters()
    ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (settings.slo_ttft_ms, settings.slo_tpot_ms))
    targets = SloTargets(ttft_s, tpot_s, settings.train_share_min, settings.train_share_max)
    scheduler = Scheduler(kv_cache, base.runner_parts.limits, make_policy(settings.policy, targets), latency)
    keep_floor = settings.policy == "slo" and settings.train_share_min > 0
    rungs = Rungs(latency, device.type)
    ladder = MemoryLadder(governor, kv_cache, scheduler.reserved_slots, rungs, keep_floor)
    scheduler.reachable_slots = ladder.reachable_slots
    runner = make_runner(base.runner_parts, kv_cache)
    base.times.ended("memory")
    said = prepare(base.runner_parts, runner)
    if said is not None:
        print(f"{base.times}; {said}", file=sys.stderr, flush=True)
    info = EngineInfo(
        boot_id=secrets.token_hex(8),
        base_model=settings.base_model,
        max_model_len=base.max_model_len,
        max_request_tokens=min(base.max_model_len, kv_cache.max_slots),
        vocab_size=model.spec.vocab_size,
        eos_token_ids=list(model.spec.eos_token_ids),
        dtype=str(next(model.decoder.parameters()).dtype).removeprefix("torch."),
        device=device.type,
        memory_plan=plan.as_dict(),
        max_loras=settings.max_loras,
    )
    router: Router[FromEngine, ToEngine] = Router(settings.engine_address, token, ToEngine)
    source = StatisticsSource(info.boot_id, counters, scheduler, kv_cache, governor, ladder, latency)
    outbox = Outbox(
        router,
        info,
        snapshot=lambda: source.snapshot(training, adapters, len(desk.without_slot)),
        progress=lambda: runner.progress + counters.training_units,
    )
    how = TrainingWay(base.runner_parts.backend, base.training_stream, settings.deterministic)
    training = TrainingHost(model.decoder, ladder, latency, outbox, how)
    desk = RequestDesk(scheduler, adapters, outbox, info.max_request_tokens, info.vocab_size)
    inbox = Inbox(router, desk, outbox)
    traffic = AdapterTraffic(adapters, outbox)
    parts = EngineParts(inbox, outbox, desk, scheduler, runner, training, ladder, adapters, traffic, latency, counters)
    return EngineLoop(parts, model.spec.eos_token_ids)


if __name__ == "__main__":
    main()
