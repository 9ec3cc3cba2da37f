"""Which waiting request may join: the Efficient Router's peak estimate over per-request predictions."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable

import numpy as np

from fineinfer.scheduler.sequence import Sequence

HISTORY_LENGTH = 512
MIN_SAMPLES = 8
PRIOR_OUTPUT_TOKENS = 256  # assumed output of a request without max_tokens before any has finished
MAX_PREEMPTIONS = 3  # after so many a request is admitted on its strict peak only, so it cannot be preempted again


def peak_tokens(have: Iterable[int], left: Iterable[int]) -> int:
    """Most KV slots a set of requests will ever hold together if each runs to its expected end.

    At the moment request i (ordered by tokens left, most first) ends, requests 0..i hold what they have now plus
    ``left[i]`` each. Source: LightLLM's Efficient Router.

    Args:
        have: Slots each request holds or needs at once.
        left: Tokens each will still generate.
    """
    have_array, left_array = np.fromiter(have, np.int64), np.fromiter(left, np.int64)
    if have_array.size == 0:
        return 0
    order = np.argsort(-left_array, kind="stable")
    counts = np.arange(1, have_array.size + 1)
    return int((left_array[order] * counts + np.cumsum(have_array[order])).max())


class _History:
    """The newest output lengths, also kept in order: asked for every running request whenever one waits."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque()
        self._ordered: list[int] = []

    def add(self, length: int) -> None:
        self._newest.append(length)
        bisect.insort(self._ordered, length)
        if len(self._newest) > HISTORY_LENGTH:
            del self._ordered[bisect.bisect_left(self._ordered, self._newest.popleft())]

    def p90_above(self, generated: int) -> float | None:
        """90th percentile (linear, as numpy's) of the lengths above ``generated``; None if too few are."""
        first = bisect.bisect_right(self._ordered, generated)
        count = len(self._ordered) - first
        if count < MIN_SAMPLES:
            return None
        position = 0.9 * (count - 1)
        low = first + int(position)
        high = min(low + 1, len(self._ordered) - 1)
        return self._ordered[low] + (position - int(position)) * (self._ordered[high] - self._ordered[low])


class LengthPredictor:
    """Expected output length of requests without ``max_tokens``: the running p90 of their model's finished outputs.

    Source: the Past-Future scheduler's idea of predicting from the recent distribution, conditioned on the tokens
    generated so far.
    """

    def __init__(self) -> None:
        self._history: dict[str | None, _History] = {}

    def record(self, adapter_name: str | None, num_output_tokens: int) -> None:
        """Add a finished request's output length."""
        self._history.setdefault(adapter_name, _History()).add(num_output_tokens)

    def predict_left(self, sequence: Sequence) -> int:
        """Tokens the sequence is expected to generate still, at least 1 and within its own limit."""
        limit = max(1, sequence.max_output_left)
        if sequence.sampling.max_tokens is not None or sequence.num_preemptions >= MAX_PREEMPTIONS:
            return limit
        generated = len(sequence.output)
        history = self._history.get(sequence.adapter_name)
        expected = None if history is None else history.p90_above(generated)
        if expected is None:
            expected = max(PRIOR_OUTPUT_TOKENS, 2.0 * generated)
        return min(limit, max(1, int(expected) - generated))
