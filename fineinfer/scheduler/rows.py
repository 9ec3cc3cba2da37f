"""What requests hold in the KV cache: a row each, begun with what the prefix cache has, closed into it."""

from __future__ import annotations

import numpy as np

from fineinfer.memory.kv_cache import KVCache
from fineinfer.scheduler.sequence import Sequence


class SequenceRows:
    """Opens and closes the rows of sequences.

    Args:
        kv_cache: Slots, request table and prefix cache.

    Attributes:
        num_queries: Tokens that new requests looked up in the prefix cache.
        num_hits: Tokens found.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv = kv_cache
        self.num_queries = self.num_hits = 0

    def open(self, sequence: Sequence, num_left: int) -> bool:
        """Give a sequence a row that begins with what is known of it; False if no row is free.

        Slots come with the chunks, so none is held before its token exists; the room keeps them contiguous.

        Args:
            sequence: Waits, with no step in flight.
            num_left: Tokens it is expected to generate.
        """
        room = sequence.num_tokens + num_left
        opened: tuple[int, int] | None
        if sequence.sampling.prompt_logprobs is None:
            tokens = np.array(sequence.tokens(0, sequence.num_tokens), dtype=np.int32)
            opened = self._kv.open_row_from(_prefix_key(sequence), tokens, room)
        else:  # every row of its prompt has to run
            row = self._kv.open_row(0, room)
            opened = None if row is None else (row, 0)
        if opened is None:
            return False
        sequence.row, sequence.num_computed = opened
        sequence.num_cached = sequence.num_proven = sequence.num_computed
        if not sequence.num_preemptions:  # later it finds what it left itself
            sequence.num_found = sequence.num_cached
            self.num_queries += sequence.num_tokens
            self.num_hits += sequence.num_cached
        return True

    def close(self, sequence: Sequence) -> None:
        """Take a sequence's row; what ended steps have computed stays as long as nobody needs the memory."""
        num_known = min(sequence.num_proven, len(sequence.prompt) + len(sequence.output))
        self._close(sequence, np.array(sequence.tokens(0, num_known), dtype=np.int32))

    def discard(self, sequence: Sequence) -> None:
        """Take a failed sequence's row: its keys and values may not be finite, nor what it left or shared before."""
        if self._kv.prefixes is not None:
            self._kv.prefixes.forget(_prefix_key(sequence))
        self._close(sequence, None)

    def _close(self, sequence: Sequence, tokens: np.ndarray | None) -> None:
        if sequence.row is not None:
            self._kv.close_row(sequence.row, _prefix_key(sequence), tokens)
        sequence.row, sequence.num_computed, sequence.num_proven = None, 0, 0


def _prefix_key(sequence: Sequence) -> tuple[str | None, str | None]:
    return sequence.adapter_version, sequence.cache_salt
