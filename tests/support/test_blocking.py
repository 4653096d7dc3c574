from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tiering.errors import ClosedError
from tiering.support.blocking import run_blocking

PATIENCE_S = 10.0
"""How long a thread of a test waits for its gate before it gives up; never reached when all is well."""


class _Gate:
    """A blocking call that says when it runs and returns when told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.running = asyncio.Event()
        self.opened = threading.Event()
        self.runs = 0

    def pass_through(self, buffer: bytearray, error: BaseException | None = None) -> int:
        self.runs += 1
        self._loop.call_soon_threadsafe(self.running.set)
        assert self.opened.wait(PATIENCE_S)
        buffer[0] = 1
        if error is not None:
            raise error
        return 7


@pytest.fixture
async def gate() -> _Gate:
    return _Gate(asyncio.get_running_loop())


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def _turns(count: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_value_comes_back_from_another_thread() -> None:
    thread, total = await run_blocking(lambda a, b: (threading.get_ident(), a + b), 2, 3)
    assert thread != threading.get_ident()
    assert total == 5


async def test_the_given_executor_runs_it() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as executor:
        name = await run_blocking(lambda: threading.current_thread().name, executor=executor)
    assert name.startswith("mine")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError(), asyncio.CancelledError(), SystemExit(3)])
async def test_an_exception_comes_back(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await run_blocking(fail)
    assert caught.value is error


async def test_a_stop_iteration_does_not_hang_the_waiter() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(run_blocking(next, iter(())), PATIENCE_S)


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_cancelled_while_running_it_returns_only_after_the_thread(gate: _Gate, cancels: int) -> None:
    buffer = bytearray(1)
    task = asyncio.create_task(run_blocking(gate.pass_through, buffer))
    await gate.running.wait()
    for _ in range(cancels):
        task.cancel("stop")
        await _turns()
        assert not task.done()
        assert buffer[0] == 0
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert buffer[0] == 1
    assert task.cancelled()


async def test_a_timeout_waits_for_the_thread(gate: _Gate) -> None:
    buffer = bytearray(1)

    async def limited() -> None:
        async with asyncio.timeout(0):
            await run_blocking(gate.pass_through, buffer)

    task = asyncio.create_task(limited())
    await gate.running.wait()
    await _turns()
    assert not task.done()
    gate.opened.set()
    with pytest.raises(TimeoutError):
        await task
    assert buffer[0] == 1


async def test_an_exception_after_cancellation_is_the_cause_and_no_warning(gate: _Gate) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    error = OSError("disk")
    task = asyncio.create_task(run_blocking(gate.pass_through, bytearray(1), error))
    await gate.running.wait()
    task.cancel()
    await _turns()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.__cause__ is error
    del caught, task
    gc.collect()
    await _turns()
    assert complaints == []


async def test_cancelled_in_the_queue_it_never_runs(gate: _Gate, one_thread: ThreadPoolExecutor) -> None:
    first = asyncio.create_task(run_blocking(gate.pass_through, bytearray(1), executor=one_thread))
    await gate.running.wait()
    ran: list[int] = []
    second = asyncio.create_task(run_blocking(ran.append, 1, executor=one_thread))
    await _turns()
    second.cancel()
    # The thread is still busy with the first: this would never end if it waited for the thread.
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.opened.set()
    assert await first == 7
    await run_blocking(ran.append, 2, executor=one_thread)
    assert ran == [2]


class _LateExecutor(Executor):
    """Starts its work when told to, also work that was cancelled meanwhile (as an executor of an author may)."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.work.append(lambda: fn(*args, **kwargs))
        return Future()


async def test_cancelled_in_the_queue_of_any_executor_it_never_runs() -> None:
    executor = _LateExecutor()
    ran: list[int] = []
    task = asyncio.create_task(run_blocking(ran.append, 1, executor=executor))
    await _turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [late] = executor.work
    late()
    assert ran == []


async def test_an_executor_that_drops_its_queue_is_an_error_and_no_cancellation(
    gate: _Gate, one_thread: ThreadPoolExecutor
) -> None:
    first = asyncio.create_task(run_blocking(gate.pass_through, bytearray(1), executor=one_thread))
    await gate.running.wait()
    second = asyncio.create_task(run_blocking(int, executor=one_thread))
    await _turns()
    one_thread.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(ClosedError, match="shut down before it ran"):
        await second
    gate.opened.set()
    assert await first == 7
    with pytest.raises(RuntimeError, match="after shutdown"):
        await run_blocking(int, executor=one_thread)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_lent_buffer_is_free_at_once(fails: bool) -> None:
    """No reference cycle and no thread keeps the view: a bytearray with a view alive refuses to grow."""
    buffer = bytearray(4096)

    def use(view: memoryview) -> None:
        view[0] = 1
        if fails:
            raise OSError("disk")

    gc.collect()
    gc.disable()
    try:
        with suppress(OSError):
            await run_blocking(use, memoryview(buffer))
        buffer.append(1)
    finally:
        gc.enable()
    assert buffer[0] == 1


async def test_many_calls_at_once_each_get_their_own(one_thread: ThreadPoolExecutor) -> None:
    values = await asyncio.gather(*(run_blocking(lambda n: n * n, n, executor=one_thread) for n in range(200)))
    assert values == [n * n for n in range(200)]
