"""The part of the model that holds blocks elsewhere: holds, re-store, and leases while a caller makes up its mind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.core.worlds import BLOCK_BYTES
from tiering.core import events as ev

STEM, LEFT, RIGHT = (b"s0", b"s1"), (b"l0", b"l1", b"l2"), (b"r0", b"r1")
PATHS = {0: ((*STEM, *LEFT), (*STEM, *RIGHT), (b"x0",), (b"y0", b"y1")), 1: ((b"g0", b"g1", b"g2"),)}

runs = st.sampled_from((0, 0, 1)).flatmap(
    lambda pool: st.sampled_from(PATHS[pool]).flatmap(
        lambda path: st.tuples(
            st.just(pool), st.just(path), st.sampled_from((0, 0, len(path) // 2)), st.integers(1, len(path))
        )
    )
)
"""(pool, path, first, length) of a run."""


@dataclass
class Load:
    pool: int
    keys: tuple[bytes, ...]
    epoch: int
    slots: tuple[int, ...] = ()
    done: bool = False


class HoldRules(RuleBasedStateMachine):
    """Rules of the machine in ``model``, which has the core and the record of who uses which slot."""

    core: Any
    now_s: float
    epoch: int
    holds: dict[int, tuple[int, tuple[bytes, ...]]]
    stepped: dict[int, tuple[int, tuple[bytes, ...], int]]
    loads: dict[int, Load]

    def give(self, event: ev.Event) -> Any:
        raise NotImplementedError

    def begin_copy(self, pool: int, plan: ev.StorePlan) -> None:
        raise NotImplementedError

    def leased_holds(self, load: Load) -> None:
        raise NotImplementedError

    @precondition(lambda self: len(self.holds) < 2)
    @rule(run=runs)
    def hold(self, run: Any) -> None:
        pool, path, _, length = run
        self.holds[self.give(ev.HoldRequested(self.now_s, pool, path[:length]))] = (pool, path[:length])

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), blocks_max=st.integers(0, 3), end=st.booleans())
    def restore(self, data: st.DataObject, blocks_max: int, end: bool) -> None:
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        if end:
            del self.holds[hold]
            self.give(ev.HoldReleased(self.now_s, hold))
            return
        pool, keys = self.holds[hold]
        plan = self.give(ev.RestoreRequested(self.now_s, hold, blocks_max * BLOCK_BYTES))
        assert len(plan.grants) <= blocks_max
        assert [keys[grant.index] for grant in plan.grants] == [grant.key for grant in plan.grants]
        self.begin_copy(pool, plan)

    @precondition(lambda self: len(self.stepped) < 2)
    @rule(run=runs)
    def hold_by_steps(self, run: Any) -> None:
        pool, path, first, length = run
        keys = path[first : first + length]
        self.stepped[self.give(ev.HoldRequested(self.now_s, pool, keys, stepped=True))] = (pool, keys, 0)

    @precondition(lambda self: self.stepped)
    @rule(data=st.data(), what=st.sampled_from(("extend", "trim", "release")))
    def change_hold(self, data: st.DataObject, what: str) -> None:
        hold = data.draw(st.sampled_from(sorted(self.stepped)))
        pool, keys, first = self.stepped[hold]
        if what == "release":
            del self.stepped[hold]
            self.give(ev.HoldReleased(self.now_s, hold))
        elif what == "trim":
            below = data.draw(st.integers(0, len(keys)))
            self.stepped[hold] = (pool, keys, max(first, below))
            self.give(ev.HoldTrimmed(self.now_s, hold, below))
        else:
            path = next(path for path in PATHS[pool] if keys[0] in path)
            more = tuple(key for key in path if key not in keys)[:2]
            self.stepped[hold] = (pool, keys + more, first)
            self.give(ev.HoldExtended(self.now_s, hold, more))

    @precondition(lambda self: self.stepped)
    @rule(blocks_max=st.integers(0, 3), ranked=st.booleans())
    def restore_step(self, blocks_max: int, ranked: bool) -> None:
        holds = tuple(self.stepped)
        plan = self.give(ev.RestoreStep(self.now_s, holds, blocks_max * BLOCK_BYTES, ranked))
        granted = [grant.key for _, part in plan.plans for grant in part.grants]
        assert len(granted) == len(set(granted)) <= blocks_max
        for hold, part in plan.plans:
            pool, keys, first = self.stepped[hold]
            for grant in part.grants:
                assert keys[grant.index] == grant.key
                assert grant.key in keys[first:]
            self.begin_copy(pool, part)

    @rule(run=runs)
    def lease(self, run: Any) -> None:
        pool, path, first, length = run
        plan = self.give(ev.LeaseRequested(self.now_s, pool, path[first : first + length]))
        load = self.loads[plan.job] = Load(pool, path[first : first + length], self.epoch, plan.slots, done=True)
        self.leased_holds(load)
