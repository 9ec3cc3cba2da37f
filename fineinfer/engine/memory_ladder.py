"""Moves bytes between the KV pool and training: the governor's leases and the ladder.

When requests wait for slots: hold the next micro-batch and give what lies idle; then the cheapest rung that suffices:
drop kept layer graphs (they are recomputed in backward), send layer inputs to host memory, finish or abort the
micro-batch, park the job (rungs.py). When training wants a micro-batch: the pool shrinks, but never below the peak of
the admitted requests; into what is left then it goes recomputed, with its inputs in host memory, or split.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fineinfer.engine.job_memory import JobNeed
from fineinfer.engine.rungs import FINISH, OFFLOAD, PARK, UNPARK, LadderLog, LadderStep, Rungs, cheapest
from fineinfer.memory.freed_memory import return_freed_memory
from fineinfer.memory.governor import MemoryGovernor
from fineinfer.memory.kv_cache import KVCache
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)

KV = "kv"
ACTIVATIONS = "training_activations"
STATE = "training_state"
# Hysteresis: training stays off the memory for so long after the last request waited for it; twice as long after each
# rung that cost work, until CALM_S went by without one.
HOLD_S, MAX_HOLD_S, CALM_S = 0.5, 8.0, 10.0
FOLLOW_EVERY_S = 0.05  # while leases exceed a smaller budget: trimming the heap takes milliseconds
MIN_KV_SLOTS = 64


class MemoryLadder:
    """The only caller of grow and shrink.

    Args:
        governor: The budget; ``kv`` and the fixed owners are leased already.
        kv_cache: The pool.
        reserved_slots: Peak of the admitted requests, a lease that training cannot take.
        rungs: What the ways of taking memory from a job cost.
        keep_floor: A running job keeps the memory of its smallest micro-batch, so that a minimum share of the time is
            worth something; only a smaller budget takes it, or a request that could not start even alone.

    Attributes:
        slots_withheld: Slots that no further request may be admitted to, so that a parked job can have its memory.
        steps_taken: How often each rung was taken, and ``hold`` and ``unpark``.
        finishing: The micro-batch under way is to go on at once, since requests wait for its end.
    """

    def __init__(
        self,
        governor: MemoryGovernor,
        kv_cache: KVCache,
        reserved_slots: Callable[[], int],
        rungs: Rungs,
        keep_floor: bool = False,
    ) -> None:
        if kv_cache.pool is None:
            raise ValueError("the ladder needs a KV cache with a pool")
        self._governor = governor
        self._kv = kv_cache
        self._pool = kv_cache.pool
        self._reserved_slots = reserved_slots
        self._rungs, self._keep_floor = rungs, keep_floor
        self._hold_until_s = self._next_follow_s = self._last_costly_s = 0.0
        self._hold_s = HOLD_S
        self._kept_layers = self._floor = 0
        self._begun_at: int | None = None  # the update of the first micro-batch since it has its memory
        self._growth_goal = 0  # slots that the pool is to have, while it has not come so far
        self._log = LadderLog(governor)
        self.steps_taken = self._log.counts
        self._largest_budget_bytes = governor.budget_bytes
        self.finishing = self.owes_update = False
        self.slots_withheld = 0
        self.num_resizes = 0
        self.num_dropped_layers = 0

    # ------------------------------------------------------------ training asks

    def holding(self, now_s: float) -> bool:
        """Whether no new micro-batch may begin, since requests need the memory.

        A job that is promised a share and was parked is not kept out by requests that never stop waiting.
        """
        until_s = min(self._hold_until_s, self._last_costly_s + MAX_HOLD_S) if self._keep_floor else self._hold_until_s
        return now_s < until_s and not self._has_floor

    def lease_state(self, num_bytes: int) -> bool:
        """Lease a job's masters, moments and gradients; False if even the smallest pool leaves too little."""
        self._shrink_kv_for(num_bytes - self._governor.leased(STATE))
        return self._governor.lease(STATE, num_bytes)

    def has_room_for(self, need: JobNeed) -> bool:
        """Whether a job could have what it always holds, and its largest micro-batch, besides the admitted requests.

        If it is promised a share, further requests must leave it that: ``slots_withheld``; but nothing while the budget
        has no room for it at all.
        """
        withheld = self._slots_for(need.state_bytes + need.floor_bytes - self._governor.leased(STATE))
        self.slots_withheld = withheld if self._keep_floor and self.can_ever_hold(need) else 0
        return withheld <= self._kv.num_slots - max(MIN_KV_SLOTS, self._reserved_slots())

    def regain_floor(self, trainer: ParkableTrainer) -> bool:
        """Lease what requests have taken of the floor, once those admitted leave it; further ones must, as for a job.

        Returns:
            Whether the floor is there, or the budget has no room for it.
        """
        self.slots_withheld = 0
        missing = self._floor - self._governor.leased(ACTIVATIONS)
        if missing <= 0 or not self.can_ever_hold(JobNeed.of(trainer)):
            return True
        withheld = self._slots_for(missing)
        if withheld <= self._kv.num_slots - max(MIN_KV_SLOTS, self._reserved_slots()):
            self._shrink_kv_for(missing)
            return self._governor.lease(ACTIVATIONS, self._floor)
        self.slots_withheld = withheld
        return False

    def _slots_for(self, num_bytes: int) -> int:
        """Slots that the pool must give up for so many bytes."""
        missing = num_bytes - self._governor.free_bytes
        left = self._pool.slots_within(self._pool.held_bytes - max(0, missing))
        return max(0, self._kv.num_slots - left) if missing > 0 else 0

    @property
    def _has_floor(self) -> bool:
        return 0 < self._floor <= self._governor.leased(ACTIVATIONS)

    def begin_job(self, need: JobNeed) -> bool:
        """Lease what a job always holds; False while that and its largest micro-batch leave the pool too little."""
        if not self.has_room_for(need) or not self.lease_state(need.state_bytes + need.floor_bytes):
            return False
        self.slots_withheld, self._begun_at = 0, None
        self._governor.lease(STATE, need.state_bytes)
        self._floor = need.floor_bytes if self._keep_floor else 0
        return self._governor.lease(ACTIVATIONS, self._floor)

    def can_ever_hold(self, need: JobNeed, full: bool = False) -> bool:
        """Whether the budget, or the ``full`` one, the largest so far, is enough for a job and the smallest pool."""
        shares = self.shares()
        lowered = self._largest_budget_bytes - shares["budget"] if full else 0
        return need.state_bytes + need.floor_bytes <= 2 * shares["budget"] - sum(shares.values()) + lowered

    def shares(self) -> dict[str, int]:
        """Bytes of the ``budget``, and of all who have some of it when a job has the most that it can."""
        own = (KV, STATE, ACTIVATIONS)
        others = {name: size for name, size in self._governor.leases().items() if name not in own}
        pool = self._pool.bytes_for(MIN_KV_SLOTS) if self._pool.elastic else self._governor.leased(KV)
        return {"budget": self._governor.budget_bytes, **others, "smallest KV pool": pool}

    def unpark(self, trainer: ParkableTrainer) -> bool:
        """Let a parked job have its memory again; False while requests or the budget leave too little."""
        started_s = time.perf_counter()
        if not self.begin_job(JobNeed.of(trainer)):
            return False
        trainer.unpark()
        self._log.note(UNPARK, STATE, trainer.state_bytes, started_s)
        self._rungs.observe_move(trainer.state_bytes, time.perf_counter() - started_s)
        return True

    def lease_micro_batch(self, trainer: ParkableTrainer) -> bool:
        """Lease the activations of the next micro-batch: all layers kept if that fits, else as many as fit.

        Returns:
            False if not even a fully recomputed micro-batch fits now; training waits.
        """
        self._begun_at, self.owes_update = trainer.step if self._begun_at is None else self._begun_at, False
        least, most = trainer.next_micro_batch_bytes()
        held = self._governor.leased(ACTIVATIONS)
        wanted = least if time.monotonic() < self._hold_until_s else most  # requests wait for memory: just its floor
        if held < wanted:
            self._shrink_kv_for(wanted - held)
        available = held + self._governor.free_bytes  # less than is held while a smaller budget is being followed
        if available < least and trainer.next_can_shrink:
            least, self._kept_layers = self._make_smaller(trainer, available), 0
            return available >= least and self._governor.lease(ACTIVATIONS, least)
        if available < least:
            return False
        granted = min(available, wanted)
        if granted > held and not self._governor.lease(ACTIVATIONS, granted):
            return False
        self._kept_layers = (max(held, granted) - least) // max(1, (most - least) // trainer.num_layers)
        return True

    def _make_smaller(self, trainer: ParkableTrainer, available: int) -> int:
        """Bytes of the next micro-batch, made to fit: its inputs in host memory (same bits), then fewer sequences."""
        offloaded = trainer.can_offload and self._rungs.available(OFFLOAD, time.monotonic())
        if offloaded:
            trainer.offload_inputs()
            self._log.count("offload", ACTIVATIONS, available)
        num_tokens, fitting = trainer.next_micro_batch_tokens(), trainer.tokens_within(available, offloaded)
        if num_tokens > fitting:
            whole, num_tokens = num_tokens, trainer.split_next_micro_batch(fitting)
            if num_tokens < whole:
                self._log.count("split", ACTIVATIONS, available)
        return trainer.bytes_if_offloaded(num_tokens) if offloaded else trainer.bytes_if_recomputed(num_tokens)

    def keeps(self, num_layers: int, layer: int) -> bool:
        """Keep policy of the running micro-batch: the last layers, whose graphs backward consumes first."""
        return layer >= num_layers - self._kept_layers

    def let_go(self) -> None:
        """Take back all that a job held; it may begin again."""
        self._floor = self._kept_layers = 0
        self._governor.release(ACTIVATIONS)
        self._governor.release(STATE)
        return_freed_memory(self._pool.device)

    def end_job(self) -> None:
        """The same, and let the pool grow into it."""
        self.slots_withheld = 0
        self.let_go()
        self.grow_kv()

    # ------------------------------------------------------------ requests ask

    def make_room(self, slots_wanted: int, trainer: ParkableTrainer | None, now_s: float, stuck: bool = False) -> bool:
        """Give waiting requests their slots: what lies idle, then by the cheapest rung that suffices.

        Args:
            slots_wanted: Slots missing for requests.
            trainer: The job that runs, if any.
            now_s: ``time.monotonic()``.
            stuck: No request can go on, so they may take what is kept for training, once that has made an update.

        Returns:
            Whether the pool has them now. If not, the running micro-batch or a request must end first.
        """
        goal = min(self._kv.max_slots, self._kv.num_slots + slots_wanted)
        self._hold(now_s)
        self._release_idle(trainer, self._floor)
        self.finishing = self.owes_update = False
        wanted = self._pool.bytes_for(goal) - self._pool.held_bytes
        missing = wanted - max(0, self._governor.free_bytes)
        if missing > 0 and trainer is not None:
            above = self._governor.leased(ACTIVATIONS) - self._floor
            owed = stuck and self._floor > 0 and not self._has_made_an_update(trainer)
            self._descend(trainer, missing, now_s, 0 if stuck and missing > above and not owed else self._floor)
            self.owes_update = owed
        self.grow_kv(goal)
        return self._kv.num_slots >= goal

    def take_steps(self) -> list[LadderStep]:
        """What was taken and given back since the last call, for the job's events."""
        return self._log.take()

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

    def reachable_slots(self) -> int:
        """Slots that the pool could have under the budget, were there no training."""
        own = sum(self._governor.leased(owner) for owner in (KV, STATE, ACTIVATIONS))
        return min(self._kv.max_slots, self._pool.slots_within(own + self._governor.free_bytes))

    def set_budget(self, num_bytes: int, trainer: ParkableTrainer | None, now_s: float) -> None:
        """Change the budget: the pool grows into a larger one; ``follow_budget`` gets below a smaller one."""
        self._governor.set_budget(num_bytes)
        self._largest_budget_bytes = max(self._largest_budget_bytes, num_bytes)
        if self._governor.free_bytes >= 0:
            if trainer is not None and not trainer.parked:
                self.regain_floor(trainer)
            self.grow_kv()
        else:
            return_freed_memory(self._pool.device)  # whoever the budget was cut for waits for what is cached, too
            self.follow_budget(trainer, now_s)

    @property
    def exceeds_budget(self) -> bool:
        """Whether more is leased than a smaller budget allows."""
        return self._governor.free_bytes < 0

    def follow_budget(self, trainer: ParkableTrainer | None, now_s: float) -> None:
        """While leases exceed the budget, give back: free slots first, then what training holds; called every turn.

        Requests that are running keep their slots, so the rest follows as they end. Within the budget, go on with a
        growth that was too long for one turn or found the device's memory in other hands.
        """
        if self._kv.num_slots < self._growth_goal:
            self.grow_kv(self._growth_goal)
        if self._governor.free_bytes >= 0 or now_s < self._next_follow_s:
            return
        self._next_follow_s = now_s + FOLLOW_EVERY_S
        self._hold(now_s)
        self._shrink_kv_for(0)
        self._release_idle(trainer, 0)
        if self._governor.free_bytes < 0 and trainer is not None:
            self._descend(trainer, -self._governor.free_bytes, now_s, floor=0, forced=True)

    # ------------------------------------------------------------ the rungs

    def _hold(self, now_s: float) -> None:
        if now_s - self._last_costly_s > CALM_S:
            self._hold_s = HOLD_S
        if now_s >= self._hold_until_s:
            self._log.count("hold", ACTIVATIONS, self._governor.leased(ACTIVATIONS))
        self._hold_until_s = max(self._hold_until_s, now_s + self._hold_s)

    def _release_idle(self, trainer: ParkableTrainer | None, floor: int) -> None:
        """What is leased between two micro-batches, but for a floor."""
        if (trainer is None or not trainer.micro_batch_open) and self._governor.leased(ACTIVATIONS) > floor:
            self._governor.lease(ACTIVATIONS, floor)
            return_freed_memory(self._pool.device)

    def _has_made_an_update(self, trainer: ParkableTrainer) -> bool:
        """Since it has its memory: else requests that come one after the other would park it each time before that."""
        return self._begun_at is not None and trainer.step > self._begun_at

    def _descend(
        self, trainer: ParkableTrainer, num_bytes: int, now_s: float, floor: int, forced: bool = False
    ) -> None:
        """Take the cheapest rung that frees so much, if any does; ``forced`` takes the last one rather than none."""
        if trainer.parked:
            return
        rungs = self._rungs.of(trainer, self._governor.leased(ACTIVATIONS), self._governor.leased(STATE), floor)
        rungs = [
            rung for rung in rungs if self._rungs.available(rung.name, now_s) and not (floor and rung.name == PARK)
        ]
        rung = cheapest(rungs, num_bytes) or (rungs[-1] if forced and rungs else None)
        if rung is None or rung.name == FINISH:
            self.finishing = rung is not None
            return
        started_s = time.perf_counter()
        taken = self._rungs.take(rung, trainer, now_s)
        if taken.why:
            self._log.refused(rung, taken.why)
        if taken.rung is None:
            return
        rung, num_layers = taken.rung, taken.num_layers
        self._kept_layers = 0
        self.num_dropped_layers += num_layers
        if rung.name == PARK:
            self._floor = 0
            self._governor.release(STATE)
        needed = 0 if rung.name == PARK else floor
        if trainer.micro_batch_open:
            sizes = trainer.bytes_if_offloaded if rung.name == OFFLOAD else trainer.bytes_if_recomputed
            needed = max(needed, sizes(trainer.micro_batch_tokens))
        self._governor.lease(ACTIVATIONS, min(needed, self._governor.leased(ACTIVATIONS)))
        return_freed_memory(self._pool.device)
        self._log.note(rung.name, STATE if rung.name == PARK else ACTIVATIONS, rung.num_bytes, started_s, num_layers)
        if rung.name == PARK:
            self._rungs.observe_move(trainer.state_bytes, time.perf_counter() - started_s)
        self._last_costly_s = now_s
        self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)

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
