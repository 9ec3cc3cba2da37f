"""RoPE parameters: what is refused, and what each row's length means for the dynamic kind."""

from __future__ import annotations

import pytest
import torch

from fineinfer.model.errors import ModelLoadError, UnsupportedModelError
from fineinfer.model.rope import Rope, RopeSpec


def spec(**parameters) -> RopeSpec:
    return RopeSpec.from_parameters({"rope_theta": 10000.0, **parameters}, head_dim=8, max_position_embeddings=32)


def rope(**parameters) -> Rope:
    return Rope(spec(**parameters), torch.float32, torch.device("cpu"))


def test_unknown_kind_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'longrope' is not supported; supported: default, linear"):
        spec(rope_type="longrope", factor=2.0)


def test_missing_parameter_is_named() -> None:
    with pytest.raises(ModelLoadError, match="'llama3' needs low_freq_factor, high_freq_factor"):
        spec(rope_type="llama3", factor=2.0)


def test_partial_and_nested_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        spec(partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match="layer type"):
        spec(full_attention={"rope_type": "default"})


def test_old_type_key_is_read() -> None:
    assert spec(type="linear", factor=4.0).kind == "linear"


def test_dynamic_needs_lengths_and_reads_them_row_by_row() -> None:
    dynamic, default = rope(rope_type="dynamic", factor=2.0), rope(rope_type="default")
    positions = torch.tensor([5, 5, 5])
    with pytest.raises(ValueError, match="dynamic"):
        dynamic.rows(positions)
    rows = dynamic.rows(positions, torch.tensor([6, 32, 64]))
    plain = default.rows(positions)
    assert torch.equal(rows.cos[:2], plain.cos[:2])  # up to the maximum position nothing is scaled, to the bit
    assert not torch.allclose(rows.cos[2], plain.cos[2])
    alone = dynamic.rows(positions[2:], torch.tensor([64]))
    assert torch.equal(alone.sin[0], rows.sin[2])  # a row does not depend on its neighbours


def test_rows_have_the_model_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        rows = Rope(spec(), dtype, torch.device("cpu")).rows(torch.arange(3))
        assert rows.cos.dtype == rows.sin.dtype == dtype
        assert rows.cos.shape == (3, 8)
