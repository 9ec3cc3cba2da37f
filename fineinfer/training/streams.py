"""Training's own stream: its work runs beside requests, and gives way to them where the device has priorities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


class _OnStream(Protocol):
    stream: torch.cuda.Stream | None


SelfT = TypeVar("SelfT", bound=_OnStream)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that work goes to now; None for a device without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_own_stream(
    method: Callable[Concatenate[SelfT, ArgsT], ResultT],
) -> Callable[Concatenate[SelfT, ArgsT], ResultT]:
    """A method whose work goes to its object's ``stream``, whichever is current where it is called."""

    @functools.wraps(method)
    def on_stream(self: SelfT, /, *args: ArgsT.args, **kwargs: ArgsT.kwargs) -> ResultT:
        if self.stream is None:
            return method(self, *args, **kwargs)
        with torch.cuda.stream(self.stream):
            return method(self, *args, **kwargs)

    return on_stream
