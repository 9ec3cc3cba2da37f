"""Small online model of slice times: seconds as a linear function of tokens, refitted with each measurement."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # a measurement's weight halves after about 34 newer ones: follows a noisy neighbour within seconds
INFERENCE_KINDS = ("decode", "prefill")  # every other kind is training
_BESIDE = "_beside"
BESIDE_FACTOR = 2.0  # of a step whose time beside training has not been measured: 1.8 to 2.3 of 16 to 256 rows, H100
OUTLIER_FACTOR = 20.0  # one slice that took this many times its estimate (a page-in, a suspended host) is clipped


@dataclass(slots=True)
class _Sums:
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


class LatencyModel:
    """Exponentially weighted least squares ``seconds = a + b * tokens`` for each slice kind.

    Slices that share the device with the other kind of work take longer and are fitted apart.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._trained_s = self._delayed_s = 0.0

    def observe(self, kind: str, num_tokens: int, seconds: float, beside: bool = False) -> float:
        """Add a measured slice.

        Args:
            kind: ``decode``, ``prefill`` or a training unit's.
            num_tokens: Its rows.
            seconds: What it took.
            beside: Whether requests and training ran at the same time.

        Returns:
            Seconds that it would have taken alone, as far as that is known.
        """
        alone_s = seconds
        if beside:
            alone_s = min(seconds, self.estimate(kind, num_tokens) or seconds)
        self._fit(kind + _BESIDE if beside else kind, num_tokens, seconds)
        if kind in INFERENCE_KINDS:
            self._delayed_s += seconds - alone_s
        else:
            self._trained_s += alone_s
            self._delayed_s += 0.0 if beside else seconds
        return alone_s

    def _fit(self, kind: str, num_tokens: int, seconds: float) -> None:
        sums = self._sums.setdefault(kind, _Sums())
        if sums.weight > 5:
            seconds = min(seconds, OUTLIER_FACTOR * max(self._predict(sums, num_tokens), 1e-6))
        for name, value in (("x", num_tokens), ("y", seconds), ("xx", num_tokens**2), ("xy", num_tokens * seconds)):
            setattr(sums, name, getattr(sums, name) * DECAY + value)
        sums.weight = sums.weight * DECAY + 1.0

    @property
    def trained_s(self) -> float:
        """Seconds of all training slices since start, those beside requests as if alone."""
        return self._trained_s

    @property
    def delayed_s(self) -> float:
        """Seconds since start by which training can have held up requests: its slices alone, and what it slowed."""
        return self._delayed_s

    def estimate(self, kind: str, num_tokens: int, beside: bool = False) -> float:
        """Predicted seconds of a slice; 0 for a kind never seen."""
        if beside:
            sums = self._sums.get(kind + _BESIDE)
            return BESIDE_FACTOR * self.estimate(kind, num_tokens) if sums is None else self._predict(sums, num_tokens)
        sums = self._sums.get(kind)
        return 0.0 if sums is None else self._predict(sums, num_tokens)

    @staticmethod
    def _predict(sums: _Sums, num_tokens: int) -> float:
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
