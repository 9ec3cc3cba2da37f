"""A tracker's process: ``python -m fineinfer.server.tracker_child TOLD`` reads points from stdin until it closes.

Each line is ``{"step", "time", "values"}``. Unless told that it may send, everything is written below ``folder``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.parent_death import die_with_parent

_QUIET = {
    "DO_NOT_TRACK": "true", "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}  # fmt: skip
Log = Callable[[dict[str, float], int], Any]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told.

    Attributes:
        kind: wandb | mlflow | trackio.
        options: Checked fields of the integration.
        folder: Where the trackers of all jobs write.
        outbound: Whether it may send.
        config: Shown beside the run.
    """

    kind: str
    options: dict[str, Any]
    job_id: str
    folder: str
    job_dir: str
    outbound: bool
    config: dict[str, Any]


def _wandb(told: Told) -> tuple[Log, Callable[[], Any]]:
    import wandb

    run = wandb.init(
        **told.options, id=told.job_id, resume="allow", dir=told.folder, config=told.config,
        mode="online" if told.outbound else "offline",
    )  # fmt: skip
    return lambda values, step: run.log(values, step=step), run.finish


def _mlflow(told: Told) -> tuple[Log, Callable[[], Any]]:
    import mlflow

    if not (told.outbound and "MLFLOW_TRACKING_URI" in os.environ):
        mlflow.set_tracking_uri(f"sqlite:///{Path(told.folder) / 'mlflow.db'}")
    mlflow.set_experiment(told.options["project"])
    known = Path(told.job_dir) / "mlflow_run_id"  # a job that was paused goes on in its run
    run_id = known.read_text() if known.exists() else None
    run = mlflow.start_run(run_id=run_id, run_name=None if run_id else told.options["name"])
    if run_id is None:
        known.write_text(run.info.run_id)
        mlflow.set_tags({"job_id": told.job_id, **dict.fromkeys(told.options.get("tags", ()), "true")})
        mlflow.log_params(_flat(told.config))
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


def _trackio(told: Told) -> tuple[Log, Callable[[], Any]]:
    os.environ["TRACKIO_DIR"] = told.folder + "/trackio"
    import trackio

    run = trackio.init(**told.options, resume="allow", config=_flat(told.config))
    return lambda values, step: run.log(values, step=step), trackio.finish


_TRACKERS: dict[str, Callable[[Told], tuple[Log, Callable[[], Any]]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)}
    return flat


def main(argv: list[str]) -> int:
    """Write until stdin closes; the exit code."""
    die_with_parent(os.getppid())
    told = msgspec.json.decode(argv[0], type=Told)
    if not told.outbound:
        os.environ.update(_QUIET)
    Path(told.folder).mkdir(mode=0o700, exist_ok=True)
    log, finish = _TRACKERS[told.kind](told)
    for line in sys.stdin:
        point = msgspec.json.decode(line)
        # a step that was not finite is null here
        log({key: value for key, value in point["values"].items() if value is not None}, point["step"])
    finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
