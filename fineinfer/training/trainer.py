"""The trainer of one job: runs it one unit at a time, owns gradients, optimizer and data cursor, writes checkpoints.

It calls no governor: whoever drives it decides when ``advance`` is called, and answers the injected keep policy. A job
is a pure function of its settings and data, whatever the pace and whatever was kept or dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fineinfer.adapters.config import AdapterError
from fineinfer.adapters.peft_io import load_adapter
from fineinfer.adapters.weights import LoraLayout, LoraWeights
from fineinfer.messages import JobCheckpoint, JobEval, JobNote, JobProgress, StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.training.activations import measure_activations
from fineinfer.training.dataset import PackedDataset, Schedule
from fineinfer.training.determinism import fixed_order
from fineinfer.training.errors import TrainingError
from fineinfer.training.fused_layers import make_layers
from fineinfer.training.offload import host_store
from fineinfer.training.ops import TrainingOps
from fineinfer.training.projection import adapted_blocks
from fineinfer.training.reports import Cursor, log_entry, progress_message
from fineinfer.training.schedule import check_settings, lr_factor, warmup_steps
from fineinfer.training.state import AdapterState
from fineinfer.training.step import KeepPolicy, StepContext, Unit
from fineinfer.training.trainer_checkpoints import TrainerCheckpoints
from fineinfer.training.trainer_evaluation import Report
from fineinfer.training.trainer_memory import TrainerMemory
from fineinfer.training.update import RunningUpdate, micro_batch_units

MAX_BAD_UPDATES_IN_A_ROW = 3
MAX_RANK = 1 << 20  # of an adapter to begin with: what it may have is what the job has
HEAD_CHUNK_TOKENS = {"cpu": 128, "cuda": 512}  # a head unit should take about as long as a layer unit

ReportT = TypeVar("ReportT", JobProgress, JobEval, JobNote, JobCheckpoint)


@dataclass(frozen=True)
class UnitReport:
    """One finished unit: embed, forward, head, backward, recompute, optimizer, eval_…, checkpoint or publish."""

    kind: str
    num_tokens: int


class Trainer(TrainerMemory, TrainerCheckpoints):
    """Runs one fine-tuning job.

    Args:
        decoder: The frozen base model.
        start: The job; goes on from the newest whole checkpoint in its folder.
        keep_policy: Asked at each layer's forward, ``(tokens of the micro-batch, layer)``, whether the graph is kept;
            not asked when the job's ``recompute`` is "always" or "never".
        head_chunk_tokens: Rows of one head unit; None chooses by device.
        ops: Kernels to train with, over FusedLayers; None: the reference operations, over AutogradLayers.
        deterministic: Two runs give the same bits on a GPU too, and no micro-batch is split.

    Attributes:
        cursor: Where the job stands.
        schedule: Its updates.
        log_history: One entry a finished update, as transformers' trainer_state.json.

    Raises:
        TrainingError: The job cannot start: data, hyperparameters, dtype or checkpoint do not fit.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        decoder: Decoder,
        start: StartJob,
        keep_policy: KeepPolicy,
        head_chunk_tokens: int | None = None,
        ops: TrainingOps | None = None,
        deterministic: bool = False,
    ) -> None:
        self._job, settings, self._deterministic = start, start.settings, deterministic
        check_settings(settings)
        dataset = PackedDataset(Path(start.job_dir) / "dataset.safetensors", start.dataset_sha256)
        dataset.check_token_ids(decoder.spec.vocab_size)
        self.schedule = Schedule(dataset, settings)
        try:
            layout = LoraLayout.uniform(decoder.spec, settings.lora)
        except AdapterError as error:
            raise TrainingError(str(error), "invalid_hyperparameters") from error
        self._state = AdapterState(layout, settings, decoder.dtype, decoder.device, ops)
        blocks = adapted_blocks(self._state.compute, self._state.grads)
        layers = make_layers(decoder, blocks, ops)
        chunk = head_chunk_tokens or HEAD_CHUNK_TOKENS.get(decoder.device.type, 512)
        keep = {"always": lambda *_: False, "never": lambda *_: True}.get(settings.recompute, keep_policy)
        sizes = measure_activations(decoder, layers, chunk, fused_head=ops is not None)
        rate = settings.lora.lora_dropout
        self._context = StepContext(decoder, layers, ops, keep, chunk, sizes, host_store(decoder.device), rate)
        self.cursor = Cursor()
        self.log_history: list[dict[str, Any]] = []
        self._reports: list[Report] = []
        if dataset.num_skipped:
            self._note("warn", f"{dataset.num_skipped} examples have no trained token and are left out")
        self._load_eval_set()
        self._begin_checkpoints()
        if start.init_from is not None and self.cursor.step == 0:
            self._begin_anew()
        self._update: RunningUpdate | None = None
        self._next = self._load(self.cursor.step)
        self._begin_evaluation()

    def _begin_anew(self) -> None:
        """Set the state to that before the first update.

        Raises:
            TrainingError: ``init_from`` is not an adapter of the job's shape.
        """
        masters, settings = self._state.masters, self._job.settings
        if self._job.init_from is None:
            weights = LoraWeights.init(masters.layout, masters.flat.dtype, "cpu", settings.seed)
        else:
            try:
                saved = load_adapter(Path(self._job.init_from), self._context.decoder.spec, MAX_RANK)
                masters.layout.check_same(saved.layout)
            except AdapterError as error:
                message = f"from_checkpoint does not fit the job: {error}"
                raise TrainingError(message, "invalid_hyperparameters") from error
            weights = LoraWeights(masters.layout, saved.flat.to(masters.flat.dtype))
        zeros = torch.zeros_like(weights.flat)
        self._state.restore(weights, {"exp_avg": zeros, "exp_avg_sq": zeros}, 0)

    # ------------------------------------------------------------ facts

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job.job_id

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.cursor.step

    @property
    def total_steps(self) -> int:
        """Updates of the whole job."""
        return self.schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Updates of one epoch."""
        return self.schedule.steps_per_epoch

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters of the adapter."""
        return self._state.masters.layout.num_parameters

    @property
    def serving_weights(self) -> LoraWeights:
        """The adapter after the last update, in the model's dtype; the next update overwrites it."""
        return self._state.compute

    @property
    def finished(self) -> bool:
        """Whether every update is done and the last checkpoint is written."""
        return self.at_end and self._evaluation is None and not self.checkpoint_due

    @property
    def at_update_boundary(self) -> bool:
        """Whether no update and no micro-batch of an evaluation is under way."""
        return self._update is None and (self._evaluation is None or self._evaluation.current is None)

    @property
    def begins_micro_batch(self) -> bool:
        """Whether the next ``advance`` begins a micro-batch, so that its activations must be leased first."""
        if self._running is not None:
            return self._running.begins_micro_batch
        return bool(self._next) and not self.checkpoint_due

    # ------------------------------------------------------------ running

    @torch.inference_mode(False)
    def advance(self) -> UnitReport:
        """Run exactly one unit.

        Raises:
            TrainingError: The job is finished or has failed: three updates in a row were not finite, the adapter is
                not finite, or the last checkpoint could not be written.
        """
        if self._evaluation is not None:
            with fixed_order(self._deterministic):
                return UnitReport(*self._advance_evaluation(self._evaluation))
        if self._update is None and self.checkpoint_due:
            return UnitReport(self._checkpoint_unit(), 0)
        if self._update is None:
            if not self._next:
                raise TrainingError("the job is finished")
            self._state.grads.flat.zero_()
            self._update = RunningUpdate(self._context, self._next, self._undecided_kind)
        with fixed_order(self._deterministic):
            unit = self._update.advance() or self._finish_update(self._update)
        self._begun()
        return UnitReport(*unit)

    def abandon_update(self) -> None:
        """Drop the running update and its memory; ``advance`` runs it again from its start, with the same result.

        Of an evaluation only the micro-batch under way runs again.
        """
        if self._running is not None:
            self._running.abandon()
        self._update = None

    def close(self) -> None:
        """Free everything; the trainer cannot be used after this."""
        self.abandon_update()
        self._close_checkpoints()
        self._next, self._evaluation = [], None
        del self._context, self._state

    def _finish_update(self, update: RunningUpdate) -> Unit:
        cursor, settings = self.cursor, self._job.settings
        following = self._load(cursor.step + 1)  # while the device is still busy
        loss, accuracy, norm = update.totals(self._state.gradient_norm())
        warmup = warmup_steps(self.total_steps, settings.warmup_ratio)
        factor = lr_factor(settings.lr_scheduler, cursor.step, self.total_steps, warmup, settings.min_lr_ratio)
        learning_rate = settings.learning_rate * factor
        applied = self._state.apply(loss, norm, learning_rate)
        self._update = None
        cursor.count(update.num_tokens, update.num_targets, applied.skipped)
        entry = log_entry(cursor, self.steps_per_epoch, loss, learning_rate, applied.grad_norm, accuracy)
        self.log_history.append(entry)
        if cursor.bad_in_a_row >= MAX_BAD_UPDATES_IN_A_ROW:
            raise TrainingError(
                f"loss or gradient was not finite in {cursor.bad_in_a_row} updates in a row, "
                f"the last of them update {cursor.step}",
                "non_finite",
            )
        if applied.skipped:
            self._note(
                "warn",
                f"update {cursor.step} was skipped: its loss or gradient is not finite ({cursor.num_skipped} so far)",
            )
        else:
            self._reports.append(progress_message(self.job_id, entry, self.total_steps))
        self._next = following
        self._begin_evaluation()
        return "optimizer", update.num_tokens

    # ------------------------------------------------------------ what to tell the user

    def take_progress(self) -> list[JobProgress]:
        """Finished updates since the last call, skipped ones left out; rates are 0, for the host to fill in.

        After a resume the newest updates before it come again: their messages may have been lost.
        """
        return self._take(JobProgress)

    def take_evals(self) -> list[JobEval]:
        """Evaluations with a finite loss since the last call; after a resume as with ``take_progress``."""
        return self._take(JobEval)

    def take_notes(self) -> list[JobNote]:
        """Notes for the job's events since the last call."""
        return self._take(JobNote)

    def take_checkpoints(self) -> list[JobCheckpoint]:
        """Checkpoints written and verified since the last call."""
        return self._take(JobCheckpoint)

    def _take(self, kind: type[ReportT]) -> list[ReportT]:
        taken: list[ReportT] = [report for report in self._reports if isinstance(report, kind)]
        self._reports = [report for report in self._reports if not isinstance(report, kind)]
        return taken

    def _note(self, level: str, message: str) -> None:
        self._reports.append(JobNote(job_id=self.job_id, level=level, message=message))

    # ------------------------------------------------------------ for the scheduler

    @property
    def _undecided_kind(self) -> str:
        return "recompute" if self._job.settings.recompute == "always" else "backward"

    def remaining_units(self) -> Counter[Unit]:
        """How often each (kind, tokens) is still to run in the running update; empty at an update boundary.

        Of an evaluation a micro-batch is what an update is of training.
        """
        if self._update is not None:
            return Counter(self._update.remaining())
        return Counter(() if self._evaluation is None or self.at_update_boundary else self._evaluation.remaining())

    def next_update_units(self) -> Counter[Unit]:
        """The same for the next update to start, and for a checkpoint that is due before it."""
        if self._evaluation is not None and self.at_update_boundary:
            return Counter(self._evaluation.remaining())
        batches = self._following_batches()
        units = [u for batch in batches for u in micro_batch_units(batch, self._context, self._undecided_kind)]
        if batches:
            units.append(("optimizer", sum(batch.num_tokens for batch in batches)))
        if self._update is None and self.checkpoint_due:
            units += [("checkpoint", 0)] * (not self._is_saved) + [("publish", 0)]
        return Counter(units)
