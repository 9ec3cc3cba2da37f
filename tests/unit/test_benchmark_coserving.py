"""The co-serving benchmark: arrivals, what is made of replies and metrics, bursts on a real engine, rows, picture."""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq

from fineinfer.engine import memory_ladder
from fineinfer.ipc import Codec
from fineinfer.messages import EngineInfo, EngineStats, FromEngine, Hello

from ..waiting import LIMIT_S, until
from .conftest import LiveServer
from .engine_harness import BYTES_PER_SLOT, TOKEN, Harness

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB = 1 << 30


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# ---------------------------------------------------------------- arrivals


def test_poisson_arrivals_are_the_same_each_time(bench) -> None:
    load = bench("load")
    arrivals = load.poisson(16.0, 100.0, [(10, 1), (20, 2), (30, 3)])
    assert arrivals == load.poisson(16.0, 100.0, [(10, 1), (20, 2), (30, 3)])
    assert len(arrivals) == pytest.approx(1600, rel=0.1)
    assert all(a.due_s < b.due_s for a, b in itertools.pairwise(arrivals)) and arrivals[-1].due_s <= 100.0
    assert {arrival.num_prompt for arrival in arrivals} == {10, 20, 30}


def test_a_window_of_a_trace_keeps_its_times(bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:51.2224670,879,55\n"
        "2023-11-16 18:16:51.3910170,91,16\n"
    )
    load = bench("load")
    found = load.trace(path, 4.0, 10.0)
    assert [(a.num_prompt, a.num_output) for a in found] == [(396, 109), (879, 55)]
    assert [round(a.due_s, 4) for a in found] == [0.3146, 0.5419]
    fitted, num_cut = load.fit(found, 500)
    assert [(a.num_prompt, a.num_output) for a in fitted] == [(391, 109), (445, 55)] and num_cut == 2
    assert load.fit(found, 2000) == (found, 0)


# ---------------------------------------------------------------- what is made of replies


def test_latencies_of_replies(bench) -> None:
    load = bench("load")
    whole = load.Reply(10.0, 4, 10.01, [(10.5, 1), (11.0, 2), (11.5, 1)])
    single = load.Reply(10.0, 1, 10.0, [(10.1, 1)])
    cut = load.Reply(10.0, 9, 10.0, [(10.2, 1), (20.0, 1)])
    failed = load.Reply(10.0, 5, 10.0, error="503: nobody there")
    row = load.summarize([whole, single, cut, failed], 10.0, num_late=1)
    assert (row["requests"], row["unfinished"], row["failed"]) == (2, 1, 1)
    assert row["ttft_p50_ms"] == pytest.approx(200.0) and row["ttft_p99_ms"] == pytest.approx(500.0)
    assert row["tpot_p50_ms"] == row["tpot_p99_ms"] == pytest.approx(1000 / 3)
    assert row["gap_p99_ms"] == pytest.approx(500.0), "two tokens in one piece share its time"
    assert row["output_tok_s"] == pytest.approx(7 / 10) and row["client_lag_p99_ms"] == pytest.approx(10.0)


METRICS = """# HELP fineinfer:time_to_first_token_seconds ...
fineinfer:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="m"}} {a}
fineinfer:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="m"}} {b}
fineinfer:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {c}
fineinfer:request_queue_time_seconds_sum{{engine="0",model_name="m"}} {d}
fineinfer:request_queue_time_seconds_count{{engine="0",model_name="m"}} {c}
fineinfer:train_device_seconds_total{{engine="0",model_name="m"}} {e}
"""


def test_the_server_s_own_numbers_are_those_of_the_window(bench) -> None:
    load = bench("load")
    before = load.Scrape(METRICS.format(a=100.0, b=100.0, c=100.0, d=5.0, e=1.0))
    after = load.Scrape(METRICS.format(a=150.0, b=200.0, c=200.0, d=7.0, e=4.5))
    row = after.since(before)
    assert row["server_ttft_p99_ms"] == pytest.approx(1e3 * (0.1 + 0.4 * 49 / 50))
    assert row["server_queue_mean_ms"] == pytest.approx(20.0) and row["train_device_s"] == 3.5
    assert math.isnan(before.since(before)["server_ttft_p99_ms"])


def test_a_window_on_a_live_server(bench, serve: Callable[..., LiveServer]) -> None:
    load = bench("load")
    live = serve(tick_s=0.002)
    live.script("the quick brown fox says hello world", end=False)
    target = load.Target.of(live.url, 60)
    num_output = len(live.engine.script(None))
    arrivals = [load.Arrival(0.05 * n, 5 + n, num_output if n < 5 else 2 * num_output) for n in range(6)]
    rows = [asyncio.run(load.run_window(target, arrivals[:5], 0.4)) for _ in range(2)]
    for row in rows:
        assert (row["requests"], row["unfinished"], row["failed"], row["train_tok_s"]) == (5, 0, 0, 0.0)
        assert (
            0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["ttft_max_ms"] < 1e3 * LIMIT_S
            and row["tpot_p50_ms"] > 0.5
        )
        assert row["output_tok_s"] > num_output
    prompts = [tuple(request.prompt_token_ids) for request in live.engine.added]
    assert sorted(map(len, prompts)) == sorted(2 * [5, 6, 7, 8, 9]) and len(set(prompts)) == 10, "no prompt comes twice"
    row = asyncio.run(load.run_window(target, arrivals[5:], 0.3))
    assert (row["requests"], row["failed"]) == (0, 1), "fewer tokens than were asked for is a failure"


def test_training_is_sampled_by_the_engine_s_own_clock(
    bench, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, live, samples = bench("load"), serve(), list[tuple[float, float]]()

    async def sample(num_looks: int) -> None:
        looks = iter(range(num_looks - 1))

        async def sleep(_seconds: float) -> None:
            next(looks, None) is not None or asyncio.current_task().cancel()
            await asyncio.sleep(0)

        monkeypatch.setattr(load, "asyncio", SimpleNamespace(sleep=sleep))
        with pytest.raises(asyncio.CancelledError):
            await load.sample_training(live.url, samples)

    asyncio.run(sample(3))
    assert len(samples) == 1, "the same numbers again are no sample"
    engine = live.engine
    engine.call(lambda: [engine._engine.send(peer, engine.stats()) for peer in engine._peers])
    until(lambda: asyncio.run(sample(1)) or len(samples) > 1, "newer numbers were not seen")
    assert len(samples) == 2 and samples[0][0] < samples[1][0] and {trained for _, trained in samples} == {0.0}


def test_training_is_counted_from_update_to_update(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load, clock = bench("load"), SimpleNamespace(now=100.0)

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    def events(request: httpx.Request) -> httpx.Response:
        clock.now += 0.003  # what an answer takes
        done = int((clock.now - 100.0) / 0.2)  # an update of 50 tokens every 200 ms
        data = [{"data": None}, {"data": {"layers": 3.0}}]
        data += [{"data": {"processed_tokens": 50 * step}} for step in range(done, max(0, done - 5), -1)]
        return httpx.Response(200, json={"data": data})

    async def measure(seconds: float) -> float:
        async with httpx.AsyncClient(transport=httpx.MockTransport(events)) as client:
            return await load.trained(client, "http://host", "job", clock.now, seconds)

    monkeypatch.setattr(load, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(load, "POLL_S", 0.005)
    # 0.9 s hold four or five updates: counted from edge to edge of the window it would be 222 or 278
    assert asyncio.run(measure(0.9)) == pytest.approx(250, rel=0.02)


def test_a_job_that_stands_still_is_not_waited_for(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load = bench("load")
    monkeypatch.setattr(load, "EDGE_S", 0.1)
    answer = httpx.Response(200, json={"data": [{"data": {"processed_tokens": 7}}]})

    async def measure() -> float:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer)) as client:
            return await load.trained(client, "http://host", "job", time.perf_counter(), 0.2)

    assert asyncio.run(measure()) == 0.0


# ---------------------------------------------------------------- peak and burst


def test_the_least_share_of_any_ten_seconds(bench) -> None:
    pressure = bench("pressure")
    samples = [(float(t), 0.5 * min(t, 10) + 0.5 * max(0, t - 20)) for t in range(0, 41)]  # nothing from 10 to 20
    assert pressure.least_share(samples, 10.0) == 0.0
    assert pressure.least_share(samples, 20.0) == pytest.approx(0.25)
    assert pressure.least_share(samples, float("inf")) == pytest.approx(15 / 40)
    assert math.isnan(pressure.least_share(samples[:1], 1.0))


class InProcess:
    """``serving.Engine`` over an engine in this process: it steps while somebody waits for a message."""

    def __init__(self, harness: Harness) -> None:
        self._harness, self._codec = harness, Codec(FromEngine)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"supervisor")
        self._socket.connect(harness.address)
        self.info = self.greet()[0]

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._socket.send_multipart([TOKEN, self._codec.encode(message)])

    def receive(self) -> Any:
        while not self._socket.poll(0):
            if not self._harness.loop.step():
                self._harness.parts.inbox.wait(0.01)
        return self._codec.decode(self._socket.recv_multipart()[-1])

    def greet(self) -> tuple[EngineInfo, EngineStats]:
        self.send(Hello())
        return self.receive(), self.receive()

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Harness, InProcess]]:
    monkeypatch.setattr(memory_ladder, "HOLD_S", 0.05)
    monkeypatch.setattr(memory_ladder, "MAX_HOLD_S", 0.1)
    harness = Harness(tmp_path, policy="slo", slo_tpot_ms=50.0, slo_ttft_ms=500.0, max_num_seqs=32)
    engine = InProcess(harness)
    yield harness, engine
    engine.close()
    harness.close()


def test_bursts_take_what_training_holds_and_give_it_back(
    bench, tmp_path: Path, in_process: tuple[Harness, InProcess]
) -> None:
    pressure, (harness, engine) = bench("pressure"), in_process
    # 512 slots are a request; four fill the pool, the burst wants two more
    args = argparse.Namespace(
        rows=4, row_tokens=160, pool_gib=2100 * BYTES_PER_SLOT / GIB, burst_gib=900 * BYTES_PER_SLOT / GIB, repeats=1
    )
    with pytest.raises(AssertionError, match="training holds"):
        too_much = argparse.Namespace(**(vars(args) | {"burst_gib": 1.0}))
        pressure.run_bursts(pressure.Session(engine), tmp_path / "too much", too_much)
    row = pressure.run_bursts(pressure.Session(engine), tmp_path / "files", args)
    assert row["moved_gib"] * GIB >= 900 * BYTES_PER_SLOT, "the budget was spent, so it came from training"
    assert row["activations_gib"] * GIB > 900 * BYTES_PER_SLOT
    assert 0.0 < row["first_start_p50_ms"] <= row["first_start_worst_ms"] <= row["all_started_worst_ms"] < 5000
    assert row["first_token_worst_ms"] > row["first_start_p50_ms"]
    assert row["kv_wasted_tokens"] == 0 and 97.0 <= row["kv_usable_percent"] <= 100.0
    harness.parts.ladder._kv.check_integrity()
    assert not harness.parts.desk.open


# ---------------------------------------------------------------- rows


@pytest.fixture
def coserving(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A Bench of the tiny shape for the flags of a command line."""

    def make(*words: str) -> Any:
        module = bench("coserving")
        own = ["coserving.py", "--shape", "tiny", "--lengths", "/some/where/l.csv", "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*own, *words])
        return module.Bench(module.parse())

    return make


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_windows_become_rows_and_targets(bench, coserving, tmp_path: Path) -> None:
    module, made = bench("coserving"), coserving("--targets")
    flags = made.flags_of("slo")
    numbers = {"train_tok_s": 8000.123456, "tpot_p99_ms": 19.5, "ttft_p99_ms": 45.0, "server_ttft_p99_ms": 50.0}
    for case, change in (("inference alone", {"train_tok_s": 0.0, "ttft_p99_ms": 30.0}), ("both", {})):
        for rate in (2.0, 4.0, 16.0):
            row = made.add({"case": case, "rate": rate} | numbers | change, "slo", flags)
            if case == "both":
                module.add_slo_targets(made, row, flags)
    targets = {row["id"]: row for row in read(tmp_path / "targets.csv")}
    parts = ("train", "tpot-p99", "ttft-p99")
    assert set(targets) == {f"{name}-{part}" for name in ("P4", "P5") for part in parts} | {"P7"}
    assert float(targets["P4-train"]["value"]) == pytest.approx(8000.12) and targets["P4-train"]["peer_value"] == "7209"
    assert (targets["P5-tpot-p99"]["value"], targets["P5-tpot-p99"]["peer_value"]) == ("19.5", "20.4")
    assert (targets["P7"]["value"], targets["P7"]["unit"]) == ("1.5", "ratio")
    assert "(benchmarks/coserving.py --shape tiny --lengths l.csv" in targets["P7"]["command"]
    rows = read(tmp_path / "coserving.csv")
    assert [row["case"] for row in rows] == 3 * ["inference alone"] + 3 * ["both"]
    assert rows[-1]["train_tok_s"] == "8000.1235" and rows[-1]["slo_tpot_ms"] == "20.0" and rows[-1]["commit"]


def test_another_time_per_token_is_another_target_and_no_flag_no_row(bench, coserving, tmp_path: Path) -> None:
    module, made = bench("coserving"), coserving("--targets", "--", "--slo-tpot-ms=28", "--device", "cpu")
    flags = made.flags_of("slo")
    assert flags[-3:] == ["--slo-tpot-ms=28", "--device", "cpu"], "the user's come last and win"
    row = {"case": "both", "rate": 16.0, "train_tok_s": 1.0, "tpot_p99_ms": 2.0, "ttft_p99_ms": 3.0}
    module.add_slo_targets(made, made.add(row, "slo", flags), flags)
    assert {row["id"] for row in read(tmp_path / "targets.csv")} == {
        "P4-28ms-train", "P4-28ms-tpot-p99", "P4-28ms-ttft-p99",
    }  # fmt: skip
    (tmp_path / "targets.csv").unlink()
    silent = coserving()
    module.add_slo_targets(silent, silent.add(row | {"case": "both"}, "slo", silent.flags_of("slo")), flags)
    assert not (tmp_path / "targets.csv").exists()
    assert module.flag_value(silent.flags_of("deferred"), "slo_tpot_ms") is None


def test_rows_of_a_shape_have_the_tokens_that_were_asked_for(coserving) -> None:
    import json

    from fineinfer.text.detokenizer import Detokenizer
    from fineinfer.text.tokenizer import load_tokenizer

    made = coserving("--row-tokens", "200")
    tokenizer = load_tokenizer(Path(made.model[0]))
    rows = [json.loads(line)["messages"] for line in made.rows.read_text().splitlines()]
    assert len(rows) == 512
    for row in rows[:: len(rows) // 4]:
        ids = tokenizer.apply_chat_template(row, return_dict=False)
        assert len(ids) == 200 and max(ids) < made.vocab_size == 1000 and 0 not in ids
    shown = Detokenizer(tokenizer, prompt_ids=[17, 18])
    assert [shown.step(token) for token in (10, 999, 500)] == [" w10", " w999", " w500"], "every token shows at once"


def test_new_columns_leave_older_rows_what_they_were(bench, tmp_path: Path) -> None:
    harness, path = bench("harness"), tmp_path / "rows.csv"
    harness.write_csv(path, [{"a": 1, "b": "x,y"}])
    harness.write_csv(path, [{"a": 2, "c": 3.5}, {"b": "z"}])
    found = [(row["a"], row["b"], row["c"]) for row in read(path)]
    assert found == [("1", "x,y", ""), ("2", "", "3.5"), ("", "z", "")]
    assert path.read_text().splitlines()[0] == "a,b,c,card,commit,date" and list(tmp_path.iterdir()) == [path]


def test_the_load_of_others_is_a_share(bench) -> None:
    harness = bench("harness")
    others, end = harness.OtherLoad(), time.perf_counter() + 0.2
    while time.perf_counter() < end:  # our own work is not theirs
        pass
    assert 0.0 <= others.share() <= 1.0


# ---------------------------------------------------------------- the picture


def test_the_picture_shows_the_newest_row_of_each(bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, path = bench("coserving_plot"), tmp_path / "coserving.csv"
    head = "case,policy,slo_tpot_ms,rate,tpot_p99_ms,train_tok_s,card\n"
    gpu = "both,slo,20.0,16.0,21,7000,CARD\nboth,slo,20.0,16.0,19,8000,CARD\nboth,deferred,,4.0,7,500,CARD\n"
    others = (
        "inference alone,slo,20.0,16.0,8,0,CARD\nboth,,,16.0,220,346,CARD\nboth,slo,20.0,16.0,18,9000,NVIDIA H200\n"
    )
    rows = f"{gpu}{others}".replace("CARD", module.PEER_CARD)
    path.write_text(f"{head}both,slo,20.0,16.0,99,1,CPU x86\n{rows}")
    assert module.points(path) == {
        "slo, 20 ms": {16.0: (19.0, 8000.0)},
        "deferred": {4.0: (7.0, 500.0)},
        "slo, 20 ms (H200)": {16.0: (18.0, 9000.0)},
    }
    path.write_text(f"{head}both,slo,20.0,16.0,99,1,CPU x86\n")
    assert module.points(path) == {"slo, 20 ms (CPU x86)": {16.0: (99.0, 1.0)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert not module.plot(path, tmp_path / "none.svg")
    assert "matplotlib is not installed" in capsys.readouterr().out and not (tmp_path / "none.svg").exists()


def test_the_same_rows_give_the_same_file(bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `dev` is not installed")
    module, path = bench("coserving_plot"), tmp_path / "coserving.csv"
    path.write_text("case,policy,slo_tpot_ms,rate,tpot_p99_ms,train_tok_s,card\nboth,slo,20.0,16.0,19,8000,H100\n")
    pictures = [tmp_path / "docs" / name for name in ("a.svg", "b.svg")]
    assert all(module.plot(path, picture) for picture in pictures)
    assert pictures[0].read_bytes() == pictures[1].read_bytes() and b"</svg>" in pictures[0].read_bytes()
