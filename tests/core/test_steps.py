"""What an engine's scheduler asks of the core: where each key is, leases while it makes up its mind, re-store by steps."""

from __future__ import annotations

from tests.core.worlds import BLOCK_BYTES, MISSING, OK, Bench, chain, shared, spec_of
from tiering.core import events as ev
from tiering.core.commands import Probe, RestoreDue
from tiering.policies.lru import LRUPolicy


def _step(bench: Bench, *holds: int, blocks_max: int = 1000, ranked: bool = True) -> dict[int, list[bytes]]:
    """The keys granted to each hold; their copies succeed."""
    plan = bench.handle(ev.RestoreStep(bench.now_s, holds or None, blocks_max * BLOCK_BYTES, ranked))
    assert isinstance(plan, ev.RestorePlan)
    for _, part in plan.plans:
        bench.filled(part)
    return {hold: [grant.key for grant in part.grants] for hold, part in plan.plans}


def _held(bench: Bench, *keys: bytes) -> int:
    hold = bench.handle(ev.HoldRequested(bench.now_s, 0, keys, stepped=True))
    assert isinstance(hold, int)
    return hold


def test_each_key_by_itself_also_behind_a_hole() -> None:
    bench = Bench(spec_of(8, shared()))
    bench.put(chain(1))
    filling = bench.store((b"filling",))
    asked = bench.core.lookup_each(0, (*chain(1), b"nowhere", b"filling", b"there"), bench.now_s)
    assert asked.where == ("primary", None, None, None)
    assert asked.undecided == (b"nowhere", b"filling", b"there")
    assert asked.awaited == {1, 2, 3}
    bench.probe((b"nowhere", b"there"))
    bench.answer(bench.one(Probe), MISSING, OK)
    bench.filled(filling)
    asked = bench.core.lookup_each(0, (b"nowhere", *chain(1), b"filling", b"there"), bench.now_s)
    assert asked.where == (None, "primary", "primary", "redis")
    assert (asked.undecided, asked.awaited) == ((), frozenset())


def test_a_lease_keeps_what_was_found_and_is_no_query() -> None:
    """row 24: between a lookup and the load nothing takes the blocks."""
    bench = Bench(spec_of(2, policy=LRUPolicy))
    bench.put((b"a", b"b"))
    lease = bench.handle(ev.LeaseRequested(bench.now_s, 0, (b"a", b"b", b"c")))
    assert isinstance(lease, ev.LoadPlan)
    assert (lease.done, len(lease.slots)) == (True, 2)
    assert not bench.store((b"x",)).grants
    assert (bench.core.counters.query_blocks, bench.core.counters.hit_blocks) == (0, 0)
    bench.release(lease.job)
    assert bench.put((b"x",)) == 1


def test_a_stepped_hold_is_not_told_and_grows_and_shrinks() -> None:
    bench = Bench(spec_of(8))
    hold = _held(bench, b"a")
    bench.handle(ev.HoldExtended(bench.now_s, hold, (b"b", b"c")))
    bench.handle(ev.HoldTrimmed(bench.now_s, hold, 1))
    assert not bench.take(RestoreDue)
    assert _step(bench) == {hold: [b"b", b"c"]}
    assert _step(bench) == {}
    for event in (ev.HoldExtended(0.0, 99, (b"z",)), ev.HoldTrimmed(0.0, 99, 1), ev.HoldReleased(0.0, hold)):
        bench.handle(event)
    assert bench.core.counters.unknown_completions == 2
    assert not bench.core.world.holders


def test_what_a_reset_ended_is_not_held_again_by_growing() -> None:
    """row 16: nobody knows whose bytes the blocks of the old weights are."""
    bench = Bench(spec_of(8))
    hold = _held(bench, b"a")
    bench.handle(ev.Reset(bench.now_s))
    bench.handle(ev.HoldExtended(bench.now_s, hold, (b"b",)))
    assert _step(bench) == {}


def test_worth_is_ranked_over_all_holders_within_the_budget() -> None:
    """The hole before three blocks comes before one that has nothing behind it; of one prefix, the head comes first."""
    bench = Bench(spec_of(8, policy=LRUPolicy))
    long, short = chain(4), (b"s0", b"s1")
    bench.put(long[1:])
    bench.put(short[:1])
    first, second = _held(bench, *short), _held(bench, *long)
    assert _step(bench, first, second, blocks_max=1) == {second: [long[0]]}
    assert bench.core.counters.restore_skipped == {"budget": 1}
    assert _step(bench, first, second, blocks_max=1) == {first: [b"s1"]}


def test_a_key_that_two_hold_is_copied_once() -> None:
    bench = Bench(spec_of(8))
    first, second = _held(bench, b"a", b"b"), _held(bench, b"a", b"c")
    granted = _step(bench)
    assert sorted(key for keys in granted.values() for key in keys) == [b"a", b"b", b"c"]
    assert {first, second} == granted.keys()


def test_holes_are_counted_in_blocks_and_gone_when_filled() -> None:
    bench = Bench(spec_of(4, policy=LRUPolicy))
    bench.put(chain(4))
    bench.put((b"x",))  # takes the slot of the least recently used: the head
    (pool,) = bench.core.world.pools
    assert pool.holes == 1
    hold = _held(bench, *chain(4))
    assert _step(bench) == {hold: [b"00"]}
    assert pool.holes == 0
