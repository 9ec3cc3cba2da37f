"""What the engine hears about adapters, in order, and names that are served live from the job in training."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from fineinfer.adapters.registry import AdapterRegistry, AdapterVersion
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.training_host import TrainingHost
from fineinfer.messages import AdapterChecked, AdapterRejected, CheckAdapter, RemoveAdapter, SetAdapter, StartJob
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)
LIVE_COST = 0.02  # part of the time that copying the weights in training into a slot may take

AdapterMessage = SetAdapter | RemoveAdapter | CheckAdapter


class AdapterTraffic:
    """Applies messages about adapters to the registry; those whose folder is being read wait, and others behind them.

    Args:
        adapters: The registry.
        outbox: For answers.
    """

    def __init__(self, adapters: AdapterRegistry, outbox: Outbox) -> None:
        self._adapters = adapters
        self._outbox = outbox
        self._waiting: deque[tuple[bytes, AdapterMessage]] = deque()
        self._live = LiveAdapter(adapters)

    @property
    def busy(self) -> bool:
        """Whether something will be ready in a moment that no message tells of."""
        return bool(self._waiting) or self._adapters.reader.busy or self._live.copying

    def take(self, peer: bytes, message: AdapterMessage) -> None:
        """A message has arrived."""
        self._waiting.append((peer, message))
        self._expect()

    def turn(self, training: TrainingHost) -> bool:
        """Apply what can be applied, and serve what training has finished.

        Returns:
            Whether a name may mean another version than before.
        """
        try:
            changed = self._live.end_with(training)  # before what was answered to the job's end
            while self._waiting and self._apply(*self._waiting[0]):
                self._waiting.popleft()
                changed = True
            changed = self._live.follow(training) or changed
        except Exception:  # the job is served by its checkpoints then; requests must not suffer
            logger.exception("live serving of a job broke; its checkpoints are served")
            changed = self._live.give_up()
        self._expect()
        return changed

    def _expect(self) -> None:
        self._adapters.expected = self._live.names() | {m.name for _, m in self._waiting if isinstance(m, SetAdapter)}

    def _apply(self, peer: bytes, message: AdapterMessage) -> bool:
        """False if it must be tried again."""
        try:
            if isinstance(message, RemoveAdapter):
                self._adapters.remove(message.name)
            elif isinstance(message, SetAdapter):
                entry = AdapterVersion(message.name, message.step, message.version, Path(message.directory))
                return self._adapters.register(entry, message.current, message.pinned)
            elif self._adapters.reader.get(message.version, Path(message.directory)) is None:
                return False
            else:
                self._outbox.answer(peer, AdapterChecked(version=message.version))
        except Exception as error:  # whatever is wrong with a folder is wrong with it alone
            if isinstance(message, SetAdapter):
                logger.warning("adapter %s@%d rejected: %s", message.name, message.step, error)
                self._outbox.notify(AdapterRejected(name=message.name, step=message.step, message=str(error)))
            elif isinstance(message, CheckAdapter):
                self._outbox.answer(peer, AdapterChecked(version=message.version, error=str(error)))
        return True


@dataclass
class _Copy:
    """Weights on their way into a slot; ``largest``, their largest absolute value, is on the host once ``done``."""

    entry: AdapterVersion
    largest: torch.Tensor
    done: torch.cuda.Event | None


def _send_largest(flat: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, or what is not finite, on its way to the host; needs no memory of ``flat``'s size."""
    norm = torch.linalg.vector_norm(flat, float("inf"))
    return torch.empty_like(norm, device="cpu", pin_memory=norm.is_cuda).copy_(norm, non_blocking=True)


class LiveAdapter:
    """Serves the weights of a job whose ``serve`` is ``live``, after each update or as often as is cheap.

    A copy goes into a slot of its own, behind the update on training's stream, and the name moves when it is complete;
    requests keep the slot they began with. So there are two slots in turn, and more while old requests run.
    """

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters
        self._job: StartJob | None = None
        self._trainer: ParkableTrainer | None = None
        self._copy: _Copy | None = None
        self._step = -1
        self._not_before_s = 0.0
        self._num_runs = 0  # ended: a job that goes on may train a step once more, which gets a version of its own
        self._given_up: str | None = None
        self._paused: tuple[str, Future[None]] | None = None  # a name whose last update is being written

    @property
    def copying(self) -> bool:
        """Whether a copy is on its way."""
        return self._copy is not None

    def names(self) -> set[str]:
        """The name that is served live."""
        return set() if self._job is None else {self._job.name}

    def end_with(self, training: TrainingHost) -> bool:
        """Serve the job no more if its training is over; whether the name may mean another version than before."""
        ended = self._job is not None and self._trainer is not training.trainer
        if ended:
            self._end()
        if self._paused is not None and self._paused[1].done():
            if self._paused[1].exception() is not None:
                self._adapters.end_live(self._paused[0], awaited=False)
            self._paused = None
        return ended

    def follow(self, training: TrainingHost) -> bool:
        """Look at the job once a turn, after ``end_with``.

        Returns:
            Whether the name means another version than before.
        """
        job, trainer = training.job, training.trainer
        if trainer is None or job is None or job.serve != "live" or job.job_id == self._given_up:
            return False
        self._job, self._trainer = job, trainer
        if self._copy is not None:
            return self._serve(self._copy)
        if trainer.step == self._step or trainer.parked or time.perf_counter() < self._not_before_s:
            return False
        return self._begin(job, trainer)

    def _begin(self, job: StartJob, trainer: ParkableTrainer) -> bool:
        started_s, step = time.perf_counter(), trainer.step
        run = f".{self._num_runs}" if self._num_runs else ""
        entry = AdapterVersion(job.name, step, f"live-{job.job_id}-{step}{run}", None)
        weights = trainer.serving_weights
        with torch.inference_mode(), torch.cuda.stream(trainer.stream):  # of None: the current one
            largest = _send_largest(weights.flat)  # before a slot is taken, as it may fail
            done = torch.cuda.Event() if weights.flat.is_cuda else None  # type: ignore[no-untyped-call]
            if self._adapters.place(entry.version, weights):  # else every slot is in use: there will be another chance
                self._step, self._copy = step, _Copy(entry, largest, done)
                if done is not None:
                    done.record()  # type: ignore[no-untyped-call]
        self._not_before_s = started_s + (time.perf_counter() - started_s) / LIVE_COST
        return self._copy is not None and self._serve(self._copy)

    def _serve(self, copy: _Copy) -> bool:
        if copy.done is not None and not copy.done.query():  # type: ignore[no-untyped-call]
            return False
        self._copy = None
        if not math.isfinite(copy.largest.item()):
            logger.warning("%s is not served: the adapter is not finite", copy.entry.version)
            self._adapters.release(copy.entry.version)
            return False
        self._adapters.serve_live(copy.entry)
        return True

    def _end(self) -> None:
        if self._copy is not None:
            if self._copy.done is not None:  # whatever uses the slot next may do so on another stream
                self._copy.done.synchronize()  # type: ignore[no-untyped-call]
            self._adapters.release(self._copy.entry.version)
        if self._job is not None and self._trainer is not None:
            written = self._trainer.leaving if self._trainer.step > 0 else None
            self._adapters.end_live(self._job.name, self._trainer.finished or written is not None)
            self._paused = None if written is None else (self._job.name, written)
        self._job, self._trainer, self._copy, self._step, self._not_before_s = None, None, None, -1, 0.0
        self._num_runs += 1

    def give_up(self) -> bool:
        """Leave the job to its checkpoints, after an error; whether its name may mean another version now."""
        if self._copy is not None:
            with contextlib.suppress(ValueError):  # it was let go before the error
                self._adapters.release(self._copy.entry.version)
        job, self._job, self._trainer, self._copy = self._job, None, None, None
        self._num_runs += 1
        if job is not None:
            self._given_up = job.job_id
            self._adapters.end_live(job.name, awaited=False)
        return job is not None
