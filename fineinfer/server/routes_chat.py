"""POST /v1/chat/completions."""

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
from fineinfer.server.logprobs import chat_content, prompt_logprobs
from fineinfer.server.prompts import render_messages
from fineinfer.server.routes_models import resolve_model
from fineinfer.server.schemas import ChatRequest, chat_logprobs, output_options, sampling_params, scheduling_priority
from fineinfer.server.sse import EventStream, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    body = await read_json(request, ChatRequest)
    using = services(request)
    generation = Generation(await until_disconnect(request, _plan(request, body, using)), using)
    try:
        await until_disconnect(request, generation.start())
        if generation.plan.options.stream:
            return EventStream(_chunks(generation, using), generation.close)
        answer = await until_disconnect(request, _whole(generation, using))
        return Response(msgspec.json.encode(answer), media_type="application/json")
    except BaseException:
        generation.close()
        raise


async def _plan(request: Request, body: ChatRequest, using: Services) -> GenerationPlan:
    model = resolve_model(request, body.model)
    options = output_options(body)
    info = using.engine.require_info()
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(body, info.vocab_size, max_tokens, chat_logprobs(body))
    prompt = await render_messages(
        request, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs, model.directory
    )
    check_prompts([prompt], info, max_tokens)
    return GenerationPlan(
        f"chatcmpl-{uuid.uuid4().hex}", body.model, model.adapter, [prompt], sampling, options,
        cache_salt=body.cache_salt, priority=scheduling_priority(body), tells_tier=body.service_tier is not None,
    )  # fmt: skip


async def _whole(generation: Generation, using: Services) -> dict[str, Any]:
    deltas = await collect(generation)
    answer = generation.head("chat.completion")
    answer["choices"] = [
        {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None, "annotations": []},
            **_choice_tail(generation, delta, using),
        }
        for delta in deltas
    ]
    answer["usage"] = generation.usage()
    if generation.plan.options.return_token_ids:
        answer["prompt_token_ids"] = generation.plan.prompts[0]
    if (entries := generation.sequences[0].prompt_logprobs) is not None:
        answer["prompt_logprobs"] = prompt_logprobs(using.tokenizers.texts, entries)
    return answer


def _choice_tail(generation: Generation, delta: Delta, using: Services) -> dict[str, Any]:
    tail: dict[str, Any] = {"logprobs": None, "finish_reason": delta.finish_reason}
    num_top = generation.plan.sampling.logprobs
    if num_top is not None and delta.logprobs:
        content = chat_content(using.tokenizers.texts, delta.logprobs, num_top)
        tail["logprobs"] = {"content": content, "refusal": None}
    if delta.finish_reason is not None:
        tail["stop_reason"] = delta.stop_reason
    if generation.plan.options.return_token_ids:
        tail["token_ids"] = delta.token_ids
    return tail


async def _chunks(generation: Generation, using: Services) -> AsyncGenerator[dict[str, Any], None]:
    """Role chunk of each choice, content chunks, a chunk with the finish reason, at the end the usage chunk."""
    options = generation.plan.options

    def chunk(choices: list[dict[str, Any]], with_usage: bool = options.continuous_usage) -> dict[str, Any]:
        made = {**generation.head("chat.completion.chunk"), "choices": choices}
        if options.include_usage or with_usage:
            made["usage"] = generation.usage() if with_usage else None
        return made

    for sequence in generation.sequences:
        first = Delta(sequence.index)
        role = {"role": "assistant", "content": ""}
        yield chunk([{"index": sequence.index, "delta": role, **_choice_tail(generation, first, using)}])
    async for delta in generation.deltas():
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if delta.text:
            delta.finish_reason = None
            content = {"content": delta.text}
            yield chunk([{"index": delta.index, "delta": content, **_choice_tail(generation, delta, using)}])
            delta = Delta(delta.index)
        if reason is not None:
            delta.finish_reason, delta.stop_reason = reason, stop_reason
            yield chunk([{"index": delta.index, "delta": {}, **_choice_tail(generation, delta, using)}])
    if options.include_usage:
        yield chunk([], with_usage=True)
