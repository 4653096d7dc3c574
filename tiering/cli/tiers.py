"""A tier's backend as a command uses it: made from its configuration, and called within a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from tiering import registry
from tiering.api import Backend, BackendConfig
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError
from tiering.runtime.threads import IoThread

T = TypeVar("T")

WAIT_S: Final = 0.25

hung: list[str] = []
"""Tasks and threads of this process that outlasted every limit. They cannot be ended, and whoever exits must not wait."""


def make_backend(config: BackendConfig) -> Backend:
    """A backend that is not open. Raises ``ConfigError`` if its module cannot be imported."""
    backend: Backend = registry.backend_class(config)(config)  # type: ignore[call-arg]  # the contract: config alone
    return backend


def tier_of(path: Path, config: TieringConfig, name: str) -> BackendConfig:
    """The tier called ``name``. Raises ``ConfigError`` that names those there are."""
    if name not in config.tier_names:
        raise ConfigError(f"{path}: {registry.unknown('tier', name, config.tier_names)}")
    return config.tiers[config.tier_names.index(name)]


def run_on(io: IoThread, call: Coroutine[Any, Any, T], limit_s: float) -> T:
    """The call's value; ``TimeoutError`` past ``limit_s``. Ctrl-C ends the wait."""
    future = io.submit(call)
    until_s = time.monotonic() + limit_s
    # In short waits: a signal that comes just before one is noticed at its end only.
    while not future.done() and time.monotonic() < until_s:
        wait((future,), timeout=WAIT_S)
    return future.result(0)


@contextmanager
def io_thread(name: str, end_s: float) -> Iterator[IoThread]:
    """An I/O thread whose end takes at most ``end_s``, whatever a backend does: what is left is noted in ``hung``."""
    io = IoThread(name=name)
    io.start()
    try:
        yield io
    finally:
        hung.extend(io.stop(end_s))


async def bounded(op: str, call: Coroutine[Any, Any, T], limit_s: float, unwind_s: float) -> T:
    """The call's value. Past ``limit_s`` it is cancelled, past ``unwind_s`` more left alone: ``BackendError``."""
    task = asyncio.create_task(call, name=op)
    # An exception that comes too late is nobody's, and would be logged with a traceback.
    task.add_done_callback(lambda late: late.cancelled() or late.exception())
    try:
        await asyncio.wait((task,), timeout=limit_s)
        if task.done():
            return task.result()
        raise BackendError(f"no answer within {limit_s:g} s", op=op, retryable=True)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=unwind_s)
