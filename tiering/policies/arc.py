"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST'03), block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse

from tiering.api import BlockKey, EvictionPolicy

__all__ = ["ARCPolicy"]


class ARCPolicy(EvictionPolicy):
    """Balances recency against frequency by what it regrets having evicted.

    ``T1`` holds resident blocks used once, ``T2`` those used again, each least recent first; ``B1`` and ``B2`` are the
    keys lately evicted from them (ghosts). ``p`` is the size that ``T1`` should have: a miss on a ghost of ``B1``
    raises it, one on ``B2`` lowers it. With ``c = capacity_blocks`` the paper's bounds hold whenever ``admit``
    returns: ``|T1| + |B1| <= c`` and at most ``c`` ghosts.

    Where this interface differs from the paper's one request at a time: room is made *before* the missing key is
    known, so the paper's REPLACE runs with the ``p`` of the miss before, and its tie rule for a key in ``B2`` does not
    apply. A path is touched head first, so like ``lru`` this policy may leave holes. A lost block leaves no ghost:
    it says nothing about the capacity.
    """

    def __init__(self, capacity_blocks: int) -> None:
        """Raises ``ValueError`` if ``capacity_blocks`` is below 1: ghosts and ``p`` are bounded by it."""
        if capacity_blocks < 1:
            raise ValueError(f"ARCPolicy: capacity_blocks is {capacity_blocks}; it must be at least 1")
        super().__init__(capacity_blocks)
        self._capacity_blocks = capacity_blocks
        self._p = 0.0
        self._t1: OrderedDict[BlockKey, None] = OrderedDict()
        self._t2: OrderedDict[BlockKey, None] = OrderedDict()
        self._b1: OrderedDict[BlockKey, None] = OrderedDict()
        self._b2: OrderedDict[BlockKey, None] = OrderedDict()

    def admit(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        for key in keys:
            if key in t2:
                t2.move_to_end(key)
            elif key in t1:
                del t1[key]
                t2[key] = None
            elif key in b1:
                self._p = min(float(self._capacity_blocks), self._p + max(1.0, len(b2) / len(b1)))
                del b1[key]
                t2[key] = None
            elif key in b2:
                self._p = max(0.0, self._p - max(1.0, len(b1) / len(b2)))
                del b2[key]
                t2[key] = None
            else:
                t1[key] = None
                if b1 and len(t1) + len(b1) > self._capacity_blocks:
                    b1.popitem(last=False)
                elif b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * self._capacity_blocks:
                    b2.popitem(last=False)
        self._bound_ghosts()

    def _bound_ghosts(self) -> None:
        """Keep at most ``capacity_blocks`` ghosts, also while the tier is not full (the paper never leaves it so)."""
        b1, b2 = self._b1, self._b2
        while len(b1) + len(b2) > self._capacity_blocks:
            (b2 or b1).popitem(last=False)

    def touch(self, path: Sequence[BlockKey]) -> None:
        t1, t2 = self._t1, self._t2
        for key in path:
            if key in t2:
                t2.move_to_end(key)
            elif key in t1:
                del t1[key]
                t2[key] = None

    def victims(self, n: int, protected: Callable[[BlockKey], bool]) -> list[BlockKey]:
        once, often = filterfalse(protected, self._t1), filterfalse(protected, self._t2)
        t1_blocks = len(self._t1)
        named: list[BlockKey] = []
        while len(named) < n:
            source, other = (once, often) if t1_blocks > self._p else (often, once)
            key = next(source, None)
            if key is None:
                source = other
                key = next(source, None)
                if key is None:
                    break
            named.append(key)
            if source is once:
                t1_blocks -= 1
        return named

    def forget(self, keys: Sequence[BlockKey], *, evicted: bool) -> None:
        t1, t2 = self._t1, self._t2
        for key in keys:
            if key in t1:
                del t1[key]
                ghosts = self._b1
            elif key in t2:
                del t2[key]
                ghosts = self._b2
            else:
                continue
            if evicted:
                ghosts[key] = None

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)
