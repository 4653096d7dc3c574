"""Blocking calls in threads that cancellation cannot detach from their buffers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar, TypeVarTuple

from tiering.errors import ClosedError

T = TypeVar("T")
Args = TypeVarTuple("Args")


class _Call(Generic[T]):
    """One call and what came of it. Whoever takes ``claim`` first decides: the thread to run, the waiter to drop."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self.fn: Callable[[], T] | None = fn
        self.claim = threading.Lock()
        self.value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        # Nothing is raised into the executor's future: an error of an unwatched future would only be logged at its
        # collection, and asyncio cannot carry a StopIteration at all (its waiter would never wake).
        if self.fn is None or not self.claim.acquire(blocking=False):
            return
        # The executor's thread keeps this object a moment longer than the waiter: not so what was lent to fn.
        fn, self.fn = self.fn, None
        try:
            self.value = fn()
        except BaseException as error:  # It is the waiter's.
            self.error = error
        finally:
            del fn

    def take_error(self) -> BaseException | None:
        # Its traceback leads back to this object: kept here, it would keep the lent buffers alive in a cycle.
        error, self.error = self.error, None
        return error


async def run_blocking(fn: Callable[[*Args], T], /, *args: *Args, executor: Executor | None = None) -> T:
    """``fn(*args)`` in a thread of ``executor`` (None: the running loop's default one); its value or its exception.

    Cancelled while ``fn`` still waits in the executor's queue: ``fn`` never runs and ``CancelledError`` comes at once.
    Cancelled while ``fn`` runs: the call returns only when ``fn`` has, however often it is cancelled again, and then
    raises ``CancelledError``; an exception of ``fn`` is its ``__cause__``, a value of ``fn`` is dropped. So a buffer
    lent to ``fn`` is free whenever this call has returned, which ``asyncio.to_thread`` does not give.

    Raises ``ClosedError`` if the executor was shut down and dropped the call, ``RuntimeError`` if it was shut down before.
    """
    call = _Call(lambda: fn(*args))
    future = asyncio.get_running_loop().run_in_executor(executor, call.run)
    try:
        # wait() and not "await future": it leaves the future alone when this task is cancelled.
        await asyncio.wait((future,))
    except asyncio.CancelledError as cancelled:
        if call.claim.acquire(blocking=False):
            call.fn = None
            future.cancel()
            raise
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError:
                # The first cancellation is raised below; a further one must not free the buffers early.
                continue
        raise cancelled from call.take_error()
    if future.cancelled():
        raise ClosedError(f"the executor was shut down before it ran {fn!r}")
    if (error := call.take_error()) is not None:
        try:
            raise error
        finally:
            del error
    return call.value
