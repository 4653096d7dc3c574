"""Reads that fail, come too late or are wanted no more: what the load gets, and what is believed afterwards."""

from __future__ import annotations

from itertools import product

import pytest

from tests.core.worlds import (
    CANCELLED,
    CORRUPT,
    FAILED,
    MISSING,
    OK,
    Bench,
    chain,
    exclusive,
    far,
    shared,
    spec_of,
)
from tiering.core.commands import Cancel, Delete, Demote, JobDone, Probe, Promote
from tiering.core.events import LoadOverdue, OpFinished
from tiering.types import Outcome, ScanEntry, TierState


def test_batch_poisoned_by_one() -> None:
    """row 23: one missing block ends the run there; the good ones behind it are kept for the next request."""
    bench = far(4, spec_of(8, exclusive()))
    plan = bench.load(chain(4))
    bench.answer(bench.one(Promote), OK, MISSING, OK, OK)
    assert bench.one(JobDone) == JobDone(plan.job, 1)
    bench.release(plan.job)
    assert bench.ready() == {b"00", b"02", b"03"}
    assert bench.core.counters.missing_blocks == 1


def test_stale_verdict() -> None:
    """row 7: one failed load, then a miss; after a new store the block is found again."""
    for outcome in (MISSING, CORRUPT, FAILED):
        bench = far(1, spec_of(4, exclusive()))
        plan = bench.load(chain(1))
        bench.answer(bench.one(Promote), outcome)
        assert bench.one(JobDone) == JobDone(plan.job, 0)
        bench.release(plan.job)
        assert bench.lookup(chain(1)).match.blocks == 0
        assert bench.load(chain(1)).done
        assert not bench.take(Promote), "not asked for again"
        assert bench.put(chain(1)) == 1
        bench.drain()
        assert bench.has("nvme") == set(chain(1))


def test_vanished_file() -> None:
    """row 21: a shared tier lost the block behind our back: a miss, and a question the next time."""
    bench = Bench(spec_of(4, shared()))
    bench.probe(chain(1))
    bench.drain()
    assert bench.lookup(chain(1)).match.blocks == 1
    plan = bench.load(chain(1))
    bench.answer(bench.one(Promote), MISSING)
    assert bench.one(JobDone) == JobDone(plan.job, 0)
    assert bench.lookup(chain(1)).match.blocks == 0
    assert not bench.lookup(chain(1)).undecided
    bench.now_s += bench.spec.verdict_ttl_s
    assert bench.lookup(chain(1)).undecided == chain(1)


def test_wrong_bytes_served() -> None:
    """row 13: a corrupt block is a miss, is counted, and is deleted at once."""
    for tier in (exclusive(), exclusive(room=None), shared()):
        bench = Bench(spec_of(4, tier))
        bench.put((b"a", b"b"))
        bench.drain()
        bench.put(chain(4))
        bench.drain()
        plan = bench.load((b"a", b"b"))
        bench.answer(bench.one(Promote), CORRUPT, OK)
        assert bench.one(JobDone).blocks == 0
        assert bench.one(Delete).keys == (b"a",)
        assert bench.core.counters.corrupt_blocks == 1
        assert bench.lookup((b"a",)).match.blocks == 0
        bench.release(plan.job)


def test_a_corrupt_block_is_stored_again_once_it_is_deleted() -> None:
    """row 13: recomputed meanwhile, it is not forgotten that the tier should have it."""
    bench = far(1, spec_of(4, exclusive()))
    plan = bench.load(chain(1))
    bench.answer(bench.one(Promote), CORRUPT)
    bench.release(plan.job)
    delete = bench.one(Delete)
    bench.put(chain(1))
    assert not bench.take(Demote), "not while the old one is being deleted"
    bench.answer(delete)
    bench.answer(bench.one(Demote))
    assert bench.has("nvme") == set(chain(1))


def test_a_tier_that_cannot_delete_is_asked_again_later() -> None:
    bench = Bench(spec_of(4, shared(can_delete=False)))
    bench.probe(chain(1))
    bench.drain()
    plan = bench.load(chain(1))
    bench.answer(bench.one(Promote), CORRUPT)
    bench.release(plan.job)
    assert not bench.take(Delete)
    assert bench.lookup(chain(1)).match.blocks == 0
    bench.now_s += bench.spec.verdict_ttl_s
    assert bench.lookup(chain(1)).undecided == chain(1)


def test_the_next_tier_stands_in() -> None:
    """A block that the near tier fails to give is read from the far one, and the request does not notice."""
    for outcome in (MISSING, CORRUPT, FAILED):
        bench = Bench(spec_of(1, exclusive(), shared()))
        bench.put((b"a",))
        bench.drain()
        bench.put((b"x",))
        bench.drain()
        plan = bench.load((b"a",))
        near = bench.one(Promote)
        assert near.tier == "nvme"
        bench.answer(near, outcome)
        second = bench.one(Promote)
        assert (second.tier, second.items) == ("redis", near.items)
        bench.answer(second)
        assert bench.one(JobDone) == JobDone(plan.job, 1)
        assert bench.core.counters.hit_blocks_by_tier == {"redis": 1}
        bench.release(plan.job)


def test_no_next_tier_for_what_nobody_awaits() -> None:
    bench = Bench(spec_of(1, exclusive(), shared()))
    bench.put((b"a",))
    bench.drain()
    bench.put((b"x",))
    bench.drain()
    plan = bench.load((b"a",))
    bench.release(plan.job)
    bench.answer(bench.one(Promote), FAILED)
    assert not bench.take(Promote)
    assert len(bench.core.world.pools[0].free) == 1


def test_no_next_tier_for_a_job_that_just_ended() -> None:
    """One read of a batch may stand in elsewhere while another, of the same batch, ends the only job that wants it."""
    bench = Bench(spec_of(2, exclusive(), shared(rule="never")), up=False)
    bench.scan("nvme", ScanEntry(b"a", 8192), ScanEntry(b"b", 8192))
    bench.tier("nvme", TierState.UP)
    bench.tier("redis", TierState.UP)
    bench.probe((b"a",))
    bench.drain()
    first, second = bench.load((b"a", b"b")), bench.load((b"b", b"a"))
    bench.release(first.job)
    bench.answer(bench.one(Promote), MISSING)
    assert bench.one(JobDone) == JobDone(second.job, 0)
    assert not bench.take(Promote), "redis has a, but nobody wants it any more"
    assert len(bench.core.world.pools[0].free) == 2


def test_abort_at_each_state() -> None:
    """row 25: given up at any moment, a load leaves no lease, no waiter and no slot behind."""
    for at, outcome in product(range(4), (OK, MISSING, CORRUPT, FAILED, CANCELLED)):
        bench = far(4, spec_of(4, exclusive(batch=2)))
        plan = bench.load(chain(4))
        first, second = bench.take(Promote)
        for number, read in enumerate((first, second, None)):
            if number == at:
                bench.release(plan.job)
            if read is not None:
                bench.answer(read, outcome)
        if at == 3:
            bench.release(plan.job)
        bench.drain()
        pool = bench.core.world.pools[0]
        assert (sum(pool.loads), pool.busy) == (0, 0)
        assert not bench.core.world.waiting
        assert not bench.core.world.loads
        bench.release(plan.job)
        assert bench.core.counters.unknown_completions == 1


def test_reads_after_abort() -> None:
    """row 27: reads of an aborted request that are still queued are cancelled, and none is begun."""
    bench = far(8, spec_of(8, exclusive(batch=2), window=4))
    plan = bench.load(chain(8))
    reads = bench.take(Promote)
    assert len(reads) == 2
    bench.release(plan.job)
    assert [command.op for command in bench.take(Cancel)] == [read.op for read in reads]
    for read in reads:
        bench.answer(read, CANCELLED)
    assert not bench.take(Promote)
    assert len(bench.core.world.pools[0].free) == 8
    assert bench.has("nvme") == set(chain(8)), "the verdict is as it was"


def test_a_read_that_another_request_joined_is_not_cancelled() -> None:
    """row 27: only the last one to leave cancels, whoever began it."""
    bench = far(2, spec_of(4, exclusive()))
    first, second = bench.load(chain(2)), bench.load(chain(2))
    read = bench.one(Promote)
    bench.release(first.job)
    assert not bench.take(Cancel)
    bench.release(second.job)
    assert bench.one(Cancel).op == read.op
    third = bench.load(chain(2))
    assert not bench.take(Promote), "it joins what is in flight"
    bench.answer(read, CANCELLED)
    again = bench.one(Promote)
    assert again.items == read.items, "cancelled in vain, so it is read again"
    bench.answer(again)
    assert bench.one(JobDone) == JobDone(third.job, 2)


def test_a_closing_driver_ends_a_load() -> None:
    """What the driver drops of its own accord is not asked for again."""
    bench = far(2, spec_of(4, exclusive()))
    plan = bench.load(chain(2))
    bench.answer(bench.one(Promote), CANCELLED)
    assert bench.one(JobDone) == JobDone(plan.job, 0)
    assert not bench.take(Promote)


def test_no_deadline() -> None:
    """row 8: past its deadline a read is a miss; the slot is not used again before the late bytes have landed."""
    bench = far(2, spec_of(2, exclusive()))
    plan = bench.load(chain(2))
    read = bench.one(Promote)
    bench.overdue(read)
    assert bench.one(JobDone) == JobDone(plan.job, 0)
    bench.release(plan.job)
    assert bench.lookup(chain(2)).match.blocks == 0
    assert not bench.store(chain(2)).grants, "both slots wait for their bytes"
    bench.overdue(read)
    bench.answer(read)
    assert bench.ready() == set(), "and nobody is told that they came"
    assert bench.core.counters.doomed_slots == 2
    assert bench.core.counters.stale_completions == 2
    assert len(bench.store(chain(2)).grants) == 2


def test_an_overdue_key_is_stored_again_elsewhere() -> None:
    """row 8: late bytes never land in the slot of the new copy, and change nothing about it."""
    for late in (OK, MISSING, CORRUPT, FAILED, CANCELLED):
        bench = far(1, spec_of(2, exclusive()))
        bench.load(chain(1))
        read = bench.one(Promote)
        bench.overdue(read)
        plan = bench.store(chain(1))
        assert [grant.slot for grant in plan.grants] != [item.slot for item in read.items]
        bench.answer(read, late)
        bench.filled(plan)
        assert bench.ready() == set(chain(1))
        assert bench.one(Demote).items[0].slot == plan.grants[0].slot


def test_a_late_landing_does_not_undo_a_newer_verdict() -> None:
    """row 8: asked again meanwhile, the tier said yes; the old read's failure is about the past."""
    bench = far(1, spec_of(2, exclusive()))
    bench.load(chain(1))
    read = bench.one(Promote)
    bench.overdue(read)
    bench.take(JobDone)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.probe(chain(1))
    bench.answer(bench.one(Probe))
    assert bench.has("nvme") == set(chain(1))
    bench.answer(read, MISSING)
    assert bench.has("nvme") == set(chain(1))
    plan = bench.load(chain(1))
    bench.answer(bench.one(Promote))
    assert bench.one(JobDone) == JobDone(plan.job, 1)


def test_an_overdue_load_ends_with_what_is_ready() -> None:
    bench = far(4, spec_of(8, exclusive(batch=2)))
    plan = bench.load(chain(4))
    first, second = bench.take(Promote)
    bench.answer(first)
    assert not bench.take(JobDone)
    bench.handle(LoadOverdue(0.0, plan.job))
    assert bench.one(JobDone) == JobDone(plan.job, 2)
    assert bench.one(Cancel).op == second.op
    bench.answer(second)
    assert len(bench.core.job_slots(plan.job)) == 2
    bench.handle(LoadOverdue(0.0, plan.job))
    assert not bench.take(JobDone)
    bench.release(plan.job)
    assert bench.ready() == set(chain(4)), "late bytes land harmlessly"
    bench.handle(LoadOverdue(0.0, plan.job))
    assert bench.core.counters.unknown_completions == 1


def test_a_tier_that_is_down_is_passed_over() -> None:
    bench = far(1, spec_of(2, exclusive()))
    bench.tier("nvme", TierState.DOWN)
    assert bench.lookup(chain(1)).match.blocks == 0
    assert bench.load(chain(1)).done
    bench.tier("nvme", TierState.DEGRADED)
    assert bench.lookup(chain(1)).match.blocks == 1
    assert not bench.load(chain(1)).done, "reads work while stores do not"


@pytest.mark.parametrize("outcomes", [(), (OK,), (OK, OK, OK)])
def test_the_wrong_number_of_outcomes_is_a_failure(outcomes: tuple[Outcome, ...]) -> None:
    bench = far(2, spec_of(4, exclusive()))
    plan = bench.load(chain(2))
    bench.handle(OpFinished(0.0, bench.one(Promote).op, outcomes))
    assert bench.one(JobDone) == JobDone(plan.job, 0)
    assert not bench.ready()
    bench.handle(OpFinished(0.0, 999, (OK,)))
    assert bench.core.counters.unknown_completions == 1
