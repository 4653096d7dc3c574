"""Small worlds for tests of the core: specs in few words, and a driver that answers commands by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiering.api import BackendCapabilities, EvictionPolicy
from tiering.core import events as ev
from tiering.core.commands import Command, Delete, Demote, IoCommand, Probe, Promote
from tiering.core.invariants import check
from tiering.core.lookup import LookupResult
from tiering.core.machine import Reply, TieringCore
from tiering.core.state import CoreSpec, DemoteRule, PoolSpec, TierSpec
from tiering.policies.prefix import PrefixPolicy
from tiering.types import Outcome, ScanEntry, TierState

BLOCK_BYTES = 4096
STORED_BYTES = 8192
"""What a block occupies in the tiers made here: a header page and the payload."""

OK, MISSING, CANCELLED = Outcome.OK, Outcome.MISSING, Outcome.CANCELLED
CORRUPT = Outcome.corrupt("checksum")
FAILED = Outcome.failed("EIO")
REFUSED = Outcome.refused("out of memory")

C = TypeVar("C")


def chain(n: int, name: str = "") -> tuple[bytes, ...]:
    """Keys of one prefix, head first."""
    return tuple(f"{name}{i:02}".encode() for i in range(n))


def exclusive(
    name: str = "nvme",
    *,
    room: int | None = 64,
    rule: DemoteRule = "on_store",
    queue: int = 1000,
    batch: int = 8,
    policy: type[EvictionPolicy] = PrefixPolicy,
    value_bytes_max: int | None = None,
) -> TierSpec:
    """A persistent tier that the core knows and bounds; ``room`` and ``queue`` count blocks."""
    caps = BackendCapabilities(
        persistent=True,
        shared=False,
        exclusive=True,
        alignment_bytes=4096,
        header_bytes=4096,
        can_scan=True,
        value_bytes_max=value_bytes_max,
    )
    capacity = None if room is None else room * STORED_BYTES
    return TierSpec(name, caps, capacity, rule, queue * BLOCK_BYTES, batch, policy, BLOCK_BYTES)


def shared(
    name: str = "redis", *, rule: DemoteRule = "on_store", queue: int = 1000, batch: int = 8, can_delete: bool = True
) -> TierSpec:
    """A tier that others use too: lookups must ask."""
    caps = BackendCapabilities(persistent=True, shared=True, exclusive=False, can_delete=can_delete)
    return TierSpec(name, caps, None, rule, queue * BLOCK_BYTES, batch, PrefixPolicy, BLOCK_BYTES)


def spec_of(
    slots: int,
    *tiers: TierSpec,
    reserve: int = 0,
    window: int = 1000,
    policy: type[EvictionPolicy] = PrefixPolicy,
    **more: Any,
) -> CoreSpec:
    """One pool of ``slots``; ``window`` is how many promotions a load may have in flight."""
    pool = PoolSpec(slots, BLOCK_BYTES, 16, reserve, policy)
    return CoreSpec((pool,), tiers, window * BLOCK_BYTES, **more)


def size_of(command: IoCommand) -> int:
    return len(command.items) if isinstance(command, Promote | Demote) else len(command.keys)


@dataclass
class Bench:
    """A core on a bench: every event is followed by a check of the invariants, and its commands are kept."""

    spec: CoreSpec
    up: bool = True
    core: TieringCore = field(init=False)
    inbox: list[Command] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.core = TieringCore(self.spec)
        if self.up:
            for tier in self.spec.tiers:
                self.tier(tier.name, TierState.UP)

    def handle(self, event: ev.Event) -> Reply:
        reply, commands = self.core.handle(event)
        self.inbox += commands
        check(self.core.world)
        return reply

    # -- what callers do

    def store(
        self, keys: Sequence[bytes], parent: bytes | None = None, *, patient: bool = False, pool: int = 0
    ) -> ev.StorePlan:
        plan = self.handle(ev.StoreRequested(self.now_s, pool, tuple(keys), parent, patient))
        assert isinstance(plan, ev.StorePlan)
        return plan

    def filled(self, plan: ev.StorePlan, *outcomes: Outcome) -> None:
        self.handle(ev.StoreFinished(self.now_s, plan.job, outcomes or (OK,) * len(plan.grants)))

    def put(self, keys: Sequence[bytes], parent: bytes | None = None, *, patient: bool = False) -> int:
        """Store and fill; how many were granted."""
        plan = self.store(keys, parent, patient=patient)
        if plan.job:
            self.filled(plan)
        return len(plan.grants)

    def load(self, keys: Sequence[bytes], pool: int = 0) -> ev.LoadPlan:
        plan = self.handle(ev.LoadRequested(self.now_s, pool, tuple(keys)))
        assert isinstance(plan, ev.LoadPlan)
        return plan

    def release(self, job: int) -> None:
        self.handle(ev.Released(self.now_s, job))

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        return self.core.lookup(0, keys, self.now_s)

    def probe(self, keys: Sequence[bytes]) -> None:
        self.handle(ev.ProbeRequested(self.now_s, 0, tuple(keys)))

    def flush(self) -> int:
        job = self.handle(ev.FlushRequested(self.now_s))
        assert isinstance(job, int)
        return job

    def hold(self, keys: Sequence[bytes]) -> int:
        hold = self.handle(ev.HoldRequested(self.now_s, 0, tuple(keys)))
        assert isinstance(hold, int)
        return hold

    def restore(self, hold: int, blocks_max: int = 1000) -> ev.StorePlan:
        plan = self.handle(ev.RestoreRequested(self.now_s, hold, blocks_max * BLOCK_BYTES))
        assert isinstance(plan, ev.StorePlan)
        return plan

    # -- what the driver does

    def tier(self, name: str, state: TierState) -> None:
        self.handle(ev.TierChanged(self.now_s, name, state))

    def scan(self, name: str, *entries: ScanEntry) -> None:
        self.handle(ev.TierScanned(self.now_s, name, entries))

    def take(self, kind: type[C]) -> list[C]:
        """Remove the commands of this kind from the inbox, oldest first."""
        found: list[C] = [command for command in self.inbox if isinstance(command, kind)]
        self.inbox = [command for command in self.inbox if not isinstance(command, kind)]
        return found

    def one(self, kind: type[C]) -> C:
        """The one command of this kind."""
        (command,) = self.take(kind)
        return command

    def answer(self, command: IoCommand, *outcomes: Outcome) -> None:
        """Finish the command: with these outcomes, or one for all, or OK."""
        if len(outcomes) < 2:
            outcomes = (outcomes or (OK,)) * size_of(command)
        self.handle(ev.OpFinished(self.now_s, command.op, outcomes))

    def overdue(self, command: IoCommand) -> None:
        self.handle(ev.OpOverdue(self.now_s, command.op))

    def drain(self, outcome: Outcome = OK) -> None:
        """Answer all commands, and those that follow from them."""
        while io := [c for c in self.inbox if isinstance(c, Probe | Promote | Demote | Delete)]:
            self.inbox = [c for c in self.inbox if c not in io]
            for command in io:
                self.answer(command, outcome)

    # -- what tests look at

    def ready(self) -> set[bytes]:
        owners = [block for pool in self.core.world.pools for block in pool.owner]
        return {block.key for block in owners if block is not None and block.state.name == "READY"}

    def has(self, tier: str) -> set[bytes]:
        """Keys that the core takes for present in the tier."""
        index = self.core.world.tier_index[tier]
        cells = {key: block.cells[index] for key, block in self.core.world.blocks.items()}
        return {key for key, cell in cells.items() if cell is not None and cell.state.name == "PRESENT"}


def far(n: int, spec: CoreSpec, name: str = "", tier: str = "nvme") -> Bench:
    """A bench whose bounded tier holds a chain of ``n`` blocks that the primary tier lacks."""
    bench = Bench(spec, up=False)
    keys = chain(n, name)
    bench.scan(tier, *(ScanEntry(k, STORED_BYTES, p) for k, p in zip(keys, (None, *keys), strict=False)))
    for one in spec.tiers:
        bench.tier(one.name, TierState.UP)
    return bench
