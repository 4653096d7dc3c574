"""The byte budget of bounded tiers: exact, whatever fails."""

from __future__ import annotations

import pytest

from tests.core.worlds import (
    CORRUPT,
    FAILED,
    MISSING,
    OK,
    REFUSED,
    STORED_BYTES,
    Bench,
    chain,
    exclusive,
    shared,
    spec_of,
)
from tiering.core.commands import Delete, Demote, FlushDone, Probe, Promote
from tiering.core.room import DELETE_PAUSE_S
from tiering.policies.lru import LRUPolicy
from tiering.types import ScanEntry, TierState


def used(bench: Bench) -> int:
    tier = bench.core.world.tiers[0]
    assert tier.used_bytes % STORED_BYTES == 0
    return tier.used_bytes // STORED_BYTES


def foreign(n: int, size: int = STORED_BYTES) -> list[ScanEntry]:
    return [ScanEntry(b"foreign-%040d" % i, size, foreign=True) for i in range(n)]


def lone(bench: Bench, *keys: bytes) -> None:
    """Store blocks that are a prefix of their own each, one after another, and let all be demoted."""
    for key in keys:
        bench.put((key,))
        bench.drain()


def test_disk_fills_up() -> None:
    """row 17: the bytes never pass the limit, with deletes and stores under way at the same time."""
    bench = Bench(spec_of(64, exclusive(room=5, batch=2, policy=LRUPolicy)))
    for n in range(40):
        bench.put((b"%02d" % n,))
        assert used(bench) <= 5
    while bench.inbox:
        command = bench.inbox.pop(0)
        assert isinstance(command, Delete | Demote)
        bench.answer(command)
        assert used(bench) <= 5
    assert len(bench.has("nvme")) == 5


def test_the_least_recent_tail_goes_first() -> None:
    bench = Bench(spec_of(8, exclusive(room=3)))
    bench.put((b"a", b"b"))
    bench.drain()
    lone(bench, b"x", b"y")
    assert bench.has("nvme") == {b"a", b"x", b"y"}, "b was the tail of the oldest path, and the primary tier has it"


def test_a_last_copy_with_a_child_elsewhere_is_kept() -> None:
    """Leaves are judged on the union of tiers: the head of a chain outlives its tail wherever that is."""
    bench = Bench(spec_of(4, exclusive(room=2)))
    bench.put(chain(4))
    bench.drain()
    assert bench.has("nvme") == {b"00", b"01"}
    assert set(bench.core.world.tiers[0].parked) == {b"02", b"03"}
    bench.put((b"x", b"y", b"z"))
    assert bench.ready() == {b"00", b"x", b"y", b"z"}
    assert bench.one(Delete).keys == (b"01",), "once the tail has left the primary tier, what was before it is the tail"


def test_a_head_that_a_farther_tier_holds_may_go() -> None:
    """A copy elsewhere makes an inner block as good as a leaf, if its tier's policy names it at all."""
    bench = Bench(spec_of(4, exclusive(room=1), shared(rule="on_store")))
    bench.put((b"a",))
    bench.drain()
    bench.put((b"b",), b"a")
    bench.drain()
    assert bench.has("redis") == {b"a", b"b"}
    assert bench.has("nvme") == {b"b"}


def test_foreign_blocks_go_first_oldest_first() -> None:
    """DESIGN section 12: another namespace's blocks are opaque, and give way before ours."""
    bench = Bench(spec_of(8, exclusive(room=4, batch=1)), up=False)
    bench.scan("nvme", *foreign(3), ScanEntry(b"ours", STORED_BYTES))
    bench.tier("nvme", TierState.UP)
    assert not bench.take(Delete), "opening alone deletes nothing"
    for n in range(3):
        bench.put((b"new%d" % n,))
        delete = bench.one(Delete)
        assert delete.keys == (b"foreign-%040d" % n,)
        bench.answer(delete)
        bench.drain()
    assert bench.has("nvme") == {b"ours", b"new0", b"new1", b"new2"}
    lone(bench, b"new3")
    assert bench.has("nvme") == {b"new0", b"new1", b"new2", b"new3"}


def test_a_foreign_block_that_cannot_be_deleted_stays_accounted() -> None:
    bench = Bench(spec_of(8, exclusive(room=1, batch=1)), up=False)
    bench.scan("nvme", *foreign(1))
    bench.tier("nvme", TierState.UP)
    bench.put((b"a",))
    bench.answer(bench.one(Delete), FAILED)
    assert used(bench) == 1
    assert not bench.inbox
    bench.now_s += DELETE_PAUSE_S
    bench.put((b"a",))
    bench.answer(bench.one(Delete), MISSING)
    bench.answer(bench.one(Demote))
    assert bench.has("nvme") == {b"a"}
    assert used(bench) == 1


def test_lowering_the_capacity() -> None:
    """row 17: what a scan finds beyond the limit is deleted once the tier is up, foreign blocks first."""
    bench = Bench(spec_of(8, exclusive(room=4, batch=2)), up=False)
    keys = chain(8)
    bench.scan("nvme", *foreign(2), *(ScanEntry(k, STORED_BYTES, p) for k, p in zip(keys, (None, *keys), strict=False)))
    assert used(bench) == 10
    bench.tier("nvme", TierState.UP)
    deletes = bench.take(Delete)
    assert sorted(key for command in deletes for key in command.keys) == sorted(
        [*keys[4:], *(entry.handle for entry in foreign(2))]
    )
    for command in deletes:
        bench.answer(command)
    assert used(bench) == 4
    assert bench.has("nvme") == set(keys[:4]), "the tail went"


def test_a_scan_that_tells_a_thing_twice() -> None:
    bench = Bench(spec_of(8, exclusive(room=4)), up=False)
    entries = [*foreign(1), ScanEntry(b"a", STORED_BYTES), ScanEntry(b"b", STORED_BYTES, b"a")]
    bench.scan("nvme", *entries)
    bench.scan("nvme", *entries)
    bench.scan("nvme", *foreign(1, 2 * STORED_BYTES))
    assert used(bench) == 4
    assert bench.has("nvme") == {b"a", b"b"}


def test_a_scan_of_a_block_of_no_size_counts_all_the_same() -> None:
    bench = Bench(spec_of(8, exclusive(room=4)), up=False)
    bench.scan("nvme", ScanEntry(b"a", 0))
    assert bench.core.world.tiers[0].used_bytes > 0


def test_a_scan_of_an_unbounded_tier_counts_nothing() -> None:
    bench = Bench(spec_of(8, exclusive(room=None)), up=False)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES))
    assert used(bench) == 0
    assert bench.has("nvme") == {b"a"}


def test_enospc_eio_edquot() -> None:
    """row 18: a failed store leaks nothing: tried again, or removed once the tier works."""
    bench = Bench(spec_of(1, exclusive(room=4)))
    bench.put((b"a",))
    bench.answer(bench.one(Demote), FAILED)
    assert used(bench) == 1, "it may have been stored all the same"
    bench.put((b"b",))
    bench.now_s += bench.spec.verdict_ttl_s
    bench.answer(bench.one(Demote))
    assert bench.one(Delete).keys == (b"a",)
    bench.drain(MISSING)
    (op,) = bench.core.world.ops
    assert op
    assert used(bench) == 2


def test_what_a_failed_store_left_goes_before_good_blocks() -> None:
    bench = Bench(spec_of(2, exclusive(room=2)))
    lone(bench, b"good")
    bench.put((b"bad",))
    bench.answer(bench.one(Demote), FAILED)
    bench.release(bench.load((b"good",)).job)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.put((b"new",))
    assert bench.ready() == {b"good", b"new"}
    delete = bench.one(Delete)
    assert delete.keys == (b"bad",)
    bench.answer(delete)
    bench.drain()
    assert bench.has("nvme") == {b"good", b"new"}


def test_only_as_much_as_is_needed_is_removed() -> None:
    bench = Bench(spec_of(3, exclusive(room=3)))
    for key in (b"a", b"b"):
        bench.put((key,))
        bench.answer(bench.one(Demote), FAILED)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.tier("nvme", TierState.DEGRADED)
    bench.put((b"x", b"y", b"z"))
    bench.tier("nvme", TierState.UP)
    delete = bench.one(Delete)
    assert delete.keys == (b"a",)
    bench.answer(delete)
    bench.drain()
    assert used(bench) == 3


def test_what_is_being_read_is_not_removed_though_its_verdict_is_doubtful() -> None:
    """A read that came too late has not landed; a delete would pull the bytes from under it."""
    bench = Bench(spec_of(3, exclusive(room=1)), up=False)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES))
    bench.tier("nvme", TierState.UP)
    plan = bench.load((b"a",))
    read = bench.one(Promote)
    bench.overdue(read)
    bench.release(plan.job)
    bench.put((b"a",))
    demote = bench.one(Demote)
    bench.answer(demote, FAILED)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.put((b"x",))
    assert not bench.take(Delete)
    bench.answer(read, CORRUPT)
    bench.put((b"x",))
    bench.drain()


def test_found_again_by_a_scan_it_is_vouched_for() -> None:
    bench = Bench(spec_of(1, exclusive(room=2)))
    bench.put((b"a",))
    bench.answer(bench.one(Demote), FAILED)
    lone(bench, b"x")
    bench.now_s += bench.spec.verdict_ttl_s
    bench.tier("nvme", TierState.OPENING)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES), ScanEntry(b"x", STORED_BYTES))
    assert bench.has("nvme") == {b"a", b"x"}
    plan = bench.load((b"a",))
    bench.release(plan.job)
    bench.tier("nvme", TierState.UP)
    plan = bench.load((b"a",))
    bench.answer(bench.one(Promote), FAILED)
    bench.release(plan.job)
    bench.tier("nvme", TierState.OPENING)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES))
    assert used(bench) == 2


def test_a_refused_store_left_nothing() -> None:
    bench = Bench(spec_of(4, exclusive(room=2)))
    bench.put((b"a",))
    bench.answer(bench.one(Demote), REFUSED)
    assert used(bench) == 0
    bench.put((b"a",))
    bench.answer(bench.one(Demote), FAILED)
    bench.put((b"a",))
    bench.answer(bench.one(Demote), REFUSED)
    assert used(bench) == 1, "but the one that failed before may have"
    bench.put((b"a",))
    bench.answer(bench.one(Demote))
    assert used(bench) == 1


def test_a_failed_read_leaves_the_block_accounted() -> None:
    """It is there, most likely; asked later, the tier tells."""
    bench = Bench(spec_of(1, exclusive(room=2)))
    lone(bench, b"a", b"x")
    plan = bench.load((b"a",))
    bench.answer(bench.one(Promote), FAILED)
    bench.release(plan.job)
    assert used(bench) == 2
    bench.now_s += bench.spec.verdict_ttl_s
    assert bench.lookup((b"a",)).undecided == (b"a",)
    bench.probe((b"a",))
    bench.answer(bench.one(Probe))
    assert bench.has("nvme") == {b"a", b"x"}
    assert used(bench) == 2


def test_a_block_that_the_tier_denies_frees_its_bytes() -> None:
    for outcome in (MISSING, CORRUPT):
        bench = Bench(spec_of(1, exclusive(room=2)))
        lone(bench, b"a", b"x")
        plan = bench.load((b"a",))
        bench.answer(bench.one(Promote), outcome)
        bench.release(plan.job)
        bench.drain()
        assert used(bench) == 1


def test_asked_about_what_it_failed_to_store_a_tier_may_say_either() -> None:
    for answer, blocks in ((OK, 1), (MISSING, 0)):
        bench = Bench(spec_of(1, exclusive(room=2)))
        bench.put((b"a",))
        bench.answer(bench.one(Demote), FAILED)
        bench.put((b"x",))
        bench.take(Demote)
        bench.now_s += bench.spec.verdict_ttl_s
        bench.probe((b"a",))
        bench.answer(bench.one(Probe), answer)
        assert used(bench) == blocks + 1
        assert bench.has("nvme") == ({b"a"} if blocks else set())


def test_a_delete_that_fails_frees_nothing() -> None:
    bench = Bench(spec_of(4, exclusive(room=1)))
    lone(bench, b"a")
    bench.put((b"b",))
    delete = bench.one(Delete)
    bench.answer(delete, FAILED)
    assert used(bench) == 1
    assert not bench.inbox, "not tried again at once"
    bench.put((b"b",))
    assert not bench.inbox, "nor while the pause lasts"
    bench.now_s += bench.spec.verdict_ttl_s
    bench.put((b"b",))
    assert bench.one(Delete).keys == (b"a",)


def test_deletes_that_always_fail_are_not_a_loop() -> None:
    bench = Bench(spec_of(8, exclusive(room=2, batch=1)))
    lone(bench, b"a", b"b")
    bench.put((b"c",))
    asked = 0
    while deletes := bench.take(Delete):
        for command in deletes:
            asked += 1
            bench.answer(command, FAILED)
    assert asked <= 2


def test_one_block_that_cannot_be_deleted_does_not_stop_the_others() -> None:
    bench = Bench(spec_of(8, exclusive(room=3, batch=4)))
    lone(bench, b"a", b"b", b"c")
    bench.put((b"d",))
    bench.answer(bench.one(Delete), FAILED)
    bench.now_s += DELETE_PAUSE_S
    bench.put((b"d",))
    assert bench.one(Delete).keys == (b"b",)


def test_no_block_is_deleted_while_it_is_read() -> None:
    """DESIGN section 5: no delete while ``reads > 0``."""
    bench = Bench(spec_of(2, exclusive(room=1)))
    lone(bench, b"a")
    bench.put((b"x", b"y"))
    bench.drain()
    bench = Bench(spec_of(1, exclusive(room=1)))
    lone(bench, b"a")
    bench.tier("nvme", TierState.DEGRADED)
    bench.put((b"x",))
    bench.release(bench.load((b"x",)).job)
    bench.tier("nvme", TierState.DEGRADED)
    plan = bench.load((b"a",))
    read = bench.one(Promote)
    bench.overdue(read)
    bench.release(plan.job)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.tier("nvme", TierState.UP)
    bench.answer(read, CORRUPT)
    assert used(bench) == 1


def test_what_finds_no_room_waits_until_something_changes() -> None:
    """Everything in the tier is being read: the block stays owed, and the flush says that it is not there."""
    bench = Bench(spec_of(2, exclusive(room=1)), up=False)
    bench.scan("nvme", ScanEntry(b"a", STORED_BYTES))
    bench.tier("nvme", TierState.UP)
    bench.load((b"a",))
    read = bench.one(Promote)
    bench.put((b"b",))
    assert not bench.take(Delete)
    job = bench.flush()
    assert bench.one(FlushDone) == FlushDone(job, 0, {"nvme": 1})
    bench.answer(read)
    bench.put((b"b",))
    assert bench.one(Delete).keys == (b"a",)
    bench.drain()


def test_room_is_made_for_a_few_blocks_at_a_time() -> None:
    bench = Bench(spec_of(64, exclusive(room=32, batch=4, policy=LRUPolicy)))
    lone(bench, *(b"old%02d" % n for n in range(32)))
    bench.put(chain(16))
    deletes = bench.take(Delete)
    assert 1 <= sum(len(command.keys) for command in deletes) <= 1 + 32 // 8
    for command in deletes:
        bench.answer(command)
    bench.drain()
    assert bench.has("nvme") >= set(chain(16))


@pytest.mark.parametrize("outcome", [OK, MISSING])
def test_a_bounded_tier_without_a_scan_is_asked(outcome: object) -> None:
    """Persistent and exclusive, but unable to list what it holds: found blocks are accounted as they are found."""
    spec = spec_of(2, exclusive(room=4))
    tier = spec.tiers[0]
    caps = type(tier.capabilities)(
        persistent=True, shared=False, exclusive=True, alignment_bytes=4096, header_bytes=4096
    )
    blind = type(tier)("nvme", caps, tier.capacity_bytes, "on_store", tier.queue_bytes_max, 8, tier.policy, 4096)
    bench = Bench(type(spec)(spec.pools, (blind,), 1 << 20))
    assert bench.lookup((b"a",)).undecided == (b"a",)
    bench.probe((b"a",))
    bench.answer(bench.one(Probe), outcome)  # type: ignore[arg-type]
    assert used(bench) == (1 if outcome is OK else 0)
