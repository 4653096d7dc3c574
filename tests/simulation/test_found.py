"""What the simulation has found in the core, in as few events as show it."""

from __future__ import annotations

import itertools

from tests.core.worlds import OK, REFUSED, STORED_BYTES, Bench, chain, exclusive, shared, size_of, spec_of
from tiering.core.commands import Delete, Demote, Probe, Promote, RestoreDue, SlotsFreed
from tiering.policies import LRUPolicy
from tiering.types import ScanEntry


def test_a_tier_smaller_than_the_next_victims_comes_to_rest() -> None:
    """Two next victims took turns in an ``on_evict`` tier of one block, each store evicting the other, for ever."""
    bench = Bench(spec_of(16, exclusive(room=1, rule="on_evict", policy=LRUPolicy)))
    bench.put(chain(16))
    for answers in itertools.count():
        io = [command for command in bench.inbox if isinstance(command, Probe | Promote | Demote | Delete)]
        bench.inbox.clear()
        if not io:
            break
        for command in io:
            bench.answer(command, *(OK,) * size_of(command))
        assert answers < 20


def test_a_block_that_no_tier_takes_does_not_hide_those_behind_it() -> None:
    """The first victim, refused by the ``on_evict`` tier, was named again and again; the next one was never demoted.

    A patient store was then refused, although that next one was idle. A stays because its child B is in the tier.
    """
    bench = Bench(spec_of(2, shared(rule="on_evict")))
    bench.put((b"A", b"B"))
    bench.drain()
    assert bench.put((b"X",), patient=True) == 1
    bench.drain(REFUSED)
    if not bench.put((b"Y",), patient=True):
        bench.drain()
        assert bench.put((b"Y",), patient=True) == 1


def test_a_load_that_leaves_room_wakes_the_store_that_waits_for_it() -> None:
    """A load evicts until the reserve is free again; a patient store that waited for just that was not told."""
    bench = Bench(spec_of(3, exclusive(queue=1, batch=1), reserve=1))
    bench.scan("nvme", ScanEntry(b"P", STORED_BYTES))
    bench.put(chain(3))
    assert bench.store((b"X",), patient=True).retry
    bench.inbox.clear()
    assert not bench.load((b"P",)).done
    assert SlotsFreed() in bench.inbox
    assert bench.put((b"X",), patient=True) == 1


def test_a_store_that_waits_does_not_storm_a_tier_that_refuses() -> None:
    """Blocks behind the stop were offered again whenever the caller came back; their refusal called it back."""
    bench = Bench(spec_of(2, shared(), policy=LRUPolicy))
    path = chain(4)
    bench.put(path[2:])
    bench.drain(REFUSED)
    for asked in itertools.count():
        if not bench.store(path, patient=True).retry:
            break
        bench.drain(REFUSED)
        if not bench.take(SlotsFreed):
            break
        assert asked < 10


def test_a_restore_and_a_starved_load_do_not_take_turns() -> None:
    """What a restore filled the load evicted, for slots that were not enough; which was due again at once, and so on."""
    bench = Bench(spec_of(4, exclusive(), reserve=2, window=1))
    bench.scan("nvme", ScanEntry(b"P", STORED_BYTES), ScanEntry(b"Q", STORED_BYTES, b"P"))
    assert not bench.load((b"P", b"Q")).done
    bench.put((b"X", b"Y"))
    assert bench.load((b"X", b"Y")).done
    bench.answer(bench.one(Promote))
    hold = bench.hold((b"A",))
    for asked in itertools.count():
        if not bench.take(RestoreDue):
            break
        plan = bench.restore(hold)
        if plan.job:
            bench.filled(plan)
        assert asked < 5
    bench.drain()
    assert bench.take(RestoreDue)
