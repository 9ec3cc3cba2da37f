"""What the benchmarks share: a server to measure, a model shape without weights, rows, percentiles, CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_shape_folder(tokenizer_folder: Path) -> Path:
    """A model folder with the 8B shape and no weights (for ``--load-format dummy``); any tokenizer serves."""
    folder = Path(tempfile.mkdtemp(prefix="llama-8b-shape-"))
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer_folder / name).exists():
            shutil.copy(tokenizer_folder / name, folder / name)
    return folder


def write_rows(path: Path, count: int, words: int, seed: int = 0) -> None:
    """Chat rows of about ``words`` short words, all but a few of which carry loss."""
    rng = random.Random(seed)
    vocabulary = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "are", "with", "as", "his", "they", "at"]
    with path.open("w") as out:
        for i in range(count):
            answer = " ".join(rng.choice(vocabulary) for _ in range(words))
            messages = [{"role": "user", "content": f"Go on {i}."}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}) + "\n")


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) token counts of a lengths CSV."""
    with path.open() as file:
        return [(int(a), int(b)) for a, b in list(csv.reader(file))[1:]]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def card() -> str:
    """Name of the GPU, else of the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()} x{os.cpu_count()}"


def commit() -> str:
    """The checkout's commit, ``unknown`` outside a repository."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or os.environ.get("FINEINFER_COMMIT", "unknown")


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Append rows to a CSV; every row gets card, commit and date."""
    stamp = {"card": card(), "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    rows = [row | stamp for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
