"""What an onlooker knows who sees events and commands only, and what it therefore objects to.

It keeps its own books: which slots are lent, what each tier has said, what is in flight. Each rule names the fault that
it is about. Nothing here is taken from the core's state, except where a rule compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tiering.core import events as ev
from tiering.core.commands import Cancel, Command, Delete, Demote, IoCommand, JobDone, Probe, Promote, Touch
from tiering.core.machine import Reply, TieringCore
from tiering.core.stores import NO_SLOT
from tiering.core.transitions import PrimaryState, SlotState
from tiering.testing.simulation.agenda import SimulationFailure
from tiering.testing.simulation.contents import Arena, Place, content
from tiering.types import BlockKey, Outcome, OutcomeCode, TierState

ITEMS_PER_BLOCK_MAX: Final = 10
"""Blocks in commands, for each that a caller named or a tier told of: more is a storm. Sound runs stay below 2."""

At: TypeAlias = tuple[str, BlockKey]
"""(tier, key)."""


@dataclass
class Tally:
    """What happened, all lives together."""

    commands: Counter[str] = field(default_factory=Counter)
    """Commands by kind."""
    items: Counter[str] = field(default_factory=Counter)
    """Blocks in them."""
    asked_blocks: int = 0
    """Blocks that callers named, and tiers told of."""
    loads: int = 0
    stores: int = 0
    hits: int = 0
    misses: int = 0
    wrong_bytes: int = 0
    """Blocks served or stored with other bytes than their own: must be 0."""
    reads_failed: int = 0
    """Blocks that a tier was asked for and did not give."""


@dataclass(slots=True)
class _Seen:
    """A command in flight."""

    command: IoCommand
    epoch: str
    turn: int
    serial: int
    overdue: bool = False


@dataclass
class _Books:
    """Counters of one life, kept by an onlooker."""

    queries: int = 0
    hits: int = 0
    promoted: int = 0
    demoted: int = 0
    stored: int = 0


def fail(what: str) -> None:
    raise SimulationFailure(what)


class Watch:
    """Of one life of the process. ``before`` and ``after`` each event that the core handles."""

    def __init__(self, core: TieringCore, arena: Arena, tally: Tally, epoch: str) -> None:
        self.epoch = epoch
        """Of the weights in use: set just before the reset that brings new ones."""
        self._turn = 0
        """Counts resets."""
        self._core = core
        self._arena = arena
        self._tally = tally
        self._specs = {tier.name: tier for tier in core.world.spec.tiers}
        self._states = dict.fromkeys(self._specs, TierState.OPENING)
        self._serial = 0
        self._ops: dict[int, _Seen] = {}
        self._stores: dict[int, tuple[list[Place], int]] = {}
        self._loads: dict[int, tuple[BlockKey, ...]] = {}
        """Load jobs whose end was not told yet."""
        self._leases: dict[int, list[Place]] = {}
        self._told: dict[At, int] = {}
        """Who has said, and when, that it has the block; and has not said otherwise since."""
        self._deleted: dict[At, int] = {}
        self._busy: Counter[tuple[str, str, BlockKey]] = Counter()
        """(kind, tier, key) in flight since the last reset."""
        self.source: dict[Place, tuple[str, int]] = {}
        """Which tier a slot's block was promoted from, and when."""
        self._lent_bytes: Counter[str] = Counter()
        self.books = _Books()
        self._must_hit = False

    # -- events

    def before(self, event: ev.Event) -> None:
        """What the event says is over is over before the core can give the slots away."""
        self._serial += 1
        if isinstance(event, ev.OpFinished) and (seen := self._ops.get(event.op)) is not None:
            self._end_loans(seen)
        elif isinstance(event, ev.StoreFinished) and event.job in self._stores:
            for place in self._stores[event.job][0]:
                self._arena.end_write(place)
        elif isinstance(event, ev.Released):
            for place in self._leases.pop(event.job, ()):
                self._arena.end_read(place)
        elif isinstance(event, ev.LoadRequested):
            self._must_hit = self._all_ready(event)

    def after(self, event: ev.Event, reply: Reply, commands: Sequence[Command]) -> None:
        match event:
            case ev.OpFinished():
                self._op_finished(event)
            case ev.OpOverdue(op=op):
                self._op_overdue(op)
            case ev.StoreFinished():
                self._store_finished(event)
            case ev.TierScanned(tier=tier, entries=entries):
                self._tally.asked_blocks += len(entries)
                for entry in entries:
                    if not entry.foreign:
                        self._told[tier, entry.handle] = self._serial
            case ev.TierChanged(tier=tier, state=state):
                self._states[tier] = state
                parked = next(t for t in self._core.world.tiers if t.spec.name == tier).parked
                self._tally.asked_blocks += len(parked)
            case ev.Released(job=job):
                self._loads.pop(job, None)
            case ev.Reset():
                self._turn += 1
                self._told.clear()
                self._busy.clear()
            case ev.StoreRequested() | ev.RestoreRequested():
                assert isinstance(reply, ev.StorePlan)
                self._store_planned(event, reply)
                if isinstance(event, ev.StoreRequested) and reply.refused == NO_SLOT:
                    self._refused(event, reply, commands)
            case ev.LoadRequested():
                assert isinstance(reply, ev.LoadPlan)
                self._load_planned(event, reply)
            case ev.ProbeRequested(keys=keys):
                self._tally.asked_blocks += len(keys)
            case _:
                pass
        for command in commands:
            self._command(command)
        items = sum(self._tally.items.values())
        if items > ITEMS_PER_BLOCK_MAX * (self._tally.asked_blocks + 10):
            fail(f"livelock: {items} blocks in commands, for {self._tally.asked_blocks} that anybody named")

    # -- callers

    def _all_ready(self, event: ev.LoadRequested) -> bool:
        blocks = [self._core.world.blocks.get(key) for key in event.keys]
        return len(set(event.keys)) == len(blocks) and all(
            block is not None and block.state is PrimaryState.READY and block.pool == event.pool for block in blocks
        )

    def _load_planned(self, event: ev.LoadRequested, plan: ev.LoadPlan) -> None:
        self._tally.loads += 1
        self._tally.asked_blocks += len(event.keys)
        self.books.queries += len(event.keys)
        self._loads[plan.job] = event.keys
        if self._must_hit and not (plan.done and len(plan.slots) == len(event.keys)):
            fail(f"load job {plan.job}: all of it is in the primary tier, and it is not served at once")  # row 8
        self._check(zip(event.keys, ((event.pool, slot) for slot in plan.slots), strict=False), "leased")
        if plan.done:
            self._lease(plan.job, event.pool, plan.slots)

    def _lease(self, job: int, pool: int, slots: Sequence[int]) -> None:
        """The job is done: the caller reads the slots until it releases them."""
        keys = self._loads.pop(job)
        places = [(pool, slot) for slot in slots]
        for place in places:
            self._arena.start_read(place, f"load job {job}")
        self._leases[job] = places
        self._check(zip(keys, places, strict=False), "leased")
        self.books.hits += len(slots)

    def _store_planned(self, event: ev.StoreRequested | ev.RestoreRequested, plan: ev.StorePlan) -> None:
        keys = event.keys if isinstance(event, ev.StoreRequested) else ()
        self._tally.stores += 1
        self._tally.asked_blocks += len(keys) + len(plan.grants)
        places = []
        for grant in plan.grants:
            hold = self._core.world.holds.get(event.hold) if isinstance(event, ev.RestoreRequested) else None
            pool = event.pool if isinstance(event, ev.StoreRequested) else hold.pool if hold else 0
            places.append((pool, grant.slot))
            self._arena.start_write((pool, grant.slot), f"store job {plan.job}")
            self.source.pop((pool, grant.slot), None)
            if keys and not (grant.index < plan.stop and keys[grant.index] == grant.key):
                fail(f"store job {plan.job}: grant {grant} is not of the head that was asked for")
        if plan.job:
            self._stores[plan.job] = (places, self._turn)

    def _refused(self, event: ev.StoreRequested, plan: ev.StorePlan, commands: Sequence[Command]) -> None:
        """Rows 3 and 29: what fits is stored, and nothing is refused while idle blocks may go."""
        pool = self._core.world.pools[event.pool]
        if pool.free:
            fail(f"a store is refused at {plan.stop} of {len(event.keys)}, with {len(pool.free)} slots free")
        if event.patient or any(isinstance(command, Delete) for command in commands):
            return  # blocks that are still owed are spared; and a child that leaves its tier was there a moment ago
        own = {*event.keys, event.parent}
        for slot, block in enumerate(pool.owner):
            idle = pool.states[slot] is SlotState.HELD and not (pool.loads[slot] or pool.demotes[slot])
            if block is None or not idle or block.key in own:
                continue
            if not pool.policy.leaf_first or block.copies > 1 or not block.children:
                fail(f"a store is refused while block {block.key.hex()} is idle and may go")

    def _store_finished(self, event: ev.StoreFinished) -> None:
        if (store := self._stores.pop(event.job, None)) is not None and store[1] == self._turn:
            self.books.stored += sum(outcome.ok for outcome in event.outcomes)

    # -- commands

    def _command(self, command: Command) -> None:
        self._tally.commands[type(command).__name__.lower()] += 1
        match command:
            case JobDone(job=job, blocks=blocks):
                slots = self._core.job_slots(job)
                if len(slots) != blocks or min(slots, default=0) < 0:
                    fail(f"load job {job}: {blocks} blocks are told, {slots} leased")
                self._lease(job, self._core.world.loads[job].pool, slots)
            case Probe() | Promote() | Demote() | Delete():
                self._io(command)
            case Cancel() | Touch():
                if command.tier not in self._specs:
                    fail(f"{command} names no tier")
            case _:
                pass

    def _io(self, command: IoCommand) -> None:
        keys = _keys(command)
        name = type(command).__name__.lower()
        tier, state = command.tier, self._states[command.tier]
        self._tally.items[name] += len(keys)
        seen = self._ops[command.op] = _Seen(command, self.epoch, self._turn, self._serial)
        if not keys or len(set(keys)) < len(keys):
            fail(f"{command}: empty, or a block twice")
        if isinstance(command, Probe | Promote) and state not in (TierState.UP, TierState.DEGRADED):
            fail(f"{command}: the tier is {state.value}")
        if isinstance(command, Promote):
            self._promote(command, seen)
        elif isinstance(command, Demote):
            self._demote(command, state)
        elif isinstance(command, Delete):
            for key in keys:
                self._told.pop((tier, key), None)
                self._deleted[tier, key] = self._serial
                self._free_of(command, key, "promote", "demote", "delete")
            if not self._specs[tier].capabilities.can_delete:
                fail(f"{command}: the tier deletes nothing")
        for key in keys:
            self._busy[name, tier, key] += 1

    def _free_of(self, command: IoCommand, key: BlockKey, *kinds: str) -> None:
        for kind in kinds:
            if self._busy[kind, command.tier, key]:
                fail(f"{command}: a {kind} of block {key.hex()} is in flight")

    def _promote(self, command: Promote, seen: _Seen) -> None:
        for item in command.items:
            if (command.tier, item.key) not in self._told:  # row 7
                fail(f"{command}: nobody has said that {command.tier} has {item.key.hex()}, or it has said otherwise")
            self._free_of(command, item.key, "demote", "delete")
            place = item.pool, item.slot
            self._arena.start_write(place, f"promotion {command.op}")
            self.source.pop(place, None)

    def _demote(self, command: Demote, state: TierState) -> None:
        spec = self._specs[command.tier]
        if state is not TierState.UP or len(command.items) > spec.batch_blocks_max:
            fail(f"{command}: the tier is {state.value}, and takes {spec.batch_blocks_max} at a time")
        for item in command.items:
            place = item.pool, item.slot
            self._free_of(command, item.key, "demote", "delete")
            tier, promoted = self.source.get(place, ("", 0))
            if tier == command.tier and self._deleted.get((tier, item.key), -1) < promoted:  # row 30
                fail(f"{command}: {item.key.hex()} came from there")
            self._arena.start_read(place, f"demotion {command.op}")
            self._lent_bytes[command.tier] += self._arena.payload_bytes[item.pool]
        self._check(((item.key, (item.pool, item.slot)) for item in command.items), "demoted")
        lent = sum(isinstance(s.command, Demote) and s.command.tier == command.tier for s in self._ops.values())
        if self._lent_bytes[command.tier] > spec.queue_bytes_max and lent * len(command.items) > 1:  # rows 11 and 12
            fail(f"{command}: {self._lent_bytes[command.tier]} bytes are lent to the tier")

    # -- ends of commands

    def _end_loans(self, seen: _Seen) -> None:
        command = seen.command
        if isinstance(command, Promote):
            for item in command.items:
                self._arena.end_write((item.pool, item.slot))
        elif isinstance(command, Demote):
            self._check(((i.key, (i.pool, i.slot)) for i in command.items), "demoted", seen.epoch)
            for item in command.items:
                self._arena.end_read((item.pool, item.slot))
                self._lent_bytes[command.tier] -= self._arena.payload_bytes[item.pool]

    def _op_finished(self, event: ev.OpFinished) -> None:
        seen = self._ops.pop(event.op, None)
        if seen is None or seen.turn != self._turn:
            return
        command = seen.command
        name = type(command).__name__.lower()
        for index, (key, outcome) in enumerate(zip(_keys(command), event.outcomes, strict=True)):
            at = command.tier, key
            self._busy[name, *at] -= 1
            if isinstance(command, Promote):
                item = command.items[index]
                self._read(at, outcome, seen, (item.pool, item.slot))
            elif outcome.ok and isinstance(command, Probe | Demote):
                self._told[at] = self._serial
                self.books.demoted += isinstance(command, Demote)

    def _read(self, at: At, outcome: Outcome, seen: _Seen, place: Place) -> None:
        if outcome.ok:
            if not seen.overdue:
                self.books.promoted += 1
                self.source[place] = at[0], seen.serial
        elif outcome.code is not OutcomeCode.CANCELLED:
            self._tally.reads_failed += 1
            self._doubt(at, seen)

    def _doubt(self, at: At, seen: _Seen) -> None:
        if self._told.get(at, seen.serial) < seen.serial:
            del self._told[at]

    def _op_overdue(self, op: int) -> None:
        seen = self._ops.get(op)
        if seen is None or seen.turn != self._turn:
            return
        seen.overdue = True
        if isinstance(seen.command, Promote):
            for item in seen.command.items:
                self._doubt((seen.command.tier, item.key), seen)

    # -- bytes

    def _check(self, blocks: object, what: str, epoch: str | None = None) -> None:
        """Row 13: each slot holds its block's own bytes."""
        for key, place in blocks:  # type: ignore[attr-defined]
            self.served(key, self._arena.read(place), f"{what} in slot {place}", epoch)

    def served(self, key: BlockKey, payload: bytes, what: str, epoch: str | None = None) -> None:
        """Somebody got these bytes for the block."""
        right = content(self.epoch if epoch is None else epoch, key)
        if payload != right:
            self._tally.wrong_bytes += 1
            fail(f"wrong bytes: block {key.hex()} {what} is {payload.hex()}, not {right.hex()}")


def _keys(command: IoCommand) -> tuple[bytes, ...]:
    return tuple(item.key for item in command.items) if isinstance(command, Promote | Demote) else command.keys
