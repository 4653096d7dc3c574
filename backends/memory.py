"""A tier in the process's own memory: for tests, for demos, and as the shortest complete backend to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tiering.api import (
    Backend,
    BackendCapabilities,
    BackendConfig,
    BackendError,
    BlockKey,
    ByteCount,
    ClosedError,
    Namespace,
    Outcome,
    ScanEntry,
    Usage,
    run_blocking,
    seal,
    verify,
)

T = TypeVar("T")

INLINE_BYTES_MAX = 64 << 10
"""A batch up to this size is copied on the loop: the copy takes less time than handing it to a thread."""

SCAN_BATCH_BLOCKS = 1024


class MemoryConfig(BackendConfig):
    """``{type: memory, capacity: 1GiB}``. ``capacity`` bounds the payloads and their headers, in bytes."""

    backend: ClassVar[str] = "backends.memory:MemoryBackend"

    type: Literal["memory"] = "memory"
    capacity_bytes: ByteCount = Field(alias="capacity", gt=0)


@dataclass(slots=True, eq=False)
class StoredBlock:
    """One sealed block. ``payload`` is a private uint8 array of the payload's length, filled before it is published."""

    header: bytes
    payload: npt.NDArray[np.uint8]
    stored_bytes: int
    """What the block counts for in ``capacity_bytes``, fixed when it is stored."""


class MemoryBackend(Backend):
    """Keeps sealed blocks in a dict, which empties at ``aclose``. Exclusive; a store without room is REFUSED.

    The dict changes on the loop alone. A batch above ``INLINE_BYTES_MAX`` is copied in one call of the loop's default
    executor, into arrays that no reader sees before they are whole.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.capabilities = BackendCapabilities(persistent=False, shared=False, exclusive=True, can_scan=True)
        self.blocks: dict[BlockKey, StoredBlock] = {}
        """The medium itself, public so that a test can damage it behind the backend's back."""
        self._tier = config.name or config.type
        self._namespace: Namespace | None = None
        self._live_bytes = 0
        self._reserved_bytes = 0
        """Room taken by copies under way. ``_live_bytes + _reserved_bytes`` never passes the capacity."""
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def open(self, namespace: Namespace) -> None:
        if self._closed:
            raise ClosedError(f"{self._tier}: open after aclose; make a new backend")
        if self._namespace is not None:
            raise BackendError("open was called a second time; make a new backend", tier=self._tier, op="open")
        self._namespace = namespace

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._call("contains"):
            return [Outcome.OK if key in self.blocks else Outcome.MISSING for key in keys]

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        with self._call("load") as namespace:
            outcomes = [Outcome.MISSING] * len(items)
            found = [
                (at, key, block, dest)
                for at, (key, dest) in enumerate(items)
                if (block := self.blocks.get(key)) is not None
            ]

            def copy_out() -> list[Outcome]:
                return [_copy_out(namespace, key, block, dest) for _, key, block, dest in found]

            verdicts = await _in_thread_if_large(copy_out, sum(dest.nbytes for *_, dest in found))
            for (at, key, block, _), verdict in zip(found, verdicts, strict=True):
                outcomes[at] = verdict
                # A newer store may have replaced the bad block meanwhile; that one stays.
                if not verdict.ok and self.blocks.get(key) is block:
                    self._drop(key)
            return outcomes

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        with self._call("store") as namespace:
            outcomes = [Outcome.OK] * len(items)
            planned: dict[tuple[BlockKey, int], memoryview] = {}
            room = self.config.capacity_bytes - self._live_bytes - self._reserved_bytes
            reserved_bytes = 0
            for at, (key, src) in enumerate(items):
                present = self.blocks.get(key)
                if (present and present.payload.nbytes == src.nbytes) or (key, src.nbytes) in planned:
                    continue
                stored_bytes = self.capabilities.stored_bytes(src.nbytes)
                if src.nbytes not in namespace.payload_bytes:
                    outcomes[at] = Outcome.failed(f"no block of this namespace has {src.nbytes} bytes")
                elif reserved_bytes + stored_bytes > room:
                    outcomes[at] = Outcome.refused(f"full: no room for {stored_bytes} bytes")
                else:
                    planned[key, src.nbytes] = src
                    reserved_bytes += stored_bytes

            def copy_in() -> list[StoredBlock]:
                return [self._copy_in(namespace, key, src) for (key, _), src in planned.items()]

            self._reserved_bytes += reserved_bytes
            try:
                copies = await _in_thread_if_large(copy_in, sum(src.nbytes for src in planned.values()))
            finally:
                self._reserved_bytes -= reserved_bytes
            for (key, _), block in zip(planned, copies, strict=True):
                self._drop(key)
                self.blocks[key] = block
                self._live_bytes += block.stored_bytes
            return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        with self._call("delete"):
            return [Outcome.OK if self._drop(key) else Outcome.MISSING for key in keys]

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        with self._call("scan"):
            entries = [ScanEntry(key, block.stored_bytes) for key, block in self.blocks.items()]
        for start in range(0, len(entries), SCAN_BATCH_BLOCKS):
            yield entries[start : start + SCAN_BATCH_BLOCKS]

    async def usage(self) -> Usage:
        with self._call("usage"):
            return Usage(self._live_bytes + self._reserved_bytes, self._live_bytes)

    async def aclose(self, deadline_s: float) -> None:
        self._closed = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            message = f"{self._calls} calls still run {deadline_s} s after the close began"
            raise BackendError(message, tier=self._tier, op="aclose") from None
        self.blocks.clear()
        self._live_bytes = 0

    @contextmanager
    def _call(self, op: str) -> Iterator[Namespace]:
        """Counts a call, so that ``aclose`` can wait for it."""
        if self._closed:
            raise ClosedError(f"{self._tier}: {op} after aclose")
        if self._namespace is None:
            raise BackendError(f"{op} before open", tier=self._tier, op=op)
        self._calls += 1
        self._idle.clear()
        try:
            yield self._namespace
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _drop(self, key: BlockKey) -> bool:
        block = self.blocks.pop(key, None)
        if block is not None:
            self._live_bytes -= block.stored_bytes
        return block is not None

    def _copy_in(self, namespace: Namespace, key: BlockKey, src: memoryview) -> StoredBlock:
        payload = np.empty(src.nbytes, np.uint8)
        np.copyto(payload, np.frombuffer(src, np.uint8))
        # Sealed from the copy: the header then vouches for the very bytes that are kept.
        return StoredBlock(seal(namespace, key, payload.data), payload, self.capabilities.stored_bytes(src.nbytes))


def _copy_out(namespace: Namespace, key: BlockKey, block: StoredBlock, dest: memoryview) -> Outcome:
    if block.payload.nbytes != dest.nbytes:
        return Outcome.corrupt(f"{block.payload.nbytes} bytes are stored; the block has {dest.nbytes}")
    np.copyto(np.frombuffer(dest, np.uint8), block.payload)
    return verify(namespace, key, block.header, dest)


async def _in_thread_if_large(fn: Callable[[], T], copied_bytes: int) -> T:
    return fn() if copied_bytes <= INLINE_BYTES_MAX else await run_blocking(fn)
