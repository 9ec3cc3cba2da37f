"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from fineinfer.server.generation import (
    Delta,
    Generation,
    GenerationPlan,
    Services,
    check_prompts,
    collect,
    services,
)
from fineinfer.server.json_body import read_json
from fineinfer.server.logprobs import completion_logprobs, prompt_logprobs
from fineinfer.server.prompts import encode_prompts
from fineinfer.server.routes_models import resolve_model
from fineinfer.server.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    completion_prompts,
    output_options,
    sampling_params,
    scheduling_priority,
)
from fineinfer.server.sse import EventStream, until_disconnect
from fineinfer.text.detokenizer import Detokenizer

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue prompts, whole or streamed."""
    body = await read_json(request, CompletionRequest)
    using = services(request)
    generation = Generation(await until_disconnect(request, _plan(request, body, using)), using)
    answer = _Answer(generation, using, echo=bool(body.echo), prompt_logprobs=body.prompt_logprobs is not None)
    try:
        await until_disconnect(request, generation.start())
        if generation.plan.options.stream:
            return EventStream(answer.chunks(), generation.close)
        whole = await until_disconnect(request, answer.whole())
        return Response(msgspec.json.encode(whole), media_type="application/json")
    except BaseException:
        generation.close()
        raise


async def _plan(request: Request, body: CompletionRequest, using: Services) -> GenerationPlan:
    model = resolve_model(request, body.model)
    options = output_options(body)
    info = using.engine.require_info()
    texts_or_ids = completion_prompts(body.prompt)
    only_prompt = body.max_tokens == 0 and bool(body.echo)
    max_tokens = 1 if only_prompt else body.max_tokens
    # checked before the text is tokenised, which can take long
    sampling = sampling_params(body, info.vocab_size, max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    prompts = await encode_prompts(request, texts_or_ids, body.add_special_tokens is not False)
    check_prompts(prompts, info, max_tokens, options.n)
    if max_tokens is None:  # OpenAI's default, as far as there is room
        room = min(info.max_model_len, info.max_request_tokens) - max(map(len, prompts))
        least = max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=min(least, room))
        sampling.check(info.vocab_size)
    return GenerationPlan(
        f"cmpl-{uuid.uuid4().hex}", body.model, model.adapter, prompts, sampling, options,
        continues_text=True, discard_output=only_prompt, cache_salt=body.cache_salt,
        priority=scheduling_priority(body), tells_tier=body.service_tier is not None,
    )  # fmt: skip


class _Answer:
    """Builds the answer of one request in OpenAI's legacy shape."""

    def __init__(self, generation: Generation, using: Services, *, echo: bool, prompt_logprobs: bool) -> None:
        self._generation = generation
        self._options = generation.plan.options
        self._texts = using.tokenizers.texts
        self._tokenizer = using.tokenizers.tokenizer
        self._echo = echo
        self._with_prompt_logprobs = prompt_logprobs
        self._echoed: dict[int, int] = {}  # characters of the prompt shown, by choice

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        deltas = await collect(self._generation)
        answer = self._generation.head("text_completion")
        answer["choices"] = [self._whole_choice(delta) for delta in deltas]
        answer["usage"] = self._generation.usage()
        return answer

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta)
        if self._echo:
            echoed = self._echo_choice(delta.index)
            choice["text"] = echoed["text"] + choice["text"]
            if echoed["logprobs"] is not None:
                rest = self._logprobs(delta)  # again: offsets now count from behind the prompt
                choice["logprobs"] = {name: echoed["logprobs"][name] + rest[name] for name in rest}
        entries = self._generation.sequences[delta.index].prompt_logprobs
        if self._with_prompt_logprobs and entries is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, entries)
        if self._options.return_token_ids:
            choice["prompt_token_ids"] = self._generation.sequences[delta.index].prompt
        return choice

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The prompt if asked for, text chunks, a chunk with the finish reason, at the end the usage chunk."""
        async for delta in self._generation.deltas():
            if self._echo and delta.index not in self._echoed:
                yield self._chunk([self._echo_choice(delta.index)])
            reason, stop_reason = delta.finish_reason, delta.stop_reason
            if delta.text:
                delta.finish_reason = None
                yield self._chunk([self._choice(delta)])
                delta = Delta(delta.index)
            if reason is not None:
                delta.finish_reason, delta.stop_reason = reason, stop_reason
                yield self._chunk([self._choice(delta)])
        if self._options.include_usage:
            yield {**self._generation.head("text_completion"), "choices": [], "usage": self._generation.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._generation.head("text_completion"), "choices": choices}
        if self._options.continuous_usage:
            chunk["usage"] = self._generation.usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        start = self._echoed.get(delta.index, 0)
        offsets = [start + offset for offset in delta.text_offsets]
        return completion_logprobs(self._texts, delta.logprobs, delta.token_ids, offsets)

    def _echo_choice(self, index: int) -> dict[str, Any]:
        sequence = self._generation.sequences[index]
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self._options.skip_special_tokens)
        text, offsets = "", []
        for token_id in sequence.prompt:
            offsets.append(len(text))
            text += detokenizer.step(token_id)
        text += detokenizer.flush()
        self._echoed[index] = len(text)
        entries = sequence.prompt_logprobs
        asked = self._generation.plan.sampling.logprobs is not None
        logprobs = None
        if asked and entries is not None:
            logprobs = completion_logprobs(self._texts, entries, sequence.prompt, offsets)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
