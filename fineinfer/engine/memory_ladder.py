"""Moves bytes between the KV pool and training: the governor's leases and the first rungs of the ladder.

When requests wait for slots: hold the next micro-batch, then drop kept layer graphs (they are recomputed in backward).
When training wants a micro-batch: the pool shrinks, but never below the peak of the admitted requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fineinfer.memory.freed_memory import return_freed_memory
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.kv_cache import KVCache
from fineinfer.training.trainer import Trainer

logger = logging.getLogger(__name__)

KV = "kv"
ACTIVATIONS = "training_activations"
STATE = "training_state"
HOLD_S = 0.5  # training stays off the memory for this long after the last request waited for it (hysteresis)
FOLLOW_EVERY_S = 0.05  # while leases exceed a smaller budget: trimming the heap takes milliseconds
MIN_KV_SLOTS = 64


class MemoryLadder:
    """The only caller of grow and shrink.

    Args:
        governor: The budget; ``kv`` and the fixed owners are leased already.
        kv_cache: The pool.
        reserved_slots: Peak of the admitted requests, a lease that training cannot take.
    """

    def __init__(self, governor: MemoryGovernor, kv_cache: KVCache, reserved_slots: Callable[[], int]) -> None:
        if kv_cache.pool is None:
            raise ValueError("the ladder needs a KV cache with a pool")
        self._governor = governor
        self._kv = kv_cache
        self._pool = kv_cache.pool
        self._reserved_slots = reserved_slots
        self._hold_until_s = self._next_follow_s = 0.0
        self._kept_layers = 0
        self._growth_goal = 0  # slots that the pool is to have, while it has not come so far
        self.num_resizes = 0
        self.num_dropped_layers = 0

    # ------------------------------------------------------------ training asks

    def holding(self, now_s: float) -> bool:
        """Whether no new micro-batch may begin, since requests need the memory."""
        return now_s < self._hold_until_s

    def lease_state(self, num_bytes: int) -> bool:
        """Lease a job's masters, moments and gradients; False if even the smallest pool leaves too little."""
        self._shrink_kv_for(num_bytes - self._governor.leased(STATE))
        return self._governor.lease(STATE, num_bytes)

    def lease_micro_batch(self, trainer: Trainer) -> bool:
        """Lease the activations of the next micro-batch: all layers kept if that fits, else as many as fit.

        Returns:
            False if not even a fully recomputed micro-batch fits now; training waits.
        """
        num_tokens = trainer.next_micro_batch_tokens()
        least, most = trainer.bytes_if_recomputed(num_tokens), trainer.bytes_if_all_kept(num_tokens)
        held = self._governor.leased(ACTIVATIONS)
        if held < most:
            self._shrink_kv_for(most - held)
        available = held + self._governor.free_bytes  # less than is held while a smaller budget is being followed
        if available < least:
            return False
        granted = min(available, most)
        if granted > held and not self._governor.lease(ACTIVATIONS, granted):
            return False
        self._kept_layers = (max(held, granted) - least) // max(1, (most - least) // trainer.num_layers)
        return True

    def keeps(self, num_layers: int, layer: int) -> bool:
        """Keep policy of the running micro-batch: the last layers, whose graphs backward consumes first."""
        return layer >= num_layers - self._kept_layers

    def end_job(self) -> None:
        """Take back all that a job held and let the pool grow into it."""
        self._governor.release(ACTIVATIONS)
        self._governor.release(STATE)
        return_freed_memory(self._pool.device)
        self.grow_kv()

    # ------------------------------------------------------------ requests ask

    def make_room(self, slots_wanted: int, trainer: Trainer | None, now_s: float) -> bool:
        """Give waiting requests their slots, cheapest rung first.

        Args:
            slots_wanted: Slots missing for the oldest waiting request.
            trainer: The job that runs, if any.
            now_s: ``time.monotonic()``.

        Returns:
            Whether the pool has them now. If not, the running micro-batch must finish first.
        """
        goal = min(self._kv.max_slots, self._kv.num_slots + slots_wanted)
        self._hold_until_s = now_s + HOLD_S
        if trainer is None or not trainer.micro_batch_open or self._free_slots() < slots_wanted:
            self._give_back_activations(trainer)
        self.grow_kv(goal)
        return self._kv.num_slots >= goal

    def grow_kv(self, goal: int | None = None) -> None:
        """Grow the pool to ``goal`` slots (None: as far as it can), within the free bytes."""
        target = min(self._kv.max_slots, self._kv.num_slots + self._free_slots())
        if goal is not None:
            target = min(target, max(self._pool.round_up(goal), self._kv.num_slots))
        self._growth_goal = target
        self._resize(min(target, self._pool.slots_in_reach))  # the rest in the next turns: requests are running

    def resize_kv(self, num_slots: int) -> None:
        """Administrative resize, as far as live tokens and the budget allow."""
        if num_slots < self._kv.num_slots:
            self._resize(max(num_slots, MIN_KV_SLOTS, self._reserved_slots()))
        else:
            self.grow_kv(num_slots)

    # ------------------------------------------------------------ the budget

    def set_budget(self, num_bytes: int, trainer: Trainer | None, now_s: float) -> None:
        """Change the budget: the pool grows into a larger one; ``follow_budget`` gets below a smaller one."""
        self._governor.set_budget(num_bytes)
        if self._governor.free_bytes >= 0:
            self.grow_kv()
        else:
            return_freed_memory(self._pool.device)  # whoever the budget was cut for waits for what is cached, too
            self.follow_budget(trainer, now_s)

    def follow_budget(self, trainer: Trainer | None, now_s: float) -> None:
        """While leases exceed the budget, give back: free slots first, then what training holds; called every turn.

        Requests that are running keep their slots, so the rest follows as they end. Within the budget, go on with a
        growth that was too long for one turn or found the device's memory in other hands.
        """
        if self._kv.num_slots < self._growth_goal:
            self.grow_kv(self._growth_goal)
        if self._governor.free_bytes >= 0 or now_s < self._next_follow_s:
            return
        self._next_follow_s = now_s + FOLLOW_EVERY_S
        self._hold_until_s = now_s + HOLD_S
        self._shrink_kv_for(0)
        if self._governor.free_bytes < 0 and self._governor.leased(ACTIVATIONS):
            self._give_back_activations(trainer)

    def _give_back_activations(self, trainer: Trainer | None) -> None:
        """All between two micro-batches; within one, the kept graphs, which are recomputed."""
        if trainer is None or not trainer.micro_batch_open:
            self._governor.release(ACTIVATIONS)
            return_freed_memory(self._pool.device)
            return
        started_s = time.perf_counter()
        self._kept_layers = 0
        num_layers, freed = trainer.drop_kept()
        return_freed_memory(self._pool.device)
        self.num_dropped_layers += num_layers
        needed = trainer.bytes_if_recomputed(trainer.micro_batch_tokens)
        self._governor.lease(ACTIVATIONS, min(needed, self._governor.leased(ACTIVATIONS)))
        self._governor.record("drop_kept", ACTIVATIONS, freed, 1e3 * (time.perf_counter() - started_s))

    # ------------------------------------------------------------ inside

    def _free_slots(self) -> int:
        return max(0, self._pool.slots_within(self._pool.held_bytes + self._governor.free_bytes) - self._kv.num_slots)

    def _shrink_kv_for(self, num_bytes: int) -> None:
        """Shrink the pool until ``num_bytes`` are free or nothing more can be given."""
        missing = num_bytes - self._governor.free_bytes
        if missing <= 0:
            return
        target = self._pool.slots_within(self._pool.held_bytes - missing)
        self._resize(max(target, MIN_KV_SLOTS, self._reserved_slots()))
        self._pool.release_idle()  # somebody waits for these bytes
        self._governor.lease(KV, self._pool.held_bytes)

    def _resize(self, target: int) -> None:
        if target == self._kv.num_slots:
            return
        started_s, before = time.perf_counter(), self._kv.num_slots
        if target < before:
            self._growth_goal = 0
            self._kv.shrink_to(target)
            self._governor.lease(KV, self._pool.held_bytes)
        elif self._governor.lease(KV, self._pool.bytes_for(target)):  # lease first: memory is mapped only when owned
            if self._kv.grow_to(target) < target:  # somebody else holds the device's memory
                self._governor.record("kv_refused", KV, self._pool.bytes_for(target))
            self._governor.lease(KV, self._pool.held_bytes)
        if self._kv.num_slots != before:
            self.num_resizes += 1
            kind = "kv_shrink" if self._kv.num_slots < before else "kv_grow"
            num_bytes, ms = self._pool.held_bytes, 1e3 * (time.perf_counter() - started_s)
            self._governor.record(kind, KV, num_bytes, ms)
            logger.debug("%s: %d -> %d slots in %.1f ms", kind, before, self._kv.num_slots, ms)
