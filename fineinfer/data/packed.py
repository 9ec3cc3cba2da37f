"""The tokenised data set on disk: one safetensors file that the engine maps, and its summary as JSON.

``dataset.safetensors`` holds ``offsets`` int64 [E+1], ``input_ids`` int32 [N] and ``loss_mask`` uint8 [N]: example e
is tokens ``offsets[e]:offsets[e+1]``; mask 1 at t means that token t itself is a target.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

DATASET_FILE = "dataset.safetensors"
SUMMARY_FILE = "dataset.json"


class DatasetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What dataset.json says; ``tokens`` counts all tokens, ``trainable_tokens`` those that carry loss."""

    sha256: str
    source_sha256: str
    examples: int
    tokens: int
    trainable_tokens: int
    longest: int
    max_seq_length: int
    masking: str  # generation_marks | prefix
    skipped: int = 0
    truncated: int = 0
    warnings: list[str] = []


@dataclass(frozen=True)
class PackedDataset:
    """The mapped arrays; see the module."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def example(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """(input_ids [T], loss_mask [T]) of one example."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[span], self.loss_mask[span]


class PackedWriter:
    """Writes examples one by one; memory does not grow with the tokens. Use as a context manager.

    Args:
        directory: Where ``dataset.safetensors`` appears, whole and synced, when ``finish`` returns.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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
        self._ids.write(np.asarray(input_ids, "<i4").tobytes())
        self._mask.write(bytes(loss_mask))
        self._offsets.append(self.tokens + len(input_ids))
        self.trainable_tokens += sum(loss_mask)
        self.longest = max(self.longest, len(input_ids))

    def finish(self) -> str:
        """Assemble the file and return its SHA-256 (hex)."""
        target = self._directory / DATASET_FILE
        part = target.with_suffix(".part")
        with part.open("wb") as out:
            out.write(self._header())
            out.write(np.frombuffer(self._offsets, "=i8").astype("<i8").tobytes())
            for spool in (self._ids, self._mask):
                spool.seek(0)
                shutil.copyfileobj(spool, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        digest = file_sha256(part)
        part.replace(target)
        return digest

    def _header(self) -> bytes:
        """The safetensors header; widest type first, so that every tensor is aligned."""
        tensors: dict[str, Any] = {}
        begin = 0
        layout = (("offsets", "I64", 8, self.examples + 1), ("input_ids", "I32", 4, self.tokens),
                  ("loss_mask", "U8", 1, self.tokens))  # fmt: skip
        for name, dtype, width, length in layout:
            end = begin + width * length
            tensors[name] = {"dtype": dtype, "shape": [length], "data_offsets": [begin, end]}
            begin = end
        text = msgspec.json.encode(tensors)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_dataset(directory: Path) -> PackedDataset:
    """Map the data set of a job folder.

    Raises:
        ValueError: The arrays do not fit together.
    """
    with safe_open(directory / DATASET_FILE, framework="np") as file:
        data = PackedDataset(*(file.get_tensor(name) for name in ("input_ids", "loss_mask", "offsets")))
    offsets = data.offsets
    fits = len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == len(data.input_ids) == len(data.loss_mask)
    if not fits or (np.diff(offsets) <= 0).any():
        raise ValueError(f"{directory / DATASET_FILE}: offsets, input_ids and loss_mask do not fit together")
    return data


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


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
