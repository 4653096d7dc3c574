"""Time that stands still until a test advances it, for code on any loop in any thread."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

SETTLE_TURNS: Final = 32
"""Loop turns that one settling takes. A chain of wake-ups (future, task, its waiter) uses one turn a link."""

PATIENCE_S: Final = 10.0
"""Real seconds after which a wait on another thread is given up as a failure of the test."""


@dataclass(order=True)
class _Sleeper:
    deadline_ns: int
    seq: int
    loop: asyncio.AbstractEventLoop = field(compare=False)
    woken: asyncio.Future[None] = field(compare=False)

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class VirtualClock:
    """A ``tiering.runtime.clock.Clock`` whose time moves by ``advance`` alone, never by itself.

    ``now`` may be called from any thread, ``sleep`` from any loop, ``advance`` and the others from any loop too: also
    one in another thread than the sleepers', such as ``asyncio.run(clock.advance(5))`` in a test without a loop. One
    ``advance`` at a time.

    A test stays free of races in two steps: ``await clock.until_sleeping()`` before it advances, since a sleep that
    is registered only after an advance counts from the new time, and a wait for what it observes (a reply, a future)
    after it. Settling follows chains of wake-ups on the loops; it does not wait for work in other threads.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        # Whole nanoseconds: in floats, advances of 0.7 and 0.1 seconds would not reach a deadline at 0.8.
        self._now_ns = _ns(start_s)
        self._seq = itertools.count()
        self._sleepers: list[_Sleeper] = []
        """A heap. Guarded by the lock, as are the time, the watchers and the loops."""
        self._watchers: list[tuple[int, Future[None]]] = []
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    def now(self) -> float:
        """Virtual seconds."""
        with self._lock:
            return self._now_ns / 1e9

    @property
    def sleeping(self) -> int:
        """How many calls of ``sleep`` wait for time to pass."""
        with self._lock:
            return len(self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once ``advance`` has moved the time by ``seconds`` in sum. Cancellable at any moment."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            sleeper = _Sleeper(self._now_ns + _ns(seconds), next(self._seq), loop, woken)
            heapq.heappush(self._sleepers, sleeper)
            self._loops.add(loop)
            watchers, self._watchers = _split(self._watchers, len(self._sleepers))
        for watcher in watchers:
            watcher.set_result(None)
        try:
            await woken
        finally:
            with self._lock:
                # A cancelled sleeper is still in the heap; one that was woken is not.
                if sleeper in self._sleepers:
                    self._sleepers.remove(sleeper)
                    heapq.heapify(self._sleepers)

    async def until_sleeping(self, count: int = 1) -> None:
        """Return once at least ``count`` calls of ``sleep`` wait at the same time.

        Raises ``TimeoutError`` after ``PATIENCE_S`` real seconds.
        """
        reached: Future[None] = Future()
        with self._lock:
            if len(self._sleepers) >= count:
                return
            self._watchers.append((count, reached))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wrap_future(reached)
        except TimeoutError:
            raise TimeoutError(f"only {self.sleeping} of {count} sleepers after {PATIENCE_S} s") from None

    async def advance(self, seconds: float) -> None:
        """Move the time by ``seconds``; the sleepers due until then wake in the order of their deadlines.

        The time stops at each deadline and every loop settles there, so one that sleeps again within the span (a
        periodic task) wakes again, at the right moment.
        """
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        with self._lock:
            target_ns = self._now_ns + _ns(seconds)
        await self.settle()
        while due := self._take_due(target_ns):
            for sleeper in due:
                try:
                    sleeper.loop.call_soon_threadsafe(sleeper.wake)
                except RuntimeError:
                    # Its loop was closed, and with it the task that slept.
                    continue
            await self.settle()
        with self._lock:
            self._now_ns = target_ns
        await self.settle()

    async def settle(self) -> None:
        """Let this loop and all loops that ever slept here run for ``SETTLE_TURNS`` turns.

        Raises ``TimeoutError`` if one of them does not turn for ``PATIENCE_S`` real seconds (a blocking call on it).
        """
        here = asyncio.get_running_loop()
        with self._lock:
            others = [loop for loop in self._loops if loop is not here]
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
            for loop in others:
                await _turn(loop)

    def _take_due(self, target_ns: int) -> list[_Sleeper]:
        """Move the time to the next deadline up to ``target_ns`` and take its sleepers, in the order of their calls."""
        with self._lock:
            if not self._sleepers or self._sleepers[0].deadline_ns > target_ns:
                return []
            deadline_ns = self._now_ns = self._sleepers[0].deadline_ns
            due = []
            while self._sleepers and self._sleepers[0].deadline_ns <= deadline_ns:
                due.append(heapq.heappop(self._sleepers))
            return due


async def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Return once ``loop``, of another thread, has come round."""
    if not loop.is_running():
        return
    turned: Future[None] = Future()
    try:
        loop.call_soon_threadsafe(_mark, turned)
    except RuntimeError:
        # Closed since the line above: nothing is left to run on it.
        return
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wrap_future(turned)
    except TimeoutError:
        # It may also have stopped before it came round.
        if loop.is_running():
            raise TimeoutError(f"{loop!r} did not turn for {PATIENCE_S} s; something blocks it") from None


def _mark(turned: Future[None]) -> None:
    # wrap_future cancels the future when its waiter has given up.
    if turned.set_running_or_notify_cancel():
        turned.set_result(None)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _split(
    watchers: list[tuple[int, Future[None]]], sleeping: int
) -> tuple[list[Future[None]], list[tuple[int, Future[None]]]]:
    reached = [future for count, future in watchers if count <= sleeping and future.set_running_or_notify_cancel()]
    return reached, [(count, future) for count, future in watchers if count > sleeping]
