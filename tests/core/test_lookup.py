"""Looking: what is reported, what is asked, and what is forgotten again."""

from __future__ import annotations

from tests.core.worlds import FAILED, MISSING, OK, Bench, chain, exclusive, shared, spec_of
from tiering.core.commands import Probe
from tiering.core.events import OpOverdue
from tiering.types import PrefixMatch, ScanEntry, TierState


def test_lookup_takes_no_slot() -> None:
    """row 2: and changes nothing at all."""
    bench = Bench(spec_of(4, shared()))
    bench.put(chain(2))
    before = dict(bench.core.world.blocks)
    bench.lookup(chain(4))
    assert bench.core.world.blocks == before
    assert len(bench.core.world.pools[0].free) == 2


def test_the_nearest_tier_of_each_block() -> None:
    bench = Bench(spec_of(1, exclusive(room=3), shared()))
    bench.put((b"a",))
    bench.drain()
    bench.tier("nvme", TierState.DOWN)
    bench.put((b"b",), b"a")
    bench.drain()
    bench.tier("nvme", TierState.UP)
    bench.drain()
    bench.put((b"c",), b"b")
    assert bench.lookup((b"a", b"b", b"c")).match == PrefixMatch(3, 48, 1, {"nvme": 2, "primary": 1})
    bench.tier("nvme", TierState.DOWN)
    assert bench.lookup((b"a", b"b", b"c")).match.by_tier == {"redis": 2, "primary": 1}
    bench.drain()


def test_the_match_ends_at_the_first_hole() -> None:
    bench = Bench(spec_of(4))
    bench.put((b"00", b"01"))
    bench.put((b"03",))
    result = bench.lookup(chain(4))
    assert (result.match.blocks, result.match.tokens, result.undecided, result.pending) == (2, 32, (), False)


def test_what_is_filling_may_come() -> None:
    """The caller asks again; until then it counts for nothing."""
    bench = Bench(spec_of(4))
    copy = bench.store((b"00", b"01"))
    result = bench.lookup(chain(2))
    assert (result.match.blocks, result.pending) == (0, True)
    bench.filled(copy)
    assert bench.lookup(chain(2)).match == PrefixMatch(2, 32, 2, {"primary": 2})
    assert bench.lookup(()).match == PrefixMatch(0, 0, 0, {})


def test_a_shared_tier_is_asked_once() -> None:
    bench = Bench(spec_of(4, shared()))
    assert bench.lookup(chain(3)).undecided == chain(3)
    bench.probe(chain(3))
    probe = bench.one(Probe)
    assert probe.keys == chain(3)
    result = bench.lookup(chain(3))
    assert (result.undecided, result.pending) == ((), True)
    bench.probe(chain(3))
    assert not bench.take(Probe)
    bench.answer(probe, OK, OK, MISSING)
    result = bench.lookup(chain(3))
    assert (result.match.blocks, result.match.by_tier, result.pending) == (2, {"redis": 2}, False)
    assert bench.core.counters.probes == 3


def test_a_yes_further_on_does_not_lengthen_the_run() -> None:
    bench = Bench(spec_of(4, shared()))
    bench.probe((b"00", b"02"))
    bench.drain()
    result = bench.lookup(chain(3))
    assert (result.match.blocks, result.undecided, result.pending) == (1, (b"01",), True)


def test_a_tier_that_knows_is_not_asked() -> None:
    bench = Bench(spec_of(4, exclusive()))
    assert not bench.lookup(chain(3)).pending
    bench.probe(chain(3))
    assert not bench.inbox
    bench.tier("nvme", TierState.DOWN)
    bench.probe(chain(3))
    assert not bench.inbox


def test_no_deadline() -> None:
    """row 8: no answer in time is a miss for a while; the late one changes nothing."""
    bench = Bench(spec_of(4, shared()))
    bench.probe(chain(2))
    probe = bench.one(Probe)
    bench.overdue(probe)
    result = bench.lookup(chain(2))
    assert (result.match.blocks, result.pending) == (0, False)
    bench.answer(probe)
    assert bench.lookup(chain(2)).match.blocks == 0
    assert bench.core.counters.stale_completions == 2
    bench.handle(OpOverdue(0.0, probe.op))
    assert bench.core.counters.unknown_completions == 1


def test_an_overdue_demotion_is_nobodys_business() -> None:
    """Stores and deletes have no deadline here: the driver waits for them."""
    bench = Bench(spec_of(4, shared()))
    bench.put((b"a",))
    (command,) = bench.inbox
    bench.overdue(command)  # type: ignore[arg-type]
    bench.drain()
    assert bench.has("redis") == {b"a"}


def test_a_no_is_believed_for_a_while() -> None:
    for outcome in (MISSING, FAILED):
        bench = Bench(spec_of(4, shared()))
        bench.probe((b"a",))
        bench.answer(bench.one(Probe), outcome)
        assert not bench.lookup((b"a",)).undecided
        bench.probe((b"a",))
        assert not bench.inbox
        bench.now_s += bench.spec.verdict_ttl_s
        assert bench.lookup((b"a",)).undecided == (b"a",)
        bench.probe((b"a",))
        assert bench.one(Probe).keys == (b"a",)


def test_a_no_that_is_over_is_asked_again_even_in_a_crowd() -> None:
    """Forgetting is done a little at a time; a question does not wait for it."""
    bench = Bench(spec_of(4, shared()))
    bench.probe(chain(1000, "many"))
    bench.drain(MISSING)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.probe(chain(1000, "many"))
    assert sum(len(command.keys) for command in bench.take(Probe)) == 1000


def test_a_no_that_is_over_leaves_no_record() -> None:
    """Whatever is asked for and not found is forgotten, so that questions do not fill the memory."""
    bench = Bench(spec_of(4, shared()))
    bench.probe(chain(100))
    bench.drain(MISSING)
    assert len(bench.core.world.blocks) == 100
    bench.now_s += bench.spec.verdict_ttl_s
    bench.probe(())
    assert not bench.core.world.blocks


def test_verdicts_that_are_too_many_are_forgotten_early() -> None:
    bench = Bench(spec_of(4, shared(), verdicts_max=10))
    bench.probe(chain(50))
    bench.drain(MISSING)
    bench.probe(())
    assert set(bench.core.world.blocks) == set(chain(50)[40:])


def test_what_only_a_shared_tier_has_is_not_remembered_for_ever() -> None:
    """Blocks that flow through into a shared tier leave a bounded number of records behind."""
    bench = Bench(spec_of(2, shared(), verdicts_max=10))
    for n in range(100):
        bench.put((b"%03d" % n,))
        bench.drain()
    bench.probe(())
    remembered = bench.has("redis")
    assert {b"098", b"099"} <= remembered
    assert len(remembered) <= 2 + 10
    assert len(bench.core.world.blocks) <= 2 + 10
    assert bench.lookup((b"000",)).undecided == (b"000",), "asked, it would say so"


def test_found_blocks_are_not_remembered_for_ever_either() -> None:
    bench = Bench(spec_of(2, shared(), verdicts_max=10))
    bench.probe(chain(50))
    bench.drain(OK)
    bench.probe(())
    assert bench.has("redis") == set(chain(50)[40:])


def test_forgetting_is_done_a_little_at_a_time() -> None:
    bench = Bench(spec_of(2, shared(), verdicts_max=10))
    bench.probe(chain(1000, "many"))
    bench.drain(OK)
    left = [len(bench.has("redis"))]
    while len(bench.has("redis")) > 10:
        bench.probe(())
        left.append(len(bench.has("redis")))
        assert left[-2] - left[-1] <= 512
    assert len(left) > 1


def test_what_is_forgotten_already_is_not_forgotten_twice() -> None:
    bench = Bench(spec_of(1, shared(), verdicts_max=2))
    bench.put((b"a",))
    bench.drain()
    for n in range(3):
        bench.put((b"x%d" % n,))
        bench.drain()
        plan = bench.load((b"a",))
        bench.drain(MISSING)
        bench.release(plan.job)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.probe(())
    assert b"a" not in bench.core.world.blocks


def test_a_block_that_came_back_is_not_forgotten() -> None:
    bench = Bench(spec_of(2, shared(), verdicts_max=1))
    for key in (b"a", b"b", b"a", b"c"):
        bench.put((key,))
        bench.drain()
    bench.probe(())
    assert bench.has("redis") >= {b"a", b"c"}


def test_a_block_that_is_being_read_is_not_forgotten() -> None:
    bench = Bench(spec_of(4, shared(), verdicts_max=1))
    bench.probe((b"a",))
    bench.drain()
    plan = bench.load((b"a",))
    (command,) = bench.inbox
    bench.overdue(command)  # type: ignore[arg-type]
    bench.release(plan.job)
    bench.now_s += bench.spec.verdict_ttl_s
    bench.probe((b"a",))
    bench.answer(bench.one(Probe))
    bench.probe((b"b", b"c"))
    bench.answer(bench.one(Probe))
    bench.probe(())
    assert b"a" in bench.has("redis"), "its read has not come back"
    bench.drain()


def test_unbounded_queue() -> None:
    """row 12: questions in flight have a limit; the rest stays undecided."""
    bench = Bench(spec_of(4, shared(), probe_keys_max=8))
    bench.probe(chain(20))
    probe = bench.one(Probe)
    assert len(probe.keys) == 8
    assert bench.lookup(chain(20)).undecided == chain(20)[8:]
    bench.answer(probe)
    bench.probe(chain(20)[8:])
    assert len(bench.one(Probe).keys) == 8


def test_long_questions_come_in_parts() -> None:
    bench = Bench(spec_of(4, shared()))
    bench.probe(chain(1200, "long"))
    assert [len(command.keys) for command in bench.take(Probe)] == [512, 512, 176]


def test_a_scan_tells_what_a_tier_holds() -> None:
    """row 19: found again after a restart, with its links."""
    bench = Bench(spec_of(4, exclusive()), up=False)
    bench.scan(
        "nvme", *(ScanEntry(key, 8192, parent) for key, parent in zip(chain(3), (None, *chain(3)), strict=False))
    )
    assert bench.lookup(chain(3)).match.blocks == 0, "not before the tier is up"
    bench.tier("nvme", TierState.UP)
    assert bench.lookup(chain(3)).match == PrefixMatch(3, 48, 3, {"nvme": 3})


def test_a_run_longer_than_the_tier_is_loadable_in_part() -> None:
    bench = Bench(spec_of(4, exclusive(), reserve=1), up=False)
    bench.scan("nvme", *(ScanEntry(key, 8192) for key in chain(9)))
    bench.tier("nvme", TierState.UP)
    assert bench.lookup(chain(9)).match.loadable_blocks == 3
    bench.put((b"x",))
    lease = bench.load((b"x",))
    assert bench.lookup(chain(9)).match.loadable_blocks == 2
    bench.release(lease.job)
    bench.drain()
