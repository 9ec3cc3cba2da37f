"""Prompts to token ids, in the text threads, with the errors a client can understand."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from fineinfer.server.errors import ApiError
from fineinfer.server.generation import services
from fineinfer.server.schemas import Message, template_kwargs, template_messages
from fineinfer.text.chat_template import ChatTemplateError, has_chat_template, render_chat
from fineinfer.text.tokenizer import encode_text


async def render_messages(
    request: Request, messages: list[Message], add_generation_prompt: bool, kwargs: dict[str, Any] | None
) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400 when the messages, or the model's lack of a template, do not allow it.
    """
    pool = services(request).tokenizers
    rendered = template_messages(messages)
    if not has_chat_template(pool.tokenizer):
        name = request.app.state.settings.served_model_name
        message = f"The model '{name}' has no chat template; use /v1/completions."
        raise ApiError(400, message, param="messages", code="chat_template_missing")
    variables = template_kwargs(kwargs, pool.tokenizer)
    try:
        return await pool.run(render_chat, rendered, add_generation_prompt, variables)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


async def encode_prompts(
    request: Request, prompts: list[str] | list[list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each prompt; ids pass through."""
    pool = services(request).tokenizers
    ids: list[list[int]] = []
    for prompt in prompts:
        ids.append(await pool.run(encode_text, prompt, add_special_tokens) if isinstance(prompt, str) else prompt)
    return ids
