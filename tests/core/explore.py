"""Exhaustive exploration of small worlds: every event that may come, in every state, breadth first.

States that differ only in numbering (slots, jobs, operations, generations), in counters or in absolute time count as
one; so do states whose policies name the same victims. After every transition the invariants are checked; from every
``drain_every``-th new state a fair end (all answers come, callers let go) must lead to rest.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.core.worlds import CANCELLED, CORRUPT, FAILED, MISSING, OK, REFUSED
from tiering.core import events as ev
from tiering.core.invariants import check
from tiering.core.machine import TieringCore
from tiering.core.state import NEVER_S, CoreSpec, LoadJob, Op, Tier, World
from tiering.core.transitions import PrimaryState
from tiering.types import Outcome, TierState

TICK_S = 100.0
"""Longer than every pause and every life of a verdict."""

DRAIN_STEPS_MAX = 300

HITS_MAX = 3
"""No rule here asks for more loads."""

ANSWERS: dict[str, tuple[Outcome, ...]] = {
    "probe": (OK, MISSING, FAILED),
    "promote": (OK, MISSING, CORRUPT, FAILED, CANCELLED),
    "demote": (OK, FAILED, REFUSED),
    "delete": (OK, FAILED),
    "store": (OK, FAILED),
}
Events = Iterator[ev.Event]


@dataclass(frozen=True)
class Config:
    """A small world, and what may happen in it."""

    name: str
    spec: CoreSpec
    requests: Callable[[World], Events]
    """What callers may ask now; answers and ends of what runs are added by the explorer."""
    first: tuple[ev.Event, ...] = ()
    """How the world begins, before the exploration."""
    ops_max: int = 3
    """No new requests while so many operations are in flight."""
    overdue: bool = True
    ticks: bool = True
    answers: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)
    """Instead of all that ``ANSWERS`` allows for a kind."""
    drain_every: int = 25


@dataclass
class Result:
    name: str
    states: int
    transitions: int
    drains: int
    complete: bool
    seconds: float


def explore(config: Config, deadline_s: float = NEVER_S) -> Result:
    """Visit every state that can be reached. Raises what a transition or a check raises, with the way that led there."""
    started_s = time.monotonic()
    core = TieringCore(config.spec)
    for event in config.first:
        core.handle(event)
    save, load = _freezer(config.spec)
    start = save(core.world)
    seen = {fingerprint(core.world)}
    ways: dict[bytes, tuple[bytes | None, ev.Event | None]] = {fingerprint(core.world): (None, None)}
    frontier: deque[tuple[bytes, bytes]] = deque([(start, fingerprint(core.world))])
    transitions = drains = 0
    while frontier and time.monotonic() - started_s < deadline_s:
        blob, origin = frontier.popleft()
        for event in events_of(config, load(blob)):
            core.world = world = load(blob)
            used_bytes = [tier.used_bytes for tier in world.tiers]
            try:
                core.handle(event)
                check(world)
                for tier, before in zip(world.tiers, used_bytes, strict=True):
                    assert tier.room_bytes is None or tier.used_bytes <= max(tier.room_bytes, before), "over budget"
                transitions += 1
                mark = fingerprint(world)
                if mark in seen:
                    continue
                seen.add(mark)
                ways[mark] = (origin, event)
                blob_after = save(world)
                frontier.append((blob_after, mark))
                if len(seen) % config.drain_every == 0:
                    drains += 1
                    drain(core)
            except Exception as error:
                error.add_note(f"{config.name}: " + "".join(f"\n  {e}" for e in (*_way(ways, origin), event)))
                raise
    return Result(config.name, len(seen), transitions, drains, not frontier, time.monotonic() - started_s)


def _way(ways: dict[bytes, tuple[bytes | None, ev.Event | None]], mark: bytes | None) -> list[ev.Event]:
    events = []
    while mark is not None:
        mark, event = ways[mark]
        if event is not None:
            events.append(event)
    return events[::-1]


def _freezer(spec: CoreSpec) -> tuple[Callable[[World], bytes], Callable[[bytes], World]]:
    """Copies of worlds by pickle, which is several times faster than copy.deepcopy; all share the spec."""

    def save(world: World) -> bytes:
        owners: list[Any] = [world, *world.pools, *world.tiers]
        for owner in owners:
            owner.spec = None
        blob = pickle.dumps(world, protocol=5)
        restore(world)
        return blob

    def load(blob: bytes) -> World:
        world: World = pickle.loads(blob)
        return restore(world)

    def restore(world: World) -> World:
        world.spec = spec
        for pool, pool_spec in zip(world.pools, spec.pools, strict=True):
            pool.spec = pool_spec
        for tier, tier_spec in zip(world.tiers, spec.tiers, strict=True):
            tier.spec = tier_spec
        return world

    return save, load


# -- what may happen --------------------------------------------------------------------------------------------------


def events_of(config: Config, world: World) -> list[ev.Event]:
    """Every event that may come next."""
    now_s = world.now_s
    events: list[ev.Event] = []
    for store in world.stores.values():
        answers = itertools.product(_allowed(config, "store"), repeat=len(store.blocks))
        events += [ev.StoreFinished(now_s, store.job, outcomes) for outcomes in answers]
    for op in world.ops.values():
        events += [ev.OpFinished(now_s, op.op, outcomes) for outcomes in _answers(config, op)]
        if config.overdue and op.kind in ("probe", "promote") and not _is_late(world, op):
            events.append(ev.OpOverdue(now_s, op.op))
    for job in world.loads.values():
        events.append(ev.Released(now_s, job.job))
        if config.overdue and not job.done:
            events.append(ev.LoadOverdue(now_s, job.job))
    for flush in world.flushes.values():
        events.append(ev.FlushOverdue(now_s, flush.job))
    if config.ticks and _has_clocks(world):
        events.append(ev.Touched(now_s + TICK_S, 0, ()))
    if len(world.ops) < config.ops_max:
        events += config.requests(world)
    return events


def _answers(config: Config, op: Op) -> Iterator[tuple[Outcome, ...]]:
    return itertools.product(_allowed(config, op.kind), repeat=len(op.items) + len(op.handles))


def _allowed(config: Config, kind: str) -> tuple[Outcome, ...]:
    return config.answers.get(kind, ANSWERS[kind])


def _is_late(world: World, op: Op) -> bool:
    if op.kind == "promote":
        return all(world.pools[b.pool].states[slot].name == "DOOMED" for b, slot, _ in op.items)
    return op.epoch != world.epoch or all(_generation(b.cells[op.tier]) != g for b, _, g in op.items)


def _generation(cell: Any) -> int:
    return -1 if cell is None else int(cell.generation)


def _has_clocks(world: World) -> bool:
    cells = (cell for block in world.blocks.values() for cell in block.cells if cell is not None)
    return (
        any(cell.until_s != NEVER_S for cell in cells)
        or any(tier.deletes_after_s > world.now_s for tier in world.tiers)
        or any(max(hold.rests_until_s, hold.looks_again_s) > world.now_s for hold in world.holds.values())
    )


# -- one form for what is the same ------------------------------------------------------------------------------------


def fingerprint(world: World) -> bytes:
    """Equal for states that behave alike."""
    fills = {slot: op for op in world.ops.values() if op.kind == "promote" for _, slot, _ in op.items}
    jobs = {job.job: _job(world, job) for job in world.loads.values()}
    pools = [
        (
            sorted(
                (state, owner.key if owner else b"", pool.loads[slot], pool.demotes[slot], slot in fills)
                for slot, (state, owner) in enumerate(zip(pool.states, pool.owner, strict=True))
            ),
            pool.policy.victims(len(pool.policy), lambda key: False),
        )
        for pool in world.pools
    ]
    blocks = sorted(
        (
            key,
            block.state,
            block.parent,
            min(block.hits, HITS_MAX) if world.counts_hits else 0,
            [
                cell and (cell.state, cell.reads, cell.stored_bytes, cell.until_s <= TICK_S + world.now_s)
                for cell in block.cells
            ],
            [jobs[job.job] for job in world.waiting.get(key, ())],
        )
        for key, block in world.blocks.items()
    )
    ops = sorted(_op(world, op, jobs) for op in world.ops.values())
    stores = sorted(
        [(b.key, world.pools[s.pool].states[slot]) for b, slot in zip(s.blocks, s.slots, strict=True)]
        for s in world.stores.values()
    )
    tiers = [_tier(world, tier) for tier in world.tiers]
    holds = [
        (
            h.keys,
            list(h.due),
            h.notified,
            h.rests_until_s > world.now_s,
            h.looks_again_s > world.now_s,
            h in world.holders.get(h.keys[0], ()),
        )
        for h in world.holds.values()
    ]
    flushes = sorted((sorted(f.remaining),) for f in world.flushes.values())
    rest = (
        sorted(jobs.values()),
        [jobs[j] for j in world.starved],
        holds,
        flushes,
        world.retry_wanted,
        sorted(world.foreign_leaving),
    )
    return pickle.dumps((pools, blocks, ops, stores, tiers, rest), protocol=5)


def _job(world: World, job: LoadJob) -> tuple[Any, ...]:
    shape = tuple(-1 if slot < 0 else world.pools[job.pool].states[slot] for slot in job.slots)
    return (
        job.keys,
        job.limit,
        job.protect,
        job.tail,
        job.cursor,
        job.scanned,
        shape,
        job.flight_bytes,
        job.done,
        job.announced,
    )


def _op(world: World, op: Op, jobs: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    items = [
        (
            block.key,
            world.blocks.get(block.key) is block,
            slot >= 0 and world.pools[block.pool].states[slot],
            _generation(block.cells[op.tier]) == generation,
        )
        for block, slot, generation in op.items
    ]
    starter = jobs.get(op.starter.job, ()) if op.starter is not None else ()
    return (op.kind, op.tier, op.epoch == world.epoch, op.cancelled, items, op.handles, starter)


def _tier(world: World, tier: Tier) -> tuple[Any, ...]:
    victims = tier.policy.victims(len(tier.policy), lambda key: False) if tier.policy is not None else []
    late = tier.deletes_after_s > world.now_s
    return (
        tier.state.value,
        list(tier.owed),
        list(tier.parked),
        list(tier.foreign),
        list(tier.unvouched.items()),
        victims,
        late,
    )


# -- the fair end -----------------------------------------------------------------------------------------------------


def drain(core: TieringCore) -> None:
    """From here on everything works and every caller lets go: nothing may be left in use, waiting or leaking."""
    world = core.world
    for name in world.tier_index:
        core.handle(ev.TierChanged(world.now_s, name, TierState.UP))
    for _ in range(DRAIN_STEPS_MAX):
        if world.ops:
            op = next(iter(world.ops.values()))
            core.handle(ev.OpFinished(world.now_s, op.op, (OK,) * (len(op.items) + len(op.handles))))
        elif world.stores:
            store = next(iter(world.stores.values()))
            core.handle(ev.StoreFinished(world.now_s, store.job, (OK,) * len(store.blocks)))
        elif world.loads:
            assert all(job.done for job in world.loads.values()), "a load does not end though nothing is in flight"
            core.handle(ev.Released(world.now_s, next(iter(world.loads))))
        else:
            break
        check(world)
    left = (*world.ops, *world.stores, *world.loads)
    assert not left, "it does not come to rest"
    assert not world.flushes, "a flush does not end"
    for pool in world.pools:
        assert pool.busy == 0, "slots stay busy"
        held = sum(block is not None and block.state is PrimaryState.READY for block in pool.owner)
        assert len(pool.free) + held == pool.spec.slots, "slots leak"
    for tier in world.tiers:
        assert not tier.owed, f"blocks stay owed to {tier.spec.name}"
        assert (tier.lent_bytes, tier.deleting_bytes, tier.asking) == (0, 0, 0), tier.spec.name


def at(world: World, *events: Callable[[float], ev.Event]) -> Events:
    """Events that take the time of the world."""
    return (event(world.now_s) for event in events)


def tier_changes(world: World, states: Sequence[TierState] = (TierState.UP, TierState.DOWN)) -> Events:
    """Each tier to each of the states it is not in."""
    for tier in world.tiers:
        for state in states:
            if tier.state is not state:
                yield ev.TierChanged(world.now_s, tier.spec.name, state)
