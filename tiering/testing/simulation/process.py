"""One life of the product: the real core, an arena and a lane a tier, from start to crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from tiering.core import events as ev
from tiering.core.commands import (
    Cancel,
    Command,
    Delete,
    Demote,
    FlushDone,
    JobDone,
    Probe,
    Promote,
    RestoreDue,
    SlotsFreed,
)
from tiering.core.invariants import check
from tiering.core.journal import Journal
from tiering.core.lookup import LookupResult
from tiering.core.machine import Reply, TieringCore
from tiering.core.state import CoreSpec
from tiering.testing.simulation.agenda import Agenda, Pulse
from tiering.testing.simulation.contents import Arena
from tiering.testing.simulation.injection import Injector
from tiering.testing.simulation.lane import Lane, LanePlan
from tiering.testing.simulation.medium import Medium
from tiering.testing.simulation.watch import Tally, Watch, fail
from tiering.types import BlockKey

JOURNAL_EVENTS_MAX: Final = 200_000
HANDOVER_S: Final = 1e-5
"""Typical time that a command takes to get to the driver's loop; callers may come in between."""

CoreFactory: TypeAlias = Callable[[CoreSpec, Callable[[ev.Event], None]], TieringCore]


@dataclass
class Surroundings:
    """What outlives a process."""

    agenda: Agenda
    inject: Injector
    tally: Tally
    mediums: Mapping[str, Medium]
    lanes: Mapping[str, LanePlan]
    core: CoreFactory
    check_every: int
    """The core's invariants are recounted after every so many events."""


class Process:
    """``handle`` is the gate: every event passes it, and every one is watched, checked and written down."""

    def __init__(self, spec: CoreSpec, around: Surroundings, epoch: str) -> None:
        self.alive = True
        self.epoch = epoch
        self.resets = 0
        """So many so far: what a caller computed before the latest is of no use."""
        self.agenda = around.agenda
        self.inject = around.inject
        self.tally = around.tally
        self.journal = Journal(JOURNAL_EVENTS_MAX, spec)
        self.core = around.core(spec, self.journal)
        self.arena = Arena(spec.pools)
        self.watch = Watch(self.core, self.arena, around.tally, epoch)
        self.freed = Pulse(around.agenda)
        self.progress = Pulse(around.agenda)
        self._pulses: dict[int, Pulse] = {}
        self.flushed: dict[int, FlushDone] = {}
        self._inbox: deque[tuple[float, Command]] = deque()
        self._drain_due = False
        self._events = 0
        self._check_every = around.check_every
        self.lanes = [
            Lane(plan, around.mediums[name], self.arena, around.inject, around.agenda, self)
            for name, plan in around.lanes.items()
        ]
        self._found: dict[str, int] = {}
        """What exclusive tiers held, if more than they may, when it was last looked at."""
        for lane in self.lanes:
            lane.open(epoch)

    def pulse(self, number: int) -> Pulse:
        """Beats when a load job, flush or hold of that number has news."""
        return self._pulses.setdefault(number, Pulse(self.agenda))

    def handle(self, event: ev.Event) -> Reply:
        """Give the core one event. A dead process hears nothing, and answers nothing of use."""
        if not self.alive:
            return None
        self.watch.before(event)
        reply, commands = self.core.handle(event)
        self.watch.after(event, reply, commands)
        self._events += 1
        if self._events % self._check_every == 0:
            check(self.core.world)
        self._check_budgets()
        self._submit([c for c in commands if isinstance(c, Probe | Promote | Demote | Delete | Cancel)])
        for command in commands:
            self._notify(command)
        return reply

    def report(self, *events: ev.Event) -> None:
        """What the lanes have to say."""
        for event in events:
            self.handle(event)
        self.progress.beat()

    def lookup(self, pool: int, keys: Sequence[BlockKey]) -> LookupResult:
        """As the core has it. Rows 2 and 24: it takes nothing and changes nothing."""
        world = self.core.world
        before = world.last_id, [len(p.free) for p in world.pools], len(world.blocks)
        result = self.core.lookup(pool, keys, self.agenda.now_s)
        if before != (world.last_id, [len(p.free) for p in world.pools], len(world.blocks)):
            fail("a lookup took or changed something")
        return result

    def _notify(self, command: Command) -> None:
        match command:
            case JobDone(job=number):
                self.pulse(number).beat()
            case FlushDone(job=number):
                self.flushed[number] = command
                self.pulse(number).beat()
            case RestoreDue(hold=number):
                self.pulse(number).beat()
            case SlotsFreed():
                self.freed.beat()
            case _:
                pass

    def _submit(self, commands: Sequence[Command]) -> None:
        self._inbox += ((self.agenda.now_s, command) for command in commands)
        if self._inbox and not self._drain_due:
            self._drain_due = True
            self.agenda.after(self.inject.latency_s(HANDOVER_S), self._drain)

    def _drain(self) -> None:
        self._drain_due = False
        lanes = {lane.name: lane for lane in self.lanes}
        while self._inbox and self.alive:
            submitted_s, command = self._inbox.popleft()
            if isinstance(command, Cancel):
                lanes[command.tier].cancel(command.op)
            elif isinstance(command, Probe | Promote | Demote | Delete):
                lanes[command.tier].submit(command, submitted_s)

    def _check_budgets(self) -> None:
        """Row 17 and 35: a bounded tier's bytes are within its capacity, and within what the core accounts."""
        for lane, tier in zip(self.lanes, self.core.world.tiers, strict=True):
            if tier.room_bytes is None or not lane.serving:
                self._found.pop(lane.name, None)
                continue
            occupied = lane.medium.occupied_bytes()
            limit = max(tier.room_bytes, self._found.get(lane.name, occupied))
            if occupied > limit:
                fail(f"tier {lane.name}: {occupied} bytes are on the medium, {limit} may be")
            self._found[lane.name] = occupied
            if occupied > tier.used_bytes:
                fail(f"tier {lane.name}: {occupied} bytes are on the medium, {tier.used_bytes} are accounted")

    def reset(self, epoch: str) -> None:
        """New weights. As the driver does it: all tiers detached, the core reset, then each reopened."""
        for lane in self.lanes:
            lane.detach()
        self.epoch = self.watch.epoch = epoch
        self.resets += 1
        self.handle(ev.Reset(self.agenda.now_s))
        self._drain()
        self._found.clear()
        for lane in self.lanes:
            lane.reopen(epoch)

    def die(self) -> None:
        """Like ``kill -9``: nothing of it happens any more, but what was being written may be there in part."""
        self._close_books()
        self.alive = False
        for lane in self.lanes:
            lane.die()

    def _close_books(self) -> None:
        """Row 35: the core's counters tell what an onlooker counted."""
        books, counters = asdict(self.watch.books), self.core.counters
        told = {
            "queries": counters.query_blocks,
            "hits": counters.hit_blocks,
            "promoted": counters.promoted_blocks,
            "demoted": counters.demoted_blocks,
            "stored": counters.stored_blocks,
        }
        if told != books:
            fail(f"counters: the core says {told}, an onlooker counted {books}")
