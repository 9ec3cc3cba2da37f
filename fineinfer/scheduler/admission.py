"""What requests will need: the Efficient Router's peak estimate over per-request predictions of output lengths."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from fineinfer.scheduler.sequence import Sequence

HISTORY_LENGTH = 512
MIN_SAMPLES = 8
PRIOR_OUTPUT_TOKENS = 256  # assumed output of a request without max_tokens before any has finished
MAX_PREEMPTIONS = 3  # after so many a request is admitted only where all like it fit for sure, and loses no slot again


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
        self._above: dict[int, tuple[float, float]] = {}  # by the index of the first length that is above

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, length: int) -> None:
        self._newest.append(length)
        bisect.insort(self._ordered, length)
        if len(self._newest) > HISTORY_LENGTH:
            del self._ordered[bisect.bisect_left(self._ordered, self._newest.popleft())]
        self._above.clear()

    def above(self, generated: int) -> tuple[float, float] | None:
        """Median and 90th percentile (linear, as numpy's) of the lengths above ``generated``; None if too few are."""
        first = bisect.bisect_right(self._ordered, generated)
        last = len(self._ordered) - 1 - first
        if last + 1 < MIN_SAMPLES:
            return None
        if first not in self._above:
            self._above[first] = self._at(first + 0.5 * last), self._at(first + 0.9 * last)
        return self._above[first]

    def _at(self, place: float) -> float:
        low = int(place)
        high = min(low + 1, len(self._ordered) - 1)
        return self._ordered[low] + (place - low) * (self._ordered[high] - self._ordered[low])


class LengthPredictor:
    """Expected output length of requests without ``max_tokens``: percentiles of their adapter's finished outputs.

    An adapter with too little history of its own is taken for its base model. Source: the Past-Future scheduler's idea
    of predicting from the recent distribution, conditioned on the tokens generated so far.
    """

    def __init__(self) -> None:
        self._history: dict[str | None, _History] = {}

    def record(self, adapter_name: str | None, num_output_tokens: int) -> None:
        """Add a finished request's output length."""
        self._history.setdefault(adapter_name, _History()).add(num_output_tokens)

    def predict(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens the sequence will generate still: median and 90th percentile, at least 1, within its own limit."""
        limit = sequence.max_output_left
        if limit <= 1:
            return 1, 1
        if sequence.sampling.max_tokens is not None:
            return limit, limit
        generated = len(sequence.output)
        history = self._history.get(sequence.adapter_name)
        if history is None or len(history) < MIN_SAMPLES:
            history = self._history.get(None)
        expected = None if history is None else history.above(generated)
        if expected is None:
            expected = (max(PRIOR_OUTPUT_TOKENS, 2.0 * generated),) * 2
        median, most = expected
        return min(limit, max(1, int(median) - generated)), min(limit, max(1, int(most) - generated))


def expected_peak(members: list[Sequence], predictor: LengthPredictor) -> int:
    """Slots that suffice for these requests with about 90 % probability, and surely for those preempted often.

    The peak of the medians, and beyond it the root of the summed squares of what each may exceed its own by: lengths
    are independent, so their excesses average out.
    Requests preempted ``MAX_PREEMPTIONS`` times must fit whatever they generate, since the others give way to them:
    so they are not preempted again.
    """
    have = [member.num_tokens for member in members]
    left = [predictor.predict(member) for member in members]
    likely = peak_tokens(have, [low for low, _ in left])
    excess = math.sqrt(sum((high - low) ** 2 for low, high in left if high != low))
    if excess:
        likely = min(likely + math.ceil(excess), peak_tokens(have, [high for _, high in left]))
    sure = [member for member in members if member.num_preemptions >= MAX_PREEMPTIONS]
    if not sure:
        return likely
    return max(likely, peak_tokens((m.num_tokens for m in sure), (m.max_output_left for m in sure)))


class PeakCheck:
    """``expected_peak`` of those that run and one that waits, not computed while it cannot have come down enough.

    In a turn every request that decodes has one slot more and one token less to go; only the one that waits and those
    still reading their prompts let the peak come down, by a slot each. Medians follow the same rule as long as no
    request ends; deviations may not, so nothing is taken for granted for more than ``MAX_TURNS``.
    """

    MAX_TURNS = 16

    def __init__(self) -> None:
        self._members: list[Sequence] = []
        self._peak = self._num_slots = self._turns_left = 0

    def __call__(self, members: list[Sequence], predictor: LengthPredictor, num_slots: int) -> int:
        """The peak; where that is above ``num_slots``, maybe as it was a few turns ago.

        Args:
            members: Those that run, then the one that waits; asked once a turn.
            predictor: Of output lengths.
            num_slots: What the peak must not exceed.
        """
        self._turns_left -= 1
        if self._turns_left < 0 or num_slots != self._num_slots or members != self._members:
            self._members, self._num_slots = members, num_slots
            self._peak = expected_peak(members, predictor)
            num_still = 1 + sum(member.num_uncomputed != 1 for member in members[:-1])
            self._turns_left = min(self.MAX_TURNS, (self._peak - num_slots - 1) // num_still)
        return self._peak
