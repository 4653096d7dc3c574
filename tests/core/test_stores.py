"""GPU -> CPU: what is granted, what is evicted for it, and what becomes of failed copies."""

from __future__ import annotations

import pytest

from tests.core.worlds import CANCELLED, FAILED, OK, Bench, chain, exclusive, shared, spec_of
from tiering.core.commands import Demote, SlotsFreed
from tiering.core.events import OpFinished
from tiering.core.stores import PASS_MAX
from tiering.policies.lru import LRUPolicy
from tiering.types import Outcome


def test_all_or_nothing_store() -> None:
    """row 3: of five blocks for four free slots the first four are stored."""
    bench = Bench(spec_of(4))
    keys = chain(5)
    plan = bench.store(keys)
    assert [grant.index for grant in plan.grants] == [0, 1, 2, 3]
    assert [grant.key for grant in plan.grants] == list(keys[:4])
    assert sorted(grant.slot for grant in plan.grants) == [0, 1, 2, 3]
    assert plan.stop == 4
    assert plan.refused
    bench.filled(plan)
    assert bench.ready() == set(keys[:4])
    assert bench.core.counters.refused_blocks == 1


def test_burst_drops() -> None:
    """row 29: a full tier of idle blocks gives way to whatever comes, at once and every time."""
    bench = Bench(spec_of(16))
    for burst in range(20):
        keys = chain(8, f"burst{burst}-")
        assert bench.put(keys) == 8
        assert bench.ready() >= set(keys)
    assert bench.core.counters.refused_blocks == 0
    assert bench.core.counters.evicted_blocks == 20 * 8 - 16


def test_one_long_chain_gives_way_as_a_whole() -> None:
    """row 29: leaf first is no reason to evict but one block of an idle chain."""
    bench = Bench(spec_of(16))
    bench.put(chain(16))
    assert bench.put(chain(12, "other")) == 12
    assert bench.ready() == {*chain(4), *chain(12, "other")}


@pytest.mark.parametrize("evicted", [1, 7, 15])
def test_prefix_evicted_head_first(evicted: int) -> None:
    """row 28: what remains of a chain is its head, whatever is taken."""
    bench = Bench(spec_of(16))
    bench.put(chain(16))
    bench.put(chain(evicted, "other"))
    assert bench.ready() & set(chain(16)) == set(chain(16 - evicted))
    assert bench.lookup(chain(16)).match.blocks == 16 - evicted


def test_a_branch_point_outlives_its_branches() -> None:
    """row 28: a block goes only after every block behind it."""
    bench = Bench(spec_of(6))
    stem, left, right = chain(2), chain(2, "left"), chain(2, "right")
    bench.put(stem)
    bench.put(left, stem[-1])
    bench.put(right, stem[-1])
    bench.put(chain(4, "other"))
    assert bench.ready() == {*stem, *chain(4, "other")}


def test_lru_leaves_holes_and_says_so() -> None:
    """The textbook policy takes the head of the oldest path first."""
    bench = Bench(spec_of(4, policy=LRUPolicy))
    bench.put(chain(4))
    bench.put((b"x",))
    assert bench.ready() == {*chain(4)[1:], b"x"}
    assert bench.lookup(chain(4)).match.blocks == 0


def test_blocks_of_the_request_itself_stay() -> None:
    """A request never pays for its tail with its head."""
    bench = Bench(spec_of(4))
    keys = chain(8)
    bench.put(keys[:4])
    plan = bench.store(keys)
    assert plan.present == (0, 1, 2, 3)
    assert (plan.grants, plan.stop, plan.retry) == ((), 4, False)
    assert bench.core.counters.present_blocks == 4
    assert bench.put(keys[4:], keys[3]) == 0, "nor with the parent it names"
    assert bench.ready() == set(keys[:4])


def test_a_chain_longer_than_the_tier_flows_through_it() -> None:
    """DESIGN section 7: what another tier holds may go, also of the own chain."""
    bench = Bench(spec_of(4, exclusive()))
    keys = chain(12)
    for start in range(0, 12, 4):
        assert bench.put(keys[start : start + 4], keys[start - 1] if start else None, patient=True) == 4
        bench.drain()
    assert bench.has("nvme") == set(keys)
    assert bench.ready() == set(keys[8:])


def test_a_patient_caller_waits_for_demotions() -> None:
    """Blocks that a working tier is about to take are not dropped for a caller who can come back."""
    bench = Bench(spec_of(4, exclusive(queue=2, batch=2)))
    bench.put(chain(4))
    plan = bench.store(chain(4, "other"), patient=True)
    assert (plan.grants, plan.stop, plan.retry) == ((), 0, True)
    (first,) = bench.take(Demote)
    bench.take(SlotsFreed)
    bench.answer(first)
    assert bench.take(SlotsFreed), "told to come back"
    plan = bench.store(chain(4, "other"), patient=True)
    assert len(plan.grants) == 2
    bench.filled(plan)
    assert bench.core.counters.demote_lost == 0


def test_an_impatient_caller_does_not() -> None:
    """row 11: a slow tier never holds what the engine needs now; what it misses is counted."""
    bench = Bench(spec_of(4, exclusive(queue=2, batch=2)))
    bench.put(chain(4))
    plan = bench.store(chain(2, "other"))
    assert len(plan.grants) == 2
    assert bench.core.counters.demote_lost == 2
    bench.filled(plan)


def test_a_caller_is_told_to_come_back_only_if_something_will_change() -> None:
    bench = Bench(spec_of(2))
    bench.put(chain(2))
    lease = bench.load(chain(2))
    plan = bench.store((b"x",), patient=True)
    assert plan.retry, "a lease ends some time"
    bench.take(SlotsFreed)
    bench.release(lease.job)
    assert bench.take(SlotsFreed)
    plan = bench.store((b"00", b"01", b"x"), patient=True)
    assert not plan.retry, "its own blocks fill the tier, and nobody else has them"
    bench.release(bench.load(chain(2)).job)
    assert not bench.take(SlotsFreed)


def test_orphans_are_not_stored() -> None:
    """DESIGN section 11: a block whose stated parent is in no tier could never be reached."""
    bench = Bench(spec_of(4, exclusive()))
    plan = bench.store((b"b",), b"a")
    assert (plan.grants, plan.stop) == ((), 0)
    assert "orphan" in plan.refused
    assert not bench.core.world.blocks
    assert bench.put((b"a",)) == 1
    assert bench.put((b"b",), b"a") == 1


def test_a_shared_tier_that_was_not_asked_may_have_the_parent() -> None:
    """Only what is known to be absent makes an orphan."""
    bench = Bench(spec_of(4, shared()))
    assert len(bench.store((b"b",), b"a").grants) == 1
    bench.probe((b"p",))
    assert len(bench.store((b"q",), b"p").grants) == 1, "being asked"
    bench = Bench(spec_of(4, shared()))
    bench.probe((b"p",))
    bench.drain(Outcome.MISSING)
    assert bench.store((b"q",), b"p").refused


def test_a_root_of_unknown_parent_is_accepted() -> None:
    bench = Bench(spec_of(4, exclusive()))
    assert bench.put((b"q",)) == 1


def test_a_block_that_is_there_is_no_orphan() -> None:
    bench = Bench(spec_of(4, exclusive()))
    bench.put((b"q",))
    plan = bench.store((b"q",), b"nobody-has-it")
    assert plan.present == (0,)


def test_permanent_hole() -> None:
    """row 4: whatever was refused or evicted is granted when it is offered again."""
    bench = Bench(spec_of(4))
    keys = chain(6)
    bench.put(keys)
    bench.put((b"x", b"y"))
    assert bench.ready() == {*keys[:2], b"x", b"y"}
    plan = bench.store(keys)
    assert [grant.index for grant in plan.grants] == [2, 3]
    bench.filled(plan)
    assert bench.ready() == set(keys[:4])


def test_batch_poisoned_by_one() -> None:
    """row 23: one failed copy costs its own block and no other."""
    bench = Bench(spec_of(4))
    plan = bench.store(chain(3))
    bench.filled(plan, OK, FAILED, OK)
    assert bench.ready() == {b"00", b"02"}
    assert len(bench.core.world.pools[0].free) == 2
    assert bench.core.counters.failed_fills == 1
    assert bench.core.counters.stored_blocks == 2


def test_a_cancelled_copy_frees_its_slots() -> None:
    bench = Bench(spec_of(4))
    bench.filled(bench.store(chain(3)), CANCELLED, CANCELLED, CANCELLED)
    assert len(bench.core.world.pools[0].free) == 4
    assert not bench.core.world.blocks


def test_too_few_outcomes_are_no_outcome() -> None:
    """The bytes of such a job cannot be trusted."""
    bench = Bench(spec_of(4))
    bench.filled(bench.store(chain(3)), OK, OK)
    assert not bench.ready()
    assert bench.core.counters.failed_fills == 3


def test_an_unknown_job_is_counted_and_ignored() -> None:
    bench = Bench(spec_of(2))
    plan = bench.store(chain(1))
    bench.filled(plan)
    bench.filled(plan)
    assert bench.core.counters.unknown_completions == 1
    assert bench.ready() == set(chain(1))


def test_what_is_filling_is_present() -> None:
    bench = Bench(spec_of(4))
    first = bench.store(chain(2))
    second = bench.store(chain(3))
    assert second.present == (0, 1)
    assert [grant.index for grant in second.grants] == [2]
    bench.filled(second)
    bench.filled(first)
    assert bench.ready() == set(chain(3))


def test_a_repeated_key_gets_one_slot() -> None:
    bench = Bench(spec_of(4))
    plan = bench.store((b"a", b"b", b"a", b"c"))
    assert [(grant.index, grant.key) for grant in plan.grants] == [(0, b"a"), (1, b"b"), (3, b"c")]
    assert plan.stop == 4


def test_a_request_for_nothing_gets_nothing() -> None:
    plan = Bench(spec_of(4)).store(())
    assert (plan.job, plan.grants, plan.present, plan.stop, plan.refused) == (0, (), (), 0, "")


def test_eviction_for_a_request_does_not_trip_over_its_own_hole() -> None:
    """The block in front is absent, the one behind it goes to make room: the record in front goes with it."""
    bench = Bench(spec_of(2))
    bench.put((b"a", b"c"))
    bench.put((b"x",))
    assert bench.ready() == {b"a", b"x"}
    bench.put((b"c",), b"a")
    lease = bench.load((b"a",))
    bench.release(lease.job)
    assert bench.put((b"new", b"newer")) == 2
    assert bench.put((b"a", b"b")) == 2


def test_a_child_that_only_a_farther_tier_has_keeps_its_parent() -> None:
    """DESIGN section 7: leaves are judged on the union of tiers."""
    bench = Bench(spec_of(3, exclusive(rule="never"), shared(rule="on_store", batch=1)))
    bench.put((b"a",))
    for command in bench.take(Demote):
        bench.answer(command, FAILED)
    bench.put((b"b",), b"a")
    bench.drain()
    assert bench.has("redis") == {b"a", b"b"}, "offered again as the lane drained"
    bench.put((b"r",))
    for command in bench.take(Demote):
        bench.answer(command, FAILED)
    bench.put((b"s",), b"r")
    assert bench.ready() == {b"a", b"r", b"s"}
    for command in bench.take(Demote):
        bench.answer(command, *(OK if item.key == b"s" else FAILED for item in command.items))
    bench.put((b"t",))
    assert b"r" in bench.ready(), "r has a child in redis, and no copy"


def test_a_block_that_is_filling_keeps_its_parent() -> None:
    """The policy does not know a block before it has landed; the core does."""
    bench = Bench(spec_of(2))
    bench.put((b"a",))
    copy = bench.store((b"b",), b"a")
    assert bench.store((b"x",)).grants == ()
    bench.filled(copy)
    assert bench.ready() == {b"a", b"b"}


def test_a_search_goes_on_past_a_block_that_must_stay() -> None:
    bench = Bench(spec_of(3))
    bench.put((b"a",))
    bench.put((b"x",))
    copy = bench.store((b"b",), b"a")
    assert bench.put((b"y",)) == 1
    assert bench.ready() == {b"a", b"y"}
    bench.filled(copy)


def test_a_slow_tier_does_not_keep_a_slot_from_a_fast_one() -> None:
    """row 11: owed to the slow tier, held by the fast one: it goes, for a patient caller too."""
    bench = Bench(spec_of(2, exclusive(), shared(queue=1, batch=1)))
    for key in (b"a", b"b"):
        bench.put((key,))
    near, slow, *_ = [c for c in bench.take(Demote) if c.items[0].key == b"a"]
    assert (near.tier, slow.tier) == ("nvme", "redis")
    (near_b,) = [op for op in bench.core.world.ops.values() if op.kind == "demote" and op.op not in (near.op, slow.op)]
    bench.handle(OpFinished(0.0, near_b.op, (OK,)))
    assert b"b" in bench.core.world.tiers[1].owed
    assert bench.put((b"x",), patient=True) == 1
    assert bench.ready() == {b"a", b"x"}


def test_a_block_cannot_be_its_own_parent() -> None:
    bench = Bench(spec_of(2, shared()))
    bench.put((b"a",), b"a")
    bench.put((b"a",), b"a")
    assert bench.core.world.blocks[b"a"].parent is None


def test_a_search_for_victims_gives_up_some_time() -> None:
    """So many blocks are owed to a slow tier that not all are looked at; what is found is not owed."""
    bench = Bench(spec_of(PASS_MAX + 10, exclusive(room=2, queue=1), policy=LRUPolicy))
    bench.put(tuple(b"%06d" % n for n in range(PASS_MAX + 10)))
    plan = bench.store((b"x", b"y"), patient=True)
    assert (plan.grants, plan.retry) == ((), True)
    plan = bench.store((b"x", b"y"))
    assert len(plan.grants) == 2
    assert bench.core.counters.demote_lost == 2
    bench.filled(plan)


def test_a_second_pool_has_its_own_slots() -> None:
    spec = spec_of(2)
    bench = Bench(type(spec)((spec.pools[0], spec.pools[0]), (), spec.load_bytes_per_request_max))
    bench.put(chain(2))
    plan = bench.store(chain(2, "g1"), pool=1)
    assert len(plan.grants) == 2
    bench.filled(plan)
    assert bench.ready() == {*chain(2), *chain(2, "g1")}
    assert bench.load(chain(2), pool=1).slots == (), "the keys of one group are not served by another's slots"
    assert bench.load((*chain(2, "g1"), b"00"), pool=1).done
