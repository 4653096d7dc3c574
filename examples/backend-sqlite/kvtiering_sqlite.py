"""A kvtiering tier in one SQLite file: one sealed row a block; persistent, exclusive, bounded by ``capacity``."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from tiering import api
from tiering.api import BlockKey, Outcome, ScanEntry

T = TypeVar("T")
Item = tuple[BlockKey, memoryview]
HANDLE_BYTES = 40  # A foreign block is named by its row number in so many bytes; keys have at most 36.
SETUP = """
    PRAGMA locking_mode = EXCLUSIVE;  -- a second owner is refused, and a killed one leaves no lock
    PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;
    CREATE TABLE IF NOT EXISTS blocks (id INTEGER PRIMARY KEY, namespace, key, header, payload, UNIQUE (namespace, key));
"""


class SqliteConfig(api.BackendConfig):
    """``{type: sqlite, path: kv.db, capacity: 10GiB}``: the manager keeps the blocks within it; pages come on top."""

    backend: ClassVar[str] = "kvtiering_sqlite:SqliteBackend"
    type: Literal["sqlite"] = "sqlite"
    path: Path


class SqliteBackend(api.Backend):
    """One connection, used by one call at a time. A store is one statement, which SQLite does wholly or not at all."""

    namespace: api.Namespace
    connection: sqlite3.Connection | None = None

    def __init__(self, config: SqliteConfig) -> None:
        self.config = config
        self.tier = config.name or config.type
        self.capabilities = api.BackendCapabilities(persistent=True, shared=False, exclusive=True, can_scan=True)
        self.closed = False
        self.lock = asyncio.Lock()  # Of the connection. It is fair: aclose gets it after every call that came before.

    async def open(self, namespace: api.Namespace) -> None:
        self.namespace = namespace
        await self._call("open", self._connect)

    async def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await self._call("contains", self._each, self._contains, keys)

    async def load(self, items: Sequence[Item]) -> list[Outcome]:
        return await self._call("load", self._each, self._load, items)

    async def store(self, items: Sequence[Item]) -> list[Outcome]:
        return await self._call("store", self._each, self._store, items)

    async def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        return await self._call("delete", self._each, self._delete, keys)

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        yield await self._call("scan", self._entries)

    async def usage(self) -> api.Usage:
        return await self._call("usage", self._usage)

    async def aclose(self, deadline_s: float) -> None:
        self.closed = True
        try:
            async with asyncio.timeout(deadline_s), self.lock:
                if self.connection is not None:
                    await api.run_blocking(self.connection.close)
        except TimeoutError:
            raise api.BackendError(f"a call still runs after {deadline_s} s", tier=self.tier, op="aclose") from None

    async def _call(self, op: str, fn: Callable[..., T], *args: object) -> T:
        if self.closed:
            raise api.ClosedError(f"{self.tier}: {op} after aclose")
        async with self.lock:
            try:
                return await api.run_blocking(fn, *args)
            except sqlite3.Error as error:
                raise api.BackendError(str(error), tier=self.tier, op=op, retryable=True) from error

    # What follows runs in a thread, with the lock held.

    def _connect(self) -> None:
        path = self.config.path
        try:
            self.connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self.connection.executescript(SETUP)
        except sqlite3.Error as error:
            raise api.ConfigError(f"{path}: {error}; name a writable file that nobody else has open") from error

    def _sql(self, sql: str, *values: object) -> sqlite3.Cursor:
        assert self.connection is not None, "called before open"
        return self.connection.execute(sql, values)

    def _each(self, one: Callable[[Any], Outcome], items: Sequence[object]) -> list[Outcome]:
        outcomes = []
        for item in items:
            try:
                outcomes.append(one(item))
            except sqlite3.Error as error:
                full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
                outcomes.append(Outcome.refused(str(error)) if full else Outcome.failed(str(error), retryable=True))
        return outcomes

    def _contains(self, key: BlockKey) -> Outcome:
        row = self._sql("SELECT 1 FROM blocks WHERE namespace = ? AND key = ?", self.namespace.digest, key).fetchone()
        return Outcome.OK if row else Outcome.MISSING

    def _load(self, item: Item) -> Outcome:
        key, dest = item
        sql = "SELECT header, payload FROM blocks WHERE namespace = ? AND key = ?"
        if (row := self._sql(sql, self.namespace.digest, key).fetchone()) is None:
            return Outcome.MISSING
        outcome = Outcome.corrupt(f"{len(row[1])} bytes are stored, the block has {dest.nbytes}")
        if len(row[1]) == dest.nbytes:
            dest[:] = row[1]
            outcome = api.verify(self.namespace, key, row[0], dest)
        if not outcome.ok:
            self._delete(key)
        return outcome

    def _store(self, item: Item) -> Outcome:
        key, src = item
        if src.nbytes not in self.namespace.payload_bytes:
            return Outcome.failed(f"no block of this namespace has {src.nbytes} bytes")
        sql = "INSERT OR REPLACE INTO blocks (namespace, key, header, payload) VALUES (?, ?, ?, ?)"
        self._sql(sql, self.namespace.digest, key, api.seal(self.namespace, key, src), src)
        return Outcome.OK

    def _delete(self, key: bytes) -> Outcome:
        row_id = int.from_bytes(key) if len(key) == HANDLE_BYTES else -1
        sql = "DELETE FROM blocks WHERE id = ? OR namespace = ? AND key = ?"
        return Outcome.OK if self._sql(sql, row_id, self.namespace.digest, key).rowcount else Outcome.MISSING

    def _entries(self) -> list[ScanEntry]:
        sql = "SELECT id, key, length(header) + length(payload), namespace != ? FROM blocks ORDER BY id"
        return [
            ScanEntry(row_id.to_bytes(HANDLE_BYTES) if foreign else key, stored_bytes, foreign=bool(foreign))
            for row_id, key, stored_bytes, foreign in self._sql(sql, self.namespace.digest)
        ]

    def _usage(self) -> api.Usage:
        live = "SELECT coalesce(sum(length(header) + length(payload)), 0) FROM blocks"
        sql = f"SELECT page_count * page_size, ({live}) FROM pragma_page_count, pragma_page_size"
        return api.Usage(*self._sql(sql).fetchone())
