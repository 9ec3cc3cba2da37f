"""A thousand forced moves of memory and training on a GPU, beside requests: no bit of either side changes."""

from __future__ import annotations

import collections
import random
from pathlib import Path

import msgspec
import pytest
import torch

from fineinfer.engine.memory_ladder import ACTIVATIONS, KV

from ..unit.engine_harness import Harness
from ..unit.training_job import SETTINGS, Told, trained, write_job

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NUM_EVENTS, NUM_REQUESTS, NUM_NEW, VOCABULARY = 1000, 40, 24, 40_000
JOB, NUM_ROWS = msgspec.structs.replace(SETTINGS, n_epochs=2, save_steps=5), 40


class Disturbance:
    """Does something to an engine before each of its turns, until that was enough.

    Args:
        harness: The engine.

    Attributes:
        events: What was done, by kind.
    """

    def __init__(self, harness: Harness) -> None:
        self.events: collections.Counter[str] = collections.Counter()
        self._parts, self._rng = harness.parts, random.Random(5)
        self._units, self._ran = 0, False

    def __call__(self, _turn: int) -> None:
        self._count_stop()
        if self.enough:
            return
        trainer, ladder = self._parts.training.trainer, self._parts.ladder
        kind = self._rng.choice(("drop", "abort", "park", "shrink", "grow", "nothing"))
        if kind == "shrink":
            before = ladder.num_resizes
            ladder._resize(max(64, ladder._kv.num_used, ladder._reserved_slots()))
            self.events["resize"] += ladder.num_resizes - before
        elif kind == "grow":
            before = ladder.num_resizes
            ladder.grow_kv()
            self.events["resize"] += ladder.num_resizes - before
        elif trainer is not None and not trainer.parked and not trainer.at_update_boundary:
            if kind == "drop":
                self.events[kind] += trainer.drop_kept()[0] > 0
            elif kind == "abort" and trainer.micro_batch_open and self._rng.random() < 0.5:
                trainer.abort_micro_batch()
                self.events[kind] += 1
            elif kind == "park" and self._rng.random() < 0.2:
                trainer.park()
                self.events[kind] += 1

    @property
    def enough(self) -> bool:
        """Whether ``NUM_EVENTS`` were forced."""
        return sum(self.events.values()) >= NUM_EVENTS

    def _count_stop(self) -> None:
        """A turn of an update between its units in which none ran."""
        trainer, units = self._parts.training.trainer, self._parts.counters.training_units
        ran = units > self._units
        self.events["stop"] += self._ran and not ran and trainer is not None and not trainer.at_update_boundary
        self._units, self._ran = units, ran


def make_engine(model: Path, folder: Path, **settings: object) -> Harness:
    own = {"model": str(model), "load_format": "auto", "device": DEVICE, "memory_budget": 3 << 30, "max_num_seqs": 16}
    # 32,768 slots are six handles of 8 MiB a layer: with 8,192, less than two, there would be nothing to resize
    own |= {"no_enable_prefix_caching": True, "max_model_len": 2048, "dtype": "float32", "deterministic": True}
    return Harness(folder, **(own | settings))


def ask(harness: Harness, disturb: Disturbance | None = None) -> dict[str, list[int]]:
    """The tokens of the same requests each time."""
    rng = random.Random(2)
    harness.outputs.clear()
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(5, VOCABULARY) for _ in range(rng.choice([9, 60, 200]))]
        harness.add(f"r{i}", prompt, max_tokens=NUM_NEW)
    harness.run(*(() if disturb is None else (disturb,)))
    return {name: harness.tokens(name) for name in harness.outputs}


def test_a_thousand_forced_moves_change_no_bit(embedded_model: Path, tmp_path_factory, capsys) -> None:
    before = torch.cuda.current_stream() if DEVICE == "cuda" else None
    quiet = make_engine(embedded_model, tmp_path_factory.mktemp("quiet"), policy="inference-first")
    tokens, told = ask(quiet), Told(quiet)
    job = write_job(tmp_path_factory.mktemp("job") / "quiet", JOB, NUM_ROWS)
    quiet.parts.training.start(job)
    while quiet.parts.training.trainer is not None:
        quiet.loop.step()
    wanted, losses = trained(job), told.losses()
    quiet.close()

    folder = tmp_path_factory.mktemp("busy")
    busy = make_engine(embedded_model, folder, policy="slo", slo_ttft_ms=1e6, slo_tpot_ms=50)
    disturb, host, num_jobs, num_answers = Disturbance(busy), busy.parts.training, 0, 0
    while not disturb.enough:
        told, job = Told(busy), write_job(folder / f"jobs{num_jobs}" / "busy", JOB, NUM_ROWS)
        host.start(job)
        while host.trainer is not None:
            assert ask(busy, disturb) == tokens
            num_answers += NUM_REQUESTS
        assert told.end().status == "succeeded"
        assert told.losses() == losses, "the loss trace differs"
        assert trained(job) == wanted, "adapter or moments differ"
        num_jobs += 1
    governor, kv = busy.parts.ladder._governor, busy.parts.ladder._kv
    assert kv.num_used == 0 and governor.leased(KV) == kv.pool.held_bytes and governor.leased(ACTIVATIONS) == 0
    busy.close()
    if before is not None:
        torch.cuda.set_stream(before)
    with capsys.disabled():
        print(f"\n{dict(disturb.events)}, {num_jobs} jobs and {num_answers} answers, no bit differs")
    assert all(disturb.events[kind] >= 20 for kind in ("stop", "drop", "abort", "park", "resize"))
