"""How fast training files are judged, and in how much memory: rows a minute on one core, peak bytes by file size.

    python benchmarks/data_check.py --rows 1000000 --with-tokens

Rows are chats of about 220 tokens (words of English under a chat template), one in a hundred of them bad. Every size
runs in a process of its own, since a peak is never given back. ``--with-tokens`` judges templates, masks and lengths
too, with the embedded model's tokenizer; without it only the rows' form is looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import commit, versions, write_csv

RESULTS = Path(__file__).parent / "results" / "data_check.csv"
TEXT = (
    "if she buys twelve dozen eggs every week for two hours how many apples does each of her friends get then we know"
)


def write_file(path: Path, num_rows: int) -> None:
    """Chats with a few words, numbers and a bad row every hundred."""
    draw, words = random.Random(0), TEXT.split()
    texts = [" ".join(draw.choices(words, k=60)) + f" {draw.randint(1, 999)}." for _ in range(997)]
    with path.open("w") as out:
        for number in range(num_rows):
            messages = [
                {"role": "system", "content": "You solve problems step by step."},
                {"role": "user", "content": f"{number}: {texts[number % 997]}"},
                {"role": "assistant", "content": f"{texts[number * 7 % 997]} {texts[number * 3 % 997]}"},
            ]
            out.write(json.dumps({"messages": messages[: 2 if number % 100 == 99 else 3]}) + "\n")


def judge(path: Path, with_tokens: bool) -> None:
    """Print what the child found as JSON; runs in a process of its own, on one core."""
    from fineinfer.data.prepare import DataSettings, Judge

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokenizer = None
    if with_tokens:
        from fineinfer.model.resolve import resolve_model_path
        from fineinfer.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve_model_path(None, revision=None, need_weights=False))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    wall, cpu = time.perf_counter(), time.process_time()
    it = Judge(path, DataSettings(skip_invalid=True), 2048, (lambda: tokenizer) if with_tokens else None)
    num_tokens = sum(len(ids) for _, ids, _ in it.examples())
    report = it.report()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({
        "rows": report.rows, "bad_rows": report.bad_rows, "with_tokens": with_tokens, "tokens": num_tokens,
        "rows_per_minute": round(report.rows / wall * 60), "rows_per_cpu_minute": round(report.rows / cpu * 60),
        "peak_mib": round(after / 2**20), "grown_mib": round((after - before) / 2**20, 1),
    }))  # fmt: skip


def main() -> int:
    """Measure each size and append the rows to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--with-tokens", action="store_true")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge is not None:
        judge(options.judge, options.with_tokens)
        return 0
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in options.rows:
            path = Path(folder) / "rows.jsonl"
            write_file(path, num_rows)
            command = [sys.executable, __file__, "--judge", str(path), *["--with-tokens"] * options.with_tokens]
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            row = json.loads(done.stdout) | {"file_mib": round(path.stat().st_size / 2**20), "versions": versions()}
            print(row, commit(), flush=True)
            rows.append(row)
    write_csv(RESULTS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
