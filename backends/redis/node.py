"""One server: a bounded number of connections to it, and a thread for each that is in use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from backends.redis.dial import Dialer
from backends.redis.failures import ConnectionLost, RedisFailure, Unreachable
from backends.redis.resp import Connection
from backends.redis.url import Address

T = TypeVar("T")


class Node:
    """Lends connections to work that runs in threads. Everything here happens on the I/O loop.

    A connection is used again only if it is clean and the server has said nothing since: one whose call was cancelled,
    failed or broke off in the middle of a reply is closed. Each server has threads of its own, so one that hangs holds
    up no other.
    """

    def __init__(self, address: Address, dialer: Dialer, *, connections_max: int, thread_name: str) -> None:
        self.address = address
        self.connections_max = connections_max
        self.failing = False
        """The last attempt to use this server failed."""
        self.made = 0
        """Connections made so far."""
        self._dialer = dialer
        self._executor = ThreadPoolExecutor(connections_max, thread_name_prefix=thread_name)
        self._places = asyncio.Semaphore(connections_max)
        self._stores_max = max(1, connections_max // 2)
        self._store_places = asyncio.Semaphore(self._stores_max)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._dialing: set[asyncio.Timeout] = set()
        self._users = self._storing = 0
        """Calls that hold or await a connection, and those of them that store."""
        self._leaving = False

    def spare(self, *, storing: bool) -> int:
        """Connections that could be had without waiting."""
        free = self.connections_max - self._users
        return max(0, min(free, self._stores_max - self._storing) if storing else free)

    async def run(self, work: Callable[[Connection], T], *, storing: bool = False) -> T:
        """``work`` on a connection, in a thread. Waits for a free one.

        Calls that are ``storing`` share half of the connections, so that loads and lookups need not wait for them.

        A connection that turns out to be dead, because the server was restarted since its last use, costs nothing but
        a new one: ``work`` is then called again and goes on with what is left. Raises ``RedisFailure``. Cancelled, it
        returns as soon as ``work`` has noticed that its connection was shut.
        """
        self._users += 1
        self._storing += storing
        try:
            async with self._store_places if storing else contextlib.nullcontext(), self._places:
                if self._leaving:
                    raise Unreachable(f"{self.address} is not in use any more")
                result = await self._run(work)
            self.failing = False
            return result
        except RedisFailure as failure:
            self.failing = True
            if isinstance(failure, ConnectionLost):
                raise ConnectionLost(f"{self.address}: {failure}", silent=failure.silent) from failure
            raise
        finally:
            self._users -= 1
            self._storing -= storing
            if self._leaving and not self._users:
                self._release()

    def interrupt(self) -> None:
        """Make all calls that run fail now, and those to come."""
        self._leaving = True
        for connection in self._busy:
            connection.wire.interrupt()
        for limit in self._dialing:
            if not limit.expired():
                limit.reschedule(0)

    def forget_idle(self) -> None:
        """Close what is not in use: its peer is not the server that it was."""
        for connection in self._idle:
            connection.wire.close()
        self._idle.clear()

    def leave(self) -> None:
        """Close, as soon as the last call has ended. Calls to come fail."""
        self._leaving = True
        if not self._users:
            self._release()

    async def _run(self, work: Callable[[Connection], T]) -> T:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._use(connection, work)
            except ConnectionLost as lost:
                if self._leaving or lost.silent:
                    raise
        while True:
            try:
                return await self._use(await self._dial(), work)
            except ConnectionLost as lost:
                if self._leaving or not lost.progress:
                    raise

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.wire.quiet():
                return connection
            connection.wire.close()
        return None

    async def _dial(self) -> Connection:
        limit = asyncio.timeout(self._dialer.timeout_s)
        self._dialing.add(limit)
        try:
            connection = await self._dialer.connect(self.address, limit)
        finally:
            self._dialing.discard(limit)
        await self._use(connection, lambda opened: self._dialer.greet(opened, self.address), keep=True)
        self.made += 1
        return connection

    async def _use(self, connection: Connection, work: Callable[[Connection], T], *, keep: bool = False) -> T:
        """``keep``: it stays the caller's if all goes well."""
        self._busy.add(connection)
        good = False
        try:
            result = await _in_thread(connection, work, self._executor)
            good = connection.clean
        finally:
            self._busy.discard(connection)
            if not good or (self._leaving and not keep):
                connection.wire.close()
            elif not keep:
                self._idle.append(connection)
        return result

    def _release(self) -> None:
        self.forget_idle()
        self._executor.shutdown()  # idle: nobody uses the node


class _Call(Generic[T]):
    """One piece of work for a thread, and what came of it. ``run_blocking`` does so for work that nothing interrupts.

    The executor's thread keeps this object, and what it would see raised, a moment longer than the waiter. So neither
    the work nor a traceback, which both lead to the caller's buffers, is left for it to keep.
    """

    def __init__(self, connection: Connection, work: Callable[[Connection], T]) -> None:
        self._connection = connection
        self._work: Callable[[Connection], T] | None = work
        self._value: T
        self.error: BaseException | None = None

    def __call__(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._value = work(self._connection)
        except BaseException as error:  # it is the waiter's
            self.error = error
        finally:
            del work

    def result(self) -> T:
        error, self.error = self.error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error


async def _in_thread(connection: Connection, work: Callable[[Connection], T], executor: ThreadPoolExecutor) -> T:
    """Returns only when ``work`` has, however it is cancelled: then the wire is shut, which ends the work."""
    call = _Call(connection, work)
    future = asyncio.get_running_loop().run_in_executor(executor, call)
    try:
        # wait() and not "await future": it leaves the future alone when this task is cancelled.
        await asyncio.wait((future,))
    except asyncio.CancelledError:
        connection.wire.interrupt()
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError:
                continue  # the first cancellation is raised below; a further one must not free the buffers early
        call.error = None  # nobody is left to hear of it
        raise
    return call.result()
