"""The one short lock around the core. Any thread enters, gets its reply, and the I/O that it implies goes to the driver.

No await, I/O, callback or log call happens under it. A hold handles one batch of at most ``KEYS_PER_HOLD_MAX`` keys;
callers with longer ones re-enter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, TypeVar

from tiering.core import events as ev
from tiering.core.commands import Command, FlushDone, JobDone, RestoreDue, SlotsFreed
from tiering.core.lookup import EachResult, LookupResult
from tiering.core.machine import Reply, TieringCore
from tiering.errors import InvariantViolation, ShapeError
from tiering.runtime.event_log import EventLog
from tiering.types import KEY_BYTES_MAX, BlockKey, PrefixMatch

log = logging.getLogger("tiering.gate")

KEYS_PER_HOLD_MAX = 2048
STORE_KEYS_PER_HOLD_MAX = 512
"""Of a store: granting a slot and evicting for it costs several times what a lookup or a lease does."""

Notification: TypeAlias = JobDone | FlushDone | RestoreDue | SlotsFreed
_NOTIFICATIONS = (JobDone, FlushDone, RestoreDue, SlotsFreed)
_MISS = LookupResult(PrefixMatch(0, 0, 0, {}))
Looked = TypeVar("Looked", LookupResult, EachResult)
FUSED = "the cache is off after an internal contradiction; see the log"

_REQUESTS = (
    ev.StoreRequested, ev.LoadRequested, ev.LeaseRequested, ev.ProbeRequested, ev.HoldRequested, ev.HoldExtended,
    ev.RestoreRequested, ev.RestoreStep,
)  # fmt: skip
"""Events that ask for something; the others report or give back."""


class Gate:
    """Lets one thread at a time into the core.

    ``notify`` gets what callers wait for, ``progress`` a call whenever the driver reported something, ``on_fuse`` one
    when the fuse goes; all run outside the lock, in the reporting thread. ``dump`` returns the journal's text. ``events``
    is told, under the lock, what came and went.
    """

    def __init__(
        self,
        core: TieringCore,
        *,
        notify: Callable[[Sequence[Notification]], None],
        progress: Callable[[], None],
        on_fuse: Callable[[], None],
        dump: Callable[[], str],
        events: EventLog | None = None,
    ) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._notify = notify
        self._progress = progress
        self._on_fuse = on_fuse
        self._dump = dump
        self._events = events
        self._submit: Callable[[Sequence[Command]], None] | None = None
        self.closed = ""
        """Why nothing is granted any more; "" while the manager is open. Set once, by ``shut``."""
        self.fused = ""
        """Why the cache is off; "" while it is on. Set once, never cleared."""

    def connect(self, submit: Callable[[Sequence[Command]], None]) -> None:
        """Name the driver's intake: it keeps the order of calls and never blocks."""
        self._submit = submit

    @property
    def epoch(self) -> int:
        """How many resets there were. What a plan granted before one is not granted after it."""
        return self._core.world.epoch

    def handle(self, event: ev.Event) -> Reply:
        """Give the core one event. After an ``InvariantViolation`` (the fuse) plans are empty and nothing changes."""
        reply = self._enter((event,))
        # Whoever matches waits for fills to land, and a close for whatever is given back.
        if isinstance(event, ev.StoreFinished) or self.closed:
            self._progress()
        return reply

    def post(self, *events: ev.Event) -> None:
        """What the driver has to report."""
        self._enter(events)
        self._progress()

    def shut(self, why: str) -> None:
        """From now on requests get empty plans that say ``why``; reports and what is given back still count."""
        with self._lock:
            self.closed = self.closed or why

    def end_loads(self, now_s: float) -> None:
        """Every load that waits ends with what it has."""
        with self._lock:
            jobs = [job.job for job in self._core.world.loads.values() if not job.done]
        self._enter([ev.LoadOverdue(now_s, job) for job in jobs])

    def end_flushes(self, now_s: float) -> None:
        """Every flush that waits ends; what is unacknowledged counts as lost."""
        with self._lock:
            jobs = list(self._core.world.flushes)
        self._enter([ev.FlushOverdue(now_s, job) for job in jobs])

    def _enter(self, events: Sequence[ev.Event]) -> Reply:
        reply: Reply = None
        notifications: list[Notification] = []
        broke: BaseException | None = None
        news = False
        for event in events:
            with self._lock:
                if self.fused or (self.closed and isinstance(event, _REQUESTS)):
                    reply = _refusal(event, FUSED if self.fused else self.closed)
                    continue
                try:
                    reply, commands = self._core.handle(event)
                    if self._events is not None:
                        news = self._record(self._events, event) or news
                    io = [c for c in commands if not isinstance(c, _NOTIFICATIONS)]
                    notifications += [c for c in commands if isinstance(c, _NOTIFICATIONS)]
                    if io and self._submit is not None:
                        self._submit(io)
                except BaseException as error:  # whatever broke in the core: half a step is not to be trusted
                    broke = error
                    self.fused = str(_as_violation(error))
                    reply = _refusal(event, FUSED)
        if broke is not None:
            self._blow(broke)
        if notifications:
            self._notify(notifications)
        if news and self._events is not None:
            self._events.pulse.beat()
        if broke is not None and not isinstance(broke, Exception):
            raise broke  # an interrupt of the caller's is still his
        return reply

    def _record(self, events: EventLog, event: ev.Event) -> bool:
        """Tell the log what the event changed; under the lock, so that the order is right."""
        changes = self._core.take_changes()
        if isinstance(event, ev.Reset):
            events.cleared()
        elif not changes:
            return False
        else:
            events.append(changes)
        return True

    def _blow(self, broke: BaseException) -> None:
        """One log line with the journal; everybody who waits is let go."""
        try:
            journal = self._dump()
        except Exception as error:
            journal = f"no journal: {error!r}"
        log.error("cache switched off: %s\njournal of recent events:\n%s", self.fused, journal, exc_info=broke)
        self._on_fuse()
        self._progress()

    def lookup(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> LookupResult:
        """The leading run that some tier has. Takes the lock once for each ``KEYS_PER_HOLD_MAX`` keys.

        Raises ``ShapeError`` if a key is none.
        """
        if len(keys) <= KEYS_PER_HOLD_MAX:
            return self._lookup(pool, keys, now_s)
        spec = self._core.world.pools[pool].spec
        total = _MISS
        for start in range(0, len(keys), KEYS_PER_HOLD_MAX):
            part = keys[start : start + KEYS_PER_HOLD_MAX]
            result = self._lookup(pool, part, now_s)
            total = _joined(total, result, spec.slots - spec.reserve_slots)
            if result.match.blocks < len(part):
                break
        return total

    def lookup_each(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> EachResult:
        """Where each key is; at most ``KEYS_PER_HOLD_MAX`` of them. Raises ``ShapeError`` if a key is none."""
        return self._look(lambda: self._core.lookup_each(pool, keys, now_s), keys, EachResult((None,) * len(keys)))

    def _lookup(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> LookupResult:
        return self._look(lambda: self._core.lookup(pool, keys, now_s), keys, _MISS)

    def _look(self, look: Callable[[], Looked], keys: Sequence[BlockKey], miss: Looked) -> Looked:
        with self._lock:
            if self.fused:
                return miss
            try:
                return look()
            except TypeError as error:
                check_keys(keys, "keys")  # a lookup changes nothing: a caller's mistake is his alone
                broke: Exception = error
            except Exception as error:
                broke = error
            self.fused = str(_as_violation(broke))
        self._blow(broke)
        return miss

    def free_slots(self, pool: int) -> int:
        """Slots of the pool that hold nothing."""
        return len(self._core.world.pools[pool].free)

    def job_slots(self, job: int) -> tuple[int, ...]:
        """The slots leased to a load job that is done; empty if it is not, after its release, and after the fuse."""
        with self._lock:
            return self._slots_of(job) or ()

    def ended(self, jobs: Iterable[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Those of the load jobs that are done, and the slots leased to them."""
        with self._lock:
            found = [(job, self._slots_of(job)) for job in jobs]
        return [(job, slots) for job, slots in found if slots is not None]

    def _slots_of(self, number: int) -> tuple[int, ...] | None:
        job = self._core.world.loads.get(number)
        if self.fused or job is None:
            return ()
        return tuple(job.slots) if job.done else None

    def busy_slots(self) -> int:
        """Slots that somebody fills or reads."""
        with self._lock:
            return sum(pool.busy for pool in self._core.world.pools)

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
                    "ready_blocks": len(pool.policy),
                    "leases": sum(len(j.slots) - j.pending for j in world.loads.values() if j.pool == pool.index),
                    "payload_bytes": pool.spec.payload_bytes,
                    "holes": pool.holes,
                    "hole_tokens": pool.holes * pool.spec.tokens_per_block,
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


def check_keys(keys: Iterable[object], name: str) -> None:
    """Raises ``ShapeError`` that names the first of ``keys`` that is no block key."""
    for index, key in enumerate(keys):
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ShapeError(f"{name}[{index}]: a block key is 1 to {KEY_BYTES_MAX} bytes; got {what}")


def _as_violation(error: BaseException) -> InvariantViolation:
    if isinstance(error, InvariantViolation):
        return error
    return InvariantViolation(f"unexpected {type(error).__name__} in the core: {error}")


def _refusal(event: ev.Event, why: str) -> Reply:
    if isinstance(event, ev.StoreRequested | ev.RestoreRequested):
        return ev.StorePlan(0, (), (), 0, why)
    if isinstance(event, ev.LoadRequested | ev.LeaseRequested):
        return ev.LoadPlan(0, True, ())
    if isinstance(event, ev.RestoreStep):
        return ev.RestorePlan((), why)
    if isinstance(event, ev.FlushRequested | ev.HoldRequested):
        return 0
    return None


def _joined(head: LookupResult, tail: LookupResult, room_blocks: int) -> LookupResult:
    """Two runs as one. Each alone may fit where both do not: ``room_blocks`` is what the pool can hold of any run."""
    by_tier = dict(head.match.by_tier)
    for name, blocks in tail.match.by_tier.items():
        by_tier[name] = by_tier.get(name, 0) + blocks
    whole = head.match.loadable_blocks == head.match.blocks
    loadable = head.match.loadable_blocks + (tail.match.loadable_blocks if whole else 0)
    match = PrefixMatch(
        head.match.blocks + tail.match.blocks,
        head.match.tokens + tail.match.tokens,
        min(loadable, max(room_blocks, by_tier.get("primary", 0))),
        by_tier,
    )
    return LookupResult(match, head.undecided + tail.undecided, head.pending or tail.pending)
