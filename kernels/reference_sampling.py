"""Plain torch twins of ``sampling``: what runs on a CPU, and what its Triton kernels are tested against.

Same arguments and results, described there. These read their parameters on the host: on a GPU they wait for it.
"""

from __future__ import annotations

import torch

from fineinfer.kernels.reference_noise import exponential, token_hash


def argmax(logits: torch.Tensor, token_out: torch.Tensor, ok_out: torch.Tensor) -> None:
    """Lowest index of each row's maximum [S], and whether the row is usable [S]."""
    peaks, first = logits.max(dim=-1)  # NaN wins
    usable = torch.isfinite(peaks)
    token_out.copy_(torch.where(usable, first, 0))
    ok_out.copy_(usable)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    token_out: torch.Tensor,
    ok_out: torch.Tensor,
) -> None:
    """Choose a token for each row of ``logits`` [S, V], greedily or from what the cuts leave."""
    argmax(logits, token_out, ok_out)
    for row, heat in enumerate(temperature.tolist()):
        if heat > 0.0 and ok_out[row]:
            weights = kept_weights(logits[row], heat, int(top_k[row]), float(top_p[row]), float(min_p[row]))
            token_out[row] = race(weights, *keys[row].tolist())


def kept_weights(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Unnormalised fp32 probabilities [V] of one row's tokens (the most likely weighs 1), 0 for those cut off."""
    logits = logits.float()
    weights = torch.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights = torch.where(logits < torch.topk(logits, top_k).values[-1], 0.0, weights)
    if min_p > 0.0:
        weights = torch.where(weights < min_p, 0.0, weights)
    if top_p < 1.0:
        values = torch.sort(weights[weights > 0], descending=True).values
        cumulative = torch.cumsum(values.double(), dim=0)
        num_kept = int(torch.count_nonzero(cumulative - values <= top_p * cumulative[-1]))
        weights = torch.where(weights < values[num_kept - 1], 0.0, weights)
    return weights


def race(weights: torch.Tensor, word0: int, word1: int) -> int:
    """The kept token of ``weights`` [V] that wins the race of a key; see ``sampling``."""
    if 2 * int(torch.count_nonzero(weights)) < len(weights):
        tokens = weights.nonzero()[:, 0].int()
        weights = weights[tokens]
    else:  # picking most of them would take longer than hashing all
        tokens = torch.arange(len(weights), dtype=torch.int32, device=weights.device)
    return int(tokens[(weights / exponential(token_hash(tokens, word0, word1))).argmax()])


def penalize(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Repetition, presence and frequency penalties on ``logits`` [S, V], in place."""
    lengths = zip(rows.tolist(), prompt_lens.tolist(), total_lens.tolist(), strict=True)
    for index, (row, prompt, total) in enumerate(lengths):
        seen = torch.unique(tokens[row, :total]).long()
        score = logits[index, seen]
        logits[index, seen] = torch.where(score < 0, score * repetition[index], score / repetition[index])
        ids, counts = torch.unique(tokens[row, prompt:total], return_counts=True)
        logits[index, ids.long()] -= presence[index] + frequency[index] * counts


def add_at(logits: torch.Tensor, row_index: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """``logits[row_index[i], token_ids[i]] += values[i]``, in place; no (row, token) pair twice."""
    logits[row_index.long(), token_ids.long()] += values
