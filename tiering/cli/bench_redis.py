"""``tiering bench redis``: the redis backend, a raw socket, and the redis package on the same server, in one run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import redis.asyncio
import redis.exceptions
import xxhash

from tiering.cli import bench_servers
from tiering.cli.bench_remote import BLOCK_SIZES, OURS, Item, TierWay, Way, at_a_time, compare, keys_of, opened
from tiering.cli.bench_remote import show as show
from tiering.errors import BackendError, ConfigError

RAW: Final = "raw_socket"
SERVER_BYTES: Final = 2 << 30
PREFIX: Final = "kvtiering-bench"
TOTAL_BYTES = 64 << 20
"""Moved by each way in each run."""
CALLS: Final = 8
CALL_BLOCKS: Final = 8
"""Calls at a time and blocks in each: a tier's defaults."""
CLIENT_CONNECTIONS: Final = 8


def bench(url: str | None, pairs: int) -> dict[str, Any]:
    """Measure each block size on ``url`` (None: on a server started for the run), which is left without our keys.

    Raises ``ConfigError`` if there is no server to measure, ``BackendError`` if it fails.
    """
    with _server(url) as (place, shown):
        sizes = [asyncio.run(_bench_size(place, size, pairs)) for size in BLOCK_SIZES]
    return {
        "ok": True,
        "sizes": sizes,
        "server": shown,
        "pairs": pairs,
        "bytes_per_run": TOTAL_BYTES,
        "calls": CALLS,
        "call_blocks": CALL_BLOCKS,
    }


@contextmanager
def _server(url: str | None) -> Iterator[tuple[str, str]]:
    """Its URL, and how it may be shown: without a password."""
    if url is None:
        with bench_servers.valkey(SERVER_BYTES) as place:
            yield place, "a server of the run's own, on a unix socket"
        return
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "unix") or "," in parts.netloc:
        raise ConfigError("--url: give one server as redis://HOST:PORT/DB or unix://PATH; the raw socket speaks no TLS")
    yield url, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def _bench_size(url: str, block_bytes: int, pairs: int) -> dict[str, Any]:
    keys = keys_of(block_bytes, TOTAL_BYTES)
    tier = {"type": "redis", "url": url, "prefix": PREFIX}
    async with opened(tier, block_bytes, keys) as backend, _client(url) as client:
        raw = _Raw(await _raw_socket(client))
        try:
            ways: dict[str, Way] = {
                OURS: TierWay(backend, calls=CALLS, call_blocks=CALL_BLOCKS),
                RAW: raw,
                "raw_socket_checked": _Checked(raw),
                "redis_py": _RedisPy(client),
            }
            result = await compare(ways, RAW, keys, block_bytes, pairs)
        finally:
            raw.close()
        for key in keys:
            await client.unlink(_name(key))
    return result


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=CLIENT_CONNECTIONS)
    try:
        yield redis.asyncio.Redis(connection_pool=pool)
    except redis.exceptions.RedisError as error:
        raise BackendError(f"the redis package: {error}", op="bench") from error
    finally:
        await pool.disconnect()


async def _raw_socket(client: redis.asyncio.Redis) -> socket.socket:
    """A blocking socket to the client's server, authenticated in the same way."""
    given = client.connection_pool.connection_kwargs
    if path := given.get("path"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
    else:
        sock = socket.create_connection((given.get("host", "localhost"), given.get("port", 6379)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = []
    if given.get("password"):
        greeting.append([b"AUTH", *[given[name].encode() for name in ("username", "password") if given.get(name)]])
    if given.get("db"):
        greeting.append([b"SELECT", b"%d" % given["db"]])
    for words in greeting:
        sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        if sock.recv(5) != b"+OK\r\n":
            sock.close()
            raise BackendError(f"the server refused {words[0].decode()} on the raw socket", op="bench")
    return sock


def _name(key: bytes) -> bytes:
    return b"%b:raw:%b" % (PREFIX.encode(), key)


class _Raw:
    """One blocking socket, one command after the other, into and from the caller's buffers; nothing is checked.

    It blocks the loop, which has nothing else to do meanwhile.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._scratch = memoryview(bytearray(64))

    async def store(self, items: Sequence[Item]) -> None:
        for key, src in items:
            name = _name(key)
            self._sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(src)))
            self._sock.sendall(src)
            self._sock.sendall(b"\r\n")
            self._expect(b"+OK\r\n")

    async def load(self, items: Sequence[Item]) -> None:
        for key, dest in items:
            name = _name(key)
            self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            self._expect(b"$%d\r\n" % len(dest))
            self._fill(dest)
            self._expect(b"\r\n")

    def close(self) -> None:
        self._sock.close()

    def _expect(self, words: bytes) -> None:
        view = self._scratch[: len(words)]
        self._fill(view)
        if view != words:
            raise BackendError(f"the raw socket got {bytes(view)!r} where {words!r} was due", op="bench")

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise BackendError("the server closed the raw socket", op="bench")
            view = view[count:]


class _Checked:
    """The same with an xxh3 of each block: what no tier that proves its blocks can beat on one connection."""

    def __init__(self, raw: _Raw) -> None:
        self._raw = raw

    async def store(self, items: Sequence[Item]) -> None:
        for item in items:
            xxhash.xxh3_64_intdigest(item[1])
            await self._raw.store([item])

    async def load(self, items: Sequence[Item]) -> None:
        for item in items:
            await self._raw.load([item])
            xxhash.xxh3_64_intdigest(item[1])


class _RedisPy:
    """``redis.asyncio`` with hiredis; a value is copied into its buffer and not checked."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def store(self, items: Sequence[Item]) -> None:
        await at_a_time(self._store, items, CLIENT_CONNECTIONS)

    async def load(self, items: Sequence[Item]) -> None:
        await at_a_time(self._load, items, CLIENT_CONNECTIONS)

    async def _store(self, item: Item) -> None:
        await self._client.set(_name(item[0]), item[1])

    async def _load(self, item: Item) -> None:
        value = await self._client.get(_name(item[0]))
        if not isinstance(value, bytes):
            raise BackendError("the redis package found no block", op="bench")
        np.copyto(np.frombuffer(item[1], np.uint8), np.frombuffer(value, np.uint8))
