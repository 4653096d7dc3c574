"""How a coroutine on the caller's loop waits for something that happens on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from tiering.runtime.clock import Clock


def _set(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: object) -> None:
    with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(_set, future, value)


class Mailbox:
    """One value a job, delivered to whoever asks for it, before or after it arrived. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._early: dict[int, object] = {}
        self._closed: object | None = None

    def expect(self, job: int) -> asyncio.Future[Any]:
        """A future on the running loop that gets the job's value."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if job in self._early:
                future.set_result(self._early.pop(job))
            elif self._closed is not None:
                future.set_result(self._closed)
            else:
                self._futures[job] = (loop, future)
        return future

    def deliver(self, job: int, value: object) -> None:
        with self._lock:
            entry = self._futures.pop(job, None)
            if entry is None:
                self._early[job] = value
        if entry is not None:
            _wake(*entry, value)

    def forget(self, job: int) -> None:
        """Nobody asks for this job any more."""
        with self._lock:
            self._futures.pop(job, None)
            self._early.pop(job, None)

    def take(self, job: int) -> object | None:
        """The job's value if it has arrived (the polling face); it is given out once."""
        with self._lock:
            value = self._early.pop(job, None)
            return self._closed if value is None else value

    def close(self, value: object) -> None:
        """Give ``value`` to all who wait now or later."""
        with self._lock:
            self._closed = value
            entries = list(self._futures.values())
            self._futures.clear()
        for entry in entries:
            _wake(*entry, value)


class Pulse:
    """A counter that coroutines of any loop wait to see grow. Thread-safe; no beat is missed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats = 0
        self._futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = []

    @property
    def beats(self) -> int:
        return self._beats

    def beat(self) -> None:
        if not self._futures:  # the common case, without the lock: a waiter re-reads ``beats`` after it has enrolled
            self._beats += 1
            if not self._futures:
                return
        with self._lock:
            self._beats += 1
            waiting, self._futures = self._futures, []
        for entry in waiting:
            _wake(*entry, None)

    def after(self, seen: int) -> asyncio.Future[Any]:
        """A future on the running loop, done once ``beats`` exceeds ``seen``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._futures.append((loop, future))
        if self._beats > seen:
            _set(future, None)
        return future


async def wait_until(clock: Clock, future: asyncio.Future[Any], deadline_s: float) -> bool:
    """Wait for ``future`` until ``clock.now()`` reaches ``deadline_s``; True if it is done. Never cancels the future."""
    if future.done():
        return True
    remaining = deadline_s - clock.now()
    if remaining <= 0:
        return False
    timer = asyncio.ensure_future(clock.sleep(remaining))
    try:
        await asyncio.wait({future, timer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        await asyncio.wait({timer})  # not ``await timer``: that would swallow a cancellation of ours
    return future.done()
