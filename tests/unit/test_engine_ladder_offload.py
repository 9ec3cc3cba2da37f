"""The ladder's rungs of host memory and smaller micro-batches, on an engine in this process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fineinfer.engine import memory_ladder
from fineinfer.engine.memory_ladder import ACTIVATIONS
from fineinfer.engine.rungs import OFFLOAD
from fineinfer.training import offload

from .test_engine_ladder import finish_job, make, train, undisturbed, units_run  # noqa: F401
from .training_job import SETTINGS, Told, trained, write_job


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_micro_batch_that_does_not_fit_is_split(
    make, tmp_path: Path, deterministic: bool, recompute: str  # noqa: F811
) -> None:  # fmt: skip
    settings = msgspec.structs.replace(SETTINGS, micro_batch_tokens=400, recompute=recompute)
    job = write_job(tmp_path / "job", settings)
    harness = make(8 << 20, deterministic=deterministic)
    harness.parts.training.start(job)
    trainer, ladder = harness.parts.training.trainer, harness.parts.ladder
    train(harness, lambda: trainer.step == 1 and trainer.begins_micro_batch)
    whole, governor = trainer.next_micro_batch_tokens(), ladder._governor
    ladder._release_idle(trainer, 0)
    ladder._reserved_slots = lambda: ladder._kv.num_slots  # requests hold the whole pool
    governor.set_budget(governor.budget_bytes - governor.free_bytes + trainer.bytes_if_recomputed(whole) - 1000)
    assert ladder.lease_micro_batch(trainer) == (not deterministic)
    assert (trainer.next_micro_batch_tokens() < whole) == (not deterministic)
    assert ladder.steps_taken["split"] == (not deterministic)
    assert (0 < governor.leased(ACTIVATIONS) < trainer.bytes_if_recomputed(whole)) == (not deterministic)


def test_inputs_go_to_the_host_for_requests_and_no_bit_changes(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(offload, "OFFLOADING_DEVICES", ("cpu",))
    monkeypatch.setattr(
        memory_ladder, "cheapest", lambda rungs, _bytes: next(rung for rung in rungs if rung.name == OFFLOAD)
    )
    job = write_job(tmp_path / "job")
    harness = make(8 << 20)
    told = Told(harness)
    harness.parts.training.start(job)
    trainer, ladder = harness.parts.training.trainer, harness.parts.ladder
    train(harness, units_run(harness, "forward", "forward"))
    before = ladder._governor.leased(ACTIVATIONS)
    ladder._descend(trainer, 1, 0.0, 0)
    assert trainer.num_kept_layers() == 0 and trainer.held_bytes() == 0
    assert before > ladder._governor.leased(ACTIVATIONS) == trainer.bytes_if_offloaded(trainer.micro_batch_tokens)
    harness.parts.training.tell(ladder.take_steps())
    assert "wait in host memory" in told.notes()[-1]
    finish_job(harness)
    assert trained(job) == undisturbed


@pytest.mark.parametrize("recompute", ["auto", "always", "never"])
def test_no_memory_is_leased_for_graphs_that_are_not_kept(make, tmp_path: Path, recompute: str) -> None:  # noqa: F811
    harness = make(8 << 20)
    harness.parts.training.start(write_job(tmp_path / "job", msgspec.structs.replace(SETTINGS, recompute=recompute)))
    trainer, ladder = harness.parts.training.trainer, harness.parts.ladder
    train(harness, lambda: trainer.micro_batch_open)
    tokens, leased = trainer.micro_batch_tokens, ladder._governor.leased(ACTIVATIONS)
    least, most = trainer.bytes_if_recomputed(tokens), trainer.bytes_if_all_kept(tokens)
    assert leased == (least if recompute == "always" else most) and least < most
    harness.parts.latency.observe("forward", tokens, 1.0)
    rungs = {rung.name: rung for rung in ladder._rungs.of(trainer, most, trainer.state_bytes)}
    if recompute != "never":
        assert (rungs["drop_kept"].cost_s > 0) == (recompute == "auto"), "nothing runs again for what was not kept"
    train(harness, lambda: trainer.at_update_boundary)
    assert trainer.step == 1
    harness.parts.training.cancel("job")
