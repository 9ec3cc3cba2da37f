"""The rungs of the ladder that cost work: what each frees, what it costs, and taking it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from fineinfer.memory.governor import MemoryGovernor
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)

DROP, OFFLOAD, FINISH, ABORT, PARK, UNPARK = "drop_kept", "offload", "finish", "abort", "park", "unpark"
REFUSED = "refused"  # a rung that could not be taken
HOST_BYTES_S = 10e9  # of layer inputs to the host: 55 GB/s once their pinned buffers exist
FIRST_PARK_BYTES_S = {"cpu": 200e6, "cuda": 10e9}  # to disk with checksums, over PCIe; measured from the first time on
RUNG_RETRY_S = 10.0  # after a rung could not be taken: no room on the disk, or in host memory
RATE_WEIGHT = 0.5  # of the newest measurement
# A second that requests wait for the micro-batch's end is worth so many of work done again. At equal weights bursts
# that came in its second half waited for up to 212 ms (4 x 1,024 tokens of an 8B shape beside 12 requests, H200).
WAIT_WEIGHT = 8.0
MEMORY_STORY = {
    DROP: "gave the activations of {layers} layers to waiting requests; they are recomputed",
    OFFLOAD: "gave {mib:.0f} MiB of the micro-batch under way to waiting requests; its inputs wait in host memory",
    ABORT: "gave the {mib:.0f} MiB of the micro-batch under way to waiting requests; it runs again",
    PARK: "parked: {mib:.0f} MiB of the job went to waiting requests; it goes on when there is memory again",
    UNPARK: "goes on: the job has its {mib:.0f} MiB again",
    REFUSED: "could not give {mib:.0f} MiB to waiting requests, which is tried again later: {why}",
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to take memory from the running job.

    Attributes:
        name: ``drop_kept``, ``finish`` (the micro-batch), ``abort`` (it) or ``park`` (the job).
        num_bytes: Leased bytes that it frees.
        cost_s: Seconds of the device that must run again, moving state included; for ``finish`` those that requests
            wait, ``WAIT_WEIGHT`` times.
    """

    name: str
    num_bytes: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class LadderStep:
    """A rung that was taken or climbed back: bytes that changed hands, milliseconds, layers recomputed for it.

    Of one that could not be taken: the bytes that it would have freed, and ``why``.
    """

    name: str
    num_bytes: int
    ms: float
    num_layers: int = 0
    why: str = ""

    def told(self) -> str:
        """As the job's user reads it."""
        return MEMORY_STORY[self.name].format(layers=self.num_layers, mib=self.num_bytes / 2**20, why=self.why)


class LadderLog:
    """What was taken and given back: in the governor's record, in counters, and as the story of the job.

    Attributes:
        counts: How often each step was taken.
    """

    def __init__(self, governor: MemoryGovernor) -> None:
        self._governor = governor
        self._steps: deque[LadderStep] = deque(maxlen=64)
        self.counts: Counter[str] = Counter()

    def count(self, name: str, owner: str, num_bytes: int, ms: float = 0.0) -> None:
        """A step that repeats with each micro-batch: no part of the story."""
        self._governor.record(name, owner, num_bytes, ms)
        self.counts[name] += 1

    def note(self, name: str, owner: str, num_bytes: int, started_s: float, num_layers: int = 0) -> None:
        """A step that began at ``started_s`` (``time.perf_counter()``) and has just ended."""
        ms = 1e3 * (time.perf_counter() - started_s)
        self.count(name, owner, num_bytes, ms)
        self._steps.append(LadderStep(name, num_bytes, ms, num_layers))

    def refused(self, rung: Rung, why: str) -> None:
        """A rung that could not be taken."""
        logger.warning("the job's memory cannot be had by %s now: %s", rung.name, why)
        self.count(REFUSED, rung.name, rung.num_bytes)
        self._steps.append(LadderStep(REFUSED, rung.num_bytes, 0.0, why=why))

    def take(self) -> list[LadderStep]:
        """The story since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


class Taken(NamedTuple):
    """What became of a rung that was to be taken.

    Attributes:
        rung: The one that was; None: none.
        num_layers: Layers whose graphs were dropped.
        why: What was in the way of the one asked for.
    """

    rung: Rung | None
    num_layers: int = 0
    why: str = ""


class Rungs:
    """Prices the rungs with measured slice times, and takes them.

    Args:
        latency: Slice times.
        device: Type of the device, for the first guess of what parking takes.
    """

    def __init__(self, latency: LatencyModel, device: str) -> None:
        self._latency = latency
        self._missing_until_s: dict[str, float] = {}  # rungs that could not be taken
        self._park_bytes_s = FIRST_PARK_BYTES_S.get(device, FIRST_PARK_BYTES_S["cuda"])

    def of(self, trainer: ParkableTrainer, activations: int, state: int, floor: int = 0) -> list[Rung]:
        """The rungs that there are now, each with all that it frees.

        Args:
            trainer: Runs and is not parked.
            activations: Bytes leased for the micro-batch under way.
            state: Bytes leased for masters, moments and gradients.
            floor: Bytes that only parking frees.
        """
        rungs = []
        num_tokens = trainer.micro_batch_tokens
        if trainer.micro_batch_open:
            least, most = trainer.bytes_if_recomputed(num_tokens), trainer.bytes_if_all_kept(num_tokens)
            spare = activations - max(least, floor)
            if spare > 0 and trainer.can_drop:
                num_layers = trainer.num_layers * min(1.0, spare / max(1, most - least))
                num_layers *= trainer.settings.recompute != "always"  # then it frees what is not used
                rungs.append(Rung(DROP, spare, num_layers * self._latency.estimate("forward", num_tokens)))
            inputs = trainer.bytes_if_recomputed(num_tokens) - trainer.bytes_if_offloaded(num_tokens)
            if spare + inputs > 0 and trainer.can_offload:  # after the kept graphs
                num_layers = trainer.num_kept_layers()
                again_s = num_layers * self._latency.estimate("forward", num_tokens) + inputs / HOST_BYTES_S
                rungs.append(Rung(OFFLOAD, activations - max(least - inputs, floor), again_s))
            wait_s = self._seconds(trainer.left_of_micro_batch())
            rungs.append(Rung(FINISH, activations - floor, WAIT_WEIGHT * wait_s))
            rungs.append(Rung(ABORT, activations - floor, self._seconds(trainer.lost_by_abort())))
        move_s = 2 * trainer.state_bytes / self._park_bytes_s
        rungs.append(Rung(PARK, activations + state, self._seconds(trainer.lost_by_park()) + move_s))
        return rungs

    def available(self, name: str, now_s: float) -> bool:
        """Whether it is worth a try: it did not fail a moment ago."""
        return now_s >= self._missing_until_s.get(name, 0.0)

    def take(self, rung: Rung, trainer: ParkableTrainer, now_s: float) -> Taken:
        """Do it.

        A park needs the disk or pinned host memory, an offload the latter, and there may be none now: then the rung is
        not ``available`` for a while. Inputs of which only a part went to the host are given up with their micro-batch.
        """
        try:
            return Taken(rung, _take(rung, trainer))
        except (TrainingError, RuntimeError, MemoryError) as error:
            self._missing_until_s[rung.name] = now_s + RUNG_RETRY_S
            why = str(error).partition("\n")[0] or type(error).__name__
        if rung.name != OFFLOAD:
            return Taken(None, why=why)
        trainer.abort_micro_batch()
        return Taken(replace(rung, name=ABORT), why=why)

    def observe_move(self, num_bytes: int, seconds: float) -> None:
        """Learn how fast a job is parked or unparked."""
        if seconds > 0.0:
            self._park_bytes_s += RATE_WEIGHT * (num_bytes / seconds - self._park_bytes_s)

    def _seconds(self, units: Counter[tuple[str, int]]) -> float:
        """Of units; a kind that has not been seen yet counts as a forward, which comes first."""
        estimate = self._latency.estimate
        return sum(
            count * (estimate(kind, tokens) or estimate("forward", tokens)) for (kind, tokens), count in units.items()
        )


def cheapest(rungs: list[Rung], num_bytes: int) -> Rung | None:
    """The rung of least cost that frees so many bytes, None if none does."""
    enough = [rung for rung in rungs if rung.num_bytes >= num_bytes]
    return min(enough, key=lambda rung: (rung.cost_s, rung.num_bytes), default=None)


def _take(rung: Rung, trainer: ParkableTrainer) -> int:
    """Do it; the number of layers whose graphs were dropped."""
    if rung.name == DROP:
        return trainer.drop_kept()[0]
    if rung.name == OFFLOAD:
        num_layers = trainer.drop_kept()[0]
        trainer.offload_inputs()
        return num_layers
    if rung.name == ABORT:
        trainer.abort_micro_batch()
    else:
        trainer.park()
    return 0
