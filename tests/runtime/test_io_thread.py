"""The thread under the driver: it takes calls, ends in time, and its death is heard of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiering.api import run_blocking
from tiering.errors import ClosedError
from tiering.runtime.threads import IoThread

PATIENCE_S = 10.0


@contextmanager
def started(workers_max: int = 16) -> Iterator[IoThread]:
    io = IoThread(workers_max=workers_max)
    io.start()
    try:
        yield io
    finally:
        io.stop(PATIENCE_S)


def _hold(inside: threading.Event, release: threading.Event) -> None:
    inside.set()
    release.wait(PATIENCE_S)


async def _whoami() -> str:
    return threading.current_thread().name


def test_runs_coroutines_and_callbacks_on_its_own_thread() -> None:
    with started() as io:
        called: list[str] = []
        io.call_soon(lambda: called.append(threading.current_thread().name))
        assert io.run(_whoami(), PATIENCE_S) == "tiering-io"
        assert called == ["tiering-io"]
        assert io.submit(_whoami()).result(PATIENCE_S) == "tiering-io"
        with pytest.raises(ZeroDivisionError):
            io.run(_divide(), PATIENCE_S)


async def _divide() -> float:
    return 1 / 0


def test_workers_are_named_and_bounded() -> None:
    inside = threading.Semaphore(0)
    go = threading.Event()
    names: set[str] = set()

    def work() -> None:
        names.add(threading.current_thread().name)
        inside.release()
        go.wait(PATIENCE_S)

    async def many() -> None:
        await asyncio.gather(*(run_blocking(work) for _ in range(6)))

    with started(workers_max=2) as io:
        future = io.submit(many())
        assert inside.acquire(timeout=PATIENCE_S)
        assert inside.acquire(timeout=PATIENCE_S)
        assert not inside.acquire(blocking=False)
        go.set()
        future.result(PATIENCE_S)
    assert names == {"tiering-io-worker_0", "tiering-io-worker_1"}


def test_run_gives_up_at_its_timeout_and_cancels() -> None:
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with started() as io:
        with pytest.raises(TimeoutError, match=r"forever took longer than 0\.05 s"):
            io.run(forever(), 0.05)
        assert ended.wait(PATIENCE_S)


def test_run_on_its_own_thread_is_refused_instead_of_waiting_for_itself() -> None:
    with started() as io:

        async def nested() -> None:
            with pytest.raises(RuntimeError, match="would block the I/O thread"):
                io.run(_whoami())
            with pytest.raises(RuntimeError, match="stop it from another thread"):
                io.stop(1.0)

        io.run(nested(), PATIENCE_S)


def test_stop_cancels_what_is_left_and_refuses_what_comes() -> None:
    unwound: list[str] = []

    async def left() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append("left")

    io = IoThread()
    io.start()
    future = io.submit(left())
    io.run(_whoami(), PATIENCE_S)
    assert io.stop(PATIENCE_S) == []
    assert unwound == ["left"]
    assert future.cancelled()
    assert not io.alive
    assert io.stop(PATIENCE_S) == []
    for refused in (lambda: io.run(_whoami()), lambda: io.call_soon(list), io.start):
        with pytest.raises(ClosedError):
            refused()


def test_call_that_was_submitted_just_before_stop_ends() -> None:
    """Each of many rounds: the call either ran or is cancelled, and its coroutine was closed."""
    for _ in range(50):
        io = IoThread()
        io.start()
        future = io.submit(_whoami())
        assert io.stop(PATIENCE_S) == []
        assert future.done()


def test_stop_without_start() -> None:
    assert IoThread().stop(1.0) == []


def test_stop_is_bounded_and_names_what_hangs() -> None:
    """Row 8: a task that ignores cancellation and a blocked worker do not hold up the end."""
    release = threading.Event()
    inside = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def blocked() -> None:
        await run_blocking(_hold, inside, release)

    io = IoThread()
    io.start()
    calls = [io.submit(stubborn()), io.submit(blocked())]
    assert inside.wait(PATIENCE_S)
    began_s = time.monotonic()
    left = io.stop(0.5)
    took_s = time.monotonic() - began_s
    release.set()
    assert took_s < 2.0
    # Nobody waits for them any more.
    assert all(call.cancelled() for call in calls)
    assert any("stubborn" in name for name in left)
    assert any("blocked" in name for name in left)
    assert "tiering-io-worker_0" in left


def test_stop_is_bounded_while_something_blocks_the_loop() -> None:
    release, inside = threading.Event(), threading.Event()
    io = IoThread()
    io.start()
    io.call_soon(lambda: _hold(inside, release))
    assert inside.wait(PATIENCE_S)
    assert io.stop(0.2) == ["tiering-io"]
    release.set()


@pytest.mark.parametrize("how", ["exception", "stop"])
def test_death_of_the_loop_is_an_event(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Row 34: whoever waits is let go, the callback hears of it, and what comes afterwards is refused."""
    deaths: list[BaseException | None] = []
    heard, unwound = threading.Event(), threading.Event()

    def on_death(error: BaseException | None) -> None:
        deaths.append(error)
        heard.set()

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.set()

    def kill() -> None:
        raise SystemExit(7)

    io = IoThread(on_death=on_death)
    io.start()
    future = io.submit(waiting())
    io.run(_whoami(), PATIENCE_S)
    io.call_soon(kill if how == "exception" else io.loop.stop)
    assert heard.wait(PATIENCE_S)
    assert unwound.is_set()
    assert future.cancelled()
    assert [type(error) for error in deaths] == [SystemExit if how == "exception" else type(None)]
    assert [record.levelname for record in caplog.records if "I/O thread died" in record.message] == ["ERROR"]
    with pytest.raises(ClosedError):
        io.run(_whoami())
    assert io.stop(PATIENCE_S) == []
