"""Random programs over KVCache and a real KVPool: every live slot must keep the tag written into it.

A slot's tag names its owner (the row that first wrote it, numbered for life) and its position there. The tag is written
into every layer, K and V, when the slot is handed out, and compared after every single operation.
"""

from __future__ import annotations

import collections
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fineinfer.memory.elastic_buffer import ElasticBuffer
from fineinfer.memory.kv_cache import KVCache
from fineinfer.memory.kv_pool import KVPool, KVSpec

from .fake_memory_driver import FakeDriver

NUM_OPERATIONS = 50_000
MAX_SLOTS, MAX_ROWS, MAX_LEN = 96, 8, 64
# 512 bytes a slot and layer: 96 slots are 12 pages, so fronts fall on page borders and inside pages.
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=64, dtype=torch.float32)

done: collections.Counter[str] = collections.Counter()


class CacheMachine(RuleBasedStateMachine):
    """The model: for each open row the tags its slots must hold."""

    driver: FakeDriver | None = None

    @initialize(num_slots=st.integers(0, MAX_SLOTS - 2))
    def create(self, num_slots: int) -> None:
        self.pool = KVPool(SPEC, MAX_SLOTS, driver=self.driver)
        self.cache = KVCache(num_slots, MAX_ROWS, MAX_LEN, pool=self.pool)
        self.views = [self.pool.layer(i).flatten(1).numpy() for i in range(SPEC.num_layers)]
        self.rows: dict[int, list[float]] = {}
        self.num_owners = 0
        self.owners: dict[int, int] = {}

    # Each operation takes two small numbers; small ones are harmless, so that failures shrink to short programs.

    def open_row(self, a: int, b: int) -> None:
        prompt_len, room = a % 24, b % 32
        had_room = self.cache.num_free >= prompt_len and len(self.rows) < MAX_ROWS
        row = self.cache.open_row(prompt_len, room)
        assert (row is not None) == had_room
        if row is not None:
            assert row not in self.rows
            self.num_owners += 1
            self.rows[row], self.owners[row] = [], self.num_owners
            self._write(row)

    def append(self, a: int, b: int) -> None:
        row = self._pick(a)
        n = 1 if b % 4 else b % 16  # mostly decode tokens
        if row is None or len(self.rows[row]) + n > MAX_LEN:
            return
        can, before = self.cache.can_append(row, n), self.cache.num_free
        assert can == (n <= before)
        assert self.cache.append(row, n) == can
        assert self.cache.num_free == before - (n if can else 0)
        self._write(row)

    def append_all(self, a: int, b: int) -> None:
        for row in list(self.rows):
            if len(self.rows[row]) < MAX_LEN and self.cache.append(row, 1):
                self._write(row)

    def fork(self, a: int, b: int) -> None:
        row = self._pick(a)
        if row is None:
            return
        length = b % (len(self.rows[row]) + 1)
        fork = self.cache.fork_row(row, length)
        assert (fork is None) == (len(self.rows) == MAX_ROWS)
        if fork is not None:
            self.num_owners += 1
            self.rows[fork], self.owners[fork] = self.rows[row][:length], self.num_owners

    def close(self, a: int, b: int) -> None:
        row = self._pick(a)
        if row is not None:
            self.cache.close_row(row)
            self.cache.close_row(row)
            del self.rows[row]

    def grow(self, a: int, b: int) -> None:
        old, target = self.cache.num_slots, self.cache.num_slots + a % 48
        now = self.cache.grow_to(target)
        if self.driver is None:
            assert now == min(target, MAX_SLOTS)
        else:  # as far as whole handles go
            assert old <= now <= target and (now == self.pool.max_slots or self.pool.round_up(now + 1) > target)
        for i in range(SPEC.num_layers):
            assert not self.pool.layer(i)[old : self.cache.num_slots].any(), "newly mapped memory is not zero"

    def shrink(self, a: int, b: int) -> None:
        old, used, epoch = self.cache.num_slots, self.cache.num_used, self.cache.epoch
        target = used + a % 32 - 4  # tight, so that most shrinks must move something
        assert self.cache.shrink_to(target) == min(old, self.pool.round_up(max(target, used)))
        done["shrinks that moved"] += self.cache.epoch > epoch

    OPERATIONS = (append, open_row, append, append_all, fork, close, grow, shrink)

    @rule(program=st.binary(min_size=3 * 64, max_size=3 * 64))
    def run(self, program: bytes) -> None:
        for i in range(0, len(program) - 2, 3):
            operation = self.OPERATIONS[program[i] % len(self.OPERATIONS)]
            operation(self, program[i + 1], program[i + 2])
            self.check()
            done[operation.__name__] += 1

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert self.cache.num_slots == self.pool.num_slots
        assert self.pool.mapped_bytes == self.pool.bytes_for(self.cache.num_slots)
        slots, tags = [], []
        for row, row_tags in self.rows.items():
            row_slots = self.cache.slots(row).tolist()
            assert len(row_slots) == len(row_tags) == self.cache.length(row)
            run = self.cache.run(row)
            assert run is None or row_slots == list(range(run.start, run.stop))
            slots += row_slots
            tags += row_tags
        assert len(set(slots)) == self.cache.num_used == self.cache.num_slots - self.cache.num_free
        expected = np.array(tags, dtype=np.float32)[:, None]
        for view in self.views:
            assert (view[np.array(slots, dtype=np.int64)] == expected).all(), "a row lost a token"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for row in self.rows:
                self.cache.close_row(row)
            assert self.cache.num_used == 0 and self.cache.num_free == self.cache.num_slots
            self.cache.check_integrity()
            if self.driver is not None:
                self.driver.check()

    def _pick(self, a: int) -> int | None:
        return sorted(self.rows)[a % len(self.rows)] if self.rows else None

    def _write(self, row: int) -> None:
        """Write tags into the slots the row has won since; exact in float32: owner < 2**16, position < 64."""
        tags, slots = self.rows[row], self.cache.slots(row)
        for position in range(len(tags), len(slots)):
            tags.append(float(self.owners[row] % 65536 * 64 + position + 1))
            for view in self.views:
                view[slots[position]] = tags[-1]


class HandleMachine(CacheMachine):
    """The same over memory that comes in handles of two and a half slots."""

    @initialize(num_slots=st.integers(0, MAX_SLOTS - 2))
    def create(self, num_slots: int) -> None:
        self.driver = FakeDriver(5 * SPEC.bytes_per_layer_slot // 2)
        super().create(num_slots)


def _explore(num_operations: int, machine: type[CacheMachine] = CacheMachine) -> int:
    """Run fresh programs until the given number of operations is done; returns how many."""
    done.clear()
    names = {operation.__name__ for operation in CacheMachine.OPERATIONS}
    batch = settings(
        max_examples=5,
        stateful_step_count=16,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    while (total := sum(done[name] for name in names)) < num_operations:
        run_state_machine_as_test(machine, settings=batch)
    return total


@pytest.mark.parametrize(("machine", "num_operations"), [(CacheMachine, NUM_OPERATIONS), (HandleMachine, 10_000)])
def test_no_sequence_of_operations_loses_a_token(
    capsys: pytest.CaptureFixture[str], machine: type[CacheMachine], num_operations: int
) -> None:
    start_s = time.process_time()
    total = _explore(num_operations, machine)
    cpu_s = time.process_time() - start_s
    with capsys.disabled():
        print(f"\n{total} operations in {cpu_s:.0f} CPU seconds, 0 violations: {dict(sorted(done.items()))}")
    assert total >= num_operations
    assert all(done[operation.__name__] > num_operations // 50 for operation in CacheMachine.OPERATIONS)
    assert done["shrinks that moved"] > num_operations // 100


def test_the_machine_notices_a_lost_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves that forget to copy must fail the run, or its 0 violations would mean nothing."""
    monkeypatch.setattr(KVPool, "move", lambda self, src, dst: None)
    with pytest.raises(AssertionError, match="lost a token"):
        _explore(NUM_OPERATIONS)


def test_the_machine_notices_memory_that_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticBuffer, "shrink", _forget_to_unmap)
    with pytest.raises(AssertionError, match="not zero"):
        _explore(NUM_OPERATIONS)


def _forget_to_unmap(buffer: ElasticBuffer, num_bytes: int) -> None:
    buffer.mapped_bytes -= num_bytes
