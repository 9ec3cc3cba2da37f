"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from fineinfer.request import InvalidRequestError
from fineinfer.server.errors import ApiError
from fineinfer.server.generation import services
from fineinfer.server.json_body import read_json
from fineinfer.server.prompts import render_messages
from fineinfer.server.routes_models import resolve_model
from fineinfer.server.schemas import DetokenizeRequest, TokenizeRequest, refuse_not_implemented
from fineinfer.text.tokenizer import encode_text

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a prompt or of messages."""
    body = await read_json(request, TokenizeRequest)
    refuse_not_implemented(body)
    directory = None if body.model is None else resolve_model(request, body.model).directory
    using = services(request)
    if body.messages is not None:
        opens, variables = body.add_generation_prompt, body.chat_template_kwargs
        ids = await render_messages(request, body.messages, opens, variables, directory)
    elif body.prompt is not None:
        ids = await using.tokenizers.run(encode_text, body.prompt, body.add_special_tokens)
    else:
        raise ApiError(400, "Either prompt or messages is needed.", param="prompt")
    info = using.engine.info
    return {
        "count": len(ids),
        "max_model_len": None if info is None else min(info.max_model_len, info.max_request_tokens),
        "tokens": ids,
        "token_strs": [using.tokenizers.texts.text_of(i) for i in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """Text of token ids, special tokens included."""
    body = await read_json(request, DetokenizeRequest)
    if body.model is not None:
        resolve_model(request, body.model)
    pool = services(request).tokenizers
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < len(pool.tokenizer):
        raise InvalidRequestError(f"Token ids must be between 0 and {len(pool.tokenizer) - 1}.", "tokens")
    return {"prompt": await pool.run(_decode, body.tokens)}


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text
