"""A kvtiering tier in a directory: one sealed file a block, shared by every process that names the directory."""

from __future__ import annotations

import asyncio
import errno
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from tiering.api import (
    HEADER_BYTES,
    Backend,
    BackendCapabilities,
    BackendConfig,
    BackendError,
    BlockKey,
    ClosedError,
    ConfigError,
    Namespace,
    Outcome,
    run_blocking,
    seal,
    verify,
)

FULL = (errno.ENOSPC, errno.EDQUOT)
ABANDONED_S = 3600.0
"""A part of a block that is older than this was left by a process that was killed."""


class ExampleConfig(BackendConfig):
    """``{type: example, path: ./blocks}``. The fields below are keys of the tier in the YAML."""

    backend: ClassVar[str] = "kvtiering_example:ExampleBackend"
    # Imported whenever a configuration names this type: a client library is imported in `open` instead.

    type: Literal["example"] = "example"
    path: Path


class ExampleBackend(Backend):
    """``path/<namespace>/<key>`` is a header, which proves whose block it is, and the payload."""

    directory: Path
    namespace: Namespace

    def __init__(self, config: ExampleConfig) -> None:
        self.config = config
        self.tier = config.name or config.type
        # Shared: lookups ask each time, and nobody counts bytes. The guide tells what an exclusive tier has to add.
        self.capabilities = BackendCapabilities(persistent=True, shared=True, exclusive=False)
        self.calls = 0
        self.closed = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def open(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.directory = self.config.path / namespace.digest.hex()
        try:
            await run_blocking(self._prepare)
        except OSError as error:
            raise ConfigError(f"tier {self.tier!r}: {error}; name a directory that you may write to") from error

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self._call("contains", self._contains, keys)

    async def load(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call("load", self._load, items)

    async def store(self, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        return await self._call("store", self._store, items)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._call("delete", self._delete, keys)

    async def aclose(self, deadline_s: float) -> None:
        self.closed = True
        try:
            async with asyncio.timeout(deadline_s):
                await self.idle.wait()
        except TimeoutError:
            message = f"{self.calls} calls still run after {deadline_s} s"
            raise BackendError(message, tier=self.tier, op="aclose") from None

    async def _call(self, op: str, one: Callable[[Any], Outcome], items: Sequence[object]) -> list[Outcome]:
        if self.closed:
            raise ClosedError(f"{self.tier}: {op} after aclose")
        self.calls += 1
        self.idle.clear()
        try:
            # The loop's own threads: a bounded number of them, and cancellation waits for the one that has the buffers.
            return await run_blocking(_each, one, items)
        finally:
            self.calls -= 1
            if not self.calls:
                self.idle.set()

    # What follows runs in a thread, for one block at a time. `OSError` becomes that block's outcome.

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for part in self.directory.glob(".*"):
            if part.stat().st_mtime < time.time() - ABANDONED_S:
                part.unlink(missing_ok=True)

    def _file(self, key: bytes) -> Path:
        return self.directory / key.hex()

    def _contains(self, key: BlockKey) -> Outcome:
        return Outcome.OK if self._file(key).exists() else Outcome.MISSING

    def _load(self, item: tuple[BlockKey, memoryview]) -> Outcome:
        key, dest = item
        try:
            with self._file(key).open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                whole = file.readinto(dest) == dest.nbytes and not file.read(1)
        except FileNotFoundError:
            return Outcome.MISSING
        outcome = verify(self.namespace, key, header, dest) if whole else Outcome.corrupt("the file has another length")
        if not outcome.ok:
            self._file(key).unlink(missing_ok=True)
        return outcome

    def _store(self, item: tuple[BlockKey, memoryview]) -> Outcome:
        key, src = item
        if src.nbytes not in self.namespace.payload_bytes:
            return Outcome.failed(f"no block of this namespace has {src.nbytes} bytes")
        part = self.directory / f".{uuid.uuid4().hex}"
        try:
            with part.open("xb") as file:
                file.write(seal(self.namespace, key, src))
                file.write(src)
            part.replace(self._file(key))  # whole, or not at all, for every reader
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return Outcome.OK

    def _delete(self, key: bytes) -> Outcome:
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            return Outcome.MISSING
        return Outcome.OK


def _each(one: Callable[[Any], Outcome], items: Sequence[object]) -> list[Outcome]:
    outcomes = []
    for item in items:
        try:
            outcomes.append(one(item))
        except OSError as error:
            full = error.errno in FULL
            outcomes.append(Outcome.refused(str(error)) if full else Outcome.failed(str(error), retryable=True))
    return outcomes
