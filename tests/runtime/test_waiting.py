"""Waiting across threads: nothing is missed, nothing is left behind, cancellation is neither swallowed nor invented."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from tiering.errors import TieringError
from tiering.runtime.clock import SystemClock
from tiering.runtime.waiting import Mailbox, Pulse, Tally, outcome_of, outlast, wait_until
from tiering.testing import VirtualClock


async def _turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def _cancelled(work: Coroutine[Any, Any, Any], turns: int = 5) -> bool:
    """Start, let the loop turn, cancel; True if the cancellation came out."""
    task = asyncio.ensure_future(work)
    await _turns(turns)
    task.cancel()
    await asyncio.wait({task})
    return task.cancelled()


# -- the mailbox ------------------------------------------------------------------------------------------------------


async def test_a_value_that_comes_before_its_job_is_expected_is_kept_for_it() -> None:
    box = Mailbox()
    with box.asking():
        box.deliver(7, "early")
        assert await box.expect(7) == "early"
    assert len(box) == 0


async def test_a_value_of_another_thread_arrives() -> None:
    box = Mailbox()
    with box.asking():
        future = box.expect(7)
    thread = threading.Thread(target=box.deliver, args=(7, "late"))
    thread.start()
    assert await future == "late"
    thread.join()
    assert len(box) == 0


async def test_values_that_nobody_waits_for_leave_nothing_behind() -> None:
    """A job that was given up, and one that ended while another was being asked for."""
    box = Mailbox()
    box.expect(1)
    box.forget(1)
    box.deliver(1, "given up")
    assert len(box) == 0
    with box.asking():
        box.deliver(2, "somebody else's")
        with box.asking():
            box.deliver(3, "nested")
        assert await box.expect(3) == "nested"
    assert len(box) == 0


async def test_a_closed_mailbox_lets_everybody_go_now_and_later() -> None:
    box = Mailbox()
    waiting = box.expect(1)
    box.close(None)
    assert await waiting is None
    assert await box.expect(2) is None


def test_a_waiter_whose_loop_is_gone_is_no_error() -> None:
    box, pulse = Mailbox(), Pulse()

    async def abandon() -> None:
        box.expect(1)
        # What asyncio.run cancels at the end is not this: nobody awaits the future any more.

    asyncio.run(abandon())
    box.deliver(1, "too late")
    pulse.beat()
    assert len(box) == 0


# -- the pulse --------------------------------------------------------------------------------------------------------


async def test_no_beat_of_any_thread_is_missed() -> None:
    """Lost wake-ups: the waiter reads, looks, waits; four threads beat as fast as they can, then stop for ever."""
    pulse, clock, beats = Pulse(), SystemClock(), 2000
    done = 0
    lock = threading.Lock()

    def beat() -> None:
        nonlocal done
        for _ in range(beats):
            with lock:
                done += 1
            pulse.beat()

    threads = [threading.Thread(target=beat) for _ in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(30):
        while True:
            seen = pulse.beats
            if done == 4 * beats:
                break
            await pulse.beyond(seen, clock)
    for thread in threads:
        thread.join()
    assert pulse.beats == 4 * beats
    assert len(pulse) == 0


async def test_waiters_that_gave_up_leave_nothing_behind() -> None:
    pulse, clock = Pulse(), VirtualClock()
    waiting = [asyncio.create_task(pulse.beyond(0, clock, 1.0)) for _ in range(10)]
    await clock.until_sleeping(10)
    assert len(pulse) == 10
    await clock.advance(2.0)
    assert await asyncio.gather(*waiting) == [False] * 10
    assert await _cancelled(pulse.beyond(0, clock, 100.0))
    assert len(pulse) == 0


async def test_past_the_deadline_beats_do_not_prolong_a_wait() -> None:
    """A loop that waits for something beside a busy driver must end at its deadline."""
    pulse, clock = Pulse(), VirtualClock(start_s=10.0)
    pulse.beat()
    assert await pulse.beyond(0, clock, 10.5)
    assert not await pulse.beyond(0, clock, 10.0)


# -- the tally --------------------------------------------------------------------------------------------------------


async def test_a_tally_is_waited_for_and_counts_down_whatever_happens() -> None:
    tally, clock = Tally(), VirtualClock()
    assert await tally.zero(clock, 0.0)
    with pytest.raises(KeyError), tally.one():
        raise KeyError
    with tally.one():
        waiting = asyncio.create_task(tally.zero(clock, 5.0))
        with tally.one():
            assert tally.count == 2
        await _turns()
        assert not waiting.done()
    assert await waiting
    with tally.one():
        waiting = asyncio.create_task(tally.zero(clock, 5.0))
        await clock.until_sleeping()
        await clock.advance(6.0)
        assert not await waiting


# -- waiting for futures ----------------------------------------------------------------------------------------------


async def test_a_wait_ends_at_its_deadline_and_leaves_the_future_alone() -> None:
    clock = VirtualClock()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_until(clock, future, 3.0))
    await clock.until_sleeping()
    await clock.advance(2.9)
    assert not waiting.done()
    await clock.advance(0.1)
    assert not await waiting
    assert not future.cancelled()
    future.set_result(None)
    assert await wait_until(clock, future, 0.0)
    assert clock.sleeping == 0


@pytest.mark.parametrize("turns", range(6))
async def test_a_wait_swallows_no_cancellation(turns: int) -> None:
    """Cancelled at each of its awaits, also in the step in which the future is done."""
    clock = VirtualClock()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_until(clock, future, 3.0))
    await _turns(2)
    future.set_result(None)
    await _turns(turns)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert clock.sleeping == 0


async def test_the_outcome_of_another_threads_future() -> None:
    good: concurrent.futures.Future[int] = concurrent.futures.Future()
    thread = threading.Thread(target=good.set_result, args=(3,))
    thread.start()
    assert await outcome_of(good) == 3
    thread.join()
    bad: concurrent.futures.Future[int] = concurrent.futures.Future()
    bad.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        await outcome_of(bad)
    dropped: concurrent.futures.Future[int] = concurrent.futures.Future()
    dropped.cancel()
    # Not asyncio's CancelledError: nobody cancelled this task.
    with pytest.raises(concurrent.futures.CancelledError):
        await outcome_of(dropped)


async def test_waiting_for_an_outcome_ends_by_its_limit_or_by_cancellation() -> None:
    never: concurrent.futures.Future[int] = concurrent.futures.Future()
    with pytest.raises(TieringError, match="I/O thread"):
        await outcome_of(never, 0.01)
    assert await _cancelled(outcome_of(never))
    assert not never.cancelled()
    never.set_result(0)


async def test_outlasting_a_task_takes_any_number_of_cancellations() -> None:
    end = asyncio.Event()
    task = asyncio.create_task(end.wait())
    waiting = asyncio.create_task(outlast(task))
    for _ in range(3):
        await _turns()
        waiting.cancel()
    await _turns()
    assert not waiting.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert task.done()
