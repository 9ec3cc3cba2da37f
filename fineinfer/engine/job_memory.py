"""What to tell the user of a job that can never fit into the memory budget: the whole sum, and what would help."""

from __future__ import annotations

import bisect

from fineinfer.training.parking import ParkableTrainer

MIB = 1 << 20


def why_too_large(trainer: ParkableTrainer, room: dict[str, int]) -> str:
    """The arithmetic in MiB.

    Args:
        trainer: The job.
        room: Bytes of ``budget`` and of those who share it (``MemoryLadder.shares``).
    """
    parts, tokens = trainer.state_parts(), trainer.max_micro_batch_tokens
    micro_batch, state = trainer.floor_bytes(tokens), sum(parts.values())
    left = 2 * room["budget"] - sum(room.values())
    others = "".join(f" - {name} {_mib(size)}" for name, size in room.items() if name != "budget")
    how = "recomputed" if trainer.can_drop else "kept"
    return (
        f"the job needs {_mib(state + micro_batch)} MiB = adapter and optimizer {_mib(state)} "
        f"({' + '.join(f'{name} {_mib(size)}' for name, size in parts.items() if size)}) + largest micro-batch "
        f"{_mib(micro_batch)} ({tokens} tokens x {micro_batch / tokens / 1024:,.1f} KiB, every layer {how}), but the "
        f"memory budget leaves {_mib(left)} MiB = {_mib(room['budget'])}{others}: {_advice(trainer, left - state)}"
    )


def _advice(trainer: ParkableTrainer, left: int) -> str:
    """What would make it fit.

    Args:
        trainer: The job.
        left: Bytes for a micro-batch.
    """
    tokens, longest = trainer.max_micro_batch_tokens, trainer.schedule.longest()
    if not trainer.can_drop and trainer.bytes_if_recomputed(tokens) <= left:
        return 'recompute "auto" would fit'
    fitting = bisect.bisect_right(range(1, tokens + 1), left, key=trainer.floor_bytes)
    if fitting == 0:
        return "lower lora.r, name fewer lora.target_modules, or raise --memory-budget"
    if fitting < longest[0]:
        return (
            f"a max_seq_length of {fitting} would fit (the longest example has {longest[0]} tokens; "
            "excess_length_strategy says what becomes of it), or lower lora.r, or raise --memory-budget"
        )
    batch_size = trainer.batch_size
    splits = (k for k in range(1, batch_size + 1) if sum(longest[: -(-batch_size // k)]) <= fitting)
    return f"{next(splits)} gradient_accumulation_steps would fit"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"
