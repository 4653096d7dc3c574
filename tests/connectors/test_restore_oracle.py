"""Re-store against its oracle: a plain re-scan of all blocks of all requests in each step, which is what it replaces.

DESIGN section 8: with an unlimited budget and ranking off, what is re-stored contains what the re-scan would, on every
schedule, at a cost that follows the events and not blocks x steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.worlds import BLOCK_BYTES, FAILED, OK, Bench, chain, exclusive, spec_of
from tiering.core import events as ev
from tiering.core.commands import Promote
from tiering.policies.lru import LRUPolicy
from tiering.policies.prefix import PrefixPolicy
from tiering.types import TierState

UNLIMITED = 1 << 40


@dataclass
class Holder:
    """A request that runs: the engine holds blocks ``first`` to ``cursor`` of its prompt on the GPU."""

    keys: tuple[bytes, ...]
    hold: int
    first: int = 0
    cursor: int = 0

    @property
    def held(self) -> tuple[bytes, ...]:
        return self.keys[self.first : self.cursor]


@dataclass
class Scene:
    """A core, the requests over it, and the copies under way."""

    bench: Bench
    holders: list[Holder] = field(default_factory=list)
    copies: list[ev.StorePlan] = field(default_factory=list)
    others: int = 0

    def begin(self, keys: tuple[bytes, ...], blocks: int) -> Holder:
        """A request is admitted with its first ``blocks`` blocks."""
        hold = self.bench.handle(ev.HoldRequested(self.bench.now_s, 0, keys[:blocks], stepped=True))
        assert isinstance(hold, int)
        self.holders.append(Holder(keys, hold, 0, min(blocks, len(keys))))
        return self.holders[-1]

    def grow(self, holder: Holder, blocks: int) -> None:
        fresh = holder.keys[holder.cursor : holder.cursor + blocks]
        self.bench.handle(ev.HoldExtended(self.bench.now_s, holder.hold, fresh))
        holder.cursor += len(fresh)

    def trim(self, holder: Holder, blocks: int) -> None:
        holder.first = min(holder.cursor, holder.first + blocks)
        self.bench.handle(ev.HoldTrimmed(self.bench.now_s, holder.hold, holder.first))

    def end(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.bench.handle(ev.HoldReleased(self.bench.now_s, holder.hold))

    def pressure(self, blocks: int, *, fail: bool = False) -> None:
        """Others store so many blocks, and evict for them."""
        self.others += 1
        plan = self.bench.store(tuple(b"x%d-%d" % (self.others, n) for n in range(blocks)))
        if plan.job:
            self.bench.filled(plan, *((FAILED if fail else OK,) * len(plan.grants)))

    def store(self, keys: tuple[bytes, ...]) -> None:
        """A request offers blocks for the first time; the copy is under way."""
        plan = self.bench.store(keys, patient=True)
        if plan.job:
            self.copies.append(plan)

    def copied(self, plan: ev.StorePlan, *, ok: bool = True) -> None:
        self.copies.remove(plan)
        self.bench.filled(plan, *((OK if ok else FAILED,) * len(plan.grants)))

    def scan(self) -> tuple[list[bytes], int]:
        """What the plain re-scan would re-store, and how many blocks it looks at for that."""
        in_flight = {grant.key for plan in self.copies for grant in plan.grants} | self.promoting()
        there = self.bench.ready() | in_flight
        looked = [key for holder in self.holders for key in holder.held]
        return list(dict.fromkeys(key for key in looked if key not in there)), len(looked)

    def promoting(self) -> set[bytes]:
        return {item.key for command in self.bench.inbox if isinstance(command, Promote) for item in command.items}

    def step(self, bytes_max: int = UNLIMITED, *, ranked: bool = False) -> list[bytes]:
        """What is re-stored in a step; the copies are under way."""
        holds = tuple(holder.hold for holder in self.holders)
        reply = self.bench.handle(ev.RestoreStep(self.bench.now_s, holds, bytes_max, ranked))
        assert isinstance(reply, ev.RestorePlan)
        keys = []
        by_hold = {holder.hold: holder for holder in self.holders}
        for hold, plan in reply.plans:
            self.copies.append(plan)
            for grant in plan.grants:
                assert by_hold[hold].keys[grant.index] == grant.key, "the index is the position in the request's run"
                assert by_hold[hold].first <= grant.index < by_hold[hold].cursor
            keys += [grant.key for grant in plan.grants]
        return keys

    @property
    def free(self) -> int:
        return len(self.bench.core.world.pools[0].free)

    @property
    def examined(self) -> int:
        return self.bench.core.counters.restore_examined


PROMPTS = [chain(12, "a"), (*chain(6, "a"), *chain(6, "a-b")), chain(12, "c"), (*chain(3, "c"), *chain(9, "c-d"))]
"""Some share their beginning."""


class OracleMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(2, 60), lru=st.booleans(), tier=st.booleans())
    def open(self, slots: int, lru: bool, tier: bool) -> None:
        tiers = [exclusive(rule="on_store", room=20)] if tier else []
        self.scene = Scene(Bench(spec_of(slots, *tiers, policy=LRUPolicy if lru else PrefixPolicy)))

    def holder(self, which: int) -> Holder | None:
        return self.scene.holders[which % len(self.scene.holders)] if self.scene.holders else None

    @rule(which=st.integers(0, 3), blocks=st.integers(0, 12), stores=st.booleans())
    def a_request_begins(self, which: int, blocks: int, stores: bool) -> None:
        if len(self.scene.holders) < 6:
            if stores:
                self.scene.store(PROMPTS[which][:blocks])
            self.scene.begin(PROMPTS[which], blocks)

    @rule(which=st.integers(0, 9), blocks=st.integers(1, 4), stores=st.booleans())
    def it_computes_more(self, which: int, blocks: int, stores: bool) -> None:
        if (holder := self.holder(which)) is not None:
            if stores:
                self.scene.store(holder.keys[holder.cursor : holder.cursor + blocks])
            self.scene.grow(holder, blocks)

    @rule(which=st.integers(0, 9), blocks=st.integers(1, 4))
    def its_window_moves_on(self, which: int, blocks: int) -> None:
        if (holder := self.holder(which)) is not None:
            self.scene.trim(holder, blocks)

    @rule(which=st.integers(0, 9))
    def it_ends(self, which: int) -> None:
        if (holder := self.holder(which)) is not None:
            self.scene.end(holder)

    @rule(blocks=st.integers(1, 20), fail=st.booleans())
    def others_store(self, blocks: int, fail: bool) -> None:
        self.scene.pressure(blocks, fail=fail)

    @rule(which=st.integers(0, 9), ok=st.sampled_from([True, True, False]))
    def a_copy_ends(self, which: int, ok: bool) -> None:
        if self.scene.copies:
            self.scene.copied(self.scene.copies[which % len(self.scene.copies)], ok=ok)

    @rule(which=st.integers(0, 3), blocks=st.integers(1, 12))
    def somebody_loads(self, which: int, blocks: int) -> None:
        bench = self.scene.bench
        plan = bench.load(PROMPTS[which][:blocks])
        bench.release(plan.job)

    @rule(ok=st.sampled_from([True, True, False]))
    def the_tier_answers(self, ok: bool) -> None:
        self.scene.bench.drain(OK if ok else FAILED)

    @rule()
    def the_weights_change(self) -> None:
        """What was held is of the old weights; the requests go, and come again."""
        scene = self.scene
        scene.bench.handle(ev.Reset(scene.bench.now_s))
        for tier in scene.bench.spec.tiers:
            scene.bench.tier(tier.name, TierState.UP)
        assert scene.step() == []
        for holder in list(scene.holders):
            scene.end(holder)
        for plan in list(scene.copies):
            scene.copied(plan)

    @rule()
    def a_step(self) -> None:
        scene = self.scene
        scene.bench.now_s += scene.bench.spec.restore_pause_s  # the rest after a failed copy is over
        wanted, _ = scene.scan()
        free, starved = scene.free, bool(scene.bench.core.world.starved)
        got = scene.step()
        assert set(got) <= set(wanted), "nothing is copied that is there, on its way, or held by nobody"
        assert len(got) == len(set(got))
        if not starved:
            assert len(got) >= min(free, len(wanted))
        if not starved and free >= len(wanted):
            assert set(got) == set(wanted)

    @invariant()
    def what_a_scan_would_find_is_due(self) -> None:
        if hasattr(self, "scene"):
            due = {key for holder in self.scene.holders for key in self.scene.bench.core.world.holds[holder.hold].due}
            assert set(self.scene.scan()[0]) <= due


TestRestoreContainsTheRescan = OracleMachine.TestCase
TestRestoreContainsTheRescan.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("steps", [30, 150])
def test_the_cost_follows_the_events_and_not_blocks_times_steps(steps: int) -> None:
    """Eight requests of 50 blocks each; in every fifth step somebody stores four blocks. The scan looks at 400 a step."""
    scene = Scene(Bench(spec_of(404, policy=LRUPolicy)))
    for n in range(8):
        scene.bench.put(chain(50, f"r{n}-"))
        scene.begin(chain(50, f"r{n}-"), 50)
    scanned = lost = 0
    begin = scene.examined
    for step in range(steps):
        if step % 5 == 0:
            before = scene.bench.core.counters.evicted_blocks
            scene.pressure(4)
            lost += scene.bench.core.counters.evicted_blocks - before
        wanted, looked = scene.scan()
        scanned += looked
        got = scene.step(ranked=True)
        assert set(got) == set(wanted) or not scene.free
        for plan in list(scene.copies):
            scene.copied(plan)
    examined = scene.examined - begin
    print(f"{steps} steps: {lost} blocks lost, {examined} keys examined; a re-scan looks at {scanned}")
    assert scanned == 400 * steps
    assert lost, "there was something to do"
    assert examined <= 52 * (lost + 1), "a lost block costs itself and the run behind it"


def test_a_full_tier_costs_no_more_the_longer_it_stays_full() -> None:
    """Nothing that is due can get a slot, and nothing happens: a step has nothing to look at."""
    scene = Scene(Bench(spec_of(8, policy=LRUPolicy)))
    scene.begin(chain(8, "in"), 8)
    scene.bench.put(chain(8, "in"))
    for n in range(4):
        scene.begin(chain(200, f"out{n}-"), 200)
    assert scene.step(ranked=True) == []
    first = scene.examined
    for _ in range(100):
        assert scene.step(ranked=True) == []
    per_step = (scene.examined - first) / 100
    print(f"{per_step:.0f} keys examined a step; a re-scan looks at 808")
    assert per_step <= 8
    scene.end(scene.holders[0])
    scene.bench.now_s += scene.bench.spec.restore_pause_s
    assert len(scene.step(ranked=True)) == 8, "what was held there may go now"


# -- ranked -----------------------------------------------------------------------------------------------------------


def test_worth_most_goes_first_over_all_requests_and_within_the_budget() -> None:
    """Behind a0 stand five present blocks, behind b0 two; of c all is missing, which is one run of four."""
    scene = Scene(Bench(spec_of(40, policy=LRUPolicy)))
    scene.bench.put(chain(6, "a")[1:])
    scene.bench.put(chain(3, "b")[1:])
    for name, blocks in (("b", 3), ("a", 6), ("c", 4)):
        scene.begin(chain(blocks, name), blocks)
    got = []
    for _ in range(6):
        step = scene.step(BLOCK_BYTES, ranked=True)
        assert len(step) == 1, "a block a step"
        got += step
    # Of c each block is worth those behind it: four, three, two, one.
    assert got == [b"a00", b"c00", b"b00", b"c01", b"c02", b"c03"]
    assert scene.bench.core.counters.restore_bytes == 6 * BLOCK_BYTES
    assert scene.bench.core.counters.restore_skipped["budget"] > 0


def test_no_ping_pong_between_two_requests_in_a_tier_for_one() -> None:
    """Both hold ten blocks and there are ten slots: the copies stop, however many steps follow."""
    for policy in (LRUPolicy, PrefixPolicy):
        scene = Scene(Bench(spec_of(10, policy=policy)))
        for name in ("a", "b"):
            scene.begin(chain(10, name), 10)
        for _ in range(100):
            scene.step(ranked=True)
            for plan in list(scene.copies):
                scene.copied(plan)
        assert scene.bench.core.counters.restored_blocks == 10
        assert scene.bench.core.counters.evicted_blocks == 0


def test_no_ping_pong_with_stores_of_others() -> None:
    """Others store a block in each step and evict one that is held: it comes back for a block that is worth less, which
    nobody wants again. A re-store a step at most, and never of what was just stored."""
    scene = Scene(Bench(spec_of(12, policy=LRUPolicy)))
    keys = chain(10, "a")
    scene.bench.put(keys)
    scene.begin(keys, 10)
    for _ in range(50):
        scene.pressure(1)
        scene.bench.now_s += scene.bench.spec.restore_pause_s
        scene.step(ranked=True)
        for plan in list(scene.copies):
            scene.copied(plan)
    assert scene.bench.core.counters.restored_blocks <= 50
    held = [key for key in keys if key in scene.bench.ready()]
    assert len(held) >= 9


class RankedMachine(RuleBasedStateMachine):
    """Ranked: whatever happens, no block goes that is worth as much as the one that comes, and the budget holds."""

    @initialize(slots=st.integers(2, 16), lru=st.booleans())
    def open(self, slots: int, lru: bool) -> None:
        self.scene = Scene(Bench(spec_of(slots, policy=LRUPolicy if lru else PrefixPolicy)))

    @rule(which=st.integers(0, 3), blocks=st.integers(1, 12))
    def a_request_begins(self, which: int, blocks: int) -> None:
        if len(self.scene.holders) < 4:
            self.scene.bench.put(PROMPTS[which][:blocks])
            self.scene.begin(PROMPTS[which], blocks)

    @rule(which=st.integers(0, 9))
    def it_ends(self, which: int) -> None:
        if self.scene.holders:
            self.scene.end(self.scene.holders[which % len(self.scene.holders)])

    @rule(blocks=st.integers(1, 6))
    def others_store(self, blocks: int) -> None:
        self.scene.pressure(blocks)

    @rule(budget=st.integers(0, 4))
    def a_step(self, budget: int) -> None:
        scene = self.scene
        scene.bench.now_s += scene.bench.spec.restore_pause_s
        before = scene.bench.ready()
        held = {key for holder in scene.holders for key in holder.held}
        wanted, _ = scene.scan()
        got = scene.step(budget * BLOCK_BYTES, ranked=True)
        gone = before - scene.bench.ready()
        assert len(got) <= budget
        assert set(got) <= set(wanted)
        assert not gone & held, "what somebody holds is worth as much"
        assert len(gone) <= len(got)
        for plan in list(scene.copies):
            scene.copied(plan)

    @rule()
    def many_steps_come_to_rest(self) -> None:
        """Nothing else happens: the copies end after as many as there are blocks held, at most."""
        scene = self.scene
        held = {key for holder in scene.holders for key in holder.held}
        begin = scene.bench.core.counters.restored_blocks
        for _ in range(30):
            scene.bench.now_s += scene.bench.spec.restore_pause_s
            scene.step(ranked=True)
            for plan in list(scene.copies):
                scene.copied(plan)
        assert scene.bench.core.counters.restored_blocks - begin <= len(held)
        assert scene.step(ranked=True) == []


TestRankedRestore = RankedMachine.TestCase
TestRankedRestore.settings = settings(max_examples=40, stateful_step_count=20)
