"""Prefix cache: a radix tree over token ids whose edges hold the slots of their keys and values (no torch).

The tree shares slots with rows by reference count: it takes a reference of its own to what a closed row leaves, and a
new row takes one to what it finds. A slot that only the tree holds can be evicted, least recently used ends first.
Trees are kept apart by a key (adapter version, salt of the tenant), so nothing computed by other weights is found.
Source of the tree: RadixAttention (Zheng et al., SGLang, 2024).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from fineinfer.memory.slot_allocator import SlotAllocator, Slots

MIN_EVICTED = 128  # slots freed at once, if there are so many: finding the oldest walks the tree
Tokens = NDArray[np.int32]


class _Node:
    """An edge of the tree and what follows it; a root's edge is empty."""

    __slots__ = ("children", "last_used", "parent", "slots", "tokens")

    def __init__(self, tokens: Tokens, slots: Slots, parent: _Node | None) -> None:
        self.tokens, self.slots, self.parent = tokens, slots, parent
        self.children: dict[int, _Node] = {}
        self.last_used = 0


class PrefixCache:
    """Finds, keeps and gives up slots of prefixes.

    Args:
        allocator: Owner of the reference counts.

    Attributes:
        num_slots: Slots the tree holds, also those that rows hold as well.
    """

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        self.num_slots = 0

    def match(self, key: Hashable, tokens: Tokens) -> Slots:
        """Slots of the longest known prefix of ``tokens``, in order; the caller takes its own references."""
        found: list[Slots] = []
        for node, common in self._walk(key, tokens):
            node.last_used = next(self._clock)
            found.append(node.slots[:common])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def insert(self, key: Hashable, tokens: Tokens, slots: Slots) -> None:
        """Keep a prefix: a reference to each slot whose token is new to the tree.

        Args:
            key: Which tree.
            tokens: [n] int32.
            slots: [n] int32, live, where the tokens' keys and values are.
        """
        if len(tokens) == 0:
            return
        root = self._roots.setdefault(key, _Node(tokens[:0], slots[:0], None))
        node, known = root, 0
        for child, common in self._walk(key, tokens):
            child.last_used = next(self._clock)
            node = child if common == len(child.tokens) else self._split(child, common)
            known += common
        if known < len(tokens):
            leaf = _Node(tokens[known:].copy(), slots[known:].copy(), node)
            leaf.last_used = next(self._clock)
            node.children[int(tokens[known])] = leaf
            self._allocator.share(leaf.slots)
            self.num_slots += len(leaf.slots)

    def evict(self, num_slots: int) -> int:
        """Free slots that nothing else holds, from the ends of the longest unused prefixes.

        Args:
            num_slots: How many are needed.

        Returns:
            How many were freed: at least ``num_slots`` if there are so many.
        """
        wanted, freed = max(num_slots, MIN_EVICTED), 0
        leaves = [(node.last_used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        while leaves and freed < wanted:
            _, _, node = heapq.heappop(leaves)
            held = np.flatnonzero(self._allocator.references(node.slots) > 1)
            keep = max(int(held[-1]) + 1 if len(held) else 0, len(node.slots) - (wanted - freed))
            freed += self._cut(node, keep)
            parent = node.parent
            if keep == 0 and parent is not None and parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return freed

    def forget(self, key: Hashable) -> None:
        """Drop a whole tree, as after keys and values that are not finite: what rows hold too stays theirs alone."""
        root = self._roots.pop(key, None)
        for node in self._nodes([] if root is None else [root]):
            self._allocator.free(node.slots)
            self.num_slots -= len(node.slots)

    def rename(self, new_slot: Slots) -> None:
        """Follow a move: slot s is now ``new_slot[s]``."""
        for node in self._nodes():
            node.slots = new_slot[node.slots]

    def slots(self) -> Slots:
        """All slots of the tree, each once."""
        parts = [node.slots for node in self._nodes()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    # ---------------------------------------------------------------- inside

    def _walk(self, key: Hashable, tokens: Tokens) -> Iterator[tuple[_Node, int]]:
        """The edges along ``tokens`` and how many tokens of each agree; the last one may agree in part."""
        node, position = self._roots.get(key), 0
        while node is not None and position < len(tokens):
            node = node.children.get(int(tokens[position]))
            if node is None:
                return
            rest = tokens[position : position + len(node.tokens)]
            differs = np.flatnonzero(node.tokens[: len(rest)] != rest)
            common = int(differs[0]) if len(differs) else len(rest)
            whole = common == len(node.tokens)
            yield node, common
            position += common
            if not whole:
                return

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut an edge in two; the upper part, which is new."""
        if node.parent is None:
            raise ValueError("a root has no edge to split")
        upper = _Node(node.tokens[:length], node.slots[:length], node.parent)
        upper.last_used = node.last_used
        node.parent.children[int(node.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _cut(self, node: _Node, keep: int) -> int:
        """Shorten an end to its first ``keep`` slots; how many were freed."""
        gone = node.slots[keep:]
        if len(gone) == 0:
            return 0
        self._allocator.free(gone)
        self.num_slots -= len(gone)
        if keep == 0 and node.parent is not None:
            del node.parent.children[int(node.tokens[0])]
        node.tokens, node.slots = node.tokens[:keep], node.slots[:keep]
        return len(gone)

    def _nodes(self, roots: Iterable[_Node] | None = None) -> Iterator[_Node]:
        """The edges below some roots; None: of all trees."""
        below = self._roots.values() if roots is None else roots
        stack = [child for root in below for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
