"""Does a job learn what transformers + PEFT learn? Evaluation loss on chats that neither has seen, in one plot.

    python benchmarks/finetune_quality.py --data gsm8k_chat.jsonl

The first ``--chats`` conversations that fit are trained on, by the trainer of `fineinfer serve` and by transformers +
PEFT with AdamW: the same rows in the same batches, the same start, settings and precision. The next ``--held-out`` ones
are judged at the same steps by each side itself, and the adapters that FineInfer published by PEFT too, so that the
files are right as well. The base model is the embedded one. Prints a table, appends to
results/finetune_quality.csv and draws docs/finetune_quality.svg. About a quarter of an hour on two quiet cores.

Data: gsm8k_chat.jsonl, the training set as OpenAI chats, is Grade School Math (MIT, OpenAI); any chat JSONL will do.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from finetune_plot import plot
from harness import OtherLoad, versions, write_csv
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from fineinfer.data.packed import DatasetSummary
from fineinfer.data.prepare import PrepareSettings, prepare
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.loader import load_model
from fineinfer.model.resolve import resolve_model_path
from fineinfer.text.chat_template import render_chat
from fineinfer.text.tokenizer import load_tokenizer
from fineinfer.training.ops import pick_ops
from fineinfer.training.schedule import warmup_steps
from fineinfer.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
EVAL_BATCH = 8

Row = tuple[list[int], list[int]]  # token ids, loss mask


@dataclasses.dataclass
class Curve:
    """What one side did.

    Attributes:
        train: Loss of each update.
        evaluated: Update -> loss on the held-out rows.
        published: Update -> that of the adapter's files, by PEFT.
        seconds: Of training, FineInfer's with its evaluations.
    """

    train: list[float] = dataclasses.field(default_factory=list)
    evaluated: dict[int, float] = dataclasses.field(default_factory=dict)
    published: dict[int, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def split(data: Path, folder: Path, args: argparse.Namespace) -> None:
    """Write the first chats that fit as train.jsonl, the next ones as eval.jsonl."""
    tokenizer = load_tokenizer(resolve_model_path(None, revision=None, need_weights=False))
    kept: list[str] = []
    with data.open(encoding="utf-8") as file:
        for line in file:
            if len(render_chat(tokenizer, json.loads(line)["messages"], False)) <= args.max_seq_length:
                kept.append(line)
            if len(kept) == args.chats + args.held_out:
                break
    for name, lines in (("train", kept[: args.chats]), ("eval", kept[args.chats :])):
        (folder / name).mkdir()
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def prepared(folder: Path, name: str, max_seq_length: int) -> tuple[DatasetSummary, list[Row]]:
    """What the data child makes of a file, and its rows."""
    model = resolve_model_path(None, revision=None, need_weights=False)
    told = PrepareSettings(
        source=str(folder / f"{name}.jsonl"), job_dir=str(folder / name), model_path=str(model),
        max_seq_length=max_seq_length,
    )  # fmt: skip
    summary = prepare(told, lambda: load_tokenizer(model))
    if not isinstance(summary, DatasetSummary):
        raise SystemExit(f"error: {summary.first[0]}")
    arrays = load_arrays(folder / name / "dataset.safetensors")
    bounds = arrays["offsets"].tolist()
    ids, mask = arrays["input_ids"].tolist(), arrays["loss_mask"].tolist()
    return summary, [(ids[a:b], mask[a:b]) for a, b in itertools.pairwise(bounds)]


def summed_loss(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    """Sum of the losses of one padded batch's trained tokens."""
    width, device = max(len(ids) for ids, _ in rows), next(model.parameters()).device
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)
    attention = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows], device=device)
    trained = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], device=device)
    labels = torch.where(trained[:, 1:] == 1, ids[:, 1:], -100)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def num_targets(rows: list[Row]) -> int:
    return sum(sum(mask[1:]) for _, mask in rows)


def evaluate(model: torch.nn.Module, rows: list[Row]) -> float:
    """Mean loss of the held-out rows' trained tokens."""
    rows = sorted(rows, key=lambda row: len(row[0]))  # little padding
    model.eval()
    with torch.no_grad():
        total = sum(float(summed_loss(model, rows[i : i + EVAL_BATCH])) for i in range(0, len(rows), EVAL_BATCH))
    model.train()
    return total / num_targets(rows)


def peer_model(settings: TrainingSettings, device: str) -> PeftModel:
    """transformers + PEFT in float32."""
    path = resolve_model_path(None, revision=None)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    lora = settings.lora
    config = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules))
    model = get_peft_model(base.to(device), config)
    assert isinstance(model, PeftModel)
    return model.train()


def train_ours(trainer: Trainer) -> tuple[Curve, dict[int, Path]]:
    """Run the job; its curve, and the folders of the adapters by step."""
    published: dict[int, Path] = {}
    evaluated: dict[int, float] = {}
    begin = time.perf_counter()
    while not trainer.finished:
        trainer.advance()
        published |= {made.step: Path(made.directory) for made in trainer.take_checkpoints()}
        evaluated |= {found.step: found.loss for found in trainer.take_evals()}
        for done in trainer.take_progress():
            print(f"FineInfer {done.step}/{done.total_steps} loss {done.loss:.4f}", flush=True)
    losses = [entry["loss"] for entry in trainer.log_history if "loss" in entry]
    return Curve(losses, evaluated, {}, time.perf_counter() - begin), published


def peer_updates(model: PeftModel, batches: list[list[list[Row]]], settings: TrainingSettings) -> Iterator[float]:
    """Train as the settings say; yields the loss of each update."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    warmup = warmup_steps(len(batches), settings.warmup_ratio)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, len(batches))
    for update in batches:
        targets, total = sum(map(num_targets, update)), 0.0
        for batch in update:
            loss = summed_loss(model, batch) / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield total


def train_peer(
    model: PeftModel, batches: list[list[list[Row]]], settings: TrainingSettings, at: set[int], held_out: list[Row]
) -> Curve:
    """The peer's curve, with evaluations at the same updates."""
    curve, updates = Curve(), peer_updates(model, batches, settings)
    while True:
        begin = time.perf_counter()
        loss = next(updates, None)
        curve.seconds += time.perf_counter() - begin
        if loss is None:
            return curve
        curve.train.append(loss)
        step = len(curve.train)
        print(f"PEFT {step}/{len(batches)} loss {loss:.4f}", flush=True)
        if step in at:
            curve.evaluated[step] = evaluate(model, held_out)


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Both sides and their curves as rows."""
    split(args.data, folder, args)
    summary, rows = prepared(folder, "train", args.max_seq_length)
    judged, held_out = prepared(folder, "eval", args.max_seq_length)
    shutil.copy(folder / "eval" / "dataset.safetensors", folder / "train" / "eval.safetensors")
    updates = math.ceil(len(rows) / args.batch_size) * args.epochs
    every = max(1, updates // args.evals)
    settings = TrainingSettings(
        lora=LoraSpec(r=16, lora_alpha=32), n_epochs=args.epochs, batch_size=args.batch_size,
        learning_rate=args.learning_rate, micro_batch_tokens=1024, save_steps=every, eval_steps=every,
    )  # fmt: skip
    job = StartJob(
        job_id="job", name="lora", base_model="base", job_dir=str(folder / "train"), settings=settings,
        adapters_dir=str(folder / "adapters"), dataset_sha256=summary.sha256, eval_sha256=judged.sha256,
    )  # fmt: skip
    decoder = load_model(None, dtype="float32", device=args.device).decoder
    trainer = Trainer(decoder, job, lambda _tokens, _layer: True, ops=pick_ops("auto", torch.device(args.device)))
    start = {name: tensor.clone() for name, tensor in trainer._state.masters.named_tensors()}
    batches = [
        [[rows[i] for i in examples] for examples in trainer.schedule.micro_batches(step)]
        for step in range(trainer.total_steps)
    ]
    ours, published = train_ours(trainer)
    trainer.close()
    del decoder, trainer
    model = peer_model(settings, args.device)
    set_peft_model_state_dict(model, start)
    base = evaluate(model, held_out)
    peer = train_peer(model, batches, settings, set(published), held_out)
    for step, adapter in sorted(published.items()):
        set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
        ours.published[step] = evaluate(model, held_out)
    told = {
        "chats": len(rows), "held_out": len(held_out), "tokens": summary.tokens, "epochs": args.epochs,
        "batch_size": args.batch_size, "learning_rate": args.learning_rate, "max_seq_length": args.max_seq_length,
        "versions": versions(),
    }  # fmt: skip
    made: list[dict[str, object]] = []
    for side, curve in (("FineInfer", ours), ("HF + PEFT", peer)):
        before = 0
        for step, loss in sorted((curve.evaluated | {0: base}).items()):
            trained = float(np.mean(curve.train[before:step])) if step else float("nan")
            row = {"side": side, "step": step, "eval_loss": round(loss, 6), "train_loss": round(trained, 6)}
            files = {"published_eval_loss": round(curve.published[step], 6) if step in curve.published else ""}
            made.append(row | files | {"seconds": round(curve.seconds, 1)} | told)
            before = step
    for name, losses in (("its own evaluations", ours.evaluated), ("its published files", ours.published)):
        difference = max(abs(losses[step] - loss) / loss for step, loss in peer.evaluated.items())
        print(f"FineInfer by {name}: evaluation losses within {difference:.1e} of HF + PEFT's", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-seq-length", type=int, default=132)
    parser.add_argument("--evals", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "finetune_quality.csv")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "finetune_quality.svg")
    args = parser.parse_args()
    if not args.data.is_file():
        raise SystemExit(f"error: --data: no such file: {args.data}")
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as name:
        rows = run(args, Path(name))
    share = round(load.share(), 2)
    for row in rows:
        print("{side:<10} step {step:>4}  eval {eval_loss:.4f}  train {train_loss:.4f}".format(**row))
    write_csv(args.results, [row | {"other_load": share} for row in rows])
    plot(args.results, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
