"""Least recently used, block by block: the textbook policy, for comparison and for tiers without prefix structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice

from tiering.api import BlockKey, EvictionPolicy

__all__ = ["LRUPolicy"]


class LRUPolicy(EvictionPolicy):
    """Evicts the block whose last use is longest ago.

    A path is touched head first, so that its tail is the most recent block and its *head* goes first. A prefix is
    usable only up to its first missing block, so this policy may leave a hole with useless blocks behind it; that is
    what LRU over blocks means, and why ``prefix`` is the default. Each call costs O(1) a key; ``victims`` also
    passes over the protected blocks that are older than the last one it names.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        # An OrderedDict, not a dict: the front of a dict from which much was deleted is slow to find.
        self._by_age: OrderedDict[BlockKey, None] = OrderedDict()

    def admit(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        by_age = self._by_age
        for key in keys:
            if key in by_age:
                by_age.move_to_end(key)
            else:
                by_age[key] = None

    def touch(self, path: Sequence[BlockKey]) -> None:
        by_age = self._by_age
        move_to_end = by_age.move_to_end
        for key in path:
            if key in by_age:
                move_to_end(key)

    def victims(self, n: int, protected: Callable[[BlockKey], bool]) -> list[BlockKey]:
        return list(islice(filterfalse(protected, self._by_age), max(n, 0)))

    def forget(self, keys: Sequence[BlockKey], *, evicted: bool) -> None:
        by_age = self._by_age
        for key in keys:
            by_age.pop(key, None)

    def __len__(self) -> int:
        return len(self._by_age)
