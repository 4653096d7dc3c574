"""Slow, plain reference models of the eviction policies: lists and recomputation, nothing shared with the package.

``NaivePrefix`` looks at the whole forest at every step; ``NaiveARC`` and ``paper_arc_hits`` are written from cases I-IV
of Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST'03, figure 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Protected = Callable[[bytes], bool]


class Policy(Protocol):
    """What a replay needs; the references and the policies under test both have it."""

    def admit(self, keys: Sequence[bytes], parent: bytes | None) -> None: ...
    def touch(self, path: Sequence[bytes]) -> None: ...
    def victims(self, n: int, protected: Protected) -> list[bytes]: ...
    def forget(self, keys: Sequence[bytes], *, evicted: bool) -> None: ...
    def __len__(self) -> int: ...


class NaiveLRU:
    """A list, least recent first."""

    def __init__(self) -> None:
        self.order: list[bytes] = []

    def admit(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        for key in keys:
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    def touch(self, path: Sequence[bytes]) -> None:
        for key in path:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def victims(self, n: int, protected: Protected) -> list[bytes]:
        return [key for key in self.order if not protected(key)][: max(n, 0)]

    def forget(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        self.order = [key for key in self.order if key not in set(keys)]

    def __len__(self) -> int:
        return len(self.order)


class NaivePrefix:
    """Leaf first by definition: leaves, recency and order are worked out anew for every victim.

    ``depth`` tells how deep in its prefix a key stands: the models know it, the policies under test are not told.
    """

    def __init__(self, depth: Callable[[bytes], int]) -> None:
        self.depth = depth
        self.used: dict[bytes, int] = {}
        self.parent: dict[bytes, bytes | None] = {}
        self.calls = 0

    def admit(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        self.calls += 1
        for key, above in zip(keys, [parent, *keys], strict=False):
            if self.parent.get(key) is None:
                self.parent[key] = above
            self.used[key] = self.calls

    def touch(self, path: Sequence[bytes]) -> None:
        self.calls += 1
        for key in path:
            if key in self.used:
                self.used[key] = self.calls

    def recency(self, key: bytes) -> int:
        """A block is as recent as the most recent block behind it."""
        return max([self.used[key], *(self.recency(child) for child in self.children(key))])

    def children(self, key: bytes) -> list[bytes]:
        return [child for child in self.used if self.parent[child] == key]

    def victims(self, n: int, protected: Protected) -> list[bytes]:
        left = NaivePrefix(self.depth)
        left.used, left.parent = dict(self.used), dict(self.parent)
        named: list[bytes] = []
        while len(named) < n:
            inner = {left.parent[key] for key in left.used}
            leaves = [key for key in left.used if key not in inner and not protected(key)]
            if not leaves:
                break
            named.append(min(leaves, key=lambda key: (left.recency_of_leaf(key), -self.depth(key))))
            left.forget(named[-1:], evicted=True)
        return named

    def recency_of_leaf(self, key: bytes) -> int:
        return self.used[key]

    def forget(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        for key in keys:
            if key in self.used:
                above = self.parent[key]
                if above in self.used and above is not None:
                    self.used[above] = max(self.used[above], self.recency(key))
                del self.used[key], self.parent[key]

    def __len__(self) -> int:
        return len(self.used)


class NaiveARC:
    """ARC on lists (least recent first), for callers that make room before they tell which key was missed."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def admit(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        for x in keys:
            if x in self.t1 + self.t2:  # case I
                self.touch([x])
            elif x in self.b1:  # case II
                self.p = min(self.c, self.p + (1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)))
                self.b1.remove(x)
                self.t2.append(x)
            elif x in self.b2:  # case III
                self.p = max(0, self.p - (1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)))
                self.b2.remove(x)
                self.t2.append(x)
            else:  # case IV
                if len(self.t1) + len(self.b1) >= self.c and self.b1:
                    del self.b1[0]
                elif len(self.t1 + self.t2 + self.b1 + self.b2) >= 2 * self.c and self.b2:
                    del self.b2[0]
                self.t1.append(x)
        while len(self.b1) + len(self.b2) > self.c:  # only after losses, which the paper does not have
            del (self.b2 or self.b1)[0]

    def touch(self, path: Sequence[bytes]) -> None:
        for x in path:
            for resident in (self.t1, self.t2):
                if x in resident:
                    resident.remove(x)
                    self.t2.append(x)
                    break

    def victims(self, n: int, protected: Protected) -> list[bytes]:
        t1, t2, named = list(self.t1), list(self.t2), []
        for _ in range(n):  # REPLACE
            from_t1 = [x for x in t1 if not protected(x)]
            from_t2 = [x for x in t2 if not protected(x)]
            if from_t1 and (len(t1) > self.p or not from_t2):
                named.append(from_t1[0])
                t1.remove(from_t1[0])
            elif from_t2:
                named.append(from_t2[0])
                t2.remove(from_t2[0])
        return named

    def forget(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        for x in keys:
            for resident, ghosts in ((self.t1, self.b1), (self.t2, self.b2)):
                if x in resident:
                    resident.remove(x)
                    if evicted:
                        ghosts.append(x)

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)


def paper_arc_hits(requests: Sequence[bytes], c: int) -> int:
    """Hits of the paper's algorithm, word for word: the missing key is known when room is made for it."""
    t1: list[bytes] = []
    t2: list[bytes] = []
    b1: list[bytes] = []
    b2: list[bytes] = []
    p, hits = 0.0, 0

    def replace(x: bytes) -> None:
        if t1 and ((x in b2 and len(t1) == p) or len(t1) > p):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in requests:
        if x in t1 or x in t2:  # case I
            hits += 1
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            p = min(c, p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            p = max(0, p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    del b1[0]
                    replace(x)
                else:
                    del t1[0]
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    del b2[0]
                replace(x)
            t1.append(x)
    return hits
