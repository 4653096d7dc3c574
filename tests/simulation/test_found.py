"""What the simulation has found in the core, in as few events as show it."""

from __future__ import annotations

import itertools

from tests.core.worlds import OK, REFUSED, Bench, chain, exclusive, shared, size_of, spec_of
from tiering.core.commands import Delete, Demote, Probe, Promote
from tiering.policies import LRUPolicy


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
    assert bench.store((b"Y",), patient=True).retry
    bench.drain()
    assert bench.put((b"Y",), patient=True) == 1
