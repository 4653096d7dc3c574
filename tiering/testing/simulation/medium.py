"""What a tier's disk or server keeps: blocks under seals, by namespace, and the damage that they take."""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tiering.core.state import TierSpec
from tiering.testing.simulation.contents import GARBAGE, HALF_BYTES
from tiering.testing.simulation.injection import Injector
from tiering.types import BlockKey, Outcome, ScanEntry

OUT_OF_MEMORY: Final = "out of memory"
SYNC_S: Final = 0.5
"""What a power loss may undo: the writes and deletes of so many last seconds."""

Name: TypeAlias = tuple[str, BlockKey]
"""A block on the medium: (epoch, key)."""

Outage: TypeAlias = Literal["refuses", "hangs"]


@dataclass(slots=True)
class Stored:
    payload: bytes
    seal: int
    stored_bytes: int
    parent: BlockKey | None
    since_s: float


def seal_of(name: Name, payload: bytes) -> int:
    epoch, key = name
    return zlib.crc32(epoch.encode() + b"\0" + key + payload)


def handle_of(name: Name) -> bytes:
    """How a scan names a block of another namespace."""
    epoch, key = name
    return hashlib.sha256(epoch.encode()).digest() + key


class Medium:
    """Outlives processes if the tier is persistent. One process at a time uses it; strangers use shared ones too.

    A shared server holds ``server_blocks_max`` blocks and then evicts the oldest, or refuses (``server_evicts``).
    """

    def __init__(self, spec: TierSpec, inject: Injector, server_blocks_max: int, *, server_evicts: bool) -> None:
        self.spec = spec
        self.outage: Outage | None = None
        self.full = False
        self.kept: OrderedDict[Name, Stored] = OrderedDict()
        """Least recently stored first."""
        self.waiting: list[Callable[[], None]] = []
        """Calls that hang until the outage is over."""
        self.trap: Callable[[], None] | None = None
        """Goes off when the next store starts: faults that are to hit a store under way."""
        self._inject = inject
        self._server_blocks_max = server_blocks_max
        self._server_evicts = server_evicts
        self._writing: list[tuple[Name, int]] = []
        """Room taken by stores under way, and their bytes."""
        self._removed: list[tuple[float, Name, Stored]] = []
        """Deletes that a power loss may undo."""
        self._foreign: dict[bytes, Name] = {}

    @property
    def shared(self) -> bool:
        return self.spec.capabilities.shared

    def occupied_bytes(self) -> int:
        """All that is there or being written: what the capacity bounds."""
        news = {name: size for name, size in self._writing if name not in self.kept}
        return sum(stored.stored_bytes for stored in self.kept.values()) + sum(news.values())

    # -- what calls do

    def contains(self, name: Name) -> Outcome:
        there = name in self.kept
        if there and self.shared and self._inject.strikes("missing_though_there"):
            return Outcome.MISSING
        return Outcome.OK if there else Outcome.MISSING

    def load(self, name: Name) -> tuple[Outcome, bytes]:
        """The outcome, and what a reader finds in its buffer: the block if OK, garbage else."""
        if self._inject.strikes("item_failed"):
            return Outcome.failed("injected: EIO"), GARBAGE
        if not self.contains(name).ok:
            return Outcome.MISSING, GARBAGE
        stored = self.kept[name]
        if stored.seal == seal_of(name, stored.payload):
            return Outcome.OK, stored.payload
        if not self.spec.capabilities.can_delete or self._inject.dice.random() < 0.5:
            del self.kept[name]
        return Outcome.corrupt("checksum"), stored.payload

    def start_store(self, name: Name, stored_bytes: int) -> None:
        self._writing.append((name, stored_bytes))
        trap, self.trap = self.trap, None
        if trap is not None:
            trap()

    def end_store(self, name: Name, stored_bytes: int) -> None:
        """The store was not done, or will be done in this very step."""
        self._writing.remove((name, stored_bytes))

    def store(self, name: Name, block: Stored) -> Outcome:
        """Keep the block, or not."""
        if self.full and not self.shared:
            return Outcome.failed("injected: ENOSPC")
        if self._inject.strikes("item_failed"):
            if self._inject.strikes("done_in_the_dark"):
                self.put(name, block)
            return Outcome.failed("injected: EIO")
        if self.shared and name not in self.kept:
            crowded = len(self.kept) >= self._server_blocks_max
            if (crowded and not self._server_evicts) or self.full or self._inject.strikes("refused"):
                return Outcome.refused(OUT_OF_MEMORY)
        if self._inject.strikes("write_lost"):
            return Outcome.OK
        if self.kept and self._inject.strikes("write_misdirected"):
            other = self._inject.dice.choice(list(self.kept))
            self.kept[other].payload, self.kept[other].seal = block.payload, block.seal
            return Outcome.OK
        self.put(name, block)
        return Outcome.OK

    def put(self, name: Name, block: Stored) -> None:
        self.kept[name] = block
        self.kept.move_to_end(name)
        while self.shared and len(self.kept) > self._server_blocks_max:
            self.kept.popitem(last=False)

    def delete(self, epoch: str, handle: bytes, now_s: float) -> Outcome:
        """``handle``: a key of ``epoch``, or what a scan named a foreign block."""
        name = self._foreign.get(handle, (epoch, handle))
        failed = self._inject.strikes("item_failed")
        if failed and not self._inject.strikes("done_in_the_dark"):
            return Outcome.failed("injected: EIO")
        stored = self.kept.pop(name, None)
        if stored is not None:
            self._removed.append((now_s, name, stored))
        if failed:
            return Outcome.failed("injected: EIO")
        return Outcome.OK if stored is not None else Outcome.MISSING

    def scan(self, epoch: str) -> list[ScanEntry]:
        """All that is there, oldest first. Recovery drops some torn blocks, and may tell of one that is gone."""
        for name in [name for name, stored in self.kept.items() if stored.seal != seal_of(name, stored.payload)]:
            if self._inject.dice.random() < 0.5:
                del self.kept[name]
        entries = []
        self._foreign = {handle_of(name): name for name in self.kept if name[0] != epoch}
        for name, stored in self.kept.items():
            foreign = name[0] != epoch
            handle = handle_of(name) if foreign else name[1]
            entries.append(ScanEntry(handle, stored.stored_bytes, None if foreign else stored.parent, foreign))
        gone = [name for _, name, _ in self._removed if name[0] == epoch and name not in self.kept]
        if gone and self._inject.strikes("index_stale"):
            size = self._removed[-1][2].stored_bytes
            if self.occupied_bytes() + size <= (self.spec.capacity_bytes or 0):
                entries.append(ScanEntry(gone[-1][1], size))
        return entries

    # -- what happens to it

    def recover(self) -> None:
        """The outage is over: calls that hung go on."""
        self.outage = None
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()

    def flip(self, name: Name) -> None:
        """A bit rots."""
        stored = self.kept[name]
        at = self._inject.dice.randrange(len(stored.payload))
        flipped = bytes([stored.payload[at] ^ 1 << self._inject.dice.randrange(8)])
        stored.payload = stored.payload[:at] + flipped + stored.payload[at + 1 :]

    def close(self) -> None:
        """The process that used it is done with it, in order or not."""
        self._writing.clear()
        self.waiting.clear()
        if not self.spec.capabilities.persistent:
            self.kept.clear()
            self._removed.clear()

    def cut_short(self, name: Name, block: Stored) -> None:
        """A store was under way when the process died."""
        if self.shared:  # the server lives on
            if self._inject.dice.random() < 0.5:
                self.put(name, block)
        elif self.spec.capabilities.persistent:
            if self._inject.strikes("torn"):
                block.payload = block.payload[:HALF_BYTES] + GARBAGE[HALF_BYTES:]
                self.put(name, block)
            elif self._inject.dice.random() < 0.5:
                self.put(name, block)

    def lose_power(self, now_s: float) -> None:
        """The machine went down: what was not synced may not have happened."""
        if self.shared:
            return
        for name, stored in list(self.kept.items()):
            if stored.since_s > now_s - SYNC_S and self._inject.strikes("unsynced_lost"):
                del self.kept[name]
        for deleted_s, name, stored in self._removed:
            fits = self.occupied_bytes() + stored.stored_bytes <= (self.spec.capacity_bytes or 0)
            if deleted_s > now_s - SYNC_S and name not in self.kept and fits and self._inject.strikes("delete_undone"):
                self.kept[name] = stored
        self._removed.clear()
