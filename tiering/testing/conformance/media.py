"""Media that are slow, hung or failing, for any backend that works in the loop's threads or on files."""

from __future__ import annotations

import asyncio
import functools
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

SLOW_CALL_S: Final = 0.01
"""The longest delay of a call on a slow medium; calls take it in turn, so that they overtake each other."""
DELAYS: Final = (1.0, 0.0, 0.3, 0.7, 0.1)
"""Shares of ``SLOW_CALL_S``."""
THREADS: Final = 8


class _Threads(ThreadPoolExecutor):
    """The loop's default executor from its creation on. The loop ends it, as it does its own."""

    def __init__(self, next_wait: Callable[[], Callable[[], object]]) -> None:
        """``next_wait`` gives, for each call, what its thread does first."""
        # The name by which everybody knows the threads that end with the loop.
        super().__init__(THREADS, thread_name_prefix="asyncio_kit")
        self.next_wait: Callable[[], Callable[[], object]] | None = next_wait
        asyncio.get_running_loop().set_default_executor(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self.next_wait is None:
            return super().submit(fn, *args, **kwargs)
        wait = self.next_wait()

        def late() -> T:
            wait()
            return fn(*args, **kwargs)

        return super().submit(late)


@contextmanager
def slow_threads() -> Iterator[None]:
    """Calls of the running loop's default executor begin up to ``SLOW_CALL_S`` late within the block."""
    delays = itertools.cycle(DELAYS)
    threads = _Threads(lambda: functools.partial(time.sleep, next(delays) * SLOW_CALL_S))
    try:
        yield
    finally:
        threads.next_wait = None


@contextmanager
def hung_threads() -> Iterator[None]:
    """No call of the running loop's default executor begins within the block; those made in it begin at its end."""
    released = threading.Event()
    threads = _Threads(lambda: released.wait)
    try:
        yield
    finally:
        threads.next_wait = None
        released.set()


@contextmanager
def failing_files() -> Iterator[None]:
    """No write of this process makes a file grow within the block; each ends with ``EFBIG``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
