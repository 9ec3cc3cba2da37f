"""What a dead child process is said to have died of."""

from __future__ import annotations

import pytest

from fineinfer.server.child import Child


class _Ended:
    returncode = 3


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ([], "api-0 ended with code 3"),
        (["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'x'", ""],
         "api-0 ended with code 3: ModuleNotFoundError: No module named 'x'"),
        (["error: port 80 is in use", "more"], "port 80 is in use"),
    ],
)  # fmt: skip
def test_reason_names_what_the_process_said_last(tail: list[str], reason: str) -> None:
    assert Child("api-0", _Ended(), tail).reason() == reason  # type: ignore[arg-type]
