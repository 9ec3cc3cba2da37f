"""KV pool: the K and V of every slot and layer, in one elastic buffer per layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.memory.elastic_buffer import ElasticBuffer
from fineinfer.memory.slot_allocator import SlotIds

# A move copies through a temporary of this many slots per layer: 8 MiB at 4 KiB a slot (8B shape, bf16).
_MOVE_CHUNK_SLOTS = 2048


@dataclass(frozen=True)
class KVSpec:
    """What the pool needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_layer_slot(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.num_layers * self.bytes_per_layer_slot


class KVPool:
    """One tensor ``[max_slots, 2, num_kv_heads, head_dim]`` (K is 0, V is 1) per layer, its first ``num_slots`` mapped.

    Addresses and shapes never change; only the memory behind them does. Starts with 0 slots on a CPU and with all of
    them on a device whose memory cannot be resized.
    """

    def __init__(self, spec: KVSpec, max_slots: int, device: torch.device | str = "cpu") -> None:
        self.spec, self.max_slots = spec, max_slots
        self._buffers = [ElasticBuffer(max_slots * spec.bytes_per_layer_slot, device) for _ in range(spec.num_layers)]
        shape = (max_slots, 2, spec.num_kv_heads, spec.head_dim)
        self._layers = [buffer.as_tensor(spec.dtype, shape) for buffer in self._buffers]
        self.elastic = all(buffer.elastic for buffer in self._buffers)
        self.num_slots = 0 if self.elastic else max_slots

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers."""
        return self.spec.bytes_per_slot

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all mapped slots."""
        return sum(buffer.mapped_bytes for buffer in self._buffers)

    def layer(self, index: int) -> torch.Tensor:
        """The layer's tensor ``[max_slots, 2, num_kv_heads, head_dim]``; touch only slots below ``num_slots``."""
        return self._layers[index]

    def resize(self, num_slots: int) -> int:
        """Map or unmap the tail of every layer; a pool that is not elastic stays as it is.

        Returns:
            The number of slots there are now.

        Raises:
            ValueError: Outside ``[0, max_slots]``.
        """
        if not 0 <= num_slots <= self.max_slots:
            raise ValueError(f"num_slots must be in [0, {self.max_slots}], got {num_slots}.")
        if self.elastic:
            change = (num_slots - self.num_slots) * self.spec.bytes_per_layer_slot
            for buffer in self._buffers:
                if change > 0:
                    buffer.grow(change)
                else:
                    buffer.shrink(-change)
            self.num_slots = num_slots
        return self.num_slots

    def move(self, src: SlotIds, dst: SlotIds) -> None:
        """Copy slots src to slots dst, index by index, in every layer; the two must not overlap."""
        device = self._layers[0].device
        sources = torch.from_numpy(np.array(src, dtype=np.int64)).to(device).split(_MOVE_CHUNK_SLOTS)
        targets = torch.from_numpy(np.array(dst, dtype=np.int64)).to(device).split(_MOVE_CHUNK_SLOTS)
        for layer in self._layers:
            for source, target in zip(sources, targets, strict=True):
                layer.index_copy_(0, target, layer.index_select(0, source))
