"""A trainer that can give up more than kept graphs: the micro-batch under way, then everything it holds; bit-exact."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from fineinfer.adapters.weights import LoraWeights
from fineinfer.messages import TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.training.checkpoint import Moments
from fineinfer.training.errors import TrainingError
from fineinfer.training.step import Unit
from fineinfer.training.streams import current_stream, on_own_stream
from fineinfer.training.trainer import Trainer, UnitReport

logger = logging.getLogger(__name__)
IN_HOST_MEMORY = ("cuda",)  # devices whose jobs are parked there; elsewhere it is the same memory, so on disk


@dataclass
class _HostCopy:
    """Masters and moments in pinned host memory, while the device has none of them."""

    masters: LoraWeights
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class ParkableTrainer(Trainer):
    """A ``Trainer`` whose memory can be taken away at any unit; what was under way runs again with the same result.

    Attributes:
        stream: Where its work goes: the stream that was current when it was made; None on a device without streams.
        leaving: What ``leave`` returned; unless it fails there will be a version of the last update.
    """

    stream: torch.cuda.Stream | None = None
    leaving: Future[None] | None = None
    _parked = False
    _host_copy: _HostCopy | None = None

    def __init__(self, decoder: Decoder, *args: Any, **kwargs: Any) -> None:
        self.stream = current_stream(decoder.device)
        super().__init__(decoder, *args, **kwargs)

    @on_own_stream
    def advance(self) -> UnitReport:
        """See ``Trainer``."""
        return super().advance()

    @on_own_stream
    def save_resume_point(self) -> None:
        """See ``Trainer``."""
        super().save_resume_point()

    @on_own_stream
    def offload_inputs(self) -> tuple[int, int]:
        """See ``TrainerMemory``."""
        return super().offload_inputs()

    @on_own_stream
    def split_next_micro_batch(self, max_tokens: int) -> int:
        """See ``TrainerMemory``; the rows of the second part are counted anew on the device."""
        return super().split_next_micro_batch(max_tokens)

    @property
    def next_unit_waits(self) -> bool:
        """Whether the next unit makes the host wait for the device: an optimizer step, a checkpoint."""
        running = self._running
        return self.checkpoint_due if running is None else running.current is None and not running.begins_micro_batch

    @property
    def parked(self) -> bool:
        """Whether masters, moments and gradients are elsewhere; ``advance`` must not be called then."""
        return self._parked

    @property
    def can_drop(self) -> bool:
        """Whether kept graphs may be dropped, which the job's settings can forbid."""
        return self._job.settings.recompute != "never"

    def floor_bytes(self, num_tokens: int) -> int:
        """The least that a micro-batch of so many tokens can run with: recomputed, unless the settings forbid it."""
        return self.bytes_if_recomputed(num_tokens) if self.can_drop else self.bytes_if_all_kept(num_tokens)

    def state_parts(self) -> dict[str, int]:
        """What ``state_bytes`` is made of, by name."""
        state, masters = self._state, self._state.masters.flat.nbytes
        copy = 0 if state.compute is state.masters else state.compute.flat.nbytes
        temporary = self.state_bytes - 4 * masters - copy
        return {
            "masters": masters,
            "gradients": masters,
            "moments": 2 * masters,
            "an update's temporary": temporary,
            "copy in the model's dtype": copy,
        }

    @property
    def settings(self) -> TrainingSettings:
        """Hyperparameters of the job."""
        return self._job.settings

    # ------------------------------------------------------------ the micro-batch

    def left_of_micro_batch(self) -> Counter[Unit]:
        """Units until the micro-batch under way ends."""
        running = self._running
        return Counter(() if running is None or running.current is None else running.left_of_micro_batch())

    def lost_by_abort(self) -> Counter[Unit]:
        """Units that ``abort_micro_batch`` would make run again."""
        return Counter(() if self._running is None else self._running.lost_by_abort())

    def abort_micro_batch(self) -> None:
        """Give up the micro-batch under way; it runs again from its start.

        Once it has added to the gradient the whole update begins anew, which zeroes the gradient: undoing a sum, or
        adding up in another order, would change bits.
        """
        if self._update is None or not self._update.replay():
            self.abandon_update()

    # ------------------------------------------------------------ everything

    def lost_by_park(self) -> Counter[Unit]:
        """Units of the running update so far: gradients are not kept."""
        return Counter(() if self._running is None else self._running.finished())

    @on_own_stream
    @torch.inference_mode(False)
    @torch.no_grad()
    def park(self) -> None:
        """Free all that the job holds: masters and moments go to host memory on a GPU, to a checkpoint on disk else.

        Raises:
            CheckpointError: The disk took nothing; nothing was freed.
            TrainingError: The adapter is not finite.
        """
        if self._parked:
            return
        self.abandon_update()
        if self._context.decoder.device.type in IN_HOST_MEMORY:
            optimizer = self._state.optimizer
            masters = LoraWeights(self._state.masters.layout, _to_host(self._state.masters.flat))
            self._host_copy = _HostCopy(masters, _to_host(optimizer.exp_avg), _to_host(optimizer.exp_avg_sq))
        else:
            self.save_resume_point()
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)  # views of it, such as the adapter's matrices, stay what they are
        self._parked = True

    def leave(self) -> Future[None]:
        """Free all that the job holds on the device and save a resume point, for a job that is to end but not for good.

        On a GPU masters and moments go to host memory and are written from there beside requests; the result tells when
        that is done, or failed. Elsewhere, or if host memory is too short for that, it is done now from where they are,
        and ``close`` frees the memory.

        Raises:
            TrainingError: The adapter is not finite.
        """
        if self._writer is not None and self._context.decoder.device.type in IN_HOST_MEMORY:
            try:
                self.park()
                self.leaving = self._writer.submit(self.save_and_leave)  # behind a checkpoint that is being written
                return self.leaving
            except (RuntimeError, MemoryError) as error:
                logger.warning("job %s is written from the device: %s", self.job_id, error)
        self.leaving = done = Future[None]()
        try:
            self.save_and_leave()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done

    @on_own_stream
    @torch.inference_mode(False)
    @torch.no_grad()
    def unpark(self) -> None:
        """Take the memory back and go on where the job stood.

        Raises:
            TrainingError: The checkpoint that it went to is gone.
        """
        if not self._parked:
            return
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        state, copy = self._state, self._host_copy
        if copy is not None:
            moments = {"exp_avg": copy.exp_avg, "exp_avg_sq": copy.exp_avg_sq}
            state.restore(copy.masters, moments, state.optimizer.num_updates)
        elif self.step == 0:  # nothing was written: it is what it began as
            self._begin_anew()
        else:
            self._read_back()
        self._host_copy, self._parked = None, False

    def _read_back(self) -> None:
        """Take masters and moments from the checkpoint that they went to; go on from an older one if it is damaged."""
        saved = self._read_saved()
        if saved is None:
            raise TrainingError(f"the checkpoint of update {self.step} is gone", "checkpoint_failed")
        self._restore_tensors(saved)
        if saved.step == self.step:  # cursor and log are here, with all that has been evaluated
            return
        self._go_on_from(saved)
        self._next, self._evaluation = self._load(self.step), None
        self._begin_evaluation()

    def _tensors(self) -> list[torch.Tensor]:
        """Everything that lives as long as the job: distinct storages."""
        state = self._state
        flats = [state.masters.flat, state.grads.flat, state.optimizer.exp_avg, state.optimizer.exp_avg_sq]
        return flats if state.compute is state.masters else [*flats, state.compute.flat]

    def _durable(self) -> tuple[LoraWeights, Moments]:
        copy = self._host_copy
        return super()._durable() if copy is None else (copy.masters, copy)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
