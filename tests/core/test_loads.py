"""Leases, joins and promotions: what a load gets, from where, and what happens when nobody wants it any more."""

from __future__ import annotations

from itertools import product

import pytest

from tests.core.worlds import (
    BLOCK_BYTES,
    CANCELLED,
    CORRUPT,
    FAILED,
    MISSING,
    OK,
    Bench,
    chain,
    exclusive,
    shared,
    spec_of,
)
from tiering.core.commands import Cancel, Delete, Demote, JobDone, Probe, Promote, Touch
from tiering.core.events import LoadOverdue, OpFinished, Touched
from tiering.core.state import CoreSpec
from tiering.types import Outcome, ScanEntry, TierState


def far(n: int, spec: CoreSpec, name: str = "", tier: str = "nvme") -> Bench:
    """A bench whose bounded tier holds a chain of ``n`` blocks that the primary tier lacks."""
    bench = Bench(spec, up=False)
    keys = chain(n, name)
    bench.scan(tier, *(ScanEntry(k, 8192, p) for k, p in zip(keys, (None, *keys), strict=False)))
    for one in spec.tiers:
        bench.tier(one.name, TierState.UP)
    return bench


def test_self_thrash() -> None:
    """row 1: a prefix of 32 blocks for 8 slots reads 8 blocks, once, and returns the 8 at its head."""
    bench = far(32, spec_of(8, exclusive(batch=4)))
    keys = chain(32)
    assert bench.lookup(keys).match.loadable_blocks == 8
    plan = bench.load(keys)
    reads = bench.take(Promote)
    assert [item.key for command in reads for item in command.items] == list(keys[:8])
    for command in reads:
        bench.answer(command)
    assert not bench.take(Promote)
    assert bench.one(JobDone).blocks == 8
    assert len(bench.core.job_slots(plan.job)) == 8
    bench.release(plan.job)
    assert bench.ready() == set(keys[:8])
    again = bench.load(keys)
    assert (again.done, len(again.slots)) == (True, 8)
    assert not bench.take(Promote), "the second time nothing is read at all"
    assert bench.core.counters.evicted_blocks == 0


def test_promotion_for_waiting_requests() -> None:
    """row 2: looking takes no slot and reads nothing, however many requests look; stores keep their reserve."""
    bench = far(100, spec_of(10, exclusive(room=100), reserve=2))
    for _ in range(50):
        assert bench.lookup(chain(100)).match.loadable_blocks == 8
        bench.probe(chain(100))
    assert not bench.inbox
    assert len(bench.core.world.pools[0].free) == 10
    plan = bench.load(chain(100))
    assert len(bench.core.world.pools[0].free) == 2
    assert len(bench.store(chain(2, "new")).grants) == 2
    bench.drain()
    assert bench.one(JobDone).blocks == 8
    bench.release(plan.job)


def test_check_then_pin() -> None:
    """row 24: what a load reports is leased in the same step; nothing evicts it before its release."""
    bench = Bench(spec_of(4))
    bench.put(chain(2))
    plan = bench.load(chain(2))
    assert plan.done
    bench.put(chain(4, "other"))
    assert bench.ready() >= set(chain(2))
    assert len(bench.store(chain(4, "more")).grants) == 2
    slots = {bench.core.world.blocks[key].slot for key in chain(2)}
    assert set(plan.slots) == slots
    bench.release(plan.job)
    assert len(bench.store(chain(2, "yet-more")).grants) == 2


def test_a_load_ends_where_nobody_has_the_block() -> None:
    bench = Bench(spec_of(8, exclusive()))
    bench.put(chain(3))
    plan = bench.load((*chain(3), b"nowhere", b"beyond"))
    assert (plan.done, len(plan.slots)) == (True, 3)
    assert bench.core.counters.miss_blocks == 2
    assert (bench.core.counters.hit_blocks, bench.core.counters.hit_blocks_by_tier) == (3, {"primary": 3})


def test_a_load_joins_a_copy_in_flight() -> None:
    bench = Bench(spec_of(4))
    copy = bench.store(chain(2))
    plan = bench.load(chain(2))
    assert (plan.done, plan.slots) == (False, ())
    bench.filled(copy)
    assert bench.one(JobDone).blocks == 2
    assert set(bench.core.job_slots(plan.job)) == {grant.slot for grant in copy.grants}
    bench.release(plan.job)


def test_a_load_that_joined_a_copy_that_failed_ends_before_it() -> None:
    bench = Bench(spec_of(4))
    copy = bench.store(chain(3))
    plan = bench.load(chain(3))
    bench.filled(copy, OK, FAILED, OK)
    assert bench.one(JobDone) == JobDone(plan.job, 1)
    bench.release(plan.job)


def test_two_loads_share_one_read() -> None:
    bench = far(2, spec_of(4, exclusive()))
    first, second = bench.load(chain(2)), bench.load(chain(2))
    read = bench.one(Promote)
    bench.answer(read)
    assert {done.job: done.blocks for done in bench.take(JobDone)} == {first.job: 2, second.job: 2}
    assert bench.core.job_slots(first.job) == bench.core.job_slots(second.job)
    assert bench.core.counters.hit_blocks_by_tier == {"nvme": 4}


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


def test_no_fill_of_nearer_tiers() -> None:
    """row 6: after one promotion from the far tier the near one has the block too, and serves it."""
    bench = Bench(spec_of(1, exclusive(), shared(rule="never")))
    bench.probe((b"a",))
    bench.drain()
    plan = bench.load((b"a",))
    read = bench.one(Promote)
    assert read.tier == "redis"
    bench.answer(read)
    store = bench.one(Demote)
    assert (store.tier, [item.key for item in store.items]) == ("nvme", [b"a"])
    bench.answer(store)
    bench.release(plan.job)
    bench.put((b"x",))
    bench.drain()
    plan = bench.load((b"a",))
    assert bench.one(Promote).tier == "nvme"
    bench.release(plan.job)


def test_echo() -> None:
    """row 30: a promoted block is stored back nowhere: not where it came from, nor in farther tiers."""
    bench = far(1, spec_of(2, exclusive("nvme"), shared()))
    bench.load(chain(1))
    bench.answer(bench.one(Promote))
    assert not bench.take(Demote)
    bench.put(chain(1))
    assert [command.tier for command in bench.take(Demote)] == ["redis"], "offered by the engine it is owed again"


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


def test_a_load_has_a_byte_budget() -> None:
    """DESIGN section 7: so many bytes in flight a request, the next ones as they land; all in order."""
    bench = far(10, spec_of(16, exclusive(batch=2), window=4))
    plan = bench.load(chain(10))
    read: list[bytes] = []
    while reads := bench.take(Promote):
        in_flight = [item.key for command in reads for item in command.items]
        assert len(in_flight) <= 4
        read += in_flight
        for command in reads:
            bench.answer(command)
    assert read == list(chain(10))
    assert bench.one(JobDone) == JobDone(plan.job, 10)


def test_a_block_larger_than_the_budget_is_read_alone() -> None:
    spec = spec_of(4, exclusive(batch=2))
    bench = far(2, type(spec)(spec.pools, spec.tiers, BLOCK_BYTES - 1))
    plan = bench.load(chain(2))
    for _ in range(2):
        read = bench.one(Promote)
        assert len(read.items) == 1
        bench.answer(read)
    assert bench.one(JobDone) == JobDone(plan.job, 2)


def test_ready_blocks_between_promoted_ones_are_leased_at_once() -> None:
    bench = far(3, spec_of(4, exclusive()))
    bench.put((b"01",))
    plan = bench.load(chain(3))
    assert (plan.done, plan.slots) == (False, ())
    assert sum(bench.core.world.pools[0].loads) == 1
    assert [item.key for item in bench.one(Promote).items] == [b"00", b"02"]
    bench.release(plan.job)


def test_own_tail_first_victim() -> None:
    """row 1: blocks of the request past its stop make room for those before it."""
    bench = far(6, spec_of(4, exclusive()))
    plan = bench.load(chain(6)[:4])
    bench.drain()
    bench.release(plan.job)
    for key in chain(6)[4:]:
        bench.put((key,))
    bench.drain()
    assert bench.ready() == {b"00", b"01", b"04", b"05"}
    plan = bench.load(chain(6))
    assert [item.key for item in bench.one(Promote).items] == [b"02", b"03"]
    assert bench.ready() == {b"00", b"01"}
    bench.release(plan.job)


def test_what_is_not_idle_of_the_own_tail_stays() -> None:
    bench = far(6, spec_of(4, exclusive(queue=1)))
    for key in chain(6)[2:]:
        bench.put((key,))
    lease = bench.load((b"05",))
    plan = bench.load(chain(6))
    assert b"05" in bench.ready(), "leased by another"
    assert len(bench.one(Promote).items) == 1
    bench.release(plan.job)
    bench.release(lease.job)


def test_a_load_waits_for_slots_that_will_come_free() -> None:
    bench = far(4, spec_of(4, exclusive()))
    bench.put(chain(2, "busy"))
    demote = bench.one(Demote)
    copy = bench.store(chain(2, "copy"))
    plan = bench.load(chain(4))
    assert plan.done, "all slots are in use by others: nothing fits, and that is said at once"
    bench.release(plan.job)
    bench.filled(copy)
    bench.answer(demote)
    bench.drain()


def test_a_starved_load_goes_on_when_something_lands() -> None:
    bench = far(4, spec_of(4, exclusive(batch=2), window=2))
    plan = bench.load(chain(4))
    first = bench.one(Promote)
    copy = bench.store(chain(2, "copy"))
    bench.answer(first)
    assert plan.job in bench.core.world.starved
    assert not bench.take(JobDone)
    bench.filled(copy)
    second = bench.one(Promote)
    assert [item.key for item in second.items] == [b"02", b"03"]
    bench.answer(second)
    assert bench.one(JobDone) == JobDone(plan.job, 4)


def test_a_starved_load_ends_when_nothing_will_land() -> None:
    """No load waits for ever: with nothing in flight it ends with what it has."""
    bench = far(4, spec_of(4, exclusive(batch=2), window=2))
    plan = bench.load(chain(4))
    first = bench.one(Promote)
    bench.put(chain(2, "copy"))
    other = bench.load(chain(2, "copy"))
    bench.take(Demote)
    (demote,) = [op.op for op in bench.core.world.ops.values() if op.kind == "demote"]
    bench.answer(first)
    assert plan.job in bench.core.world.starved
    bench.handle(OpFinished(0.0, demote, (OK, OK)))
    assert bench.one(JobDone) == JobDone(plan.job, 2)
    bench.release(other.job)


def test_the_longest_starved_goes_first() -> None:
    bench = Bench(spec_of(4, exclusive(batch=2), window=2), up=False)
    for name in ("p", "q"):
        keys = chain(4, name)
        bench.scan("nvme", *(ScanEntry(k, 8192, p) for k, p in zip(keys, (None, *keys), strict=False)))
    bench.tier("nvme", TierState.UP)
    first, second = bench.load(chain(4, "p")), bench.load(chain(4, "q"))
    read_p, read_q = bench.take(Promote)
    bench.answer(read_p)
    bench.answer(read_q)
    ends = {done.job: done.blocks for done in bench.take(JobDone)}
    assert ends == {first.job: 2, second.job: 2}, "each has two slots, neither will let go: both end"


def test_a_repeated_key_ends_the_run() -> None:
    bench = far(3, spec_of(8, exclusive()))
    plan = bench.load((b"00", b"01", b"00", b"02"))
    bench.drain()
    assert bench.one(JobDone) == JobDone(plan.job, 2)
    bench.release(plan.job)
    first, second = bench.load((b"00", b"01")).slots
    assert bench.load((b"00", b"01", b"00")).slots == (first, second, first), "READY already, it costs no slot"


def test_a_load_of_nothing_is_done() -> None:
    assert Bench(spec_of(1)).load(()).done


def test_a_tier_that_is_down_is_passed_over() -> None:
    bench = far(1, spec_of(2, exclusive()))
    bench.tier("nvme", TierState.DOWN)
    assert bench.lookup(chain(1)).match.blocks == 0
    assert bench.load(chain(1)).done
    bench.tier("nvme", TierState.DEGRADED)
    assert bench.lookup(chain(1)).match.blocks == 1
    assert not bench.load(chain(1)).done, "reads work while stores do not"


def test_links_are_learned_from_whole_paths() -> None:
    """DESIGN section 3: stored piece by piece without a parent, a chain is one once somebody loads it whole."""
    for teach in ("load", "touch"):
        bench = Bench(spec_of(6))
        for key in chain(4):
            bench.put((key,))
        if teach == "load":
            bench.release(bench.load(chain(4)).job)
        else:
            bench.handle(Touched(0.0, 0, chain(4)))
        bench.put(chain(4, "x"))
        assert bench.ready() == {b"00", b"01", *chain(4, "x")}, "the tail went, not the oldest"


def test_links_are_learned_in_bounded_tiers_too() -> None:
    bench = Bench(spec_of(3, exclusive(room=4)), up=False)
    bench.scan("nvme", *(ScanEntry(key, 8192) for key in chain(3)))
    bench.tier("nvme", TierState.UP)
    plan = bench.load(chain(3))
    bench.drain()
    bench.release(plan.job)
    bench.put(chain(2, "x"))
    bench.drain()
    assert bench.has("nvme") == {b"00", b"01", *chain(2, "x")}
    bench.put((b"00",), b"elsewhere")
    assert bench.core.world.blocks[b"00"].parent == b"elsewhere"


def test_a_tier_of_its_own_hears_what_was_used() -> None:
    """A persistent tier keeps recency across restarts, so it is told; others are not."""
    bench = Bench(spec_of(4, exclusive(), shared()))
    bench.put(chain(2))
    bench.load(chain(2))
    assert bench.one(Touch) == Touch("nvme", chain(2))
    bench.handle(Touched(0.0, 0, chain(2)))
    assert bench.one(Touch) == Touch("nvme", chain(2))
    bench.tier("nvme", TierState.DOWN)
    bench.handle(Touched(0.0, 0, chain(2)))
    assert not bench.take(Touch)


@pytest.mark.parametrize("outcomes", [(), (OK,), (OK, OK, OK)])
def test_the_wrong_number_of_outcomes_is_a_failure(outcomes: tuple[Outcome, ...]) -> None:
    bench = far(2, spec_of(4, exclusive()))
    plan = bench.load(chain(2))
    bench.handle(OpFinished(0.0, bench.one(Promote).op, outcomes))
    assert bench.one(JobDone) == JobDone(plan.job, 0)
    assert not bench.ready()
    bench.handle(OpFinished(0.0, 999, (OK,)))
    assert bench.core.counters.unknown_completions == 1
