"""One evaluation: forward and loss over a validation set, unit by unit, with the adapter as it is after an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fineinfer.training.dataset import MicroBatch, PackedDataset
from fineinfer.training.loss import evaluated_chunk
from fineinfer.training.step import StepContext, Unit

EVAL_FILE = "eval.safetensors"
EMBED, FORWARD, HEAD, END = "eval_embed", "eval_forward", "eval_head", "eval_end"


class EvalSet:
    """The validation set of a job, packed as training micro-batches are.

    Args:
        job_dir: Folder with ``eval.safetensors``.
        sha256: Expected hash of it.
        vocab_size: Of the model.
        max_tokens: Of a micro-batch; a longer example has one of its own.

    Raises:
        TrainingError: As ``PackedDataset``.
    """

    def __init__(self, job_dir: Path, sha256: str, vocab_size: int, max_tokens: int) -> None:
        self._dataset = PackedDataset(job_dir / EVAL_FILE, sha256)
        self._dataset.check_token_ids(vocab_size)
        self.bins = self._dataset.pack(self._dataset.examples, max_tokens)
        self.num_skipped = self._dataset.num_skipped
        self.num_tokens = [sum(map(self._dataset.length, examples)) for examples in self.bins]
        self.num_targets = [sum(map(self._dataset.num_targets, examples)) for examples in self.bins]

    def load(self, index: int, device: torch.device) -> MicroBatch:
        """Micro-batch ``index``; nothing of it is dropped."""
        return self._dataset.micro_batch(self.bins[index], device)


class EvalPass:
    """Forward and loss of one micro-batch; holds one activation, and no graph after a unit.

    Args:
        context: Model and job.
        batch: The sequences.

    Attributes:
        sums: [2] fp64 on the device: token losses and right predictions so far.
    """

    num_kept = 0

    def __init__(self, context: StepContext, batch: MicroBatch) -> None:
        self._context, self._batch = context, batch
        self._segments = context.segments(batch)
        self._x: torch.Tensor | None = None  # running activation, [num_tokens, hidden]
        self.sums = torch.zeros(2, dtype=torch.float64, device=batch.input_ids.device)

    @property
    def num_tokens(self) -> int:
        """Rows of the micro-batch."""
        return self._batch.num_tokens

    @property
    def held_bytes(self) -> int:
        """Bytes of activations held between two units."""
        return 0 if self._x is None else self._context.sizes.inputs(self.num_tokens)

    def drop_kept(self, bytes_wanted: int | None = None) -> tuple[int, int]:
        """There is nothing to drop."""
        return 0, 0

    def offload_inputs(self) -> tuple[int, int]:
        """There is nothing to move."""
        return 0, 0

    def units(self) -> Iterator[Unit]:
        """Run one unit at a time: embed, layers, head chunks. The host never waits."""
        context, batch = self._context, self._batch
        with torch.no_grad():
            x = context.decoder.embed(batch.input_ids)
        self._x = x
        yield EMBED, batch.num_tokens
        for layer in range(context.decoder.spec.num_layers):
            x, _ = context.layers.forward(layer, x, self._segments, keep=False)
            self._x = x
            yield FORWARD, batch.num_tokens
        for start in range(0, batch.num_targets, context.head_chunk_tokens):
            rows = batch.target_rows[start : start + context.head_chunk_tokens]
            targets = batch.target_ids[start : start + context.head_chunk_tokens]
            self.sums += evaluated_chunk(context.decoder, x[rows], targets, context.ops)
            yield HEAD, rows.shape[0]


class RunningEvaluation:
    """An evaluation under way; speaks to scheduler and memory ladder as ``RunningUpdate`` does.

    To the scheduler each micro-batch is what an update is: between two of them nothing is open. It counts when its last
    unit has run, so it may be given up and run again at any time.

    Args:
        context: Model and job.
        data: The validation set.

    Attributes:
        num_targets: Trained tokens of the set.
        current: The micro-batch under way, None between two.
    """

    def __init__(self, context: StepContext, data: EvalSet) -> None:
        self._context, self._data = context, data
        self._index = 0  # of the micro-batch under way, else of the next
        self._units: Iterator[Unit] = iter(())
        self._num_run = 0  # units of the micro-batch under way
        self._sums = torch.zeros(2, dtype=torch.float64, device=context.decoder.device)
        self.num_targets = sum(data.num_targets)
        self.current: EvalPass | None = None

    @property
    def begins_micro_batch(self) -> bool:
        """Whether the next unit is the first of a micro-batch."""
        return self.current is None and not self.ends

    @property
    def ends(self) -> bool:
        """Whether every micro-batch is done: the next unit makes the host wait for the result."""
        return self._index == len(self._data.bins)

    @property
    def next_micro_batch_tokens(self) -> int | None:
        """Tokens of the next micro-batch to begin, None after the last."""
        index = self._index + (self.current is not None)
        return self._data.num_tokens[index] if index < len(self._data.bins) else None

    def advance(self) -> Unit:
        """Run the next unit of a micro-batch."""
        if self.current is None:
            self.current = EvalPass(self._context, self._data.load(self._index, self._context.decoder.device))
            self._units = self.current.units()
        unit = next(self._units)
        self._num_run += 1
        if not self.remaining():
            self._sums += self.current.sums
            self._index += 1
            self.abandon()
        return unit

    def totals(self) -> tuple[float, float]:
        """(mean loss of the trained tokens, share of them predicted right)."""
        loss_sum, num_correct = self._sums.tolist()
        return loss_sum / self.num_targets, num_correct / self.num_targets

    def remaining(self) -> list[Unit]:
        """Units still to run of the micro-batch under way, else of the next."""
        return [(END, 0)] if self.ends else self._planned()[self._num_run :]

    def finished(self) -> list[Unit]:
        """Units of the micro-batch under way that have run; giving it up makes them run again."""
        return self._planned()[: self._num_run] if self.current is not None else []

    left_of_micro_batch, lost_by_abort = remaining, finished

    def abandon(self) -> None:
        """Free the micro-batch under way."""
        self.current, self._units, self._num_run = None, iter(()), 0

    def _planned(self) -> list[Unit]:
        num_tokens, num_targets = self._data.num_tokens[self._index], self._data.num_targets[self._index]
        chunk, num_layers = self._context.head_chunk_tokens, self._context.decoder.spec.num_layers
        heads = [(HEAD, min(chunk, num_targets - start)) for start in range(0, num_targets, chunk)]
        return [(EMBED, num_tokens), *[(FORWARD, num_tokens)] * num_layers, *heads]
