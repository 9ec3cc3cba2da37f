"""benchmarks/serving.py: its engine gets what the supervisor's would, and its figures mean what they say."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

from fineinfer.engine.settings import EngineSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving

    return serving


def test_engine_flags_reach_the_engine(serving: ModuleType) -> None:
    config = serving.parse_engine_flags(["--max-num-seqs", "33", "--device", "cpu", "--max-loras=9"], "folder")
    settings = serving.engine_settings(config, "base", "ipc:///x")
    assert (settings.model, settings.max_num_seqs, settings.max_loras) == ("folder", 33, 9)
    assert settings.engine_address == "ipc:///x"


def test_every_setting_of_the_engine_is_one_of_the_configuration(serving: ModuleType) -> None:
    config = serving.parse_engine_flags([], "folder")
    taken = {name for group in (config.model, config.memory, config.scheduler) for name in vars(group)}
    assert set(EngineSettings.__struct_fields__) - taken == {"base_model", "engine_address"}


@pytest.mark.parametrize("flags", [["--port", "8000"], ["--max-num-seqs", "none"], ["--max-num-seqs"]])
def test_flags_that_mean_nothing_to_the_engine_end_the_script(serving: ModuleType, flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parse_engine_flags(flags, "folder")


def test_decode_rate_counts_only_while_all_decode(serving: ModuleType) -> None:
    requests = [serving.Progress(3, 11.0, 13.0, 3), serving.Progress(4, 12.0, 15.0, 4)]
    ticks = [(11.0, 1), (12.0, 2), (13.0, 2), (14.0, 1), (15.0, 1)]
    row = serving.summarize(10.0, 13, requests, ticks)
    assert row["decode_tok_s"] == 2.0  # both tokens at 13.0, after the second request's first and until the first's end
    assert (row["wall_s"], row["out_tok_s"], row["total_tok_s"], row["req_s"]) == (5.0, 7 / 5, 20 / 5, 2 / 5)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (2000.0, 2000.0)
    assert (row["tpot_p50_ms"], row["tpot_p99_ms"]) == (1000.0, 1000.0)


def test_no_decode_rate_where_requests_follow_each_other(serving: ModuleType) -> None:
    requests = [serving.Progress(2, 11.0, 12.0, 2), serving.Progress(2, 13.0, 14.0, 2)]
    row = serving.summarize(10.0, 2, requests, [(11.0, 1), (12.0, 1), (13.0, 1), (14.0, 1)])
    assert math.isnan(row["decode_tok_s"])
