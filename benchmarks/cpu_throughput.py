"""The engine against transformers and PEFT on this machine's CPU: ragged serving, ragged training, same dtype and run.

    python benchmarks/cpu_throughput.py

Serving: 32 requests at once, prompts of 8 to 256 tokens, each its own max_tokens of 16 to 128, against `generate` on
the padded batch (which runs until the longest has ended); useful tokens per second. Training: 4 ragged rows, kept
activations, against the better of PEFT padded and PEFT row by row. Both sides take turns in one process (a machine's
speed drifts by tens of percent within minutes), with the engine's malloc settings, which help both. Writes
benchmarks/results/cpu_throughput.csv.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import torch
import zmq
from harness import write_csv
from transformers import AutoModelForCausalLM

from fineinfer.data.packed import write_dataset
from fineinfer.engine import process
from fineinfer.engine.loop import EngineLoop
from fineinfer.engine.settings import EngineSettings
from fineinfer.ipc import Codec
from fineinfer.messages import AddRequest, FromEngine, LoraSpec, StartJob, ToEngine, TrainingSettings
from fineinfer.model.gguf import converted_gguf, embedded_gguf
from fineinfer.request import SamplingParams

RESULTS = Path(__file__).parent / "results" / "cpu_throughput.csv"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Client:
    """Talks to an engine loop of this process over its own socket, as an api worker would."""

    def __init__(self, address: str, token: bytes) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._token = token
        self._codec = Codec(FromEngine)

    def send(self, message: ToEngine) -> None:
        """Queue one message for the engine."""
        self._socket.send_multipart([self._token, self._codec.encode(message)])


def serve_ours(loop: EngineLoop, client: Client, requests) -> tuple[float, float, float]:
    """(prefill seconds, decode seconds, tokens): turns of the loop with prompt rows left, and the others."""
    for i, (prompt, num_new) in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        client.send(
            AddRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_s=time.monotonic())
        )
    opened = loop.parts.desk.open
    while len(opened) < len(requests):  # all at once: none runs before the last has arrived
        loop.parts.inbox.wait(0.01)
        loop.parts.inbox.drain()
    prefill = decode = 0.0
    while opened:
        prefilling = any(sequence.num_computed < len(sequence.prompt) for sequence in opened.values())
        begin = time.perf_counter()
        loop.step()
        seconds = time.perf_counter() - begin
        prefill, decode = (prefill + seconds, decode) if prefilling else (prefill, decode + seconds)
    return prefill, decode, sum(num_new for _, num_new in requests)


def serve_transformers(model, requests) -> tuple[float, float, float]:
    width, longest = max(len(p) for p, _ in requests), max(n for _, n in requests)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in requests])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests])
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **options)
        prefill = time.perf_counter() - begin
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=longest, **options)
        total = time.perf_counter() - begin
    return prefill, total - prefill, sum(n for _, n in requests)


def start_job(loop: EngineLoop, client: Client, rows: list[list[int]], updates: int) -> Callable[[], None]:
    """Start a job whose every update is these rows; returns a function that runs the loop for one update."""
    folder = Path(tempfile.mkdtemp())
    job = folder / "job"
    job.mkdir()
    sha = write_dataset(job, [(row, [0] + [1] * (len(row) - 1)) for row in rows])
    settings = TrainingSettings(
        n_epochs=updates + 2,
        batch_size=len(rows),
        gradient_accumulation_steps=1,
        lora=LoraSpec(r=16),
        recompute="never",
        save_steps=10**6,
    )
    client.send(
        StartJob(
            job_id="bench",
            name="bench",
            base_model="m",
            job_dir=str(job),
            adapters_dir=str(folder / "adapters"),
            dataset_sha256=sha,
            settings=settings,
        )
    )
    training = loop.parts.training
    while training.trainer is None:
        loop.step()
    trainer = training.trainer

    def one_update() -> None:
        done = trainer.step
        while trainer.step == done:
            loop.step()

    return one_update


def peft_steps(model, rows: list[list[int]]) -> dict[str, Callable[[], None]]:
    """One optimizer update in each of PEFT's two ways."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def padded() -> None:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        step()

    def row_by_row() -> None:
        for row in rows:
            tensor = torch.tensor([row])
            (model(input_ids=tensor, labels=tensor).loss * len(row)).backward()
        step()

    return {"padded": padded, "row by row": row_by_row}


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare_serving(loop: EngineLoop, client: Client, model, requests, rounds: int) -> list[dict[str, object]]:
    """Whole, prefill and decode, each the median over rounds in which both sides take turns."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(serve_ours(loop, client, requests))
        theirs.append(serve_transformers(model, requests))
    tokens, table = ours[0][2], []
    for case, pick in (("serving", lambda t: t[0] + t[1]), ("prefill", lambda t: t[0]), ("decode", lambda t: t[1])):
        a, b = median(pick(t) for t in ours), median(pick(t) for t in theirs)
        table.append(
            {
                "case": case,
                "ours_tok_s": tokens / a,
                "peer": "generate, padded",
                "peer_tok_s": tokens / b,
                "ratio": b / a,
            }
        )
    return table


def compare_training(loop: EngineLoop, client: Client, model, rows, rounds: int) -> dict[str, object]:
    """Updates of ours and of PEFT's two ways in turn; against the faster of the two."""
    update, peft = start_job(loop, client, rows, rounds), peft_steps(model, rows)
    for warm_up in (update, *peft.values()):
        warm_up()
    times: dict[str, list[float]] = {name: [] for name in ("ours", *peft)}
    for _ in range(rounds):
        times["ours"].append(seconds(update))
        for name, call in peft.items():
            times[name].append(seconds(call))
    medians = {name: median(values) for name, values in times.items()}
    best, tokens = min(peft, key=lambda name: medians[name]), sum(len(row) for row in rows)
    return {
        "case": "training",
        "ours_tok_s": tokens / medians["ours"],
        "peer": f"PEFT {best}",
        "peer_tok_s": tokens / medians[best],
        "ratio": medians[best] / medians["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="training updates of each side")
    parser.add_argument("--serving-rounds", type=int, default=2)
    args = parser.parse_args()
    path, rng = converted_gguf(embedded_gguf()), random.Random(3)
    requests = [([rng.randint(5, 40000) for _ in range(rng.randint(8, 256))], rng.randint(16, 128)) for _ in range(32)]
    rows = [[rng.randint(5, 40000) for _ in range(n)] for n in (103, 151, 188, 247)]
    address, token = f"ipc://{tempfile.mkdtemp()}/engine", b"t" * 32
    settings = EngineSettings(model=str(path), base_model="m", engine_address=address, dtype="float32", device="cpu")
    loop, client = process.build_engine(settings, token), Client(address, token)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    serve_ours(loop, client, [(prompt[:16], 4) for prompt, _ in requests[:4]])  # warm-up
    psutil.cpu_percent(None)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    table = compare_serving(loop, client, model, requests, args.serving_rounds)
    table.append(compare_training(loop, client, model, rows, args.rounds))
    own = (time.process_time() - begin_cpu) / ((time.perf_counter() - begin) * (os.cpu_count() or 1))
    others = max(0.0, psutil.cpu_percent(None) / 100 - own)
    for row in table:
        row["cpu_share_of_others"] = others
        peer = f"{row['peer']} {row['peer_tok_s']:.1f}"
        print(f"{row['case']:9s} ours {row['ours_tok_s']:.1f} tok/s  {peer} tok/s  x{row['ratio']:.2f}")
    print(f"CPU share of other processes meanwhile: {100 * others:.0f} %")
    write_csv(RESULTS, table)


if __name__ == "__main__":
    main()
