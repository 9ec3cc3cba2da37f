"""Policy ``slo`` on a virtual clock: the real scheduler, policies and latency model, a cost model for the device."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from statistics import median

import pytest

from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import FinishReason, SamplingParams
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.policy import LoadState, TokenClock
from fineinfer.scheduler.scheduler import Scheduler, SchedulerLimits, TrainingState
from fineinfer.scheduler.sequence import Sequence
from fineinfer.scheduler.slo import (
    CATCH_UP,
    MAX_PACE,
    MAX_PROMPT_BESIDE,
    MIN_PACE,
    LoadFree,
    SloPolicy,
    SloTargets,
    make_policy,
)

UNIT_S = 2.0e-3  # an 8B layer over 2,048 rows on an H100
UNITS = 400  # of an update
SLOWED, TRAINED_BESIDE = 2.0, 0.7  # a step beside training, and training beside steps: 16 to 256 rows on an H100


def step_s(num_rows: int) -> float:
    """A forward of the 8B shape on an H100, near enough."""
    return 6.0e-3 + 8e-6 * min(num_rows, 256) + 24e-6 * max(0, num_rows - 256)


@dataclass
class Outcome:
    """What a run gave: latencies of requests in seconds, and the part of the time that was trained."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    share: float = 0.0
    pace: float = 1.0

    def p99(self, name: str) -> float:
        values = sorted(getattr(self, name))
        return values[int(0.99 * len(values))]


def simulate(
    rate: float,
    seconds: float,
    policy: str = "slo",
    training: bool = True,
    seed: int = 1,
    beside: bool = False,
    **targets: float,
) -> Outcome:
    """Poisson arrivals of ShareGPT-like lengths beside a job that never ends."""
    max_share = targets.pop("max_share", 1.0)  # the job's own
    latency, made = LatencyModel(), make_policy(policy, SloTargets(**targets))
    kv = KVCache(200_000, 256, 4096)
    scheduler = Scheduler(kv, SchedulerLimits(256, 4096, 1.0, 512), made, latency)
    for rows in (1, 64, 256):
        latency.observe("decode", rows, step_s(rows))
    latency.observe("prefill", 512, step_s(512))
    latency.observe("forward", 2048, UNIT_S)
    rng, now, due, count, done, trained = random.Random(seed), 0.0, 0.0, 0, 0, 0.0
    outcome = Outcome()
    while now < seconds:
        while due <= now:
            if rate:
                num_prompt, num_output = int(rng.expovariate(1 / 200)) + 8, int(rng.expovariate(1 / 200)) + 8
                total = num_prompt + num_output
                sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
                scheduler.add(Sequence(str(count), b"", [1] * num_prompt, sampling, min(total, 4096), due))
                count += 1
            due += rng.expovariate(rate) if rate else seconds
        left = UNITS - done % UNITS
        state = TrainingState()
        if training:
            state = TrainingState(True, done % UNITS != 0, left * UNIT_S, UNIT_S, 0, beside, max_share)
        plan = scheduler.plan(now, state)
        overlapped = beside and plan.train and bool(plan.chunks)
        if plan.chunks:
            took = step_s(plan.num_rows) * (SLOWED if overlapped else 1.0)
            now += took
            kind = "decode" if plan.num_rows == len(plan.chunks) else "prefill"
            latency.observe(kind, plan.num_rows, took, beside=overlapped)
            if overlapped:
                trained += TRAINED_BESIDE * took
                for _ in range(round(TRAINED_BESIDE * took / UNIT_S)):
                    latency.observe("forward", 2048, UNIT_S / TRAINED_BESIDE, beside=True)
            for chunk in plan.chunks:
                sequence = chunk.sequence
                scheduler.launched(chunk)
                scheduler.commit(chunk, 5 if chunk.samples else None, now)
                if len(sequence.prompt) + len(sequence.output) >= sequence.max_total_tokens:
                    scheduler.finish(sequence, FinishReason.LENGTH)
                    outcome.ttft.append(sequence.first_token_s - sequence.arrival_s)
                    if len(sequence.output) > 1:
                        outcome.tpot.append((now - sequence.first_token_s) / (len(sequence.output) - 1))
        if plan.train and not overlapped:
            done, now, trained = done + 1, now + UNIT_S, trained + UNIT_S
            latency.observe("forward", 2048, UNIT_S)
        if not plan.chunks and not plan.train:
            now = min(due, now + 1e-3)
    outcome.share = trained / now
    outcome.pace = getattr(made, "pace", 1.0)
    return outcome


def test_targets_are_kept_and_the_rest_is_trained() -> None:
    busy = simulate(16, 40, tpot_s=20e-3, ttft_s=0.1)
    assert busy.p99("tpot") <= 20.4e-3 and busy.p99("ttft") <= 0.1
    assert busy.share > 0.4
    quiet = simulate(4, 40, tpot_s=20e-3, ttft_s=0.1)
    assert quiet.p99("tpot") <= 20.4e-3 and quiet.p99("ttft") <= 0.1
    assert quiet.share > busy.share + 0.05
    assert simulate(0, 5, tpot_s=20e-3).share > 0.99


def test_a_wider_target_buys_training() -> None:
    shares = [simulate(16, 25, tpot_s=tpot_s, ttft_s=0.2).share for tpot_s in (10e-3, 20e-3, 40e-3)]
    assert shares[0] < shares[1] < shares[2]


def test_the_older_policies_do_worse_at_one_or_the_other() -> None:
    slo, deferred = simulate(16, 40, tpot_s=20e-3, ttft_s=0.1), simulate(16, 40, "deferred")
    assert deferred.share < 0.1 < slo.share  # training only while the batch is empty
    rare = simulate(1, 40, tpot_s=20e-3, ttft_s=0.1)
    assert simulate(1, 40, "train-first").p99("ttft") > 5 * rare.p99("ttft")  # waits for whole updates


def test_unset_targets_are_three_times_the_latency_without_training() -> None:
    alone, beside = simulate(8, 40, training=False), simulate(8, 40)
    assert beside.share > 0.3
    assert beside.p99("tpot") <= 3.1 * alone.p99("tpot")


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_the_minimum_share_holds_under_overload(share: float) -> None:
    overloaded = simulate(60, 14, tpot_s=5e-3, ttft_s=0.05, train_share_min=share)
    assert share * 0.9 <= overloaded.share <= share + 0.05
    assert simulate(60, 7, tpot_s=5e-3, ttft_s=0.05, train_share_min=0.0).share < 0.01


@pytest.mark.parametrize("step_s", [5e-3, 0.1, 0.5])
def test_the_minimum_share_holds_however_long_steps_are(step_s: float) -> None:
    policy, unit_s, now_s, trained_s, last_unit_s = SloPolicy(SloTargets(0.1, 5e-3, 0.05)), 1e-3, 0.0, 0.0, 0.0
    longest_s, since_step_s = 0.0, 0.0
    while now_s < 60.0:
        load = LoadState(
            oldest_wait_s=1.0, num_running=8, training_ready=True, update_started=True, update_left_s=1.0,
            deferral_bound_s=1.0, now_s=now_s, prefill_tokens=100, step_s=step_s, unit_s=unit_s, trained_s=trained_s,
            last_unit_s=last_unit_s,
        )  # fmt: skip
        if policy(load).train:
            last_unit_s, now_s, trained_s = now_s + 1e-6, now_s + unit_s, trained_s + unit_s
            since_step_s += unit_s
            longest_s = max(longest_s, since_step_s)
        else:
            now_s, since_step_s = now_s + step_s, 0.0
    assert 0.047 <= trained_s / now_s <= 0.06  # of a window of ten seconds, looked at between steps
    assert longest_s <= max(unit_s, CATCH_UP * 0.05 * step_s) + 1e-9, "requests do not wait for more"


def test_the_maximum_share_holds_at_idle() -> None:
    assert simulate(0, 30, train_share_max=0.3).share == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("policy", ["slo", "deferred", "inference-first", "train-first"])
def test_a_job_that_wants_less_gets_less_under_every_policy(policy: str) -> None:
    for share, limits in ((0.2, {"max_share": 0.2}), (0.1, {"max_share": 0.5, "train_share_max": 0.1})):
        assert simulate(0, 12, policy, **limits).share == pytest.approx(share, abs=0.03)
        assert simulate(1, 12, policy, **limits).share <= share + 0.03
    assert simulate(0, 5, policy).share > 0.99


def test_what_a_job_may_take_goes_before_what_training_is_promised() -> None:
    for beside in (False, True):
        outcome = simulate(60, 15, tpot_s=5e-3, ttft_s=0.05, train_share_min=0.2, max_share=0.05, beside=beside)
        assert outcome.share == pytest.approx(0.05, abs=0.02)


def test_a_prompt_waits_for_one_unit_at_most() -> None:
    alone = simulate(2, 60, training=False, seed=5)
    beside = simulate(2, 60, tpot_s=60e-3, ttft_s=0.5, seed=5)
    assert max(b - a for a, b in zip(sorted(alone.ttft), sorted(beside.ttft), strict=False)) < 25e-3
    assert beside.share > 0.8


def test_the_pace_falls_while_targets_are_missed_and_recovers() -> None:
    policy, free = SloPolicy(SloTargets(ttft_s=0.1, tpot_s=20e-3)), LoadFree(7e-3, 20e-3)
    for _ in range(160):
        policy.observe_request(0.05, 30e-3, free)
    low = policy.pace
    assert MIN_PACE <= low < 0.3
    for _ in range(16 * 60 + 256):
        policy.observe_request(0.05, 10e-3, free)
    assert policy.pace == MAX_PACE
    for _ in range(64):
        policy.observe_request(0.5, None, free, trained_s=0.1)  # late, but so they would have been without training
    assert policy.pace == MAX_PACE
    for _ in range(64):
        policy.observe_request(0.5, None, free, trained_s=0.45)  # late by training; these have one token only
    assert policy.pace < MAX_PACE


def test_late_first_tokens_take_training_from_beside_prompts_before_they_cost_pace() -> None:
    policy, free = SloPolicy(SloTargets(ttft_s=0.1, tpot_s=20e-3)), LoadFree(7e-3, 20e-3)
    policy(beside())
    for _ in range(3 * 16):
        policy.observe_request(0.12, 15e-3, free, trained_s=0.1)
    assert policy.prompt_beside == 0 and policy.pace == MAX_PACE
    assert not policy(beside(prefill_tokens=1, clocks=(TokenClock(9.999, 1),))).train
    for _ in range(16):
        policy.observe_request(0.12, 15e-3, free, trained_s=0.1)
    assert policy.pace < MAX_PACE, "that was not enough"
    for _ in range(16):
        policy.observe_request(0.095, 15e-3, free)
    assert policy.prompt_beside == 0, "in time, but barely"
    for _ in range(256 + 16 * 10):
        policy.observe_request(0.05, 15e-3, free)
    assert policy.prompt_beside == MAX_PROMPT_BESIDE
    for _ in range(16):
        policy.observe_request(0.12, 25e-3, free, trained_s=0.1)
    assert policy.pace < MAX_PACE and policy.prompt_beside == MAX_PROMPT_BESIDE, "tokens were late, too"


def test_beside_steps_more_is_trained_within_the_same_targets() -> None:
    for rate, least in ((16, 0.6), (4, 0.65)):
        between = simulate(rate, 40, tpot_s=20e-3, ttft_s=0.1)
        beside = simulate(rate, 40, tpot_s=20e-3, ttft_s=0.1, beside=True)
        assert beside.p99("tpot") <= 20.4e-3 and beside.p99("ttft") <= 0.1
        assert beside.share > least and (rate < 16 or beside.share > between.share + 0.05)
    assert simulate(0, 5, tpot_s=20e-3, beside=True).share > 0.99


def test_beside_steps_training_stops_for_targets_that_it_would_break() -> None:
    wide, narrow = (simulate(16, 25, tpot_s=tpot_s, ttft_s=0.2, beside=True) for tpot_s in (25e-3, 11e-3))
    assert narrow.p99("tpot") <= 11.5e-3 < wide.p99("tpot")
    assert narrow.share < wide.share
    late, early = (simulate(16, 25, tpot_s=40e-3, ttft_s=ttft_s, beside=True) for ttft_s in (0.02, 0.2))
    assert median(late.ttft) < median(early.ttft) and late.share < 0.7 * early.share  # the p99 is a long prompt's own


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_beside_steps_the_minimum_share_holds_under_overload(share: float) -> None:
    overloaded = simulate(60, 14, tpot_s=5e-3, ttft_s=0.05, train_share_min=share, beside=True)
    assert share * 0.9 <= overloaded.share <= share + 0.05
    assert simulate(60, 7, tpot_s=5e-3, ttft_s=0.05, train_share_min=0.0, beside=True).share < 0.01
    assert simulate(8, 30, tpot_s=60e-3, train_share_max=0.3, beside=True).share == pytest.approx(0.3, abs=0.04)


def beside(**load: object) -> LoadState:
    known = {"oldest_wait_s": None, "num_running": 1, "training_ready": True, "update_started": True}
    known |= {"update_left_s": 1.0, "deferral_bound_s": 1.0, "now_s": 10.0, "step_s": 7e-3, "unit_s": 3e-3}
    known |= {"step_beside_s": 15e-3, "beside": True, "trained_s": 1e3}
    return LoadState(**(known | load))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"clocks": (TokenClock(9.999, 0),)}, (True, False)),
        ({"clocks": (TokenClock(9.999, 0),), "unit_s": 6e-3}, (True, True)),
        ({"clocks": (TokenClock(9.999, 1),)}, (True, False)),
        ({"clocks": (TokenClock(9.99, 0),)}, (False, True)),
        ({"clocks": (TokenClock(9.999, 1), TokenClock(9.99, 0)), "num_running": 2}, (False, True)),
        ({"clocks": (TokenClock(9.999, 1),), "num_running": 2}, (True, True)),
        ({"clocks": (TokenClock(9.999, 1),), "in_flight_s": 21e-3}, (True, True)),
        ({"clocks": (TokenClock(9.999, 1),), "prefill_tokens": 200}, (True, True)),
        ({"clocks": (TokenClock(9.999, 9),), "prefill_tokens": 300}, (False, True)),
        ({"clocks": (TokenClock(9.999, 9),), "prefill_tokens": 200, "prefilled_tokens": 512}, (False, True)),
        ({"clocks": (TokenClock(9.999, 9),), "queued_tokens": 300, "oldest_wait_s": 0.0}, (False, True)),
        ({"prefill_tokens": 200, "prefill_beside_s": 0.05, "oldest_wait_s": 0.04}, (True, True)),
        ({"prefill_tokens": 200, "prefill_beside_s": 0.05, "oldest_wait_s": 0.05}, (False, True)),
        ({"clocks": (TokenClock(9.0, 0),), "training_ready": False}, (False, True)),
    ],
)  # fmt: skip
def test_a_step_has_training_beside_it_or_waits_for_a_unit_while_every_token_is_in_time(
    load: dict[str, object], expected: tuple[bool, bool]
) -> None:
    """(train, infer) at ten seconds, with 19.2 ms a token: a step takes 7 ms, 15 ms beside training, a unit 3 ms."""
    turn = SloPolicy(SloTargets(0.1, 20e-3, 0.0))(beside(**load))
    assert (turn.train, turn.infer) == expected


def test_requests_that_are_early_do_not_wait_for_long_when_a_job_begins() -> None:
    policy, first_s, now_s, done = SloPolicy(SloTargets(0.1, 20e-3, 0.0)), 5.0, 10.0, 700  # 7 ms a token so far
    steps: list[float] = []
    while len(steps) < 40:
        turn = policy(beside(now_s=now_s, clocks=(TokenClock(first_s, done),)))
        assert turn.train
        now_s += 15e-3 if turn.infer else 3e-3
        if turn.infer:
            done += 1
            steps.append(now_s)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 2 * 20e-3 + 15e-3 and sum(gaps) / len(gaps) > 20e-3, "slack is spent, a little at a time"


def test_what_training_beside_a_step_costs_it_is_what_it_took_longer() -> None:
    latency = LatencyModel()
    for _ in range(10):
        latency.observe("decode", 64, 7e-3)
        latency.observe("forward", 2048, 2e-3)
    assert latency.delayed_s == latency.trained_s == pytest.approx(20e-3)
    assert latency.estimate("decode", 64, beside=True) == pytest.approx(14e-3), "not seen yet: twice"
    assert latency.observe("decode", 64, 12e-3, beside=True) == pytest.approx(7e-3)
    assert latency.observe("forward", 2048, 3e-3, beside=True) == pytest.approx(2e-3)
    assert latency.delayed_s == pytest.approx(25e-3) and latency.trained_s == pytest.approx(22e-3)
    assert latency.estimate("decode", 64, beside=True) == pytest.approx(12e-3)
    assert latency.estimate("decode", 64) == pytest.approx(7e-3)
