"""Callbacks at times of the injected clock: one sleeping task for all deadlines, cooldowns and bounded waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final

from tiering.runtime.clock import Clock
from tiering.runtime.ports import Start

TICK_S: Final = 1e-9
"""Clocks count whole nanoseconds; an alarm less than this ahead is due."""

STALE_MAX: Final = 1024
"""Cancelled alarms that may wait in the heap before it is cleaned."""


class Alarm:
    """One pending callback."""

    __slots__ = ("_alarms", "_callback", "due_s")

    def __init__(self, alarms: Alarms, due_s: float, callback: Callable[[], None]) -> None:
        self._alarms = alarms
        self._callback: Callable[[], None] | None = callback
        self.due_s = due_s

    @property
    def live(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        """The callback will not run. Any number of times, also after it ran."""
        if self._callback is not None:
            self._callback = None
            self._alarms.count_stale()

    def ring(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Alarms:
    """Runs callbacks on the loop, in the order of their times. Loop-bound; a callback must not block.

    The task that sleeps exists only while an alarm is set. It ends with the task group that ``start`` belongs to.
    """

    def __init__(self, clock: Clock, start: Start, on_error: Callable[[str, BaseException], None]) -> None:
        """``on_error(task name, exception)`` hears of a callback that raised; the others still run."""
        self._clock = clock
        self._start = start
        self._on_error = on_error
        self._heap: list[tuple[float, int, Alarm]] = []
        self._seq = itertools.count()
        self._stale = 0
        self._finishing = False
        self._sleeper: asyncio.Task[None] | None = None
        self._armed_s = 0.0
        """The time that the sleeper sleeps to; while callbacks run, minus infinity: it will look at the heap anyway."""

    def at(self, due_s: float, callback: Callable[[], None]) -> Alarm:
        """Call ``callback`` once, at ``due_s`` or as soon after as the loop allows; never from within this call."""
        alarm = Alarm(self, due_s, callback)
        heapq.heappush(self._heap, (due_s, next(self._seq), alarm))
        if self._sleeper is None or self._sleeper.done() or due_s < self._armed_s:
            self._rearm()
        return alarm

    async def wait(self, tasks: Iterable[asyncio.Future[None]], until_s: float) -> bool:
        """Wait for ``tasks`` to end, at most until ``until_s``: True if all did. Their results are not looked at.

        Cancelled, it leaves the tasks alone.
        """
        bell = asyncio.get_running_loop().create_future()
        alarm = self.at(until_s, lambda: None if bell.done() else bell.set_result(None))
        pending = {task for task in tasks if not task.done()}
        try:
            while pending and not bell.done():
                await asyncio.wait({*pending, bell}, return_when=asyncio.FIRST_COMPLETED)
                pending = {task for task in pending if not task.done()}
            return not pending
        finally:
            alarm.cancel()
            bell.cancel()

    def finish(self) -> None:
        """From now on the sleeping task ends as soon as no alarm is set, instead of sleeping to the next old one."""
        self._finishing = True
        self._clean()

    def count_stale(self) -> None:
        self._stale += 1
        if self._finishing or (self._stale > STALE_MAX and 2 * self._stale > len(self._heap)):
            self._clean()

    def _clean(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].live]
        heapq.heapify(self._heap)
        self._stale = 0
        if self._finishing and not self._heap and self._sleeper is not None:
            self._sleeper.cancel()
            self._sleeper = None

    def _rearm(self) -> None:
        if self._sleeper is not None:
            self._sleeper.cancel()
        self._armed_s = self._heap[0][0]
        self._sleeper = self._start(self._sleep, "tiering-alarms")

    async def _sleep(self) -> None:
        while (due_s := self._next_due_s()) is not None:
            self._armed_s = due_s
            await self._clock.sleep(max(0.0, due_s - self._clock.now()))
            self._armed_s = float("-inf")
            self._ring_due()
        self._sleeper = None

    def _next_due_s(self) -> float | None:
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
            self._stale = max(0, self._stale - 1)
        return self._heap[0][0] if self._heap else None

    def _ring_due(self) -> None:
        now_s = self._clock.now() + TICK_S
        while self._heap and self._heap[0][0] <= now_s:
            alarm = heapq.heappop(self._heap)[2]
            try:
                alarm.ring()
            except Exception as error:
                self._on_error("tiering-alarms", error)
