"""The hash that decides order and dropout, so that no library's random stream does."""

from __future__ import annotations

import numpy as np


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The mixing function of Steele, Lea and Flood 2014, on uint64 (arithmetic wraps)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
