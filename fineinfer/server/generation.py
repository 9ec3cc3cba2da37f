"""One HTTP request's sequences: from prompts to text deltas, stop strings, usage and log-probabilities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request

from fineinfer.messages import AddRequest, EngineInfo, RequestOutput, TokenLogprob
from fineinfer.request import FinishReason, InvalidRequestError, SamplingParams
from fineinfer.server.engine_client import EngineClient
from fineinfer.server.errors import from_output
from fineinfer.server.metrics import RequestTimes, ServerMetrics
from fineinfer.server.schemas import MAX_SEQUENCES, OutputOptions
from fineinfer.text.detokenizer import Detokenizer
from fineinfer.text.stop_strings import StopMatcher
from fineinfer.text.tokenizer import TokenizerPool


@dataclass(frozen=True)
class Services:
    """What routes work with; one per app."""

    engine: EngineClient
    tokenizers: TokenizerPool
    metrics: ServerMetrics


def services(request: Request) -> Services:
    """The services of the app that serves ``request``."""
    found: Services = request.app.state.services
    return found


@dataclass(frozen=True)
class GenerationPlan:
    """A checked request.

    Attributes:
        response_id: ``chatcmpl-…`` or ``cmpl-…``, made by this server and unique.
        model: The name that the client used.
        adapter: Adapter behind it, or None for the base model.
        prompts: Token ids of each prompt, already checked against the engine's limits.
        continues_text: The output continues the prompt's text (completions), so its first space counts.
        discard_output: Only the prompt is of interest (``max_tokens=0`` with ``echo``).
        cache_salt: Its prefixes are shared only with requests of the same salt.
        priority: Lower is served earlier; 0 is interactive, above is batch.
        tells_tier: The client named a service tier, so the answer says which it got.
    """

    response_id: str
    model: str
    adapter: str | None
    prompts: list[list[int]]
    sampling: SamplingParams
    options: OutputOptions
    continues_text: bool = False
    discard_output: bool = False
    cache_salt: str | None = None
    priority: int = 0
    tells_tier: bool = False


@dataclass
class Delta:
    """What is new of one sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)  # of each token, in characters after the prompt
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def check_prompts(prompts: list[list[int]], info: EngineInfo, max_tokens: int | None, num_sequences: int = 1) -> None:
    """Refuse at the door what the engine can never do.

    Raises:
        InvalidRequestError: Empty prompt, id out of the vocabulary, or ``context_length_exceeded``.
    """
    if len(prompts) * num_sequences > MAX_SEQUENCES:
        raise InvalidRequestError(f"At most {MAX_SEQUENCES} sequences are allowed in one request.", "prompt")
    limit = min(info.max_model_len, info.max_request_tokens)
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt must not be empty.", "prompt")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise InvalidRequestError(f"Token ids must be between 0 and {info.vocab_size - 1}.", "prompt")
        if len(prompt) + (max_tokens or 1) > limit:
            wanted = "" if max_tokens is None else f" and {max_tokens} to generate"
            raise InvalidRequestError(
                f"This request has {len(prompt)} prompt tokens{wanted}; one request can have {limit} tokens, "
                "prompt and output together.",
                "max_tokens" if len(prompt) < limit else "prompt",
                "context_length_exceeded",
            )


class Generation:
    """Runs a plan: submits its sequences, gives deltas in order of arrival, aborts what is left when closed.

    Attributes:
        plan: What was asked.
        created: Unix time in seconds.
        sequences: State of each sequence; ``n`` neighbours share a prompt.
        adapter_version: Content hash of the adapter version that answers.
        adapter_step: Its training step.
    """

    def __init__(self, plan: GenerationPlan, using: Services) -> None:
        self.plan = plan
        self.created = int(time.time())
        self.adapter_version: str | None = None
        self.adapter_step: int | None = None
        self._engine, self._metrics = using.engine, using.metrics
        self._inbox: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._first: RequestOutput | None = None
        tokenizer = using.tokenizers.tokenizer
        eos_ids = frozenset(using.engine.require_info().eos_token_ids)
        n = plan.options.n
        self.sequences = [
            SequenceState(index, plan, plan.prompts[index // n], tokenizer, eos_ids)
            for index in range(n * len(plan.prompts))
        ]

    async def start(self) -> None:
        """Submit, and wait for the first sign of life, so that early errors become an HTTP status.

        Raises:
            ApiError: The engine refused or is gone.
        """
        for sequence in self.sequences:
            request = AddRequest(
                request_id=self._request_id(sequence.index),
                prompt_token_ids=sequence.prompt,
                sampling=self._sampling(sequence.index % self.plan.options.n),
                adapter=self.plan.adapter,
                cache_salt=self.plan.cache_salt,
                priority=self.plan.priority,
                arrival_s=sequence.times.arrival_s,
            )
            self._engine.submit(request, self._inbox)
        self._metrics.on_params(self.plan.options.n, self.plan.sampling.max_tokens)
        self._first = self._checked(await self._inbox.get())

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all sequences until each has ended.

        Raises:
            ApiError: The engine ended a sequence with an error, or is gone.
        """
        open_sequences = len(self.sequences)
        while open_sequences:
            output = self._first or self._checked(await self._inbox.get())
            self._first = None
            delta = self._take(output)
            if delta is not None:
                open_sequences -= delta.finish_reason is not None
                yield delta

    def close(self) -> None:
        """Abort what has not ended. Harmless when all has; never fails."""
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.ABORT
                self._engine.abort(self._request_id(sequence.index))
                self._metrics.on_end(sequence.times, FinishReason.ABORT, len(sequence.prompt), sequence.num_tokens)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object so far; a prompt counts once, however many sequences share it."""
        prompt_tokens = sum(map(len, self.plan.prompts))
        completion_tokens = sum(sequence.num_tokens for sequence in self.sequences)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(s.cached_tokens for s in self.sequences[:: self.plan.options.n])
            },
        }

    def head(self, kind: str) -> dict[str, Any]:
        """Fields that every answer and every chunk begins with."""
        head: dict[str, Any] = {
            "id": self.plan.response_id,
            "object": kind,
            "created": self.created,
            "model": self.plan.model,
            "system_fingerprint": None,
        }
        if self.plan.tells_tier:
            head["service_tier"] = "flex" if self.plan.priority > 0 else "default"
        training_s = max(sequence.times.training_s for sequence in self.sequences)
        if training_s > 0.0:  # what training beside it can have cost this request
            head["training_ms"] = round(1e3 * training_s, 3)
        if self.adapter_version is not None:
            head["adapter_version"], head["adapter_step"] = self.adapter_version, self.adapter_step
        return head

    def _request_id(self, index: int) -> str:
        return f"{self.plan.response_id}-{index}"

    def _sampling(self, choice: int) -> SamplingParams:
        seed = self.plan.sampling.seed
        if seed is None or choice == 0:
            return self.plan.sampling
        # the choices of one request must differ, and choice 0 must not depend on n
        return msgspec.structs.replace(self.plan.sampling, seed=(seed + choice) % 2**63)

    def _checked(self, output: RequestOutput) -> RequestOutput:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise from_output(output)
        return output

    def _take(self, output: RequestOutput) -> Delta | None:
        sequence = self.sequences[int(output.request_id.rpartition("-")[2])]
        if sequence.finish_reason is not None:
            return None
        if output.adapter_version is not None:
            self.adapter_version, self.adapter_step = output.adapter_version, output.adapter_step
        sequence.cached_tokens = max(sequence.cached_tokens, output.cached_tokens)
        sequence.times.training_s = max(sequence.times.training_s, output.training_s)
        if output.token_ids:
            self._metrics.on_token(sequence.times, time.monotonic(), len(output.token_ids), output.queue_s)
        delta = sequence.take(output)
        if delta is not None and delta.finish_reason is not None:
            if output.finish_reason is None:  # a stop string ended it here, the engine does not know yet
                self._engine.finish(output.request_id, sequence.num_tokens)
            self._metrics.on_end(sequence.times, delta.finish_reason, len(sequence.prompt), sequence.num_tokens)
        return delta


class SequenceState:
    """Text side of one sequence: detokenizer, stop strings and what has been counted.

    Args:
        index: Place in the answer.
        plan: The request.
        prompt: Token ids of its prompt.
        tokenizer: Used for decoding only.
        eos_ids: The model's end tokens.
    """

    def __init__(
        self, index: int, plan: GenerationPlan, prompt: list[int], tokenizer: Any, eos_ids: frozenset[int]
    ) -> None:
        options = plan.options
        self.index, self.prompt = index, prompt
        self.times = RequestTimes(arrival_s=time.monotonic())
        self.num_tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._plan = plan
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_ids=prompt if plan.continues_text else (),
        )
        self._stop = StopMatcher(options.stops, include_stop=options.include_stop)
        self._end_ids = frozenset(plan.sampling.stop_token_ids) | (frozenset() if plan.sampling.ignore_eos else eos_ids)
        self._pending = Delta(index)  # tokens whose text is still held back
        self._num_chars = 0

    def take(self, output: RequestOutput) -> Delta | None:
        """New tokens -> what may be shown of them, or None while nothing may."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._plan.discard_output:
            return self._end(FinishReason.LENGTH, None) if output.finish_reason else None
        ended_by_token = output.finish_reason == FinishReason.STOP
        text = ""
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            self._note(token_id, output.logprobs[position] if output.logprobs else None)
            is_last = position == len(output.token_ids) - 1
            if ended_by_token and is_last and token_id in self._end_ids and not self._plan.options.include_stop:
                break  # an end token ends the text and is no part of it
            piece = self._detokenizer.step(token_id)
            self._num_chars += len(piece)
            # stop strings count from min_tokens on, as at vLLM
            text += piece if self.num_tokens <= self._plan.sampling.min_tokens else self._stop.feed(piece)
            if self._stop.matched is not None:
                return self._end(FinishReason.STOP, self._stop.matched, text)
        if output.finish_reason is None:
            return self._emit(text) if text else None
        text += self._stop.feed(self._detokenizer.flush())
        if self._stop.matched is not None:
            return self._end(FinishReason.STOP, self._stop.matched, text)
        return self._end(output.finish_reason, output.stop_token_id, text + self._stop.flush())

    def _note(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._pending.token_ids.append(token_id)
        if logprob is not None:
            self._pending.logprobs.append(logprob)
            self._pending.text_offsets.append(self._num_chars)

    def _emit(self, text: str) -> Delta:
        delta, self._pending = self._pending, Delta(self.index)
        delta.text = text
        return delta

    def _end(self, reason: str, stop_reason: str | int | None, text: str = "") -> Delta:
        delta = self._emit(text)
        self.finish_reason = delta.finish_reason = str(reason)
        delta.stop_reason = stop_reason
        return delta


async def collect(generation: Generation) -> list[Delta]:
    """The whole answer: one Delta for each sequence.

    Raises:
        ApiError: As ``Generation.deltas``.
    """
    whole = [Delta(sequence.index) for sequence in generation.sequences]
    async for delta in generation.deltas():
        total = whole[delta.index]
        total.text += delta.text
        total.token_ids += delta.token_ids
        total.logprobs += delta.logprobs
        total.text_offsets += delta.text_offsets
        total.finish_reason, total.stop_reason = delta.finish_reason, delta.stop_reason
    return whole
