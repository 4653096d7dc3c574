"""The checks themselves: each kind of contradiction, made by hand, is found and said in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.worlds import Bench, chain, exclusive, shared, spec_of
from tiering.core.events import FlushRequested, HoldRequested, LoadRequested
from tiering.core.invariants import check
from tiering.core.state import Block, Cell, FlushJob, LoadJob, World
from tiering.core.transitions import CellState, PrimaryState, SlotState
from tiering.errors import InvariantViolation
from tiering.types import ScanEntry, TierState


def busy_world() -> World:
    """Something of everything: copies, reads, stores, questions and deletes in flight, leases, a flush and a hold."""
    bench = Bench(spec_of(8, exclusive(room=4, queue=2, batch=2), shared(queue=2)), up=False)
    bench.scan("nvme", ScanEntry(b"f" * 40, 8192, foreign=True), ScanEntry(b"far", 8192))
    for name in ("nvme", "redis"):
        bench.tier(name, TierState.UP)
    bench.put(chain(4))
    bench.probe((b"asked",))
    bench.handle(LoadRequested(0.0, 0, (b"far",)))
    bench.handle(LoadRequested(0.0, 0, chain(2)))
    bench.store((b"copy",))
    bench.handle(HoldRequested(0.0, 0, (b"held",)))
    bench.handle(FlushRequested(0.0))
    return bench.core.world


def block(world: World, key: bytes) -> Block:
    return world.blocks[key]


def cell(world: World, key: bytes, tier: int = 0) -> Cell:
    found = world.blocks[key].cells[tier]
    assert found is not None
    return found


def slot(world: World, key: bytes) -> int:
    return world.blocks[key].slot


def put(target: object, name: str, value: object) -> None:
    setattr(target, name, value)


def free_in_use(world: World) -> None:
    """A slot that is FREE and, by all books, lent to a demotion."""
    pool = world.pools[0]
    at = slot(world, b"00")
    pool.states[at] = SlotState.FREE
    pool.free.append(at)


def unread(world: World) -> None:
    """The block that is being read has lost its cell, and counts as one that only the primary tier has."""
    block(world, b"far").cells[0] = None
    block(world, b"far").copies = 1


def vouch_for_nothing(world: World) -> None:
    world.blocks[b"asked"].cells[0] = Cell(CellState.ABSENT)
    world.tiers[0].unvouched[b"asked"] = True


SABOTAGE: list[tuple[str, Callable[[World], object]]] = [
    ("free slots, each once", lambda w: w.pools[0].free.append(w.pools[0].free[0])),
    ("pool 0: free slots:", lambda w: w.pools[0].free.pop()),
    ("leases: 2", lambda w: w.pools[0].loads.__setitem__(slot(w, b"00"), 2)),
    ("loans to demotions", lambda w: w.pools[0].demotes.__setitem__(slot(w, b"00"), 3)),
    (
        "fills in flight: 0, but by the recount 1",
        lambda w: w.pools[0].states.__setitem__(slot(w, b"03"), SlotState.FILLING),
    ),
    ("condemned, but nobody uses it", lambda w: w.pools[0].states.__setitem__(slot(w, b"03"), SlotState.CONDEMNED)),
    ("in use though it holds no block", free_in_use),
    ("owned: False", lambda w: w.pools[0].owner.__setitem__(slot(w, b"03"), None)),
    ("where its owner says it is", lambda w: put(block(w, b"03"), "pool", 7)),
    ("its owner has no record", lambda w: w.blocks.pop(b"03")),
    ("its owner's state", lambda w: put(block(w, b"03"), "state", PrimaryState.FILLING)),
    ("busy slots", lambda w: put(w.pools[0], "busy", 0)),
    ("blocks that the policy knows", lambda w: w.pools[0].policy.forget([b"03"], evicted=True)),
    ("its record's key", lambda w: w.blocks.__setitem__(b"zz", w.blocks[b"asked"])),
    ("has a slot", lambda w: put(block(w, b"asked"), "slot", 0)),
    ("copies", lambda w: put(block(w, b"03"), "copies", 2)),
    ("children", lambda w: put(block(w, b"00"), "children", 0)),
    ("a record that says nothing", lambda w: w.blocks.__setitem__(b"zz", Block(b"zz", 0, 2))),
    ("parents without a record", lambda w: put(block(w, b"copy"), "parent", b"zz")),
    ("an empty list of waiters", lambda w: w.waiting.__setitem__(b"zz", [])),
    ("awaited but not FILLING", lambda w: w.waiting.__setitem__(b"03", list(w.loads.values()))),
    ("reads", lambda w: put(cell(w, b"far"), "reads", 0)),
    ("nothing is in flight for it", lambda w: put(cell(w, b"asked", 1), "generation", 9)),
    ("expires", lambda w: put(cell(w, b"far"), "until_s", 1.0)),
    ("bytes in a tier without a budget", lambda w: put(cell(w, b"00", 1), "stored_bytes", 1)),
    ("its bytes are not accounted", lambda w: put(cell(w, b"far"), "stored_bytes", 0)),
    (
        "unvouched, but without bytes",
        vouch_for_nothing,
    ),
    ("unvouched", lambda w: w.tiers[0].unvouched.__setitem__(b"far", True)),
    ("reads of blocks without a cell", unread),
    ("tier nvme: blocks that the policy knows", lambda w: w.tiers[0].policy.forget([b"far"], evicted=True)),  # type: ignore[union-attr]
    ("tier nvme: index", lambda w: w.tier_index.__setitem__("nvme", 1)),
    ("bytes used", lambda w: put(w.tiers[0], "used_bytes", 0)),
    ("bytes being deleted", lambda w: put(w.tiers[0], "deleting_bytes", 1)),
    ("bytes lent: 1", lambda w: put(w.tiers[0], "lent_bytes", 1)),
    ("keys being asked about", lambda w: put(w.tiers[1], "asking", 0)),
    ("both owed and parked", lambda w: w.tiers[0].parked.__setitem__(next(iter(w.tiers[0].owed)), "")),
    ("owed but not READY", lambda w: w.tiers[0].owed.__setitem__(b"zz", None)),
    ("owed while STORING", lambda w: w.tiers[0].owed.__setitem__(b"00", None)),
    ("unvouched blocks without a record", lambda w: w.tiers[0].unvouched.__setitem__(b"zz", True)),
    ("its positions are out of order", lambda w: put(last_load(w), "limit", 0)),
    ("awaited positions", lambda w: put(last_load(w), "pending", 1)),
    ("done: False", lambda w: put(last_load(w), "done", False)),
    ("sources beyond its limit", lambda w: last_load(w).sources.__setitem__(5, 0)),
    ("bytes in flight", lambda w: put(last_load(w), "flight_bytes", 1)),
    ("starved, but not open", lambda w: w.starved.__setitem__(last_load(w).job, last_load(w))),
    ("load jobs that wait", lambda w: w.waiting.clear()),
    ("done, but not reported", lambda w: w.flushes.__setitem__(99, FlushJob(99, set()))),
    ("waits in vain", lambda w: w.flushes.__setitem__(99, FlushJob(99, {(0, b"zz")}))),
    ("its holders are", lambda w: w.holders.__setitem__(b"zz", [])),
    ("some of which are over", lambda w: w.holds.clear()),
    ("is due, but READY", lambda w: next(iter(w.holds.values())).due.__setitem__(b"00", None)),
    ("is due, but not held", lambda w: next(iter(w.holds.values())).due.__setitem__(b"zz", None)),
    ("counters: queries", lambda w: put(w.counters, "query_blocks", 0)),
    ("counters: hits by tier", lambda w: w.counters.hit_blocks_by_tier.clear()),
    ("more kinds of failure than failures", lambda w: put(w.counters, "corrupt_blocks", 1)),
    ("counters: resets", lambda w: put(w.counters, "resets", 1)),
]


def last_load(world: World) -> LoadJob:
    return list(world.loads.values())[-1]


def test_a_busy_world_is_in_order() -> None:
    check(busy_world())


@pytest.mark.parametrize(("message", "break_it"), SABOTAGE, ids=[message for message, _ in SABOTAGE])
def test_a_contradiction_is_found(message: str, break_it: Callable[[World], object]) -> None:
    world = busy_world()
    break_it(world)
    with pytest.raises(InvariantViolation) as caught:
        check(world)
    assert message in str(caught.value)


def test_limits_are_checked_too() -> None:
    """Consistent with itself, but too much."""
    for tier, name, value, message in (
        (0, "queue_bytes_max", 1, "bytes lent are too many"),
        (1, "probe", 0, "keys being asked about are too many"),
    ):
        world = busy_world()
        if name == "probe":
            object.__setattr__(world.spec, "probe_keys_max", value)
        else:
            object.__setattr__(world.tiers[tier].spec, name, value)
        with pytest.raises(InvariantViolation, match=message):
            check(world)


def test_a_load_that_would_never_end_is_found() -> None:
    bench = Bench(spec_of(2))
    bench.load((b"a",))
    job = last_load(bench.core.world)
    job.limit, job.done = 1, False
    bench.core.world.counters.miss_blocks -= 1
    with pytest.raises(InvariantViolation, match="waits for nothing and would never end"):
        check(bench.core.world)
    bench.core.world.starved[job.job] = job
    with pytest.raises(InvariantViolation, match="starved, and nothing is in flight"):
        check(bench.core.world)
