"""The NVMe tier: blocks in preallocated slots of segment files, moved by direct I/O from and to the caller's buffers.

State changes on the I/O loop alone and threads move bytes, so nothing here needs a lock. Each call runs as a task of its
own that a cancelled caller waits for: what it has begun it also accounts for.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from backends.nvme.blocks import Blocks
from backends.nvme.config import NvmeConfig
from backends.nvme.directory import lock_directory, prepare, unlock
from backends.nvme.fileio import FileIO
from backends.nvme.inspect import inspect_directory
from backends.nvme.limits import PAGE_BYTES, Limits, round_up
from backends.nvme.transfer import Batch
from tiering.api import (
    Backend,
    BackendCapabilities,
    BackendError,
    BlockKey,
    ClosedError,
    ConfigError,
    InspectedBlock,
    Namespace,
    Outcome,
    ScanEntry,
    Usage,
    run_blocking,
)

T = TypeVar("T")

_FOR_THE_OPERATOR = (errno.EACCES, errno.EPERM, errno.EROFS)

QUICK_THREADS = 2
"""Beside the configured ones, for short calls that blocks wait for: one may log while the other allocates."""


class NvmeBackend(Backend):
    """Exclusive and persistent. ``sum(stored_bytes) + overhead_bytes <= capacity`` is the caller's part of the bargain;
    that the owner's directory never occupies more than ``capacity`` is this one's, and it holds without the first.

    ``io`` is for tests that make system calls fail.
    """

    def __init__(self, config: NvmeConfig, *, io: FileIO | None = None) -> None:
        self.config = config
        self._limits = Limits.of(config.capacity_bytes)
        self.capabilities = BackendCapabilities(
            persistent=True,
            shared=False,
            exclusive=True,
            alignment_bytes=PAGE_BYTES,
            header_bytes=PAGE_BYTES,
            overhead_bytes=self._limits.overhead_bytes,
            can_scan=True,
        )
        self._tier = config.name or config.type
        self._io = io
        self._blocks: Blocks | None = None
        self._executors: list[ThreadPoolExecutor] = []
        self._lock_fd = -1
        self._begun = False
        self._closed = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._upkeep: asyncio.Task[None] | None = None
        self._last_counters: dict[str, int] = {}
        self._found: dict[str, int] = {}
        """What recovery counted."""

    # Life.

    async def open(self, namespace: Namespace) -> None:
        if self._closed:
            raise ClosedError(f"{self._tier}: open after aclose; make a new backend")
        if self._begun:
            raise BackendError("open was called a second time; make a new backend", tier=self._tier, op="open")
        self._begun = True
        self._require_room(namespace)
        await self._finished(self._spawn(self._open(namespace), "open"))

    async def aclose(self, deadline_s: float) -> None:
        self._closed = True
        deadline = asyncio.get_running_loop().time() + deadline_s
        await self._drain(deadline)
        if self._blocks is not None:
            self._spawn(self._blocks.finish(), "finish")
            await self._drain(deadline)
        self._last_counters = self.counters()
        self._release()

    def _require_room(self, namespace: Namespace) -> None:
        largest = PAGE_BYTES + round_up(max(namespace.payload_bytes), PAGE_BYTES)
        if largest > self._limits.data_bytes_max:
            raise ConfigError(
                f"{self._tier}.capacity: {self._limits.capacity_bytes} bytes, of which the index may need"
                f" {self._limits.overhead_bytes}, hold no block of {largest} bytes; raise `capacity:`"
            )

    async def _open(self, namespace: Namespace) -> None:
        self._io = self._io or FileIO()
        executor = ThreadPoolExecutor(self.config.threads, thread_name_prefix=f"{self._tier}-nvme")
        quick_executor = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix=f"{self._tier}-nvme-quick")
        self._executors = [executor, quick_executor]
        try:
            self._lock_fd = await run_blocking(lambda: lock_directory(self.config, make=True), executor=executor)
            found = await prepare(self.config, self._limits, namespace, self._io, executor)
            self._blocks = Blocks(namespace, self.config, self._limits, found, self._io, executor, quick_executor)
            self._found = {
                "torn_records": found.torn_records,
                "lost_blocks": found.lost_blocks,
                "header_scans": found.header_scans,
            }
            await self._blocks.start(found)
        except OSError as error:
            self._release()
            where = f"{error.filename or self.root}: {error.strerror}"
            if error.errno in _FOR_THE_OPERATOR:
                raise ConfigError(f"path: {where}; give this user the right to read and write it") from error
            raise BackendError(where, tier=self._tier, op="open", retryable=True) from error
        except BaseException:
            self._release()
            raise

    async def _drain(self, deadline: float) -> None:
        """Wait for the calls in flight. Raises ``BackendError`` past the deadline; everything stays open then."""
        while self._calls:
            left_s = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(self._calls, timeout=max(0.0, left_s))
            if not done and left_s <= 0:
                raise BackendError(f"{len(self._calls)} calls outlast the deadline", tier=self._tier, op="aclose")

    def _release(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        for executor in self._executors:
            executor.shutdown()  # idle: every call was waited for
        self._executors = []
        if self._lock_fd >= 0:
            unlock(self._lock_fd)
            self._lock_fd = -1

    # Blocks.

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._require("contains").contains(keys)

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call("load", lambda blocks, batch: blocks.load(batch, items))

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call("store", lambda blocks, batch: blocks.store(batch, items))

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._call("delete", lambda blocks, _: blocks.delete(keys))

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        async for part in self._require("scan").scan():
            yield part
            self._require("scan")

    async def usage(self) -> Usage:
        """``allocated_bytes`` is what the filesystem says of the owner's directory, not what we believe.

        Waits for upkeep, so that it stays true until the next call.
        """

        async def measure(blocks: Blocks, _: Batch) -> Usage:
            while upkeep := self._due_upkeep(blocks):
                await asyncio.wait((upkeep,))
                upkeep.result()
            allocated_bytes = await run_blocking(_allocated_bytes, self.root, executor=blocks.quick_executor)
            return Usage(allocated_bytes, blocks.index.live_bytes)

        return await self._call("usage", measure)

    def link(self, parents: Mapping[BlockKey, BlockKey]) -> None:
        self._require("link").link(parents)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._require("touch").touch(keys)

    # For people and benchmarks.

    @property
    def root(self) -> Path:
        """The owner's directory."""
        return self.config.path / self.config.owner

    @property
    def o_direct(self) -> bool:
        """Whether blocks bypass the page cache: as configured, until the filesystem refuses."""
        return self._blocks.transfer.o_direct if self._blocks else self.config.o_direct

    def counters(self) -> dict[str, int]:
        """Since ``open``: blocks by outcome (``load_ok``, ``store_refused``, ...) and what happened to the directory."""
        blocks = self._blocks
        if blocks is None:
            return dict(self._last_counters)
        return {
            **blocks.counters,
            **self._found,
            "corrupt": blocks.counters["load_corrupt"],
            "buffered_fallbacks": blocks.transfer.fallbacks,
            "compactions": blocks.journal.compactions,
            "failed_compactions": blocks.journal.failed_compactions,
            "grown_bytes": blocks.space.counters.grown_bytes,
            "reclaimed_bytes": blocks.space.counters.reclaimed_bytes,
        }

    def inspect(self, *, verify: bool) -> AsyncGenerator[list[InspectedBlock], None]:
        """Every block, least recently used first. Only without ``open``: an open one holds the directory's lock."""
        return inspect_directory(self.config, verify_blocks=verify)

    # Calls.

    def _require(self, op: str) -> Blocks:
        if self._closed:
            raise ClosedError(f"{self._tier}: {op} after aclose")
        if self._blocks is None:
            raise BackendError(f"{op} before open", tier=self._tier, op=op)
        return self._blocks

    async def _call(self, op: str, work: Callable[[Blocks, Batch], Coroutine[Any, Any, T]]) -> T:
        blocks = self._require(op)
        batch = Batch()
        try:
            result = await self._finished(self._spawn(work(blocks, batch), op), batch)
        except OSError as error:
            raise BackendError(str(error), tier=self._tier, op=op, retryable=True) from error
        self._due_upkeep(blocks)
        return result

    def _due_upkeep(self, blocks: Blocks) -> asyncio.Task[None] | None:
        """The upkeep under way, begun if it is due."""
        if self._upkeep is not None and self._upkeep.done():
            self._upkeep = None
        if self._upkeep is None and blocks.upkeep_due and not self._closed:
            self._upkeep = self._spawn(blocks.keep_up(), "upkeep")
        return self._upkeep

    def _spawn(self, work: Coroutine[Any, Any, T], op: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"{self._tier}-{op}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _finished(self, task: asyncio.Task[T], batch: Batch | None = None) -> T:
        """The task's result, however often this is cancelled meanwhile: its threads use the caller's buffers."""
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            if batch is not None:
                batch.cancelled = True
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError:
                    continue
            if not task.cancelled():
                task.exception()  # nobody is left to hear of it
            raise
        return task.result()


def _allocated_bytes(root: Path) -> int:
    total = root.stat().st_blocks
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    continue  # renamed or removed meanwhile
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return total * 512
