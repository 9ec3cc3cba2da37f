"""The memory side of a trainer: what it holds and needs, and what it can give up without losing a bit."""

from __future__ import annotations

import bisect
from concurrent.futures import ThreadPoolExecutor

import torch

from fineinfer.messages import StartJob
from fineinfer.training.dataset import MicroBatch, Schedule
from fineinfer.training.evaluation import EvalPass, EvalSet, RunningEvaluation
from fineinfer.training.reports import Cursor
from fineinfer.training.state import AdapterState
from fineinfer.training.step import MicroBatchPass, StepContext
from fineinfer.training.update import RunningUpdate


class TrainerMemory:
    """The part of ``Trainer`` that the memory ladder speaks to; the attributes are the trainer's."""

    cursor: Cursor
    schedule: Schedule
    _job: StartJob
    _deterministic: bool
    _state: AdapterState
    _context: StepContext
    _update: RunningUpdate | None
    _evaluation: RunningEvaluation | None
    _eval_set: EvalSet | None
    _next: list[MicroBatch]
    _writer: ThreadPoolExecutor | None
    _offload_next = False

    # ------------------------------------------------------------ what it holds and needs

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._context.sizes.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes the job holds all the time: masters, compute copy, gradients, moments."""
        return self._state.num_bytes

    @property
    def max_micro_batch_tokens(self) -> int:
        """No micro-batch of training has more tokens, none of an evaluation needs more memory than one of so many."""
        trained = self.schedule.max_micro_batch_tokens
        evaluated = max(self._eval_set.num_tokens) if self._eval_set is not None else 0
        fits = self.bytes_if_offloaded(evaluated) <= self.bytes_if_recomputed(trained)
        return trained if fits else max(trained, evaluated)

    @property
    def micro_batch_open(self) -> bool:
        """Whether a micro-batch is under way, so that its activations are held."""
        return self._current is not None

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the micro-batch under way, 0 between two."""
        return 0 if self._current is None else self._current.num_tokens

    def next_micro_batch_tokens(self) -> int:
        """Tokens of the next micro-batch to begin, 0 when none is left."""
        waiting = None if self._running is None else self._running.next_micro_batch_tokens
        if waiting is None:
            batches = self._following_batches()
            waiting = batches[0].num_tokens if batches else 0
        return waiting

    def bytes_if_all_kept(self, num_tokens: int) -> int:
        """Peak activation bytes of a micro-batch of this many tokens with every layer kept."""
        return self._context.sizes.all_kept(num_tokens)

    def bytes_if_recomputed(self, num_tokens: int) -> int:
        """The same with every layer recomputed."""
        return self._context.sizes.all_recomputed(num_tokens)

    def bytes_if_offloaded(self, num_tokens: int) -> int:
        """The same with every layer recomputed from an input in host memory."""
        return self._context.sizes.all_offloaded(num_tokens)

    def next_micro_batch_bytes(self) -> tuple[int, int]:
        """(least, most) activation bytes that the next micro-batch can use; in an evaluation one layer's at a time."""
        num_tokens = self.next_micro_batch_tokens()
        if self._evaluation is not None:
            needed = self.bytes_if_offloaded(num_tokens)
            return needed, needed
        least, most = self.bytes_if_recomputed(num_tokens), self.bytes_if_all_kept(num_tokens)
        return {"always": (least, least), "never": (most, most)}.get(self._job.settings.recompute, (least, most))

    @property
    def next_can_shrink(self) -> bool:
        """Whether the next micro-batch can do with less than ``least``: inputs in host memory, or fewer sequences."""
        return self._evaluation is None and self._job.settings.recompute != "never"

    def held_bytes(self) -> int:
        """Bytes of layer inputs and kept graphs held on the device now."""
        return 0 if self._current is None else self._current.held_bytes

    def num_kept_layers(self) -> int:
        """Layers whose graph is held now."""
        return 0 if self._current is None else self._current.num_kept

    # ------------------------------------------------------------ what it gives up

    def drop_kept(self, bytes_wanted: int | None = None) -> tuple[int, int]:
        """Free kept graphs in mid-step (None: all of them); their layers are recomputed, bit-equal.

        Returns:
            (layers dropped, bytes freed); nothing for a job with ``recompute="never"``.
        """
        if self._current is None or self._job.settings.recompute == "never":
            return 0, 0
        return self._current.drop_kept(bytes_wanted)

    @property
    def can_offload(self) -> bool:
        """Whether layer inputs can go to host memory: on CUDA, unless the job keeps every graph."""
        return self._context.host is not None and self._job.settings.recompute != "never"

    @torch.inference_mode(False)
    def offload_inputs(self) -> tuple[int, int]:
        """Move layer inputs to host memory, those of recomputed layers; bit-equal. Drop kept graphs first.

        Also those of layers still to run, until the micro-batch ends. Between two it holds for the next one, which
        then needs ``bytes_if_offloaded`` if no graph is kept.

        Returns:
            (inputs moved, bytes freed); the bytes are free when the copies are done.
        """
        if not self.can_offload:
            return 0, 0
        if self._current is None:
            self._offload_next = True
            return 0, 0
        return self._current.offload_inputs()

    def free_state(self) -> None:
        """Free what a parked job has on the device again, of which it could have only a part when it was to go on."""
        state = self._state
        flats = (state.masters, state.grads, state.compute)
        for tensor in (*(weights.flat for weights in flats), state.optimizer.exp_avg, state.optimizer.exp_avg_sq):
            tensor.untyped_storage().resize_(0)

    def wait_until_written(self) -> None:
        """Wait for the checkpoint that is being written, so that another may read the folder; then ``close``."""
        if self._writer is not None:
            self._writer.shutdown()

    @property
    def can_split(self) -> bool:
        """Whether micro-batches may be made smaller: it adds in another order, so not in deterministic mode."""
        return not self._deterministic

    def split_next_micro_batch(self, max_tokens: int) -> int:
        """Split the micro-batch that begins next, between two sequences, so that it has ``max_tokens`` at most.

        The rest of it is the micro-batch after. The update stays the same, each loss divided by the trained tokens of
        the whole update; gradients differ by rounding. Nothing happens where ``can_split`` is false.

        Returns:
            Tokens of the next micro-batch now: more than ``max_tokens`` if its first sequence has.
        """
        if self.can_split and self._update is not None and self._update.begins_micro_batch:
            self._update.split_next(max_tokens)
        elif self.can_split and self._running is None and self._next:
            self._next[:1] = self._next[0].split(max_tokens)
        return self.next_micro_batch_tokens()

    def tokens_within(self, num_bytes: int, offloaded: bool = False) -> int:
        """What to split to: most tokens of a recomputed micro-batch that needs no more bytes, 0 if there is none."""
        needed = self.bytes_if_offloaded if offloaded else self.bytes_if_recomputed
        return bisect.bisect_right(range(1, self.max_micro_batch_tokens + 1), num_bytes, key=needed)

    # ------------------------------------------------------------ inside

    @property
    def _running(self) -> RunningUpdate | RunningEvaluation | None:
        return self._evaluation if self._update is None else self._update

    @property
    def _current(self) -> MicroBatchPass | EvalPass | None:
        return None if self._running is None else self._running.current

    def _following_batches(self) -> list[MicroBatch]:
        """Micro-batches of the next update to start."""
        return self._next if self._update is None else self._load(self.cursor.step + 1)

    def _load(self, step: int) -> list[MicroBatch]:
        return [] if self.cursor.evaluated.stopped else self.schedule.load(step, self._context.decoder.device)

    def _begun(self) -> None:
        """A unit has run: a micro-batch that was to begin with its inputs in host memory learns of it in its first."""
        if self._offload_next and self._update is not None and self._current is not None:
            self._offload_next = False  # even if there is no host memory: the next try may find room on the device
            self._current.offload_inputs()
