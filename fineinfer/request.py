"""What a user asks of the engine for one sequence: sampling parameters and the ways a request can end (no torch)."""

from __future__ import annotations

import enum
import math

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's plus vLLM's ``abort`` and ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class InvalidRequestError(ValueError):
    """A request that must be refused; carries the field and the OpenAI error code.

    Args:
        message: One sentence for the user.
        param: Name of the offending request field, or None.
        code: OpenAI-style error code, for example ``context_length_exceeded``.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when a sequence ends.

    Attributes:
        max_tokens: Most tokens to generate; None means up to the model's context length.
        min_tokens: No end token before this many tokens were generated.
        temperature: 0 selects the most likely token (greedy).
        top_p: Nucleus mass in (0, 1].
        top_k: Number of most likely tokens kept; 0 keeps all.
        min_p: Tokens below ``min_p`` times the largest probability are dropped.
        seed: Makes the sequence reproducible whatever runs beside it; None draws one.
        repetition_penalty: Divides (multiplies) positive (negative) logits of seen tokens, prompt included.
        presence_penalty: Subtracted once from the logit of each generated token.
        frequency_penalty: Subtracted once per occurrence from the logit of each generated token.
        logit_bias: Added to the logits of the given token ids.
        stop_token_ids: End tokens besides the model's own.
        ignore_eos: Go on past the model's end tokens.
        logprobs: Number of alternatives reported for each generated token (0: only the chosen one), or None.
        prompt_logprobs: The same for each prompt token, or None.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if any value is out of range; run at the door and again at engine admission."""
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("top_k", self.top_k, 0, 2**31)
        _check_int("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError("min_tokens must not exceed max_tokens.", "min_tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS or len(self.logit_bias) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(f"At most {MAX_STOP_TOKEN_IDS} token ids are allowed.", "stop_token_ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, vocab_size - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    inside = math.isfinite(value) and low <= value <= high and not (low_open and value == low)
    if not inside:
        bracket = "(" if low_open else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low}, {high}], got {value}.", name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}.", name)
