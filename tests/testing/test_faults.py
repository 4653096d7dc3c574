from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from backends.memory import MemoryBackend, MemoryConfig
from tiering.api import BackendError, ClosedError, Namespace, Outcome, OutcomeCode
from tiering.testing import FaultPlan, FaultyBackend, InjectedError, VirtualClock
from tiering.types import KVLayout

SIZE = 4096
NAMESPACE = Namespace.of(KVLayout.uniform(model="faults", tokens_per_block=16, block_bytes=SIZE), epoch="0")
KEYS = [b"a", b"b", b"c", b"d"]

OK, MISSING = OutcomeCode.OK, OutcomeCode.MISSING


def payload(key: bytes) -> bytes:
    return key * SIZE


class Rig:
    """A faulty backend over memory, with the blocks of ``KEYS`` stored before any fault."""

    def __init__(self) -> None:
        self.plan = FaultPlan(seed=3)
        self.clock = VirtualClock()
        self.inner = MemoryBackend(MemoryConfig(capacity_bytes="1MiB"))
        self.faulty = FaultyBackend(self.inner, self.plan, self.clock)

    async def store(self, keys: Sequence[bytes]) -> list[OutcomeCode]:
        outcomes = await self.faulty.store([(key, memoryview(bytearray(payload(key)))) for key in keys])
        return [outcome.code for outcome in outcomes]

    async def load(self, keys: Sequence[bytes]) -> list[tuple[OutcomeCode, bytes]]:
        dests = [bytearray(SIZE) for _ in keys]
        outcomes = await self.faulty.load([(key, memoryview(dest)) for key, dest in zip(keys, dests, strict=True)])
        return [(outcome.code, bytes(dest)) for outcome, dest in zip(outcomes, dests, strict=True)]

    def start_load(self, key: bytes) -> tuple[bytearray, asyncio.Task[list[Outcome]]]:
        dest = bytearray(SIZE)
        return dest, asyncio.create_task(self.faulty.load([(key, memoryview(dest))]))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.faulty.open(NAMESPACE)
    assert await rig.store(KEYS) == [OK] * 4
    yield rig
    rig.plan.heal()
    await rig.faulty.aclose(1)


async def test_calls_keys_and_bytes_are_counted_as_they_arrive(rig: Rig) -> None:
    await rig.load(KEYS)
    await rig.load([])
    rig.plan.fail_calls("load", lambda: BackendError("down", retryable=True), times=1)
    with pytest.raises(BackendError, match="down"):
        await rig.load(KEYS[:2])
    assert (rig.faulty.calls["load"], rig.faulty.keys["load"], rig.faulty.bytes["load"]) == (3, 6, 6 * SIZE)
    assert (rig.faulty.calls["store"], rig.faulty.keys["store"]) == (1, 4)
    assert await rig.load(KEYS) == [(OK, payload(key)) for key in KEYS]


async def test_latency_is_time_of_the_injected_clock(rig: Rig) -> None:
    rig.plan.latency("load", 0.2, times=1)
    _, late = rig.start_load(b"a")
    await rig.clock.until_sleeping()
    await rig.clock.advance(0.1)
    assert not late.done()
    await rig.clock.advance(0.1)
    assert [o.code for o in await late] == [OK]
    assert await rig.load([b"a"]) == [(OK, payload(b"a"))]


async def test_a_hung_call_goes_on_when_released(rig: Rig) -> None:
    rig.plan.hang("load")
    dest, hung = rig.start_load(b"a")
    await asyncio.wrap_future(rig.plan.when_hung("load"))
    assert rig.plan.hung("load") == 1
    assert await rig.store([b"e"]) == [OK], "other ops are not affected"
    assert dest == bytes(SIZE)
    rig.plan.release("load")
    assert [o.code for o in await hung] == [OK]
    assert dest == payload(b"a")
    assert rig.plan.hung("load") == 0


async def test_a_hung_call_can_be_cancelled(rig: Rig) -> None:
    rig.plan.hang("load")
    dest, hung = rig.start_load(b"a")
    await asyncio.wrap_future(rig.plan.when_hung("load"))
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung
    rig.plan.release("load")
    await asyncio.sleep(0)
    assert dest == bytes(SIZE)
    assert rig.plan.hung("load") == 0


async def test_a_hung_device_keeps_the_buffer_until_released(rig: Rig) -> None:
    """Rule 7 at its worst: cancelled, the call stays; released, the late bytes land; only then it ends."""
    rig.plan.hang("load", cancellable=False)
    dest, hung = rig.start_load(b"a")
    await asyncio.wrap_future(rig.plan.when_hung("load"))
    for _ in range(3):
        hung.cancel()
        await rig.clock.settle()
        assert not hung.done()
    assert dest == bytes(SIZE)
    rig.plan.release()
    with pytest.raises(asyncio.CancelledError):
        await hung
    assert dest == payload(b"a")


def test_another_thread_releases() -> None:
    """A test's thread drives faults while the manager's loop runs elsewhere."""
    rig = Rig()
    answers: list[list[tuple[OutcomeCode, bytes]]] = []

    async def run() -> None:
        await rig.faulty.open(NAMESPACE)
        await rig.store(KEYS)
        answers.append(await rig.load([b"a"]))
        await rig.faulty.aclose(1)

    rig.plan.hang("load")
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    rig.plan.when_hung("load").result(10)
    assert answers == []
    rig.plan.release("load")
    thread.join(10)
    assert answers == [[(OK, payload(b"a"))]]


async def test_outcomes_strike_single_blocks(rig: Rig) -> None:
    """rows 18 and 23: the rest of the batch is still served."""
    rig.plan.outcomes("load", Outcome.failed("EIO", retryable=True), keys=[b"b"])
    rig.plan.outcomes("load", Outcome.corrupt("checksum"), keys=[b"d"], times=1)
    blank = bytes(SIZE)
    first = [(OK, payload(b"a")), (OutcomeCode.FAILED, blank), (OK, payload(b"c")), (OutcomeCode.CORRUPT, blank)]
    assert await rig.load(KEYS) == first
    assert await rig.load(KEYS) == [*first[:3], (OK, payload(b"d"))]
    rig.plan.heal()
    assert await rig.load(KEYS) == [(OK, payload(key)) for key in KEYS]


async def test_enospc_strikes_the_next_stores(rig: Rig) -> None:
    """row 18"""
    rig.plan.enospc(2)
    assert await rig.store([b"e", b"f", b"g"]) == [OutcomeCode.REFUSED, OutcomeCode.REFUSED, OK]
    assert [o.code for o in await rig.faulty.contains([b"e", b"f", b"g"])] == [MISSING, MISSING, OK]


async def test_contains_lies(rig: Rig) -> None:
    """row 21: lookup says yes, the block is gone."""
    rig.plan.lie_about([b"x"])
    assert [o.code for o in await rig.faulty.contains([b"x", b"y", b"a"])] == [OK, MISSING, OK]
    assert await rig.load([b"x"]) == [(MISSING, bytes(SIZE))]


async def test_a_neighbours_bytes_come_back(rig: Rig) -> None:
    rig.plan.swap_bytes(b"a", b"b")
    assert await rig.load([b"a", b"b"]) == [(OK, payload(b"b")), (OK, payload(b"b"))]


async def test_silent_thread_death(rig: Rig) -> None:
    """row 34: the exception is none that a contract names; the next call lives."""
    rig.plan.die("store")
    with pytest.raises(InjectedError):
        await rig.store([b"e"])
    assert await rig.store([b"e"]) == [OK]


def draw(seed: int) -> list[list[OutcomeCode]]:
    async def run() -> list[list[OutcomeCode]]:
        rig = Rig()
        await rig.faulty.open(NAMESPACE)
        rig.plan = rig.faulty.plan = FaultPlan(seed)
        rig.plan.outcomes("store", Outcome.failed("EIO"), rate=0.5)
        rig.plan.outcomes("contains", Outcome.MISSING, rate=0.2)
        answers = [await rig.store(KEYS) for _ in range(8)]
        answers += [[o.code for o in await rig.faulty.contains(KEYS)] for _ in range(4)]
        await rig.faulty.aclose(1)
        return answers

    return asyncio.run(run())


def test_a_seed_reproduces_its_faults() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    failed = sum(batch.count(OutcomeCode.FAILED) for batch in draw(7))
    assert 0 < failed < 32


async def test_aclose_waits_for_a_hung_call_until_its_deadline(rig: Rig) -> None:
    """Past the deadline the tier is abandoned; the late bytes still land, and a later close succeeds."""
    rig.plan.hang("load", cancellable=False)
    dest, hung = rig.start_load(b"a")
    await asyncio.wrap_future(rig.plan.when_hung("load"))
    closing = asyncio.create_task(rig.faulty.aclose(5))
    await rig.clock.until_sleeping()
    with pytest.raises(ClosedError):
        await rig.load([b"b"])
    await rig.clock.advance(4.9)
    assert not closing.done()
    await rig.clock.advance(0.1)
    with pytest.raises(BackendError, match="1 calls still run"):
        await closing
    rig.plan.release()
    assert [o.code for o in await hung] == [OK]
    assert dest == payload(b"a")
    await rig.faulty.aclose(5)
    with pytest.raises(ClosedError):
        await rig.inner.contains([b"a"])


async def test_aclose_itself_can_fail_and_hang(rig: Rig) -> None:
    rig.plan.fail_calls("aclose", lambda: BackendError("flush failed"), times=1)
    with pytest.raises(BackendError, match="flush failed"):
        await rig.faulty.aclose(1)
    rig.plan.hang("aclose")
    closing = asyncio.create_task(rig.faulty.aclose(1))
    await asyncio.wrap_future(rig.plan.when_hung("aclose"))
    rig.plan.release()
    await closing


async def test_open_can_fail_and_succeed_later() -> None:
    rig = Rig()
    rig.plan.fail_calls("open", lambda: BackendError("refused", retryable=True), times=1)
    with pytest.raises(BackendError, match="refused"):
        await rig.faulty.open(NAMESPACE)
    await rig.faulty.open(NAMESPACE)
    assert await rig.store([b"a"]) == [OK]
    await rig.faulty.aclose(1)
