"""``TieringCore``: the one entrance. Events in, a reply and commands out; a lookup is a plain call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tiering.core import demotion, flush, holds, lookup, promotion, restore, room, stores
from tiering.core import events as ev
from tiering.core.commands import Cancel, Command, SlotsFreed
from tiering.core.lookup import EachResult
from tiering.core.moves import (
    IllegalMove,
    condemn,
    doom,
    evict_all,
    expire,
)
from tiering.core.ring import EventRing
from tiering.core.state import Change, CoreSpec, Counters, Tier, World
from tiering.core.transitions import PrimaryState
from tiering.errors import InvariantViolation
from tiering.types import BlockKey, Outcome

Reply: TypeAlias = ev.StorePlan | ev.LoadPlan | ev.RestorePlan | int | None

HISTORY_EVENTS_MAX = 4096
HISTORY_KEYS_MAX = 65_536


class TieringCore:
    """The control state of one manager. Not thread-safe: the gate lets one caller in at a time.

    ``observer`` sees each event before it is handled (the journal).
    """

    def __init__(self, spec: CoreSpec, observer: Callable[[ev.Event], None] | None = None) -> None:
        self.world = World(spec)
        self.recent = EventRing(HISTORY_EVENTS_MAX, HISTORY_KEYS_MAX)
        self._observer = observer

    @property
    def counters(self) -> Counters:
        return self.world.counters

    def lookup(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> lookup.LookupResult:
        """The leading run that some tier has. Changes nothing, records nothing."""
        return lookup.lookup(self.world, pool, keys, now_s)

    def lookup_each(self, pool: int, keys: Sequence[BlockKey], now_s: float) -> EachResult:
        """Where each key is. Changes nothing, records nothing."""
        return lookup.each(self.world, pool, keys, now_s)

    def job_slots(self, job: int) -> tuple[int, ...]:
        """The slots leased to a finished load job, in the order of its keys."""
        return tuple(self.world.loads[job].slots)

    def handle(self, event: ev.Event) -> tuple[Reply, list[Command]]:
        """Apply one event. Raises ``InvariantViolation``, with the block's history, if the state contradicts itself.

        After it raised, or after whatever else a policy or a caller's mistake made it raise, the state is not to be trusted.
        """
        world = self.world
        if self._observer is not None:
            self._observer(event)
        self.recent.append(event)
        world.now_s = max(world.now_s, event.now_s)
        world.commands = []
        try:
            expire(world)
            reply: Reply = _HANDLERS[type(event)](self, event)
            if not isinstance(event, _QUIET):
                self._after(event)
        except IllegalMove as error:
            raise InvariantViolation(str(error), self.history(error.key)) from None
        return reply, world.commands

    def take_changes(self) -> list[Change]:
        """What came to tiers and went from them since the last call; nothing unless the spec has ``events``.

        A ``Reset`` is not told here: it empties everything, and goes without a word for each block.
        """
        changes = self.world.changes
        if not changes:
            return []
        self.world.changes = []
        return changes

    def history(self, key: bytes | None) -> list[str]:
        """The recent events that name the block, searched when they are needed and never kept per block."""
        if key is None:
            return [repr(event)[:400] for event in list(self.recent)[-8:]]
        ops = {op.op for op in self.world.ops.values() if any(block.key == key for block, *_ in op.items)}
        named = [e for e in self.recent if key in getattr(e, "keys", ()) or getattr(e, "op", None) in ops]
        return [repr(event)[:400] for event in named[-16:]]

    def _after(self, event: ev.Event) -> None:
        """What an event may have freed is put to use in the same step."""
        world = self.world
        frees = isinstance(event, _FREEING)
        if frees and world.starved:
            promotion.retry_starved(world)
        if not isinstance(event, ev.OpFinished):  # else a small tier would take the same victims in turns, for ever
            demotion.anticipate_evictions(world)
        parked = sum(len(tier.parked) for tier in world.tiers)
        demotion.pump(world)
        flush.end_done(world)
        given_up = sum(len(tier.parked) for tier in world.tiers) > parked
        # What no tier takes is spared no more; and a load evicts for the reserve, too.
        if world.retry_wanted and (frees or given_up or isinstance(event, ev.LoadRequested)):
            world.retry_wanted = False
            world.commands.append(SlotsFreed())
        if frees and world.holds:
            holds.wake(world)

    # -- handlers, one an event ---------------------------------------------------------------------------------------

    def _store_requested(self, event: ev.StoreRequested) -> Reply:
        return stores.request_store(self.world, event)

    def _store_finished(self, event: ev.StoreFinished) -> Reply:
        stores.finish_store(self.world, event.job, event.outcomes)
        return None

    def _probe_requested(self, event: ev.ProbeRequested) -> Reply:
        lookup.request_probes(self.world, event.pool, event.keys)
        return None

    def _load_requested(self, event: ev.LoadRequested) -> Reply:
        return promotion.request_load(self.world, event)

    def _lease_requested(self, event: ev.LeaseRequested) -> Reply:
        return promotion.request_lease(self.world, event)

    def _load_overdue(self, event: ev.LoadOverdue) -> Reply:
        promotion.overdue(self.world, event.job)
        return None

    def _released(self, event: ev.Released) -> Reply:
        promotion.release(self.world, event.job)
        return None

    def _touched(self, event: ev.Touched) -> Reply:
        promotion.touched(self.world, self.world.pools[event.pool], event.keys)
        return None

    def _op_finished(self, event: ev.OpFinished) -> Reply:
        world = self.world
        op = world.ops.pop(event.op, None)
        if op is None:
            world.counters.unknown_completions += 1
            return None
        outcomes = event.outcomes
        expected = len(op.items) + len(op.handles)
        if len(outcomes) != expected:
            outcomes = (Outcome.failed(f"{len(outcomes)} outcomes for {expected} blocks"),) * expected
        if op.kind == "probe":
            lookup.finish_probe(world, op, outcomes)
        elif op.kind == "promote":
            promotion.finish_promote(world, op, outcomes)
        else:
            finish = demotion.finish_demote if op.kind == "demote" else room.finish_delete
            if finish(world, op, outcomes):
                tier = world.tiers[op.tier]
                demotion.offer_parked(tier, tier.spec.batch_blocks_max)
                room.sweep(world, tier)
        return None

    def _op_overdue(self, event: ev.OpOverdue) -> Reply:
        op = self.world.ops.get(event.op)
        if op is None:
            self.world.counters.unknown_completions += 1
        elif op.kind == "promote":
            promotion.promote_overdue(self.world, op)
        elif op.kind == "probe":
            lookup.probe_overdue(self.world, op)
        return None

    def _tier_scanned(self, event: ev.TierScanned) -> Reply:
        room.take_in(self.world, self._tier(event.tier), event.entries)
        return None

    def _tier_changed(self, event: ev.TierChanged) -> Reply:
        tier = self._tier(event.tier)
        tier.state = event.state
        if tier.writable:
            demotion.offer_parked(tier)
        else:
            demotion.stopped(self.world, tier)
        return None

    def _flush_requested(self, event: ev.FlushRequested) -> Reply:
        for tier in self.world.tiers:
            if tier.writable:
                demotion.offer_parked(tier)
        return flush.begin(self.world).job

    def _flush_overdue(self, event: ev.FlushOverdue) -> Reply:
        job = self.world.flushes.get(event.job)
        if job is None:
            self.world.counters.unknown_completions += 1
        else:
            flush.give_up(self.world, job)
        return None

    def _reset(self, event: ev.Reset) -> Reply:
        _reset(self.world)
        return None

    def _hold_requested(self, event: ev.HoldRequested) -> Reply:
        return holds.request_hold(self.world, event)

    def _hold_extended(self, event: ev.HoldExtended) -> Reply:
        holds.extend(self.world, event)
        return None

    def _hold_trimmed(self, event: ev.HoldTrimmed) -> Reply:
        holds.trim(self.world, event)
        return None

    def _hold_released(self, event: ev.HoldReleased) -> Reply:
        holds.release_hold(self.world, event.hold)
        return None

    def _restore_requested(self, event: ev.RestoreRequested) -> Reply:
        return restore.request_restore(self.world, event)

    def _restore_step(self, event: ev.RestoreStep) -> Reply:
        return restore.request_step(self.world, event)

    def _tier(self, name: str) -> Tier:
        return self.world.tiers[self.world.tier_index[name]]


def _reset(world: World) -> None:
    """A new weight epoch: every key is ABSENT everywhere. Bytes in motion and leases keep their slots to their end."""
    for job in world.loads.values():
        if not job.done:
            promotion.truncate(world, job, 0)
            promotion.end_if_complete(world, job)
    for waiting in world.flushes.values():
        flush.give_up(world, waiting)
    for pool in world.pools:
        idle = []
        for slot, block in enumerate(pool.owner):
            if block is None:
                continue
            if block.state is PrimaryState.FILLING:
                doom(world, pool, block)
            elif pool.loads[slot] or pool.demotes[slot]:
                condemn(world, pool, block)
            else:
                idle.append(block.key)
        evict_all(world, pool, idle, leaves_only=False)
        pool.policy = pool.spec.policy(pool.spec.slots)
    for op in world.ops.values():
        if not op.cancelled:
            op.cancelled = True
            world.commands.append(Cancel(op.op, world.tiers[op.tier].spec.name))
    world.blocks.clear()
    world.expiring.clear()
    world.remote.clear()
    for pool in world.pools:
        pool.holes = 0
    holds.forget_all(world)
    world.foreign_leaving.clear()
    for index, tier in enumerate(world.tiers):
        fresh = Tier(index, tier.spec)
        fresh.lent_bytes = tier.lent_bytes
        fresh.asking = tier.asking
        world.tiers[index] = fresh
    if world.changes:
        world.changes.clear()
    world.epoch += 1
    world.counters.resets += 1


_HANDLERS: dict[type[Any], Callable[[TieringCore, Any], Reply]] = {
    ev.StoreRequested: TieringCore._store_requested,
    ev.StoreFinished: TieringCore._store_finished,
    ev.ProbeRequested: TieringCore._probe_requested,
    ev.LoadRequested: TieringCore._load_requested,
    ev.LeaseRequested: TieringCore._lease_requested,
    ev.LoadOverdue: TieringCore._load_overdue,
    ev.Released: TieringCore._released,
    ev.Touched: TieringCore._touched,
    ev.OpFinished: TieringCore._op_finished,
    ev.OpOverdue: TieringCore._op_overdue,
    ev.TierScanned: TieringCore._tier_scanned,
    ev.TierChanged: TieringCore._tier_changed,
    ev.FlushRequested: TieringCore._flush_requested,
    ev.FlushOverdue: TieringCore._flush_overdue,
    ev.Reset: TieringCore._reset,
    ev.HoldRequested: TieringCore._hold_requested,
    ev.HoldExtended: TieringCore._hold_extended,
    ev.HoldTrimmed: TieringCore._hold_trimmed,
    ev.HoldReleased: TieringCore._hold_released,
    ev.RestoreRequested: TieringCore._restore_requested,
    ev.RestoreStep: TieringCore._restore_step,
}
_QUIET = (ev.ProbeRequested, ev.Touched, ev.TierScanned, ev.LeaseRequested, ev.HoldExtended, ev.HoldTrimmed)
"""Events that free nothing and owe nothing."""
_FREEING = (ev.StoreFinished, ev.OpFinished, ev.OpOverdue, ev.Released, ev.LoadOverdue, ev.TierChanged, ev.Reset)
