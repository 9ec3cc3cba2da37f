"""Prefix cache: a radix tree over token ids whose edges hold the slots of their keys and values (no torch).

The tree shares slots with rows by reference count: it takes a reference of its own to what a closed row leaves, and a
new row takes one to what it finds. A slot that only the tree holds can be evicted, least recently used ends first.
Trees are kept apart by a key (adapter version, salt of the tenant), so nothing computed by other weights is found.
No call goes through all nodes, apart from the audit: a large pool holds tens of thousands.
Source of the tree: RadixAttention (Zheng et al., SGLang, 2024).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from fineinfer.memory.slot_allocator import IntegrityError, SlotAllocator, Slots

MIN_EVICTED = 128  # slots freed at once, if there are so many: a call takes 0.1 ms even for one
Tokens = NDArray[np.int32]


class _Root:
    """Where the prefixes of one key begin; it has a node below it as long as it is there."""

    __slots__ = ("children", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.children: dict[int, _Node] = {}


class _Node:
    """An edge of the tree and what follows it. Its arrays are its own: a view would keep all of a longer one alive."""

    __slots__ = ("children", "number", "parent", "slots", "tokens")

    def __init__(self, number: int, tokens: Tokens, slots: Slots, parent: _Root | _Node) -> None:
        self.number = number  # given once
        self.tokens, self.slots, self.parent = tokens, slots, parent
        self.children: dict[int, _Node] = {}


class PrefixCache:
    """Finds, keeps and gives up slots of prefixes.

    Args:
        allocator: Owner of the reference counts.

    Attributes:
        num_slots: Slots the tree holds, also those that rows hold as well.
    """

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[Hashable, _Root] = {}
        # By number, the longest unused node first and each behind all that follow it in the tree: ends come first.
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._numbers = itertools.count(1)
        self._node_of = np.zeros(
            allocator.capacity, dtype=np.int64
        )  # by slot; of one that is not kept it means nothing
        self.num_slots = 0

    def match(self, key: Hashable, tokens: Tokens) -> Slots:
        """Slots of the longest known prefix of ``tokens``, in order; the caller takes its own references."""
        path = list(self._walk(key, tokens))
        if not path:
            return np.empty(0, dtype=np.int32)
        self._touch(path[-1][0])
        return np.concatenate([node.slots[:common] for node, common in path])

    def insert(self, key: Hashable, tokens: Tokens, slots: Slots) -> None:
        """Keep a prefix: a reference to each slot whose token is new to the tree.

        Args:
            key: Which tree.
            tokens: [n] int32.
            slots: [n] int32, live, where the tokens' keys and values are.
        """
        if len(tokens) == 0:
            return
        path = list(self._walk(key, tokens))
        known = sum(common for _, common in path)
        self._allocator.keep(slots[known:])
        self.num_slots += len(slots[known:])
        parent: _Root | _Node
        if path:
            last, common = path[-1]
            parent = last if common == len(last.tokens) else self._split(last, common)
            self._touch(last)
        else:
            parent = self._roots.setdefault(key, _Root(key))
        if known < len(tokens):
            self._touch(self._add(tokens[known:], slots[known:], parent))

    def evict(self, num_slots: int) -> int:
        """Free slots that nothing else holds, from the ends of the longest unused prefixes.

        Args:
            num_slots: How many are needed.

        Returns:
            How many were freed: at least ``num_slots`` if there are so many.
        """
        wanted, freed = max(num_slots, MIN_EVICTED), 0
        if not self._allocator.num_cached:
            return 0
        cut: list[_Node] = []
        gone: list[Slots] = []
        for node in self._nodes.values():
            if node.children:
                continue  # a row holds what follows
            end = node.slots[freed - wanted :]
            held = np.flatnonzero(self._allocator.references(end) > 1)
            num_cut = len(end) - (int(held[-1]) + 1 if len(held) else 0)
            if num_cut:
                gone.append(node.slots[-num_cut:])
                freed += num_cut
                if num_cut == len(node.slots):
                    self._unlink(node)
                    cut.append(node)
                else:
                    node.tokens, node.slots = node.tokens[:-num_cut].copy(), node.slots[:-num_cut].copy()
                if freed == wanted:
                    break
        for node in cut:
            del self._nodes[node.number]
        self._drop(gone)
        return freed

    def forget(self, key: Hashable) -> None:
        """Drop a whole tree, as after keys and values that are not finite: what rows hold too stays theirs alone."""
        root = self._roots.pop(key, None)
        below = [] if root is None else list(root.children.values())
        for node in below:  # grows
            below.extend(node.children.values())
            del self._nodes[node.number]
        self._drop([node.slots for node in below])

    def rename(self, moved: Slots, new_slot: Slots) -> None:
        """Follow a move: slot s, if it is one of ``moved``, is now ``new_slot[s]``."""
        numbers = self._node_of[moved]
        for number in np.unique(numbers).tolist():
            node = self._nodes.get(number)  # None, or one that stays as it is, for slots that only rows hold
            if node is not None:
                node.slots = new_slot[node.slots]
        self._node_of[new_slot[moved]] = numbers

    def check_integrity(self) -> None:
        """Raise IntegrityError unless tree, order, slots and allocator agree."""
        passed: set[int] = set()
        for number, node in self._nodes.items():
            followed = all(child.number in passed for child in node.children.values())
            if not followed or node.parent.children.get(int(node.tokens[0])) is not node:
                raise IntegrityError(f"node {number} is not linked, or comes before what follows it")
            if len(node.tokens) != len(node.slots) or (self._node_of[node.slots] != number).any():
                raise IntegrityError(f"node {number} does not own its slots")
            if node.tokens.base is not None or node.slots.base is not None:
                raise IntegrityError(f"node {number} keeps an array alive that is not its own")
            passed.add(number)
        above: list[_Root | _Node] = [*self._roots.values(), *self._nodes.values()]
        is_empty = any(not root.children for root in self._roots.values())
        if is_empty or sum(len(one.children) for one in above) != len(passed):
            raise IntegrityError("the trees have other nodes than are known, or a root has none")
        slots = np.sort(np.concatenate([np.empty(0, dtype=np.int32), *(node.slots for node in self._nodes.values())]))
        if self.num_slots != len(slots) or not np.array_equal(slots, self._allocator.kept()):
            raise IntegrityError("the trees hold other slots than are kept")

    # ---------------------------------------------------------------- inside

    def _walk(self, key: Hashable, tokens: Tokens) -> Iterator[tuple[_Node, int]]:
        """The edges along ``tokens`` and how many tokens of each agree; the last one may agree in part."""
        above: _Root | _Node | None = self._roots.get(key)
        position = 0
        while above is not None and position < len(tokens):
            node = above.children.get(int(tokens[position]))
            if node is None:
                return
            rest = tokens[position : position + len(node.tokens)]
            differs = np.flatnonzero(node.tokens[: len(rest)] != rest)
            common = int(differs[0]) if len(differs) else len(rest)
            yield node, common
            position += common
            above = node if common == len(node.tokens) else None

    def _touch(self, node: _Root | _Node) -> None:
        """Make a node and all above it the last used ones, the uppermost last."""
        while isinstance(node, _Node):
            self._nodes.move_to_end(node.number)
            node = node.parent

    def _add(self, tokens: Tokens, slots: Slots, parent: _Root | _Node) -> _Node:
        """A new node, with copies of the arrays."""
        node = _Node(next(self._numbers), tokens.copy(), slots.copy(), parent)
        parent.children[int(tokens[0])] = self._nodes[node.number] = node
        self._node_of[slots] = node.number
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut an edge in two; the upper part, which is new, and which the caller has to touch."""
        upper = self._add(node.tokens[:length], node.slots[:length], node.parent)
        node.tokens, node.slots, node.parent = node.tokens[length:].copy(), node.slots[length:].copy(), upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _unlink(self, node: _Node) -> None:
        """Take an end off its tree, and the tree off the others if that was all of it."""
        del node.parent.children[int(node.tokens[0])]
        if isinstance(node.parent, _Root) and not node.parent.children:
            del self._roots[node.parent.key]

    def _drop(self, gone: list[Slots]) -> None:
        if gone:
            slots = np.concatenate(gone)
            self._allocator.drop(slots)
            self.num_slots -= len(slots)
