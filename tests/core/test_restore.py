"""Re-store: what a caller still holds elsewhere comes back to the primary tier, if that is worth a slot."""

from __future__ import annotations

import pytest

from tests.core.worlds import BLOCK_BYTES, FAILED, Bench, chain, exclusive, far, spec_of
from tiering.core.commands import Promote, RestoreDue
from tiering.core.events import HoldReleased, Reset
from tiering.policies.lru import LRUPolicy
from tiering.types import ScanEntry, TierState


def keys_of(plan: object) -> list[bytes]:
    return [grant.key for grant in plan.grants]  # type: ignore[attr-defined]


def test_permanent_hole() -> None:
    """row 4: an evicted block that is still held comes back as soon as there is a slot."""
    bench = Bench(spec_of(4, policy=LRUPolicy))
    bench.put(chain(4))
    hold = bench.hold(chain(4))
    assert not bench.take(RestoreDue), "nothing is missing"
    bench.put((b"x",))
    assert bench.one(RestoreDue) == RestoreDue(hold)
    plan = bench.restore(hold)
    assert keys_of(plan) == [b"00"], "x is worth less than the hole at the head of three blocks"
    bench.filled(plan)
    assert bench.lookup(chain(4)).match.blocks == 4
    assert (bench.core.counters.restored_blocks, bench.core.counters.restore_bytes) == (1, BLOCK_BYTES)


def test_what_was_never_stored_is_due_at_once() -> None:
    bench = Bench(spec_of(4))
    hold = bench.hold(chain(3))
    assert bench.one(RestoreDue) == RestoreDue(hold)
    plan = bench.restore(hold)
    assert [grant.index for grant in plan.grants] == [0, 1, 2]
    bench.filled(plan)
    assert bench.ready() == set(chain(3))
    assert bench.core.world.blocks[b"02"].parent == b"01"


def test_every_way_of_losing_a_held_block_makes_it_due() -> None:
    """row 4: eviction, a failed copy, a failed read, an overdue read."""
    bench = Bench(spec_of(2))
    bench.put((b"a",))
    bench.hold((b"a",))
    bench.put((b"x", b"y"))
    assert len(bench.take(RestoreDue)) == 1, "evicted"

    bench = Bench(spec_of(2))
    copy = bench.store((b"a",))
    bench.hold((b"a",))
    assert not bench.take(RestoreDue)
    bench.filled(copy, FAILED)
    assert not bench.take(RestoreDue), "the copy failed: not at once again"
    bench.now_s += bench.spec.restore_pause_s
    bench.put((b"x",))
    assert len(bench.take(RestoreDue)) == 1

    for ending in ("failed", "overdue"):
        bench = Bench(spec_of(2, exclusive()), up=False)
        bench.scan("nvme", ScanEntry(b"a", 8192))
        bench.tier("nvme", TierState.UP)
        bench.load((b"a",))
        bench.hold((b"a",))
        assert not bench.take(RestoreDue), "on its way"
        if ending == "failed":
            bench.answer(bench.one(Promote), FAILED)
        else:
            bench.overdue(bench.one(Promote))
        assert len(bench.take(RestoreDue)) == 1, ending


def test_what_comes_back_by_itself_is_due_no_more() -> None:
    bench = Bench(spec_of(2, exclusive()), up=False)
    bench.scan("nvme", ScanEntry(b"a", 8192))
    bench.tier("nvme", TierState.UP)
    hold = bench.hold((b"a", b"b"))
    bench.take(RestoreDue)
    bench.load((b"a",))
    bench.answer(bench.one(Promote))
    bench.put((b"b",))
    plan = bench.restore(hold)
    assert (plan.grants, plan.retry) == ((), False)
    assert not bench.core.world.holds[hold].due


def test_what_is_on_its_way_is_not_copied_twice() -> None:
    bench = Bench(spec_of(4))
    hold = bench.hold((b"a", b"b"))
    copy = bench.store((b"a",))
    plan = bench.restore(hold)
    assert keys_of(plan) == [b"b"]
    bench.take(RestoreDue)
    bench.filled(copy, FAILED)
    bench.filled(plan)
    bench.now_s += bench.spec.restore_pause_s
    bench.put((b"x",))
    assert bench.one(RestoreDue) == RestoreDue(hold), "it failed after all"


def test_worth_counts_what_becomes_usable_behind() -> None:
    """DESIGN section 8: worth is the block itself and the present run directly behind it; the most goes first."""
    bench = Bench(spec_of(8, policy=LRUPolicy))
    keys = chain(6)
    bench.put(keys)
    hold = bench.hold(keys)
    bench.take(RestoreDue)
    # Lose 00 and 04: behind 00 stand three blocks, behind 04 one.
    for key in (b"01", b"02", b"03", b"05"):
        bench.release(bench.load((key,)).job)
    bench.put(tuple(b"x%d" % n for n in range(4)))
    assert bench.ready() >= {b"01", b"02", b"03", b"05"}
    plan = bench.restore(hold, blocks_max=1)
    assert keys_of(plan) == [b"00"]
    assert plan.retry, "more is due"
    assert bench.core.counters.restore_skipped == {"budget": 1}
    bench.filled(plan)
    plan = bench.restore(hold)
    assert keys_of(plan) == [b"04"]
    bench.filled(plan)


def test_missing_neighbours_rank_head_first_as_one_run() -> None:
    """DESIGN section 8: so that restoring also works where an evicted tail leaves no hole behind it."""
    bench = Bench(spec_of(4))
    hold = bench.hold(chain(4))
    for expected in chain(4):
        plan = bench.restore(hold, blocks_max=1)
        assert keys_of(plan) == [expected]
        bench.filled(plan)
    assert bench.restore(hold).grants == ()


def test_a_budget_below_one_block_restores_nothing() -> None:
    bench = Bench(spec_of(4))
    hold = bench.hold(chain(2))
    plan = bench.restore(hold, blocks_max=0)
    assert (plan.grants, plan.retry) == ((), True)
    assert bench.core.counters.restore_skipped == {"budget": 2}


def test_no_block_of_equal_worth_is_evicted_for_another() -> None:
    """DESIGN section 8: a lone block is worth itself, and so is the leaf that would go for it."""
    bench = Bench(spec_of(1))
    bench.put((b"x",))
    hold = bench.hold((b"a",))
    plan = bench.restore(hold)
    assert plan.grants == ()
    assert bench.core.counters.restore_skipped == {"no_slot": 1}
    assert bench.ready() == {b"x"}


def test_no_ping_pong_between_holds() -> None:
    """DESIGN section 8: what one request holds is never evicted to restore what another holds."""
    bench = Bench(spec_of(2))
    left, right = bench.hold(chain(2, "left")), bench.hold(chain(2, "right"))
    bench.filled(bench.restore(left))
    for _ in range(5):
        assert bench.restore(right).grants == ()
        assert bench.restore(left).grants == ()
    assert bench.ready() == set(chain(2, "left"))
    assert bench.core.counters.evicted_blocks == 0


def test_an_inner_block_of_another_prefix_is_worth_as_much() -> None:
    bench = Bench(spec_of(2))
    bench.put(chain(2, "other"))
    hold = bench.hold(chain(3))
    plan = bench.restore(hold)
    assert keys_of(plan) == [b"00", b"01"], "the leaf goes, and then what was behind it is a leaf as well"
    bench.filled(plan)
    bench = Bench(spec_of(2))
    bench.put(chain(2, "other"))
    lease = bench.load(chain(2, "other"))
    assert bench.restore(bench.hold(chain(3))).grants == ()
    bench.release(lease.job)


def test_a_hold_is_told_when_a_slot_comes_free() -> None:
    bench = Bench(spec_of(1))
    copy = bench.store((b"x",))
    hold = bench.hold((b"a",))
    bench.take(RestoreDue)
    assert bench.restore(hold).grants == ()
    assert not bench.take(RestoreDue)
    bench.filled(copy, FAILED)
    assert bench.one(RestoreDue) == RestoreDue(hold)
    plan = bench.restore(hold)
    assert keys_of(plan) == [b"a"]
    bench.filled(plan)


def test_a_hold_that_found_no_slot_is_not_told_of_every_event() -> None:
    """A hold that can do nothing costs nothing: until the pause is over only a free slot counts."""
    bench = Bench(spec_of(2))
    bench.put((b"x", b"y"))
    hold = bench.hold((b"a",))
    bench.take(RestoreDue)
    assert bench.restore(hold).grants == ()
    for _ in range(10):
        bench.release(bench.load((b"x",)).job)
    assert not bench.take(RestoreDue)
    bench.now_s += bench.spec.restore_pause_s
    bench.release(bench.load((b"x",)).job)
    assert len(bench.take(RestoreDue)) == 1


def test_a_restore_stands_back_while_a_load_waits_for_slots() -> None:
    """Or the load would evict what was restored, and the restore what the load gave up, for ever."""
    bench = far(4, spec_of(4, exclusive(batch=2), window=2))
    plan = bench.load(chain(4))
    first = bench.one(Promote)
    copy = bench.store((b"x", b"y"))
    bench.answer(first)
    assert plan.job in bench.core.world.starved
    hold = bench.hold((b"h0", b"h1", b"h2"))
    assert bench.restore(hold).grants == ()
    assert bench.core.counters.restore_skipped == {"no_slot": 3}
    bench.filled(copy)
    bench.drain()


def test_a_copy_that_always_fails_is_not_a_loop() -> None:
    bench = Bench(spec_of(2))
    hold = bench.hold((b"a",))
    tries = 0
    while bench.take(RestoreDue):
        tries += 1
        bench.filled(bench.restore(hold), FAILED)
        bench.now_s += bench.spec.restore_pause_s / 100
    assert tries == 1


def test_a_hold_that_ended() -> None:
    bench = Bench(spec_of(2))
    hold = bench.hold((b"a",))
    bench.handle(HoldReleased(0.0, hold))
    assert (bench.restore(hold).grants, bench.restore(hold).stop) == ((), 0)
    bench.handle(HoldReleased(0.0, hold))
    assert bench.core.counters.unknown_completions == 1
    bench.take(RestoreDue)
    bench.put((b"a",))
    bench.put((b"x", b"y"))
    assert not bench.take(RestoreDue)


def test_two_holds_of_one_key() -> None:
    bench = Bench(spec_of(4))
    first, second = bench.hold((b"a", b"a")), bench.hold((b"a",))
    assert {command.hold for command in bench.take(RestoreDue)} == {first, second}
    bench.handle(HoldReleased(0.0, first))
    plan = bench.restore(second)
    assert keys_of(plan) == [b"a"]
    bench.filled(plan)


def test_after_a_reset_a_hold_is_void() -> None:
    """The held bytes are of the old weights."""
    bench = Bench(spec_of(4))
    hold = bench.hold((b"a",))
    bench.take(RestoreDue)
    bench.handle(Reset(0.0))
    assert bench.restore(hold).grants == ()
    assert not bench.take(RestoreDue)
    bench.handle(HoldReleased(0.0, hold))
    assert not bench.core.world.holds


@pytest.mark.parametrize("restore", [False])
def test_restoring_can_be_switched_off(restore: bool) -> None:
    bench = Bench(spec_of(4, restore=restore))
    bench.hold((b"a",))
    assert not bench.take(RestoreDue)


def test_the_set_restored_contains_what_a_scan_would_restore() -> None:
    """DESIGN section 8: with slots enough, everything held and absent comes back; the scan of all blocks is the oracle."""
    bench = Bench(spec_of(32, policy=LRUPolicy))
    holds = {bench.hold(chain(8, name)): chain(8, name) for name in ("a", "b", "c")}
    for step in range(60):
        bench.put(chain(step % 8 + 1, "abc"[step % 3]))
        copy = bench.store(tuple(b"x%d-%d" % (step, n) for n in range(step % 20)))
        if copy.job:
            bench.filled(copy, *(FAILED for _ in copy.grants))
        for hold, keys in holds.items():
            absent = [key for key in keys if key not in bench.ready()]
            plan = bench.restore(hold)
            assert set(keys_of(plan)) == set(absent)
            if plan.job:
                bench.filled(plan)
    assert bench.core.counters.restored_blocks > 100
