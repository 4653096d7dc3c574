"""The S3 tier against the bare client on the same server, in interleaved pairs of one run.

``python -m tests.backends.fsspec.bench_s3 [--json] [--pairs N]``. Both sides move the same blocks with the same number of
requests under way; the bare client neither copies into the caller's memory nor checks what it gets.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from tests.backends.fsspec import rig
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY, start_seaweed

SIZES = (256 << 10, 1 << 20, 4 << 20)
TOTAL_BYTES = 64 << 20
UNDER_WAY = 8
BYTES_PER_GB = 10**9

Op = Callable[[int], Awaitable[object]]


class Obstore:
    """The bare client: whole objects in its own memory."""

    async def connect(self) -> None:
        self.store = rig.bucket_store()

    async def put(self, path: str, body: bytes) -> None:
        await self.store.put_async(path, body, use_multipart=False)

    async def get(self, path: str) -> Any:
        return await (await self.store.get_async(path)).bytes_async()

    async def aclose(self) -> None:
        del self.store


class S3fs:
    async def connect(self) -> None:
        s3fs: Any = importlib.import_module("s3fs")
        self.fs = s3fs.S3FileSystem(
            asynchronous=True,
            skip_instance_cache=True,
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            endpoint_url=os.environ[rig.ENDPOINT_VARIABLE],
            client_kwargs={"region_name": "us-east-1"},
        )
        self.session = await self.fs.set_session()

    async def put(self, path: str, body: bytes) -> None:
        await self.fs._pipe_file(f"{rig.BUCKET}/{path}", body)

    async def get(self, path: str) -> Any:
        return await self.fs._cat_file(f"{rig.BUCKET}/{path}", max_concurrency=1)

    async def aclose(self) -> None:
        await self.session.close()


async def measure(op: Op, count: int) -> list[float]:
    """Seconds of each call, and of all of them at the end."""
    turn = asyncio.Semaphore(UNDER_WAY)
    seconds: list[float] = []

    async def one(n: int) -> None:
        async with turn:
            started_s = time.perf_counter()
            await op(n)
            seconds.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(count)))
    return [*seconds, time.perf_counter() - started_s]


def summary(runs: Sequence[list[float]], size: int) -> dict[str, float]:
    calls_ms = sorted(1000 * seconds for run in runs for seconds in run[:-1])
    total_s = statistics.median(run[-1] for run in runs)
    return {
        "gb_per_s": round(size * (len(runs[0]) - 1) / total_s / BYTES_PER_GB, 4),
        "p50_ms": round(calls_ms[len(calls_ms) // 2], 3),
        "p99_ms": round(calls_ms[int(0.99 * (len(calls_ms) - 1))], 3),
    }


async def bench_size(client: str, size: int, pairs: int) -> dict[str, Any]:
    count = TOTAL_BYTES // size
    bodies = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    arena = np.zeros_like(bodies)
    keys = [rig.key_of(n) for n in range(count)]
    raw = [bytes(128) + body.tobytes() for body in bodies]
    bare = Obstore() if client == "obstore" else S3fs()
    await bare.connect()
    given = rig.s3_config(f"bench/{client}", s3_client=client, requests_max=UNDER_WAY)
    async with rig.opened(given, rig.namespace(size)) as backend:

        async def store(n: int) -> None:
            (outcome,) = await backend.store([(keys[n], bodies[n].data)])
            assert outcome.ok, outcome

        async def load(n: int) -> None:
            (outcome,) = await backend.load([(keys[n], arena[n].data)])
            assert outcome.ok, outcome

        sides: dict[str, tuple[Op, Op]] = {
            "put": (store, lambda n: bare.put(f"bench/{client}/bare/{n}", raw[n])),
            "get": (load, lambda n: bare.get(f"bench/{client}/bare/{n}")),
        }
        result: dict[str, Any] = {"client": client, "block_bytes": size}
        for name, both in sides.items():
            result[name] = await _pairs(both, count, size, pairs)
        assert (arena == bodies).all()
    await bare.aclose()
    return result


async def _pairs(both: tuple[Op, Op], count: int, size: int, pairs: int) -> dict[str, Any]:
    runs: tuple[list[list[float]], list[list[float]]] = ([], [])
    for pair in range(pairs + 1):
        for side in (0, 1) if pair % 2 else (1, 0):
            runs[side].append(await measure(both[side], count))
    # The first pair warms up.
    ours, bare = runs[0][1:], runs[1][1:]
    ratios = [bare_run[-1] / our_run[-1] for our_run, bare_run in zip(ours, bare, strict=True)]
    return {"ours": summary(ours, size), "bare": summary(bare, size), "ratio": round(statistics.median(ratios), 3)}


async def main(pairs: int) -> dict[str, Any]:
    sizes = [await bench_size(client, size, pairs) for client in rig.CLIENTS for size in SIZES]
    return {"ok": True, "under_way": UNDER_WAY, "pairs": pairs, "bytes_per_run": TOTAL_BYTES, "sizes": sizes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    server = start_seaweed()
    try:
        server.make_bucket(rig.BUCKET)
        os.environ[rig.ENDPOINT_VARIABLE] = server.endpoint_url
        report = asyncio.run(main(arguments.pairs))
    finally:
        server.stop()
    if arguments.json:
        print(json.dumps(report))
    else:
        for one in report["sizes"]:
            for op in ("put", "get"):
                print(f"{one['client']:8} {one['block_bytes'] >> 10:5} KiB {op} {one[op]}")
