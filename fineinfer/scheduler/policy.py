"""Co-scheduling policies: who gets the next slice. Each is a pure function of a slice boundary's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

SHARE_WINDOW_S, SHARE_TICK_S = 10.0, 0.05


class TokenClock(NamedTuple):
    """When a running request's first token came, and how many it has had since, launched ones included."""

    first_s: float
    done: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """What a policy may look at.

    Attributes:
        oldest_wait_s: Seconds the oldest waiting request has waited; None if none waits.
        num_running: Requests that hold KV.
        training_ready: A job has a unit that could run now.
        update_started: An optimizer update has begun and is not finished.
        update_left_s: Estimated seconds to finish the running update, or of a whole one if none runs.
        deferral_bound_s: Longest a waiting request may be held back for training.
        now_s: ``time.monotonic()``.
        prefill_tokens: Prompt tokens of running requests that are still to be computed.
        prefilled_tokens: Of the same prompts what earlier steps have computed.
        queued_tokens: Prompt tokens of waiting requests.
        in_flight_s: Estimated seconds that launched steps still take.
        clocks: Of the running requests that have a token; only while training can run beside steps.
        step_s: Estimated seconds of a decode step of the running requests.
        unit_s: Estimated seconds of a training unit, on the mean of those that are left.
        trained_s: Seconds of training since start.
        last_unit_s: When the last training unit was planned.
        beside: Training units can run beside steps, on a stream of their own.
        step_beside_s: As ``step_s``, while training runs beside it.
        prefill_s: Estimated seconds of a forward over all prompt tokens that wait, queued requests included.
        prefill_beside_s: As ``prefill_s``, while training runs beside it.
        max_share: Part of the time that the job there is may take.
    """

    oldest_wait_s: float | None
    num_running: int
    training_ready: bool
    update_started: bool
    update_left_s: float
    deferral_bound_s: float
    now_s: float = 0.0
    prefill_tokens: int = 0
    prefilled_tokens: int = 0
    queued_tokens: int = 0
    in_flight_s: float = 0.0
    clocks: tuple[TokenClock, ...] = ()
    step_s: float = 0.0
    unit_s: float = 0.0
    trained_s: float = 0.0
    last_unit_s: float = 0.0
    beside: bool = False
    step_beside_s: float = 0.0
    prefill_s: float = 0.0
    prefill_beside_s: float = 0.0
    max_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A policy's decision: may waiting requests join, does training run, and do requests run before or beside it."""

    admit: bool
    train: bool
    infer: bool = True


Policy = Callable[[LoadState], Turn]


class ShareMeter:
    """Part of the last ``SHARE_WINDOW_S`` seconds that went to training."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, float]] = deque()  # (when, seconds trained since start), over the window

    def __call__(self, load: LoadState) -> float | None:
        """The share; None while there is no time to measure it over."""
        if not self._spent or load.now_s - self._spent[-1][0] >= SHARE_TICK_S:
            self._spent.append((load.now_s, load.trained_s))
        while len(self._spent) > 2 and self._spent[1][0] < load.now_s - SHARE_WINDOW_S:
            self._spent.popleft()
        begin_s, trained_s = self._spent[0]
        return min(1.0, (load.trained_s - trained_s) / (load.now_s - begin_s)) if load.now_s > begin_s else None


class CappedPolicy:
    """A policy without a memory of its own, whose training stands still while it has had its share.

    Args:
        policy: Decides the rest.
        max_share: Part of the time that training never exceeds; a job may have less.
    """

    def __init__(self, policy: Policy, max_share: float) -> None:
        self._policy, self._max_share = policy, max_share
        self._share = ShareMeter()

    def __call__(self, load: LoadState) -> Turn:
        """Decide one turn."""
        share = self._share(load)
        if share is not None and share > min(self._max_share, load.max_share):
            load = replace(load, training_ready=False)
        return self._policy(load)


def deferred(load: LoadState) -> Turn:
    """The FineInfer rule: requests wait for the running update while their wait plus its rest stays in the bound.

    Training runs only while the batch is empty; a joined batch runs until it drains, newcomers join it at once.
    Source: He, Lu, Alonso, "Deferred Continuous Batching in Resource-Efficient LLM Serving", EuroMLSys 2024.
    """
    if not load.training_ready or load.num_running > 0:
        return Turn(admit=True, train=False)
    if load.oldest_wait_s is None:
        return Turn(admit=False, train=True)
    hold_back = load.oldest_wait_s + load.update_left_s <= load.deferral_bound_s
    return Turn(admit=not hold_back, train=hold_back)


def inference_first(load: LoadState) -> Turn:
    """Train only when nothing waits or runs; a started update is suspended at the next unit."""
    idle = load.num_running == 0 and load.oldest_wait_s is None
    return Turn(admit=True, train=idle and load.training_ready)


def train_first(load: LoadState) -> Turn:
    """A started update finishes before anything else; a new one starts only when nothing waits or runs."""
    if load.update_started and load.training_ready:
        return Turn(admit=False, train=True)
    return inference_first(load)


POLICIES: dict[str, Policy] = {"deferred": deferred, "inference-first": inference_first, "train-first": train_first}
