"""The engine against transformers and PEFT on this machine's CPU: ragged serving, ragged training, same dtype and run.

    python benchmarks/cpu_throughput.py

Serving: 32 requests at once, prompts of 8 to 256 tokens, each its own max_tokens of 16 to 128, against `generate` on
the padded batch (which runs until the longest has ended); useful tokens per second. Training: 4 ragged rows, kept
activations, against the better of PEFT padded and PEFT row by row. Writes benchmarks/results/cpu_throughput.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def train_ours(loop: EngineLoop, client: Client, rows: list[list[int]], updates: int) -> float:
    """Tokens per second over whole updates, the first one left out."""
    folder = Path(tempfile.mkdtemp())
    job = folder / "job"
    job.mkdir()
    sha = write_dataset(job, [(row, [0] + [1] * (len(row) - 1)) for row in rows])
    settings = TrainingSettings(
        n_epochs=updates + 1,
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
    while training.trainer is None or training.trainer.step < 1:
        loop.step()
    trainer, begin = training.trainer, time.perf_counter()
    while trainer.step < updates + 1:
        loop.step()
    return updates * sum(len(row) for row in rows) / (time.perf_counter() - begin)


def train_peft(model, rows: list[list[int]], updates: int) -> dict[str, float]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)

    def padded() -> None:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()

    def row_by_row() -> None:
        for row in rows:
            tensor = torch.tensor([row])
            (model(input_ids=tensor, labels=tensor).loss * len(row)).backward()

    speeds = {}
    for name, step in (("padded", padded), ("row by row", row_by_row)):
        for count in (1, updates):
            begin = time.perf_counter()
            for _ in range(count):
                step()
                optimizer.step()
                optimizer.zero_grad()
            speeds[name] = count * sum(len(row) for row in rows) / (time.perf_counter() - begin)
    return speeds


def peers(path: Path, requests, rows, updates: int) -> dict[str, object]:
    """transformers and PEFT; run in a process of their own, with malloc as their users have it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return {"serving": serve_transformers(model, requests), "training": train_peft(model, rows, updates)}


def ours(path: Path, requests, rows, updates: int) -> dict[str, object]:
    """The loop of `fineinfer serve --dtype float32 --device cpu`, driven turn by turn in this process."""
    address, token = f"ipc://{tempfile.mkdtemp()}/engine", b"t" * 32
    settings = EngineSettings(model=str(path), base_model="m", engine_address=address, dtype="float32", device="cpu")
    loop, client = process.build_engine(settings, token), Client(address, token)
    serve_ours(loop, client, [(prompt[:16], 4) for prompt, _ in requests[:4]])  # warm-up
    return {"serving": serve_ours(loop, client, requests), "training": train_ours(loop, client, rows, updates)}


def in_own_process(side: str, updates: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--side", side, "--updates", str(updates)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(result.stderr[-2000:])
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "peers"), help="measure one side and print JSON")
    args = parser.parse_args()
    path, rng = converted_gguf(embedded_gguf()), random.Random(3)
    requests = [([rng.randint(5, 40000) for _ in range(rng.randint(8, 256))], rng.randint(16, 128)) for _ in range(32)]
    rows = [[rng.randint(5, 40000) for _ in range(n)] for n in (103, 151, 188, 247)]
    if args.side is not None:
        print(json.dumps({"ours": ours, "peers": peers}[args.side](path, requests, rows, args.updates)))
        return
    psutil.cpu_percent(None)
    begin, begin_cpu = time.perf_counter(), sum(os.times()[:4])
    engine, theirs = in_own_process("ours", args.updates), in_own_process("peers", args.updates)
    wall, busy = time.perf_counter() - begin, psutil.cpu_percent(None) / 100
    others = max(0.0, busy - (sum(os.times()[:4]) - begin_cpu) / (wall * (os.cpu_count() or 1)))
    (prefill, decode, tokens), (peer_prefill, peer_decode, _) = engine["serving"], theirs["serving"]
    table = [
        {"case": case, "ours_tok_s": tokens / a, "peer": "generate, padded", "peer_tok_s": tokens / b}
        for case, a, b in (
            ("serving", prefill + decode, peer_prefill + peer_decode),
            ("prefill", prefill, peer_prefill),
            ("decode", decode, peer_decode),
        )
    ]
    best = max(theirs["training"], key=theirs["training"].get)
    speed = theirs["training"][best]
    table.append({"case": "training", "ours_tok_s": engine["training"], "peer": f"PEFT {best}", "peer_tok_s": speed})
    for row in table:
        row |= {"ratio": row["ours_tok_s"] / row["peer_tok_s"], "cpu_share_of_others": others}
        peer = f"{row['peer']} {row['peer_tok_s']:.1f}"
        print(f"{row['case']:9s} ours {row['ours_tok_s']:.1f} tok/s  {peer} tok/s  x{row['ratio']:.2f}")
    print(f"CPU share of other processes meanwhile: {100 * others:.0f} %")
    write_csv(RESULTS, table)


if __name__ == "__main__":
    main()
