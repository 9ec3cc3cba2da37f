"""How a job lets go of the device: for a while, or until a user resumes it."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future
from typing import NamedTuple

from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)


class Pausing(NamedTuple):
    """A job that stands still; ``written`` when its resume point is on disk, ``beside`` requests or at once.

    ``reason`` of a job that nobody asked to pause.
    """

    trainer: ParkableTrainer
    written: Future[None]
    beside: bool
    reason: TrainingError | None = None


def give_back(trainer: ParkableTrainer) -> bool:
    """Free all that a job holds on the device, after it could not have more.

    Returns:
        False if only closing it does that: there is no host memory for it either. What can be is on disk then.
    """
    try:
        if trainer.parked:
            trainer.free_state()
        else:
            trainer.park()
        return True
    except (TrainingError, RuntimeError, MemoryError) as error:
        logger.warning("job %s could not be parked: %s", trainer.job_id, error)
    with contextlib.suppress(TrainingError, RuntimeError, MemoryError):
        trainer.save_and_leave()
    return False
