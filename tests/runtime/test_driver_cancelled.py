"""Open, reopen and close cancelled at each await; submits, snapshots and a dying loop seen from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.runtime.driver_rig import BLOCK_BYTES, NAMESPACE, SPEC, Rig, ScriptedBackend, key
from tiering.api import BackendCapabilities, BackendError, Namespace, Outcome, ScanEntry
from tiering.core.commands import Probe
from tiering.core.events import OpFinished
from tiering.runtime.driver import LaneSpec
from tiering.runtime.threads import IoThread
from tiering.types import KVLayout, TierState

OK = Outcome.OK
NEXT = Namespace.of(KVLayout.uniform(model="m", tokens_per_block=4, block_bytes=BLOCK_BYTES), epoch="1")
OPENING, UP, DOWN = TierState.OPENING, TierState.UP, TierState.DOWN
CLOSING, CLOSED, ABANDONED = TierState.CLOSING, TierState.CLOSED, TierState.ABANDONED


def others() -> list[str]:
    """Names of the tasks beside the test's own."""
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())


class ScanningBackend(ScriptedBackend):
    """Exclusive, with ``count`` blocks on its medium; the scan raises after ``fail_after`` batches."""

    def __init__(self, count: int, fail_after: int | None = None) -> None:
        super().__init__({})
        self.capabilities = BackendCapabilities(persistent=True, shared=False, exclusive=True, can_scan=True)
        self.count = count
        self.fail_after = fail_after

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        for batch, start in enumerate(range(0, self.count, 1000)):
            if batch == self.fail_after:
                raise BackendError("bad index page")
            yield [ScanEntry(key(n), 300) for n in range(start, min(start + 1000, self.count))]
            await asyncio.sleep(0)


# Cancelled at each await.


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(14))
async def test_open_may_be_cancelled_at_each_await(turns: int) -> None:
    rig = Rig()
    rig.driver.add_tier(LaneSpec("far"), lambda: ScanningBackend(5000))
    opening = asyncio.ensure_future(rig.driver.open(NAMESPACE))
    await _turns(turns)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert await rig.close() == []
    assert all(backend.calls["aclose"] == 1 for backend in rig.made)
    assert others() == []
    assert {rig.driver.health()[name]["state"] for name in ("mem", "far")} <= {"closed", "opening"}


@pytest.mark.parametrize("turns", range(14))
async def test_close_may_be_cancelled_at_each_await(turns: int) -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    rig.plan.latency("store", 0.5)
    running, waiting = [rig.store(0), rig.store(1)], rig.store(2)
    await rig.settle()
    closing = asyncio.ensure_future(rig.driver.aclose(2.0))
    await _turns(turns)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert await rig.close(2.0) == []
    assert [rig.sink.outcomes(op) for op in running] == [(OK,)] * 2
    assert rig.sink.outcomes(waiting) == (Outcome.CANCELLED,)
    assert rig.backend.calls["aclose"] == 1
    assert others() == []


@pytest.mark.parametrize("turns", range(20))
async def test_reopen_may_be_cancelled_at_each_await(turns: int) -> None:
    rig = Rig()
    await rig.driver.open(NAMESPACE)
    reopening = asyncio.ensure_future(rig.driver.reopen(NEXT, 2.0))
    await _turns(turns)
    reopening.cancel()
    await asyncio.gather(reopening, return_exceptions=True)
    assert await rig.close() == []
    assert all(backend.calls["aclose"] == 1 for backend in rig.made)
    assert others() == []


# Threads.


@contextmanager
def io_thread() -> Iterator[IoThread]:
    io = IoThread()
    io.start()
    try:
        yield io
    finally:
        assert io.stop(10.0) == []


def test_submit_keeps_the_order_of_each_thread_and_wakes_the_loop_for_all() -> None:
    """Row 12, the driver's inbox: any number of threads, no lost wake-up, order kept."""
    arrived: list[bytes] = []
    done = threading.Event()
    threads_count, each = 8, 200

    def contains(keys: Sequence[bytes]) -> list[Outcome]:
        arrived.extend(keys)
        return [OK] * len(keys)

    finished = 0

    def count(event: object) -> None:
        nonlocal finished
        finished += isinstance(event, OpFinished)
        if finished == threads_count * each:
            done.set()

    rig = Rig(spec=LaneSpec("mem", ops_max=1), make=lambda: ScriptedBackend({"contains": contains}))
    rig.sink.on_event = count

    def submit(thread: int) -> None:
        for number in range(each):
            rig.driver.submit([Probe(thread * each + number, "mem", (b"%d-%d" % (thread, number),))])

    with io_thread() as io:
        assert io.run(rig.driver.open(NAMESPACE), 10.0) == {"mem": None}
        workers = [threading.Thread(target=submit, args=(n,)) for n in range(threads_count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert done.wait(10.0)
        assert io.run(rig.driver.aclose(5.0), 10.0) == []
    for thread in range(threads_count):
        mine = [item for item in arrived if item.startswith(b"%d-" % thread)]
        assert mine == [b"%d-%d" % (thread, number) for number in range(each)]
    rig.driver.submit([Probe(1, "mem", (b"late",))])
    rig.driver.submit([Probe(2, "mem", (b"later",))])


def test_end_of_the_loop_without_a_close_leaves_nobody_waiting() -> None:
    """Row 34: when the I/O thread goes, every command that can be answered is."""
    rig = Rig()
    io = IoThread()
    io.start()
    io.run(rig.driver.open(NAMESPACE), 10.0)
    rig.plan.hang("load")
    ops = [rig.load(0), rig.load(1), rig.load(2), rig.probe(3)]
    rig.plan.when_hung("load", 2).result(10.0)
    assert io.stop(10.0) == []
    assert [rig.sink.outcomes(op) for op in ops] == [(Outcome.CANCELLED,)] * 4
    assert rig.state == "closing"


def test_health_and_counters_may_be_read_while_the_loop_works() -> None:
    """Row 35: at every moment a snapshot's numbers fit each other."""
    rig = Rig(make=lambda: ScriptedBackend({}))
    stop = threading.Event()
    problems: list[str] = []

    def watch() -> None:
        while not stop.is_set():
            counts = rig.driver.counters()["mem"]
            health = rig.driver.health()["mem"]
            if counts["finished_ops"]["probe"] > counts["submitted_ops"]["probe"]:
                problems.append("more finished than submitted")
            if counts["latency"]["probe"]["calls"] > counts["calls"]["probe"]:
                problems.append("more returned than called")
            if health["read"]["running_ops"] > SPEC.ops_max:
                problems.append("more running than allowed")

    with io_thread() as io:
        io.run(rig.driver.open(NAMESPACE), 10.0)
        watchers = [threading.Thread(target=watch) for _ in range(2)]
        for watcher in watchers:
            watcher.start()
        last = threading.Event()
        rig.sink.on_event = lambda event: last.set() if isinstance(event, OpFinished) and event.op == 1999 else None
        rig.driver.submit([Probe(n, "mem", (key(n),)) for n in range(2000)])
        assert last.wait(10.0)
        stop.set()
        for watcher in watchers:
            watcher.join()
        assert io.run(rig.driver.aclose(5.0), 10.0) == []
    assert problems == []
