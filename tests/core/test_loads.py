"""Leases, joins and promotions: what a load gets, and from where."""

from __future__ import annotations

from tests.core.worlds import (
    BLOCK_BYTES,
    FAILED,
    OK,
    Bench,
    chain,
    exclusive,
    far,
    shared,
    spec_of,
)
from tiering.core.commands import Demote, JobDone, Promote, Touch
from tiering.core.events import OpFinished, Touched
from tiering.types import ScanEntry, TierState


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


def test_what_is_owed_of_the_own_tail_goes_last() -> None:
    """A tier is about to get it from there: what nobody waits for makes room first."""
    bench = far(1, spec_of(3, exclusive(rule="never"), shared(queue=1, batch=1)))
    for key in (b"p", b"t"):
        bench.put((key,))
    demote = bench.one(Demote)
    assert demote.items[0].key == b"p"
    bench.tier("redis", TierState.DOWN)
    bench.put((b"free",))
    bench.tier("redis", TierState.UP)
    lease = bench.load((b"free",))
    plan = bench.load((b"00", b"nowhere", b"t"))
    assert not plan.done
    assert bench.ready() == {b"p", b"free"}, "nothing else was idle"
    assert bench.core.counters.demote_lost == 1
    bench.release(plan.job)
    bench.release(lease.job)


def test_a_load_under_way_leaves_the_reserve_alone() -> None:
    """row 2: slots that stores took meanwhile are not made up for out of their reserve."""
    bench = far(4, spec_of(6, exclusive(batch=2), reserve=2, window=2))
    plan = bench.load(chain(4))
    first = bench.one(Promote)
    copy = bench.store((b"x", b"y"))
    bench.answer(first)
    assert not bench.take(Promote)
    assert len(bench.store((b"p", b"q")).grants) == 2
    bench.filled(copy)
    bench.release(plan.job)


def test_pools_starve_apart() -> None:
    spec = spec_of(4, exclusive(batch=2), window=2)
    bench = Bench(type(spec)((spec.pools[0], spec.pools[0]), spec.tiers, spec.load_bytes_per_request_max), up=False)
    for name in ("p", "q", "r"):
        keys = chain(4, name)
        bench.scan("nvme", *(ScanEntry(k, 8192, p) for k, p in zip(keys, (None, *keys), strict=False)))
    bench.tier("nvme", TierState.UP)
    jobs = [bench.load(chain(4, "p")), bench.load(chain(4, "q")), bench.load(chain(4, "r"), pool=1)]
    copy = bench.store((b"other",), pool=1)
    reads = bench.take(Promote)
    assert [len(read.items) for read in reads] == [2, 2, 2]
    for read in reads:
        bench.answer(read)
    bench.filled(copy)
    bench.drain()
    ends = {done.job: done.blocks for done in bench.take(JobDone)}
    assert ends[jobs[0].job] + ends[jobs[1].job] == 4
    assert ends[jobs[2].job] >= 3


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
