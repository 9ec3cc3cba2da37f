"""benchmarks/simulate.py: its clock, its books and its figures; the scheduler in it is the engine's own."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fineinfer.scheduler.policy import Turn
from fineinfer.scheduler.slo import SloPolicy, SloTargets

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = [(30, 1), (200, 40), (65, 100), (700, 12), (3, 150)]
TARGETS = SloTargets(ttft_s=0.1, tpot_s=20e-3)
POLICIES = ("deferred", "inference-first", "train-first", "slo")


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import simulate

    return simulate


def run(simulate: ModuleType, rate: float, seconds: float, seed: int = 3, **setup: Any) -> Any:
    arrivals = list(simulate.poisson(rate, seconds, LENGTHS, seed))
    setup = {"max_model_len": 4096, "targets": TARGETS} | setup
    return simulate.Simulation(simulate.Setup(**setup), simulate.CostModel()).run(arrivals, seconds)


def figures(outcome: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(outcome).items() if key not in ("run_s", "pace")}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_asked_for_comes_and_a_seed_gives_the_same_run(simulate: ModuleType, policy: str) -> None:
    first, again, other = (run(simulate, 8, 6, seed, policy=policy) for seed in (3, 3, 4))
    assert first.tokens_out == first.tokens_asked == sum(r.arrival.num_output for r in first.done) > 1000
    assert first.num_unfinished == first.num_refused == 0 and first.broken is None
    assert figures(first) == figures(again) != figures(other)
    assert min(first.ttft) > simulate.CostModel().gemm(3)
    assert first.end_s >= first.last_token_s > max(r.arrival.due_s for r in first.done)


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_trains_all_the_time_at_the_speed_of_the_units(simulate: ModuleType, policy: str) -> None:
    idle, cost = run(simulate, 0, 5, policy=policy), simulate.CostModel()
    assert idle.train_share == pytest.approx(1.0, abs=2e-3)
    update_s = cost.train_units * cost.train_unit_s + cost.optimizer_s
    assert idle.train_tok_s == pytest.approx(cost.train_rows / update_s, rel=2e-3)
    assert run(simulate, 2, 5, policy=policy, training=False).trained_s == 0.0


@pytest.mark.parametrize("policy", ["deferred", "inference-first", "train-first"])
def test_units_in_one_go_are_what_the_scheduler_decides_unit_by_unit(simulate: ModuleType, policy: str) -> None:
    at_once = run(simulate, 1, 5, policy=policy)
    arrivals = list(simulate.poisson(1, 5, LENGTHS, 3))
    setup = simulate.Setup(policy=policy, max_model_len=4096, targets=TARGETS)
    asked = simulate.Simulation(setup, simulate.CostModel())
    asked._policy = SloPolicy(TARGETS)  # not the scheduler's: only makes the loop ask it for every unit
    assert figures(asked.run(arrivals, 5)) == figures(at_once)
    assert at_once.train_share > 0.1


def test_slo_keeps_its_targets_where_the_load_allows_and_trains_the_rest(simulate: ModuleType) -> None:
    slo, first = (run(simulate, 8, 20, policy=policy) for policy in ("slo", "inference-first"))
    assert simulate.percentile(slo.tpot, 0.99) <= 20.4e-3 and simulate.percentile(slo.ttft, 0.99) <= 0.1
    assert slo.train_share > 0.4 > first.train_share


def test_beside_steps_training_keeps_the_targets_and_more_of_its_speed(simulate: ModuleType) -> None:
    between, beside = (run(simulate, 16, 20, policy="slo", beside=how) for how in (False, True))
    assert simulate.percentile(beside.tpot, 0.99) <= 20e-3 and simulate.percentile(beside.ttft, 0.99) <= 0.1
    assert beside.train_share > between.train_share + 0.05 and beside.num_unfinished == 0
    assert (
        simulate.CostModel().beside(1)[0] < simulate.CostModel().beside(160)[0] < simulate.CostModel().beside(9999)[0]
    )


def test_a_step_costs_its_rows_its_context_and_the_head(simulate: ModuleType) -> None:
    cost = simulate.CostModel(gemm_rows=(1, 10), gemm_s=(1.0, 10.0), head_s=0.5, attention_flop_per_pair=0.0)
    assert [cost.gemm(rows) for rows in (0, 1, 4, 10, 20)] == pytest.approx([1, 1, 4, 10, 20])
    cost = dataclasses.replace(cost, kv_bytes_per_token=1, kv_bytes_per_s=100.0)
    setup = simulate.Setup(max_model_len=64, max_num_batched_tokens=16, kv_slots=64, training=False)
    outcome = simulate.Simulation(setup, cost).run([simulate.Arrival(2.0, 10, 3)], 1.0)
    assert outcome.ttft == pytest.approx([10 + 0.5 + 0.10])
    assert outcome.tpot == pytest.approx([1 + 0.5 + (0.11 + 0.12) / 2])


def test_cost_model_goes_through_json(simulate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    cost = simulate.CostModel(name="other", gemm_rows=(1, 512), gemm_s=(2e-3, 4e-3), optimizer_s=1e-3)
    cost.save(path)
    assert simulate.CostModel.load(path) == cost
    path.write_text(json.dumps({"head_s": 1.0}))
    assert simulate.CostModel.load(path) == simulate.CostModel(head_s=1.0)
    for wrong in ({"haed_s": 1.0}, {"gemm_rows": [1, 2]}, {"gemm_rows": [2, 1], "gemm_s": [1.0, 2.0]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"card\.json"):
            simulate.CostModel.load(path)


def test_a_trace_is_read_with_its_times(simulate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,374,44\n"
        "2023-11-17 00:00:03.5000000,12,0\n"
        "2023-11-17 00:00:01.0000000,879,55\n"
    )
    arrivals = simulate.read_trace(path, speed=2.0)
    assert [dataclasses.astuple(a)[:4] for a in arrivals] == [
        (0.0, 374, 44, True),
        (0.75, 879, 55, True),
        (2.0, 12, 1, True),
    ]
    assert len(simulate.read_trace(path, seconds=3.0)) == 2
    twice = simulate.read_trace(path, speed=2.0, repeat=2)
    assert [a.due_s for a in twice] == [0.0, 0.75, 2.0, 2.0, 2.75, 4.0]
    path.write_text("when,ContextTokens,GeneratedTokens\n1,2,3\n")
    with pytest.raises(ValueError, match="TIMESTAMP"):
        simulate.read_trace(path)


def test_starving_is_being_overtaken_too_often_or_waiting_beyond_the_work_ahead(simulate: ModuleType) -> None:
    def outcome(*times: tuple[float, float, int], held_s: float = 0.0) -> Any:
        done = [
            simulate.Request(simulate.Arrival(due_s, num_prompt, 1), 0.5, 0.1, 1.0, held_s, 9, first_s)
            for due_s, first_s, num_prompt in times
        ]
        return simulate.Outcome(done=done, full_forward_s=0.5)

    setup, quick = simulate.Setup(max_num_seqs=1), [(1.0 + i, 2.0 + i, 9) for i in range(3)]
    counted = outcome((0.0, 7.9, 9), (0.0, 8.0, 9), *quick, (1.0, 1.5, 1), (9.5, 9.6, 9)).overtaken()
    assert [(prompts, riders) for _, prompts, riders in counted] == [(0, 0)] * 5 + [(3, 1)] * 2
    assert simulate.starved(outcome((0.0, 8.0, 9), *quick), setup) is None
    assert "by 4 later prompts" in simulate.starved(outcome((0.0, 8.0, 9), *quick, (1.0, 1.5, 9)), setup)
    riders = [(1.0 + i, 2.0 + i, 1) for i in range(9)]
    assert "by 9 later one-token" in simulate.starved(outcome((0.0, 12.0, 9), *riders, held_s=8.0), setup)
    assert simulate.starved(outcome((0.0, 12.0, 9), *riders[:8], held_s=8.0), setup) is None
    late = outcome((0.0, 9.0, 9))
    assert late.wait_ratio() == pytest.approx(9.0 / 2.0)
    assert "waited 4.5 times" in simulate.starved(late, setup)
    assert simulate.starved(outcome((0.0, 9.0, 9), held_s=4.0), setup) is None


def test_starving_is_less_training_than_promised_or_too_many_that_pass(simulate: ModuleType) -> None:
    setup = simulate.Setup(targets=SloTargets(train_share_min=0.05))
    outcome = simulate.Outcome(horizon_s=35.0, windows_s=[5.0, 0.39, 0.35, 0.0])
    assert outcome.least_share == pytest.approx(0.037), "the last window is not whole"
    assert "only 3.7% of the time" in simulate.starved(outcome, setup)
    assert simulate.starved(outcome, dataclasses.replace(setup, policy="deferred")) is None
    outcome = simulate.Outcome(horizon_s=5.0, passed_over=1.5)
    assert outcome.least_share is None and "1.5 times as many" in simulate.starved(outcome, setup)


def test_batch_requests_pass_seven_of_eight_by_and_no_more(
    simulate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = list(simulate.poisson(100, 60, [(60, 8)], 3))  # more than four rows can serve
    arrivals = [dataclasses.replace(a, priority=i % 10 == 0) for i, a in enumerate(arrivals)]
    setup = simulate.Setup("inference-first", max_num_seqs=4, training=False)
    outcome = simulate.Simulation(setup, simulate.CostModel()).run(arrivals, 60.0)
    assert 0.1 < outcome.passed_over <= 1.0 and simulate.starved(outcome, setup) is None
    assert outcome.longest_wait_s(batch=True) == outcome.longest_wait_s() > 10.0
    monkeypatch.setattr("fineinfer.scheduler.waiting.AGED_EVERY", 10**6)
    outcome = simulate.Simulation(setup, simulate.CostModel()).run(arrivals, 60.0)
    assert outcome.passed_over > 1.0 and "as may passed one" in simulate.starved(outcome, setup)


def test_an_overload_is_a_multiple_of_the_capacity_and_training_keeps_its_share(simulate: ModuleType) -> None:
    setup, cost = simulate.Setup(max_num_seqs=16, targets=TARGETS), simulate.CostModel()
    sample = list(simulate.poisson(100, 10, LENGTHS, 3))
    capacity = simulate.capacity(sample, setup, cost)
    shares, busy_s = [], []
    for factor in (0.5, 2.0):
        arrivals = list(simulate.poisson(factor * capacity, 30, LENGTHS, 4))
        outcome = simulate.Simulation(setup, cost).run(arrivals, 30.0)
        assert simulate.starved(outcome, setup) is None
        shares.append(outcome.least_share)
        busy_s.append(outcome.last_token_s)
    assert shares[0] > 0.1 and shares[1] == pytest.approx(0.05, abs=0.01)
    assert busy_s[0] < 35.0 and busy_s[1] == pytest.approx(2 * 30.0, rel=0.15)
    bursts = simulate.in_bursts(sample, rate=200.0, burst_s=2.0, pause_s=3.0)
    assert [dataclasses.astuple(a)[1:] for a in bursts] == [dataclasses.astuple(a)[1:] for a in sample]
    assert all(a.due_s % 5.0 <= 2.0 + 1e-9 for a in bursts) and bursts[-1].due_s == pytest.approx(12.0, abs=1.0)


def test_predicted_lengths_serve_more_than_strict_ones(simulate: ModuleType, tmp_path: Path) -> None:
    files = []
    for name, output in (("brief", 4), ("long", 120)):
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text("prompt,output\n" + "".join(f"{40 + i},{output + i}\n" for i in range(8)))
    results = tmp_path / "rows.csv"
    flags = ["--rate", "20", "--seconds", "30", "--lengths", *map(str, files), "--policy", "slo", "--slo-tpot-ms", "20"]
    sizes = ["--kv-slots", "1500", "--max-model-len", "512", "--slo-ttft-ms", "300", "--without-max-tokens", "1"]
    kinds = ["known", "predicted", "pooled", "strict"]
    assert simulate.main([*flags, *sizes, "--admission", *kinds, "--results", str(results)]) == 0
    with results.open() as file:
        rows = {row["admission"]: row for row in csv.DictReader(file)}
    good = {kind: float(rows[kind]["goodput_tok_s"]) for kind in kinds}
    assert good["known"] >= good["predicted"] > 1.5 * good["strict"]
    preemptions = {kind: int(rows[kind]["preemptions"]) for kind in kinds}
    assert preemptions["strict"] == preemptions["known"] == 0 <= preemptions["predicted"] < preemptions["pooled"]


def test_hostile_mixes_preempt_but_starve_nobody(
    simulate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--adversarial", "400", "--max-model-len", "2048", "--kv-slots", "4096", "--policy", "slo", "deferred"]
    results = tmp_path / "rows.csv"
    assert simulate.main([*flags, "--overload", "2", "--results", str(results)]) == 0
    with results.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["slo", "deferred"]
    for row in rows:
        assert (row["requests"], row["unfinished"], row["simulated"]) == ("400", "0", "true")
        assert int(row["preemptions"]) > 0 and row["cost_model"] == "8b-h100"
    assert "8b-h100" in capsys.readouterr().out


def test_a_prompt_that_gets_no_rows_is_reported(simulate: ModuleType) -> None:
    """More running requests than rows of a forward: each newcomer of one token decodes before the prompt gets a row."""
    arrivals = [simulate.Arrival(0.01 * i, 1, 60) for i in range(400)]
    arrivals.insert(8, simulate.Arrival(0.0701, 300, 4))
    verdicts = []
    for max_num_seqs in (4, 8):
        setup = simulate.Setup("inference-first", max_num_seqs=max_num_seqs, max_num_batched_tokens=4)
        outcome = simulate.Simulation(setup, simulate.CostModel()).run(arrivals, 1.0)
        verdicts.append(simulate.starved(outcome, setup))
    assert verdicts[0] is None and "one-token" in verdicts[1]


def test_a_request_that_nothing_lets_run_is_reported(simulate: ModuleType, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59,20,4\n")
    flags = ["--trace", str(trace), "--seconds", "1", "--policy", "deferred", "--results", str(tmp_path / "rows.csv")]
    assert simulate.main(flags) == 0
    setup = simulate.Setup(policy="deferred", deferral_bound_s=2.0)
    held = simulate.Simulation(setup, simulate.CostModel())
    held._scheduler._policy = lambda load: Turn(admit=False, train=True)
    outcome = held.run([simulate.Arrival(0.0, 20, 4)], 1.0)
    assert outcome.num_unfinished == 1 and "1 requests wait" in simulate.starved(outcome, setup)
