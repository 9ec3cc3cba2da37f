"""Whether the disk has room for all that a job will write, asked before its first update."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fineinfer.training.checkpoint import NUM_KEPT, DiskFullError, num_checkpoints

MIB = 1 << 20
LOG_BYTES_PER_STEP = 512  # one entry of log_history and, now and then, one of an evaluation
SPARE_BYTES = 64 * MIB  # events, metrics, other jobs' requests of the same disk


@dataclass(frozen=True)
class DiskNeed:
    """What a job still writes, in bytes.

    Attributes:
        adapter: One copy of the adapter.
        moments: The optimizer's part of one checkpoint.
        log: Loss trace of the whole job, in each checkpoint.
        num_versions: Versions of the adapter that are still to be published; each stays.
    """

    adapter: int
    moments: int
    log: int
    num_versions: int

    def check(self, job_dir: Path) -> None:
        """Ask the disk that the job's folder is on.

        Raises:
            DiskFullError: It has too little; the message shows the arithmetic.
        """
        num_new = max(1, NUM_KEPT + 1 - num_checkpoints(job_dir))  # one more than are kept, while it is being written
        checkpoint = self.adapter + self.moments + self.log
        needed = num_new * checkpoint + self.num_versions * self.adapter + SPARE_BYTES
        free = shutil.disk_usage(job_dir).free
        if free >= needed:
            return
        raise DiskFullError(
            f"the job needs {_mib(needed)} on the server's disk and {_mib(free)} are free: {num_new} x checkpoint "
            f"{_mib(checkpoint)} (adapter {_mib(self.adapter)} + optimizer {_mib(self.moments)} + loss trace "
            f"{_mib(self.log)}) + {self.num_versions} x adapter version {_mib(self.adapter)} + {_mib(SPARE_BYTES)} to "
            "spare; make room and resume the job, or create one that needs less: larger save_steps, smaller lora.r"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
