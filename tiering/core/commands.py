"""What the core asks of the driver. Each command is a batch for one tier; its outcomes return as ``OpFinished``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tiering.types import BlockKey


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block to move between a slot of the primary arena and a tier."""

    key: BlockKey
    pool: int
    slot: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the tier which keys it has: OK or MISSING each."""

    op: int
    tier: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """Fill the slots from the tier. The slots are lent to the operation until its ``OpFinished``."""

    op: int
    tier: str
    items: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Demote:
    """Store the slots' blocks in the tier. ``parents`` holds the chain links that are known."""

    op: int
    tier: str
    items: tuple[Transfer, ...]
    parents: Mapping[BlockKey, BlockKey]


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove blocks (or foreign blocks, by handle) from an exclusive tier, or a corrupt one from any tier."""

    op: int
    tier: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants ``op`` any more: if it is still queued, drop it and report CANCELLED; if it runs, let it land."""

    op: int
    tier: str


@dataclass(frozen=True, slots=True)
class Touch:
    """Advice for the tier's own record of recency; no outcome is reported."""

    tier: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class JobDone:
    """A load job reached its end: ``blocks`` leading blocks are leased to it (whatever was asked beyond is not)."""

    job: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FlushDone:
    """A flush has nothing left to wait for."""

    job: int
    acknowledged: int
    lost_by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RestoreDue:
    """Blocks of this hold left the primary tier; ``RestoreRequested`` will grant slots for them if it can."""

    hold: int


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """Slots or demotion credit came free while a caller was told to come back (``StorePlan.retry``)."""


Command: TypeAlias = Probe | Promote | Demote | Delete | Cancel | Touch | JobDone | FlushDone | RestoreDue | SlotsFreed
IoCommand: TypeAlias = Probe | Promote | Demote | Delete
