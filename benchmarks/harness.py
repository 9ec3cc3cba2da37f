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
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from fineinfer.messages import LoraSpec, StartJob, TrainingSettings

NUM_EPOCHS = 1000  # a job never ends before it is cancelled
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


ENGLISH = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "are", "with", "as", "his", "they", "at")
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_shape_folder(shape: str = "8b", tokenizer: bool = False) -> Path:
    """A model folder with a shape of ``SHAPES`` and no weights (for ``--load-format dummy``).

    Args:
        shape: Name of the shape.
        tokenizer: Also write a tokenizer, which the engine alone needs none of. Each of its ids is a word, so a
            stream shows every token at once, whatever a model without weights says.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"llama-{shape}-shape-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    if tokenizer:
        write_word_tokenizer(folder, int(str(SHAPES[shape]["vocab_size"])))
    return folder


def write_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose id i is the word ``w<i>``, but for a few special tokens and the roles of a chat."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, "user", "assistant", "system"]
    words += [f"w{i}" for i in range(len(words), vocab_size)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, count: int, words: int, vocabulary: Sequence[str] = ENGLISH, seed: int = 0) -> None:
    """Chat rows of about ``words`` words of a token each, all but a few of which carry loss."""
    rng = random.Random(seed)
    with path.open("w") as out:
        for i in range(count):
            answer = " ".join(rng.choice(vocabulary) for _ in range(words))
            question = f"{vocabulary[i % len(vocabulary)]} {vocabulary[i // len(vocabulary) % len(vocabulary)]}"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
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
    """Append rows to a CSV; every row gets card, commit and date. Columns that are new are empty in older rows."""
    stamp = {"card": card(), "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    path.parent.mkdir(parents=True, exist_ok=True)
    written: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            written = list(csv.DictReader(file))
    written += [row | stamp for row in rows]
    columns = dict.fromkeys(name for row in written for name in row if name not in stamp)
    whole = path.with_suffix(".tmp")  # a run that is cut off while it writes loses no older row
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*columns, *stamp], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(written)
    whole.replace(path)


def make_job(folder: Path, rows: int, length: int, vocab_size: int, recompute: str = "auto") -> StartJob:
    """A job for an engine without a server around it: random rows, an update of ``rows`` of them each, rank 16, no end.

    Args:
        folder: New; the job's files.
        rows: Of an update, which is one micro-batch.
        length: Tokens of a row, all trained.
        vocab_size: Of the model.
        recompute: As in the job's settings.
    """
    import numpy as np

    from fineinfer.data.packed import write_dataset

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, vocab_size, length).tolist(), [1] * length) for _ in range(4 * rows)]
    settings = TrainingSettings(
        lora=LoraSpec(r=16, lora_alpha=32), n_epochs=NUM_EPOCHS, batch_size=rows, gradient_accumulation_steps=1,
        micro_batch_tokens=rows * length, recompute=recompute, save_steps=1 << 30,
    )  # fmt: skip
    return StartJob(
        job_id=folder.name, name=folder.name, base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder / "adapters"), dataset_sha256=write_dataset(folder, data),
    )  # fmt: skip


class OtherLoad:
    """Share of this machine's processors that processes other than this one and its children take."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)
        self._begin_s, self._begin_cpu_s = time.perf_counter(), _own_cpu_s()

    def share(self) -> float:
        """Since the object was made; processes that have ended meanwhile count as others."""
        total_s = (time.perf_counter() - self._begin_s) * (os.cpu_count() or 1)
        return max(0.0, psutil.cpu_percent(None) / 100 - (_own_cpu_s() - self._begin_cpu_s) / max(total_s, 1e-9))


def _own_cpu_s() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
