"""Training beside steps on a GPU: two streams, one set of weights, and neither shows in what the other computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fineinfer.runner.step_graphs import SERVING_PRIORITY

from ..unit.engine_harness import Harness
from ..unit.training_job import Told, write_job

pytestmark = pytest.mark.gpu
NUM_NEW = 40


@pytest.fixture
def engine(embedded_model: Path, tmp_path_factory) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []
    before = torch.cuda.current_stream()

    def build(**settings: object) -> Harness:
        own = {"model": str(embedded_model), "load_format": "auto", "device": "cuda", "memory_budget": 8 << 30}
        own |= {"no_enable_prefix_caching": True, "max_model_len": 1024, "dtype": "float32", "max_num_seqs": 32}
        made.append(Harness(tmp_path_factory.mktemp("e"), **(own | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()
    torch.cuda.set_stream(before)


def ask(harness: Harness) -> dict[str, list[int]]:
    rng = random.Random(2)
    harness.outputs.clear()
    for i in range(60):
        prompt = [rng.randrange(5, 40_000) for _ in range(rng.choice([9, 60, 200, 400]))]
        harness.add(f"r{i}", prompt, max_tokens=NUM_NEW)
    harness.run()
    return {name: harness.tokens(name) for name in harness.outputs}


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_tokens_and_losses_are_those_of_engines_that_do_one_thing(engine, eager: bool, tmp_path: Path, capsys) -> None:
    quiet = engine(policy="inference-first", enforce_eager=eager)
    tokens, told = ask(quiet), Told(quiet)
    quiet.parts.training.start(write_job(tmp_path / "quiet", num_rows=40))
    while quiet.parts.training.trainer is not None:
        quiet.loop.step()
    alone = told.losses()

    busy = engine(policy="slo", slo_ttft_ms=1e6, slo_tpot_ms=50, enforce_eager=eager)
    host, told = busy.parts.training, Told(busy)
    assert torch.cuda.current_stream().priority == SERVING_PRIORITY
    host.start(write_job(tmp_path / "busy", num_rows=40))
    assert host.trainer.stream.priority == 0 and host.trainer.stream != torch.cuda.current_stream()
    assert ask(busy) == tokens
    at_once = busy.parts.counters.training_units
    while host.trainer is not None:
        busy.loop.step()
    assert told.end().status == "succeeded"
    losses = told.losses()
    worst = max(abs(losses[step] - alone[step]) / alone[step] for step in alone)
    times = {kind: round(ms, 3) for kind, ms in sorted(busy.parts.latency.averages_ms().items())}
    with capsys.disabled():
        print(f"\n{at_once} units beside requests, largest relative loss difference {worst:.1e}, ms {times}")
    assert set(losses) == set(alone) and worst <= 1e-5 and at_once > 20


def test_shrinking_and_parking_while_both_streams_run(engine, tmp_path: Path) -> None:
    quiet = engine(policy="inference-first", enforce_eager=True)
    tokens = ask(quiet)
    busy = engine(policy="slo", slo_ttft_ms=1e6, slo_tpot_ms=50, enforce_eager=True)
    host, ladder = busy.parts.training, busy.parts.ladder
    host.start(write_job(tmp_path / "busy", num_rows=40))
    step, turn = busy.loop.step, 0

    def disturbed() -> bool:
        nonlocal turn
        turn += 1
        trainer = host.trainer
        if trainer is not None and not trainer.parked:
            if turn % 7 == 0:
                trainer.drop_kept()
            elif turn % 11 == 0:
                trainer.abort_micro_batch()
            elif turn % 17 == 0:
                trainer.park()
        if turn % 5 == 0:
            ladder._resize(max(64, ladder._kv.num_used, ladder._reserved_slots()))
        elif turn % 5 == 2:
            ladder.grow_kv()
        return step()

    busy.loop.step = disturbed
    assert ask(busy) == tokens and turn > 40
