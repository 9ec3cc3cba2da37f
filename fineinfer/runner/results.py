"""What a step gives back: a launched step, and the result of each of its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fineinfer.messages import TokenLogprob
from fineinfer.scheduler.plan import Chunk


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk produced: the chosen token and, where asked for, log-probabilities.

    Attributes:
        chunk: The chunk that ran.
        token_id: The sampled token, None for all but a prompt's last chunk.
        logprob: Its log-probability entry, if the request wants it.
        failed: The logits were not finite; the request must end with an error, its neighbours are unaffected.
    """

    chunk: Chunk
    token_id: int | None
    logprob: TokenLogprob | None = None
    failed: bool = False


class Launched(Protocol):
    """A step on its way."""

    @property
    def num_rows(self) -> int:
        """Token rows of the forward."""

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one row."""

    @property
    def is_done(self) -> bool:
        """Whether ``collect`` would not wait."""

    def collect(self) -> tuple[list[ChunkResult], float]:
        """Wait for the step: one result per chunk, and the seconds it took on its device."""


class Runner(Protocol):
    """Runs plans; the loop knows nothing else of it.

    Attributes:
        max_in_flight: Steps that may be launched before the oldest is collected, besides the newest.
        progress: Layers launched since start; a stuck engine shows as a standing count.
    """

    max_in_flight: int
    progress: int

    def launch(self, chunks: tuple[Chunk, ...]) -> Launched:
        """Start one forward over all chunks; chunks of tokens in flight belong to sequences launched before."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran while it was launched."""

    results: list[ChunkResult]
    seconds: float
    num_rows: int
    is_decode: bool
    is_done = True

    def collect(self) -> tuple[list[ChunkResult], float]:
        """The results, at once."""
        return self.results, self.seconds
