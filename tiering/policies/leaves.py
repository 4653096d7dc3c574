"""What the leaf-first policy is made of: runs of blocks, and the queue of those that are leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from tiering.api import BlockKey

__all__ = ["Entry", "LeafQueue", "Run", "Supposed"]

_STALE_ENTRIES_MIN = 64
"""Entries that are tolerated beside twice the number of leaves before the queue is compacted."""


class Run:
    """Blocks of one path, head first.

    In one of three states: *resident*; *awaited* (its one key is not resident, runs behind it are: it is the place
    where they will be linked); or *dead* (``keys`` empty: joined to another run or evicted to the last block).
    """

    __slots__ = ("awaited", "children", "keys", "parent", "position", "queued", "stamp")

    def __init__(self, keys: list[BlockKey], stamp: int, position: int) -> None:
        self.keys = keys
        # The run whose last key is the parent of keys[0]; None: unknown. An awaited run has none.
        self.parent: Run | None = None
        # Runs whose parent this is. An awaited run has at least one.
        self.children = 0
        # Number of the call that last used it. May lag behind that of resident descendants, never of forgotten ones.
        self.stamp = stamp
        # Where keys[0] stood in that call's path; negative if before its first key. Of equal stamps the deeper is larger.
        self.position = position
        # True while an entry of this run is in the queue.
        self.queued = False
        self.awaited = False


Entry: TypeAlias = tuple[int, int, int, Run]
"""Stamp, minus the position of the last key, a serial number that settles ties, the run.

The first two were exact when the entry was made. They only grow as the run is used or shortened, so an entry is never
too late; it is corrected when it comes up.
"""

Supposed: TypeAlias = dict[Run, tuple[int, int, int]]
"""Children, stamp and position that a run would have if the victims named so far were gone."""


class LeafQueue:
    """Leaves in the order in which they go.

    A run that becomes a leaf is pushed once; nothing is done when it is used, joined or evicted: an entry that has
    become stale is dropped or corrected when it comes up.
    """

    def __init__(self) -> None:
        # In ascending order. Most leaves are the most recent when they are pushed, and stand here.
        self._line: deque[Entry] = deque()
        # The others: parents whose children went, and entries that were corrected.
        self._heap: list[Entry] = []
        self._entries_made = 0

    def push(self, run: Run, stamp: int, position: int) -> None:
        """Queue ``run``, which is not queued, as if it had this stamp and position."""
        self._entries_made += 1
        entry = (stamp, 1 - position - len(run.keys), self._entries_made, run)
        if not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)
        run.queued = True

    def pop(self, supposed: Supposed) -> Entry | None:
        """Take out the leaf to go first, if things are as ``supposed`` for the runs in it."""
        heap, line = self._heap, self._line
        while heap or line:
            entry = heappop(heap) if not line or (heap and heap[0] < line[0]) else line.popleft()
            run = entry[3]
            run.queued = False
            if not run.keys:
                continue
            children, stamp, position = supposed.get(run) or (run.children, run.stamp, run.position)
            if children:
                continue
            if entry[0] == stamp and entry[1] == 1 - position - len(run.keys):
                return entry
            self.push(run, stamp, position)
        return None

    def put_back(self, entries: list[Entry]) -> None:
        """Return entries in the order in which they were popped, before anything else is pushed."""
        for entry in entries:
            entry[3].queued = True
        self._line.extendleft(reversed(entries))

    def compact_if_due(self, leaves: int) -> None:
        """Drop stale entries once they outnumber the ``leaves``: the queue stays in proportion to them."""
        if len(self._line) + len(self._heap) <= 2 * leaves + _STALE_ENTRIES_MIN:
            return
        self._line = deque(self._still_leaves(self._line))
        self._heap = self._still_leaves(self._heap)
        heapify(self._heap)

    def _still_leaves(self, entries: Collection[Entry]) -> list[Entry]:
        for entry in entries:
            entry[3].queued = bool(entry[3].keys) and not entry[3].children
        return [entry for entry in entries if entry[3].queued]
