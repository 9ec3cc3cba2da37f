"""What a process takes before it serves anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import resource, sys
from fineinfer.server.start_checks import raise_file_limit
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 4096, [4096, 4096, 4096]), (4096, 4096, [4096, 4096, 4096]), (64, 300, [300, 300, 300])],
)
def test_as_many_files_may_be_open_as_the_system_allows(soft: int, hard: int, expected: list[int]) -> None:
    told = subprocess.run(
        [sys.executable, "-c", CHILD, str(soft), str(hard)], capture_output=True, text=True, timeout=60, check=True
    )
    assert [int(word) for word in told.stdout.split()] == expected
