"""Leaf first, the default policy: the tail of the least recently used path goes first, so a head always remains.

Blocks are kept in *runs*: stretches of a prefix in which each block but the last has exactly one resident child, the
next. All members of a run are equally recent, because an ancestor is used whenever a descendant is; so one stamp a run
is exact, and the work for a path is a few steps a run plus list and dict operations that the interpreter does in bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from tiering.api import BlockKey, EvictionPolicy
from tiering.policies.leaves import Entry, LeafQueue, Run, Supposed

__all__ = ["PrefixPolicy"]

_RUN_BLOCKS_MAX = 2048
"""Runs are not joined beyond this (the longest batch that the core hands over at once), so a split costs no more."""


class PrefixPolicy(EvictionPolicy):
    """Evicts leaves only: first the tail of the least recently used path; among equally recent leaves the deepest.

    ``admit``, ``touch`` and ``forget`` cost O(keys), with dict operations in bulk; ``victims`` costs O(1) a block plus
    O(log leaves) a run, and one call of ``protected`` for each protected leaf that is less recent than the last victim
    (those in use are the most recent, so as a rule it meets few). Memory: 50-70 bytes a block in long runs, 350 where
    every block is a prefix of its own; the keys are the caller's objects.

    A link that contradicts those already known (a second parent, a cycle) is ignored.
    """

    leaf_first: ClassVar[bool] = True

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        # Every resident key; disjoint from _awaited.
        self._run_of: dict[BlockKey, Run] = {}
        # Keys that are not resident but have a resident child.
        self._awaited: dict[BlockKey, Run] = {}
        # Calls so far that used blocks.
        self._clock = 0
        # Resident runs without children. Each has exactly one entry in the queue.
        self._leaves = 0
        self._queue = LeafQueue()

    def __len__(self) -> int:
        return len(self._run_of)

    # -- becoming resident and being used

    def admit(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        path = keys if isinstance(keys, list) else list(keys)
        if not path:
            return
        self._clock += 1
        run_of, awaited = self._run_of, self._awaited
        if run_of.keys().isdisjoint(path) and (not awaited or awaited.keys().isdisjoint(path)):
            self._append(path, parent, 0)
            return
        above = parent
        for position, key in enumerate(path):
            run = run_of.get(key)
            if run is not None:
                if run.parent is None and run.keys[0] == key:
                    self._link(run, above)
            elif key in awaited:
                run = run_of[key] = awaited.pop(key)
                run.awaited = False
                self._link(run, above)
            else:
                self._append([key], above, position)
            above = key
        self._mark(path)

    def touch(self, path: Sequence[BlockKey]) -> None:
        self._clock += 1
        self._mark(path if isinstance(path, list) else list(path))

    def _append(self, keys: list[BlockKey], parent: BlockKey | None, position: int) -> None:
        """Add new keys as a leaf behind ``parent``: to the parent's own run, if it ends there and has no children."""
        above = None if parent is None else self._run_of.get(parent)
        resident = len(self._run_of) + len(keys)
        if (
            above is not None
            and not above.children
            and above.keys[-1] == parent
            and len(above.keys) + len(keys) <= _RUN_BLOCKS_MAX
        ):
            run = above
            run.stamp = self._clock
            run.position = position - len(run.keys)
            run.keys += keys
            self._place(keys, run)
        else:
            run = Run(keys[:], self._clock, position)
            self._place(keys, run)
            self._link(run, parent)
            self._leaves += 1
        if len(self._run_of) != resident:  # the caller repeated a key
            run.keys = list(dict.fromkeys(run.keys))
        self._enqueue(run)

    def _place(self, keys: list[BlockKey], run: Run) -> None:
        run_of = self._run_of  # a plain loop: update(fromkeys()) builds a second table, and takes half as long again
        for key in keys:
            run_of[key] = run

    def _link(self, run: Run, parent: BlockKey | None) -> None:
        """Put ``run``, which has no parent yet, behind ``parent``; unless that would close a cycle."""
        if parent is None:
            return
        above = self._run_of.get(parent)
        if above is None:
            above = self._awaited.get(parent)
            if above is None:
                above = self._awaited[parent] = Run([parent], 0, 0)
                above.awaited = True
        else:
            ancestor: Run | None = above
            while ancestor is not None:
                if ancestor is run:
                    return
                ancestor = ancestor.parent if run.children else None  # without children it can be nobody's ancestor
            if above.keys[-1] != parent:
                above = self._split(above, above.keys.index(parent) + 1)
            elif not above.children:
                self._leaves -= 1
        above.children += 1
        run.parent = above

    def _mark(self, path: list[BlockKey]) -> None:
        """Stamp the runs on ``path``, splitting one where the path leaves it; then join what has become equally recent."""
        run_of, stamp = self._run_of, self._clock
        used: list[Run] = []
        i, n = 0, len(path)
        while i < n:
            run = run_of.get(path[i])
            if run is None:
                i += 1
                continue
            keys = run.keys
            start = 0 if keys[0] == path[i] else keys.index(path[i])
            shared = min(len(keys) - start, n - i)
            if keys[start : start + shared] != path[i : i + shared]:
                shared = next(j for j in range(1, shared) if keys[start + j] != path[i + j])
            if start + shared < len(keys):
                run = self._split(run, start + shared)
            if run.stamp != stamp:  # else admit placed it, or the caller repeated a key
                run.stamp = stamp
                run.position = i - start
            used.append(run)
            i += shared
        for run in reversed(used):
            if (above := run.parent) is not None and above.children == 1:
                self._join_upwards(run)

    def _split(self, run: Run, at: int) -> Run:
        """Cut ``run`` before index ``at`` (inside it) and return the new head; ``run`` stays the part with the children."""
        head = Run(run.keys[:at], run.stamp, run.position)
        del run.keys[:at]
        run.position += at
        head.parent, run.parent = run.parent, head
        head.children = 1
        self._place(head.keys, head)
        return head

    def _join_upwards(self, run: Run) -> None:
        """Join ``run``, which was used last of all, with ancestors that have no other child."""
        while (above := run.parent) is not None and above.children == 1 and not above.awaited:
            if len(above.keys) + len(run.keys) > _RUN_BLOCKS_MAX:
                return
            if run.children:  # they point to run, so it is the one to stay
                self._place(above.keys, run)
                run.position -= len(above.keys)
                run.keys[:0] = above.keys
                run.parent, above.parent = above.parent, None
                above.keys.clear()
            else:
                self._place(run.keys, above)
                above.stamp = run.stamp
                above.position = run.position - len(above.keys)
                above.keys += run.keys
                above.children = 0
                run.parent = None
                run.keys.clear()
                run = above
                self._enqueue(run)

    # -- choosing victims

    def victims(self, n: int, protected: Callable[[BlockKey], bool]) -> list[BlockKey]:
        named: list[BlockKey] = []
        passed: list[Entry] = []
        supposed: Supposed = {}
        try:
            while len(named) < n and (entry := self._queue.pop(supposed)) is not None:
                run = entry[3]
                if not run.children:  # a leaf in fact, not only if the victims before it go
                    passed.append(entry)
                wanted = n - len(named)
                for key in run.keys[: -wanted - 1 : -1]:
                    if protected(key):
                        break
                    named.append(key)
                else:
                    if wanted >= len(run.keys) and run.parent is not None:
                        self._suppose_gone(run, supposed)
        finally:
            self._queue.put_back(passed)
            self._queue.compact_if_due(self._leaves)
        return named

    def _suppose_gone(self, run: Run, supposed: Supposed) -> None:
        """Note in ``supposed`` that all of ``run`` is named; queue its parent if that has become a leaf by it."""
        above = run.parent
        if above is None or above.awaited:
            return
        _, stamp, position = supposed.get(run) or (0, run.stamp, run.position)
        children, above_stamp, above_position = supposed.get(above) or (above.children, above.stamp, above.position)
        if stamp > above_stamp:
            above_stamp, above_position = stamp, position - len(above.keys)
        supposed[above] = (children - 1, above_stamp, above_position)
        if children == 1 and not above.queued:
            self._queue.push(above, above_stamp, above_position)

    def _enqueue(self, run: Run) -> None:
        """Queue a leaf, unless an entry from before is still there."""
        if not run.queued:
            self._queue.push(run, run.stamp, run.position)
            self._queue.compact_if_due(self._leaves)

    # -- leaving the tier

    def forget(self, keys: Sequence[BlockKey], *, evicted: bool) -> None:
        leaving = keys if isinstance(keys, list) else list(keys)
        run_of = self._run_of
        inner: list[BlockKey] = []
        i, n = 0, len(leaving)
        while i < n:
            run = run_of.get(leaving[i])
            if run is None:
                i += 1
            elif run.children or run.keys[-1] != leaving[i]:
                inner.append(leaving[i])
                i += 1
            else:
                i += self._drop_tail(run, leaving, i)
        if inner:
            self._drop_inner(inner)

    def _drop_tail(self, run: Run, leaving: list[BlockKey], i: int) -> int:
        """Drop from the end of the leaf ``run`` what ``leaving[i:]`` begins with, tail first; returns how many blocks."""
        tail = run.keys[: i - len(leaving) - 1 : -1]
        dropped = len(tail)
        if tail != leaving[i : i + dropped]:
            dropped = next(j for j in range(1, dropped) if tail[j] != leaving[i + j])
        del run.keys[-dropped:]
        run_of = self._run_of
        for key in tail[:dropped]:
            del run_of[key]
        if not run.keys:
            self._leaves -= 1
            self._release_parent(run)
        return dropped

    def _drop_inner(self, leaving: list[BlockKey]) -> None:
        """Drop any blocks, also with children: those become roots that wait for their parent to return."""
        run_of = self._run_of
        inner = {key for key in leaving if key in run_of}
        for run in dict.fromkeys(run_of[key] for key in leaving if key in inner):
            keys, position = run.keys, run.position
            cuts = [at for at, key in enumerate(keys) if key in inner]
            for at in cuts:
                del run_of[keys[at]]
            if cuts[0] == 0:
                self._release_parent(run)
            start = 0
            for at in cuts:
                if at > start:
                    piece = Run(keys[start:at], run.stamp, position + start)
                    self._place(piece.keys, piece)
                    if start:
                        self._link(piece, keys[start - 1])
                    else:
                        piece.parent = run.parent
                    self._leaves += 1
                    self._enqueue(piece)
                start = at + 1
            self._keep_rest(run, start)

    def _keep_rest(self, run: Run, start: int) -> None:
        """Leave in ``run`` its keys from ``start`` on; if there are none, the last key if runs behind wait for it."""
        before = run.keys[start - 1]
        run.parent = None
        if start < len(run.keys):
            del run.keys[:start]
            run.position += start
            self._link(run, before)
        elif run.children:
            run.keys = [before]
            run.awaited = True
            self._awaited[before] = run
        else:
            run.keys.clear()
            self._leaves -= 1

    def _release_parent(self, run: Run) -> None:
        """``run`` is leaving its parent, which was used whenever ``run`` was, and may be a leaf now."""
        above = run.parent
        if above is None:
            return
        above.children -= 1
        if above.awaited:
            if not above.children:
                del self._awaited[above.keys[0]]
                above.keys.clear()
            return
        if run.stamp > above.stamp:
            above.stamp = run.stamp
            above.position = run.position - len(above.keys)
        if not above.children:
            self._leaves += 1
            self._enqueue(above)
