"""Rules 9 and 10: how a backend closes, and what it leaves behind or says meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tiering.api import ClosedError, Outcome
from tiering.testing.conformance.base import MISSING, OK, KitBase, close
from tiering.testing.conformance.rules import broken, require

LOG_RECORDS_MAX: Final = 10
END_GRACE_S: Final = 1.0
"""A pool that was told to stop takes a moment until its threads are gone."""

HEAVY_MODULES: Final = frozenset(
    [
        "aiobotocore",
        "aioboto3",
        "aiohttp",
        "boto3",
        "botocore",
        "fsspec",
        "gcsfs",
        "httpx",
        "obstore",
        "redis",
        "requests",
        "s3fs",
        "torch",
        "uring_api",
        "valkey",
    ]
)


class LifetimeRules(KitBase):
    @pytest.mark.asyncio
    async def test_rule_09_aclose_is_idempotent(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            await s.store_all(self.blocks(2))
            await asyncio.gather(*(close(s.backend) for _ in range(3)))
            await close(s.backend)

    @pytest.mark.asyncio
    async def test_rule_09_aclose_without_open(self, tmp_path: Path) -> None:
        """The manager closes a tier whose ``open`` failed, too."""
        backend = self.make_backend(tmp_path)
        await close(backend)
        await close(backend)

    @pytest.mark.asyncio
    async def test_rule_09_each_method_raises_closed_error_afterwards(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            block = self.blocks(1)[0]
            await s.store_all([block])
            tells_usage = await s.backend.usage() is not None
        backend, loan = s.backend, s.lend_filled(block)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "contains": lambda: backend.contains([block[0]]),
            "load": lambda: backend.load([(block[0], loan.view())]),
            "store": lambda: backend.store([(block[0], loan.view())]),
            "delete": lambda: backend.delete([block[0]]),
            "an empty load": lambda: backend.load([]),
            "an empty store": lambda: backend.store([]),
        }
        if tells_usage:
            calls["usage"] = backend.usage
        if backend.capabilities.can_scan:
            calls["scan"] = lambda: anext(aiter(backend.scan()))
        for name, call in calls.items():
            answer: object
            try:
                answer = await call()
            except ClosedError:
                continue
            except Exception as error:
                answer = error
            raise broken(9, f"after aclose, {name} gave {answer!r}; raise ClosedError first of all")
        await loan.close("a call after aclose")

    @pytest.mark.asyncio
    async def test_rule_09_aclose_waits_for_calls_in_flight(self, tmp_path: Path) -> None:
        for turns in (1, 2, 3, 5, 8, 13):
            async with self.opened(tmp_path) as s:
                old, new = (b"old", self.large), (b"new-%d" % turns, self.large)
                await s.store_all([old])
                loans = [s.lend(self.large), s.lend_filled(new)]
                calls = [
                    asyncio.create_task(s.backend.load([(old[0], loans[0].view())]), name="kit-load"),
                    asyncio.create_task(s.backend.store([(new[0], loans[1].view())]), name="kit-store"),
                ]
                await _turn(turns)
                await close(s.backend)
                whole = loans[0].payload
                for loan in loans:
                    loan.poison()
                await _turn(8)
                _require_ended(calls, turns)
                if not calls[0].exception() and calls[0].result()[0].ok:
                    require(whole == s.payload(old), 9, "aclose returned before a load in flight had filled its dest")
                del calls
            for loan in loans:
                loan.require_poisoned("aclose")
                await loan.close("aclose")

    def test_rule_09_nothing_happens_in_del(self, tmp_path: Path) -> None:
        kinds = [kind.__name__ for kind in type(self.make_backend(tmp_path)).__mro__ if "__del__" in vars(kind)]
        require(not kinds, 9, f"{kinds} define __del__; release in aclose, a finalizer runs anywhere and at any time")

    @pytest.mark.asyncio
    async def test_rule_10_construction_does_nothing(self, tmp_path: Path) -> None:
        before = Footprint.now()
        backend = self.make_backend(tmp_path)
        await _turn(4)
        grown = Footprint.now().beyond(before)
        require(not grown, 10, f"constructing {type(backend).__name__} left {grown}; that is for open to start")

    @pytest.mark.asyncio
    async def test_rule_10_nothing_outlives_aclose(self, tmp_path: Path) -> None:
        """Threads and tasks from the first use on; files from the second, since libraries keep a few for good."""
        before = Footprint.now()
        await self._use(tmp_path)
        warm = Footprint.now()
        for _ in range(3):
            await self._use(tmp_path)
        before.files = warm.files
        give_up_at = time.monotonic() + END_GRACE_S
        # Threads and descriptors end without telling anyone: there is nothing to wait for but the clock.
        while (grown := Footprint.now().beyond(before)) and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        require(not grown, 10, f"{END_GRACE_S} s after aclose there are still {grown}; await and join them in aclose")

    @pytest.mark.asyncio
    async def test_rule_10_no_log_line_a_block(self, tmp_path: Path) -> None:
        """Also the lines of libraries below: an operator sees whose tier it is, not whose logger."""
        blocks = self.blocks(50, size=self.small)
        with _log_records() as records:
            async with self.opened(tmp_path) as s:
                for block in blocks:
                    require(await s.load([block]) == [MISSING], 2, "the medium is empty")
                    await s.store_all([block])
                await s.require_loads(blocks, 10, "stored one by one")
                if s.backend.capabilities.can_delete:
                    require(await s.delete(key for key, _ in blocks) == [OK] * len(blocks), 2, "all were stored")
        lines = [record.getMessage() for record in records]
        require(
            len(lines) <= LOG_RECORDS_MAX,
            10,
            f"{len(lines)} log records for {len(blocks)} blocks, such as {lines[-1:]}; count them in usage() instead",
        )

    def test_rule_10_no_heavy_import_before_open(self, tmp_path: Path) -> None:
        """Reading a configuration imports the backend's module; an operator without that tier pays for it too."""
        module = type(self.make_backend(tmp_path)).__module__
        if module == type(self).__module__:
            return
        code = (
            f"import sys\nimport tiering.api\nbefore = set(sys.modules)\nimport {module}\n"
            "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        require(child.returncode == 0, 10, f"importing {module} alone fails:\n{child.stderr}")
        heavy = sorted(set(child.stdout.split()) & (HEAVY_MODULES | self.heavy_modules))
        require(
            not heavy,
            10,
            f"importing {module} imports {heavy}; import it inside open, or in a module that open imports",
        )

    async def _use(self, tmp_path: Path) -> None:
        blocks = self.blocks(6)
        async with self.opened(tmp_path) as s:
            await asyncio.gather(*(s.store_all([block]) for block in blocks))
            await asyncio.gather(*(s.load([block]) for block in blocks))
            task = asyncio.create_task(s.backend.contains([blocks[0][0]] * 8), name="kit-cancelled")
            await _turn(1)
            task.cancel()
            await asyncio.wait((task,))
            if s.backend.capabilities.can_delete:
                await s.delete(key for key, _ in blocks)


@dataclass
class Footprint:
    """What of this process a backend could leave behind."""

    threads: set[str]
    tasks: set[str]
    files: set[str]

    @staticmethod
    def now() -> Footprint:
        # The loop's own executor, which run_blocking uses by default, ends with the loop.
        threads = {
            f"thread {thread.name}-{thread.ident}"
            for thread in threading.enumerate()
            if not thread.name.startswith("asyncio_")
        }
        files = set()
        for fd in os.listdir("/dev/fd"):
            # The descriptor of the listing itself is gone by now.
            with contextlib.suppress(OSError):
                files.add(f"file {fd} -> {os.readlink(f'/dev/fd/{fd}')}")
        tasks = {f"task {task.get_name()} ({id(task):#x})" for task in asyncio.all_tasks()}
        return Footprint(threads, tasks, files)

    def beyond(self, before: Footprint) -> list[str]:
        return sorted((self.threads - before.threads) | (self.tasks - before.tasks) | (self.files - before.files))


async def _turn(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def _require_ended(calls: list[asyncio.Task[list[Outcome]]], turns: int) -> None:
    for call in calls:
        name = call.get_name()
        require(call.done(), 9, f"aclose returned while a {name}, started {turns} turns before, was still running")
        error = call.exception()
        legal = error is None or isinstance(error, ClosedError)
        require(
            legal,
            9,
            f"{name}, in flight at aclose, raised {error!r}; let it finish (or raise ClosedError at its start)",
        )


class _Recorder(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def _log_records() -> Iterator[list[logging.LogRecord]]:
    handler = _Recorder(logging.INFO)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield handler.records
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
