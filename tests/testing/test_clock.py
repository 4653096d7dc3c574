from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tiering.runtime.clock import Clock, SystemClock
from tiering.testing import VirtualClock


class LoopThread:
    """A loop in a thread of its own, as the manager's I/O loop is."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="test-io")
        self.thread.start()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def io() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


async def tick(clock: VirtualClock, seconds: float, times: int, log: list[tuple[str, float]], name: str) -> None:
    for _ in range(times):
        await clock.sleep(seconds)
        log.append((name, clock.now()))


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    clock, log = VirtualClock(), list[tuple[str, float]]()
    async with asyncio.TaskGroup() as group:
        for name, seconds in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)):
            group.create_task(tick(clock, seconds, 1, log, name))
        await clock.until_sleeping(4)
        await clock.advance(2.5)
        assert log == [("a", 1.0), ("b1", 2.0), ("b2", 2.0)]
        assert clock.now() == 2.5
        await clock.advance(0.5)
    assert log[3:] == [("c", 3.0)]


async def test_a_periodic_task_wakes_at_each_period_of_one_advance() -> None:
    clock, log = VirtualClock(100.0), list[tuple[str, float]]()
    async with asyncio.TaskGroup() as group:
        group.create_task(tick(clock, 1.0, 3, log, "second"))
        group.create_task(tick(clock, 1.5, 2, log, "longer"))
        await clock.until_sleeping(2)
        await clock.advance(10)
    assert log == [("second", 101), ("longer", 101.5), ("second", 102), ("longer", 103), ("second", 103)]


async def test_time_stands_still_by_itself_and_adds_up_exactly() -> None:
    clock = VirtualClock()
    sleeper = asyncio.create_task(clock.sleep(0.8))
    await clock.until_sleeping()
    for step in (0.7, 0.05):
        await clock.advance(step)
        assert not sleeper.done()
    # In floats, 0.7 + 0.05 + 0.05 is less than 0.8.
    await clock.advance(0.05)
    assert sleeper.done()
    assert clock.now() == 0.8
    with pytest.raises(ValueError, match="backwards"):
        await clock.advance(-1)


async def test_a_cancelled_sleeper_leaves_nothing_behind() -> None:
    clock = VirtualClock()
    sleeper = asyncio.create_task(clock.sleep(5))
    await clock.until_sleeping()
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert clock.sleeping == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await clock.sleep(5)
    assert clock.sleeping == 0


async def test_a_sleep_of_nothing_is_one_turn() -> None:
    clock = VirtualClock()
    async with asyncio.timeout(5):
        await clock.sleep(0)
        await clock.sleep(-1)
    assert clock.now() == 0


@pytest.mark.parametrize("lap", range(5))
def test_a_driver_in_another_thread_never_races(io: LoopThread, lap: int) -> None:
    """From a test without a loop: every period of the other thread's task is seen, at its own time."""
    clock, log = VirtualClock(), list[tuple[str, float]]()
    done = asyncio.run_coroutine_threadsafe(tick(clock, 0.25, 8, log, "io"), io.loop)
    asyncio.run(clock.until_sleeping())
    asyncio.run(clock.advance(1.0))
    assert log == [("io", 0.25), ("io", 0.5), ("io", 0.75), ("io", 1.0)]
    asyncio.run(clock.advance(1.0))
    assert done.result(10) is None
    assert log[-1] == ("io", 2.0)


async def test_chains_of_tasks_in_another_thread_settle(io: LoopThread) -> None:
    """A deadline that cancels a call, whose end wakes its waiter, which answers: all of it within one advance."""
    clock, answers = VirtualClock(), list[str]()

    async def call() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            answers.append("ended")

    async def guarded() -> None:
        running = asyncio.create_task(call())
        late = asyncio.create_task(clock.sleep(2))
        await asyncio.wait((running, late), return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        answers.append("miss")

    done = asyncio.run_coroutine_threadsafe(guarded(), io.loop)
    await clock.until_sleeping()
    await clock.advance(1.9)
    assert answers == []
    await clock.advance(0.2)
    assert answers == ["ended", "miss"]
    await asyncio.wrap_future(done)


def test_a_loop_that_ended_is_no_obstacle() -> None:
    clock = VirtualClock()

    async def sleep_briefly() -> None:
        sleeper = asyncio.create_task(clock.sleep(1))
        await clock.until_sleeping()
        await clock.advance(1)
        await sleeper

    asyncio.run(sleep_briefly())
    asyncio.run(clock.advance(1))
    assert clock.now() == 2


async def test_the_system_clock_is_a_clock_too() -> None:
    clock: Clock = SystemClock()
    before = clock.now()
    await clock.sleep(0.001)
    assert clock.now() - before >= 0.001
