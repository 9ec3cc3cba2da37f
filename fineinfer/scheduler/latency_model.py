"""Small online model of slice times: seconds as a linear function of tokens, refitted with each measurement."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # a measurement's weight halves after about 34 newer ones: follows a noisy neighbour within seconds
INFERENCE_KINDS = ("decode", "prefill")  # every other kind is training
OUTLIER_FACTOR = 20.0  # one slice that took this many times its estimate (a page-in, a suspended host) is clipped


@dataclass(slots=True)
class _Sums:
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


class LatencyModel:
    """Exponentially weighted least squares ``seconds = a + b * tokens`` for each slice kind."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._trained_s = 0.0

    def observe(self, kind: str, num_tokens: int, seconds: float) -> None:
        """Add a measured slice."""
        sums = self._sums.setdefault(kind, _Sums())
        if sums.weight > 5:
            seconds = min(seconds, OUTLIER_FACTOR * max(self.estimate(kind, num_tokens), 1e-6))
        for name, value in (("x", num_tokens), ("y", seconds), ("xx", num_tokens**2), ("xy", num_tokens * seconds)):
            setattr(sums, name, getattr(sums, name) * DECAY + value)
        sums.weight = sums.weight * DECAY + 1.0
        if kind not in INFERENCE_KINDS:
            self._trained_s += seconds

    @property
    def trained_s(self) -> float:
        """Seconds of all training slices since start."""
        return self._trained_s

    def estimate(self, kind: str, num_tokens: int) -> float:
        """Predicted seconds of a slice; 0 for a kind never seen."""
        sums = self._sums.get(kind)
        if sums is None:
            return 0.0
        mean_x, mean_y = sums.x / sums.weight, sums.y / sums.weight
        variance = sums.xx / sums.weight - mean_x**2
        if variance <= 1e-9 * max(1.0, mean_x**2):
            # only one size seen so far: scale in proportion, the cautious choice for larger ones
            return mean_y * num_tokens / mean_x if num_tokens > mean_x > 0 else mean_y
        slope = max(0.0, (sums.xy / sums.weight - mean_x * mean_y) / variance)
        return max(0.0, mean_y + slope * (num_tokens - mean_x))

    def averages_ms(self) -> dict[str, float]:
        """Moving average of each kind's slice time in milliseconds, for the metrics."""
        return {kind: 1e3 * sums.y / sums.weight for kind, sums in self._sums.items()}
