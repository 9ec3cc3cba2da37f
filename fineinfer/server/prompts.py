"""Prompts to token ids, in the text threads, with the errors a client can understand."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request

from fineinfer.hashing import CHAT_TEMPLATE_FILE
from fineinfer.server.errors import ApiError
from fineinfer.server.generation import services
from fineinfer.server.schemas import Message, template_kwargs, template_messages
from fineinfer.text.chat_template import ChatTemplateError, has_chat_template, render_chat
from fineinfer.text.tokenizer import encode_text


async def render_messages(
    request: Request,
    messages: list[Message],
    add_generation_prompt: bool,
    kwargs: dict[str, Any] | None,
    directory: str | None = None,
) -> list[int]:
    """Token ids of a conversation, in the template that lies in an adapter's ``directory``, else the model's.

    Raises:
        ApiError: 400 when the messages, or the model's lack of a template, do not allow it.
    """
    pool = services(request).tokenizers
    rendered = template_messages(messages)
    source = None if directory is None else _template_of(directory)
    if source is None and not has_chat_template(pool.tokenizer):
        name = request.app.state.settings.served_model_name
        message = f"The model '{name}' has no chat template; use /v1/completions."
        raise ApiError(400, message, param="messages", code="chat_template_missing")
    variables = template_kwargs(kwargs, pool.tokenizer)
    try:
        return await pool.run(render_chat, rendered, add_generation_prompt, variables, source)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


@lru_cache(maxsize=256)
def _template_of(directory: str) -> str | None:
    """The chat template in an adapter's folder, whose content never changes; None if it has none."""
    try:
        return (Path(directory) / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8") or None
    except (OSError, UnicodeDecodeError):
        return None


async def encode_prompts(
    request: Request, prompts: list[str] | list[list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each prompt; ids pass through."""
    pool = services(request).tokenizers
    ids: list[list[int]] = []
    for prompt in prompts:
        ids.append(await pool.run(encode_text, prompt, add_special_tokens) if isinstance(prompt, str) else prompt)
    return ids
