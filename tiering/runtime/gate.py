"""The one short lock around the core. Any thread enters, gets its reply, and the I/O that it implies goes to the driver.

No await, I/O, callback or log call happens under it. A hold handles one batch of at most ``KEYS_PER_HOLD_MAX`` keys;
callers with longer ones re-enter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from tiering.core import events as ev
from tiering.core.commands import Command, FlushDone, JobDone, RestoreDue, SlotsFreed
from tiering.core.lookup import LookupResult
from tiering.core.machine import Reply, TieringCore
from tiering.core.transitions import PrimaryState
from tiering.errors import InvariantViolation
from tiering.types import BlockKey, PrefixMatch

log = logging.getLogger("tiering.gate")

KEYS_PER_HOLD_MAX = 2048

Notification: TypeAlias = JobDone | FlushDone | RestoreDue | SlotsFreed
_NOTIFICATIONS = (JobDone, FlushDone, RestoreDue, SlotsFreed)
_MISS = LookupResult(PrefixMatch(0, 0, 0, {}))
FUSED = "the cache is off after an internal contradiction; see the log"


class Gate:
    """Lets one thread at a time into the core.

    ``notify`` gets what callers wait for, ``progress`` a call whenever the driver reported something, ``on_fuse`` one
    when the fuse goes; all run outside the lock, in the reporting thread. ``dump`` returns the journal's text.
    """

    def __init__(
        self,
        core: TieringCore,
        *,
        notify: Callable[[Sequence[Notification]], None],
        progress: Callable[[], None],
        on_fuse: Callable[[], None],
        dump: Callable[[], str],
    ) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._notify = notify
        self._progress = progress
        self._on_fuse = on_fuse
        self._dump = dump
        self._submit: Callable[[Sequence[Command]], None] | None = None
        self.fused = ""
        """Why the cache is off; "" while it is on. Set once, never cleared."""

    def connect(self, submit: Callable[[Sequence[Command]], None]) -> None:
        """Name the driver's intake: it keeps the order of calls and never blocks."""
        self._submit = submit

    def handle(self, event: ev.Event) -> Reply:
        """Give the core one event. After an ``InvariantViolation`` (the fuse) plans are empty and nothing changes."""
        return self._enter((event,))

    def post(self, *events: ev.Event) -> None:
        """What the driver has to report."""
        self._enter(events)
        self._progress()

    def _enter(self, events: Sequence[ev.Event]) -> Reply:
        reply: Reply = None
        notifications: list[Notification] = []
        violation: InvariantViolation | None = None
        for event in events:
            with self._lock:
                if self.fused:
                    reply = _fused_reply(event)
                    continue
                try:
                    reply, commands = self._core.handle(event)
                except Exception as error:  # whatever broke in the core: the engine above must go on
                    violation = _as_violation(error)
                    self.fused = str(violation)
                    reply = _fused_reply(event)
                    continue
                io = [c for c in commands if not isinstance(c, _NOTIFICATIONS)]
                notifications += [c for c in commands if isinstance(c, _NOTIFICATIONS)]
                if io and self._submit is not None:
                    self._submit(io)
        if violation is not None:
            self._blow(violation)
        if notifications:
            self._notify(notifications)
        return reply

    def _blow(self, violation: InvariantViolation) -> None:
        """One log line with the journal; everybody who waits is let go."""
        log.error("cache switched off: %s\njournal of recent events:\n%s", violation, self._dump())
        self._on_fuse()
        self._progress()

    def lookup(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> LookupResult:
        """The leading run that some tier has. Takes the lock once for each ``KEYS_PER_HOLD_MAX`` keys."""
        if len(keys) <= KEYS_PER_HOLD_MAX:
            return self._lookup(pool, keys, now_s)
        total = _MISS
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            part = keys[start : start + KEYS_PER_HOLD_MAX]
            result = self._lookup(pool, part, now_s)
            total = _joined(total, result)
            if result.match.blocks < len(part):
                break
        return total

    def _lookup(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> LookupResult:
        with self._lock:
            if self.fused:
                return _MISS
            try:
                return self._core.lookup(pool, keys, now_s)
            except Exception as error:
                violation = _as_violation(error)
                self.fused = str(violation)
        self._blow(violation)
        return _MISS

    def job_slots(self, job: int) -> tuple[int, ...]:
        """The slots leased to a load job that is done; empty after the fuse."""
        with self._lock:
            return () if self.fused else self._core.job_slots(job)

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges of one moment, as plain values."""
        with self._lock:
            world = self._core.world
            pools = [
                {
                    "slots": pool.spec.slots,
                    "free_slots": len(pool.free),
                    "busy_slots": pool.busy,
                    "reserve_slots": pool.spec.reserve_slots,
                    "ready_blocks": sum(b is not None and b.state is PrimaryState.READY for b in pool.owner),
                    "leases": sum(pool.loads),
                    "payload_bytes": pool.spec.payload_bytes,
                }
                for pool in world.pools
            ]
            tiers = {
                tier.spec.name: {
                    "state": tier.state.value,
                    "used_bytes": tier.used_bytes,
                    "room_bytes": tier.room_bytes,
                    "lent_bytes": tier.lent_bytes,
                    "owed_blocks": len(tier.owed),
                    "parked_blocks": len(tier.parked),
                    "foreign_blocks": len(tier.foreign),
                }
                for tier in world.tiers
            }
            return {
                "known_blocks": len(world.blocks),
                "open_loads": len(world.loads),
                "open_stores": len(world.stores),
                "open_ops": len(world.ops),
                "holds": len(world.holds),
                "pools": pools,
                "tiers": tiers,
                "counters": asdict(self._core.counters),
            }


def _as_violation(error: Exception) -> InvariantViolation:
    if isinstance(error, InvariantViolation):
        return error
    violation = InvariantViolation(f"unexpected {type(error).__name__} in the core: {error}")
    violation.__cause__ = error
    return violation


def _fused_reply(event: ev.Event) -> Reply:
    if isinstance(event, ev.StoreRequested | ev.RestoreRequested):
        return ev.StorePlan(0, (), (), 0, FUSED)
    if isinstance(event, ev.LoadRequested):
        return ev.LoadPlan(0, True, ())
    if isinstance(event, ev.FlushRequested | ev.HoldRequested):
        return 0
    return None


def _joined(head: LookupResult, tail: LookupResult) -> LookupResult:
    by_tier = dict(head.match.by_tier)
    for name, blocks in tail.match.by_tier.items():
        by_tier[name] = by_tier.get(name, 0) + blocks
    whole = head.match.loadable_blocks == head.match.blocks
    match = PrefixMatch(
        head.match.blocks + tail.match.blocks,
        head.match.tokens + tail.match.tokens,
        head.match.loadable_blocks + (tail.match.loadable_blocks if whole else 0),
        by_tier,
    )
    return LookupResult(match, head.undecided + tail.undecided, head.pending or tail.pending)
