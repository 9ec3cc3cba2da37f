"""API calls, engine events and crashes in any order against a model of the job's states."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fineinfer.server.job_validation import Validation

from .jobs_life import KEYS, NAMES, Life, scripted_child

NUM_CALLS, CALLS_PER_LIFE = 1_200, 120
MID_KINDS = ("cancel", "pause", "resume", "create", "engine", "engine dies", "die")
HAPPENINGS = ("create",) * 4 + ("act",) * 6 + ("get", "delete", "local") + ("engine",) * 6 + ("deliver",) * 8 + (
    "turn",) * 6 + ("engine dies", "server dies", "calm")  # fmt: skip

Mid = list[tuple[str, int, int]]


@pytest.fixture
def new_life(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Life]:
    def make() -> Life:
        life = Life()
        monkeypatch.setattr(Validation, "_run_child", scripted_child(life))
        return life

    return make


def some_mid(rng: random.Random) -> Mid:
    """Mostly nothing happens in the middle; sometimes a few things do."""
    return [(rng.choice(MID_KINDS), rng.randrange(100), rng.randrange(100)) for _ in range(rng.choice((0, 0, 1, 2, 3)))]


def happen(life: Life, rng: random.Random) -> None:
    what, worker, user, index = rng.choice(HAPPENINGS), rng.randrange(2), rng.randrange(2), rng.randrange(6)
    if what == "create":
        key = rng.choice((None, "k0", "k1", "k2", "k3", "k4", "k5"))
        fault = rng.randrange(4) if rng.random() < 0.2 else -1
        life.create(worker, user, rng.choice(NAMES), key, rng.random() < 0.15, fault)
    elif what == "act":
        life.act(worker, user, rng.choice(("pause",) * 3 + ("resume",) * 3 + ("cancel",)), index)
    elif what == "get":
        life.get(worker, user, index)
    elif what == "delete":
        life.delete_model(worker, user, rng.choice(NAMES))
    elif what == "local":
        life.create_local(rng.choice(NAMES), rng.randint(-1, 1), rng.random() < 0.5)
    elif what == "engine":
        life.engine_works(rng.randrange(100), rng.randrange(100))
    elif what == "deliver":
        life.deliver(some_mid(rng), rng.randrange(6) if rng.random() < 0.25 else None)
    elif what == "turn":
        life.boot(some_mid(rng))
        life.turn(some_mid(rng), rng.randrange(6) if rng.random() < 0.2 else None)
    elif what == "engine dies":
        life.engine_dies()
    elif what == "server dies":
        life.server_dies()
    else:
        life.check_when_calm()


def test_a_thousand_api_calls_with_crashes_agree_with_the_model(new_life: Callable[[], Life]) -> None:
    calls, moves, seed = 0, set(), 0
    while calls < NUM_CALLS:
        life, rng = new_life(), random.Random(seed)
        try:
            while life.calls < CALLS_PER_LIFE:
                happen(life, rng)
                life.check()
            life.check_when_calm()
            life.check_history()
            moves |= {(row["old"], row["new"]) for row in life.store.db.rows("SELECT old, new FROM moves")}
        except BaseException as error:
            error.add_note(f"seed {seed}, after {life.calls} calls")
            raise
        finally:
            life.close()
        calls, seed = calls + life.calls, seed + 1
    assert len(moves) >= 18, "nearly every way through the states was taken"


class JobLife(RuleBasedStateMachine):
    """The same by hypothesis, which finds the shortest way to a violation."""

    make: Callable[[], Life]

    def __init__(self) -> None:
        super().__init__()
        self.life = type(self).make()
        self.life.create(0, 0, "a", None)
        self.life.boot([])
        for _ in range(2):
            self.life.turn([])

    mids = st.lists(st.tuples(st.sampled_from(MID_KINDS), st.integers(0, 20), st.integers(0, 20)), max_size=2)
    fuses = st.one_of(st.none(), st.none(), st.integers(0, 8))
    two = st.integers(0, 1)

    @rule(worker=two, user=two, name=st.sampled_from(NAMES), key=st.sampled_from([None, "k0", "k1"]), bad=st.booleans())
    def create(self, worker: int, user: int, name: str, key: str | None, bad: bool) -> None:
        self.life.create(worker, user, name, key, bad)

    @rule(worker=two, action=st.sampled_from(["pause", "resume", "cancel"]), index=st.integers(0, 5))
    def act(self, worker: int, action: str, index: int) -> None:
        self.life.act(worker, 0, action, index)

    @rule(mid=mids, fuse=fuses, boot=st.booleans())
    def turn(self, mid: Mid, fuse: int | None, boot: bool) -> None:
        if boot:
            self.life.boot([])
        self.life.turn(mid, fuse)

    @rule(what=st.lists(st.integers(0, 7), max_size=2), step=st.integers(0, 4), mid=mids, fuse=fuses)
    def engine(self, what: list[int], step: int, mid: Mid, fuse: int | None) -> None:
        for kind in what:
            self.life.engine_works(kind, step)
        self.life.deliver(mid, fuse)

    @rule()
    def engine_dies(self) -> None:
        self.life.engine_dies()

    @rule()
    def server_dies(self) -> None:
        self.life.server_dies()

    @rule()
    def calm(self) -> None:
        self.life.check_when_calm()

    @invariant()
    def agrees(self) -> None:
        self.life.check()

    def teardown(self) -> None:
        try:
            self.life.check_history()
        finally:
            self.life.close()


def test_jobs_are_never_lost_doubled_or_in_two_states(new_life: Callable[[], Life]) -> None:
    assert len(KEYS) == 2
    JobLife.make = staticmethod(new_life)
    run_state_machine_as_test(
        JobLife,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
