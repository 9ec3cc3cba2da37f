"""Throughput of the engine of `fineinfer serve`, offline: no HTTP, no tokenisation, as the vLLM peer was measured.

    python benchmarks/serving.py --lengths sharegpt_lengths.csv --cases sharegpt 256x256 single lora -- --device cuda

Starts the engine process as the supervisor starts it and sends requests of token ids to its socket. Everything after
``--`` are engine flags of `fineinfer serve`. Without --model the 8B shape with random weights is served. Cases:

    sharegpt  the first 1000 (prompt, output) pairs of --lengths, all at once (P1)
    256x256   the first 256 prompts x 256 outputs, all at once (P1)
    single    one request of 128 tokens in, 256 out (P2); median of 3
    decode64  64 rows of 128 in, 256 out: host time a decode step that the device does not hide (P9)
    lora      64 rows of 64 in, 128 out: of the base, then spread over 8 adapters of rank 16 (P11); median of 3

All requests are greedy and ignore the end token. Prints a table and appends to benchmarks/results/serving.csv.
``decode_tok_s`` counts tokens between the last request's first token and the first request's end, where all decode.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import zmq
from harness import SHAPES, make_shape_folder, percentile, read_lengths, versions, write_csv

from fineinfer.config import SETTINGS, Config, ConfigError, load_config
from fineinfer.engine.settings import engine_settings
from fineinfer.ipc import HIGH_WATER_MARK, Codec
from fineinfer.messages import (
    AdapterRejected,
    AddRequest,
    Drain,
    EngineInfo,
    EngineStats,
    FromEngine,
    Hello,
    LoraSpec,
    Outputs,
    SetAdapter,
    ToEngine,
)
from fineinfer.request import SamplingParams
from fineinfer.server.start_checks import runtime_dir

RESULTS = Path(__file__).parent / "results" / "serving.csv"
MAX_SILENCE_S = 300.0  # an idle engine sends statistics every second; loading a model is silent
STOP_S = 20.0
TAIL_LINES = 30
MAX_TOKEN_ID = 120_000  # as the peer script draws them
WARM_UP_OUTPUT = 32
ROUNDS = 3  # of the cases that report a median
NUM_ADAPTERS, ADAPTER_RANK, LORA_ROWS, LORA_PROMPT, LORA_OUTPUT = 8, 16, 64, 64, 128

Lengths = Sequence[tuple[int, int]]
Row = dict[str, object]


# ---------------------------------------------------------------- the engine process


class Engine:
    """The engine process of `fineinfer serve` and the one socket to it.

    Args:
        config: As resolved from flags.
        folder: Private folder for socket, settings and log.
        profile: Where the engine leaves the profile of its host time.

    Attributes:
        info: What the engine said of itself.
        start_s: Seconds from the start of the process until it was ready.
        seen: The statistics it sent, about one a second.
    """

    def __init__(self, config: Config, folder: Path, profile: Path | None) -> None:
        token = secrets.token_bytes(32)
        address, path, self._log = f"ipc://{folder / 'engine'}", folder / "engine.json", folder / "engine.log"
        path.touch(mode=0o600)
        path.write_bytes(
            msgspec.json.encode(engine_settings(config, config.model.served_model_name or "base", address))
        )
        own = {"FINEINFER_IPC_TOKEN": token.hex(), "PYTHONSAFEPATH": "1"}
        if profile is not None:
            own["FINEINFER_ENGINE_PROFILE"] = str(profile.absolute())
        self.seen: deque[EngineStats] = deque(maxlen=1000)
        begin = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fineinfer.engine.process", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **own},
            )
        self._token = token
        self._codec: Codec[ToEngine, FromEngine] = Codec(FromEngine)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, HIGH_WATER_MARK), (zmq.RCVHWM, HIGH_WATER_MARK)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, b"supervisor")  # news of adapters go to this name
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(address)
        try:
            self.info = self.greet()[0]
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - begin

    def words(self) -> str:
        """What the engine has written so far."""
        return self._log.read_text(errors="replace").strip()

    def send(self, *messages: ToEngine) -> None:
        """Queue messages for the engine."""
        for message in messages:
            self._socket.send_multipart([self._token, self._codec.encode(message)])

    def receive(self) -> FromEngine:
        """The next message; ends the script if the engine has ended or is silent for too long."""
        begin = time.perf_counter()
        while not self._socket.poll(200):
            if self._process.poll() is not None:
                self.fail(f"the engine ended with code {self._process.returncode}")
            if time.perf_counter() - begin > MAX_SILENCE_S:
                self.fail(f"the engine said nothing for {MAX_SILENCE_S:.0f} s")
        message = self._codec.decode(self._socket.recv_multipart()[-1])
        if isinstance(message, AdapterRejected):
            self.fail(f"adapter {message.name} was rejected: {message.message}")
        if isinstance(message, EngineStats):
            self.seen.append(message)
        return message

    def greet(self) -> tuple[EngineInfo, EngineStats]:
        """What the engine says of itself, and its statistics now. Only while no request is open."""
        self.send(Hello())
        info: EngineInfo | None = None
        while True:
            message = self.receive()
            if isinstance(message, EngineInfo):
                info = message
            elif isinstance(message, EngineStats) and info is not None:
                return info, message

    def fail(self, reason: str) -> None:
        """End the script with a reason and the last lines of the engine's log."""
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise SystemExit("\n".join([f"error: {reason}; the end of its log:", *lines]))

    def stop(self) -> None:
        """Drain, so that a profile is written; kill what does not end in time."""
        if self._process.poll() is None:
            self.send(Drain(timeout_s=0.0))
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket.close()


def parse_engine_flags(flags: Sequence[str], model: str | None) -> Config:
    """The configuration that `fineinfer serve` makes of these flags; others than the engine's are errors."""
    parser = argparse.ArgumentParser(prog="serving.py ... --", add_help=False, allow_abbrev=False)
    for setting in SETTINGS.values():
        if setting.group in ("model", "memory", "scheduler") and setting.name != "model":
            parser.add_argument(setting.flag, dest=setting.name, nargs="?", const="true")
    try:
        return load_config(vars(parser.parse_args(flags)) | {"model": model})
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


# ---------------------------------------------------------------- one run of requests


@dataclass(slots=True)
class Progress:
    """What was received of one request; times of ``time.perf_counter``."""

    max_tokens: int
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def serve(engine: Engine, rng: random.Random, lengths: Lengths, adapters: Sequence[str] = ()) -> Row:
    """Submit requests of these (prompt, output) lengths at once, wait for all, return the measurements.

    Args:
        engine: Idle.
        rng: Draws the prompts.
        lengths: One request each.
        adapters: Names that the requests are spread over in turn; empty: the base model.
    """
    highest = min(MAX_TOKEN_ID, engine.info.vocab_size - 1)
    prompts = [[rng.randint(5, highest) for _ in range(num_prompt)] for num_prompt, _ in lengths]
    preempted = engine.greet()[1].num_preemptions_total
    progress = {str(i): Progress(num_output) for i, (_, num_output) in enumerate(lengths)}
    ticks: list[tuple[float, int]] = []
    begin, arrival_s, num_open = time.perf_counter(), time.monotonic(), len(lengths)
    for i, (prompt, (_, num_output)) in enumerate(zip(prompts, lengths, strict=True)):
        engine.send(
            AddRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
                adapter=adapters[i % len(adapters)] if adapters else None,
                arrival_s=arrival_s,
            )
        )
    while num_open:
        message = engine.receive()
        if not isinstance(message, Outputs):
            continue
        now, received = time.perf_counter(), 0
        for output in message.outputs:
            state = progress[output.request_id]
            if output.token_ids:
                state.first = state.first or now
                state.last = now
                state.tokens += len(output.token_ids)
                received += len(output.token_ids)
            if output.finish_reason is not None:
                num_open -= 1
                if output.finish_reason != "length" or state.tokens != state.max_tokens:
                    engine.fail(
                        f"a request ended with {output.finish_reason} after {state.tokens} of {state.max_tokens} "
                        f"tokens: {output.error_message}"
                    )
        ticks.append((now, received))
    preempted = engine.greet()[1].num_preemptions_total - preempted
    num_prompt_tokens = sum(num_prompt for num_prompt, _ in lengths)
    return summarize(begin, num_prompt_tokens, list(progress.values()), ticks) | {"preemptions": preempted}


def summarize(
    begin: float, num_prompt_tokens: int, requests: Sequence[Progress], ticks: Sequence[tuple[float, int]]
) -> Row:
    """Rates and latencies of a finished run.

    Args:
        begin: When the first request was sent.
        num_prompt_tokens: Of all requests.
        requests: Each with all its tokens.
        ticks: (time, tokens received) of every message.
    """
    wall = max(r.last for r in requests) - begin
    num_output = sum(r.tokens for r in requests)
    started, ended = max(r.first for r in requests), min(r.last for r in requests)
    in_window = sum(count for at, count in ticks if started < at <= ended)
    ttft = [1e3 * (r.first - begin) for r in requests]
    tpot = [1e3 * (r.last - r.first) / (r.tokens - 1) for r in requests if r.tokens > 1]
    return {
        "requests": len(requests),
        "wall_s": wall,
        "out_tok_s": num_output / wall,
        "total_tok_s": (num_prompt_tokens + num_output) / wall,
        "req_s": len(requests) / wall,
        "decode_tok_s": in_window / (ended - started) if ended > started else float("nan"),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "tpot_p50_ms": percentile(tpot, 0.5),
        "tpot_p99_ms": percentile(tpot, 0.99),
    }


def median_run(runs: Sequence[Row]) -> Row:
    """Each measurement's median over several runs."""
    return {key: median(float(str(run[key])) for run in runs) for key in runs[0]}


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Setup:
    """What every case needs."""

    engine: Engine
    config: Config
    rng: random.Random
    lengths: Lengths  # the first --num-prompts rows of the lengths file
    folder: Path  # for adapters


def warm_up(setup: Setup, lengths: Lengths) -> None:
    """A few requests of the case's kind, cut short."""
    serve(setup.engine, setup.rng, [(a, min(b, WARM_UP_OUTPUT)) for a, b in lengths[:8]])


def sharegpt(setup: Setup) -> list[Row]:
    warm_up(setup, setup.lengths)
    return [{"case": "sharegpt"} | serve(setup.engine, setup.rng, setup.lengths)]


def fixed_output(setup: Setup) -> list[Row]:
    lengths = [(num_prompt, 256) for num_prompt, _ in setup.lengths[:256]]
    warm_up(setup, lengths)
    return [{"case": "256x256"} | serve(setup.engine, setup.rng, lengths)]


def single(setup: Setup) -> list[Row]:
    lengths = [(128, 256)]
    warm_up(setup, lengths)
    return [{"case": "single"} | median_run([serve(setup.engine, setup.rng, lengths) for _ in range(ROUNDS)])]


def decode64(setup: Setup) -> list[Row]:
    """Wall time of a decode step less the time the device takes for it."""
    lengths = [(128, 256)] * 64
    serve(setup.engine, setup.rng, [(128, WARM_UP_OUTPUT)] * 64)
    rows = []
    for _ in range(ROUNDS):
        row = serve(setup.engine, setup.rng, lengths)
        device_ms = setup.engine.greet()[1].slice_times_ms["decode"]  # of the newest steps, all of 64 rows
        rows.append(row | {"exposed_ms": 1e3 * 64 / float(str(row["decode_tok_s"])) - device_ms})
    return [{"case": "decode64"} | median_run(rows)]


def lora(setup: Setup) -> list[Row]:
    """Base rows and adapter rows in turn, so that a drifting clock meets both."""
    rows = [(LORA_PROMPT, LORA_OUTPUT)] * LORA_ROWS
    serve(setup.engine, setup.rng, [(LORA_PROMPT, WARM_UP_OUTPUT)] * LORA_ROWS)
    without = median_run([serve(setup.engine, setup.rng, rows) for _ in range(ROUNDS)])  # before any is registered
    memory, names = setup.config.memory, [f"bench-{i}" for i in range(NUM_ADAPTERS)]
    if memory.max_loras < NUM_ADAPTERS or memory.max_lora_rank < ADAPTER_RANK:
        raise SystemExit(f"error: case lora needs --max-loras >= {NUM_ADAPTERS}, --max-lora-rank >= {ADAPTER_RANK}")
    if not set(names) <= set(setup.engine.greet()[1].adapters):
        setup.engine.send(*make_adapters(setup.config, names, setup.folder))
        while not set(names) <= set(setup.engine.greet()[1].adapters):
            time.sleep(0.05)
    for chosen in ((), names):  # all rows, so that every batch size that is measured has run
        serve(setup.engine, setup.rng, [(LORA_PROMPT, WARM_UP_OUTPUT)] * LORA_ROWS, chosen)
    runs: list[tuple[Row, Row]] = []
    for _ in range(ROUNDS):
        runs.append((serve(setup.engine, setup.rng, rows), serve(setup.engine, setup.rng, rows, names)))
    base, adapted = (median_run(side) for side in zip(*runs, strict=True))
    speed = [float(str(row["decode_tok_s"])) for row in (without, base, adapted)]
    unused, used = (100 * (speed[0] / other - 1) for other in speed[1:])
    return [
        {"case": "lora-none"} | without,
        {"case": "lora-unused"} | base | {"slower_percent": unused},
        {"case": f"lora-{NUM_ADAPTERS}"} | adapted | {"slower_percent": used},
    ]


def make_adapters(config: Config, names: Sequence[str], folder: Path) -> list[SetAdapter]:
    """Random adapters of the served model in PEFT's format, all seven modules; the messages that register them."""
    import torch  # slow to import, and only this case needs it

    from fineinfer.adapters.peft_io import content_hash, save_adapter
    from fineinfer.adapters.weights import LoraLayout, LoraWeights
    from fineinfer.model.loader import read_spec
    from fineinfer.model.resolve import resolve_model_path

    source = resolve_model_path(config.model.model, revision=config.model.revision, need_weights=False)
    spec = LoraSpec(r=ADAPTER_RANK, lora_alpha=2.0 * ADAPTER_RANK)
    layout = LoraLayout.uniform(read_spec(source)[1], spec)
    generator, messages = torch.Generator().manual_seed(0), []
    for name in names:
        directory = folder / name
        directory.mkdir()
        values = torch.empty(layout.num_parameters, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        save_adapter(LoraWeights(layout, values), spec, "base", directory)
        version = content_hash(directory)
        messages.append(SetAdapter(name=name, version=version, step=1, directory=str(directory)))
    return messages


CASES: dict[str, Callable[[Setup], list[Row]]] = {
    "sharegpt": sharegpt,
    "256x256": fixed_output,
    "single": single,
    "decode64": decode64,
    "lora": lora,
}
COLUMNS = (  # (name, decimals); one header for every case
    ("requests", 0), ("wall_s", 2), ("out_tok_s", 1), ("total_tok_s", 1), ("req_s", 2), ("decode_tok_s", 1),
    ("preemptions", 0), ("ttft_p50_ms", 1), ("ttft_p99_ms", 1), ("tpot_p50_ms", 2), ("tpot_p99_ms", 2),
    ("slower_percent", 1), ("exposed_ms", 2),
)  # fmt: skip


def print_row(row: Row) -> None:
    cells = [f"{float(str(row[name])):.{digits}f}" if name in row else "" for name, digits in COLUMNS]
    widths = [max(8, len(name)) for name, _ in COLUMNS]
    numbers = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    print(f"{row['case']!s:10s} {' '.join(numbers)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="CSV of prompt and output lengths (sharegpt, 256x256)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--num-prompts", type=int, default=1000, help="at most so many rows of --lengths")
    parser.add_argument("--repeat", type=int, default=1, help="run the chosen cases so many times")
    parser.add_argument("--model", help="serve this model instead of a shape with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--profile", type=Path, help="write the engine's host profile here")
    parser.add_argument("serve_flags", nargs="*", help="after --: engine flags of `fineinfer serve`")
    args = parser.parse_args()
    if args.lengths is None and {"sharegpt", "256x256"} & set(args.cases):
        parser.error("--lengths is needed for the cases sharegpt and 256x256")
    lengths = [] if args.lengths is None else read_lengths(args.lengths)[: args.num_prompts]
    flags = list(args.serve_flags)
    if args.model is None:
        flags = ["--load-format", "dummy", "--max-model-len", "4096", *flags]
    config = parse_engine_flags(flags, args.model or str(make_shape_folder(shape=args.shape)))
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    served = [args.model] if args.model else []
    command = f"{' '.join(['fineinfer serve', *served, *flags])} (benchmarks/serving.py {' '.join(own)})"
    with runtime_dir() as folder, tempfile.TemporaryDirectory(prefix="fineinfer-adapters-") as adapters:
        engine = Engine(config, folder, args.profile)
        try:
            print(f"{engine.info.device} {engine.info.dtype}: engine ready after {engine.start_s:.1f} s", flush=True)
            print(engine.words(), flush=True)
            print(" " * 10, *(name.rjust(max(8, len(name))) for name, _ in COLUMNS), flush=True)
            setup = Setup(engine, config, random.Random(1), lengths, Path(adapters))
            model = args.model or f"llama-{args.shape}-shape"
            stamp = {"start_s": engine.start_s, "model": model, "versions": versions(), "command": command}
            blank: Row = {"case": ""} | {name: "" for name, _ in COLUMNS}
            for case in [case for _ in range(args.repeat) for case in args.cases]:
                rows = CASES[case](setup)
                for row in rows:
                    print_row(row)
                write_csv(RESULTS, [blank | row | stamp for row in rows])
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
