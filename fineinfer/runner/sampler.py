"""Chooses tokens from logits: penalties, bias, temperature, top-k/top-p/min-p, seeded draws, log-probabilities.

Randomness is counter based: token i of a request is drawn by the key Philox(seed, i), hashed with each token's id. So a
seeded request does not depend on what runs beside it, and a preempted one continues as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.kernels import reference_sampling as reference
from fineinfer.messages import TokenLogprob
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

SMALLEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot carry (vLLM's convention)
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, its log-probability entry if asked for, or ``failed`` (NaN, infinite or all masked logits)."""

    token_id: int
    logprob: TokenLogprob | None = None
    failed: bool = False


class Sampler:
    """Samples one token per row.

    Args:
        vocab_size: Number of logits per row.
        eos_token_ids: The model's end tokens, masked while ``min_tokens`` are not reached.
        device: Where the logits live.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device

    def sample(self, logits: torch.Tensor, chunks: list[Chunk]) -> list[Choice]:
        """Choose a token for each row.

        Args:
            logits: [S, vocab_size] fp32.
            chunks: The S chunks whose last rows these are.

        Returns:
            S choices. Reported log-probabilities are of the distribution before penalties and truncation.
        """
        token_out, ok_out = torch.empty((2, len(chunks)), dtype=torch.int32, device=self._device)
        reference.argmax(logits, token_out, ok_out)
        usable = ok_out.tolist()
        drawn = [n for n, chunk in enumerate(chunks) if usable[n] and not _is_plain_greedy(chunk.sequence)]
        if drawn:
            self._draw(logits, drawn, [chunks[n].sequence for n in drawn], token_out, ok_out)
        choices = []
        for index, (token_id, ok) in enumerate(zip(token_out.tolist(), ok_out.tolist(), strict=True)):
            num_top = chunks[index].sequence.sampling.logprobs
            logprob = None
            if ok and num_top is not None:
                logprob = top_logprobs(logits[index : index + 1], [token_id], num_top)[0]
            choices.append(Choice(token_id, logprob, failed=not ok))
        return choices

    def _draw(
        self,
        logits: torch.Tensor,
        rows: list[int],
        sequences: list[Sequence],
        token_out: torch.Tensor,
        ok_out: torch.Tensor,
    ) -> None:
        """Sample the ``rows`` of ``logits`` that belong to ``sequences``, into the same rows of the outputs."""
        adjusted = logits[rows]  # a copy
        for row, sequence in zip(adjusted, sequences, strict=True):
            self._adjust(row[None], sequence)
        params = [sequence.sampling for sequence in sequences]
        keys = np.concatenate([draw_keys(sequence.seed, len(sequence.output), 1) for sequence in sequences])
        token, ok = torch.empty((2, len(rows)), dtype=torch.int32, device=self._device)
        reference.sample(
            adjusted,
            self._real([item.temperature for item in params]),
            self._whole([min(item.top_k, self._vocab_size) for item in params]),
            self._real([item.top_p for item in params]),
            self._real([item.min_p for item in params]),
            torch.from_numpy(keys).to(self._device),
            token,
            ok,
        )
        token_out[rows], ok_out[rows] = token, ok

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Penalties, bias and end-token mask on one row [1, vocab_size], in place."""
        params = sequence.sampling
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            prompt, total = len(sequence.prompt), len(sequence.prompt) + len(sequence.output)
            tokens = self._whole([*sequence.prompt, *sequence.output])
            lengths = (self._whole([number]) for number in (0, prompt, total))
            reference.penalize(logits, tokens[None], *lengths, *(self._real([number]) for number in penalties))
        self._add(logits, list(params.logit_bias.items()))
        if len(sequence.output) < params.min_tokens:
            self._add(logits, [(token_id, MASKED) for token_id in {*self._eos, *params.stop_token_ids}])

    def _add(self, logits: torch.Tensor, changes: list[tuple[int, float]]) -> None:
        if changes:
            ids, values = zip(*changes, strict=True)
            reference.add_at(logits, self._whole([0] * len(ids)), self._whole(list(ids)), self._real(list(values)))

    def _whole(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    def _real(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)


def draw_keys(seed: int, first: int, count: int) -> np.ndarray:
    """Keys [count, 2] int32 of a seed's draws ``first`` ..., the same wherever and beside whatever they are made.

    A step of the counter yields four numbers of 64 bits (Philox4x64), of which a draw takes the first.
    """
    numbers = np.random.Philox(key=seed % 2**64, counter=first).random_raw(4 * count)[::4]
    return numbers.astype("<u8").view(np.int32).reshape(count, 2)


def _is_plain_greedy(sequence: Sequence) -> bool:
    params = sequence.sampling
    return (
        params.temperature == 0.0
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and len(sequence.output) >= params.min_tokens
    )


def top_logprobs(logits: torch.Tensor, targets: list[int], num_top: int) -> list[TokenLogprob]:
    """Log-probability of each row's target and of the row's ``num_top`` most likely tokens.

    Args:
        logits: [n, vocab_size] fp32.
        targets: n token ids.
        num_top: Alternatives to report, 0 for none.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    index = torch.tensor(targets, dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(1, index[:, None])[:, 0].tolist()
    if num_top == 0:
        return [TokenLogprob(t, max(p, SMALLEST_LOGPROB), []) for t, p in zip(targets, chosen, strict=True)]
    values, ids = torch.topk(logprobs, num_top, dim=-1)
    entries = []
    for target, logprob, top_ids, top_values in zip(targets, chosen, ids.tolist(), values.tolist(), strict=True):
        top = [(i, max(p, SMALLEST_LOGPROB)) for i, p in zip(top_ids, top_values, strict=True)]
        entries.append(TokenLogprob(target, max(logprob, SMALLEST_LOGPROB), top))
    return entries
