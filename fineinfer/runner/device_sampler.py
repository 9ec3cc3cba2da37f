"""Samples on the device: nothing waits, the chosen ids go into the token table and, asynchronously, to the host.

Semantics are those of ``Sampler``; token i of a request is drawn by key i of its seed on either.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from fineinfer.kernels import sampling
from fineinfer.messages import TokenLogprob
from fineinfer.runner.device_batch import InputBuffer
from fineinfer.runner.sampler import MASKED, SMALLEST_LOGPROB, Choice, draw_keys
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

DRAWS_AHEAD = 64  # keys of a seed made at once: a generator costs more than its numbers
NUM_PARAMETERS = 6  # of a row: temperature, top-p, min-p, top-k and the two words of a key


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Sampled rows on their way to the host; read them after the step's event.

    Attributes:
        chosen: [2, S] int32 on the host: token id, and 1 where the logits were usable.
        logprob_rows: Rows that asked for log-probabilities.
        num_tops: How many alternatives each of them wants.
        logprobs: [rows, 1 + most] fp32 on the host, the chosen token's first; None if no row asked.
        top_ids: [rows, most] int64 on the host.
    """

    chosen: torch.Tensor
    logprob_rows: list[int]
    num_tops: list[int]
    logprobs: torch.Tensor | None
    top_ids: torch.Tensor | None

    def choices(self) -> list[Choice]:
        """One per row."""
        tokens, usable = self.chosen.tolist()
        entries: dict[int, TokenLogprob] = {}
        if self.logprobs is not None and self.top_ids is not None:
            values, ids = self.logprobs.tolist(), self.top_ids.tolist()
            for index, (row, count) in enumerate(zip(self.logprob_rows, self.num_tops, strict=True)):
                top = [
                    (token, max(value, SMALLEST_LOGPROB))
                    for token, value in zip(ids[index][:count], values[index][1 : count + 1], strict=True)
                ]
                entries[row] = TokenLogprob(tokens[row], max(values[index][0], SMALLEST_LOGPROB), top)
        return [
            Choice(token, entries.get(row)) if ok else Choice(0, failed=True)
            for row, (token, ok) in enumerate(zip(tokens, usable, strict=True))
        ]


class DeviceSampler:
    """Launches sampling.

    Args:
        vocab_size: Logits of a row.
        eos_token_ids: The model's end tokens, masked while ``min_tokens`` are not reached.
        max_rows: Most rows of a step.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._parameters = InputBuffer(NUM_PARAMETERS * max_rows, device)
        self._workspace = torch.empty(max_rows, sampling.num_splits(vocab_size), dtype=torch.int64, device=device)
        # first counter and keys of each request that draws
        self._draws: WeakKeyDictionary[Sequence, tuple[int, np.ndarray]] = WeakKeyDictionary()

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row: [2, S] int32, ids and whether the logits were usable."""
        chosen = torch.empty(2, logits.shape[0], dtype=torch.int32, device=self._device)
        sampling.argmax(logits, chosen[0], chosen[1], self._workspace)
        return chosen

    def draw(self, logits: torch.Tensor, chunks: list[Chunk], token_table: torch.Tensor) -> torch.Tensor | None:
        """Choose a token for each row as its request asks.

        Args:
            logits: [S, vocab_size] fp32 or a half type.
            chunks: The S chunks whose last rows these are.
            token_table: [table_size, max_length] int32, tokens of each request by position.

        Returns:
            As ``greedy``; None where that is what every request asks for.
        """
        sequences = [chunk.sequence for chunk in chunks]
        is_greedy = all(sequence.sampling.temperature == 0.0 for sequence in sequences)
        if any(_is_adjusted(sequence) for sequence in sequences):
            logits = self._adjust(logits.to(torch.float32, copy=True), chunks, token_table)
        elif is_greedy:
            return None
        if is_greedy:
            return self.greedy(logits)
        chosen = torch.empty(2, len(chunks), dtype=torch.int32, device=self._device)
        temperature, top_k, top_p, min_p, keys = self._upload_parameters(sequences)
        sampling.sample(logits, temperature, top_k, top_p, min_p, keys, chosen[0], chosen[1])
        return chosen

    def warm_up(self, logits: torch.Tensor, token_table: torch.Tensor) -> None:
        """Compile every kernel; ``logits`` [1, vocab_size] fp32 may hold anything."""
        one = torch.ones(1, dtype=torch.float32, device=self._device)
        none = torch.zeros(1, dtype=torch.int32, device=self._device)
        keys = torch.zeros(1, 2, dtype=torch.int32, device=self._device)
        chosen = torch.empty(2, 1, dtype=torch.int32, device=self._device)
        sampling.argmax(logits, chosen[0], chosen[1], self._workspace)
        sampling.sample(logits, one, none, one, one, keys, chosen[0], chosen[1])
        sampling.penalize(logits, token_table, none, none, none, one, one, one)
        sampling.add_at(logits, none, none, one)

    def _upload_parameters(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Temperatures, top-k, top-p and min-p [S] and keys [S, 2] on the device; a greedy row's are not looked at."""
        count, params = len(sequences), [sequence.sampling for sequence in sequences]
        reals = np.array([(item.temperature, item.top_p, item.min_p) for item in params], dtype=np.float32).T
        top_k = np.array([min(item.top_k, self._vocab_size) for item in params], dtype=np.int32)
        keys = np.zeros((count, 2), dtype=np.int32)
        for row, item in enumerate(params):
            if item.temperature > 0.0:
                keys[row] = self._key(sequences[row])
        sent = self._parameters.upload(reals, top_k, keys)
        temperature, top_p, min_p = sent[: 3 * count].view(torch.float32).view(3, count)
        return temperature, sent[3 * count : 4 * count], top_p, min_p, sent[4 * count :].view(count, 2)

    def _key(self, sequence: Sequence) -> np.ndarray:
        counter = sequence.num_generated
        first, keys = self._draws.get(sequence, (0, np.empty((0, 2), dtype=np.int32)))
        if not first <= counter < first + len(keys):
            first, keys = counter, draw_keys(sequence.seed, counter, DRAWS_AHEAD)
            self._draws[sequence] = first, keys
        return keys[counter - first]

    def _adjust(self, logits: torch.Tensor, chunks: list[Chunk], token_table: torch.Tensor) -> torch.Tensor:
        """Penalties, biases and masked tokens, on an fp32 copy of the logits."""
        sequences = [chunk.sequence for chunk in chunks]
        if any(_is_penalized(sequence) for sequence in sequences):
            counts = np.array(
                [(s.row, len(s.prompt), c.start + c.length) for c, s in zip(chunks, sequences, strict=True)], np.int32
            ).T
            penalties = np.array(
                [
                    (s.sampling.repetition_penalty, s.sampling.presence_penalty, s.sampling.frequency_penalty)
                    for s in sequences
                ],
                dtype=np.float32,
            ).T
            rows, prompts, totals = self._to_device(counts)
            repetition, presence, frequency = self._to_device(penalties)
            sampling.penalize(logits, token_table, rows, prompts, totals, repetition, presence, frequency)
        edits = [(row, *edit) for row, sequence in enumerate(sequences) for edit in self._edits_of(sequence)]
        if edits:
            rows, tokens = self._to_device(np.array([edit[:2] for edit in edits], dtype=np.int32).T)
            values = self._to_device(np.array([edit[2] for edit in edits], dtype=np.float32))
            sampling.add_at(logits, rows, tokens, values)
        return logits

    def _edits_of(self, sequence: Sequence) -> list[tuple[int, float]]:
        params = sequence.sampling
        values = dict(params.logit_bias or {})
        if sequence.num_generated < params.min_tokens:
            values |= dict.fromkeys((*self._eos, *params.stop_token_ids), MASKED)
        return list(values.items())

    def send(self, logits: torch.Tensor, chosen: torch.Tensor, chunks: list[Chunk]) -> SampledRows:
        """Send what was chosen to the host, with the log-probabilities that are asked for."""
        sequences = [chunk.sequence for chunk in chunks]
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        if not rows:
            return SampledRows(self._to_host(chosen), [], [], None, None)
        tops = [sequences[row].sampling.logprobs or 0 for row in rows]
        index = self._to_device(np.array(rows, dtype=np.int64))
        # of the distribution before penalties and truncation
        logprobs = torch.log_softmax(logits.index_select(0, index).float(), dim=-1)
        own = logprobs.gather(1, chosen[0].index_select(0, index).long()[:, None])
        values, ids = torch.topk(logprobs, max(tops), dim=-1)
        together = torch.cat((own, values), dim=1)
        return SampledRows(self._to_host(chosen), rows, tops, self._to_host(together), self._to_host(ids))

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return host.copy_(tensor, non_blocking=True)


def _is_penalized(sequence: Sequence) -> bool:
    params = sequence.sampling
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty) or bool(params.frequency_penalty)


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.sampling
    return _is_penalized(sequence) or bool(params.logit_bias) or sequence.num_generated < params.min_tokens
