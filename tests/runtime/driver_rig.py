"""A driver over real memory tiers that go wrong on demand, a recording sink, and time that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import Backend, BackendCapabilities, Namespace, Outcome
from tiering.core.commands import Delete, Demote, Probe, Promote, Transfer
from tiering.core.events import Event, OpFinished, OpOverdue, TierChanged, TierScanned
from tiering.runtime.driver import Driver, LaneSpec, Notice
from tiering.testing import FaultPlan, FaultyBackend, VirtualClock
from tiering.testing.faults import Op
from tiering.types import KVLayout, TierState

BLOCK_BYTES = 256
SLOTS = 64
NAMESPACE = Namespace.of(KVLayout.uniform(model="m", tokens_per_block=4, block_bytes=BLOCK_BYTES), epoch="0")
SPEC = LaneSpec("mem", deadline_s=1.0, ops_max=2, retry_max=2, backoff_s=0.1, backoff_max_s=0.15)
PATIENCE_S = 10.0


def key(number: int) -> bytes:
    return b"key-%04d" % number


def payload(number: int) -> bytes:
    return bytes((number * 7 + i) % 251 for i in range(BLOCK_BYTES))


class Slots:
    """The primary arena's part: one bytearray a slot."""

    def __init__(self, slot_bytes: int = 512) -> None:
        self.slots = [bytearray(slot_bytes) for _ in range(SLOTS)]
        self.lengths: list[int] = []

    def view(self, pool: int, slot: int, length: int) -> memoryview:
        if pool != 0 or not 0 <= slot < SLOTS:
            raise IndexError(f"no slot {slot} in pool {pool}")
        self.lengths.append(length)
        return memoryview(self.slots[slot])[:length]

    def fill(self, slot: int, data: bytes) -> None:
        self.slots[slot][: len(data)] = data

    def data(self, slot: int) -> bytes:
        return bytes(self.slots[slot][:BLOCK_BYTES])


class RecordingSink:
    """Keeps every event. ``on_event`` hears each as it comes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda _: None

    def post(self, *events: Event) -> None:
        for event in events:
            self.events.append(event)
            self.on_event(event)

    def outcomes(self, op: int) -> tuple[Outcome, ...] | None:
        found = [event.outcomes for event in self.events if isinstance(event, OpFinished) and event.op == op]
        assert len(found) <= 1, f"op {op} finished {len(found)} times"
        return found[0] if found else None

    def finished(self) -> list[int]:
        """Operations in the order in which they finished."""
        return [event.op for event in self.events if isinstance(event, OpFinished)]

    def overdue(self) -> list[int]:
        return [event.op for event in self.events if isinstance(event, OpOverdue)]

    def states(self, tier: str = "mem") -> list[TierState]:
        return [event.state for event in self.events if isinstance(event, TierChanged) and event.tier == tier]

    def scanned(self) -> list[bytes]:
        return [entry.handle for event in self.events if isinstance(event, TierScanned) for entry in event.entries]


class Rig:
    """``plan`` rules the backends that the factory makes; ``made`` lists them, the newest last."""

    def __init__(self, *, spec: LaneSpec = SPEC, make: Callable[[], Backend] | None = None) -> None:
        self.clock = VirtualClock(start_s=100.0)
        self.plan = FaultPlan()
        self.sink = RecordingSink()
        self.slots = Slots()
        self.notices: list[Notice] = []
        self.made: list[FaultyBackend] = []
        self.capacity_bytes = 1 << 20
        self.driver = Driver(
            sink=self.sink,
            slots=self.slots,
            pool_bytes=[BLOCK_BYTES],
            clock=self.clock,
            on_notice=self.notices.append,
        )
        self.driver.add_tier(spec, make or self.make)
        self._ops = itertools.count(1)

    def make(self) -> Backend:
        inner = MemoryBackend(MemoryConfig(type="memory", capacity_bytes=self.capacity_bytes))
        backend = FaultyBackend(inner, self.plan, self.clock)
        self.made.append(backend)
        return backend

    @property
    def backend(self) -> FaultyBackend:
        return self.made[-1]

    @property
    def memory(self) -> MemoryBackend:
        inner = self.backend.inner
        assert isinstance(inner, MemoryBackend)
        return inner

    def store(self, *numbers: int, parents: dict[bytes, bytes] | None = None) -> int:
        """Submit a demotion of blocks whose slot is their number."""
        op = next(self._ops)
        for number in numbers:
            self.slots.fill(number, payload(number))
        self.driver.submit([Demote(op, "mem", _transfers(numbers), parents or {})])
        return op

    def load(self, *numbers: int, into: int = 32) -> int:
        """Submit a promotion of blocks into the slots behind ``into``."""
        op = next(self._ops)
        self.driver.submit([Promote(op, "mem", _transfers(numbers, into))])
        return op

    def probe(self, *numbers: int) -> int:
        op = next(self._ops)
        self.driver.submit([Probe(op, "mem", tuple(key(n) for n in numbers))])
        return op

    def delete(self, *numbers: int) -> int:
        op = next(self._ops)
        self.driver.submit([Delete(op, "mem", tuple(key(n) for n in numbers))])
        return op

    def health(self) -> dict[str, object]:
        return dict(self.driver.health()["mem"])

    @property
    def state(self) -> str:
        return self.driver.health()["mem"]["state"]

    def kinds(self) -> list[str]:
        return [notice.kind for notice in self.notices if notice.kind != "state"]

    async def settle(self) -> None:
        await self.clock.settle()

    async def hung(self, op: Op, calls: int = 1) -> None:
        await asyncio.wait_for(asyncio.wrap_future(self.plan.when_hung(op, calls)), PATIENCE_S)

    async def close(self, deadline_s: float = 4.0) -> list[str]:
        """Close while the clock runs on."""
        closing = asyncio.ensure_future(self.driver.aclose(deadline_s))
        await self.settle()
        spent_s = 0.0
        while not closing.done() and spent_s < deadline_s:
            await self.clock.advance(deadline_s / 8)
            spent_s += deadline_s / 8
        return await asyncio.wait_for(closing, PATIENCE_S)


def _transfers(numbers: Sequence[int], shift: int = 0) -> tuple[Transfer, ...]:
    return tuple(Transfer(key(n), 0, n + shift) for n in numbers)


@contextlib.asynccontextmanager
async def opened(*, spec: LaneSpec = SPEC, make: Callable[[], Backend] | None = None) -> AsyncIterator[Rig]:
    """A rig whose tier is UP. At the end every fault is healed, all must drain, and nothing may be left."""
    rig = Rig(spec=spec, make=make)
    assert await rig.driver.open(NAMESPACE) == {"mem": None}
    try:
        yield rig
    finally:
        rig.plan.heal()
        await rig.settle()
        abandoned = await rig.close()
        await rig.settle()
    assert abandoned == []
    _check_drained(rig)


def _check_drained(rig: Rig) -> None:
    """Row 35: what came in has gone out, and the counters agree with each other and with the events."""
    counts = rig.driver.counters()["mem"]
    health = rig.driver.health()["mem"]
    assert counts["submitted_ops"] == counts["finished_ops"]
    assert counts["submitted_blocks"] == {kind: sum(codes.values()) for kind, codes in counts["blocks"].items()}
    assert sum(counts["finished_ops"].values()) == len(rig.sink.finished())
    for latency in counts["latency"].values():
        assert latency["calls"] == sum(latency["buckets"])
    for side in (health["read"], health["write"]):
        waiting = {name: value for name, value in side.items() if name != "breaker"}
        assert not any(waiting.values()), waiting


class ScriptedBackend(Backend):
    """Does in each method what ``script`` says for it; otherwise answers OK to everything."""

    def __init__(self, script: dict[str, Callable[..., object]], *, alignment_bytes: int = 1) -> None:
        self.script = script
        self.capabilities = BackendCapabilities(
            persistent=False, shared=True, exclusive=False, alignment_bytes=alignment_bytes
        )
        self.calls: list[tuple[str, int]] = []

    def _play(self, name: str, items: Sequence[object]) -> list[Outcome]:
        self.calls.append((name, len(items)))
        play = self.script.get(name)
        return [Outcome.OK] * len(items) if play is None else play(items)  # type: ignore[return-value]

    async def open(self, namespace: Namespace) -> None:
        self._play("open", ())

    async def contains(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._play("contains", keys)

    async def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        return self._play("load", items)

    async def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        return self._play("store", items)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return self._play("delete", keys)

    async def aclose(self, deadline_s: float) -> None:
        self._play("aclose", ())

    def link(self, parents: object) -> None:
        self._play("link", [parents])

    def touch(self, keys: Sequence[bytes]) -> None:
        self._play("touch", keys)
