"""Chooses tokens from logits: penalties, bias, temperature, top-k/top-p/min-p, seeded draws, log-probabilities.

Randomness is counter based: token i of a request draws from Philox(seed, i), so a seeded request does not depend on
what runs beside it, and a preempted one continues as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.messages import TokenLogprob
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

SMALLEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot carry (vLLM's convention)
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, its log-probability entry if asked for, or ``failed`` when the logits were not finite."""

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
        finite = torch.isfinite(logits).all(dim=-1).tolist()
        greedy = torch.argmax(logits, dim=-1).tolist()
        choices = []
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if not finite[index]:
                choices.append(Choice(0, failed=True))
                continue
            token_id = greedy[index] if _is_plain_greedy(sequence) else self._draw(logits[index], sequence)
            logprob = None
            if sequence.sampling.logprobs is not None:
                row = logits[index : index + 1]
                logprob = top_logprobs(row, [token_id], sequence.sampling.logprobs)[0]
            choices.append(Choice(token_id, logprob))
        return choices

    def _draw(self, logits: torch.Tensor, sequence: Sequence) -> int:
        params = sequence.sampling
        logits = self._adjust(logits.clone(), sequence)
        if params.temperature == 0.0:
            return int(torch.argmax(logits))
        logits = logits / params.temperature
        if 0 < params.top_k < self._vocab_size:
            values, ids = torch.topk(logits, params.top_k)
        else:
            values, ids = torch.sort(logits, descending=True, stable=True)
        probs = torch.softmax(values, dim=-1)
        if params.min_p > 0.0:
            probs = torch.where(probs < params.min_p * probs[0], 0.0, probs)
        if params.top_p < 1.0:
            mass_before = torch.cumsum(probs, dim=-1) - probs
            probs = torch.where(mass_before > params.top_p * probs.sum(), 0.0, probs)
        cumulative = torch.cumsum(probs.double(), dim=-1)
        draw = uniform(sequence.seed, len(sequence.output)) * float(cumulative[-1])
        position = int(torch.searchsorted(cumulative, draw, right=True))
        last = int(torch.count_nonzero(probs)) - 1  # kept tokens are a prefix of the sorted ones
        return int(ids[min(position, last)])

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """Penalties as transformers (repetition) and OpenAI (presence, frequency) define them, bias, end-token mask."""
        params = sequence.sampling
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*sequence.prompt, *sequence.output}), device=self._device)
            score = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(score < 0, score * factor, score / factor)
        if sequence.output and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(np.array(sequence.output, dtype=np.int64), return_counts=True)
            penalty = params.presence_penalty + params.frequency_penalty * counts
            logits[torch.from_numpy(ids).to(self._device)] -= torch.from_numpy(penalty).to(logits)
        if params.logit_bias:
            ids_list = list(params.logit_bias)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=self._device)
            logits[torch.tensor(ids_list, dtype=torch.int64, device=self._device)] += bias
        if len(sequence.output) < params.min_tokens:
            ends = [*self._eos, *params.stop_token_ids]
            logits[torch.tensor(ends, dtype=torch.int64, device=self._device)] = MASKED
        return logits


def uniform(seed: int, counter: int) -> float:
    """The counter-th number in [0, 1) of a seed's stream, the same wherever and beside whatever it is drawn."""
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=counter))
    return float(generator.random())


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
