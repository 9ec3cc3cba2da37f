"""The tokenised data set on disk: one safetensors file that the engine maps, and its summary as JSON.

``dataset.safetensors`` holds ``offsets`` int64 [E+1], ``input_ids`` int32 [N] and ``loss_mask`` uint8 [N]: example e
is tokens ``offsets[e]:offsets[e+1]``; mask 1 at t means that token t itself is a target. ``eval.safetensors`` holds
the evaluation set likewise, if the job has one.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from fineinfer.hashing import file_sha256

DATASET_FILE = "dataset.safetensors"
EVAL_FILE = "eval.safetensors"
SUMMARY_FILE = "dataset.json"


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What dataset.json says of the evaluation set.

    Attributes:
        source_sha256: Of the file that the rows come from: the validation file, or the training file that was split.
        examples: Rows that are evaluated; with ``skipped`` they are all rows of a validation file.
        overlap: Rows of a validation file that the training file has too; at least so many.
    """

    sha256: str
    source_sha256: str
    examples: int
    tokens: int
    trainable_tokens: int
    longest: int
    skipped: int = 0
    problems: dict[str, int] = {}
    truncated: int = 0
    overlap: int = 0


class DatasetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What dataset.json says.

    Attributes:
        examples: Rows that are trained; with ``skipped``, and those split off for ``eval``, all rows of it.
        tokens: All tokens of the examples; ``trainable_tokens`` those that carry loss.
        format: Format of the rows, see fineinfer.data.formats.
        skipped: Rows left out, as the job asked for; ``problems`` counts why, by code.
        truncated: Examples cut to ``max_seq_length``, as the job asked for.
    """

    sha256: str
    source_sha256: str
    examples: int
    tokens: int
    trainable_tokens: int
    longest: int
    max_seq_length: int
    masking: str  # generation_marks | prefix
    format: str = "openai_chat"
    skipped: int = 0
    problems: dict[str, int] = {}
    truncated: int = 0
    warnings: list[str] = []
    eval: EvalSummary | None = None


class PackedWriter:
    """Writes examples one by one, spooled to disk until the end. Use as a context manager.

    Args:
        directory: Where the file appears, whole and synced, when ``finish`` returns.
        name: The file's name.
    """

    def __init__(self, directory: Path, name: str = DATASET_FILE) -> None:
        self._directory, self._name = directory, name
        self._ids: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._mask: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._offsets = array("q", [0])
        self.trainable_tokens = 0
        self.longest = 0

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        self._mask.close()

    @property
    def examples(self) -> int:
        """Examples so far."""
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._offsets[-1]

    def add(self, input_ids: list[int], loss_mask: list[int]) -> None:
        """Append one example; both lists have one entry a token."""
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"{len(input_ids)} ids but {len(loss_mask)} mask entries")
        self._ids.write(np.asarray(input_ids, np.int32).tobytes())
        self._mask.write(bytes(loss_mask))
        self._offsets.append(self.tokens + len(input_ids))
        self.trainable_tokens += sum(loss_mask)
        self.longest = max(self.longest, len(input_ids))

    def finish(self) -> str:
        """Assemble the file and return its SHA-256 (hex)."""
        target = self._directory / self._name
        part = target.with_suffix(".part")
        tensors = {
            "offsets": np.array(self._offsets, np.int64),
            "input_ids": self._mapped(self._ids, np.int32),
            "loss_mask": self._mapped(self._mask, np.uint8),
        }
        save_file(tensors, part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        digest = file_sha256(part)
        part.replace(target)
        return digest

    def _mapped(self, spool: IO[bytes], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A spooled column as an array [num_tokens]."""
        spool.flush()
        if self.tokens == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(spool, dtype, mode="r", shape=(self.tokens,))


def write_dataset(directory: Path, rows: Iterable[tuple[list[int], list[int]]]) -> str:
    """Write a whole data set of (input_ids, loss_mask) rows; returns the file's SHA-256 (hex)."""
    with PackedWriter(directory) as writer:
        for input_ids, loss_mask in rows:
            writer.add(input_ids, loss_mask)
        return writer.finish()


def write_summary(directory: Path, summary: DatasetSummary) -> None:
    """Write dataset.json; its presence means that the data set is complete."""
    part = directory / (SUMMARY_FILE + ".part")
    with part.open("wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(summary), indent=2))
        out.flush()
        os.fsync(out.fileno())
    part.replace(directory / SUMMARY_FILE)


def read_summary(directory: Path) -> DatasetSummary:
    """Read dataset.json."""
    return msgspec.json.decode((directory / SUMMARY_FILE).read_bytes(), type=DatasetSummary)
