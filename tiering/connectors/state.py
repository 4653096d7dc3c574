"""What the scheduler's half remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiering.connectors.geometry import Geometry
from tiering.connectors.requests import EngineRequest, RequestLimits
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


@dataclass(slots=True)
class RequestState:
    request: EngineRequest
    limits: RequestLimits
    groups: list[GroupState]
    confirmed_tokens: int = 0
    """Tokens whose KV the GPU blocks hold once the last step that was scheduled has run."""
    computed_tokens: int = 0
    """Of them, what the engine had when it asked for a match."""
    in_step: bool = False
    """The load that was reported last is to happen inside the step."""
    leases: list[int] = field(default_factory=list)
    """Load jobs of the READY blocks that were reported last; given back at the end of the step."""
    asked_until_s: float | None = None
    """Until then "ask again" is an answer."""
    counted: bool = False
    """Its query is in the statistics, and the path was touched."""
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
        for group, part in zip(geometry.groups, self.groups, strict=True):
            geometry.extend_keys(part.keys, group, hashes)

    def set_tables(self, block_ids: Sequence[Sequence[int]]) -> None:
        for part, ids in zip(self.groups, block_ids, strict=True):
            part.table = ids

    def lost_blocks(self) -> list[int]:
        """The GPU blocks are gone: lists and cursors start again. Returns the holds that end with them."""
        holds = [part.hold for part in self.groups if part.hold]
        for part in self.groups:
            part.table, part.cursor, part.hold = (), 0, 0
        self.confirmed_tokens = 0
        return holds
