"""Where the device's time of a decode step and of a prefill goes, kernel by kernel.

    python benchmarks/step_profile.py [--rows 64] [--context 400] [--adapters 8] [--prompt 2048] -- --device cuda

Builds the engine of `fineinfer serve` in this process, on the 8B shape with random weights, and steps its loop under
torch's profiler: steps that only decode, then one that only prefills. Everything after ``--`` are engine flags. Prints
microseconds a step by kernel and writes benchmarks/results/step_profile.csv.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import SHAPES, make_shape_folder, versions, write_csv
from serving import parse_engine_flags
from torch.profiler import ProfilerActivity, profile

from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.engine.loop import EngineLoop
from fineinfer.engine.process import build_engine
from fineinfer.engine.settings import engine_settings
from fineinfer.messages import LoraSpec
from fineinfer.model.loader import read_spec
from fineinfer.request import SamplingParams
from fineinfer.scheduler.scheduler import MIN_PREFILL_ROWS
from fineinfer.scheduler.sequence import Sequence

RESULTS = Path(__file__).parent / "results" / "step_profile.csv"
DECODE_STEPS = 20
GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|splitK|few_rows", re.IGNORECASE)


def add(loop: EngineLoop, name: str, num_prompt: int, num_output: int) -> Sequence:
    """Queue a request that nobody waits for."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    prompt = random.Random(name).choices(range(1000), k=num_prompt)  # nothing in common that could be cached
    sequence = Sequence(name, b"nobody", prompt, sampling, num_prompt + num_output, time.monotonic())
    loop.parts.desk.open[name] = sequence
    loop.parts.scheduler.add(sequence)
    return sequence


def fill_adapters(loop: EngineLoop, model: Path, count: int) -> None:
    """Random adapters of rank 16 of all modules in the first slots."""
    stacks = loop.parts.adapters.stacks
    layout = LoraLayout.uniform(read_spec(model)[1], LoraSpec(r=16, lora_alpha=32.0))
    for slot in range(count):
        stacks.fill(slot, LoraWeights(layout, torch.randn(layout.num_parameters, device="cuda").mul_(0.02).bfloat16()))


def kernel_times(run: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Microseconds a step by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:
            times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total / num_steps
    return times


def report(case: str, times: dict[str, float], wall_us: float) -> list[dict[str, object]]:
    """Print and return the rows of one case, the longest first, small ones together."""
    total = sum(times.values())
    gemm = sum(us for name, us in times.items() if GEMM.search(name))
    print(f"\n{case}: {wall_us:.0f} us a step, kernels {total:.0f} us, matrix products {100 * gemm / total:.1f} %")
    rows = []
    for name, us in sorted(times.items(), key=lambda item: -item[1])[:16]:
        print(f"{us:10.1f} us {100 * us / total:5.1f} %  {name[:90]}")
        rows.append({"case": case, "kernel": name[:120], "us": us, "percent": 100 * us / total, "wall_us": wall_us})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="decode rows")
    parser.add_argument("--context", type=int, default=400, help="tokens each of them has already")
    parser.add_argument(
        "--adapters", type=int, default=0, help="random adapters of rank 16 the decode rows spread over"
    )
    parser.add_argument("--prompt", type=int, default=2048, help="rows of the prefill")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("serve_flags", nargs="*", help="after --: engine flags of `fineinfer serve`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks/step_profile.py needs a CUDA device", file=sys.stderr)
        return 1
    flags = ["--load-format", "dummy", "--max-model-len", "4096", *args.serve_flags]
    model = Path(make_shape_folder(shape=args.shape))
    config = parse_engine_flags(flags, str(model))
    with tempfile.TemporaryDirectory() as folder:
        loop = build_engine(engine_settings(config, "base", f"ipc://{folder}/engine"), secrets.token_bytes(32))
        fill_adapters(loop, model, args.adapters)
        num_output = 4 * DECODE_STEPS + args.rows * args.context // MIN_PREFILL_ROWS  # none ends before all have begun
        for i in range(args.rows):
            sequence = add(loop, f"d{i}", args.context, num_output)
            if args.adapters:
                sequence.adapter_slot = i * args.adapters // args.rows
        while any(s.num_uncomputed > 1 for s in loop.parts.scheduler.running) or loop.parts.scheduler.waiting:
            loop.step()

        def decode() -> None:
            for _ in range(DECODE_STEPS):
                loop.step()

        decode()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decode()
        torch.cuda.synchronize()
        wall_us = 1e6 * (time.perf_counter() - begin) / DECODE_STEPS
        rows = report(
            f"decode {args.rows} x {args.context}{f', {args.adapters} adapters' * bool(args.adapters)}",
            kernel_times(decode, DECODE_STEPS),
            wall_us,
        )
        if len(loop.parts.scheduler.running) < args.rows:
            raise SystemExit(f"error: {args.rows} rows of {args.context} tokens do not fit at once")
        while not loop.parts.scheduler.is_idle():
            loop.step()
        walls = []

        def prefill() -> None:
            add(loop, f"p{len(walls)}", args.prompt, 1)
            begin = time.perf_counter()
            while not loop.parts.scheduler.is_idle():
                loop.step()
            torch.cuda.synchronize()
            walls.append(1e6 * (time.perf_counter() - begin))

        prefill()
        prefill()
        times = kernel_times(prefill, 1)
        rows += report(f"prefill {args.prompt}", times, walls[1])
    write_csv(RESULTS, [row | {"versions": versions()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
