"""Everything that can happen to the core. ``now_s`` is monotonic seconds, given by the caller; the core has no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tiering.types import BlockKey, Outcome, ScanEntry, TierState


@dataclass(frozen=True, slots=True)
class StoreRequested:
    """Offer a contiguous run of blocks to the primary tier. Reply: ``StorePlan``.

    ``patient``: the caller will come back, so blocks that are still owed to a working tier are not evicted for it.
    """

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None = None
    patient: bool = False


@dataclass(frozen=True, slots=True)
class StoreFinished:
    """The copy into the granted slots ended; one outcome a grant, in the plan's order. Reply: None."""

    now_s: float
    job: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class ProbeRequested:
    """Ask the tiers about keys whose presence is unknown. Reply: None; verdicts come with ``OpFinished``."""

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """Lease the leading run, promoting what is not in the primary tier. Reply: ``LoadPlan``."""

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """Lease the leading READY run, so that it stays while the caller makes up its mind. Reply: ``LoadPlan``, done.

    Promotes nothing, waits for nothing, and is no query in the counters. ``Released`` ends it.
    """

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class LoadOverdue:
    """The caller of a load waits no longer: the job ends with the leading run that is ready now."""

    now_s: float
    job: int


@dataclass(frozen=True, slots=True)
class Released:
    """The caller is done with a load job (or gives it up, at any state). Its leases end. Reply: None."""

    now_s: float
    job: int


@dataclass(frozen=True, slots=True)
class Touched:
    """A request used this path elsewhere (on the GPU). Reply: None."""

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class OpFinished:
    """A command's outcomes, one an item. The tier touches the lent slots no more."""

    now_s: float
    op: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class OpOverdue:
    """A ``Promote`` or ``Probe`` passed its deadline. Its ``OpFinished`` still comes, later."""

    now_s: float
    op: int


@dataclass(frozen=True, slots=True)
class TierScanned:
    """What an exclusive tier holds, found at open, least recently used first. Any number of batches, before UP."""

    now_s: float
    tier: str
    entries: Sequence[ScanEntry]


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The driver's verdict on a tier. Leaving DEGRADED or DOWN for UP offers again what is owed."""

    now_s: float
    tier: str
    state: TierState


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """Offer everything owed. Reply: the flush job; ``FlushDone`` follows (at once, in the commands, if nothing is owed)."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FlushOverdue:
    """The flush's deadline passed: it ends now, what is unacknowledged counts as lost."""

    now_s: float
    job: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The weights changed: everything misses from now on; fills in flight are doomed. Tiers become OPENING."""

    now_s: float


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """The caller holds these blocks elsewhere until ``HoldReleased``. Reply: the hold's number.

    ``stepped``: the caller asks by itself (``RestoreStep``) and is not told by ``RestoreDue``.
    """

    now_s: float
    pool: int
    keys: tuple[BlockKey, ...]
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class HoldExtended:
    """The run that is held goes on with these blocks. Reply: None."""

    now_s: float
    hold: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class HoldTrimmed:
    """The first ``below`` blocks of the run are held no more: they left a sliding window. Reply: None."""

    now_s: float
    hold: int
    below: int


@dataclass(frozen=True, slots=True)
class HoldReleased:
    now_s: float
    hold: int


@dataclass(frozen=True, slots=True)
class RestoreRequested:
    """Grant slots for held blocks that the primary tier lost, worth most first. Reply: ``StorePlan`` (keys of the hold)."""

    now_s: float
    hold: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """Grant slots for what is due in these stepped holds (None: in all), ranked together. Reply: ``RestorePlan``.

    ``ranked``: worth most first, and never at the cost of a block worth as much. Otherwise in the holds' order, evicting
    as a store would.
    """

    now_s: float
    holds: tuple[int, ...] | None
    bytes_max: int
    ranked: bool = True


Event: TypeAlias = (
    StoreRequested | StoreFinished | ProbeRequested | LoadRequested | LeaseRequested | LoadOverdue | Released | Touched
    | OpFinished | OpOverdue | TierScanned | TierChanged | FlushRequested | FlushOverdue | Reset | HoldRequested
    | HoldExtended | HoldTrimmed | HoldReleased | RestoreRequested | RestoreStep
)  # fmt: skip


class Grant(NamedTuple):
    """A slot to fill for ``keys[index]`` of the request."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    key: BlockKey
    slot: int


@dataclass(frozen=True, slots=True)
class StorePlan:
    """``grants`` are to be filled and reported with ``StoreFinished(job)``; ``job`` is 0 when there are none.

    ``present`` counts keys READY or on their way. ``refused`` is why the keys from ``stop`` on got nothing ("" when all
    did); ``retry``: a ``SlotsFreed`` command will say when asking again may help.
    """

    job: int
    grants: tuple[Grant, ...]
    present: tuple[int, ...]
    stop: int
    refused: str = ""
    retry: bool = False


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``slots`` holds the leased slots of the leading run that is ready now; ``done`` means that no more will come.

    Otherwise ``JobDone`` follows, and ``TieringCore.job_slots`` tells the whole lease.
    """

    job: int
    done: bool
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A ``StorePlan`` for each hold that got slots: its grants' ``index`` is the position in the hold's run."""

    plans: tuple[tuple[int, StorePlan], ...] = ()
    """(hold, plan)."""
    skipped: str = ""
    """Why something due got nothing ("budget" or "no_slot"); "" when all did."""
