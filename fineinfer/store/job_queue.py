"""The order in which queued jobs start: by priority, owners in turn, by age."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping


def fair_order(queued: Iterable[tuple[str, str, int]], turns: Mapping[str, int]) -> list[str]:
    """Ids of queued jobs in the order in which they start, if nothing else comes in.

    Better priorities first. Within one, owners take turns, the one whose last job started longest ago first, and each
    owner's jobs start by age. Turns are counted, not device seconds: so a newcomer waits for one job of every other
    owner at most, and nobody is held back for what was used last month. A running job is never stopped for another.

    Args:
        queued: (id, owner, priority), oldest first.
        turns: When each owner's last job started, counted in starts; owners that had none are first.
    """
    seen, order = dict(turns), list[str]()
    for _, level in itertools.groupby(sorted(queued, key=lambda job: job[2]), lambda job: job[2]):
        lanes: dict[str, deque[str]] = {}  # by owner, in the order of their oldest jobs
        for job_id, owner, _ in level:
            lanes.setdefault(owner, deque()).append(job_id)
        turn = next_turn(seen)
        while lanes:  # a round of those that still have jobs; the next one has the same order
            for owner in sorted(lanes, key=lambda owner: seen.get(owner, 0)):
                order.append(lanes[owner].popleft())
                seen[owner], turn = turn, turn + 1
            lanes = {owner: lane for owner, lane in lanes.items() if lane}
    return order


def next_turn(turns: Mapping[str, int]) -> int:
    """The number of the next start."""
    return max(turns.values(), default=0) + 1
