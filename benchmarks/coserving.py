"""Requests and training on one engine: Poisson arrivals of real lengths, with and without a job beside them.

    python benchmarks/coserving.py --lengths sharegpt_lengths.csv --rate 16 --seconds 60 --tokenizer FOLDER -- \
        --policy inference-first

Everything after ``--`` goes to `fineinfer serve`. Without --model the 8B shape with random weights is served. Prints a
table and writes benchmarks/results/coserving.csv: inference alone, training alone, both together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from harness import make_shape_folder, percentile, read_lengths, write_csv, write_rows

from fineinfer.cli.local_server import local_server

DRAIN_S = 20.0  # requests that have not ended this long after the last arrival are cancelled and counted
JOB = {  # four rows of about 1,000 tokens are one micro-batch and one update; no checkpoint while measuring
    "n_epochs": 50,
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_seq_length": 2048,
    "save_steps": 10000,
}
RESULTS = Path(__file__).parent / "results" / "coserving.csv"


async def one_request(client: openai.AsyncOpenAI, model: str, prompt: list[int], max_tokens: int) -> dict[str, float]:
    start = time.perf_counter()
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
    )
    first = last = 0.0
    async for chunk in stream:
        if chunk.choices:
            last = time.perf_counter()
            first = first or last
    return {"ttft": first - start, "tpot": (last - first) / max(1, max_tokens - 1), "tokens": max_tokens, "end": last}


async def poisson(url: str, lengths: list[tuple[int, int]], rate: float, seconds: float) -> dict[str, float]:
    """Open-loop arrivals for ``seconds``; every request counts, also those that end later."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", timeout=600, max_retries=0)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    rng, tasks, begin = random.Random(7), [], time.perf_counter()
    tokens_before, due = trained_tokens(url), 0.0
    trained = 0.0
    while True:
        due += rng.expovariate(rate)
        if due > seconds:
            break
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        num_prompt, num_output = rng.choice(lengths)
        prompt = [rng.randint(5, 48000) for _ in range(num_prompt)]
        tasks.append(asyncio.create_task(one_request(client, model, prompt, num_output)))
    await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    trained = (trained_tokens(url) - tokens_before) / seconds
    _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
    for task in late:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    done = [r for r in outcomes if isinstance(r, dict)]
    wall = max([r["end"] for r in done], default=begin) - begin
    ttft, tpot = [1e3 * r["ttft"] for r in done], [1e3 * r["tpot"] for r in done if r["tokens"] > 1]
    return {
        "requests": len(done),
        "unfinished": len(late),
        "failed": len(tasks) - len(done) - len(late),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "tpot_p50_ms": percentile(tpot, 0.5),
        "tpot_p99_ms": percentile(tpot, 0.99),
        "output_tok_s": sum(r["tokens"] for r in done) / max(wall, 1e-9),
        "train_tok_s": trained,
    }


def trained_tokens(url: str) -> float:
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith("fineinfer:train_tokens_total"):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def start_job(url: str, rows: Path, settings: dict[str, object]) -> str:
    """Upload, create, wait until the second update is done; returns the job id."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    with rows.open("rb") as file:
        upload = httpx.post(f"{url}/v1/files", files={"file": file}, data={"purpose": "fine-tune"}, timeout=120).json()
    body = {
        "model": model,
        "training_file": upload["id"],
        "method": {"type": "supervised", "supervised": {"hyperparameters": settings}},
    }
    job = httpx.post(f"{url}/v1/fine_tuning/jobs", json=body, timeout=60).json()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        state = httpx.get(f"{url}/v1/fine_tuning/jobs/{job['id']}", timeout=60).json()
        if (state.get("progress") or {}).get("step", 0) >= 2:
            return str(job["id"])
        if state["status"] in ("failed", "cancelled"):
            raise SystemExit(f"the job ended: {state['error']}")
        time.sleep(0.2)
    raise SystemExit("the job made no step in 300 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--rate", type=float, nargs="+", default=[16.0], help="requests per second, one run each")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer files for the 8B shape")
    parser.add_argument("--model", help="serve this model instead of the 8B shape")
    parser.add_argument("--row-words", type=int, default=1000)
    parser.add_argument("--profile", type=Path, help="write the engine's host profile here")
    parser.add_argument("serve_flags", nargs="*")
    args = parser.parse_args()
    if args.model is None:
        flags = [
            str(make_shape_folder(args.tokenizer)),
            "--load-format",
            "dummy",
            "--served-model-name",
            "llama-8b-shape",
        ]
        flags += ["--max-model-len", "4096"]
    else:
        flags = [args.model]
    flags += args.serve_flags
    rows = Path(tempfile.mkdtemp()) / "rows.jsonl"
    write_rows(rows, 512, args.row_words)
    lengths = read_lengths(args.lengths)
    if args.profile is not None:
        os.environ["FINEINFER_ENGINE_PROFILE"] = str(args.profile.absolute())
    command = " ".join(["fineinfer serve", *flags[1:]])
    table: list[dict[str, object]] = []
    with local_server(*flags) as server:
        server.wait_until_ready(300, lambda line: None)
        url = server.url
        asyncio.run(poisson(url, [(64, 8)], args.rate[0], 2))  # warm-up
        for rate in args.rate:
            measured = asyncio.run(poisson(url, lengths, rate, min(20.0, args.seconds)))
            table.append({"case": "inference alone", "rate": rate} | measured)
        start_job(url, rows, JOB)
        before, begin = trained_tokens(url), time.perf_counter()
        time.sleep(min(20.0, args.seconds))
        alone = (trained_tokens(url) - before) / (time.perf_counter() - begin)
        blank = dict.fromkeys(measured, float("nan"))
        table.append({"case": "training alone", "rate": 0.0} | blank | {"train_tok_s": alone})
        for rate in args.rate:
            table.append({"case": "both", "rate": rate} | asyncio.run(poisson(url, lengths, rate, args.seconds)))
    for row in table:
        numbers = " ".join(f"{key} {value:.1f}" for key, value in row.items() if isinstance(value, (int, float)))
        print(f"{row['case']:16s} {numbers}")
    write_csv(RESULTS, [row | {"command": command} for row in table])


if __name__ == "__main__":
    sys.exit(main())
