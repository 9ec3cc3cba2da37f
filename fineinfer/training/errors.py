"""Errors of the training room."""

from __future__ import annotations


class TrainingError(Exception):
    """A job that cannot go on; it ends as ``failed`` with this code and message.

    Args:
        message: One sentence for the user.
        code: Short machine-readable reason, reported as ``error_code``.
    """

    def __init__(self, message: str, code: str = "training_failed") -> None:
        super().__init__(message)
        self.code = code
