"""MemoryGovernor: atomic leases, budget cuts, bounded events."""

from __future__ import annotations

import random

import pytest

from fineinfer.memory.governor import MAX_EVENTS, MemoryGovernor


def test_lease_is_all_or_nothing() -> None:
    governor = MemoryGovernor(100)
    assert governor.lease("kv", 70)
    assert not governor.lease("training", 31)
    assert (governor.leased("training"), governor.free_bytes) == (0, 30)
    assert governor.lease("training", 30)
    assert governor.free_bytes == 0


def test_lease_sets_and_does_not_add() -> None:
    governor = MemoryGovernor(100)
    assert governor.lease("kv", 60)
    assert governor.lease("kv", 90)
    assert governor.lease("kv", 10)
    assert governor.free_bytes == 90
    assert not governor.lease("kv", 101)
    assert governor.leased("kv") == 10


def test_bad_or_too_large_requests_are_a_plain_no() -> None:
    governor = MemoryGovernor(10)
    assert not governor.lease("a", -1)
    assert not governor.lease("a", 1 << 80)
    governor.release("never seen")
    assert governor.snapshot() == {"budget_bytes": 10, "free_bytes": 10}


def test_budget_below_leases_shows_as_negative_and_only_giving_back_works() -> None:
    governor = MemoryGovernor(100)
    assert governor.lease("kv", 80) and governor.lease("training", 20)
    governor.set_budget(50)
    assert governor.free_bytes == -50
    assert not governor.lease("training", 21)
    assert governor.lease("training", 20)  # what it holds already
    assert governor.lease("kv", 60)  # less than it holds
    governor.release("training")
    assert governor.free_bytes == -10
    assert not governor.lease("training", 1)
    governor.set_budget(61)
    assert governor.lease("training", 1)
    with pytest.raises(ValueError):
        governor.set_budget(-1)


def test_snapshot_is_a_copy() -> None:
    governor = MemoryGovernor(100)
    governor.lease("kv", 40)
    snapshot = governor.snapshot()
    assert snapshot == {"budget_bytes": 100, "free_bytes": 60, "lease:kv": 40}
    snapshot["lease:kv"] = 0
    assert governor.leased("kv") == 40


def test_events_are_bounded_and_a_retry_loop_is_one_event() -> None:
    governor = MemoryGovernor(100)
    for _ in range(50):
        assert not governor.lease("training", 200)
    assert [event.kind for event in governor.events] == ["budget", "refused"]
    governor.record("kv_shrink", "kv", 64, ms=3.5)
    assert (governor.events[-1].num_bytes, governor.events[-1].ms) == (64, 3.5)
    for step in range(3 * MAX_EVENTS):
        assert governor.lease("kv", step % 90)
    assert len(governor.events) == MAX_EVENTS


def test_leases_never_pass_the_budget_by_leasing() -> None:
    rng, governor = random.Random(0), MemoryGovernor(1000)
    model: dict[str, int] = {}
    for _ in range(5000):
        owner, size = rng.choice("abcd"), rng.randrange(700)
        granted = governor.lease(owner, size)
        assert granted == (sum(model.values()) - model.get(owner, 0) + size <= 1000 or size <= model.get(owner, 0))
        if granted:
            model[owner] = size
        if rng.random() < 0.1:
            governor.release(owner)
            model.pop(owner, None)
        assert governor.free_bytes == 1000 - sum(model.values()) >= 0
