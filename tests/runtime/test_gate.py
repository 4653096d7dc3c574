"""The lock around the core: short holds, long batches in parts, and the fuse."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.core.worlds import OK, chain, exclusive, spec_of
from tiering.api import BlockKey, EvictionPolicy
from tiering.core import events as ev
from tiering.core.commands import Command
from tiering.core.invariants import check
from tiering.core.journal import Journal, load
from tiering.core.machine import TieringCore
from tiering.core.state import CoreSpec
from tiering.errors import ShapeError
from tiering.policies.lru import LRUPolicy
from tiering.policies.prefix import PrefixPolicy
from tiering.runtime.gate import FUSED, KEYS_PER_HOLD_MAX, Gate, Notification
from tiering.types import Outcome, TierState


class BogusPolicy(LRUPolicy):
    """A plug-in with a defect: it names a block that was never there."""

    def victims(self, n: int, protected: Callable[[BlockKey], bool]) -> list[BlockKey]:
        return [b"never seen"]


class InterruptedPolicy(LRUPolicy):
    """Ctrl-C while the core is in the middle of a step."""

    def admit(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        raise KeyboardInterrupt


class Rig:
    """A gate over a real core, and what it told its neighbours."""

    def __init__(self, spec: CoreSpec, dump: Callable[[], str] | None = None) -> None:
        journal = Journal(1000, spec)
        self.core = TieringCore(spec, observer=journal)
        self.told: list[Notification] = []
        self.commands: list[Command] = []
        self.progress = 0
        self.fuses = 0
        self.gate = Gate(
            self.core, notify=self._notify, progress=self._progress, on_fuse=self._fuse, dump=dump or journal.dump
        )
        self.gate.connect(self.commands.extend)

    def _notify(self, items: Sequence[Notification]) -> None:
        self.gate.busy_slots()  # would hang if this ran under the lock
        self.told += items

    def _progress(self) -> None:
        self.gate.busy_slots()
        self.progress += 1

    def _fuse(self) -> None:
        self.gate.busy_slots()
        self.fuses += 1

    def store(self, *keys: bytes, outcome: Outcome = OK) -> ev.StorePlan:
        plan = self.gate.handle(ev.StoreRequested(0.0, 0, keys))
        assert isinstance(plan, ev.StorePlan)
        if plan.job:
            self.gate.handle(ev.StoreFinished(0.0, plan.job, (outcome,) * len(plan.grants)))
        return plan

    def load(self, *keys: bytes) -> ev.LoadPlan:
        plan = self.gate.handle(ev.LoadRequested(0.0, 0, keys))
        assert isinstance(plan, ev.LoadPlan)
        return plan


def _spec(slots: int = 4, policy: type[EvictionPolicy] = PrefixPolicy, *tiers: Any) -> CoreSpec:
    return spec_of(slots, *tiers, policy=policy)


# -- the fuse ---------------------------------------------------------------------------------------------------------


def test_a_contradiction_switches_the_cache_off_and_nobody_is_hurt(caplog: pytest.LogCaptureFixture) -> None:
    """An assert of ours never takes an engine down: misses and empty plans from then on, one line, the journal with it."""
    rig = Rig(_spec(2, BogusPolicy))
    a, b, c = chain(3)
    assert len(rig.store(a, b).grants) == 2
    assert rig.gate.lookup(0, (a, b), 0.0).match.blocks == 2
    with caplog.at_level(logging.ERROR, "tiering"):
        plan = rig.store(c)
        assert (plan.job, plan.grants, plan.refused) == (0, (), FUSED)
        assert rig.gate.fused
        for _ in range(3):
            assert rig.gate.lookup(0, (a, b), 0.0).match.blocks == 0
            assert rig.store(a).refused == FUSED
            assert rig.load(a) == ev.LoadPlan(0, True, ())
            assert rig.gate.handle(ev.FlushRequested(0.0)) == 0
            assert rig.gate.handle(ev.HoldRequested(0.0, 0, (a,))) == 0
            rig.gate.post(ev.TierChanged(0.0, "nowhere", TierState.UP))
        assert rig.gate.job_slots(1) == ()
    assert rig.fuses == 1
    [record] = caplog.records
    journal = record.getMessage().partition("journal of recent events:\n")[2]
    assert [type(event).__name__ for event in load(journal).events] == [
        "StoreRequested", "StoreFinished", "StoreRequested"
    ]  # fmt: skip
    assert load(journal).spec is not None
    assert rig.gate.snapshot()["pools"][0]["slots"] == 2


def test_waiters_are_let_go_even_if_the_journal_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> str:
        raise MemoryError

    rig = Rig(_spec(1, BogusPolicy), dump=broken)
    rig.store(b"a")
    before = rig.progress
    rig.store(b"b")
    assert (rig.fuses, rig.progress) == (1, before + 1)
    assert "MemoryError" in caplog.text


def test_an_interrupt_in_the_middle_of_a_step_is_the_callers_and_half_a_step_is_not_trusted() -> None:
    rig = Rig(_spec(2, InterruptedPolicy))
    with pytest.raises(KeyboardInterrupt):
        rig.store(b"a")
    assert rig.gate.fused
    assert rig.fuses == 1
    assert rig.store(b"a").refused == FUSED


def test_a_key_that_is_none_is_the_callers_mistake_and_no_contradiction() -> None:
    rig = Rig(_spec())
    rig.store(b"a")
    with pytest.raises(ShapeError, match=r"keys\[1\].*list"):
        rig.gate.lookup(0, [b"a", []], 0.0)  # type: ignore[list-item]
    assert not rig.gate.fused
    assert rig.gate.lookup(0, [b"a"], 0.0).match.blocks == 1


# -- closing ----------------------------------------------------------------------------------------------------------


def test_a_shut_gate_grants_nothing_and_still_takes_back() -> None:
    rig = Rig(_spec(4, PrefixPolicy, exclusive()))
    rig.gate.post(ev.TierChanged(0.0, "nvme", TierState.UP))
    a, b, c = chain(3)
    rig.store(a)
    lease = rig.load(a)
    fill = rig.gate.handle(ev.StoreRequested(0.0, 0, (a, b)))
    assert isinstance(fill, ev.StorePlan)
    rig.gate.shut("closing")
    assert rig.store(c).refused == "closing"
    assert rig.load(a) == ev.LoadPlan(0, True, ())
    assert rig.gate.handle(ev.HoldRequested(0.0, 0, (a,))) == 0
    before = rig.progress
    rig.gate.handle(ev.StoreFinished(0.0, fill.job, (OK,)))
    rig.gate.handle(ev.Released(0.0, lease.job))
    assert rig.progress == before + 2
    assert rig.gate.lookup(0, (a, b), 0.0).match.blocks == 2
    assert rig.core.counters.unknown_completions == 0


def test_loads_and_flushes_that_wait_can_be_ended() -> None:
    rig = Rig(_spec(4, PrefixPolicy, exclusive()))
    rig.gate.post(ev.TierChanged(0.0, "nvme", TierState.UP))
    rig.store(*chain(2))
    fill = rig.gate.handle(ev.StoreRequested(0.0, 0, chain(3)))
    assert isinstance(fill, ev.StorePlan)
    plan = rig.load(*chain(3))
    assert not plan.done
    assert rig.gate.ended([plan.job]) == []
    flush = rig.gate.handle(ev.FlushRequested(0.0))
    rig.gate.end_loads(0.0)
    rig.gate.end_flushes(0.0)
    assert [getattr(item, "job", 0) for item in rig.told] == [plan.job, flush]
    [(job, slots)] = rig.gate.ended([plan.job])
    assert (job, len(slots)) == (plan.job, 2)
    rig.gate.handle(ev.Released(0.0, job))
    assert rig.gate.job_slots(job) == ()
    rig.gate.handle(ev.StoreFinished(0.0, fill.job, (OK,)))
    check(rig.core.world)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_long_lookup_counts_no_more_than_the_pool_can_hold() -> None:
    """Each part of the batch would fit by itself; together they do not."""
    n = 2 * KEYS_PER_HOLD_MAX
    keys = [i.to_bytes(4, "big") for i in range(n)]
    rig = Rig(_spec(n - 1000, PrefixPolicy, exclusive(room=n, batch=512)))
    rig.gate.post(ev.TierChanged(0.0, "nvme", TierState.UP))
    for start in range(0, n, KEYS_PER_HOLD_MAX):
        part = tuple(keys[start : start + KEYS_PER_HOLD_MAX])
        assert len(rig.store(*part).grants) == len(part)
        while rig.commands:
            command: Any = rig.commands.pop()
            rig.gate.post(ev.OpFinished(0.0, command.op, (OK,) * len(command.items)))
    match = rig.gate.lookup(0, keys, 0.0).match
    assert (match.blocks, match.loadable_blocks) == (n, n - 1000)
    assert sum(match.by_tier.values()) == n


def test_a_long_lookup_in_parts_equals_one_in_a_piece() -> None:
    n = 3 * KEYS_PER_HOLD_MAX // 2
    keys = [i.to_bytes(4, "big") for i in range(n)]
    rig = Rig(_spec(n))
    rig.store(*keys[:KEYS_PER_HOLD_MAX])
    rig.store(*keys[KEYS_PER_HOLD_MAX : n - 5])
    assert rig.gate.lookup(0, keys, 0.0) == rig.core.lookup(0, keys, 0.0)
    assert rig.gate.lookup(0, keys, 0.0).match.blocks == n - 5


def test_the_numbers_equal_a_recount() -> None:
    """row 35: gauges are kept as the state changes; here they are counted from scratch, slot by slot."""
    rig = Rig(_spec(6))
    a, b, c, d = chain(4)
    rig.store(a, b, c)
    rig.store(d, outcome=Outcome.failed("EIO"))
    first, second = rig.load(a, b), rig.load(a)
    pending = rig.gate.handle(ev.StoreRequested(0.0, 0, (a, b, c, d)))
    waiting = rig.load(a, b, c, d)
    assert isinstance(pending, ev.StorePlan)
    assert not waiting.done
    [numbers] = rig.gate.snapshot()["pools"]
    pool = rig.core.world.pools[0]
    assert numbers["ready_blocks"] == sum(s.name == "HELD" for s in pool.states) == 3
    assert numbers["leases"] == sum(pool.loads) == 2 + 1 + 3
    assert numbers["busy_slots"] == 4
    assert numbers["free_slots"] == sum(s.name == "FREE" for s in pool.states) == 2
    for plan in (first, second, waiting):
        rig.gate.handle(ev.Released(0.0, plan.job))
    assert rig.gate.snapshot()["pools"][0]["leases"] == sum(pool.loads) == 0


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_threads(seed: int) -> None:
    """row 25: threads that store, load, release, flush and abort as they like: no lease and no fill is left."""
    rig = Rig(_spec(8, PrefixPolicy, exclusive(room=12, batch=2)))
    rig.gate.post(ev.TierChanged(0.0, "nvme", TierState.UP))
    chains = [chain(5, f"{name}-") for name in "abc"]
    stop = threading.Event()

    def answer() -> None:
        rng = random.Random(seed)
        while not stop.is_set() or rig.commands:
            try:
                command: Any = rig.commands.pop(0)
            except IndexError:
                continue
            items: Any = getattr(command, "items", None) or getattr(command, "keys", ())
            if hasattr(command, "op") and type(command).__name__ != "Cancel":
                outcomes = tuple(rng.choice((OK, OK, OK, Outcome.MISSING)) for _ in items)
                rig.gate.post(ev.OpFinished(0.0, command.op, outcomes))

    def call(worker: int) -> None:
        rng = random.Random(f"{seed}/{worker}")
        for _ in range(150):
            keys = rng.choice(chains)[: rng.randint(1, 5)]
            match rng.randrange(4):
                case 0:
                    rig.store(*keys, outcome=rng.choice((OK, Outcome.CANCELLED)))
                case 1:
                    plan = rig.load(*keys)
                    rig.gate.ended([plan.job])
                    rig.gate.handle(ev.Released(0.0, plan.job))
                case 2:
                    rig.gate.lookup(0, keys, 0.0)
                    rig.gate.snapshot()
                case 3:
                    rig.gate.handle(ev.FlushRequested(0.0))

    answering = threading.Thread(target=answer)
    answering.start()
    with ThreadPoolExecutor(4) as callers:
        for future in [callers.submit(call, worker) for worker in range(4)]:
            future.result()
    stop.set()
    answering.join()
    assert not rig.gate.fused
    check(rig.core.world)
    assert rig.gate.busy_slots() == 0
    assert not rig.core.world.loads
    assert not rig.core.world.ops
