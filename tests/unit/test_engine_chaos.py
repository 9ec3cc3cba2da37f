"""Everything at once: requests of several adapters come, stop and go while memory moves to and fro, beside a real job.

The engine is whole (loop, scheduler, KV cache, prefix cache, ladder, adapters, trainer), but for the model that serves
(tagged_engine.py). Its clock passes only when it is looked at, so a run depends on its seed alone. A longer run:
``FINEINFER_CHAOS_SEEDS=100 pytest tests/unit/test_engine_chaos.py``.
"""

from __future__ import annotations

import collections
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fineinfer.engine import memory_ladder
from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, STATE
from fineinfer.engine.rungs import ABORT, DROP, PARK, UNPARK, Rung
from fineinfer.memory.kv_cache import KVCache
from fineinfer.messages import (
    AbortRequest,
    AdapterRejected,
    FinishRequest,
    JobCheckpoint,
    ResizeKV,
    SetAdapter,
    SetBudget,
    StartJob,
)
from fineinfer.scheduler import rows
from fineinfer.scheduler.sequence import Sequence
from fineinfer.training import parking
from fineinfer.training.update import RunningUpdate

from .engine_harness import BYTES_PER_SLOT, publish
from .tagged_engine import BREAKER, POISON, Clock, MixUpError, TaggedHarness, on_clock, one_thread
from .training_job import SETTINGS, Told, trained, write_job

__all__ = ["one_thread"]  # a fixture

NUM_SEEDS = int(os.environ.get("FINEINFER_CHAOS_SEEDS", "1"))
EVENTS = ("stop", "budget", "resize", DROP, ABORT, PARK)
NUM_EVENTS = 1000  # forced stops, drops, aborts, parks, resizes and changes of the budget, at least, beside the job
SLOTS, MAX_LEN, VERSIONS = 3000, 256, 4
JOB = msgspec.structs.replace(SETTINGS, n_epochs=12, save_steps=4)
ENGINE = {
    "kv_cache_memory_bytes": SLOTS * BYTES_PER_SLOT, "max_loras": 3, "max_lora_rank": 4, "max_model_len": MAX_LEN,
    "max_num_seqs": 12, "max_num_batched_tokens": 64, "policy": "slo", "slo_tpot_ms": 10.0, "slo_ttft_ms": 50.0,
    "deterministic": True,
}  # fmt: skip


@dataclass
class Asked:
    """A request, the version it must be answered by, and when its client goes or stops it."""

    prompt: list[int]
    adapter: str | None
    version: str | None
    salt: str | None
    params: dict[str, Any]
    leaves_after: int | None = None
    stops_after: int | None = None


@dataclass
class Chaos:
    """Drives one engine, turn by turn.

    Attributes:
        asked: All requests so far.
        current: What each name means, and so for requests of the next turn.
        events: What was done to the job and to the memory.
    """

    harness: TaggedHarness
    rng: random.Random
    clock: Clock
    told: Told
    published: dict[str, list[SetAdapter]]
    asked: dict[str, Asked] = field(default_factory=dict)
    current: dict[str, SetAdapter] = field(default_factory=dict)
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    seen: int = 0
    ran_unit: bool = False
    calm: bool = False

    def __post_init__(self) -> None:
        self.budget = self.harness.parts.ladder._governor.budget_bytes
        self.beginnings = [[self.rng.randrange(3, 90) for _ in range(self.rng.randrange(8, 120))] for _ in range(5)]

    def turn(self) -> None:
        """Do something to the engine, let it take a turn, look at it."""
        rng, parts = self.rng, self.harness.parts
        if rng.random() < 0.01:
            self.calm = not self.calm
        if rng.random() < (0.02 if self.calm else 0.3) and len(parts.desk.open) < 24:
            self.ask()
        self.clients_go()
        if rng.random() < 0.08:
            self.harness.send(ResizeKV(num_slots=rng.randrange(64, SLOTS)))
        if rng.random() < 0.02:
            self.change_budget()
        sent = [rng.choice(self.published[name]) for name in ("a", "b") if rng.random() < 0.02]
        for message in [*sent, *self.checkpoints()]:
            self.harness.send(message)
            self.current[message.name] = message  # requests are read before it, so those of this turn are not meant
        trainer = parts.training.trainer
        if trainer is not None and trainer.micro_batch_open and rng.random() < 0.12:
            parts.ladder._descend(trainer, 1, self.clock(), floor=0, forced=True)
        self.step()

    def step(self) -> None:
        """One turn of the loop, and what must hold after it."""
        parts, ladder = self.harness.parts, self.harness.parts.ladder
        units = parts.counters.training_units
        self.harness.loop.step()
        trainer, governor = parts.training.trainer, ladder._governor
        ran = parts.counters.training_units > units
        stopped = self.ran_unit and not ran and trainer is not None and not trainer.at_update_boundary
        self.events["stop"] += stopped
        self.ran_unit = ran
        assert governor.leased(KV) == ladder._kv.pool.held_bytes
        if trainer is not None:
            kept = least_bytes(trainer) if trainer.micro_batch_open else 0
            assert kept <= governor.leased(ACTIVATIONS), "more is held than was leased"
            assert governor.leased(STATE) == (0 if trainer.parked else trainer.state_bytes)

    def ask(self) -> None:
        rng, name = self.rng, f"r{len(self.asked)}"
        prompt = rng.choice(self.beginnings)[: rng.randrange(4, 120)]
        prompt = prompt + [rng.randrange(3, 90) for _ in range(rng.randrange(1, 20))]
        kind = rng.random()
        prompt += [POISON] if kind < 0.03 else [BREAKER] if kind < 0.04 else []
        adapter = rng.choice([None, "a", "a", "b", *(["lora"] if "lora" in self.current else []), "a@1"])
        version = None if adapter is None else self.current.get(adapter, self.published["a"][1]).version
        params = {"max_tokens": rng.randrange(1, 30)} if rng.random() < 0.7 else {"ignore_eos": False}
        asked = Asked(prompt, adapter, version, rng.choice([None, None, "salt"]), params)
        if rng.random() < 0.1:
            asked.leaves_after = rng.randrange(12)
        elif rng.random() < 0.1:
            asked.stops_after = rng.randrange(1, 12)
        self.asked[name] = asked
        self.harness.add(name, prompt, adapter, asked.salt, priority=rng.choice([0, 0, 1]), **params)

    def clients_go(self) -> None:
        """Clients that disconnect, and stop strings that match a few tokens late, as in an api worker."""
        for name in list(self.harness.parts.desk.open):
            asked, num_tokens = self.asked[name], len(self.harness.tokens(name))
            if asked.leaves_after is not None and num_tokens >= asked.leaves_after:
                self.harness.send(AbortRequest(request_id=name))
            elif asked.stops_after is not None and num_tokens >= asked.stops_after:
                self.harness.send(FinishRequest(request_id=name, num_tokens=asked.stops_after))

    def change_budget(self) -> None:
        governor = self.harness.parts.ladder._governor
        fixed = sum(governor.leased(owner) for owner in ("weights", "workspace", "adapters"))
        least = fixed + 700 * BYTES_PER_SLOT
        self.harness.send(SetBudget(num_bytes=self.rng.choice([self.budget, self.rng.randrange(least, self.budget)])))
        self.events["budget"] += 1

    def checkpoints(self) -> list[SetAdapter]:
        """The job's new versions, published as the supervisor does."""
        found = self.told.of(JobCheckpoint)[self.seen :]
        self.seen += len(found)
        return [set_adapter(checkpoint) for checkpoint in found]

    def calm_down(self) -> None:
        """All memory is there again; let everything end."""
        self.harness.send(SetBudget(num_bytes=self.budget))
        for _ in range(50_000):
            self.clients_go()
            self.step()
            if not self.harness.parts.desk.open and self.harness.parts.training.trainer is None:
                break
        taken = self.harness.parts.ladder.steps_taken
        self.events.update({name: taken[name] for name in (DROP, ABORT, PARK, UNPARK)})
        self.events["resize"] = self.harness.parts.ladder.num_resizes


@dataclass
class Job:
    """What the job gives alone: its last checkpoint, its losses and the versions that it published."""

    state: dict[str, Any]
    losses: dict[int, float]
    published: list[tuple[int, str]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[SetAdapter]]:
    """The versions of two names, by step."""
    made: dict[str, list[SetAdapter]] = {}
    writer = TaggedHarness(tmp_path_factory.mktemp("shape"), Clock(), max_loras=1)
    for name in ("a", "b"):
        for step in range(VERSIONS):
            publish(writer, name, tmp_path_factory.mktemp("adapter") / "v", 10 * step + (name == "b"))
        sent = [message for _, message in writer.wire.inbound]
        made[name] = [msgspec.structs.replace(message, step=step) for step, message in enumerate(sent)]
        writer.wire.inbound.clear()
    writer.close()
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("quiet")
    harness = TaggedHarness(folder, Clock(), max_loras=1, max_lora_rank=4)
    told, job = Told(harness), write_job(folder / "job", JOB)
    harness.parts.training.start(job)
    while harness.parts.training.trainer is not None:
        harness.loop.step()
    harness.close()
    return Job(trained(job), told.losses(), [(c.step, c.version) for c in told.of(JobCheckpoint)])


@pytest.fixture
def begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, list[SetAdapter]]
) -> Iterator[Callable[[int], Chaos]]:
    """An engine in chaos; a seed also chooses steps in flight, where jobs are parked and whether they get a share."""
    made: list[TaggedHarness] = []

    def build(seed: int) -> Chaos:
        rng, clock = random.Random(seed), Clock()
        on_clock(monkeypatch, clock)
        for name, value in (("HOLD_S", 0.01), ("MAX_HOLD_S", 0.04), ("FOLLOW_EVERY_S", 0.0)):
            monkeypatch.setattr(memory_ladder, name, value)

        def any_that_suffices(rungs: list[Rung], num_bytes: int) -> Rung | None:
            enough = [rung for rung in rungs if rung.num_bytes >= num_bytes]
            weights = [1 if rung.name == PARK else 3 for rung in enough]  # parking undoes all that is under way
            return rng.choices(enough, weights)[0] if enough else None

        monkeypatch.setattr(memory_ladder, "cheapest", any_that_suffices)
        monkeypatch.setattr(parking, "IN_HOST_MEMORY", ("cpu",) if seed % 2 else ("cuda",))
        share = 0.1 if seed % 4 < 2 else 0.0
        harness = TaggedHarness(tmp_path, clock, seed % 2, **(ENGINE | {"train_share_min": share}))
        made.append(harness)
        governor = harness.parts.ladder._governor
        governor.set_budget(governor.budget_bytes - governor.free_bytes)
        chaos = Chaos(harness, rng, clock, Told(harness), versions)
        for message in (versions["a"][1], versions["a"][0], versions["b"][0]):  # a@1 is asked for, too
            harness.send(message)
            chaos.current[message.name] = message
        harness.loop.step()
        return chaos

    yield build
    for harness in made:
        harness.close()


def run(chaos: Chaos, folder: Path) -> StartJob:
    """The job from beginning to end in chaos, then calm."""
    job = write_job(folder / "job", JOB)
    chaos.harness.parts.training.start(job)
    while chaos.harness.parts.training.trainer is not None:
        chaos.turn()
    chaos.calm_down()
    return job


def least_bytes(trainer: parking.ParkableTrainer) -> int:
    """What the micro-batch under way takes with the layers that it has kept."""
    least, most = (of(trainer.micro_batch_tokens) for of in (trainer.bytes_if_recomputed, trainer.bytes_if_all_kept))
    return least + trainer.num_kept_layers() * ((most - least) // trainer.num_layers)


def set_adapter(c: JobCheckpoint) -> SetAdapter:
    """As the supervisor publishes it."""
    return SetAdapter(name=c.name, version=c.version, step=c.step, directory=c.directory)


def quiet_answers(folder: Path, chaos: Chaos) -> dict[str, list[int]]:
    """Each answer as an engine gives it that has nothing else to do, shares nothing and trains nothing."""
    settings = ENGINE | {"no_enable_prefix_caching": True, "policy": "inference-first"}
    quiet, made, answers = TaggedHarness(folder, chaos.clock, **settings), {}, {}
    for message in [*itertools.chain(*chaos.published.values()), *map(set_adapter, chaos.told.of(JobCheckpoint))]:
        quiet.send(message)
    names = {m.version: f"{m.name}@{m.step}" for _, m in quiet.wire.inbound}
    quiet.loop.step()
    for name, asked in chaos.asked.items():
        key = (*asked.prompt, asked.version, asked.salt, str(asked.params))
        if key not in made:
            quiet.outputs.clear()
            quiet.add(name, asked.prompt, names.get(asked.version), asked.salt, **asked.params)
            while quiet.loop.step():
                pass
            made[key] = quiet.tokens(name)
        answers[name] = made[key]
    quiet.close()
    return answers


def check_job(chaos: Chaos, job: StartJob, undisturbed: Job) -> None:
    """Adapter, optimizer, losses and every version that was published, to the bit."""
    told = chaos.told
    assert told.end().status == "succeeded" and not told.of(AdapterRejected)
    assert trained(job) == undisturbed.state, "the job is not what it is undisturbed"
    assert told.losses() == undisturbed.losses
    assert [(c.step, c.version) for c in told.of(JobCheckpoint)] == undisturbed.published


def check_answers(chaos: Chaos, quiet: dict[str, list[int]]) -> None:
    """One end each, of one version, and the tokens of a quiet engine as far as its client stayed."""
    for name, asked in chaos.asked.items():
        outputs, tokens = chaos.harness.outputs[name], chaos.harness.tokens(name)
        reasons = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert len(reasons) == 1 and outputs[-1].finish_reason, f"{name} has not one terminal message"
        assert {output.adapter_version for output in outputs} == {asked.version}, f"{name} is of mixed versions"
        want = quiet[name]
        if asked.leaves_after is None and asked.stops_after is None:
            assert tokens == want, f"{name} differs from a quiet engine"
        assert tokens == want[: len(tokens)], f"{name} differs from a quiet engine"
        failing = asked.prompt[-1] in (POISON, BREAKER)
        assert failing or reasons[0] != "error", f"{name} failed: {outputs[-1].error_message}"


def check_nothing_lost(chaos: Chaos) -> None:
    """Slots, rows, leases and adapter slots are all back."""
    parts, kv = chaos.harness.parts, chaos.harness.parts.ladder._kv
    kv.check_integrity()
    assert not parts.desk.open and not parts.scheduler.running and not parts.scheduler.waiting
    assert kv.num_used == kv.num_cached and kv.num_free_rows == ENGINE["max_num_seqs"]
    kv.prefixes.evict(kv.num_slots)
    assert kv.num_free == kv.num_slots == SLOTS, "slots are lost"
    kv.check_integrity()
    governor = parts.ladder._governor
    assert not governor.leased(STATE) and not governor.leased(ACTIVATIONS) and governor.free_bytes >= 0
    assert governor.leased(KV) == SLOTS * BYTES_PER_SLOT and parts.adapters.num_pinned() == 0


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_nothing_that_happens_to_memory_changes_a_token_or_a_bit(
    begin: Callable[[int], Chaos], undisturbed: Job, tmp_path: Path, seed: int
) -> None:
    chaos = begin(seed)
    job = run(chaos, tmp_path)
    events = chaos.events
    print(f"seed {seed}: {len(chaos.asked)} requests, {dict(events)}")
    check_job(chaos, job, undisturbed)
    check_answers(chaos, quiet_answers(tmp_path, chaos))
    check_nothing_lost(chaos)
    assert sum(events[name] for name in EVENTS) >= NUM_EVENTS and min(events[name] for name in EVENTS) >= 10, events
    runner = chaos.harness.parts.runner
    assert chaos.harness.parts.scheduler.num_preemptions > 5 and runner.num_shared > runner.num_rows / 20


def _forget_versions(sequence: Sequence) -> tuple[str | None, str | None]:
    return None, sequence.cache_salt


MISTAKES: dict[str, tuple[object, str, object]] = {
    # a wrong row, a wrong count, or an error inside the job, whichever comes first
    "position is|owner is|double free|a live slot|live sources|'failed' == 'succeeded'": (
        KVCache,
        "_rewrite_table",
        lambda cache, source, target: None,
    ),
    "adapter version is": (rows, "_prefix_key", _forget_versions),
    "the job is not": (RunningUpdate, "_has_gradient", lambda update: False),  # so aborted work counts twice
}


@pytest.mark.parametrize("complaint", MISTAKES)
def test_the_run_notices(
    begin: Callable[[int], Chaos],
    undisturbed: Job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    complaint: str,
) -> None:
    """A move that forgets the table, prefixes across versions, an abort that leaves its gradient."""
    monkeypatch.setattr(*MISTAKES[complaint])
    chaos = begin(1)
    with pytest.raises((MixUpError, AssertionError, ValueError), match=complaint):  # whichever looks first
        check_job(chaos, run(chaos, tmp_path), undisturbed)
