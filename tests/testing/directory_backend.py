"""A small, right, persistent backend on public names alone: a file a block, for the conformance kit to accept."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tiering.api import (
    HEADER_BYTES,
    Backend,
    BackendCapabilities,
    BackendError,
    BlockKey,
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
FOREIGN = b"foreign:"
Items = Sequence[tuple[BlockKey, memoryview]]


class DirectoryBackend(Backend):
    """``path/<namespace>-<key>`` holds header and payload; a unique temporary name and a rename make stores atomic."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.capabilities = BackendCapabilities(
            persistent=True,
            shared=shared,
            exclusive=not shared,
            alignment_bytes=512,
            header_bytes=HEADER_BYTES,
            can_scan=True,
        )
        self.namespace: Namespace | None = None
        self.in_flight = 0
        self.closed = False

    async def open(self, namespace: Namespace) -> None:
        self.namespace = namespace
        await run_blocking(self.prepare)

    def prepare(self) -> None:
        self.path.mkdir(exist_ok=True)
        if self.capabilities.exclusive:
            for leftover in self.path.glob(".*"):
                leftover.unlink(missing_ok=True)

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self.run(lambda: [Outcome.OK if self.file(key).exists() else Outcome.MISSING for key in keys])

    async def load(self, items: Items) -> list[Outcome]:
        return await self.run(lambda: [self.read(key, dest) for key, dest in items])

    async def store(self, items: Items) -> list[Outcome]:
        return await self.run(lambda: [self.write(key, src) for key, src in items])

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self.run(lambda: [self.unlink(key) for key in keys])

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        yield await self.run(self.entries)

    async def usage(self) -> Usage | None:
        live_bytes = sum(entry.stored_bytes for entry in await self.run(self.entries))
        return Usage(live_bytes, live_bytes)

    async def aclose(self, deadline_s: float) -> None:
        self.closed = True
        try:
            async with asyncio.timeout(deadline_s):
                while self.in_flight:  # noqa: ASYNC110 - short, and right
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise BackendError("calls still run", op="aclose") from None

    async def run(self, fn: Callable[[], T]) -> T:
        with self.call():
            return await run_blocking(fn)

    @contextmanager
    def call(self) -> Iterator[None]:
        if self.closed:
            raise ClosedError("closed")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def scope(self) -> Namespace:
        assert self.namespace is not None
        return self.namespace

    def file(self, key: bytes) -> Path:
        name = key.removeprefix(FOREIGN).decode() if len(key) > 36 else f"{self.scope().digest.hex()}-{key.hex()}"
        return self.path / name

    def payload(self, view: memoryview) -> memoryview:
        return view[: self.scope().payload_of(view.nbytes, self.capabilities.alignment_bytes)]

    def read(self, key: BlockKey, dest: memoryview) -> Outcome:
        try:
            raw = self.file(key).read_bytes()
        except FileNotFoundError:
            return Outcome.MISSING
        payload = self.payload(dest)
        if len(raw) != HEADER_BYTES + dest.nbytes:
            outcome = Outcome.corrupt(f"the file has {len(raw)} bytes")
        else:
            payload[:] = raw[HEADER_BYTES:][: payload.nbytes]
            outcome = verify(self.scope(), key, raw[:HEADER_BYTES], payload)
        if not outcome.ok:
            self.unlink(key)
        return outcome

    def write(self, key: BlockKey, src: memoryview) -> Outcome:
        try:
            payload = self.payload(src)
        except ValueError as error:
            return Outcome.refused(str(error))
        try:
            self.publish(self.file(key), seal(self.scope(), key, payload), src)
        except OSError as error:
            return Outcome.failed(str(error), retryable=True)
        return Outcome.OK

    def publish(self, target: Path, header: bytes, src: memoryview) -> None:
        temporary = self.path / f".{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                file.write(header)
                file.write(src)
        except OSError:
            temporary.unlink()
            raise
        used_ns = time.time_ns()
        os.utime(temporary, ns=(used_ns, used_ns))
        temporary.replace(target)

    def unlink(self, key: bytes) -> Outcome:
        try:
            self.file(key).unlink()
        except FileNotFoundError:
            return Outcome.MISSING
        return Outcome.OK

    def entries(self) -> list[ScanEntry]:
        found = []
        for file in self.path.glob("[!.]*"):
            try:
                found.append((file.stat().st_mtime_ns, file, file.stat().st_size))
            except FileNotFoundError:
                continue
        return [self.entry(file, size) for _, file, size in sorted(found)]

    def entry(self, file: Path, size: int) -> ScanEntry:
        digest, key = (bytes.fromhex(part) for part in file.name.split("-"))
        own = digest == self.scope().digest
        return ScanEntry(key if own else FOREIGN + file.name.encode(), size, foreign=not own)
