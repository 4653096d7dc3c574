"""Opening, resetting and closing a manager from vLLM's scheduler, which has no event loop of its own."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from tiering.config import TieringConfig
from tiering.manager import TieringOffloadingManager
from tiering.types import KVLayout

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a thread of its own: the caller may stand in a running loop or in none."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="kvtiering-call")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def open_manager(config: TieringConfig, layout: KVLayout) -> TieringOffloadingManager:
    """Open the tiers for an engine; blocks until every page of the slots is there, so that no request waits for the kernel.

    That takes a fraction of a second a GiB. The slots can be mapped by workers in other processes. Raises ``ConfigError``.
    """
    manager = TieringOffloadingManager(config, layout, shared_arena=True)
    run_blocking(manager.open())
    try:
        manager.organs.arena.prefault()
    except BaseException:
        manager.sync.close()
        raise
    return manager


def reset(manager: TieringOffloadingManager) -> None:
    """Every tier misses from now on; blocks for as long as ``manager.reset`` does.

    vLLM says that its caches must go, and not which weights it has now. So the epoch gets a name that was never used and
    never will be: no block of other weights, of this process or of an earlier one, can be found under it.
    """
    base = manager.epoch.split("+", 1)[0]
    run_blocking(manager.reset(f"{base}+{uuid.uuid4().hex}"))
