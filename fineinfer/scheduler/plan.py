"""The value that crosses from the scheduler to the runner and the trainer: one loop turn's work."""

from __future__ import annotations

from dataclasses import dataclass, field

from fineinfer.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one sequence in this turn: positions ``[start, start + length)``.

    Attributes:
        sequence: Whose tokens.
        start: First position; everything before it already has KV.
        length: Number of rows; 1 with ``samples`` is a decode row.
        samples: Whether the last row's logits choose the next token (false for all but the last prefill chunk).
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One turn of the engine loop: an inference part, then a training part; either may be empty.

    Attributes:
        chunks: Decode rows and prefill chunks, all in one forward.
        train: Whether one training unit runs after them.
        preempted: Sequences that gave up their KV in this turn (reported, not run).
        slots_wanted: KV slots missing for the next request to be admitted or for those that run; 0 if none lacks any.
        stuck: No request can go on without them.
        hopeless: Sequences that the memory budget has no room for, even alone; they are to be ended.
    """

    chunks: tuple[Chunk, ...] = ()
    train: bool = False
    preempted: tuple[Sequence, ...] = ()
    slots_wanted: int = 0
    stuck: bool = False
    hopeless: tuple[Sequence, ...] = ()

    @property
    def num_rows(self) -> int:
        """Token rows of the inference part."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(slots=True)
class PlanDraft:
    """A plan in the making; see ``StepPlan``. ``chunks`` is in the order of the batch."""

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    hopeless: list[Sequence] = field(default_factory=list)
    slots_wanted: int = 0
