"""Tiers of adapters: slots, host copies, disk; against a model of what a registry owes those who use it."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fineinfer.adapters.config import AdapterError
from fineinfer.adapters.peft_io import content_hash, save_adapter
from fineinfer.adapters.reader import AdapterReader
from fineinfer.adapters.registry import AdapterRegistry, AdapterVersion
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.messages import LoraSpec

from ..waiting import LIMIT_S

NUM_VERSIONS, NUM_SLOTS, MAX_RANK = 6, 3, 4


@dataclass
class Shape:
    num_layers: int = 2
    hidden_size: int = 8
    intermediate_size: int = 8
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 4


def adapter(seed: int, r: int = 2) -> tuple[LoraWeights, LoraSpec]:
    spec = LoraSpec(r=r, target_modules=("q_proj", "down_proj"))
    weights = LoraWeights.zeros(LoraLayout.uniform(Shape(), spec), torch.float32)
    weights.flat.normal_(generator=torch.Generator().manual_seed(seed))
    return weights, spec


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path]]:
    made = []
    for seed in range(NUM_VERSIONS):
        folder = tmp_path_factory.mktemp("adapter")
        save_adapter(*adapter(seed, r=1 + seed % MAX_RANK), "m", folder)
        made.append((content_hash(folder), folder))
    return made


def registry(reader: AdapterReader | None = None, num_slots: int = NUM_SLOTS) -> AdapterRegistry:
    return AdapterRegistry(Shape(), num_slots, MAX_RANK, torch.float32, torch.device("cpu"), reader)


def entry(versions: list[tuple[str, Path]], index: int, name: str = "a", step: int = 1) -> AdapterVersion:
    return AdapterVersion(name, step, *versions[index])


def holds(made: AdapterRegistry, slot: int, index: int) -> bool:
    """Whether a slot has this version's matrices and nothing else, padding included."""
    weights, spec = adapter(index, r=1 + index % MAX_RANK)
    for module in weights.layout.modules():
        a, b = (part(module.layer, module.name)[slot] for part in (made.stacks.a, made.stacks.b))
        if not torch.equal(a[: spec.r], weights.a(module)) or not torch.equal(b[:, : spec.r], weights.b(module)):
            return False
        if a[spec.r :].any() or b[:, spec.r :].any():
            return False
    return not any(made.stacks.scales(layer, "k_proj")[slot] for layer in range(2))


def test_a_copy_saves_the_disk_and_the_least_recently_used_goes(versions: list[tuple[str, Path]]) -> None:
    reader = AdapterReader(Shape(), MAX_RANK, torch.float32, num_copies=2)
    made = registry(reader, num_slots=1)
    for index in range(3):
        made.register(entry(versions, index, f"n{index}"), current=False)
    for index in (0, 1, 0, 2):
        slot = made.acquire(versions[index][0])
        assert slot is not None and holds(made, slot, index)
        made.release(versions[index][0])
    assert set(reader.versions()) == {versions[0][0], versions[2][0]}
    assert made.tiers() == {versions[2][0]: "loaded", versions[0][0]: "cpu"}
    assert reader.num_bytes == sum(adapter(i, r=1 + i % MAX_RANK)[0].flat.nbytes for i in (0, 2))
    assert (made.num_loads, made.num_evictions) == (4, 3)
    reads = []
    reader._read = lambda *args: reads.append(args)  # type: ignore[method-assign, assignment]
    assert made.acquire(versions[0][0]) == 0
    assert reads == []


def test_content_is_hashed_once(versions: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def counted(directory: Path) -> str:
        hashed.append(directory)
        return content_hash(directory)

    monkeypatch.setattr("fineinfer.adapters.reader.content_hash", counted)
    made = registry(num_slots=1)
    for index in (0, 1):
        made.register(entry(versions, index, f"n{index}"))
    for index in (0, 1, 0, 1, 0):
        made.acquire(versions[index][0])
        made.release(versions[index][0])
    assert hashed == [versions[0][1], versions[1][1]]


def test_what_has_no_slot_is_checked_by_its_shapes_and_refused_when_loaded(
    versions: list[tuple[str, Path]], tmp_path: Path
) -> None:
    made = registry(num_slots=1)
    made.register(entry(versions, 0))
    shutil.copytree(versions[1][1], tmp_path / "changed")
    tensors = tmp_path / "changed/adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    made.register(AdapterVersion("b", 1, versions[1][0], tmp_path / "changed"))
    with pytest.raises(AdapterError, match="the content of the adapter folder is"):
        made.acquire(versions[1][0])
    assert made.acquire(versions[0][0]) == 0, "who was loaded stays so"
    tensors.write_bytes(b"")
    with pytest.raises(AdapterError, match="damaged"):
        made.register(AdapterVersion("c", 1, "0" * 64, tmp_path / "changed"))
    assert made.names() == ["a", "b"]


def test_a_new_version_takes_the_slot_of_the_one_it_replaces(versions: list[tuple[str, Path]]) -> None:
    made = registry(num_slots=2)
    for index, name in ((0, "a"), (1, "b")):
        made.register(entry(versions, index, name))
    made.register(entry(versions, 2, "a", 2))
    assert made.tiers() == {versions[1][0]: "loaded", versions[2][0]: "loaded"}
    held = made.acquire(versions[2][0])
    made.register(entry(versions, 3, "a", 3))  # in use: the new one is loaded when somebody asks
    assert made.tiers() == {versions[1][0]: "loaded", versions[2][0]: "loaded"} and held is not None
    assert made.current() == {"a": versions[3][0], "b": versions[1][0]}


def test_a_pinned_adapter_keeps_its_slot_and_gets_one_from_others(versions: list[tuple[str, Path]]) -> None:
    made = registry(num_slots=2)
    for index in (0, 1):
        made.register(entry(versions, index, f"n{index}"))
    made.register(entry(versions, 2, "pinned"), pinned=True)
    assert made.tiers()[versions[2][0]] == "loaded"
    for index in (0, 1, 3, 0, 1, 3):
        made.register(entry(versions, index, f"n{index}"))
        assert made.acquire(versions[index][0]) is not None
        made.release(versions[index][0])
    assert made.tiers()[versions[2][0]] == "loaded"
    made.register(entry(versions, 2, "pinned"), pinned=False)
    for index in (0, 1):
        made.acquire(versions[index][0])
    assert versions[2][0] not in made.tiers()


def test_a_claimed_slot_runs_empty_for_who_waits(versions: list[tuple[str, Path]]) -> None:
    made = registry(num_slots=2)
    for index in range(4):
        made.register(entry(versions, index, f"n{index}"), current=False)
    busy, other, late, later = (version for version, _ in versions[:4])
    for version in (busy, busy, other):
        made.acquire(version)
    assert made.acquire(late) is None
    made.claim(late)
    assert made.acquire(other) is None, "the slot with the fewest requests is drained"
    assert made.acquire(busy) is not None
    made.release(other)
    made.claim(late)
    assert made.acquire(later) is None and made.acquire(other) is None, "what is free is his who waited longest"
    assert made.acquire(late) is not None
    made.claim(later)
    made.claim(None)
    assert made.acquire(late) is not None


class Gate:
    """Lets the reading thread go on."""

    def __init__(self, reader: AdapterReader) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        read = reader._read

        def gated(version: str, directory: Path) -> LoraWeights:
            self.entered.set()
            assert self.open.wait(LIMIT_S)
            return read(version, directory)

        reader._read = gated  # type: ignore[method-assign]

    def let_through(self, reader: AdapterReader) -> None:
        self.open.set()
        if reader._under_way is not None:
            reader._under_way[1].exception(10)


def test_a_thread_reads_while_the_old_version_serves(versions: list[tuple[str, Path]]) -> None:
    reader = AdapterReader(Shape(), MAX_RANK, torch.float32, num_copies=2, on_thread=True)
    made = registry(reader, num_slots=2)
    first, second, third = versions[:3]
    gate = Gate(reader)
    assert not made.register(entry(versions, 0)), "it is being read"
    gate.let_through(reader)
    assert made.register(entry(versions, 0)) and made.acquire(first[0]) == 0
    gate.open.clear()
    gate.entered.clear()
    assert not made.register(entry(versions, 1, step=2)) and gate.entered.wait(LIMIT_S)
    assert made.current() == {"a": first[0]} and made.resolve("a@2") is None
    made.register(entry(versions, 2, "c"), current=False)
    assert made.acquire(third[0]) is None, "the thread reads one after the other"
    gate.let_through(reader)
    gate.open.clear()
    assert made.acquire(third[0]) is None
    gate.let_through(reader)
    assert made.register(entry(versions, 1, step=2)), "a copy was kept for whoever comes late"
    assert made.current() == {"a": second[0]}
    slot = made.acquire(second[0])
    assert slot == 1 and holds(made, slot, 1)
    made.release(second[0])
    with pytest.raises(AdapterError, match="expected ffff"):
        for _ in range(2):
            made.register(AdapterVersion("a", 3, "f" * 64, first[1]))
            gate.let_through(reader)
    assert made.current() == {"a": second[0]}
    reader.close()


def test_live_versions_alternate_and_end(versions: list[tuple[str, Path]]) -> None:
    made = registry(num_slots=2)

    def serve(step: int) -> bool:
        placed = made.place(f"live-{step}", adapter(step)[0])
        if placed:
            made.serve_live(AdapterVersion("a", step, f"live-{step}", None))
        return placed

    made.register(entry(versions, 0, "b"))
    assert serve(0) and serve(1)
    held = made.acquire("live-1")
    assert serve(2), "the slot that no request uses"
    assert not serve(3), "a request holds the one, the name needs the other"
    assert made.resolve("a").version == "live-2"  # type: ignore[union-attr]
    made.register(entry(versions, 1, step=1))
    assert made.resolve("a").version == "live-2", "an older checkpoint does not move the name back"  # type: ignore[union-attr]
    assert made.resolve("a@1").version == versions[1][0]  # type: ignore[union-attr]
    made.release("live-1")
    assert held is not None and serve(3) and made.acquire("live-3") == held
    made.release("live-3")
    made.end_live("a", awaited=True)
    made.acquire(versions[0][0])
    assert made.acquire(versions[1][0]) is None, "the live version stays until the result is registered"
    made.register(entry(versions, 2, step=3))
    assert made.current()["a"] == versions[2][0] and made.acquire(versions[1][0]) is not None
    made.remove("b")
    made.release(versions[0][0])
    made.release(versions[1][0])
    assert serve(4)
    made.end_live("a", awaited=True)
    made.register(entry(versions, 3, step=2), current=False)
    assert made.current() == {"a": "live-4"}
    made.register(entry(versions, 3, step=4), current=False)  # the result is no better: it is not current
    assert made.current() == {"a": versions[2][0]}
    assert serve(5)
    made.end_live("a", awaited=False)
    assert made.current() == {"a": versions[2][0]}
    assert serve(6)
    made.register(entry(versions, 3, step=6))  # the last checkpoint, while the job is still to end
    assert made.current() == {"a": "live-6"}
    made.end_live("a", awaited=True)
    assert made.current() == {"a": versions[3][0]}


class RegistryMachine(RuleBasedStateMachine):
    """Random use, checked against what is held, what names mean, and what the slots contain."""

    versions: list[tuple[str, Path]]

    @initialize(num_copies=st.integers(0, 2))
    def begin(self, num_copies: int) -> None:
        self.made = registry(AdapterReader(Shape(), MAX_RANK, torch.float32, num_copies))
        self.index = {version: i for i, (version, _) in enumerate(self.versions)}
        self.held: list[tuple[str, int]] = []
        self.meant: dict[str, tuple[str, int]] = {}  # name -> (version, step)
        self.pinned: dict[str, str] = {}
        self.claimed: str | None = None
        self.settled: set[str] = set()  # pinned and loaded
        self.steps = 0

    @rule(name=st.sampled_from("abcd"), i=st.integers(0, NUM_VERSIONS - 1), current=st.booleans(), pin=st.booleans())
    def register(self, name: str, i: int, current: bool, pin: bool) -> None:
        pin = pin and current and len(set(self.pinned) - {name}) < NUM_SLOTS - 1
        self.steps += 1
        assert self.made.register(AdapterVersion(name, self.steps, *self.versions[i]), current, pin)
        if current:
            self.meant[name] = self.versions[i][0], self.steps
            self.pinned.pop(name, None)
            if pin:
                self.pinned[name] = self.versions[i][0]

    @rule(i=st.integers(0, NUM_VERSIONS - 1))
    def acquire(self, i: int) -> None:
        version = self.versions[i][0]
        if version not in self.made._directories:
            return
        before = [(slot.version, slot.num_references) for slot in self.made._slots]
        slot = self.made.acquire(version)
        if slot is None:
            kept = set(self.pinned.values())
            free = [v for v, references in before if references == 0 and v not in kept]
            assert self.claimed is not None or (not free and version not in dict(before))
        else:
            assert holds(self.made, slot, i)
            self.held.append((version, slot))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        version, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.made.release(version)

    @rule(name=st.sampled_from("abcd"))
    def remove(self, name: str) -> None:
        self.made.remove(name)
        self.meant.pop(name, None)
        self.pinned.pop(name, None)

    @rule(i=st.none() | st.integers(0, NUM_VERSIONS - 1))
    def claim(self, i: int | None) -> None:
        self.claimed = None if i is None else self.versions[i][0]
        self.made.claim(self.claimed)

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "made"):
            return
        loaded = [slot.version for slot in self.made._slots if slot.version is not None]
        assert len(loaded) == len(set(loaded)) == self.made.num_used
        for version, slot in self.held:
            assert self.made._slots[slot].version == version and holds(self.made, slot, self.index[version])
        assert self.made.num_pinned() == len(self.held)
        self.settled &= set(self.pinned.values())
        assert self.settled <= set(loaded)
        self.settled |= set(self.pinned.values()) & set(loaded)
        assert self.made.current() == {name: version for name, (version, _) in self.meant.items()}
        for name, (version, step) in self.meant.items():
            found = self.made.resolve(f"{name}@{step}")
            assert found is not None and found.version == version


def test_the_registry_against_a_model(versions: list[tuple[str, Path]]) -> None:
    machine = type("Machine", (RegistryMachine,), {"versions": versions})
    limits = settings(
        max_examples=80, stateful_step_count=40, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    machine.TestCase.settings = limits
    machine.TestCase("runTest").runTest()
