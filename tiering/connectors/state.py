"""What the scheduler's half remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tiering.connectors.geometry import Geometry
from tiering.connectors.requests import EngineRequest, RequestLimits
from tiering.errors import ShapeError
from tiering.types import BlockKey


@dataclass(slots=True)
class GroupState:
    """One group's part of a request."""

    keys: list[BlockKey] = field(default_factory=list)
    """Of all full blocks whose tokens are confirmed."""
    table: Sequence[int] = ()
    """The engine's blocks, as of the last allocation."""
    cursor: int = 0
    """Blocks below it were looked at: stored, found present, or handed to the hold. Moves forward only, until the GPU
    blocks are gone."""
    hold: int = 0
    """The hold of the blocks below ``cursor``; 0 if there is none."""
    held_from: int = 0
    """Blocks below it left a sliding window, and are held no more."""


@dataclass(slots=True)
class RequestState:
    request: EngineRequest
    limits: RequestLimits
    groups: list[GroupState]
    confirmed_tokens: int = 0
    """Tokens whose KV the GPU blocks hold once the last step that was scheduled has run."""
    settled_tokens: int = 0
    """Until ``confirmed_tokens`` reaches it there is no block to store that was not looked at."""
    hashes_seen: int = 0
    """Of the request's ``block_hashes``, those that are in the keys."""
    computed_tokens: int = 0
    """What the engine had when it asked for a match."""
    in_step: bool = False
    """The load that was reported last is to happen inside the step."""
    leases: list[int] = field(default_factory=list)
    """Load jobs of the READY blocks that were reported last; given back at the end of the step."""
    asked_until_s: float | None = None
    """Until then "ask again" is an answer."""
    counted: bool = False
    """Its query is in the statistics, and the path was touched."""
    stale: bool = False
    """Its GPU blocks hold KV of weights that are used no more, and what it computes builds on that: nothing is stored until
    it has lost them."""
    preempted: bool = False
    """It has lost its GPU blocks before."""
    loads_failed: bool = False
    """A copy to the GPU failed: another try would find the same blocks and may fail for ever."""

    @staticmethod
    def of(request: EngineRequest, limits: RequestLimits, geometry: Geometry) -> RequestState:
        return RequestState(request, limits, [GroupState() for _ in geometry.groups])

    def extend_keys(self, geometry: Geometry) -> None:
        """Take in the blocks that the request has completed since."""
        hashes = self.request.block_hashes
        if len(hashes) == self.hashes_seen:
            return
        self.hashes_seen = len(hashes)
        for group, part in zip(geometry.groups, self.groups, strict=True):
            geometry.extend_keys(part.keys, group, hashes)

    def set_tables(self, block_ids: Sequence[Sequence[int]]) -> None:
        if len(block_ids) != len(self.groups):
            raise ShapeError(f"block_ids: {len(block_ids)} tables for {len(self.groups)} groups")
        for index, part in enumerate(self.groups):
            part.table = block_ids[index]

    def lost_blocks(self) -> list[int]:
        """The GPU blocks are gone: lists and cursors start again. Returns the holds that end with them."""
        holds = [part.hold for part in self.groups if part.hold]
        for part in self.groups:
            part.table, part.cursor, part.hold, part.held_from = (), 0, 0, 0
        self.confirmed_tokens = self.settled_tokens = 0
        return holds

    def detached(self, geometry: Geometry) -> RequestState:
        """Its blocks, keys, cursors and holds as a state of their own; this one starts again without blocks."""
        old = replace(self)
        self.groups = [GroupState() for _ in geometry.groups]
        self.confirmed_tokens = self.settled_tokens = self.hashes_seen = 0
        self.stale = False
        old.leases = []
        return old
