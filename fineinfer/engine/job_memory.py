"""What a job needs of memory, when one that got none is tried again, and what its user is told if it cannot fit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

from fineinfer.adapters.config import AdapterError
from fineinfer.adapters.weights import LoraLayout
from fineinfer.messages import StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer

MIB = 1 << 20
# After an out-of-memory error, twice as long after each one that follows; 62 seconds in all.
RETRY_S, MAX_RETRIES = 2.0, 5
SMALLER_ADAPTER = "lower lora.r, name fewer lora.target_modules, or raise --memory-budget"
_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of CUDA, torch on a CPU, cuBLAS


class NoMemoryNowError(TrainingError):
    """There is no memory for a job that would fit at another time: it pauses until somebody resumes it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "out_of_memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory to give, which may be otherwise in a moment."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


@dataclass(frozen=True, slots=True)
class JobNeed:
    """The least bytes that a job runs with: ``state_bytes`` all the time, ``floor_bytes`` its largest micro-batch."""

    state_bytes: int
    floor_bytes: int = 0

    @classmethod
    def of(cls, trainer: ParkableTrainer) -> JobNeed:
        """Of a job that has a trainer."""
        return cls(trainer.state_bytes, trainer.floor_bytes(trainer.max_micro_batch_tokens))

    @classmethod
    def of_state(cls, job: StartJob, decoder: Decoder, fused: bool) -> JobNeed:
        """Of a job that has none yet: as much as making it takes (``AdapterState.num_bytes``).

        Args:
            job: The job; one whose adapter cannot be needs nothing, the trainer will say so.
            decoder: The model.
            fused: Whether the optimizer is a kernel, which needs no temporary.
        """
        try:
            num_parameters = LoraLayout.uniform(decoder.spec, job.settings.lora).num_parameters
        except AdapterError:
            return cls(0)
        master = max(4, decoder.dtype.itemsize)
        copy = 0 if decoder.dtype.itemsize == master else decoder.dtype.itemsize
        return cls(((4 if fused else 5) * master + copy) * num_parameters)


class Patience:
    """With a job that ran out of memory although it was leased: another program has it.

    Attributes:
        delay_s: Until the next try.
        not_before_s: ``time.monotonic()`` of it.
        num_errors: So far, without a finished update between them.
    """

    def __init__(self) -> None:
        self._step = self.num_errors = 0
        self.delay_s = self.not_before_s = 0.0

    def tries_again(self, step: int, now_s: float) -> bool:
        """Note an error at an update; whether there is to be another try."""
        if step > self._step:
            self._step, self.num_errors = step, 0
        self.num_errors += 1
        self.delay_s = RETRY_S * 2 ** (self.num_errors - 1)
        self.not_before_s = now_s + self.delay_s
        return self.num_errors <= MAX_RETRIES


def why_state_too_large(need: JobNeed, room: dict[str, int], advised: bool = True) -> str:
    """The arithmetic of a job whose adapter alone is too much; as ``why_too_large``."""
    return (
        f"the job needs {_mib(need.state_bytes)} MiB for adapter and optimizer alone, but {_left(room)[1]}"
        + f": {SMALLER_ADAPTER}" * advised
    )


def why_too_large(trainer: ParkableTrainer, room: dict[str, int], advised: bool = True) -> str:
    """The arithmetic in MiB.

    Args:
        trainer: The job.
        room: Bytes of ``budget`` and of those who share it (``MemoryLadder.shares``).
        advised: Say what would help, too.
    """
    parts, tokens = trainer.state_parts(), trainer.max_micro_batch_tokens
    micro_batch, state = trainer.floor_bytes(tokens), sum(parts.values())
    left, leaves = _left(room)
    how = "recomputed" if trainer.can_drop else "kept"
    return (
        f"the job needs {_mib(state + micro_batch)} MiB = adapter and optimizer {_mib(state)} "
        f"({' + '.join(f'{name} {_mib(size)}' for name, size in parts.items() if size)}) + largest micro-batch "
        f"{_mib(micro_batch)} ({tokens} tokens x {micro_batch / tokens / 1024:,.1f} KiB, every layer {how}), but "
        f"{leaves}" + (f": {_advice(trainer, left - state)}" if advised else "")
    )


def _left(room: dict[str, int]) -> tuple[int, str]:
    """Bytes that are left to a job, and the sum."""
    left = 2 * room["budget"] - sum(room.values())
    others = "".join(f" - {name} {_mib(size)}" for name, size in room.items() if name != "budget")
    return left, f"the memory budget leaves {_mib(left)} MiB = {_mib(room['budget'])}{others}"


def _advice(trainer: ParkableTrainer, left: int) -> str:
    """What would make it fit.

    Args:
        trainer: The job.
        left: Bytes for a micro-batch.
    """
    tokens, longest, settings = trainer.max_micro_batch_tokens, trainer.schedule.longest(), trainer.settings
    if not trainer.can_drop and trainer.bytes_if_recomputed(tokens) <= left:
        return 'recompute "auto" would fit'
    fitting = bisect.bisect_right(range(1, tokens + 1), left, key=trainer.floor_bytes)
    trains = trainer.schedule.max_micro_batch_tokens <= fitting  # it is an evaluation that does not fit
    if trains and settings.micro_batch_tokens <= fitting:  # shorter examples are packed up to that
        return f"validation examples of at most {fitting} tokens would fit"
    if trains or fitting == 0:
        return SMALLER_ADAPTER
    if fitting < longest[0]:
        return (
            f"a max_seq_length of {fitting} would fit (the longest example has {longest[0]} tokens; "
            "excess_length_strategy says what becomes of it), or lower lora.r, or raise --memory-budget"
        )
    size = settings.batch_size
    splits = (k for k in range(1, size + 1) if sum(longest[: -(-size // k)]) <= fitting)
    return f"{next(splits)} gradient_accumulation_steps would fit"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"
