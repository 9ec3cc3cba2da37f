"""Log-probabilities of prompt tokens, collected while the prompt is prefilled; waits for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fineinfer.model.decoder import Decoder
from fineinfer.runner.sampler import top_logprobs
from fineinfer.scheduler.plan import Chunk

LOGIT_ROWS = 128  # rows of prompt logits in memory at once: 128 x 128k vocabulary in fp32 is 66 MB


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether rows of this chunk belong to a prompt whose log-probabilities are asked for."""
    sequence = chunk.sequence
    return sequence.sampling.prompt_logprobs is not None and chunk.start < len(sequence.prompt)


def collect_prompt_logprobs(decoder: Decoder, chunks: Iterable[Chunk], hidden: torch.Tensor) -> None:
    """Append to the sequences' ``prompt_logprobs``.

    A prompt that runs again, after a preemption or a broken step, may be cut into other chunks: what is known stays.

    Args:
        decoder: For its head.
        chunks: In row order.
        hidden: [num_rows, hidden_size] of the last layer.
    """
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        num_top = sequence.sampling.prompt_logprobs
        if num_top is not None:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)
            unknown = max(chunk.start, len(sequence.prompt_logprobs) - 1)  # row n tells of token n + 1
            stop = min(chunk.start + chunk.length, len(sequence.prompt) - 1)
            for start in range(unknown, stop, LOGIT_ROWS):
                end = min(start + LOGIT_ROWS, stop)
                rows = hidden[first + start - chunk.start : first + end - chunk.start]
                targets = sequence.prompt[start + 1 : end + 1]
                sequence.prompt_logprobs.extend(top_logprobs(decoder.head(rows), targets, num_top))
        first += chunk.length
