"""LoRA training alone on the engine of `fineinfer serve`: tokens per second and memory, kept and recomputed (P3).

    python benchmarks/training.py [--cases kept recomputed long] [--profile] [--peer] [--targets] -- --device cuda

Builds that engine in this process on the 8B shape with random weights, gives it jobs and steps its loop: rank 16 on all
linear layers, AdamW, clipping, every token trained. `kept` and `recomputed` are four rows of 1,024 tokens an update,
`long` is one row of 8,192. Everything after ``--`` are engine flags. Memory is the most that torch had allocated while
the updates were timed, all of the engine included: weights, a small KV pool, an adapter slot, workspaces. With --peer,
benchmarks/peft_training.py runs afterwards on the same card. Prints a table and appends to results/training.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import SHAPES, card, make_job, make_shape_folder, versions, write_csv
from serving import parse_engine_flags
from step_profile import kernel_times, report

from fineinfer.engine.loop import EngineLoop
from fineinfer.engine.process import build_engine
from fineinfer.engine.settings import engine_settings

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
# what serving needs and this work does not is as small as it can be
FLAGS = "--load-format dummy --max-model-len 4096 --kv-cache-memory-bytes 256MiB --max-loras 1 --max-lora-rank 16"
UNITS = ("forward", "head", "backward", "recompute", "optimizer")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained on."""

    rows: int
    length: int
    recompute: str  # never | always
    target: str | None  # id in targets.csv


CASES = {
    "kept": Case(4, 1024, "never", "P3-kept"),
    "recomputed": Case(4, 1024, "always", "P3-recomputed"),
    "long": Case(1, 8192, "always", None),
}


def start(loop: EngineLoop, name: str, case: Case, job: Path, vocab: int) -> None:
    """Hand the engine a job, whose id is the name of its folder; a refused one is an error."""
    message = make_job(job, case.rows, case.length, vocab, case.recompute)
    loop.parts.training.start(message)
    if loop.parts.training.trainer is None:
        raise SystemExit(f"error: the engine refused the job of case {name}")


def run_updates(loop: EngineLoop, count: int) -> None:
    """Step the engine until ``count`` more updates are finished and the device is idle."""
    trainer = loop.parts.training.trainer
    if trainer is None:
        raise SystemExit("error: the job has ended")
    goal = trainer.step + count
    while loop.parts.training.trainer is trainer and trainer.step < goal:
        loop.step()
    if loop.parts.training.trainer is not trainer:
        raise SystemExit("error: the job failed; see the log above")
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(loop: EngineLoop, updates: int) -> dict[str, float]:
    """Speed, peak memory and unit times of the running job, after three updates that warm up."""
    trainer = loop.parts.training.trainer
    assert trainer is not None
    run_updates(loop, 3)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    tokens, begin = trainer.cursor.processed_tokens, time.perf_counter()
    run_updates(loop, updates)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else float("nan")
    losses = [entry["loss"] for entry in trainer.log_history]
    units = loop.parts.latency.averages_ms()
    return {
        "tok_s": (trainer.cursor.processed_tokens - tokens) / seconds,
        "peak_gib": peak / GIB,
        "update_ms": 1e3 * seconds / updates,
        **{f"{kind}_ms": units.get(kind, float("nan")) for kind in UNITS},
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def run_peer(case: Case) -> dict[str, str]:
    """transformers + PEFT on the same card: tok/s of kept and of checkpointed."""
    script = Path(__file__).parent / "peft_training.py"
    command = [sys.executable, str(script), "--batch", str(case.rows), "--length", str(case.length)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(said, end="")
    return dict(re.findall(r" (kept|checkpointed): (\d+) tok/s", said))


def target_row(name: str, row: dict[str, object], peer: dict[str, str], command: str) -> dict[str, object]:
    """A row of targets.csv."""
    mode = {"kept": "kept", "recomputed": "checkpointed"}[name]
    return {
        "id": CASES[name].target,
        "value": round(float(str(row["tok_s"])), 1),
        "unit": "tok/s",
        "peer": f"HF + PEFT 4x1024 {mode}, same call" if peer else "",
        "peer_value": peer.get(mode, ""),
        "card": card(),
        "command": command,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["kept", "recomputed"])
    parser.add_argument("--updates", type=int, default=30, help="timed updates of each case")
    parser.add_argument("--length", type=int, help="tokens of a row, for a try on a small machine")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one update of each case")
    parser.add_argument("--peer", action="store_true", help="also run transformers + PEFT")
    parser.add_argument("--targets", action="store_true", help="append rows to results/targets.csv")
    parser.add_argument("serve_flags", nargs="*", help="after --: engine flags of `fineinfer serve`")
    args = parser.parse_args()
    flags = [*FLAGS.split(), *args.serve_flags]
    config = parse_engine_flags(flags, str(make_shape_folder(shape=args.shape)))
    command = f"fineinfer serve {' '.join(flags)} (benchmarks/training.py --cases {' '.join(args.cases)})"
    table: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = build_engine(engine_settings(config, "base", f"ipc://{folder}/engine"), secrets.token_bytes(32))
        for case_name in args.cases:
            case = CASES[case_name]
            case = dataclasses.replace(case, length=args.length or case.length)
            start(loop, case_name, case, folder / case_name, int(str(SHAPES[args.shape]["vocab_size"])))
            measured = measure(loop, args.updates)
            table.append({"case": case_name} | measured)
            print(case_name, " ".join(f"{key} {value:.2f}" for key, value in measured.items()), flush=True)
            if args.profile:
                times = kernel_times(functools.partial(run_updates, loop, 1), 1)
                report(f"{case_name}, one update", times, 1e3 * measured["update_ms"])
            loop.parts.training.cancel(case_name)
    peer = run_peer(CASES["kept"]) if args.peer else {}
    write_csv(RESULTS / "training.csv", [row | {"command": command, "versions": versions()} for row in table])
    if args.targets:
        rows = [target_row(str(row["case"]), row, peer, command) for row in table if row["case"] != "long"]
        write_csv(RESULTS / "targets.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
