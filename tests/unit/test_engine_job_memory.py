"""A job that can never fit is refused with a sum that adds up, and what the message advises does make it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fineinfer.data.packed import DATASET_FILE, EVAL_FILE, write_dataset
from fineinfer.engine.memory_ladder import ACTIVATIONS, KV, STATE
from fineinfer.messages import LoraSpec, TrainingSettings

from .engine_harness import Harness
from .training_job import SETTINGS, Told, write_job

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 1 << 20
LARGE = msgspec.structs.replace(SETTINGS, lora=LoraSpec(r=256, lora_alpha=8))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("e"), max_loras=2, max_lora_rank=4)
    yield harness
    harness.close()


def answer(engine: Harness, folder: Path, settings: TrainingSettings, longest: int = 100, **rows: int) -> str:
    """What is said to a job; nothing if it begins."""
    job, told, host = write_job(folder, settings, longest=longest, **rows), Told(engine), engine.parts.training
    host.start(job)
    if host.trainer is not None:
        host.cancel("job")
        return ""
    assert (told.end().status, told.end().error_code) == ("failed", "out_of_memory")
    return told.end().error_message


def leave(engine: Harness, num_bytes: int) -> None:
    """An engine's budget that leaves so much to a job."""
    ladder = engine.parts.ladder
    shares = ladder.shares()
    ladder._largest_budget_bytes = sum(shares.values()) - shares["budget"] + num_bytes
    ladder._governor.set_budget(ladder._largest_budget_bytes)


def needs(engine: Harness, folder: Path, settings: TrainingSettings, longest: int = 100) -> tuple[int, int]:
    """Bytes of (adapter and optimizer, largest micro-batch)."""
    leave(engine, 1 << 30)
    host = engine.parts.training
    host.start(write_job(folder, settings, longest=longest))
    trainer = host.trainer
    assert trainer is not None
    need = trainer.state_bytes, trainer.floor_bytes(trainer.max_micro_batch_tokens)
    assert sum(trainer.state_parts().values()) == trainer.state_bytes
    host.cancel("job")
    return need


def test_the_sum_adds_up_and_is_exact(engine: Harness, tmp_path: Path) -> None:
    state, micro_batch = needs(engine, tmp_path / "a", LARGE)
    leave(engine, state + micro_batch)
    assert answer(engine, tmp_path / "b", LARGE) == ""
    leave(engine, state + micro_batch - 1)
    message = answer(engine, tmp_path / "c", LARGE)
    number = r"(-?[\d,]+\.\d)"
    need = re.search(
        rf"needs {number} MiB = adapter and optimizer {number} \(masters {number} \+ gradients {number} \+ moments "
        rf"{number} \+ an update's temporary {number}\) \+ largest micro-batch {number} \((\d+) tokens x {number} KiB, "
        "every layer recomputed",
        message,
    )
    assert need is not None, message
    total, adapter, *parts, largest, tokens, each = (float(text.replace(",", "")) for text in need.groups())
    assert total == pytest.approx((state + micro_batch) / MIB, abs=0.06) == pytest.approx(adapter + largest, abs=0.2)
    assert sum(parts) == pytest.approx(adapter, abs=0.3) and tokens * each / 1024 == pytest.approx(largest, abs=0.1)
    room = re.search(
        rf"leaves {number} MiB = {number} - weights {number}(?: - workspace {number})? - adapters {number} - "
        rf"smallest KV pool {number}: ",
        message,
    )
    assert room is not None, message
    left, budget, *others = (float(text.replace(",", "")) for text in room.groups() if text)
    assert left == pytest.approx(budget - sum(others), abs=0.3) == pytest.approx(total, abs=0.3)
    governor = engine.parts.ladder._governor
    assert budget == pytest.approx(governor.budget_bytes / MIB, abs=0.06)
    assert governor.leased(STATE) == governor.leased(ACTIVATIONS) == 0 < governor.leased(KV)


def test_an_adapter_that_is_too_large(engine: Harness, tmp_path: Path) -> None:
    state, _ = needs(engine, tmp_path / "a", LARGE)
    leave(engine, state)
    assert "lower lora.r" in answer(engine, tmp_path / "b", LARGE)
    assert answer(engine, tmp_path / "c", SETTINGS) == ""
    leave(engine, state - 1)  # nothing is made to find that out
    message = answer(engine, tmp_path / "d", LARGE)
    assert f"needs {state / MIB:,.1f} MiB for adapter and optimizer alone" in message and "lower lora.r" in message


def test_an_example_that_is_too_long(engine: Harness, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, micro_batch_tokens=16)  # each example is a micro-batch
    state, _ = needs(engine, tmp_path / "a", settings, longest=500)
    _, shorter = needs(engine, tmp_path / "b", settings, longest=300)
    leave(engine, state + shorter)
    message = answer(engine, tmp_path / "c", settings, longest=500)
    advised = re.search(r"a max_seq_length of (\d+) would fit \(the longest example has (\d+) tokens", message)
    assert advised is not None, message
    fits, longest = int(advised[1]), int(advised[2])
    assert fits < longest < 500
    for length, fitting in ((fits, True), (fits + 1, False)):  # rows of just that length
        text = answer(engine, tmp_path / str(length), settings, longest=length + 1, shortest=length)
        assert (text == "") == fitting


def test_a_micro_batch_of_too_many_examples(engine: Harness, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, batch_size=12, micro_batch_tokens=2000)
    state, _ = needs(engine, tmp_path / "a", settings)
    _, smaller = needs(engine, tmp_path / "b", msgspec.structs.replace(settings, batch_size=3))
    leave(engine, state + smaller)
    message = answer(engine, tmp_path / "c", settings)
    advised = re.search(r"(\d+) gradient_accumulation_steps would fit", message)
    assert advised is not None and int(advised[1]) == 4, message
    for steps, fitting in ((4, True), (3, False)):
        split = msgspec.structs.replace(settings, gradient_accumulation_steps=steps)
        assert (answer(engine, tmp_path / f"k{steps}", split) == "") == fitting


def test_a_validation_example_that_is_too_long(engine: Harness, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, micro_batch_tokens=32)
    state, micro_batch = needs(engine, tmp_path / "a", settings)
    leave(engine, state + micro_batch)
    told, host = Told(engine), engine.parts.training
    fitting = 400
    for advised in (True, False):
        job = write_job(tmp_path / str(advised), settings)
        (tmp_path / "eval").mkdir(exist_ok=True)
        digest = write_dataset(tmp_path / "eval", [([5] * fitting, [1] * fitting)])
        (tmp_path / "eval" / DATASET_FILE).rename(Path(job.job_dir) / EVAL_FILE)
        host.start(msgspec.structs.replace(job, eval_sha256=digest))
        if advised:
            message = told.end().error_message
            found = re.search(r"validation examples of at most (\d+) tokens would fit", message)
            assert found is not None, message
            fitting = int(found[1])
    assert host.trainer is not None and 90 < fitting < 400
    host.cancel("job")


def test_a_job_that_may_not_recompute_must_fit_with_all_kept(engine: Harness, tmp_path: Path) -> None:
    state, recomputed = needs(engine, tmp_path / "a", SETTINGS)
    never = msgspec.structs.replace(SETTINGS, recompute="never")
    assert needs(engine, tmp_path / "b", never)[1] > recomputed
    leave(engine, state + recomputed)
    message = answer(engine, tmp_path / "c", never)
    assert "every layer kept" in message and message.endswith('recompute "auto" would fit')
    assert answer(engine, tmp_path / "d", SETTINGS) == ""
