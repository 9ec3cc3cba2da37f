"""One request inside the engine: its tokens, how far its KV is computed, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from fineinfer.messages import TokenLogprob
from fineinfer.request import FinishReason, SamplingParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request's one serialisable state; the scheduler is its only writer.

    Attributes:
        request_id: Id of the request, unique among open requests.
        peer: Identity of the api worker that gets the outputs.
        prompt: Prompt token ids.
        sampling: How to sample and when to stop.
        max_total_tokens: Prompt plus output never exceed this.
        arrival_s: ``time.monotonic()`` at the api worker.
        priority: Lower is served earlier; 0 is interactive, above is batch.
        adapter_version: Content hash of the adapter version it keeps until its end; None for the base model.
        adapter_step: Training step of that version.
        cache_salt: Prefixes are shared only with requests of the same salt.
        adapter_slot: The adapter's slot, pinned while the request lives; None for the base model.
        output: Generated token ids.
        row: Request table row while it holds KV; None while waiting.
        num_computed: Tokens whose K and V are in the pool once every launched step has run.
        num_proven: Of these, tokens of steps that have ended with finite logits: what later requests may share.
        num_in_flight: Tokens that a launched step chooses but whose ids the host does not know yet.
        num_cached: Computed tokens that the prefix cache had when it was admitted last.
        num_found: Of its prompt, when it was admitted first: what other requests had left.
        num_preemptions: Times its KV was given up and must be recomputed.
        admitted_s: When it was admitted last.
        first_scheduled_s: When its first slice was planned.
        first_token_s: When its first token was committed.
        last_token_s: When its newest token was committed.
        delayed_before_s: Seconds by which training had held up requests when it was queued.
        prompt_logprobs: Collected entries while the prompt is prefilled.
        finish_reason: Set once, when it ends.
    """

    request_id: str
    peer: bytes
    prompt: list[int]
    sampling: SamplingParams
    max_total_tokens: int
    arrival_s: float
    seed: int = 0
    priority: int = 0
    adapter_name: str | None = None
    adapter_version: str | None = None
    adapter_step: int | None = None
    adapter_slot: int | None = None
    cache_salt: str | None = None
    output: list[int] = field(default_factory=list)
    row: int | None = None
    num_computed: int = 0
    num_proven: int = 0
    num_cached: int = 0
    num_found: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
    admitted_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    delayed_before_s: float = 0.0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, those in flight included."""
        return len(self.prompt) + len(self.output) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Output tokens so far, those in flight included."""
        return len(self.output) + self.num_in_flight

    @property
    def max_output_left(self) -> int:
        """Most tokens it may still generate."""
        return self.max_total_tokens - len(self.prompt) - len(self.output) - self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run; 1 means an ordinary decode step."""
        return len(self.prompt) + len(self.output) + self.num_in_flight - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions ``[start, stop)``; those in flight are not among them."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return self.prompt[start:stop]
        if start >= num_prompt:
            return self.output[start - num_prompt : stop - num_prompt]
        return self.prompt[start:] + self.output[: stop - num_prompt]
