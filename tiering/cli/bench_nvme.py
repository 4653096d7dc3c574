"""``tiering bench nvme``: the nvme backend against a raw loop on the same disk, in interleaved pairs of one run."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tiering import registry
from tiering.api import Backend
from tiering.build import namespace_of
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError
from tiering.keys import block_keys
from tiering.memory.arena import Arena, PoolShape
from tiering.support.units import format_bytes
from tiering.types import KVLayout

BLOCK_SIZES = (256 << 10, 1 << 20)
TOTAL_BYTES = 256 << 20
"""Written and read by each run of a pair."""
DEPTH = 8
"""Requests under way at a time, of both sides."""
CALL_BLOCKS = 8
"""Blocks in one backend call, as the manager batches them."""


@dataclass(frozen=True, slots=True)
class _Pair:
    ours_s: float
    raw_s: float

    @property
    def ratio(self) -> float:
        """Our rate as a share of the raw one."""
        return self.raw_s / self.ours_s


def bench(path: Path | None, pairs: int) -> dict[str, Any]:
    """Measure each block size; ``spread`` is the inter-quartile range of the pairs' ratios."""
    with _directory(path) as directory:
        sizes = [asyncio.run(_bench_size(directory, size, pairs)) for size in BLOCK_SIZES]
    o_direct = all(size.pop("o_direct") for size in sizes)
    return {"sizes": sizes, "o_direct": o_direct, "pairs": pairs, "depth": DEPTH, "bytes_per_run": TOTAL_BYTES}


@contextmanager
def _directory(path: Path | None) -> Iterator[Path]:
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvtiering-bench-", dir=path or Path.cwd()) as name:
            yield Path(name)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; choose a writable directory with --path") from None


async def _bench_size(directory: Path, block_bytes: int, pairs: int) -> dict[str, Any]:
    blocks = TOTAL_BYTES // block_bytes
    arena = Arena([PoolShape(blocks, block_bytes)])
    arena.prefault()
    rows = np.random.default_rng(block_bytes).integers(0, 256, (blocks, block_bytes), np.uint8)
    arena.fill(0, list(range(blocks)), rows)
    layout = KVLayout.uniform(model="tiering bench", tokens_per_block=16, block_bytes=block_bytes)
    keys = block_keys(list(range(16 * blocks)), layout)
    views = [arena.view(0, i, block_bytes) for i in range(blocks)]
    backend = _backend(directory / f"ours-{block_bytes}", block_bytes)
    await backend.open(namespace_of(layout, "bench"))
    raw = _Raw(directory / f"raw-{block_bytes}", blocks * block_bytes)
    try:
        stores, loads = [], []
        for round_ in range(pairs + 1):  # the first pair warms up: it allocates what the others overwrite
            ours_first = round_ % 2 == 0
            ours, theirs = await _both(ours_first, _store(backend, keys, views), lambda: raw.run(os.pwrite, views))
            stores.append(_Pair(ours, theirs))
            rows_back = arena.array(0)
            rows_back[:] = 0
            ours, theirs = await _both(ours_first, _load(backend, keys, views), lambda: raw.run(_pread, views))
            loads.append(_Pair(ours, theirs))
            if not np.array_equal(rows_back, rows):
                raise BackendError("blocks came back with other bytes", op="bench")
            await backend.delete(keys)
        o_direct = bool(getattr(backend, "o_direct"))  # noqa: B009 - the nvme backend's own, not part of the contract
    finally:
        raw.close()
        await backend.aclose(10.0)
        views.clear()
        arena.close()
    return {"block_bytes": block_bytes, **_summary(stores[1:], loads[1:], blocks * block_bytes), "o_direct": o_direct}


def _backend(path: Path, block_bytes: int) -> Backend:
    config = TieringConfig.from_dict(
        {
            "primary": {"capacity": "64MiB"},
            "tiers": [{"type": "nvme", "path": str(path), "capacity": 3 * TOTAL_BYTES, "threads": DEPTH}],
        },
        where="bench",
    ).tiers[0]
    backend: Backend = registry.backend_class(config)(config)  # type: ignore[call-arg]
    return backend


async def _both(ours_first: bool, ours: Any, raw: Callable[[], float]) -> tuple[float, float]:
    """One pair; which side goes first alternates, so that neither always finds the disk quiet."""
    if ours_first:
        ours_s = await ours
        return ours_s, raw()
    raw_s = raw()
    return await ours, raw_s


async def _store(backend: Backend, keys: list[bytes], views: list[memoryview]) -> float:
    return await _calls(backend.store, list(zip(keys, views, strict=True)))


async def _load(backend: Backend, keys: list[bytes], views: list[memoryview]) -> float:
    return await _calls(backend.load, list(zip(keys, views, strict=True)))


async def _calls(call: Any, items: list[tuple[bytes, memoryview]]) -> float:
    """All items, in calls of ``CALL_BLOCKS``, as many under way as keep ``DEPTH`` requests busy; seconds."""
    lanes = asyncio.Semaphore(max(2, DEPTH // 2))

    async def one(start: int) -> None:
        async with lanes:
            outcomes = await call(items[start : start + CALL_BLOCKS])
        bad = [outcome for outcome in outcomes if not outcome.ok]
        if bad:
            raise BackendError(f"{len(bad)} blocks failed: {bad[0].why or bad[0].code.value}", op=call.__name__)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for start in range(0, len(items), CALL_BLOCKS):
            group.create_task(one(start))
    return time.perf_counter() - begin


def _pread(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


class _Raw:
    """The physical limit here: threads that read or write a preallocated file, block by block, and do nothing else."""

    def __init__(self, path: Path, size: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size)
        self._pool = ThreadPoolExecutor(DEPTH)

    def run(self, call: Callable[[int, Any, int], int], views: list[memoryview]) -> float:
        def lane(first: int) -> None:
            for index in range(first, len(views), DEPTH):
                view = views[index]
                if call(self._fd, view, index * len(view)) != len(view):
                    raise BackendError("short transfer in the raw loop", op="bench")

        begin = time.perf_counter()
        list(self._pool.map(lane, range(DEPTH)))
        return time.perf_counter() - begin

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


def _summary(stores: list[_Pair], loads: list[_Pair], size: int) -> dict[str, Any]:
    result: dict[str, Any] = {"spread": {}}
    for op, pairs in (("store", stores), ("load", loads)):
        ratios = sorted(pair.ratio for pair in pairs)
        quarters = statistics.quantiles(ratios, n=4)
        result[f"{op}_ratio_to_raw"] = round(statistics.median(ratios), 3)
        result[f"raw_{op}_gib_s"] = round(size / statistics.median(pair.raw_s for pair in pairs) / 2**30, 3)
        result["spread"][op] = round(quarters[2] - quarters[0], 3)
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"nvme backend against a raw loop, depth {result['depth']}, {result['pairs']} pairs, "
                        f"O_DIRECT {'on' if result['o_direct'] else 'OFF'}")  # fmt: skip
    for column in ("block", "store / raw", "load / raw", "raw store GiB/s", "raw load GiB/s", "spread of ratios"):
        table.add_column(column, justify="right")
    for size in result["sizes"]:
        spread = f"{size['spread']['store']} / {size['spread']['load']}"
        names = ("store_ratio_to_raw", "load_ratio_to_raw", "raw_store_gib_s", "raw_load_gib_s")
        table.add_row(format_bytes(size["block_bytes"]), *(str(size[name]) for name in names), spread)
    console.print(table)
