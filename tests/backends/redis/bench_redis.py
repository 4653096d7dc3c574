"""``python -m tests.backends.redis.bench_redis [ROUNDS]``: the tier, a raw socket and the redis package, in one run.

One server on a unix socket. In each round every way moves the same blocks once, in turn, so that what else happens on
the machine happens to all. Prints JSON: the median rates, the medians of the rounds' ratios, and what a GiB costs this
process in CPU time (our share of the work, without the server's).

- raw: one blocking socket, GET or SET one after the other, into and from the same buffers, nothing checked.
- raw_checked: the same and an xxh3 of each block: what no tier that proves its blocks can be faster than by itself.
- ours: 4 calls of 8 blocks at a time, as the manager makes them; every block sealed or verified.
- redis_py: ``redis.asyncio`` with hiredis, as many connections, the value copied into its buffer, nothing checked.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio
import xxhash

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tests.servers import valkey as servers

SIZES = (256 << 10, 1 << 20, 4 << 20)
TOTAL_BYTES = 64 << 20
CALLS, CALL_BLOCKS = 4, 8
GIB = 1 << 30

Item = tuple[bytes, memoryview]
Way = Callable[[], Awaitable[None]]


class Raw:
    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(str(path))
        self._scratch = memoryview(bytearray(64))

    async def get(self, items: Sequence[Item]) -> None:
        for key, dest in items:
            self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
            self._exactly(self._scratch[: len(b"$%d\r\n" % len(dest))])
            self._exactly(dest)
            self._exactly(self._scratch[:2])

    async def set(self, items: Sequence[Item]) -> None:
        for key, src in items:
            self._sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(src)))
            self._sock.sendall(src)
            self._sock.sendall(b"\r\n")
            self._exactly(self._scratch[: len(b"+OK\r\n")])

    def _exactly(self, view: memoryview) -> None:
        while view:
            view = view[self._sock.recv_into(view) :]

    def close(self) -> None:
        self._sock.close()


class RawChecked(Raw):
    async def get(self, items: Sequence[Item]) -> None:
        for item in items:
            await super().get([item])
            xxhash.xxh3_64_intdigest(item[1])

    async def set(self, items: Sequence[Item]) -> None:
        for item in items:
            xxhash.xxh3_64_intdigest(item[1])
            await super().set([item])


class Ours:
    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend

    async def get(self, items: Sequence[Item]) -> None:
        await self._each(self._backend.load, items)

    async def set(self, items: Sequence[Item]) -> None:
        await self._each(self._backend.store, items)

    async def _each(self, call: Callable[[Sequence[Item]], Awaitable[Iterable[Any]]], items: Sequence[Item]) -> None:
        batches = iter([items[at : at + CALL_BLOCKS] for at in range(0, len(items), CALL_BLOCKS)])

        async def work() -> None:
            for batch in batches:
                assert all(outcome.ok for outcome in await call(batch))

        await asyncio.gather(*(work() for _ in range(CALLS)))


class RedisPy:
    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def get(self, items: Sequence[Item]) -> None:
        async def one(key: bytes, dest: memoryview) -> None:
            value = await self._client.get(key)
            assert isinstance(value, bytes)
            np.copyto(np.frombuffer(dest, np.uint8), np.frombuffer(value, np.uint8))

        await self._each(one, items)

    async def set(self, items: Sequence[Item]) -> None:
        async def one(key: bytes, src: memoryview) -> None:
            await self._client.set(key, src)

        await self._each(one, items)

    async def _each(self, call: Callable[[bytes, memoryview], Awaitable[None]], items: Sequence[Item]) -> None:
        left = iter(items)

        async def work() -> None:
            for key, view in left:
                await call(key, view)

        await asyncio.gather(*(work() for _ in range(8)))


async def measure(server: servers.Valkey, size: int, rounds: int) -> dict[str, Any]:
    count = TOTAL_BYTES // size
    data = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    out = np.zeros_like(data)
    keys = [rig.key_of(n) for n in range(count)]
    sources = [(key, memoryview(row)) for key, row in zip(keys, data, strict=True)]
    dests = [(key, memoryview(row)) for key, row in zip(keys, out, strict=True)]
    pool = redis.asyncio.BlockingConnectionPool(
        connection_class=redis.asyncio.UnixDomainSocketConnection, path=str(server.path), max_connections=8
    )
    raw, checked = Raw(server.path), RawChecked(server.path)
    seconds: dict[str, list[float]] = {}
    cpu_s: dict[str, list[float]] = {}
    async with rig.opened(f"unix://{server.path}", rig.namespace(size)) as backend:
        ways = {
            "raw": raw,
            "raw_checked": checked,
            "ours": Ours(backend),
            "redis_py": RedisPy(redis.asyncio.Redis(connection_pool=pool)),
        }
        for number in range(rounds + 1):  # the first warms up
            for op in ("set", "get"):
                for name, way in ways.items():
                    out[:] = 0
                    began_s, began_cpu_s = time.perf_counter(), time.process_time()
                    await getattr(way, op)(sources if op == "set" else dests)
                    if number:
                        seconds.setdefault(f"{name}_{op}", []).append(time.perf_counter() - began_s)
                        cpu_s.setdefault(f"{name}_{op}", []).append(time.process_time() - began_cpu_s)
                    assert op == "set" or np.array_equal(out, data)
    raw.close()
    checked.close()
    await pool.disconnect()
    return {"block_bytes": size, **summary(seconds, cpu_s)}


def summary(seconds: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, float]:
    result = {}
    for name, took in seconds.items():
        result[f"{name}_gib_per_s"] = round(TOTAL_BYTES / GIB / statistics.median(took), 2)
        result[f"{name}_cpu_s_per_gib"] = round(statistics.median(cpu_s[name]) * GIB / TOTAL_BYTES, 2)
    for op in ("get", "set"):
        for peer in ("raw", "raw_checked", "redis_py"):
            pairs = zip(seconds[f"{peer}_{op}"], seconds[f"ours_{op}"], strict=True)
            result[f"ours_over_{peer}_{op}"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 2)
    return result


def main(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, servers.valkey(Path(directory), "--maxmemory", "2gb") as server:
        return {"rounds": rounds, "sizes": [asyncio.run(measure(server, size, rounds)) for size in SIZES]}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7), indent=1))
