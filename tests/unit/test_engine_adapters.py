"""Adapters in a whole engine: more of them than slots, checks, and folders read on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fineinfer.adapters.reader import AdapterReader
from fineinfer.adapters.weights import LoraWeights
from fineinfer.engine import inbox
from fineinfer.messages import (
    AdapterChecked,
    AdapterRejected,
    CheckAdapter,
    EngineStats,
    RemoveAdapter,
    SetAdapter,
)

from ..waiting import LIMIT_S
from .engine_harness import Harness, publish
from .tagged_engine import one_thread  # noqa: F401 - a fixture
from .training_job import Told

PROMPT = [5, 9, 2, 33, 71]


@pytest.fixture(name="make")
def make_engines(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**settings: Any) -> Harness:
        folder = tmp_path / f"engine-{len(made)}"
        folder.mkdir()
        own = {"max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20}
        made.append(Harness(folder, **(own | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def answers(harness: Harness) -> list[Any]:
    """What the engine answers those that ask, from now on."""
    found: list[Any] = []
    harness.parts.outbox.answer = lambda peer, message: found.append(message)  # type: ignore[method-assign]
    return found


def stats(harness: Harness) -> EngineStats:
    return harness.parts.outbox._snapshot()


def test_more_adapters_than_slots_are_served_as_if_each_were_alone(
    make: Callable[..., Harness], tmp_path: Path
) -> None:
    roomy, tight = make(max_loras=6), make(max_loras=2)
    for harness in (roomy, tight):
        for seed in range(6):
            publish(harness, f"n{seed}", tmp_path / f"a{seed}", seed + 1)
        for index in range(18):
            harness.add(f"r{index}", [*PROMPT, index], f"n{index % 6}", max_tokens=4 + index % 5)
        harness.run()
    assert {name: roomy.tokens(name) for name in roomy.outputs} == {name: tight.tokens(name) for name in tight.outputs}
    assert stats(roomy).adapter_evictions_total == 0 and stats(tight).adapter_evictions_total >= 4
    assert (stats(tight).adapter_slots, stats(tight).adapter_slots_used) == (2, 2)
    assert sorted(stats(tight).adapter_tiers.values()) == ["loaded", "loaded"]


@pytest.mark.parametrize("patience_s", [0.0, 1e9])
def test_an_adapter_that_always_has_requests_does_not_keep_others_waiting(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(inbox, "SLOT_PATIENCE_S", patience_s)
    harness = make(max_loras=1)
    for seed, name in ((1, "busy"), (2, "late")):
        publish(harness, name, tmp_path / name, seed)
    harness.add("r0", PROMPT, "busy", max_tokens=8)
    harness.add("late", PROMPT, "late", max_tokens=2)
    done_at: list[int] = []

    def go_on(turn: int) -> None:
        if turn % 4 == 0 and turn < 120:
            harness.add(f"r{turn + 1}", PROMPT, "busy", max_tokens=8)
        if harness.outputs["late"] and not done_at:
            done_at.append(turn)

    harness.run(go_on)
    assert (done_at[0] < 60) == (patience_s == 0.0), "without standing back it comes last"


def test_a_pinned_adapter_is_loaded_once(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(max_loras=2)
    publish(harness, "pinned", tmp_path / "pinned", 1)
    harness.loop.step()
    entry = harness.parts.adapters.resolve("pinned")
    assert entry is not None
    message = SetAdapter(name="pinned", version=entry.version, step=1, directory=str(entry.directory), pinned=True)
    harness.send(message)
    for seed in (2, 3, 4):
        publish(harness, f"n{seed}", tmp_path / f"n{seed}", seed)
    for turn in range(9):
        harness.add(f"r{turn}", PROMPT, f"n{2 + turn % 3}", max_tokens=2)
    harness.run()
    assert stats(harness).adapter_tiers[entry.version] == "loaded"
    loads = stats(harness).adapter_loads_total
    harness.add("last", PROMPT, "pinned", max_tokens=2)
    harness.run()
    assert stats(harness).adapter_loads_total == loads


def test_a_folder_is_judged_without_being_served(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make()
    told, said = Told(harness), answers(harness)
    publish(harness, "good", tmp_path / "good", 1)
    harness.loop.step()
    entry = harness.parts.adapters.resolve("good")
    assert entry is not None and entry.directory is not None
    harness.send(RemoveAdapter(name="good"))
    harness.send(CheckAdapter(version=entry.version, directory=str(entry.directory)))
    harness.send(CheckAdapter(version="f" * 64, directory=str(entry.directory)))
    harness.send(SetAdapter(name="bad", version="f" * 64, step=1, directory=str(entry.directory)))
    harness.loop.step()
    assert [(message.version, message.error is None) for message in said] == [
        (entry.version, True), ("f" * 64, False),
    ]  # fmt: skip
    assert isinstance(said[0], AdapterChecked) and "expected ffff" in (said[1].error or "")
    assert [message.name for message in told.of(AdapterRejected)] == ["bad"]
    assert harness.parts.adapters.names() == []


def test_the_loop_goes_on_while_a_thread_reads(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make()
    adapters, spec = harness.parts.adapters, harness.parts.training._decoder.spec
    adapters.reader = reader = AdapterReader(spec, 8, torch.float32, num_copies=2, on_thread=True)
    gate, read = threading.Event(), reader._read

    def gated(version: str, directory: Path) -> LoraWeights:
        assert gate.wait(LIMIT_S)
        return read(version, directory)

    reader._read = gated  # type: ignore[method-assign]
    publish(harness, "a", tmp_path / "a", 1)
    harness.add("base", PROMPT, max_tokens=5)
    harness.add("waits", PROMPT, "a", max_tokens=5)  # its first version is being read: it waits, however long

    def turn_of(turn: int) -> None:
        if harness.outputs["base"] and harness.reason("base") is not None:
            gate.set()

    harness.run(turn_of)
    assert harness.reason("waits") == "length" and harness.outputs["waits"][-1].adapter_step == 1
    assert harness.parts.adapter_traffic.busy is False
    reader.close()
