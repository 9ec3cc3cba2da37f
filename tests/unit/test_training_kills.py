"""A job that dies at any durable write, by kill or power cut, or at any moment, ends as if it had not; nothing is torn.

Fingerprints are of parameters, moments, number of updates, cursor and loss trace. 126 deaths at writes, 49 at those of
a job that writes a checkpoint twice, by a kill and by a power cut in turn; 15 at random moments.
``FINEINFER_KILLS=1000`` for both at each write, and 1,000 of the latter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NUM_KILLS = int(os.environ.get("FINEINFER_KILLS", "15"))


def killed(folder: Path, mode: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(undisturbed run, deaths)."""
    script = str(Path(__file__).with_name("killed_trainer.py"))
    done = subprocess.run(
        [sys.executable, script, str(folder), mode, str(NUM_KILLS)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    quiet, *lines = (json.loads(line) for line in done.stdout.splitlines())
    assert len({states[-1] for states in quiet["states"].values()}) == len(quiet["states"]), "a cold start is no resume"
    return quiet, lines


def check_life(begun: list[Any], whole: list[int], quiet: dict[str, list[str]]) -> None:
    """It went on from the newest whole checkpoint, in a state that the undisturbed run had there."""
    step, state = begun
    assert step == max(whole, default=0)
    assert state in quiet[str(step)]


def ends(states: dict[str, list[str]]) -> set[tuple[str, str]]:
    """(update, state after it and its evaluation)."""
    return {(step, known[-1]) for step, known in states.items()}


def test_death_at_every_durable_write(tmp_path: Path) -> None:
    quiet, deaths = killed(tmp_path, "writes")
    for death in deaths:
        check_life(death["begun"], death["whole"], quiet["states"])
        assert death["torn"] == death["torn_at_end"] == []
        assert ends(death["states"]) <= ends(quiet["states"]) and "3" in death["states"]
        assert min(max(death["whole"], default=0), death["versions"]) >= death["announced"], "what was told stays"
        assert death["whole_at_end"][-2:] == [2, 3]
    at = [death["at"] for death in deaths]
    assert len(at) > 120 and Counter(at) >= Counter(fsync=40, rename=7, unlink=6, rmdir=1, save_file=6)
    assert {"half of write_text", "half of save_file", "half of copyfile", "mkdir"} <= set(at)
    assert Counter(death["power"] for death in deaths) >= Counter({False: 60, True: 60})
    assert {death["begun"][0] for death in deaths} == {0, 1, 2, 3}


def test_death_while_a_checkpoint_is_written_once_more(tmp_path: Path) -> None:
    quiet, deaths = killed(tmp_path, "again")
    assert quiet["events"].count("parked") == 1 and quiet["events"].count("checkpoint") == 2
    for death in deaths:
        check_life(death["begun"], death["whole"], quiet["states"])
        assert len(death["whole"]) >= min(2, death["written"]), "what was whole stays"
        assert death["torn"] == death["torn_at_end"] == [] and death["whole_at_end"] == [1, 2]
        assert ends(death["states"]) <= ends(quiet["states"]) and "2" in death["states"]
    after = [death["at"] for death in deaths if death["written"] == 2]
    assert Counter(after) >= Counter(fsync=8, rename=3, unlink=6, rmdir=1, save_file=2)


def test_kill_at_random_moments(tmp_path: Path) -> None:
    quiet, jobs = killed(tmp_path, "moments")
    for job in jobs:
        for life in job["lives"]:
            assert life["torn"] == []
            if life["begun"] is not None:
                check_life(life["begun"], life["whole"], quiet["states"])
        assert ends(job["states"]) <= ends(quiet["states"]) and "8" in job["states"]
    begun = Counter(life["begun"][0] for job in jobs for life in job["lives"][1:] if life["begun"] is not None)
    assert sum(len(job["lives"]) - 1 for job in jobs) >= NUM_KILLS and len(begun) > 3
