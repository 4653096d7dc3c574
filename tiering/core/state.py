"""The control state: blocks, slots, tiers, jobs. Data only; what may change it stands in the sibling modules.

Each field says its invariant, and ``invariants.check`` checks it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from tiering.api import BackendCapabilities, EvictionPolicy
from tiering.core.commands import Command
from tiering.core.transitions import CellState, PrimaryState, SlotState
from tiering.types import BlockKey, TierState

DemoteRule: TypeAlias = Literal["on_store", "on_evict", "never"] | int
"""An int n means: after n loads."""

PolicyFactory: TypeAlias = Callable[[int], EvictionPolicy]

NEVER_S = float("inf")

_ABSENT = PrimaryState.ABSENT


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Slots of one group in the primary arena."""

    slots: int
    payload_bytes: int
    tokens_per_block: int
    reserve_slots: int
    """Never taken by promotions, so that stores always find room."""
    policy: PolicyFactory


@dataclass(frozen=True, slots=True)
class TierSpec:
    name: str
    capabilities: BackendCapabilities
    capacity_bytes: int | None
    """Exclusive tiers only."""
    demote_rule: DemoteRule
    queue_bytes_max: int
    batch_blocks_max: int
    policy: PolicyFactory
    block_bytes_min: int
    """Smallest payload of the namespace: sizes the policy."""


PRIMARY = -1
"""Stands for the primary tier where a tier's index is asked for."""


class Change(NamedTuple):
    """A block came to a tier, or went from it."""

    tier: int
    """``PRIMARY`` or the tier's index."""
    stored: bool
    pool: int
    key: BlockKey
    parent: BlockKey | None


@dataclass(frozen=True, slots=True)
class CoreSpec:
    pools: tuple[PoolSpec, ...]
    tiers: tuple[TierSpec, ...]
    """Near to far."""
    load_bytes_per_request_max: int
    """Promotions one load job may have in flight."""
    probe_keys_max: int = 65_536
    """Most keys in flight in lookups of one tier."""
    verdict_ttl_s: float = 5.0
    """How long "absent" is believed of a tier that others may fill, or that failed to answer."""
    verdicts_max: int = 262_144
    """Most verdicts remembered of blocks that only tiers beyond our control have, and as many that one lacks."""
    events: bool = False
    """Whether each block's coming and going is noted (``World.changes``)."""
    restore: bool = True
    restore_pause_s: float = 0.05
    """After a restore whose copy failed, or that found no slot, its hold is not told again before this."""


class Cell:
    """One key in one secondary tier."""

    __slots__ = ("generation", "reads", "state", "stored_bytes", "until_s")

    def __init__(self, state: CellState) -> None:
        self.state = state
        self.reads = 0
        """Loads in flight: items of promote ops of this epoch. No delete is asked while it is above 0."""
        self.generation = 0
        """Counts verdict changes; an answer to an older question changes nothing."""
        self.stored_bytes = 0
        """Bytes of a bounded tier's budget this block occupies, or may; 0 in other tiers. While it is above 0 the key
        is in just one of: the tier's ``policy``, ``unvouched``, state DELETING."""
        self.until_s = NEVER_S
        """When ABSENT expires; NEVER_S in any other state."""


_NO_CELLS: list[Cell | None] = []
"""Of all blocks, where there are no secondary tiers."""


class Block:
    """One key, known to some tier or asked for lately."""

    __slots__ = ("cells", "children", "copies", "hits", "key", "parent", "pool", "slot", "state")

    def __init__(self, key: BlockKey, pool: int, tiers: int) -> None:
        self.key = key
        self.pool = pool
        """Where its slot is, while it has one."""
        self.parent: BlockKey | None = None
        self.state = _ABSENT
        self.slot = -1
        """The slot whose owner this is while FILLING or READY; else -1. A slot is not used again before the fill it was
        granted for has landed, so that a completion knows by its slot whether it is still wanted."""
        self.hits = 0
        """Loads since it became known; counted only where some tier's rule asks for it."""
        self.copies = 0
        """1 if FILLING or READY, plus 1 for each tier where it is PRESENT."""
        self.children = 0
        """Blocks with ``copies > 0`` whose parent this is: evicting the last copy of this one would orphan them."""
        self.cells: list[Cell | None] = [None] * tiers if tiers else _NO_CELLS
        """One a tier. None: the tier's default verdict."""


class Pool:
    """The slots of one group. ``loads`` and ``demotes`` count users of a slot; they outlive the key's interest in it."""

    __slots__ = ("busy", "demotes", "free", "holes", "index", "loads", "owner", "policy", "spec", "states")

    def __init__(self, index: int, spec: PoolSpec) -> None:
        self.index = index
        self.spec = spec
        self.free = list(range(spec.slots - 1, -1, -1))
        """Slots in state FREE, each once; taken from the end, lowest number first at the start."""
        self.states = [SlotState.FREE] * spec.slots
        """FILLING: an item of one store job or promote op. DOOMED: the same, its key given up. CONDEMNED: in use."""
        self.loads = [0] * spec.slots
        """Leases of load jobs, a slot. HELD and CONDEMNED slots only."""
        self.demotes = [0] * spec.slots
        """Items of demote ops, a slot. HELD and CONDEMNED slots only."""
        self.owner: list[Block | None] = [None] * spec.slots
        """The block of a FILLING or HELD slot, whose ``slot`` it is; None for the others."""
        self.busy = 0
        """Slots that are neither FREE nor HELD-and-unused. Equals the count over ``states``."""
        self.policy = spec.policy(spec.slots)
        """Knows just the READY blocks."""
        self.holes = 0
        """Blocks of this pool that no tier is known to have though one right behind them is there: ``children`` without
        ``copies``."""


class Tier:
    """A secondary tier as the core sees it."""

    __slots__ = (
        "asking", "authoritative", "deletes_after_s", "deleting_bytes", "foreign", "index", "lent_bytes", "owed", "parked",
        "policy", "room_bytes", "spec", "state", "unvouched", "used_bytes",
    )  # fmt: skip

    def __init__(self, index: int, spec: TierSpec) -> None:
        self.index = index
        self.spec = spec
        self.state = TierState.OPENING
        caps = spec.capabilities
        self.authoritative = not caps.shared and (caps.can_scan or not caps.persistent)
        """The core knows all the tier holds: what is not known to be there is not there."""
        self.room_bytes: int | None = None
        """Bytes for blocks of an exclusive tier; None: unbounded by us."""
        if caps.exclusive and spec.capacity_bytes is not None:
            self.room_bytes = max(0, spec.capacity_bytes - caps.overhead_bytes)
        self.used_bytes = 0
        """Sum of ``Cell.stored_bytes``, ``foreign`` and foreign blocks leaving: above ``room_bytes`` only if a scan found more."""
        self.deleting_bytes = 0
        """Of ``used_bytes``, what deletes in flight will give back."""
        self.deletes_after_s = -NEVER_S
        """No deletes for room before this: the last ones failed."""
        self.lent_bytes = 0
        """Payload bytes of primary slots lent to demote ops in flight: at most ``queue_bytes_max``, or one block."""
        self.asking = 0
        """Keys in flight in probes."""
        self.owed: OrderedDict[BlockKey, None] = OrderedDict()
        """READY blocks to demote, in order of offer."""
        self.parked: OrderedDict[BlockKey, str] = OrderedDict()
        """READY blocks whose demotion failed or was refused (why); offered again as others succeed. Disjoint from ``owed``."""
        self.foreign: OrderedDict[bytes, int] = OrderedDict()
        """Blocks of other namespaces and their bytes, oldest first: evicted before ours."""
        self.unvouched: OrderedDict[BlockKey, bool] = OrderedDict()
        """Blocks with ``stored_bytes`` that may not be there. False: a first store is in flight; True: one, or a delete, failed."""
        per_block = max(1, caps.stored_bytes(spec.block_bytes_min))
        size = spec.batch_blocks_max if self.room_bytes is None else max(1, self.room_bytes // per_block)
        self.policy: EvictionPolicy | None = spec.policy(size) if self.room_bytes is not None else None
        """Knows the blocks with ``stored_bytes`` that are neither DELETING nor unvouched."""

    @property
    def readable(self) -> bool:
        return self.state is TierState.UP or self.state is TierState.DEGRADED

    @property
    def writable(self) -> bool:
        return self.state is TierState.UP


@dataclass(slots=True, eq=False)
class StoreJob:
    """Slots granted to a caller who fills them."""

    job: int
    pool: int
    blocks: list[Block]
    slots: list[int]
    """One a block."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """A leading run wanted in the primary tier, leased as it becomes READY."""

    job: int
    pool: int
    keys: tuple[BlockKey, ...]
    limit: int
    """Positions from here on are given up. Only ever lowered."""
    protect: int
    """Own positions below it are never victims of this job (the m of DESIGN section 7)."""
    tail: int
    """Own positions from here on are victims no more: they were taken, or not to be had."""
    slots: list[int]
    """Slot a position below ``cursor``; -1 while it is awaited. The others are leased."""
    position: dict[BlockKey, int] = field(default_factory=dict)
    """Where each key stands; empty if all was READY at once."""
    own: Container[BlockKey] = ()
    """The keys at positions below ``protect``; empty if all was READY at once."""
    cursor: int = 0
    """Next position to look at. Everything before it is leased or awaited."""
    scanned: int = 0
    """Where looking ahead stopped: positions in ``cursor..scanned`` are READY, FILLING or promotable."""
    sources: dict[int, int] = field(default_factory=dict)
    """Tier index of the positions whose bytes a promotion brought for this job; the others were in the primary tier."""
    pending: int = 0
    """Awaited positions below ``limit``: the job is in ``World.waiting`` of each."""
    flight_bytes: int = 0
    """Payload bytes of promotions this job started and that are in flight."""
    done: bool = False
    """All below ``limit`` is leased, or the caller gave up."""
    announced: bool = False
    """The plan went out unfinished: the end is told by ``JobDone``."""


@dataclass(slots=True, eq=False)
class Op:
    """A command in flight."""

    op: int
    kind: Literal["probe", "promote", "demote", "delete"]
    tier: int
    epoch: int
    """The world's when it began; after a reset its completion only frees resources."""
    items: list[tuple[Block, int, int]]
    """(block, slot or -1, cell generation)."""
    handles: tuple[bytes, ...] = ()
    """Foreign blocks of a delete, after ``items``."""
    starter: LoadJob | None = None
    cancelled: bool = False
    """A ``Cancel`` is out for it."""


@dataclass(slots=True, eq=False)
class FlushJob:
    job: int
    remaining: set[tuple[int, BlockKey]]
    """(tier, key) that are owed to a writable tier or in a demote op."""
    acknowledged: int = 0
    lost: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Hold:
    """Blocks that a caller keeps elsewhere and would copy again."""

    hold: int
    pool: int
    stepped: bool = False
    """The caller asks by itself in each of its steps: it is not told."""
    keys: list[BlockKey] = field(default_factory=list)
    """The run, from its beginning."""
    position: dict[BlockKey, int] = field(default_factory=dict)
    """Where each key that is held stands first in the run."""
    first: int = 0
    """Positions below are held no more."""
    epoch: int = 0
    """The world's when it was made: a reset ends it."""
    due: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)
    """Held keys that the primary tier lost (ABSENT, or FILLING again), waiting for a restore."""
    notified: bool = False
    """A ``RestoreDue`` is out and not yet answered."""
    rests_until_s: float = -NEVER_S
    """A copy failed: no ``RestoreDue`` before this."""
    looks_again_s: float = -NEVER_S
    """A restore found no slot: no ``RestoreDue`` before this unless a slot is free."""


@dataclass(slots=True)
class Counters:
    """Monotonic. ``queries == hits + misses`` and the like are checked by ``invariants``."""

    query_blocks: int = 0
    """Equals ``hit_blocks + miss_blocks`` and the keys of load jobs that are not done."""
    hit_blocks: int = 0
    """Equals the sum of ``hit_blocks_by_tier``."""
    miss_blocks: int = 0
    hit_blocks_by_tier: dict[str, int] = field(default_factory=dict)
    stored_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    failed_fills: int = 0
    evicted_blocks: int = 0
    promoted_blocks: int = 0
    promote_failures: int = 0
    """At least ``corrupt_blocks + missing_blocks``."""
    corrupt_blocks: int = 0
    missing_blocks: int = 0
    demoted_blocks: int = 0
    demote_failures: int = 0
    demote_deferred: int = 0
    """Blocks whose demotion found its lane full or its tier unable, and which stayed owed."""
    demote_lost: int = 0
    """Owed blocks that left the primary tier before the tier had them."""
    tier_evicted_blocks: int = 0
    doomed_slots: int = 0
    condemned_slots: int = 0
    stale_completions: int = 0
    unknown_completions: int = 0
    restored_blocks: int = 0
    restore_bytes: int = 0
    restore_skipped: dict[str, int] = field(default_factory=dict)
    restore_examined: int = 0
    """Keys looked at to find out what to re-store: grows with what is lost, not with what is held."""
    probes: int = 0
    resets: int = 0


class World:
    """All control state of one manager."""

    def __init__(self, spec: CoreSpec) -> None:
        self.spec = spec
        self.blocks: dict[BlockKey, Block] = {}
        """No record stays that says no more than the default."""
        self.pools = [Pool(i, p) for i, p in enumerate(spec.pools)]
        self.tiers = [Tier(i, t) for i, t in enumerate(spec.tiers)]
        self.tier_index = {t.name: i for i, t in enumerate(spec.tiers)}
        self.remote_tiers = tuple(t.index for t in self.tiers if not t.authoritative and t.room_bytes is None)
        """Tiers that may drop blocks without a word."""
        self.counts_hits = any(isinstance(t.demote_rule, int) for t in spec.tiers)
        self.ops: dict[int, Op] = {}
        self.stores: dict[int, StoreJob] = {}
        self.loads: dict[int, LoadJob] = {}
        """Until they are released."""
        self.waiting: dict[BlockKey, list[LoadJob]] = {}
        """Load jobs that wait for the fill of a FILLING block; no empty lists."""
        self.starved: dict[int, LoadJob] = {}
        """Load jobs that found no slot but may when something in flight lands."""
        self.flushes: dict[int, FlushJob] = {}
        self.holds: dict[int, Hold] = {}
        self.holders: dict[BlockKey, list[Hold]] = {}
        """The holds of each held key since the last reset."""
        self.due_steps: dict[int, Hold] = {}
        """Stepped holds that may have something due: all that have are among them."""
        self.foreign_leaving: dict[tuple[int, bytes], int] = {}
        """(tier, handle) of foreign blocks whose delete is in flight, and their bytes."""
        self.epoch = 0
        """Counts resets."""
        self.retry_wanted = False
        """Some caller was told to come back: say ``SlotsFreed`` at the next chance."""
        self.expiring: deque[tuple[float, BlockKey]] = deque()
        """Negative verdicts in order of their end, so that their records do not stay for ever: at most ``verdicts_max``."""
        self.remote: deque[BlockKey] = deque()
        """Blocks found, or left by the primary tier, with a copy in a tier we do not control: oldest first, at most ``verdicts_max``."""
        self.last_id = 0
        self.now_s = 0.0
        self.commands: list[Command] = []
        self.counters = Counters()
        self.changes: list[Change] | None = [] if spec.events else None
        """What came and went since ``TieringCore.take_changes``; None if nobody wants to know."""

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id
