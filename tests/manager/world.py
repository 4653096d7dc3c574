"""A manager over real backends that go wrong on demand, and blocks whose bytes tell which key they belong to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pytest

from backends.memory import MemoryBackend, MemoryConfig
from tiering import KVLayout, TieringConfig, TieringOffloadingManager, block_keys
from tiering.api import BackendConfig
from tiering.build import COPY_THREADS
from tiering.core.invariants import check
from tiering.testing.faults import FaultPlan, FaultyBackend

BLOCK_BYTES = 4096
TOKENS = 4
LAYOUT = KVLayout.uniform(model="test", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)

PATIENCE_S = 20.0
"""Within it everything must have ended; nothing waits for it to pass."""

plans: dict[str, FaultPlan] = {}
made: dict[str, list[FaultyTier]] = {}
_labels = itertools.count()


class FaultyTier(FaultyBackend):
    """A memory tier under the plan that its configuration names."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(MemoryBackend(config), plans[config.label])
        if config.shared:
            # Others fill and empty it, too: the manager must ask, and nothing it was told stays true.
            self.capabilities = dataclasses.replace(self.capabilities, shared=True, exclusive=False)
        made.setdefault(config.label, []).append(self)


class FaultyConfig(MemoryConfig):
    backend: ClassVar[str] = "tests.manager.world:FaultyTier"
    type: Literal["faulty"] = "faulty"  # type: ignore[assignment]
    label: str
    shared: bool = False


def faulty(name: str, blocks: int = 64, **options: Any) -> tuple[FaultyConfig, FaultPlan]:
    """Configuration of a faulty tier with room for ``blocks`` blocks, and the plan that rules it."""
    label = f"{name}-{next(_labels)}"
    plans[label] = FaultPlan()
    return FaultyConfig(name=name, label=label, capacity_bytes=blocks * (BLOCK_BYTES + 128), **options), plans[label]


def backend_of(config: FaultyConfig) -> FaultyTier:
    """The backend in use (the newest) of a faulty tier."""
    return made[config.label][-1]


def config(slots: int, *tiers: BackendConfig | dict[str, Any], reserve: str = "0%", **sections: Any) -> TieringConfig:
    primary = {"capacity": slots * BLOCK_BYTES, "store_reserve": reserve, **sections.pop("primary", {})}
    return TieringConfig.from_dict({"primary": primary, "tiers": list(tiers), **sections})


def keys_of(n: int, salt: bytes = b"", layout: KVLayout = LAYOUT) -> list[bytes]:
    """A chain of ``n`` keys; another salt gives an unrelated chain."""
    return block_keys(list(range(n * layout.groups[0].tokens_per_block)), layout, salt=salt)


def content(key: bytes, size: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """The one right content of a key: derived from it by sha256 alone."""
    seed = int.from_bytes(hashlib.sha256(b"content" + key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def rows(keys: Sequence[bytes], size: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    return np.stack([content(key, size) for key in keys]) if keys else np.empty((0, size), np.uint8)


async def eventually(condition: Callable[[], Awaitable[bool]], limit_s: float = PATIENCE_S) -> None:
    """Let the loop turn until the condition holds: what runs in the background is waited for, not a time."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - it yields, it does not sleep
            await asyncio.sleep(0)


@contextlib.contextmanager
def busy_copies(manager: TieringOffloadingManager) -> Iterator[threading.Event]:
    """Both threads that copy are taken: a copy asked for in the block waits in their queue until the event is set."""
    go_on = threading.Event()
    started = [threading.Event() for _ in range(COPY_THREADS)]

    def block(begun: threading.Event) -> None:
        begun.set()
        go_on.wait(60)

    for begun in started:
        manager.parts.copies.submit(block, begun)
    assert all(begun.wait(20) for begun in started)
    try:
        yield go_on
    finally:
        go_on.set()


async def turns(n: int = 10) -> None:
    """Let the loop come round n times."""
    for _ in range(n):
        await asyncio.sleep(0)


def blank(n: int, size: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    return np.full((n, size), 0xEE, np.uint8)


def is_blank(out: npt.NDArray[np.uint8]) -> bool:
    return bool((out == 0xEE).all())


@contextlib.asynccontextmanager
async def opened(
    *args: Any, layout: Any = LAYOUT, clock: Any = None, **more: Any
) -> AsyncIterator[TieringOffloadingManager]:
    """A manager that must be clean when the test is done with it."""
    more.setdefault("flush_on_close", 0)
    async with TieringOffloadingManager(config(*args, **more), layout, clock=clock) as manager:
        yield manager
        await clean(manager)


async def clean(manager: TieringOffloadingManager) -> None:
    """Nothing is leased, filled or waited for, once what runs has landed."""

    async def landed() -> bool:
        stats = manager.stats()
        return not stats["open_ops"] and not stats["primary"]["busy_slots"]

    await eventually(landed)
    stats, parts = manager.stats(), manager.parts
    assert stats["open_loads"] == stats["open_stores"] == stats["holds"] == 0
    assert not stats["fused"]
    check(parts.core.world)
    assert (len(parts.loads), len(parts.flushes), len(parts.restore_due)) == (0, 0, 0)
    assert (len(parts.freed), len(parts.progress), parts.calls.count, parts.reads.count) == (0, 0, 0, 0)


async def ended(work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await work


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)


async def pushed_out(manager: TieringOffloadingManager, keys: list[bytes], slots: int) -> None:
    """``keys`` are in the tier behind, and the primary tier is full of others."""
    await manager.store(keys, rows(keys))
    await manager.flush()
    push = keys_of(slots, salt=b"push")
    await manager.store(push, rows(push))
    assert (await manager.flush()).lost == 0
