"""The fsspec tier: its life, and its calls. How blocks move is in ``remote`` (async clients) and ``threads`` (the rest)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final

from backends.fsspec.config import S3_SCHEMES, FsspecConfig
from backends.fsspec.filesystems import S3_OBJECT_BYTES_MAX, Blocks, find_blocks, open_blocks
from tiering.api import (
    HEADER_BYTES,
    Backend,
    BackendCapabilities,
    BackendError,
    BlockKey,
    ClosedError,
    ConfigError,
    Namespace,
    Outcome,
)

THREADS_MAX: Final = 16
"""For copies, and for filesystems that block. Started as they are needed."""

CLOSE_GRACE_S: Final = 0.5
"""Of a close's deadline: for requests that were given up, and to close their connections."""

UNWIND_S: Final = 0.05
"""What requests that were given up get to unwind, however short the deadline."""


class FsspecBackend(Backend):
    """Shared; persistent unless it is ``memory://``. Blocks are whole objects, replaced at once and never seen in part.

    A lookup asks for each key, so its answer is as fresh as the medium's. Nothing bounds the bytes from here.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.config = config
        on_s3 = config.scheme in S3_SCHEMES
        self.capabilities = BackendCapabilities(
            persistent=config.scheme != "memory",
            shared=True,
            exclusive=False,
            value_bytes_max=S3_OBJECT_BYTES_MAX - HEADER_BYTES if on_s3 else None,
        )
        self._tier = config.name or config.type
        self._blocks: Blocks | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._begun = False
        self._opened = False
        self._closed = False
        self._closing = asyncio.Lock()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self, namespace: Namespace) -> None:
        if self._closed:
            raise ClosedError(f"{self._tier}: open after aclose; make a new backend")
        if self._begun:
            raise BackendError("open was called a second time; make a new backend", tier=self._tier, op="open")
        self._begun = True
        largest, limit = max(namespace.payload_bytes), self.capabilities.value_bytes_max
        if limit is not None and largest > limit:
            raise ConfigError(f"{self._tier}: a block of {largest} bytes is above the limit of {limit} bytes an object")
        with self._counted():
            try:
                threads = min(self.config.requests_max, THREADS_MAX)
                self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"{self._tier}-fsspec")
                self._blocks = await find_blocks(self.config, namespace, self._tier, self._executor)
                await open_blocks(self._blocks, self.config, self._executor)
            except BaseException as error:
                with suppress(BackendError):  # what went wrong first is what counts
                    await self._release()
                if isinstance(error, BackendError):
                    raise BackendError(str(error), tier=self._tier, op="open", retryable=error.retryable) from None
                raise
        self._opened = True

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._call("contains") as blocks:
            return await blocks.contains(keys)

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        with self._call("load") as blocks:
            return await blocks.load(items)

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        with self._call("store") as blocks:
            return await blocks.store(items)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        with self._call("delete") as blocks:
            return await blocks.delete(keys)

    async def aclose(self, deadline_s: float) -> None:
        """Requests that outlast the deadline are given up and their blocks FAILED; only threads can outlast it."""
        self._closed = True
        grace_s = min(CLOSE_GRACE_S, deadline_s / 2)
        if not await self._idle_within(deadline_s - grace_s):
            if self._blocks is not None:
                self._blocks.abort()
            if not await self._idle_within(max(grace_s, UNWIND_S)):
                raise BackendError(
                    f"{self._calls} calls still run {deadline_s:g} s after the close began",
                    tier=self._tier,
                    op="aclose",
                )
        async with self._closing:
            await self._release()

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _release(self) -> None:
        """Nothing is under way. What a client does not close in time, it closes with its last reference."""
        blocks, self._blocks = self._blocks, None
        try:
            if blocks is not None:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await blocks.aclose()
        except TimeoutError:
            raise BackendError("the client does not close its connections", tier=self._tier, op="aclose") from None
        finally:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()

    @contextmanager
    def _call(self, op: str) -> Iterator[Blocks]:
        if self._closed:
            raise ClosedError(f"{self._tier}: {op} after aclose")
        if self._blocks is None or not self._opened:
            raise BackendError(f"{op} before open", tier=self._tier, op=op)
        with self._counted():
            yield self._blocks

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a call, so that ``aclose`` can wait for it."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
