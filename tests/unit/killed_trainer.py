"""A tiny job in forked children of one process that has torch ready, killed at a durable write or at any moment.

``python killed_trainer.py FOLDER writes|again|moments NUM_KILLS`` prints the fingerprint of an undisturbed run and one
line of JSON for each kill. Children are forked, since importing torch takes seconds; one thread, or they would hang.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fineinfer.adapters import peft_io
from fineinfer.adapters.peft_io import content_hash
from fineinfer.data.packed import DATASET_FILE, EVAL_FILE, write_dataset
from fineinfer.hashing import CHAT_TEMPLATE_FILE
from fineinfer.messages import LoraSpec, StartJob, TrainingSettings
from fineinfer.model.decoder import Decoder
from fineinfer.model.loader import load_model
from fineinfer.training import checkpoint
from fineinfer.training.parking import ParkableTrainer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 37,
    "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": True,
}  # fmt: skip
DURABLE = ("fsync", "rename", "mkdir", "unlink", "rmdir", "write_text", "copyfile", "save_file")  # ends of names
WHOLE = 0  # exit code of a job that was not killed


def write_job(folder: Path, mode: str) -> StartJob:
    """Three updates with a checkpoint after each, the third of which removes one.

    Or eight, with one after each two and after each evaluation that is the best so far ("moments"). Or two, the second
    of which is evaluated, so that its checkpoint is written once more if one was written before ("again").
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    num_rows, batch_size, n_epochs = {"writes": (3, 1, 1), "again": (2, 1, 1), "moments": (4, 2, 4)}[mode]
    save_steps, eval_steps = (2, 3) if mode == "moments" else (1, 2)
    rows = [(rng.integers(0, CONFIG["vocab_size"], n).tolist(), [1] * int(n)) for n in rng.integers(3, 12, num_rows)]
    evaluated = mode != "writes"
    lora = LoraSpec(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=("q_proj", "down_proj"))
    settings = TrainingSettings(
        lora=lora, n_epochs=n_epochs, batch_size=batch_size, learning_rate=1e-2, save_steps=save_steps,
        micro_batch_tokens=16, eval_steps=eval_steps, load_best_model_at_end=evaluated,
    )  # fmt: skip
    if evaluated:
        (folder / "eval").mkdir()
        eval_sha256 = write_dataset(folder / "eval", rows[:2])
        os.rename(folder / "eval" / DATASET_FILE, folder / EVAL_FILE)
    (folder / CHAT_TEMPLATE_FILE).write_text("{{ messages }}")
    return StartJob(
        job_id="job", name="lora", base_model="base", settings=settings, job_dir=str(folder),
        adapters_dir=str(folder.parent / "adapters"), dataset_sha256=write_dataset(folder, rows),
        eval_sha256=eval_sha256 if evaluated else None,
    )  # fmt: skip


# ---------------------------------------------------------------- what a child does


class Writes:
    """Stands before every durable step of this process: counts it, tells ``at``, and dies at one of them.

    Args:
        die_at: Number of the step, from 1, before which (or half through which) the process dies; 0: never.
        power: The machine dies with it: what was not flushed by then is torn, renamed back or gone.
        at: Called with the name of each step.
    """

    def __init__(self, die_at: int, power: bool, at: Callable[[str], None]) -> None:
        self._left, self._power, self.at, self._dying = die_at, power, at, False
        self._unflushed: set[int] = set()  # inodes of files
        self._undo: list[tuple[Path, Callable[[], object]]] = []  # (folder whose flush makes it last, how to undo it)

    def _reached(self, name: str) -> bool:
        if self._dying:
            return False
        self.at(name)
        self._left -= 1
        return self._left == 0

    def _die(self, root: Path) -> None:
        self._dying = True
        if self._power:
            for path in root.rglob("*"):
                if path.is_file() and path.stat().st_ino in self._unflushed:
                    os.truncate(path, path.stat().st_size // 2)
            for _, undo in reversed(self._undo):
                with contextlib.suppress(OSError):  # a folder that was removed is gone
                    undo()
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self, root: Path) -> None:
        rename = os.rename

        def step(owner: Any, name: str, then: Callable[..., object] = lambda *a, **k: None) -> None:
            real = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if self._reached(name):
                    self._die(root)
                result = real(*args, **kwargs)
                then(*args)
                return result

            setattr(owner, name, call)

        def file(owner: Any, name: str, index: int) -> None:
            """A step that writes the file which is its argument number ``index``; it can also die half through."""
            real = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if self._reached(name):
                    self._die(root)
                result, path = real(*args, **kwargs), Path(args[index])
                self._unflushed.add(path.stat().st_ino)
                if self._reached(f"half of {name}"):
                    os.truncate(path, path.stat().st_size // 2)
                    self._die(root)
                return result

            setattr(owner, name, call)

        def flushed(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self._unflushed.discard(path.stat().st_ino)
            self._undo = [entry for entry in self._undo if entry[0] != path]

        def renamed(old: Path, new: Path) -> None:
            self._undo.append((Path(new).parent, lambda: rename(new, old)))

        def made(path: Any, *_: object) -> None:
            self._undo.append((Path(path).parent, lambda: shutil.rmtree(path)))

        os.fsync = lambda descriptor: None  # only another process's death is survived here, so nothing needs the disk
        step(os, "fsync", flushed)
        step(os, "rename", renamed)
        step(os, "mkdir", made)
        step(os, "unlink")
        step(os, "rmdir")
        for owner, name, index in (
            (Path, "write_text", 0), (shutil, "copyfile", 1), (checkpoint, "save_file", 1), (peft_io, "save_file", 1),
        ):  # fmt: skip
            file(owner, name, index)


def fingerprint(trainer: ParkableTrainer) -> str:
    """Of all that an interrupted run must agree on: parameters, moments, updates, cursor, loss trace."""
    state = trainer._state
    digest = hashlib.sha256()
    for flat in (state.masters.flat, state.optimizer.exp_avg, state.optimizer.exp_avg_sq):
        digest.update(flat.clone().numpy().tobytes())  # numpy keeps a storage from being freed, as parking does
    rest = [state.optimizer.num_updates, repr(trainer.cursor), trainer.log_history]
    digest.update(json.dumps(rest).encode())
    return digest.hexdigest()


def train(decoder: Decoder, job: StartJob, result: Path, writes: Writes, parks: bool) -> None:
    """The job from where it stands to its end; writes where it began, then what it was at each boundary of updates.

    If it ``parks`` it does so once in each evaluation: the update is written without it, and with it at the end.
    """
    at, parked = writes.at, 0
    trainer = ParkableTrainer(decoder, job, lambda _t, i: i == 0)
    (result / "begun").write_text(json.dumps([trainer.step, fingerprint(trainer)]))
    writes.install(Path(job.job_dir).parent)
    states = {trainer.step: [fingerprint(trainer)]}
    while not trainer.finished:
        at(trainer.advance().kind)
        if trainer.at_update_boundary:  # an evaluation adds to the trace of the same step
            states.setdefault(trainer.step, []).append(fingerprint(trainer))
        elif parks and trainer.lost_by_park() and trainer._evaluation is not None and parked < trainer.step:
            trainer.park()
            trainer.unpark()
            parked = trainer.step
            at("parked")
    (result / "ended").write_bytes(json.dumps(states).encode())


def child(work: Callable[[], None]) -> int:
    """Process id of a fork that does it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        try:
            work()
            code = WHOLE
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)


# ---------------------------------------------------------------- what is asked of the disk afterwards


def whole_steps(job: StartJob) -> tuple[list[int], list[str]]:
    """Steps of the checkpoints that are as their manifest says, and names of those that are not; in code of its own.

    One that stands aside for a newer one counts as long as that is not there.
    """
    whole, torn = [], []
    root = Path(job.job_dir) / "checkpoints"
    aside = [folder for folder in root.glob(".old-step-*") if not (root / folder.name[5:]).exists()]
    for folder in sorted([*root.glob("step-*"), *aside], key=lambda folder: folder.name[-8:]):
        try:
            files = json.loads((folder / "manifest.json").read_bytes())["files"]
            good = len(files) == 5 and all(
                hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
                for name, entry in files.items()
            )
        except (OSError, ValueError, KeyError):
            good = False
        if good:
            whole.append(int(folder.name[-8:]))
        else:
            torn.append(folder.name)
    for folder in Path(job.adapters_dir).glob("[!.]*"):
        try:
            good = content_hash(folder) == folder.name
        except peft_io.AdapterError:
            good = False
        if not good:
            torn.append(folder.name[:8])
    return whole, torn


class Runs:
    """Lives of one job, one after the other, until it ends."""

    def __init__(self, decoder: Decoder, folder: Path, mode: str) -> None:
        self.job = write_job(folder / "job", mode)
        self._decoder, self._folder, self._parks = decoder, folder, mode == "again"

    def live(self, die_at: int = 0, power: bool = False, at: Callable[[str], None] = lambda name: None) -> int:
        for name in ("begun", "ended"):
            (self._folder / name).unlink(missing_ok=True)
        writes = Writes(die_at, power, at)
        return child(lambda: train(self._decoder, self.job, self._folder, writes, self._parks))

    def wait(self, pid: int) -> bool:
        """Whether it came to its end, rather than being killed."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (WHOLE, -signal.SIGKILL):
            raise RuntimeError(f"a child ended with {code}")
        return code == WHOLE

    @property
    def begun(self) -> list[Any] | None:
        """(step, state) that the newest life began with; None if it was killed before that was known."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return list(json.loads((self._folder / "begun").read_bytes()))
        return None

    def states(self) -> dict[str, list[str]]:
        """Update -> states after it, the last with its evaluation, of a life that came to its end."""
        return dict(json.loads((self._folder / "ended").read_bytes()))


def kills_at_writes(decoder: Decoder, folder: Path, mode: str, numbers: range, both: bool) -> Iterator[dict[str, Any]]:
    """A life that dies at write n, and one that ends; for n of ``numbers``, until none dies.

    ``both``: by a kill and by a power cut, else by the one and the other in turn.
    """
    for n, power in ((n, power) for n in numbers for power in (False, True) if both or power == n % 2):
        runs = Runs(decoder, folder / f"w{n}{power}", mode)
        read, write = os.pipe()
        ended = runs.wait(runs.live(n, power, lambda name, end=write: os.write(end, f"{name}\n".encode()) and None))
        os.close(write)
        with os.fdopen(read) as pipe:
            names = pipe.read().splitlines()
        if ended:
            return
        whole, torn = whole_steps(runs.job)
        versions = len(list(Path(runs.job.adapters_dir).glob("[!.]*")))
        runs.wait(runs.live())
        whole_at_end, torn_at_end = whole_steps(runs.job)
        yield {
            "kill": n, "power": power, "at": names[-1], "whole": whole, "torn": torn, "begun": runs.begun,
            "states": runs.states(), "whole_at_end": whole_at_end, "torn_at_end": torn_at_end,
            "announced": names.count("publish"), "versions": versions,
            "written": names.count("checkpoint") + names.count("parked"),
        }  # fmt: skip
        shutil.rmtree(folder / f"w{n}{power}")


def kills_at_moments(decoder: Decoder, folder: Path, num_kills: int, num_events: int) -> Iterator[dict[str, Any]]:
    """Lives that die a random moment after a random event, until the job ends; then another job."""
    rng, kills, jobs = random.Random(7), 0, 0
    while kills < num_kills:
        jobs += 1
        runs, lives = Runs(decoder, folder / f"m{jobs}", "moments"), []
        while True:
            wanted, delay_s = rng.randrange(1, num_events + 1), rng.random() * 2e-3
            before, torn = whole_steps(runs.job)
            read, write = os.pipe()
            pid = runs.live(at=lambda name, end=write: os.write(end, b".") and None)
            os.close(write)
            seen = 0
            while seen < wanted and (got := os.read(read, wanted - seen)):
                seen += len(got)
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
            os.close(read)
            ended = runs.wait(pid)
            lives.append({"whole": before, "torn": torn, "begun": runs.begun, "events": seen})
            if ended:
                break
            kills += 1
        yield {"lives": lives, "states": runs.states()}
        shutil.rmtree(folder / f"m{jobs}")


def main() -> None:
    folder, mode, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    most = 1000  # writes of a job: fewer
    torch.set_num_threads(1)
    gc.disable()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    decoder = load_model(folder, dtype="float32", load_format="dummy").decoder
    warm = ParkableTrainer(decoder, write_job(folder / "warm", "writes"), lambda _t, _i: True)
    while warm.step < 1:  # what is measured once a process
        warm.advance()
    quiet = Runs(decoder, folder / "quiet", mode)
    read, write = os.pipe()
    quiet.wait(quiet.live(at=lambda name: os.write(write, f"{name}\n".encode()) and None))
    os.close(write)
    with os.fdopen(read) as pipe:
        events = pipe.read().splitlines()
    print(json.dumps({"states": quiet.states(), "events": events}), flush=True)
    if mode == "moments":
        found = kills_at_moments(decoder, folder, count, len(events))
    else:
        before = events[: events.index("parked")] if mode == "again" else []  # what comes after it is what is new
        first = 1 + sum(name.endswith(DURABLE) for name in before)
        found = kills_at_writes(decoder, folder, mode, range(first, first + most), count >= most)
    for line in found:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
