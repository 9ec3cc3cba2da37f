"""Policy ``slo``: training gets exactly the time that the latency targets leave, and never less than its share.

Every decode step earns the time a token may take; what its running did not use is slack, and a training unit runs when
it fits into the slack. Slack adds up over a few tokens, so that units longer than a single gap find room too: a
request's time per output token is a mean. Waiting prompts end the training at the next unit. The pace, the part of the
target that is really spent, follows the observed 99th percentiles: additive increase, multiplicative decrease.

Where training runs beside steps on a stream of its own, each running request has a clock: its next token is due a
token's time after the one before was due. A step has training beside it if even so it ends before the first of these
moments, and waits while another unit fits before it too. Steps with many prompt tokens fill the device on their own and
run alone: sharing them would delay first tokens and win nothing. So does the last step of such a prompt, whatever is
left of it. If first tokens are late, so do steps with fewer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from fineinfer.scheduler.policy import POLICIES, SHARE_WINDOW_S, CappedPolicy, LoadState, Policy, ShareMeter, Turn

UNSET_FACTOR = 3.0  # a target that is not given is this many times the latency without training
PACE_WINDOW, PACE_EVERY = 256, 16  # finished requests: looked at, and between two looks
PACE_STEP, PACE_DROP, MIN_PACE = 0.02, 0.85, 0.2
MAX_PACE = 0.96  # the rest is for what the engine does not see: a token's way to the client, and steps' spread
CREDIT_S = 1.0  # training beyond the minimum counts for so long while there are requests
CATCH_UP = 2.0  # the minimum share of a long step, so many times: what was missed is made up for
MAX_GAP = 2.0  # tokens' times between two tokens that units alone may fill, however early the requests are
MAX_PROMPT_BESIDE = 256  # tokens of the prompts in a step with training beside it: more fill the device on their own
PROMPT_STEP, MIN_PROMPT = 32, 64  # by which they become more again; fewer are none
CALM = 0.9  # a 99th percentile below this part of its target leaves room for more


@dataclass(frozen=True, slots=True)
class SloTargets:
    """What the policy keeps to.

    Attributes:
        ttft_s: Seconds until the first token, at the 99th percentile; None: ``UNSET_FACTOR`` times a prefill alone.
        tpot_s: Seconds per output token, likewise; None: ``UNSET_FACTOR`` times a decode step alone.
        train_share_min: Part of the time that a running job gets whatever the load.
        train_share_max: Part of the time that it never exceeds; a job may have less, then it gets no more whatever
            the minimum.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    train_share_min: float = 0.05
    train_share_max: float = 1.0


class SloPolicy:
    """See the module; one object per scheduler, as it remembers.

    Args:
        targets: Latencies and shares.

    Attributes:
        pace: Part of the targets that is spent now.
        prompt_beside: Most prompt tokens of a step with training beside it now.
    """

    def __init__(self, targets: SloTargets) -> None:
        self._targets = targets
        self.pace = MAX_PACE
        self.prompt_beside = MAX_PROMPT_BESIDE
        self._runs_beside = False
        self._due_s = 0.0  # when the next tokens of the running requests are due
        self._last_inference_s: float | None = None
        self._step_took_s = self._trained_then_s = 0.0  # the last step, and training until it
        self._share = ShareMeter()
        self._seen: tuple[float, float] | None = None  # (when, seconds trained since start) at the last turn
        self._owed_s = 0.0  # what training lacks of its minimum; negative: what it has had beyond
        self._latencies: deque[tuple[float, float | None]] = deque(maxlen=PACE_WINDOW)
        self._until_look = PACE_EVERY

    def __call__(self, load: LoadState) -> Turn:
        """Decide one turn."""
        missing, enough = self._judge_share(load)
        self._runs_beside = load.beside
        if load.beside and (load.num_running or load.oldest_wait_s is not None):
            return self._beside(load, missing, enough)
        if not load.training_ready:
            return self._infer(load)
        if missing and self._is_owed(load):
            return Turn(admit=True, train=True, infer=False)
        if enough:
            return self._infer(load)
        if load.oldest_wait_s is None and load.num_running == 0:
            return Turn(admit=False, train=True)
        if load.oldest_wait_s is not None or load.prefill_tokens:
            return self._infer(load)
        if load.now_s + load.unit_s + load.step_s <= self._due_s:
            return Turn(admit=True, train=True, infer=False)
        return self._infer(load)

    def observe_request(self, ttft_s: float, tpot_s: float | None, load_free: LoadFree, trained_s: float = 0.0) -> None:
        """Adapt the pace to a finished request; a first token that was late without training's doing says nothing.

        Args:
            ttft_s: Its time to first token.
            trained_s: Seconds of training while it was open.
            tpot_s: Its time per output token; None if it had one token.
            load_free: The latencies without training, for targets that are not given.
        """
        target_s = self._ttft_s(load_free)
        late = ttft_s / target_s if ttft_s - trained_s <= target_s else 0.0
        self._latencies.append((late, tpot_s and tpot_s / self._tpot_s(load_free.step_s)))
        self._until_look -= 1
        if self._until_look > 0:
            return
        self._until_look = PACE_EVERY
        first = _p99([ttft for ttft, _ in self._latencies])
        token = _p99([tpot for _, tpot in self._latencies if tpot is not None])
        if first > 1.0 and token <= 1.0 and self._runs_beside and self.prompt_beside:
            # prompts alone are the cheaper way to earlier first tokens
            self.prompt_beside = self.prompt_beside // 2 if self.prompt_beside >= 2 * MIN_PROMPT else 0
        elif max(first, token) > 1.0:
            self.pace = max(MIN_PACE, self.pace * max(PACE_DROP, 1.0 / max(first, token)))
        else:
            self.pace = min(MAX_PACE, self.pace + PACE_STEP)
            if first < CALM:
                self.prompt_beside = min(MAX_PROMPT_BESIDE, max(MIN_PROMPT, self.prompt_beside + PROMPT_STEP))
            return
        self._latencies.clear()  # they happened at the old pace

    def _beside(self, load: LoadState, missing: bool, enough: bool) -> Turn:
        """A step, with training beside it if it is in time even so; or, if nobody waits, first a unit alone."""
        token_s = self.pace * self._tpot_s(load.step_s)
        free_s = load.now_s + load.in_flight_s  # when a step launched now begins
        due_s = min((clock.first_s + token_s * (clock.done + 1) for clock in load.clocks), default=math.inf)
        num_prompt = load.prefill_tokens + load.queued_tokens
        may = load.training_ready and not enough
        if may and not num_prompt and len(load.clocks) == load.num_running:
            if self._last_inference_s is None:
                self._last_inference_s = load.now_s
            latest_s = self._last_inference_s + load.step_beside_s + MAX_GAP * token_s
            if free_s + load.unit_s + load.step_beside_s <= min(due_s, latest_s):
                return Turn(admit=True, train=True, infer=False)
        first_s = self.pace * self._ttft_s(LoadFree(load.step_s, load.prefill_s))
        in_time = (load.oldest_wait_s or 0.0) + load.in_flight_s + load.prefill_beside_s <= first_s
        fits = num_prompt + load.prefilled_tokens <= self.prompt_beside and free_s + load.step_beside_s <= due_s
        self._last_inference_s = load.now_s
        return Turn(admit=True, train=load.training_ready and (missing or (not enough and fits and in_time)))

    def _infer(self, load: LoadState) -> Turn:
        """A turn for requests: the tokens of its step earn their time."""
        token_s, previous_s = self.pace * self._tpot_s(load.step_s), self._due_s
        # This step's tokens come at `ready`, the next ones are due a token's time later. Slack adds up to one unit
        # beyond that, or a unit longer than a token's time would never fit; no further: one gap may take all of it.
        ready_s = load.now_s + load.step_s
        self._due_s = ready_s + token_s
        if load.num_running:
            self._due_s = min(max(previous_s, ready_s) + token_s, ready_s + token_s + load.unit_s)
        self._last_inference_s, self._trained_then_s = load.now_s, load.trained_s
        return Turn(admit=True, train=False)

    def _is_owed(self, load: LoadState) -> bool:
        """Whether a unit that the minimum share asks for may run now: between two steps one, or what the step owes."""
        if self._last_inference_s is None:
            return False
        if load.last_unit_s <= self._last_inference_s:  # none since the step
            self._step_took_s = load.now_s - self._last_inference_s
            return True
        owed_s = CATCH_UP * self._targets.train_share_min * self._step_took_s
        return load.trained_s - self._trained_then_s + load.unit_s <= owed_s

    def _judge_share(self, load: LoadState) -> tuple[bool, bool]:
        """Whether training has had less than its minimum, and more than its maximum.

        What it had beyond the minimum beside requests counts for ``CREDIT_S`` seconds to come (a unit at least), what
        it had at idle for none, so a time of much training is not followed by a long one of none. What it lacks is made
        up for, up to ``SHARE_WINDOW_S`` seconds' worth. The share aimed at is a little more than the minimum, for the
        credit that may fall into any ``SHARE_WINDOW_S`` seconds.
        """
        share, most = self._share(load), min(self._targets.train_share_max, load.max_share)
        least = min(self._targets.train_share_min * (1.0 + CREDIT_S / SHARE_WINDOW_S), most)
        seen_s, trained_s = self._seen or (load.now_s, load.trained_s)
        idle = load.num_running == 0 and load.oldest_wait_s is None
        credit_s = 0.0 if idle else max(least * CREDIT_S, load.unit_s)
        owed_s = self._owed_s + least * (load.now_s - seen_s) - (load.trained_s - trained_s)
        self._owed_s = min(max(owed_s, -credit_s), least * SHARE_WINDOW_S)
        self._seen = load.now_s, load.trained_s
        enough = share is not None and share > most
        return self._owed_s > 0 and not enough, enough

    def _tpot_s(self, step_s: float) -> float:
        return max(1e-6, UNSET_FACTOR * step_s) if self._targets.tpot_s is None else self._targets.tpot_s

    def _ttft_s(self, load_free: LoadFree) -> float:
        alone = max(1e-6, UNSET_FACTOR * (load_free.prefill_s + load_free.step_s))
        return alone if self._targets.ttft_s is None else self._targets.ttft_s


@dataclass(frozen=True, slots=True)
class LoadFree:
    """Estimated latencies without training: of a decode step as it was, of the request's own prefill, in seconds."""

    step_s: float
    prefill_s: float


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def make_policy(name: str, targets: SloTargets) -> Policy:
    """The policy of a name, as a new object, since each remembers how much was trained.

    Raises:
        KeyError: No policy has that name.
    """
    return SloPolicy(targets) if name == "slo" else CappedPolicy(POLICIES[name], targets.train_share_max)
