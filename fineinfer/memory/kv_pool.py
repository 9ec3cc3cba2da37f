"""KV pool: the K and V of every slot and layer, in one elastic buffer per layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fineinfer.memory.cuda_memory import HandleStore, MemoryDriver
from fineinfer.memory.elastic_buffer import ElasticBuffer
from fineinfer.memory.slot_allocator import SlotIds

# On a CPU a move copies through a temporary of this many slots per layer: 8 MiB at 4 KiB a slot (8B shape, bf16).
_MOVE_CHUNK_SLOTS = 2048
_HANDLES_AT_ONCE = 128  # about 8 ms of mapping; 4 GiB of an 8B model


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

    Addresses and shapes never change; only the memory behind them does. Starts with 0 slots where memory can be resized
    and with all of them elsewhere. Every layer is mapped in steps: one slot on a CPU, one handle with a driver, whose
    slots may begin in one handle and end in the next.

    Args:
        spec: Of the model.
        max_slots: Most slots; with a driver rounded to whole handles, down if possible.
        device: Where the tensors are.
        driver: Maps the device's memory; None for anonymous memory on a CPU, and a fixed size elsewhere.
    """

    def __init__(
        self,
        spec: KVSpec,
        max_slots: int,
        device: torch.device | str = "cpu",
        driver: MemoryDriver | None = None,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self._store, self._step = None, spec.bytes_per_layer_slot
        if driver is not None:
            self._step = driver.handle_bytes(max_slots * spec.bytes_per_layer_slot)
            self._store = HandleStore(driver, self._step, max_idle=spec.num_layers)
        num_steps = max(1, self._steps_in(max_slots))
        self.max_slots = self._slots_of(num_steps)
        self._buffers = [ElasticBuffer(num_steps * self._step, device, self._store) for _ in range(spec.num_layers)]
        shape = (self.max_slots, 2, spec.num_kv_heads, spec.head_dim)
        self._layers = [buffer.as_tensor(spec.dtype, shape) for buffer in self._buffers]
        self.elastic = all(buffer.elastic for buffer in self._buffers)
        self._num_steps = 0 if self.elastic else num_steps

    @property
    def num_slots(self) -> int:
        """Slots that may be touched now."""
        return self._slots_of(self._num_steps)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers."""
        return self.spec.bytes_per_slot

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all mapped slots."""
        return sum(buffer.mapped_bytes for buffer in self._buffers)

    @property
    def held_bytes(self) -> int:
        """Device memory that nobody else can have now: what is mapped, and handles kept for the next growth."""
        return self.mapped_bytes + (0 if self._store is None else self._store.idle_bytes)

    @property
    def slots_in_reach(self) -> int:
        """The size up to which one ``resize`` takes a few milliseconds only; the present one after a refusal."""
        if self._store is None:
            return self.max_slots
        steps = 0 if self._store.is_refused else max(1, _HANDLES_AT_ONCE // self.spec.num_layers)
        return min(self.max_slots, self._slots_of(self._num_steps + steps))

    def layer(self, index: int) -> torch.Tensor:
        """The layer's tensor ``[max_slots, 2, num_kv_heads, head_dim]``; touch only slots below ``num_slots``."""
        return self._layers[index]

    # ---------------------------------------------------------------- sizes

    def round_up(self, num_slots: int) -> int:
        """The smallest size that the pool can have with at least so many slots, at most ``max_slots``."""
        return min(self.max_slots, self._slots_of(self._steps_for(num_slots)))

    def slots_within(self, num_bytes: int) -> int:
        """The largest size whose memory takes at most ``num_bytes``; 0 if none does."""
        return min(self.max_slots, self._slots_of(max(0, num_bytes) // (self.spec.num_layers * self._step)))

    def bytes_for(self, num_slots: int) -> int:
        """Bytes that ``num_slots`` slots take, in all layers."""
        return self.spec.num_layers * self._steps_for(num_slots) * self._step

    def _slots_of(self, num_steps: int) -> int:
        return num_steps * self._step // self.spec.bytes_per_layer_slot

    def _steps_for(self, num_slots: int) -> int:
        """The fewest steps that hold so many slots."""
        return -(-num_slots * self.spec.bytes_per_layer_slot // self._step)

    def _steps_in(self, num_slots: int) -> int:
        """The most steps that hold no more slots than these."""
        return ((num_slots + 1) * self.spec.bytes_per_layer_slot - 1) // self._step

    # ---------------------------------------------------------------- memory

    def resize(self, num_slots: int) -> int:
        """Map or unmap the tail of every layer; a pool that is not elastic stays as it is.

        Whole steps only: growing gives at most what is asked for, and less where the device has no memory left;
        shrinking leaves at least what is asked for, once the device has done what was launched before.

        Returns:
            The number of slots there are now.

        Raises:
            ValueError: Outside ``[0, max_slots]``.
        """
        if not 0 <= num_slots <= self.max_slots:
            raise ValueError(f"num_slots must be in [0, {self.max_slots}], got {num_slots}.")
        if self.elastic:
            more, fewer = self._steps_in(num_slots), self._steps_for(num_slots)
            if more > self._num_steps:
                self._num_steps += self._grow(more - self._num_steps)
            elif fewer < self._num_steps:
                for buffer in self._buffers:
                    buffer.shrink((self._num_steps - fewer) * self._step)
                self._num_steps = fewer
                if self._store is not None:
                    self._store.forget_refusals()
        return self.num_slots

    def release_idle(self) -> None:
        """Give back handles that were kept for the next growth."""
        if self._store is not None and self._store.idle_bytes:
            self._store.release_idle()
            self._store.forget_refusals()

    def _grow(self, num_steps: int) -> int:
        """Map steps in every layer alike; how many the device had memory for."""
        wanted = num_steps
        if self._store is not None:  # all memory first, so that no layer gets what another then lacks
            num_steps = min(num_steps, self._store.stock(num_steps * len(self._buffers)) // len(self._buffers))
        stocked = num_steps
        grown: list[ElasticBuffer] = []
        for buffer in self._buffers:
            if not num_steps or not buffer.grow(num_steps * self._step):
                break
            grown.append(buffer)
        if len(grown) < len(self._buffers):
            for buffer in grown:
                buffer.shrink(num_steps * self._step)
            num_steps = 0
        if self._store is not None:
            if num_steps and self.num_slots * self.spec.bytes_per_layer_slot < self._num_steps * self._step:
                for layer in self._layers:  # a slot whose beginning lies in a handle that was there, and was used
                    self._store.driver.zero(layer[self.num_slots : self.num_slots + 1])
            self._store.give([])
            self._store.driver.settle()
            if num_steps == wanted:
                self._store.forget_refusals()
            elif num_steps < stocked:  # no memory for page tables
                self._store.refuse()
        return num_steps

    def move(self, src: SlotIds, dst: SlotIds) -> None:
        """Copy slots src to slots dst, index by index, in every layer; the two must not overlap.

        On CUDA the copies are launched on the current stream, behind the steps that wrote the slots.
        """
        sources, targets = (torch.from_numpy(np.array(ids, dtype=np.int64)).to(self.device) for ids in (src, dst))
        if self.device.type == "cuda":
            from fineinfer.kernels import slot_move  # Triton is not there on every system

            for layer in self._layers:
                slot_move.move_slots(layer, sources, targets)
            return
        for layer in self._layers:
            for source, target in zip(sources.split(_MOVE_CHUNK_SLOTS), targets.split(_MOVE_CHUNK_SLOTS), strict=True):
                layer.index_copy_(0, target, layer.index_select(0, source))
