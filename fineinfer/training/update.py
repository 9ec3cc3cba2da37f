"""One optimizer update under way: its micro-batches one after the other, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fineinfer.training.dataset import MicroBatch
from fineinfer.training.step import MicroBatchPass, StepContext, Unit


def micro_batch_units(batch: MicroBatch, context: StepContext, backward_kind: str) -> list[Unit]:
    """Units of one micro-batch that has not begun."""
    num_layers, tokens = context.decoder.spec.num_layers, batch.num_tokens
    chunk = context.head_chunk_tokens
    heads = [("head", min(chunk, batch.num_targets - start)) for start in range(0, batch.num_targets, chunk)]
    return [("embed", tokens), *[("forward", tokens)] * num_layers, *heads, *[(backward_kind, tokens)] * num_layers]


class RunningUpdate:
    """Forward and backward of all micro-batches of one update; the optimizer comes after the last unit.

    Args:
        context: Model and job.
        batches: Micro-batches of the update.
        backward_kind: What a backward unit that is not decided yet will be: "backward" or "recompute".

    Attributes:
        num_tokens: Tokens of the update.
        num_targets: Trained tokens of the update; the loss is normalised by them.
        current: The micro-batch under way, None between two.
    """

    def __init__(self, context: StepContext, batches: list[MicroBatch], backward_kind: str) -> None:
        self._context, self._backward_kind = context, backward_kind
        self._waiting = list(batches)
        self._begun: list[MicroBatch] = []
        self.num_tokens = sum(batch.num_tokens for batch in batches)
        self.num_targets = sum(batch.num_targets for batch in batches)
        self.current: MicroBatchPass | None = None
        self._units: Iterator[Unit] = iter(())
        self._planned: list[Unit] = []  # of the micro-batch under way, its finished ones cut off
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].input_ids.device)
        self._num_correct = torch.zeros((), dtype=torch.int64, device=batches[0].input_ids.device)

    @property
    def begins_micro_batch(self) -> bool:
        """Whether the next unit is the first of a micro-batch."""
        return self.current is None and bool(self._waiting)

    @property
    def next_micro_batch_tokens(self) -> int | None:
        """Tokens of the next micro-batch to begin, None after the last."""
        return self._waiting[0].num_tokens if self._waiting else None

    def split_next(self, max_tokens: int) -> None:
        """Split the next micro-batch to begin (``MicroBatch.split``)."""
        self._waiting[:1] = self._waiting[0].split(max_tokens)

    def advance(self) -> Unit | None:
        """Run the next unit; None when all micro-batches are done."""
        if self.current is None:
            if not self._waiting:
                return None
            batch = self._waiting.pop(0)
            self.current = MicroBatchPass(self._context, batch, 1.0 / self.num_targets)
            self._units = self.current.units()
            self._planned = self._units_of(batch)
            self._begun.append(batch)
        unit = next(self._units)
        del self._planned[0]
        if not self._planned:
            self._loss_sum += self.current.loss_sum
            self._num_correct += self.current.num_correct
            self.abandon()
        return unit

    def remaining(self) -> list[Unit]:
        """Units still to run, the optimizer included."""
        units = list(self._planned)
        if self.current is not None and self._backward_kind == "backward":
            kinds = self.current.backward_kinds()
            left = min(len(kinds), len(units))
            units[len(units) - left :] = [(kind, self.current.num_tokens) for kind in kinds[len(kinds) - left :]]
        for batch in self._waiting:
            units += self._units_of(batch)
        return [*units, ("optimizer", self.num_tokens)]

    def totals(self, gradient_norm: torch.Tensor) -> tuple[float, float, float]:
        """(mean loss of the trained tokens, share of them predicted right, gradient norm).

        All in one transfer, so that the host waits for the device once an update.
        """
        sums = torch.stack((self._loss_sum, self._num_correct.double(), gradient_norm.double()))
        loss_sum, num_correct, norm = sums.tolist()
        return loss_sum / self.num_targets, num_correct / self.num_targets, norm

    def abandon(self) -> None:
        """Free the micro-batch under way."""
        self.current, self._units, self._planned = None, iter(()), []

    def replay(self) -> bool:
        """Free the micro-batch under way and run it again; False, and no change, if it has added to the gradient."""
        if self.current is None or self._has_gradient():
            return False
        self._waiting.insert(0, self._begun.pop())
        self.abandon()
        return True

    def left_of_micro_batch(self) -> list[Unit]:
        """Units of the micro-batch under way that are still to run."""
        return self.remaining()[: len(self._planned)]

    def finished(self) -> list[Unit]:
        """Units run so far."""
        units = [unit for batch in self._begun for unit in self._units_of(batch)]
        return units[: len(units) - len(self._planned)]

    def lost_by_abort(self) -> list[Unit]:
        """Units that run again if the micro-batch under way is given up: its own, or all if ``replay`` cannot."""
        units = self.finished()
        if self.current is None or self._has_gradient():
            return units
        return units[sum(len(self._units_of(batch)) for batch in self._begun[:-1]) :]

    def _has_gradient(self) -> bool:
        return len(self._planned) < self._context.decoder.spec.num_layers

    def _units_of(self, batch: MicroBatch) -> list[Unit]:
        return micro_batch_units(batch, self._context, self._backward_kind)
