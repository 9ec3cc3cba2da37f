"""What the benchmarks share: a server to measure, a model shape without weights, rows, percentiles, CSV."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import platform
import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
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
LLAMA_TINY = LLAMA_8B | {  # for a try on a small machine
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
SHAPES = {"8b": LLAMA_8B, "tiny": LLAMA_TINY}


def make_shape_folder(tokenizer_folder: Path | None = None, shape: str = "8b") -> Path:
    """A model folder with a shape of ``SHAPES`` and no weights (for ``--load-format dummy``).

    Any tokenizer serves; the engine alone needs none.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"llama-{shape}-shape-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if tokenizer_folder is not None and (tokenizer_folder / name).exists():
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


@functools.cache
def card() -> str:
    """Name of the GPU, else of the processor; asked of the driver's tool first, which opens no CUDA context here."""
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        if names and names[0].strip():
            return names[0].strip()
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()} x{os.cpu_count()}"


def versions() -> str:
    """Versions of Python and of what computes."""
    found = [f"python {platform.python_version()}"]
    for name in ("torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return " ".join(found)


def commit() -> str:
    """``FINEINFER_COMMIT``, else the checkout's commit, marked where files differ from it."""
    given = os.environ.get("FINEINFER_COMMIT")
    command = ["git", "describe", "--always", "--dirty=+changes", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return given or result.stdout.strip() or "unknown"


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
