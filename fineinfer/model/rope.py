"""Rotary position embedding: default, linear, dynamic, llama3 and yarn, as transformers' ``modeling_rope_utils``.

Frequencies, cosines and sines are computed in fp32 whatever the model's dtype, as transformers does, then cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fineinfer.model.errors import ModelLoadError, UnsupportedModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True)
class RopeSpec:
    """Everything the rotary embedding of a model is computed from; lengths in tokens.

    Attributes:
        kind: One of ``ROPE_KINDS``.
        head_dim: Size of a head; all of it is rotated.
        theta: Base of the frequencies.
        factor: How far the context is stretched.
        max_position_embeddings: The model's maximum length (``dynamic`` scales from there).
        original_max_position_embeddings: Length of pretraining (``llama3`` and ``yarn``).
        attention_factor: Cosines and sines are multiplied by it (``yarn``).
        low_freq_factor: ``llama3``.
        high_freq_factor: ``llama3``.
        beta_fast: ``yarn``: boundary of extrapolation.
        beta_slow: ``yarn``: boundary of interpolation.
        truncate: ``yarn``: whether the boundaries are rounded to whole dimensions.
    """

    kind: str
    head_dim: int
    theta: float
    factor: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
        """Read a config's ``rope_parameters``.

        Raises:
            UnsupportedModelError: The kind is unknown or only a part of the head is rotated.
            ModelLoadError: A parameter that the kind needs is missing.
        """
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise UnsupportedModelError("RoPE parameters that differ by layer type are not supported")
        if kind not in ROPE_KINDS:
            raise UnsupportedModelError(f"RoPE kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported")
        missing = [key for key in ("rope_theta", *_REQUIRED[kind]) if parameters.get(key) is None]
        if missing:
            raise ModelLoadError(f"RoPE kind {kind!r} needs {', '.join(missing)} in the config's rope_parameters")
        original = parameters.get("original_max_position_embeddings") or max_position_embeddings
        factor = parameters.get("factor") or (max_position_embeddings / original if kind == "yarn" else 1.0)
        return cls(
            kind=kind,
            head_dim=head_dim,
            theta=parameters["rope_theta"],
            factor=factor,
            max_position_embeddings=max_position_embeddings,
            original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
            low_freq_factor=parameters.get("low_freq_factor", 1.0),
            high_freq_factor=parameters.get("high_freq_factor", 4.0),
            beta_fast=parameters.get("beta_fast") or 32.0,
            beta_slow=parameters.get("beta_slow") or 1.0,
            truncate=parameters.get("truncate", True),
        )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """The given ``attention_factor``, else the paper's (https://arxiv.org/abs/2309.00071), with DeepSeek's mscale."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


class Rows(NamedTuple):
    """Cosines and sines of a flat batch of token rows."""

    cos: torch.Tensor  # [num_tokens, head_dim] in the model's dtype
    sin: torch.Tensor


class Rope:
    """Makes cosine and sine rows for positions.

    Args:
        spec: Kind and parameters.
        dtype: Of the rows.
        device: Of positions and rows.
    """

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype = spec, dtype
        # int64 first: exact, as in transformers
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=device)
        self._exponents = half.to(torch.float32) / spec.head_dim
        self._inv_freq = self._frequencies()  # [head_dim / 2] fp32

    @property
    def needs_lengths(self) -> bool:
        """Whether ``rows`` reads ``rope_lengths`` (only the dynamic kind does)."""
        return self.spec.kind == "dynamic"

    def rows(self, positions: torch.Tensor, rope_lengths: torch.Tensor | None = None) -> Rows:
        """Rows for ``positions`` [num_tokens].

        Args:
            positions: Position of each token in its sequence.
            rope_lengths: For ``dynamic`` only, [num_tokens]: the length that sets the base of that row. Serving passes
                ``max(prompt length, position + 1)``, which is what transformers' cached generation does (a cached key
                keeps the base it was made with); training passes the sequence length. Other kinds ignore it.

        Raises:
            ValueError: ``rope_lengths`` is missing though the kind is ``dynamic``.
        """
        inv_freq = self._inv_freq
        if self.needs_lengths:
            if rope_lengths is None:
                raise ValueError("dynamic RoPE needs the length of each row's sequence")
            inv_freq = self._dynamic_frequencies(rope_lengths)
        angles = positions.to(torch.float32)[:, None] * inv_freq  # [num_tokens, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)
        factor = self.spec.attention_factor
        return Rows((angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype))

    def _frequencies(self) -> torch.Tensor:
        spec = self.spec
        inv_freq = 1.0 / (spec.theta**self._exponents)
        if spec.kind == "linear":
            return inv_freq / spec.factor
        if spec.kind == "llama3":
            return _llama3(inv_freq, spec)
        if spec.kind == "yarn":
            return _yarn(spec.theta**self._exponents, spec)
        return inv_freq

    def _dynamic_frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """NTK-aware scaling by each row's own length: [num_tokens, head_dim / 2]."""
        spec = self.spec
        stretch = (spec.factor * lengths / spec.max_position_embeddings) - (spec.factor - 1)
        base = spec.theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
        scaled = 1.0 / (base.to(torch.float32)[:, None] ** self._exponents)
        return torch.where((lengths > spec.max_position_embeddings)[:, None], scaled, self._inv_freq)


def _llama3(inv_freq: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    original = spec.original_max_position_embeddings
    low_wavelength = original / spec.low_freq_factor
    high_wavelength = original / spec.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    slow = wavelength > low_wavelength
    scaled = torch.where(slow, inv_freq / spec.factor, inv_freq)
    smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smoothed = (1 - smooth) * scaled / spec.factor + smooth * scaled
    return torch.where(~(wavelength < high_wavelength) & ~slow, smoothed, scaled)


def _yarn(pos_freqs: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    dim = spec.head_dim

    def correction_dim(num_rotations: float) -> float:
        """Dimension that turns ``num_rotations`` times within the original context."""
        turns = spec.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(spec.theta))

    low, high = correction_dim(spec.beta_fast), correction_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=pos_freqs.device) - low) / (high - low)
    extrapolated = 1 - torch.clamp(ramp, 0, 1)
    return (1.0 / (spec.factor * pos_freqs)) * (1 - extrapolated) + (1.0 / pos_freqs) * extrapolated
