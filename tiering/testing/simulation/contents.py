"""Bytes: what each block must hold, and the arena that holds them. Eight bytes stand for a block's payload.

A copy takes time. It reads the first half of a block when it starts and the second when it ends, and what it fills is
garbage in between; so a slot that changes hands too early shows in the bytes.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tiering.core.state import PoolSpec
from tiering.testing.simulation.agenda import SimulationFailure
from tiering.types import BlockKey

HALF_BYTES: Final = 4
GARBAGE: Final = b"\xde\xad\xbe\xef" * 2

Place = tuple[int, int]
"""(pool, slot)."""


@functools.lru_cache(maxsize=1 << 16)
def content(epoch: str, key: BlockKey) -> bytes:
    """The one right content of a block: that which the weights of ``epoch`` give it."""
    return hashlib.blake2b(key, digest_size=2 * HALF_BYTES, key=epoch.encode(), person=b"block").digest()


class Arena:
    """The primary tier's slots, and a ledger of who touches each: kept here, independently of the core's own counts."""

    def __init__(self, pools: Iterable[PoolSpec]) -> None:
        specs = tuple(pools)
        self.payload_bytes = tuple(spec.payload_bytes for spec in specs)
        """Nominal size of a block, a pool."""
        self._bytes = [[GARBAGE] * spec.slots for spec in specs]
        self._writers: dict[Place, str] = {}
        self._readers: Counter[Place] = Counter()

    def read(self, place: Place) -> bytes:
        pool, slot = place
        return self._bytes[pool][slot]

    def write(self, place: Place, payload: bytes) -> None:
        pool, slot = place
        self._bytes[pool][slot] = payload

    def write_half(self, place: Place, payload: bytes) -> None:
        """A copy has got half-way."""
        self.write(place, payload[:HALF_BYTES] + GARBAGE[HALF_BYTES:])

    def start_write(self, place: Place, who: str) -> None:
        """From now on ``who`` may write the slot at any time. Raises ``SimulationFailure`` if anybody touches it."""
        if place in self._writers or self._readers[place]:
            others = self._writers.get(place) or f"{self._readers[place]} readers"
            raise SimulationFailure(f"slot {place} is given to {who} while it is lent to {others}")
        self._writers[place] = who

    def end_write(self, place: Place) -> None:
        del self._writers[place]

    def start_read(self, place: Place, who: str) -> None:
        """From now on ``who`` may read the slot at any time. Raises ``SimulationFailure`` if it is being written."""
        if place in self._writers:
            raise SimulationFailure(f"slot {place} is lent to {who} while {self._writers[place]} fills it")
        self._readers[place] += 1

    def end_read(self, place: Place) -> None:
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]

    def in_use(self) -> list[Place]:
        return sorted({*self._writers, *self._readers})
