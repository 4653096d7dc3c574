"""Seeded runs of everything at once: commands, cancels, hangs, errors, resets. Then faults off, and all must drain."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from backends.memory import MemoryBackend, MemoryConfig
from tests.runtime.driver_rig import NAMESPACE, SLOTS, SPEC, Rig, key, payload
from tiering.api import Backend, BackendError, Outcome
from tiering.core.commands import Cancel, Delete, Demote, Probe, Promote, Transfer
from tiering.core.events import Event, OpFinished, OpOverdue, TierChanged
from tiering.testing import FaultyBackend
from tiering.testing.faults import Op
from tiering.types import TierState

KEYS = 24
STEPS = 120
OPS: tuple[Op, ...] = ("contains", "load", "store", "delete")


class LendingBackend(FaultyBackend):
    """Notes which buffers a call holds, by the identity of their slot."""

    def __init__(self, rig: Rig, lent: dict[int, int]) -> None:
        super().__init__(MemoryBackend(MemoryConfig(type="memory", capacity_bytes=4096)), rig.plan, rig.clock)
        self.lent = lent

    async def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        return await self._hold(super().load, items)

    async def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        return await self._hold(super().store, items)

    async def _hold(self, call: Callable[..., Any], items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        slots = [id(view.obj) for _, view in items]
        for slot in slots:
            self.lent[slot] = self.lent.get(slot, 0) + 1
        try:
            answer: list[Outcome] = await call(items)
            return answer
        finally:
            for slot in slots:
                self.lent[slot] -= 1


class World:
    """Draws commands as a core would: a slot belongs to one operation until that has finished."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lent: dict[int, int] = {}
        self.rig = Rig(spec=dataclasses.replace(SPEC, ops_max=3), make=self.make)
        self.rig.sink.on_event = self.check
        self.free = list(range(SLOTS))
        self.open: dict[int, tuple[int, list[Transfer]]] = {}
        """Operations that have not finished: how many outcomes are due, and the slots they hold."""
        self.reads: set[int] = set()
        self.overdue: set[int] = set()
        self.next_op = 1
        self.loaded = 0

    def make(self) -> Backend:
        return LendingBackend(self.rig, self.lent)

    def check(self, event: Event) -> None:
        if isinstance(event, OpOverdue):
            assert event.op in self.open
            assert event.op in self.reads
            assert event.op not in self.overdue
            self.overdue.add(event.op)
        if isinstance(event, OpFinished):
            due, transfers = self.open.pop(event.op)
            assert len(event.outcomes) == due
            for transfer, outcome in zip(transfers, event.outcomes, strict=False):
                # Rule 7: whatever was reported, nobody touches these bytes any more.
                assert not self.lent.get(id(self.rig.slots.slots[transfer.slot]), 0)
                if event.op in self.reads and outcome.ok:
                    assert self.rig.slots.data(transfer.slot) == payload(int(transfer.key[4:]))
                    self.loaded += 1
                self.free.append(transfer.slot)

    def submit(self) -> None:
        op, self.next_op = self.next_op, self.next_op + 1
        numbers = self.random.sample(range(KEYS), self.random.randint(1, 4))
        kind = self.random.choice(("probe", "load", "load", "store", "store", "delete"))
        transfers: list[Transfer] = []
        keys = tuple(key(n) for n in numbers)
        if kind in ("load", "store"):
            if len(self.free) < len(numbers):
                return
            transfers = [Transfer(key(n), 0, self.free.pop(self.random.randrange(len(self.free)))) for n in numbers]
        self.open[op] = (len(numbers), transfers)
        if kind in ("load", "probe"):
            self.reads.add(op)
        if kind == "load":
            self.rig.driver.submit([Promote(op, "mem", tuple(transfers))])
        elif kind == "store":
            for number, transfer in zip(numbers, transfers, strict=True):
                self.rig.slots.fill(transfer.slot, payload(number))
            self.rig.driver.submit([Demote(op, "mem", tuple(transfers), {})])
        else:
            self.rig.driver.submit([Probe(op, "mem", keys) if kind == "probe" else Delete(op, "mem", keys)])

    def misbehave(self) -> None:
        plan, op = self.rig.plan, self.random.choice(OPS)
        fault = self.random.randrange(7)
        if fault == 0:
            plan.hang(op, cancellable=self.random.random() < 0.5)
        elif fault == 1:
            plan.release()
        elif fault == 2:
            plan.fail_calls(op, lambda: BackendError("gone", retryable=True), times=self.random.randint(1, 8))
        elif fault == 3:
            plan.die(op)
        elif fault == 4:
            plan.outcomes(op, Outcome.failed("blip", retryable=True), times=5, rate=0.5)
        elif fault == 5:
            plan.latency(op, self.random.choice((0.05, 0.4, 1.5)), times=5)
        else:
            plan.heal()

    async def step(self) -> None:
        draw = self.random.random()
        if draw < 0.55:
            self.submit()
        elif draw < 0.65 and self.open:
            self.rig.driver.submit([Cancel(self.random.choice(sorted(self.open)), "mem")])
        elif draw < 0.8:
            self.misbehave()
        else:
            await self.rig.clock.advance(self.random.choice((0.0, 0.01, 0.1, 0.5, 1.5)))


@pytest.mark.parametrize("seed", range(30))
async def test_every_command_ends_once_and_the_tier_comes_back(seed: int) -> None:
    """Rows 7 to 12, 18, 27, 34 at the same time."""
    world = World(seed)
    rig = world.rig
    assert await rig.driver.open(NAMESPACE) == {"mem": None}
    for _ in range(STEPS):
        await world.step()
    rig.plan.heal()
    # Longer than any deadline, retry and cooldown.
    await rig.clock.advance(10.0)
    assert world.open == {}
    assert rig.driver.health()["mem"]["read"]["breaker"] == "closed"
    # Writes close their breaker by a store, which the core offers once the tier is UP.
    assert rig.state == "up"
    states = rig.sink.states()
    assert all(before is not after for before, after in itertools.pairwise(states))
    world.open[0] = (1, [])
    rig.driver.submit([Demote(0, "mem", (Transfer(key(0), 0, 0),), {})])
    await rig.settle()
    assert rig.driver.health()["mem"]["write"]["breaker"] == "closed"
    counts = rig.driver.counters()["mem"]
    assert counts["submitted_ops"] == counts["finished_ops"]
    assert await rig.close() == []
    assert not any(world.lent.values())


@pytest.mark.parametrize("seed", range(10))
async def test_close_in_the_middle_of_it_is_bounded_and_reports_once(seed: int) -> None:
    """Row 8: an operation is answered, or its tier is abandoned and it holds its slots for good."""
    world = World(1000 + seed)
    rig = world.rig
    await rig.driver.open(NAMESPACE)
    for _ in range(STEPS // 2):
        await world.step()
    began_s = rig.clock.now()
    abandoned = await rig.close(4.0)
    assert rig.clock.now() - began_s <= 4.0
    hung = set(world.open)
    assert bool(hung) <= bool(abandoned)
    rig.plan.heal()
    await rig.clock.advance(10.0)
    assert set(world.open) == hung
    last = [event for event in rig.sink.events if isinstance(event, TierChanged)][-1]
    assert last.state is (TierState.ABANDONED if abandoned else TierState.CLOSED)
