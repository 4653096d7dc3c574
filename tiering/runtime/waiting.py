"""How a coroutine on the caller's loop waits for something that happens on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tiering.errors import TieringError
from tiering.runtime.clock import Clock

T = TypeVar("T")


def _set(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: object) -> None:
    with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(_set, future, value)


class Mailbox:
    """One value a job, delivered to whoever expects it. Thread-safe.

    A job has no number before the core has answered, and then its value may be on its way already: a request and the
    ``expect`` of its job stand in one ``asking``. A value that nobody expects, or is about to, is dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._asking = 0
        self._early: dict[int, object] = {}
        """Values of unknown jobs; empty while ``_asking`` is 0."""
        self._closed: tuple[object] | None = None

    def __len__(self) -> int:
        """Jobs expected and values kept."""
        with self._lock:
            return len(self._futures) + len(self._early)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Values of jobs that are not expected yet are kept until the end of the block, which must not await."""
        with self._lock:
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    self._early.clear()

    def expect(self, job: int) -> asyncio.Future[Any]:
        """A future on the running loop that gets the job's value. End it with ``forget``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if job in self._early:
                future.set_result(self._early.pop(job))
            elif self._closed is not None:
                future.set_result(self._closed[0])
            else:
                self._futures[job] = (loop, future)
        return future

    def deliver(self, job: int, value: object) -> None:
        with self._lock:
            entry = self._futures.pop(job, None)
            if entry is None and self._asking:
                self._early[job] = value
        if entry is not None:
            _wake(*entry, value)

    def forget(self, job: int) -> None:
        """Nobody waits for this job any more."""
        with self._lock:
            self._futures.pop(job, None)

    def close(self, value: object) -> None:
        """Give ``value`` to all who wait now or later."""
        with self._lock:
            self._closed = (value,)
            entries = list(self._futures.values())
            self._futures.clear()
        for entry in entries:
            _wake(*entry, value)


class Pulse:
    """A counter that coroutines of any loop wait to see grow. Thread-safe; no beat is missed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats = 0
        self._waiting: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}

    def __len__(self) -> int:
        """Coroutines that wait."""
        return len(self._waiting)

    @property
    def beats(self) -> int:
        return self._beats

    def beat(self) -> None:
        with self._lock:
            self._beats += 1
            if not self._waiting:
                return
            waiting, self._waiting = self._waiting, {}
        for future, loop in waiting.items():
            _wake(loop, future, None)

    async def beyond(self, seen: int, clock: Clock, deadline_s: float = math.inf) -> bool:
        """Wait until ``beats`` exceeds ``seen``: True; False from ``deadline_s`` (a time of the clock) on, whatever came.

        Read ``beats``, then look at what it tells of, then wait.
        """
        if clock.now() >= deadline_s:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._beats > seen:
                return True
            self._waiting[future] = loop
        try:
            return await wait_until(clock, future, deadline_s)
        finally:
            with self._lock:
                self._waiting.pop(future, None)


class Tally:
    """Counts what is under way, so that somebody can wait for the end of it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._ends = Pulse()

    @property
    def count(self) -> int:
        return self._count

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more, while the block runs."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
            self._ends.beat()

    async def zero(self, clock: Clock, deadline_s: float) -> bool:
        """Wait until nothing is under way, at most until ``deadline_s`` (a time of the clock); True if so."""
        while True:
            seen = self._ends.beats
            if not self._count:
                return True
            if not await self._ends.beyond(seen, clock, deadline_s):
                return not self._count


async def wait_until(clock: Clock, future: asyncio.Future[Any], deadline_s: float) -> bool:
    """Wait for ``future`` until ``clock.now()`` reaches ``deadline_s``; True if it is done. Never cancels the future."""
    if future.done():
        return True
    if deadline_s == math.inf:
        await asyncio.wait({future})
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


async def outcome_of(future: Future[T], limit_s: float = math.inf) -> T:
    """The result of another thread's future, awaited here. Cancelled, it leaves the future alone and raises at once.

    Raises ``concurrent.futures.CancelledError`` if the future is cancelled (not asyncio's: that is about the caller),
    and ``TieringError`` if there is no result after ``limit_s`` real seconds.
    """
    loop = asyncio.get_running_loop()
    bell: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda _: _wake(loop, bell, None))
    await asyncio.wait({bell}, timeout=None if limit_s == math.inf else limit_s)
    if not future.done():
        raise TieringError(f"the I/O thread gave no answer for {limit_s:g} s: something blocks its loop")
    return future.result()


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the end of ``future`` however often the caller is cancelled; then raise what it was cancelled with."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
