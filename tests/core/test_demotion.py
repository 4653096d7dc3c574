"""CPU -> secondary tiers: who is owed what, and when it is offered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.worlds import (
    BLOCK_BYTES,
    CANCELLED,
    FAILED,
    MISSING,
    OK,
    REFUSED,
    Bench,
    chain,
    exclusive,
    shared,
    spec_of,
)
from tiering.core import events as ev
from tiering.core.commands import Demote, FlushDone, Probe, Promote
from tiering.core.demotion import HOPELESS_MAX
from tiering.core.events import FlushOverdue
from tiering.policies.prefix import PrefixPolicy
from tiering.types import Outcome, TierState


def keys_of(*commands: Demote) -> list[bytes]:
    return [item.key for command in commands for item in command.items]


def test_every_tier_gets_what_is_stored() -> None:
    bench = Bench(spec_of(4, exclusive(), shared()))
    bench.put(chain(3))
    assert {c.tier: keys_of(c) for c in bench.take(Demote)} == {"nvme": list(chain(3)), "redis": list(chain(3))}


def test_demotions_carry_the_links_that_are_known() -> None:
    bench = Bench(spec_of(4, exclusive()))
    bench.put(chain(3))
    assert bench.one(Demote).parents == {b"01": b"00", b"02": b"01"}


def test_slow_tier_holds_fast_tiers_slots() -> None:
    """row 11: what a lane pins has a cap in bytes; the rest can be evicted, and is counted as deferred."""
    bench = Bench(spec_of(8, shared(queue=2, batch=1)))
    bench.put(chain(8))
    assert len(bench.take(Demote)) == 2
    assert bench.core.world.pools[0].busy == 2
    assert bench.core.counters.demote_deferred == 6
    plan = bench.store(chain(6, "new"))
    assert len(plan.grants) == 6, "the engine does not wait for the slow tier"
    bench.filled(plan)
    assert bench.core.counters.demote_lost == 6


@pytest.mark.parametrize("queue", [1, 2, 3, 5])
def test_unbounded_queue(queue: int) -> None:
    """row 12: bytes lent to a lane never pass its limit."""
    bench = Bench(spec_of(64, shared(queue=queue, batch=2)))
    bench.put(chain(64))
    done: list[bytes] = []
    while commands := bench.take(Demote):
        for command in commands:
            assert bench.core.world.tiers[0].lent_bytes <= queue * BLOCK_BYTES
            done += keys_of(command)
            bench.answer(command)
    assert done == list(chain(64))


def test_a_block_larger_than_the_limit_goes_alone() -> None:
    spec = spec_of(4, shared())
    tier = type(spec.tiers[0])("redis", spec.tiers[0].capabilities, None, "on_store", 1, 8, spec.tiers[0].policy, 4096)
    bench = Bench(type(spec)(spec.pools, (tier,), 1 << 20))
    bench.put(chain(2))
    first = bench.one(Demote)
    assert keys_of(first) == [b"00"]
    bench.answer(first)
    assert keys_of(bench.one(Demote)) == [b"01"]


def test_failed_demotion_never_retried() -> None:
    """row 5: offered again, it is demoted again."""
    for outcome in (FAILED, REFUSED, CANCELLED):
        bench = Bench(spec_of(4, exclusive()))
        bench.put(chain(1))
        bench.answer(bench.one(Demote), outcome)
        assert not bench.take(Demote), "not at once, and not for ever"
        assert bench.core.counters.demote_failures == 1
        bench.put(chain(1))
        bench.answer(bench.one(Demote))
        assert bench.has("nvme") == set(chain(1))


def test_what_failed_is_offered_again_when_others_succeed() -> None:
    """row 5: the lane drains, so the tier works again."""
    bench = Bench(spec_of(8, exclusive(batch=2)))
    bench.put(chain(4))
    for command in bench.take(Demote):
        bench.answer(command, FAILED)
    assert not bench.take(Demote)
    bench.put((b"x",))
    bench.answer(bench.one(Demote))
    bench.drain()
    assert bench.has("nvme") == {*chain(4), b"x"}


def test_what_failed_is_offered_again_when_the_breaker_closes() -> None:
    bench = Bench(spec_of(8, exclusive(batch=2)))
    bench.put(chain(4))
    for command in bench.take(Demote):
        bench.answer(command, FAILED)
    bench.tier("nvme", TierState.DEGRADED)
    assert not bench.take(Demote)
    bench.tier("nvme", TierState.UP)
    assert keys_of(*bench.take(Demote)) == list(chain(4))


def test_a_tier_that_fails_for_ever_is_not_asked_for_ever() -> None:
    """No loop between the core and a tier: each block is tried once until something changes."""
    bench = Bench(spec_of(32, exclusive(batch=4)))
    bench.put(chain(32))
    tries = 0
    while commands := bench.take(Demote):
        for command in commands:
            tries += len(command.items)
            bench.answer(command, FAILED)
    assert tries == 32


def test_stores_wait_while_a_tier_is_down() -> None:
    bench = Bench(spec_of(4, exclusive()))
    bench.tier("nvme", TierState.DOWN)
    bench.put(chain(2))
    assert not bench.take(Demote)
    assert bench.core.counters.demote_deferred == 2
    bench.tier("nvme", TierState.UP)
    assert keys_of(bench.one(Demote)) == list(chain(2))


def test_batch_poisoned_by_one() -> None:
    """row 23: one failed store costs its own block and no other."""
    bench = Bench(spec_of(4, shared()))
    bench.put(chain(3))
    bench.answer(bench.one(Demote), OK, FAILED, OK)
    assert bench.has("redis") == {b"00", b"02"}


def test_never_is_never() -> None:
    bench = Bench(spec_of(2, shared(rule="never")))
    bench.put(chain(2))
    bench.put(chain(2))
    bench.release(bench.load(chain(2)).job)
    bench.put(chain(2, "x"))
    assert not bench.take(Demote)


def test_after_hits() -> None:
    bench = Bench(spec_of(4, shared(rule=2)))
    bench.put(chain(2))
    bench.release(bench.load(chain(1)).job)
    bench.release(bench.load(chain(2)).job)
    assert keys_of(bench.one(Demote)) == [b"00"], "loaded twice"
    bench.release(bench.load(chain(2)).job)
    assert keys_of(bench.one(Demote)) == [b"01"]


def test_after_hits_of_a_promoted_block() -> None:
    """Loaded often enough from the far tier, a block is worth the near one."""
    bench = Bench(spec_of(1, exclusive(rule=2), shared(rule="never")))
    bench.probe((b"a",))
    bench.drain()
    for expected in (0, 1):
        bench.load((b"a",))
        bench.answer(bench.one(Promote))
        bench.release(list(bench.core.world.loads)[-1])
        assert len(bench.take(Demote)) == expected
        if not expected:
            bench.put((b"x",))


def test_hits_before_a_promotion_count() -> None:
    bench = Bench(spec_of(1, exclusive(rule=1), shared(rule="on_store")))
    bench.put((b"a",))
    bench.drain()
    bench.tier("nvme", TierState.DOWN)
    bench.release(bench.load((b"a",)).job)
    bench.put((b"x",))
    bench.drain()
    bench.tier("nvme", TierState.UP)
    job = bench.load((b"a",)).job
    bench.release(job)
    bench.answer(bench.one(Promote))
    assert bench.one(Demote).tier == "nvme", "nobody waited for it, but it was loaded before"


def test_on_evict() -> None:
    """Only what is about to leave is demoted: the tail of the least recent path, before its slot is needed."""
    bench = Bench(spec_of(8, exclusive(rule="on_evict")))
    bench.put(chain(7))
    assert not bench.take(Demote)
    bench.put((b"x",))
    demote = bench.one(Demote)
    assert keys_of(demote) == [b"06"]
    plan = bench.store((b"y",), patient=True)
    assert (plan.grants, plan.retry) == ((), True), "the victim is on its way down"
    bench.answer(demote)
    plan = bench.store((b"y",), patient=True)
    assert len(plan.grants) == 1
    bench.filled(plan)
    assert bench.ready() == {*chain(6), b"x", b"y"}


def test_on_evict_when_the_engine_cannot_wait() -> None:
    """row 29: its slot is needed now; the tier goes without."""
    bench = Bench(spec_of(2, exclusive(rule="on_evict")))
    bench.put((b"a",))
    bench.put((b"b",))
    assert keys_of(bench.one(Demote)) == [b"a"]
    assert bench.put((b"x", b"y")) == 1, "a is being read by the tier"
    assert bench.ready() == {b"a", b"x"}


def test_on_evict_with_a_tier_that_fails() -> None:
    """row 29: what the tier would not take is evicted without it, by patient callers too."""
    bench = Bench(spec_of(2, exclusive(rule="on_evict")))
    bench.put(chain(2))
    bench.drain(FAILED)
    assert bench.put((b"x",), patient=True) == 1
    plan = bench.store((b"y",), patient=True)
    assert plan.retry
    bench.drain(FAILED)
    assert bench.put((b"y",), patient=True) == 1


def test_on_evict_finds_its_victims_backed() -> None:
    bench = Bench(spec_of(8, exclusive(rule="on_evict")))
    for n in range(40):
        assert bench.put((b"%03d" % n,), patient=True) == 1
        bench.drain()
    assert bench.core.counters.demote_lost == 0
    assert bench.has("nvme") >= {b"%03d" % n for n in range(32)}


def test_on_evict_does_not_care_what_others_hold() -> None:
    """Each tier has its own rule: a copy in a far tier does not keep the near one empty."""
    bench = Bench(spec_of(2, exclusive(rule="on_evict"), shared(rule="on_store")))
    bench.put((b"a", b"b"))
    bench.drain()
    assert bench.has("nvme") == {b"b"}


def test_on_evict_leaves_what_is_being_read() -> None:
    bench = Bench(spec_of(2, exclusive(rule="on_evict")))
    bench.put((b"a",))
    lease = bench.load((b"a",))
    bench.put((b"b",))
    assert keys_of(bench.one(Demote)) == [b"b"]
    bench.release(lease.job)


def test_a_block_over_the_value_limit_is_not_owed() -> None:
    bench = Bench(spec_of(2, exclusive(value_bytes_max=BLOCK_BYTES - 1), shared()))
    bench.put((b"a",))
    assert [command.tier for command in bench.take(Demote)] == ["redis"]
    assert not bench.core.world.tiers[0].owed


def test_what_turns_out_to_be_there_is_not_demoted() -> None:
    bench = Bench(spec_of(3, shared(queue=1)))
    bench.put((b"x",))
    demote = bench.one(Demote)
    bench.probe((b"a",))
    bench.put((b"a",))
    bench.answer(bench.one(Probe))
    bench.answer(demote)
    assert not bench.take(Demote)
    assert bench.has("redis") == {b"x", b"a"}


def test_a_demotion_overtakes_a_question() -> None:
    """Storing answers the question; what the tier says later is about the past."""
    bench = Bench(spec_of(3, shared()))
    bench.probe((b"a",))
    question = bench.one(Probe)
    bench.put((b"a",))
    demote = bench.one(Demote)
    bench.answer(question, MISSING)
    bench.answer(demote)
    assert bench.has("redis") == {b"a"}
    assert bench.core.counters.stale_completions == 1


def test_on_evict_looks_past_what_no_tier_took() -> None:
    """Blocks that failed do not hide those behind them, as far as one look goes."""
    bench = Bench(spec_of(8, exclusive(rule="on_evict")))
    for n in range(8):
        bench.put((b"%02d" % n,))
    for n in range(6):
        demote = bench.one(Demote)
        assert keys_of(demote) == [b"%02d" % n]
        bench.answer(demote, FAILED)
        bench.store((b"07",))


class CountingPolicy(PrefixPolicy):
    """Counts how often it asked whether a block may go."""

    asked = 0

    def victims(self, n: int, protected: Callable[[bytes], bool]) -> list[bytes]:
        def ask(key: bytes) -> bool:
            CountingPolicy.asked += 1
            return protected(key)

        return super().victims(n, ask)


def test_a_long_row_of_failures_costs_little() -> None:
    """Each event looks at so many next victims at most, however many were refused."""
    bench = Bench(spec_of(1200, exclusive(rule="on_evict", batch=1200), policy=CountingPolicy))
    core = bench.core
    for n in range(1200):
        plan, _ = core.handle(ev.StoreRequested(0.0, 0, (b"%04d" % n,)))
        assert isinstance(plan, ev.StorePlan)
        core.handle(ev.StoreFinished(0.0, plan.job, (OK,)))
    while ops := list(core.world.ops.values()):
        for op in ops:
            core.handle(ev.OpFinished(0.0, op.op, (FAILED,) * len(op.items)))
        core.handle(ev.HoldRequested(0.0, 0, ()))
    assert len(core.world.tiers[0].parked) >= HOPELESS_MAX
    CountingPolicy.asked = 0
    core.handle(ev.HoldRequested(0.0, 0, ()))
    assert CountingPolicy.asked <= HOPELESS_MAX + 1200 // 8


# -- flush ------------------------------------------------------------------------------------------------------------


def test_a_flush_of_nothing_is_done_at_once() -> None:
    bench = Bench(spec_of(2, exclusive()))
    job = bench.flush()
    assert bench.one(FlushDone) == FlushDone(job, 0, {})


def test_a_flush_waits_for_all_that_is_owed_or_on_its_way() -> None:
    bench = Bench(spec_of(8, exclusive(queue=2, batch=1), shared(queue=2, batch=1)))
    bench.put(chain(5))
    job = bench.flush()
    assert not bench.take(FlushDone)
    bench.drain()
    assert bench.one(FlushDone) == FlushDone(job, 10, {})


def test_a_flush_offers_what_failed_once_more() -> None:
    bench = Bench(spec_of(8, exclusive(), shared()))
    bench.put(chain(3))
    near, far = bench.take(Demote)
    bench.answer(near, FAILED)
    bench.answer(far)
    job = bench.flush()
    bench.answer(bench.one(Demote), OK, FAILED, OK)
    assert bench.one(FlushDone) == FlushDone(job, 2, {"nvme": 1})


def test_a_flush_does_not_wait_for_a_tier_that_is_down() -> None:
    bench = Bench(spec_of(8, exclusive(queue=1), shared(), shared("s3", rule="never")))
    bench.tier("redis", TierState.DOWN)
    bench.tier("s3", TierState.DOWN)
    bench.put(chain(3))
    job = bench.flush()
    bench.tier("nvme", TierState.DOWN)
    assert not bench.take(FlushDone), "one block is still on its way"
    bench.answer(bench.one(Demote))
    assert bench.one(FlushDone) == FlushDone(job, 1, {"redis": 3, "nvme": 2})


def test_a_flush_has_a_deadline() -> None:
    bench = Bench(spec_of(8, exclusive(queue=1)))
    bench.put(chain(3))
    job = bench.flush()
    bench.handle(FlushOverdue(0.0, job))
    assert bench.one(FlushDone) == FlushDone(job, 0, {"nvme": 3})
    bench.handle(FlushOverdue(0.0, job))
    assert bench.core.counters.unknown_completions == 1
    bench.drain()
    assert bench.has("nvme") == set(chain(3)), "the demotions go on"


def test_a_flush_counts_what_was_evicted_meanwhile_as_lost() -> None:
    bench = Bench(spec_of(3, exclusive(queue=1)))
    bench.put(chain(3))
    job = bench.flush()
    bench.put((b"x",))
    bench.drain()
    (done,) = bench.take(FlushDone)
    assert (done.job, done.acknowledged + sum(done.lost_by_tier.values())) == (job, 3)
    assert done.lost_by_tier == {"nvme": 1}


def test_a_flush_ends_though_nothing_finds_room() -> None:
    """No flush waits for what is never going to happen, however much is owed."""
    bench = Bench(spec_of(64, exclusive(room=1, batch=2)))
    bench.put(chain(40))
    job = bench.flush()
    bench.drain(Outcome.failed("EROFS"))
    (done,) = bench.take(FlushDone)
    assert (done.job, done.acknowledged, done.lost_by_tier) == (job, 0, {"nvme": 40})
