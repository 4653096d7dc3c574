"""The I/O thread: one asyncio loop, a bounded pool of workers for blocking calls, and an end that is always in time."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from tiering.errors import ClosedError

T = TypeVar("T")
log = logging.getLogger("tiering.driver")

LAST_WORDS_S: Final = 1.0
"""What tasks get to unwind when the loop died under them, in real seconds."""

EXIT_STOP_S: Final = 2.0
"""How long an interpreter that exits waits for a thread that nobody stopped."""


class IoThread:
    """Runs one loop in a thread of its own, from ``start`` to ``stop``. Its methods are for other threads.

    A program that ends without ``stop`` is not held up: the interpreter's exit stops the thread, for ``EXIT_STOP_S`` at
    most. What is being written then is torn no worse than by a kill, which backends must survive anyway.
    Blocking calls of backends run in the loop's default executor, of at most ``workers_max`` threads named
    ``{name}-worker_N``. Times are real seconds: this is about the machine's threads, not about blocks.
    """

    loop: asyncio.AbstractEventLoop
    """There from ``start`` on."""

    def __init__(
        self,
        *,
        on_death: Callable[[BaseException | None], None] = lambda _: None,
        name: str = "tiering-io",
        workers_max: int = 16,
    ) -> None:
        """``on_death``: the loop ended though nobody had called ``stop``; by this exception, or None: by ``loop.stop``.

        It is called once, in the dying thread, after one log line. Whatever is asked afterwards raises ``ClosedError``.
        """
        self._name = name
        self._on_death = on_death
        self._lock = threading.Lock()
        self._over = True
        """No calls are taken. Guarded by the lock, as are the calls."""
        self._calls: set[Future[Any]] = set()
        self._stopping = False
        self._grace_s = LAST_WORDS_S
        self._hung: list[str] = []
        """Tasks that did not unwind."""
        self._workers: list[threading.Thread] = []
        self._executor = ThreadPoolExecutor(
            workers_max, f"{name}-worker", lambda: self._workers.append(threading.current_thread())
        )
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Once. Returns when the loop takes calls; starts no worker yet."""
        if self._thread is not None or self._stopping:
            raise ClosedError("an I/O thread starts once; make a new one")
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._over = False
        self._thread.start()
        atexit.register(self.stop, EXIT_STOP_S)

    @property
    def alive(self) -> bool:
        """The loop takes calls."""
        return not self._over

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coro`` on the loop. The future is cancelled if the loop ends first; cancelling it cancels ``coro``.

        Raises ``ClosedError`` if the loop has ended.
        """
        try:
            with self._lock:
                self._check()
                future = asyncio.run_coroutine_threadsafe(coro, self.loop)
                self._calls.add(future)
        except BaseException:
            coro.close()
            raise
        future.add_done_callback(self._forget)
        return future

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coro`` on the loop and wait for it: its value or its exception.

        Past ``timeout_s`` it is cancelled, not waited for, and ``TimeoutError`` is raised. ``ClosedError`` if the loop
        ends first. On the I/O thread itself it would wait for itself: ``RuntimeError``.
        """
        name = getattr(coro, "__qualname__", "call")
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(f"{name} would block the I/O thread that is to run it; await it there")
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise ClosedError(f"the I/O thread ended before {name} did") from None
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"{name} took longer than {timeout_s:g} s") from None

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` on the loop, soon, and do not wait. ``ClosedError`` if the loop ended."""
        with self._lock:
            self._check()
            self.loop.call_soon_threadsafe(fn)

    def stop(self, deadline_s: float) -> list[str]:
        """Cancel all tasks, end the loop, the workers and the thread: within ``deadline_s``.

        Returns the names of tasks and threads that did not end in time (a call that ignores cancellation, a system
        call that hangs); it is empty when all is well. Idempotent.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("the I/O thread cannot wait for its own end; stop it from another thread")
        until_s = time.monotonic() + deadline_s
        atexit.unregister(self.stop)
        with self._lock:
            stopping, self._stopping, self._over = self._stopping, True, True
        threads = list(self._workers)
        if self._thread is not None:
            if not stopping:
                # Its part leaves time for the workers: a hung task must not eat the deadline of all.
                self._grace_s = 0.8 * deadline_s
                self._stop_loop()
            threads.insert(0, self._thread)
        self._executor.shutdown(wait=False, cancel_futures=True)
        left = []
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                left.append(thread.name)
        return self._hung + left

    def _forget(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(call)

    def _stop_loop(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:
            # It died before, and closed its loop.
            return

    def _check(self) -> None:
        if self._over:
            raise ClosedError("the I/O thread has ended")

    def _main(self) -> None:
        death: BaseException | None = None
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a callback end a loop
            death = error
        with self._lock:
            expected, self._over = self._stopping, True
        if not expected:
            log.error("the I/O thread died; nothing is loaded or stored any more", exc_info=death)
        try:
            self._hung = self.loop.run_until_complete(_wind_down(self._grace_s))
        except BaseException as error:
            log.error("tasks could not unwind when the I/O thread ended", exc_info=error)
        finally:
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                call.cancel()
            self.loop.close()
        if not expected:
            self._on_death(death)


async def _wind_down(deadline_s: float) -> list[str]:
    """Cancel every other task and wait for it; the names of those that remain. Tasks that unwinding starts count too."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadline_s
    cancelled: set[asyncio.Task[Any]] = set()
    while True:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others - cancelled:
            task.cancel()
        cancelled |= others
        remaining_s = until_s - loop.time()
        if not others or remaining_s <= 0:
            break
        await asyncio.wait(others, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
    await loop.shutdown_asyncgens()
    return sorted(f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', 'call')})" for task in others)
