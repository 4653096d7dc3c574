"""A tier's backend as a command uses it: made from its configuration, and called within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from tiering import registry
from tiering.api import Backend, BackendConfig
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError
from tiering.runtime.threads import IoThread

T = TypeVar("T")

UNWIND_S: Final = 1.0
"""What a call gets to return after it was cancelled."""
END_S: Final = 2.0
"""What an I/O thread gets to end: enough to remove a probe's blocks and close the backend when a check is interrupted."""

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


@contextmanager
def io_thread(name: str) -> Iterator[IoThread]:
    """An I/O thread whose end takes at most ``END_S``, whatever a backend does: what is left is noted in ``hung``."""
    io = IoThread(name=name)
    io.start()
    try:
        yield io
    finally:
        hung.extend(io.stop(END_S))


async def bounded(op: str, call: Coroutine[Any, Any, T], limit_s: float) -> T:
    """The call's value. Past the limit it is cancelled and left alone, and ``BackendError`` is raised."""
    task = asyncio.create_task(call, name=op)
    try:
        await asyncio.wait((task,), timeout=limit_s)
        if task.done():
            return task.result()
        raise BackendError(f"no answer within {limit_s:g} s", op=op, retryable=True)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=UNWIND_S)
            if task.done() and not task.cancelled():
                task.exception()  # nobody is left to hear of it
