"""Broken backends, the second half: rules 6 to 10 and what the capabilities promise."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.memory import MemoryBackend, MemoryConfig, StoredBlock
from tests.testing.broken_values import Plain
from tests.testing.directory_backend import DirectoryBackend
from tiering.api import (
    HEADER_BYTES,
    BackendCapabilities,
    BackendError,
    BlockKey,
    Namespace,
    Outcome,
    OutcomeCode,
    ScanEntry,
    Usage,
    seal,
)

Items = Sequence[tuple[BlockKey, memoryview]]


# Rule 6


class PublishesParts(DirectoryBackend):
    def publish(self, target: Path, header: bytes, src: memoryview) -> None:
        with target.open("wb") as file:
            file.write(header)
            file.write(src[: src.nbytes // 2])
            file.flush()
            # A device takes as long for a block of some megabytes.
            time.sleep(0.002)
            file.write(src[src.nbytes // 2 :])


class UsesOneTemporaryName(DirectoryBackend):
    """row 22"""

    def publish(self, target: Path, header: bytes, src: memoryview) -> None:
        temporary = self.path / f".{target.name}"
        with temporary.open("xb") as file:
            file.write(header)
            file.write(src)
        temporary.replace(target)


class RefusesWhatItHas(Plain):
    async def store(self, items: Items) -> list[Outcome]:
        has = await self.contains([key for key, _ in items])
        outcomes = await super().store(items)
        return [Outcome.refused("exists") if h.ok else o for h, o in zip(has, outcomes, strict=True)]


class ClaimsWhatItCouldNotWrite(DirectoryBackend):
    """Says yes, has not: the error of the medium is swallowed."""

    def write(self, key: BlockKey, src: memoryview) -> Outcome:
        outcome = super().write(key, src)
        return Outcome.OK if outcome.code is OutcomeCode.FAILED else outcome


class LosesItsBlocksWhenKilled(Plain):
    """Says that it is persistent, and keeps all in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = replace(self.capabilities, persistent=True)


# Rule 7


class Slow(Plain):
    """Copies in a thread, slowly, as a device does."""

    def copy_out(self, items: Items) -> None:
        for key, dest in items:
            block = self.blocks.get(key)
            time.sleep(0.01)
            if block is not None and block.payload.nbytes == dest.nbytes:
                np.copyto(np.frombuffer(dest, np.uint8), block.payload)

    def copy_in(self, items: Items) -> None:
        for key, src in items:
            time.sleep(0.01)
            payload = np.frombuffer(src, np.uint8).copy()
            self.blocks[key] = StoredBlock(seal(self.namespace, key, payload.data), payload, HEADER_BYTES + src.nbytes)


class LoadsInAnAbandonedThread(Slow):
    async def load(self, items: Items) -> list[Outcome]:
        await asyncio.to_thread(self.copy_out, items)
        return await super().load(items)


class StoresInAnAbandonedThread(Slow):
    async def store(self, items: Items) -> list[Outcome]:
        await asyncio.to_thread(self.copy_in, items)
        return await super().store(items)


class YieldsToTheSecondCancellation(Slow):
    async def load(self, items: Items) -> list[Outcome]:
        copying = asyncio.get_running_loop().run_in_executor(None, self.copy_out, items)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait((copying,))
            raise
        return await super().load(items)


class BreaksOnACancelledLookup(Plain):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.connections = 2

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        if not self.connections:
            raise BackendError("the connection pool is empty")
        self.connections -= 1
        await asyncio.sleep(0)
        self.connections += 1
        return await super().contains(keys)


# Rule 8


class OneCallAtATime(Plain):
    busy = False

    async def load(self, items: Items) -> list[Outcome]:
        if self.busy:
            raise BackendError("another call uses the connection", retryable=True)
        self.busy = True
        try:
            await asyncio.sleep(0)
            return await super().load(items)
        finally:
            self.busy = False


class FailsDeletesDuringLoads(DirectoryBackend):
    """As a file system that locks what is open."""

    reading = 0

    async def load(self, items: Items) -> list[Outcome]:
        self.reading += 1
        try:
            return await super().load(items)
        finally:
            self.reading -= 1

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        if self.reading and keys:
            return [Outcome.failed("the file is in use", retryable=True)] * len(keys)
        return await super().delete(keys)


class MissesWhatIsSlow(DirectoryBackend):
    """Its own deadline, though deadlines are the driver's, and a lie about the reason."""

    async def load(self, items: Items) -> list[Outcome]:
        try:
            async with asyncio.timeout(0.003):
                return await super().load(items)
        except TimeoutError:
            return [Outcome.MISSING] * len(items)


class CrossesItsWires(DirectoryBackend):
    """Replies go to whoever waits longest, as over a connection whose replies carry no name: a neighbour's bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.waiting: list[list[BlockKey]] = []

    async def load(self, items: Items) -> list[Outcome]:
        keys = [key for key, _ in items]
        self.waiting.append(keys)
        try:
            first = self.waiting[0] if len(self.waiting[0]) == len(keys) else keys
            return await super().load([(key, dest) for key, (_, dest) in zip(first, items, strict=True)])
        finally:
            self.waiting.remove(keys)


class OneThreadACall(Plain):
    async def load(self, items: Items) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        ready, done = asyncio.Event(), threading.Event()

        def run() -> None:
            loop.call_soon_threadsafe(ready.set)
            done.wait()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            await ready.wait()
            # Long enough that the calls meet; they are many.
            await asyncio.sleep(0.02)
            return await super().load(items)
        finally:
            done.set()
            thread.join()


# Rule 9


class ClosesOnce(Plain):
    was_closed = False

    async def aclose(self, deadline_s: float) -> None:
        if self.was_closed:
            raise BackendError("closed already")
        self.was_closed = True
        await super().aclose(deadline_s)


class ServesWhenClosed(Plain):
    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.OK if key in self.blocks else Outcome.MISSING for key in keys]


class ClosesWithoutWaiting(Slow):
    async def load(self, items: Items) -> list[Outcome]:
        await asyncio.shield(asyncio.to_thread(self.copy_out, items))
        return [Outcome.OK if key in self.blocks else Outcome.MISSING for key, _ in items]


class IgnoresItsDeadline(DirectoryBackend):
    async def aclose(self, deadline_s: float) -> None:
        await super().aclose(3600)


class LeavesWhatRuns(DirectoryBackend):
    async def aclose(self, deadline_s: float) -> None:
        self.closed = True


class ReleasesInDel(Plain):
    def __del__(self) -> None:
        self.blocks.clear()


class NeedsAnOpenToClose(Plain):
    async def aclose(self, deadline_s: float) -> None:
        if not hasattr(self, "namespace"):
            raise AttributeError("'NoneType' object has no attribute 'disconnect'")
        await super().aclose(deadline_s)


# Rule 10


class LogsEachBlock(Plain):
    async def store(self, items: Items) -> list[Outcome]:
        for key, _ in items:
            logging.getLogger("broken").info("stored %s", key.hex())
        return await super().store(items)


class Leaking(Plain):
    """What leaks is recorded, so that the test can end it."""

    leaks: list[Any] = []  # noqa: RUF012 - shared by the instances on purpose


class LeavesAThread(Leaking):
    async def open(self, namespace: Namespace) -> None:
        await super().open(namespace)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="flusher")
        thread.start()
        self.leaks.append((stop, thread))


class StartsAThreadWhenConstructed(Leaking):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="flusher")
        thread.start()
        self.leaks.append((stop, thread))


class LeavesATask(Plain):
    async def open(self, namespace: Namespace) -> None:
        await super().open(namespace)
        self.ticking = asyncio.create_task(asyncio.sleep(3600), name="ticker")


class LeavesAFile(Leaking):
    async def open(self, namespace: Namespace) -> None:
        await super().open(namespace)
        self.leaks.append(os.open("/dev/null", os.O_RDONLY))


# Capabilities


class CountsPayloadsTwice(Plain):
    async def usage(self) -> Usage:
        usage = await super().usage()
        return Usage(usage.allocated_bytes * 2, usage.live_bytes * 2)


class CountsEachStore(Plain):
    """Accounting that grows with every store of a block it has."""

    stored_bytes = 0

    async def store(self, items: Items) -> list[Outcome]:
        self.stored_bytes += sum(self.capabilities.stored_bytes(src.nbytes) for _, src in items)
        return await super().store(items)

    async def usage(self) -> Usage:
        await super().usage()
        return Usage(self.stored_bytes, self.stored_bytes)


class TakesAnySize(Plain):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = replace(self.capabilities, value_bytes_max=1 << 20)


class OddlyAligned(Plain):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = BackendCapabilities(persistent=False, shared=False, exclusive=True, alignment_bytes=1000)


class NeverDeletes(Plain):
    """Exclusive all the same."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = replace(self.capabilities, can_delete=False)


class CannotTellWhatItHolds(DirectoryBackend):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = replace(self.capabilities, can_scan=False)


class ScansNothing(DirectoryBackend):
    def entries(self) -> list[ScanEntry]:
        return []


class ScansInAnyOrder(DirectoryBackend):
    def entries(self) -> list[ScanEntry]:
        return super().entries()[::-1]


class ScansForeignBlocksAsItsOwn(DirectoryBackend):
    def entry(self, file: Path, size: int) -> ScanEntry:
        return ScanEntry(bytes.fromhex(file.name.partition("-")[2]), size)


class SharesWithNobody(MemoryBackend):
    def __init__(self, path: Path) -> None:
        super().__init__(MemoryConfig(capacity_bytes=128 << 20))
        self.capabilities = replace(self.capabilities, shared=True, exclusive=False)


class WipesAtOpen(DirectoryBackend):
    """A second owner is not refused and empties the first one's directory."""

    def prepare(self) -> None:
        super().prepare()
        for file in self.path.iterdir():
            file.unlink()
