"""A new weight epoch: everything misses at once, and whatever is in motion lands without a trace."""

from __future__ import annotations

from tests.core.worlds import CORRUPT, FAILED, OK, STORED_BYTES, Bench, chain, exclusive, shared, spec_of
from tiering.core.commands import Cancel, Delete, Demote, FlushDone, IoCommand, JobDone, Probe, Promote, SlotsFreed
from tiering.core.events import OpOverdue, Reset
from tiering.types import ScanEntry, TierState


def test_stale_weights() -> None:
    """row 16: after a reset every tier misses."""
    bench = Bench(spec_of(4, exclusive(), shared()))
    bench.put(chain(4))
    bench.drain()
    bench.handle(Reset(0.0))
    assert bench.lookup(chain(4)).match.blocks == 0
    assert bench.load(chain(4)).slots == ()
    assert not bench.core.world.blocks
    assert len(bench.core.world.pools[0].free) == 4
    assert all(tier.state is TierState.OPENING for tier in bench.core.world.tiers)


def test_no_deadline_for_copies_in_flight() -> None:
    """row 8: a copy that was under way keeps its slot until it has landed, and then counts for nothing."""
    bench = Bench(spec_of(2))
    old = bench.store(chain(2))
    bench.handle(Reset(0.0))
    assert bench.store(chain(2)).grants == ()
    bench.filled(old)
    assert bench.ready() == set()
    new = bench.store(chain(2))
    assert len(new.grants) == 2
    bench.filled(new)
    assert bench.ready() == set(chain(2))
    assert bench.core.counters.doomed_slots == 2


def test_leased_bytes_stay_until_they_are_released() -> None:
    """row 16: a block that is being read is condemned, not freed: nobody overwrites what a load still copies."""
    bench = Bench(spec_of(2))
    bench.put(chain(2))
    lease = bench.load(chain(1))
    bench.handle(Reset(0.0))
    assert bench.core.counters.condemned_slots == 1
    plan = bench.store(chain(2))
    assert len(plan.grants) == 1
    assert plan.grants[0].slot not in lease.slots
    bench.release(lease.job)
    assert len(bench.core.world.pools[0].free) == 1
    bench.filled(plan)


def test_operations_in_flight_land_without_a_trace() -> None:
    bench = Bench(spec_of(6, exclusive(), shared()), up=False)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES), ScanEntry(b"b", STORED_BYTES))
    for tier in bench.spec.tiers:
        bench.tier(tier.name, TierState.UP)
    bench.load((b"a",))
    bench.put((b"x",))
    bench.probe((b"q",))
    bench.load((b"b",))
    read_a, read_b = bench.take(Promote)
    bench.answer(read_b, CORRUPT)
    commands: list[IoCommand] = [read_a, *bench.take(Demote), *bench.take(Probe), *bench.take(Delete)]
    assert {type(c) for c in commands} == {Promote, Demote, Probe, Delete}
    bench.take(JobDone)
    bench.handle(Reset(0.0))
    assert bench.one(JobDone).blocks == 0
    assert {c.op for c in bench.take(Cancel)} == {c.op for c in commands}, "what is still queued need not be done"
    for tier in bench.spec.tiers:
        bench.tier(tier.name, TierState.UP)
    bench.put((b"x",))
    bench.take(Demote)
    before = bench.has("nvme") | bench.has("redis")
    for command in commands:
        bench.handle(OpOverdue(0.0, command.op))
        bench.answer(command)
    assert bench.has("nvme") | bench.has("redis") == before
    assert bench.core.counters.stale_completions >= len(commands)
    assert bench.core.world.tiers[0].used_bytes == STORED_BYTES
    assert len(bench.core.world.pools[0].free) == 5


def test_stale_deletes_change_no_account() -> None:
    bench = Bench(spec_of(2, exclusive(room=1, batch=1)), up=False)
    bench.scan("nvme", ScanEntry(b"f" * 40, STORED_BYTES, foreign=True))
    bench.tier("nvme", TierState.UP)
    bench.put((b"a",))
    delete = bench.one(Delete)
    bench.handle(Reset(0.0))
    bench.scan("nvme", ScanEntry(b"f" * 40, STORED_BYTES, foreign=True))
    bench.answer(delete)
    assert bench.core.world.tiers[0].used_bytes == STORED_BYTES


def test_a_flush_ends_with_its_epoch() -> None:
    bench = Bench(spec_of(4, exclusive(queue=1)))
    bench.put(chain(3))
    job = bench.flush()
    bench.handle(Reset(0.0))
    assert bench.one(FlushDone) == FlushDone(job, 0, {"nvme": 3})
    bench.drain()


def test_whoever_waits_for_slots_hears_of_it() -> None:
    bench = Bench(spec_of(2))
    bench.put(chain(2))
    bench.load(chain(2))
    assert bench.store((b"x",), patient=True).retry
    bench.handle(Reset(0.0))
    assert bench.take(SlotsFreed)


def test_lent_bytes_and_questions_survive_as_what_they_are() -> None:
    """What the old epoch's operations still pin counts against the limits of the new one."""
    bench = Bench(spec_of(4, shared(queue=2, batch=2)))
    bench.put(chain(2))
    old = bench.one(Demote)
    bench.handle(Reset(0.0))
    bench.tier("redis", TierState.UP)
    bench.put((b"x", b"y"))
    assert not bench.take(Demote), "the lane is full of the old epoch's stores"
    bench.answer(old, FAILED)
    assert len(bench.one(Demote).items) == 2


def test_a_second_reset() -> None:
    bench = Bench(spec_of(2))
    first = bench.store(chain(1))
    bench.handle(Reset(0.0))
    second = bench.store(chain(1))
    bench.handle(Reset(0.0))
    bench.filled(first, OK)
    bench.filled(second, OK)
    assert bench.ready() == set()
    assert len(bench.core.world.pools[0].free) == 2
