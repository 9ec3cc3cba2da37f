"""Requests and training on one engine: policies x rates, traces, peak load, a burst that needs training's memory.

    python benchmarks/coserving.py --lengths sharegpt_lengths.csv --targets -- --device cuda
    python benchmarks/coserving.py --lengths sharegpt_lengths.csv --only policies --policies deferred train-first
    python benchmarks/coserving.py --trace azure_llm_trace_conv.csv --only trace
    python benchmarks/coserving.py --lengths sharegpt_lengths.csv --only overload peak burst --targets

Everything after ``--`` goes to `fineinfer serve`. Without --model a shape with random weights is served. --only PIECES:

    alone     inference alone at each of --rates, then training alone, on the first policy's server
    policies  both at once: a server a policy, a window of --seconds a rate (P4, P5; with alone P7)
    trace     --trace-seconds of an Azure trace in real time: inference alone, then beside a job, policy slo
    overload  --overload times what the server can do, for --overload-seconds, beside a job: nobody starves, and the job
              has its minimum share
    peak      1,000 ShareGPT requests at once, without and with a job that has 2 % of the time (P6)
    burst     requests whose peak takes --burst-gib that training holds: how soon the first one starts (P8), and what
              of the KV memory holds no token then (P10)
    plot      training against time per output token, from results/coserving.csv; needs matplotlib

Arrivals are Poisson with ShareGPT lengths, the same for each policy. A job has rows of --row-tokens, --rows of them are
one micro-batch and one update. Every row is printed and written to results/coserving.csv as soon as it is measured.
``peak`` and ``burst`` speak to the engine process itself, as benchmarks/serving.py does; the others speak HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserving_plot import plot
from harness import ENGLISH, SHAPES, card, make_shape_folder, read_lengths, versions, write_csv, write_rows
from load import (
    Arrival,
    Row,
    Target,
    poisson,
    run_window,
    sample_training,
    start_job,
    trace,
    training_alone,
    wait_quiet,
)
from pressure import SHARE_WINDOW_S, burst, least_share, peak

from fineinfer.cli.local_server import local_server
from fineinfer.model.resolve import resolve_model_path
from fineinfer.server.start_checks import raise_file_limit

POLICIES = ("slo", "deferred", "inference-first", "train-first")
PIECES = ("alone", "policies", "trace", "overload", "peak", "burst", "plot")
READY_S = 300.0
# Longer prompts are cut: 8 % of the conversations are beyond 4,096 tokens, 1 in 20,000 beyond this.
TRACE_MODEL_LEN = 8192
NUM_ROWS = 512
TEMPLATE_TOKENS = 8  # of a row, besides its answer, with the tokenizer of a shape
PEER = "vLLM 0.25.1 + layer-sliced trainer as second process, other call on 2026-11-27"
PEERS = {  # measured on one H100; by rate: training tok/s, TPOT p99 and TTFT p99 in ms
    16.0: {"train": 7209, "tpot-p99": 32.6, "ttft-p99": 124},
    4.0: {"train": 7537, "tpot-p99": 20.4, "ttft-p99": 89},
}
OVERLOAD_DRAIN = 4.0  # of the window, until what has not ended is given up
TARGET_IDS = {16.0: "P4", 4.0: "P5"}
TARGET_TPOT_MS = 20.0  # of P4 and P5; rows measured at another one say so in their id


class Bench:
    """One call: what is served, and where the rows go.

    Args:
        args: Of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._folder = Path(tempfile.mkdtemp(prefix="coserving-"))
        own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
        self._said = f"(benchmarks/coserving.py {' '.join(Path(word).name if '/' in word else word for word in own)})"
        self.measured: list[Row] = []
        self.model: list[str] = [] if args.shape == "embedded" else [args.model or ""]
        self.flags: list[str] = []
        vocabulary, extra = list(ENGLISH), TEMPLATE_TOKENS
        if args.model is None and args.shape != "embedded":
            self.model = [str(make_shape_folder(args.shape, tokenizer=True))]
            self.flags = ["--load-format", "dummy", "--served-model-name", f"llama-{args.shape}-shape"]
            vocabulary = [f"w{i}" for i in range(10, 300)]
        folder = resolve_model_path(self.model[0] if self.model else None, need_weights=False)
        self.vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        self.rows = self._folder / "rows.jsonl"
        write_rows(self.rows, NUM_ROWS, args.row_tokens - extra, vocabulary)
        self.job_settings: dict[str, object] = {
            "n_epochs": 50, "batch_size": args.rows, "gradient_accumulation_steps": 1, "save_steps": 10000,
            "max_seq_length": args.row_tokens + 64,
        }  # fmt: skip

    def flags_of(self, policy: str, max_model_len: int = 4096) -> list[str]:
        """Flags of `fineinfer serve`, the model left out; the user's come last and win."""
        targets = []
        if policy == "slo":
            targets = ["--slo-tpot-ms", f"{self.args.slo_tpot_ms:g}", "--slo-ttft-ms", f"{self.args.slo_ttft_ms:g}"]
        own = ["--max-model-len", str(max_model_len), "--policy", policy, *targets]
        return [*self.flags, *own, *self.args.serve_flags]

    def command(self, flags: list[str]) -> str:
        """What a row says of how it came about."""
        return " ".join(["fineinfer serve", *flags, self._said])

    @contextmanager
    def server(self, policy: str, flags: list[str]) -> Iterator[Target]:
        """A running server that has answered a few requests."""
        begin = time.monotonic()
        with local_server(*self.model, *flags) as server:
            server.wait_until_ready(READY_S, lambda line: None)
            ready_s = time.monotonic() - begin
            target = Target.of(server.url, self.vocab_size - 1)
            asyncio.run(run_window(target, poisson(8.0, 2.0, [(64, 8)]), 2.0))
            phases = [line for line in server.log_tail(100).splitlines() if "weights" in line and "dry run" in line]
            print(f"policy {policy}: ready after {ready_s:.1f} s; {'; '.join(phases)}", flush=True)
            yield target

    def add(self, row: Row, policy: str, flags: list[str]) -> Row:
        """Print a row and write it."""
        slo: Row = {name: flag_value(flags, name) for name in ("slo_tpot_ms", "slo_ttft_ms")}
        row = {"case": row.pop("case"), "policy": policy} | slo | row
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
        shown = " ".join(
            f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, (int, float)) and value == value
        )
        print(f"{row['case']}, {policy}: {shown}", flush=True)
        stamp = {"command": self.command(flags), "versions": versions()}
        write_csv(self.args.results / "coserving.csv", [row | stamp])
        self.measured.append(row)
        return row

    def add_target(self, name: str, value: float, unit: str, flags: list[str], peer: tuple[str, object]) -> None:
        """Write a row of targets.csv."""
        if self.args.targets:
            row: Row = {"id": name, "value": round(value, 2), "unit": unit, "peer": peer[0], "peer_value": peer[1]}
            row |= {"card": card(), "command": self.command(flags)}
            write_csv(self.args.results / "targets.csv", [row])


def flag_value(flags: list[str], name: str) -> float | None:
    """The last value given for a flag, None if there is none."""
    flag, found = "--" + name.replace("_", "-"), None
    for word, following in zip(flags, [*flags[1:], ""], strict=True):
        if word == flag:
            found = float(following)
        elif word.startswith(f"{flag}="):
            found = float(word.partition("=")[2])
    return found


# ---------------------------------------------------------------- pieces


def policies(bench: Bench, alone: bool, both: bool) -> None:
    """Each policy at each rate; on the first server also each side alone."""
    args = bench.args
    lengths = read_lengths(args.lengths)
    for policy in args.policies if both else args.policies[:1]:
        flags, first = bench.flags_of(policy), policy == args.policies[0]
        with bench.server(policy, flags) as target:
            if alone and first:
                for rate in args.rates:
                    row = asyncio.run(run_window(target, poisson(rate, args.seconds, lengths), args.seconds))
                    bench.add({"case": "inference alone", "rate": rate} | row, policy, flags)
                    wait_quiet(target.url)
            job = start_job(target, bench.rows, bench.job_settings)
            if alone and first:
                row = training_alone(target.url, job, min(12.0, args.seconds))
                bench.add({"case": "training alone"} | row, policy, flags)
            for rate in args.rates if both else ():
                row = asyncio.run(run_window(target, poisson(rate, args.seconds, lengths), args.seconds, job))
                row = bench.add({"case": "both", "rate": rate} | row, policy, flags)
                if policy == "slo":
                    add_slo_targets(bench, row, flags)
                wait_quiet(target.url)


def add_slo_targets(bench: Bench, row: Row, flags: list[str]) -> None:
    """P4 or P5, and P7, of a window with requests and training."""
    rate = float(str(row["rate"]))
    if rate not in TARGET_IDS:
        return
    at = "" if row["slo_tpot_ms"] == TARGET_TPOT_MS else f"-{row['slo_tpot_ms']:g}ms"
    columns = {"train": "train_tok_s", "tpot-p99": "tpot_p99_ms", "ttft-p99": "ttft_p99_ms"}
    for part, column in columns.items():
        unit = "tok/s" if part == "train" else "ms"
        peer = (PEER, PEERS[rate][part])
        bench.add_target(f"{TARGET_IDS[rate]}{at}-{part}", float(str(row[column])), unit, flags, peer)
    alone = [r for r in bench.measured if r["case"] == "inference alone" and r["rate"] == rate]
    if alone and rate == 16.0:
        for name, column in (("P7", "ttft_p99_ms"), ("P7-by-server", "server_ttft_p99_ms")):
            ours, theirs = float(str(row[column])), float(str(alone[-1][column]))
            ratio = ours / theirs if theirs else float("nan")
            print(f"{name}: TTFT p99 {ours:.1f} ms beside training, {theirs:.1f} ms alone: x{ratio:.2f}", flush=True)
            if name == "P7":
                bench.add_target(name, ratio, "ratio", flags, ("inference alone, ms, same call", round(theirs, 2)))


def azure(bench: Bench) -> None:
    """A window of a real trace: inference alone, then beside a job."""
    args, flags = bench.args, bench.flags_of("slo", TRACE_MODEL_LEN)
    arrivals = trace(args.trace, args.trace_start, args.trace_seconds)
    if not arrivals:
        raise SystemExit(f"error: {args.trace} has no request in that window")
    facts: Row = {"rate": len(arrivals) / args.trace_seconds, "trace": args.trace.stem}
    with bench.server("slo", flags) as target:
        row = asyncio.run(run_window(target, arrivals, args.trace_seconds))
        bench.add({"case": "trace, inference alone"} | facts | row, "slo", flags)
        wait_quiet(target.url)
        job = start_job(target, bench.rows, bench.job_settings)
        row = asyncio.run(run_window(target, arrivals, args.trace_seconds, job))
        bench.add({"case": "trace, both"} | facts | row, "slo", flags)


def overload(bench: Bench) -> None:
    """More requests than the server can serve, for a while: how long anybody waits, and what the job has meanwhile."""
    args, flags = bench.args, bench.flags_of("slo")
    lengths, seconds, times = read_lengths(args.lengths), args.overload_seconds, args.overload
    raise_file_limit()  # every request that waits is a connection
    with bench.server("slo", flags) as target:
        at_once = [Arrival(0.0, *pair) for pair in lengths[: args.num_prompts]]
        drain_s = OVERLOAD_DRAIN * seconds
        row = asyncio.run(run_window(target, at_once, 0.0, drain_s=drain_s))
        num_tokens = sum(arrival.num_output for arrival in at_once)
        capacity = len(at_once) * float(str(row["output_tok_s"])) / num_tokens
        bench.add({"case": "all at once", "rate": capacity} | row, "slo", flags)
        wait_quiet(target.url)
        job, samples = start_job(target, bench.rows, bench.job_settings), list[tuple[float, float]]()

        async def beside_job() -> Row:
            meter = asyncio.create_task(sample_training(target.url, samples))
            arrivals = poisson(times * capacity, seconds, lengths)
            row = await run_window(target, arrivals, seconds, job, drain_s=drain_s)
            meter.cancel()
            return row

        row = asyncio.run(beside_job())
        facts: Row = {"rate": times * capacity, "least_share_percent": 100 * least_share(samples, SHARE_WINDOW_S)}
        facts["backlog_s"] = (times - 1) * seconds  # of work at the window's end, were nothing trained
        bench.add({"case": "overload"} | facts | row, "slo", flags)


def engine_pieces(bench: Bench, pieces: set[str]) -> None:
    """Peak and burst, each on an engine process of its own."""
    args, model = bench.args, bench.model[0] if bench.model else None
    if "peak" in pieces:
        outcome = peak(model, [*bench.flags, "--max-model-len", "4096"], args)
        row = bench.add({"case": "peak"} | outcome.row, "slo", outcome.flags)
        alone = ("no job, tok/s, same run", round(float(str(row["alone_tok_s"])), 1))
        bench.add_target("P6", float(str(row["slower_percent"])), "percent", outcome.flags, alone)
        least = ("least share of any ten seconds; asked for, percent", 100 * args.peak_share)
        bench.add_target("P6-share", float(str(row["least_share_percent"])), "percent", outcome.flags, least)
    if "burst" in pieces:
        outcome = burst(model, [*bench.flags, "--max-model-len", "4096"], args)
        row = bench.add({"case": "burst"} | outcome.row, "slo", outcome.flags)
        moved = ("GiB moved, same run", round(float(str(row["moved_gib"])), 2))
        bench.add_target("P8", float(str(row["first_start_worst_ms"])), "ms", outcome.flags, moved)
        held = ("slots of the pool times bytes of a token, part of the bytes held", "")
        bench.add_target("P10-wasted", float(str(row["kv_wasted_tokens"])), "tokens", outcome.flags, ("", ""))
        bench.add_target("P10-usable", float(str(row["kv_usable_percent"])), "percent", outcome.flags, held)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=["alone", "policies"])
    parser.add_argument("--lengths", type=Path, help="CSV of prompt and output lengths")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["slo"])
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 16.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a window")
    parser.add_argument("--slo-tpot-ms", type=float, default=TARGET_TPOT_MS)
    parser.add_argument("--slo-ttft-ms", type=float, default=100.0)
    parser.add_argument("--trace", type=Path, help="CSV of an Azure LLM trace")
    parser.add_argument("--trace-start", type=float, default=0.0, help="seconds after the trace's first request")
    parser.add_argument("--trace-seconds", type=float, default=90.0)
    parser.add_argument("--num-prompts", type=int, default=1000, help="peak, overload: rows of --lengths, all at once")
    parser.add_argument("--overload", type=float, default=2.0, metavar="X", help="X times the capacity")
    parser.add_argument("--overload-seconds", type=float, default=120.0)
    parser.add_argument("--peak-share", type=float, default=0.02, help="peak: --train-share-min")
    parser.add_argument(
        "--burst-gib", type=float, default=4.0, help="burst: what the requests need of training's memory"
    )
    parser.add_argument("--pool-gib", type=float, default=6.0, help="burst: the pool before it, which is full")
    parser.add_argument("--repeats", type=int, default=5, help="burst: rounds")
    parser.add_argument("--model", help="serve this model instead of a shape with random weights")
    parser.add_argument("--shape", choices=[*SHAPES, "embedded"], default="8b")
    parser.add_argument("--rows", type=int, default=4, help="of an update of the job")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--targets", action="store_true", help="append rows to targets.csv")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the CSVs")
    parser.add_argument("--plot", type=Path, default=Path(__file__).parents[1] / "docs" / "coserving.svg")
    parser.add_argument("--profile", type=Path, help="write the engine's host profile here")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of `fineinfer serve`")
    args = parser.parse_args()
    if args.lengths is None and {"alone", "policies", "overload", "peak"} & set(args.only):
        parser.error("--lengths is needed for alone, policies, overload and peak")
    if args.trace is None and "trace" in args.only:
        parser.error("--trace is needed for trace")
    return args


def main() -> None:
    args = parse()
    if args.profile is not None:
        os.environ["FINEINFER_ENGINE_PROFILE"] = str(args.profile.absolute())
    pieces = set(args.only)
    if pieces - {"plot"}:
        bench = Bench(args)
        if pieces & {"alone", "policies"}:
            policies(bench, "alone" in pieces, "policies" in pieces)
        if "trace" in pieces:
            azure(bench)
        if "overload" in pieces:
            overload(bench)
        engine_pieces(bench, pieces)
    if "plot" in pieces:
        plot(args.results / "coserving.csv", args.plot)


if __name__ == "__main__":
    main()
