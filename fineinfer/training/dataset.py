"""The packed training file: token ids, loss mask and offsets, and the order in which updates read them.

Everything here is a pure function of the file, the settings and the step, so a resumed job reads the same batches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fineinfer.hashing import file_sha256
from fineinfer.messages import TrainingSettings
from fineinfer.training.dropout import row_keys
from fineinfer.training.errors import TrainingError
from fineinfer.training.hashes import splitmix64

_CHECK_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences laid end to end; positions restart at each boundary.

    Attributes:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64, from 0 in each sequence.
        rope_lengths: [num_tokens] int64, length of the row's sequence.
        cu_seqlens: Boundaries, from 0 to num_tokens.
        target_rows: [num_targets] int64: rows whose next token is trained.
        target_ids: [num_targets] int64: those next tokens.
        target_bounds: Where the targets of each sequence end: 0, those of the first, ..., num_targets.
        dropout_keys: [num_tokens] int32 of ``dropout.row_keys``; None: nothing is dropped.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    cu_seqlens: list[int]
    target_rows: torch.Tensor
    target_ids: torch.Tensor
    target_bounds: list[int]
    dropout_keys: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the micro-batch."""
        return self.cu_seqlens[-1]

    @property
    def num_targets(self) -> int:
        """Trained tokens of the micro-batch."""
        return self.target_ids.shape[0]

    def split(self, max_tokens: int) -> list[MicroBatch]:
        """Two micro-batches, the first with as many sequences as ``max_tokens`` hold but at least one; or just itself.

        Does not wait for the device: the bounds are known on the host.
        """
        fitting = sum(end <= max_tokens for end in self.cu_seqlens[1:])
        first = max(1, fitting)
        if first >= len(self.cu_seqlens) - 1:
            return [self]
        cut, target, keys = self.cu_seqlens[first], self.target_bounds[first], self.dropout_keys
        return [
            MicroBatch(
                self.input_ids[:cut], self.positions[:cut], self.rope_lengths[:cut], self.cu_seqlens[: first + 1],
                self.target_rows[:target], self.target_ids[:target], self.target_bounds[: first + 1],
                None if keys is None else keys[:cut],
            ),
            MicroBatch(
                self.input_ids[cut:], self.positions[cut:], self.rope_lengths[cut:],
                [end - cut for end in self.cu_seqlens[first:]], self.target_rows[target:] - cut,
                self.target_ids[target:], [end - target for end in self.target_bounds[first:]],
                None if keys is None else keys[cut:],
            ),
        ]  # fmt: skip


class PackedDataset:
    """``dataset.safetensors`` of a job: input_ids int32 [N], loss_mask uint8 [N], offsets int64 [E + 1].

    ``loss_mask[t] = 1`` means that token t is predicted from the tokens before it in its sequence; a sequence's
    first token has none and is never a target. Sequences without a target are left out (and counted).

    Args:
        path: The file; read on demand, one update at a time.
        sha256: Expected hash of the file.

    Raises:
        TrainingError: Missing, damaged, another file than expected, or nothing to train on.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        try:
            digest = file_sha256(path)
            if digest != sha256:
                raise TrainingError(f"{path.name} has SHA-256 {digest}, expected {sha256}", "dataset_changed")
            self._file = safe_open(path, framework="np")
            offsets = self._file.get_tensor("offsets")
            mask = self._file.get_tensor("loss_mask")
            sizes = {name: self._file.get_slice(name).get_shape() for name in ("input_ids", "loss_mask")}
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{path.name} cannot be read: {error}", "dataset_unreadable") from error
        lengths = np.diff(offsets)
        if len(offsets) < 2 or offsets[0] != 0 or (lengths < 1).any():
            raise TrainingError(f"{path.name}: offsets are not rising from 0", "dataset_unreadable")
        if any(shape != [int(offsets[-1])] for shape in sizes.values()):
            raise TrainingError(f"{path.name}: tensor sizes {sizes} do not fit the offsets", "dataset_unreadable")
        counts = np.add.reduceat(mask != 0, offsets[:-1], dtype=np.int64) - (mask[offsets[:-1]] != 0)
        self._offsets = offsets
        self._examples, self._num_targets = np.flatnonzero(counts > 0), counts
        self.num_skipped = len(counts) - len(self._examples)
        if not len(self._examples):
            raise TrainingError(f"{path.name}: no example has a trained token", "no_trained_tokens")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise TrainingError unless every id is a token of the model (on a GPU a wrong one would end the process)."""
        ids, total = self._file.get_slice("input_ids"), int(self._offsets[-1])
        for start in range(0, total, _CHECK_CHUNK_TOKENS):
            chunk = ids[start : min(start + _CHECK_CHUNK_TOKENS, total)]
            if chunk.min() < 0 or chunk.max() >= vocab_size:
                raise TrainingError(f"the data has token ids outside 0 to {vocab_size - 1}", "dataset_unreadable")

    @property
    def examples(self) -> list[int]:
        """Numbers of the examples that have at least one trained token, in the order of the file."""
        return list(map(int, self._examples))

    def num_targets(self, example: int) -> int:
        """Trained tokens of one example."""
        return int(self._num_targets[example])

    @property
    def num_examples(self) -> int:
        """Examples that have at least one trained token."""
        return len(self._examples)

    def length(self, example: int) -> int:
        """Tokens of one example."""
        return int(self._offsets[example + 1] - self._offsets[example])

    def longest(self, count: int) -> list[int]:
        """Lengths of the ``count`` longest examples that are trained, longest first."""
        lengths = np.diff(self._offsets)[self._examples]
        return sorted(lengths.tolist(), reverse=True)[:count]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Example numbers of one epoch in training order.

        Sorted by a hash of (seed, epoch, example) (splitmix64), so no library's random stream decides it.
        """
        state = np.array([seed & (2**64 - 1), epoch], dtype=np.uint64)
        key = splitmix64(splitmix64(state[:1]) ^ state[1:])
        return self._examples[np.argsort(splitmix64(self._examples.astype(np.uint64) ^ key), kind="stable")]

    def pack(self, examples: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Best-fit decreasing into bins of ``max_tokens``; a longer example has a bin of its own."""
        bins: list[list[int]] = []
        free: list[tuple[int, int]] = []  # (room, bin), sorted; room is below 1 where nothing fits
        for place in sorted(range(len(examples)), key=lambda p: (-self.length(examples[p]), p)):
            length = self.length(examples[place])
            fitting = bisect_left(free, (length,))
            if fitting == len(free):
                free.append((max_tokens, len(bins)))
                bins.append([])
            room, best = free.pop(fitting)
            bins[best].append(place)
            insort(free, (room - length, best))
        return [[examples[place] for place in sorted(places)] for places in bins]

    def micro_batch(
        self, examples: Sequence[int], device: torch.device, dropout: tuple[int, int] | None = None
    ) -> MicroBatch:
        """Read whole examples into one flat micro-batch; ``dropout``: (seed, update) of its keys."""
        ids, masks, positions, lengths, keys = [], [], [], [], []
        for example in examples:
            start, end = int(self._offsets[example]), int(self._offsets[example + 1])
            mask = self._file.get_slice("loss_mask")[start:end] != 0
            mask[0] = False
            ids.append(self._file.get_slice("input_ids")[start:end])
            masks.append(mask)
            positions.append(np.arange(end - start))
            lengths.append(end - start)
            if dropout is not None:
                keys.append(row_keys(*dropout, example, end - start))
        all_ids = torch.from_numpy(np.concatenate(ids).astype(np.int64))
        targets = torch.from_numpy(np.flatnonzero(np.concatenate(masks)))

        def move(tensor: torch.Tensor) -> torch.Tensor:
            # a copy from pageable memory would wait for all that the GPU has to do
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return MicroBatch(
            input_ids=move(all_ids),
            positions=move(torch.from_numpy(np.concatenate(positions))),
            rope_lengths=move(torch.from_numpy(np.repeat(lengths, lengths))),
            cu_seqlens=[0, *np.cumsum(lengths).tolist()],
            target_rows=move(targets - 1),
            target_ids=move(all_ids[targets]),
            target_bounds=[0, *np.cumsum([mask.sum() for mask in masks]).tolist()],
            dropout_keys=move(torch.from_numpy(np.concatenate(keys))) if keys else None,
        )


class Schedule:
    """Which examples each update reads, and how they are split into micro-batches.

    Args:
        dataset: The packed file.
        settings: Batch size, accumulation, epochs and seed of the job.
    """

    def __init__(self, dataset: PackedDataset, settings: TrainingSettings) -> None:
        self._dataset, self._settings = dataset, settings
        self._order: tuple[int, np.ndarray] = (0, dataset.order(settings.seed, 0))  # of the newest epoch asked for
        self.steps_per_epoch = -(-dataset.num_examples // settings.batch_size)
        self.total_steps = self.steps_per_epoch * settings.n_epochs

    @property
    def max_micro_batch_tokens(self) -> int:
        """No micro-batch of the job has more tokens."""
        settings = self._settings
        accumulation = settings.gradient_accumulation_steps
        per_micro_batch = -(-settings.batch_size // accumulation) if accumulation else settings.batch_size
        longest = self._dataset.longest(per_micro_batch)
        most = sum(longest)
        return most if accumulation else min(most, max(longest[0], settings.micro_batch_tokens))

    def longest(self) -> list[int]:
        """Lengths of the longest examples, as many as an update has, longest first."""
        return self._dataset.longest(self._settings.batch_size)

    def load(self, step: int, device: torch.device) -> list[MicroBatch]:
        """The micro-batches of update ``step`` (from 0) on a device; none past the last update."""
        if step >= self.total_steps:
            return []
        dropout = (self._settings.seed, step) if self._settings.lora.lora_dropout > 0 else None
        return [self._dataset.micro_batch(examples, device, dropout) for examples in self.micro_batches(step)]

    def micro_batches(self, step: int) -> list[list[int]]:
        """Example numbers of each micro-batch of update ``step`` (from 0)."""
        settings = self._settings
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * settings.batch_size
        if self._order[0] != epoch:
            self._order = (epoch, self._dataset.order(settings.seed, epoch))
        examples = self._order[1][start : start + settings.batch_size].tolist()
        if settings.gradient_accumulation_steps > 0:
            parts = np.array_split(np.array(examples), min(settings.gradient_accumulation_steps, len(examples)))
            return [part.tolist() for part in parts]
        return self._dataset.pack(examples, settings.micro_batch_tokens)
