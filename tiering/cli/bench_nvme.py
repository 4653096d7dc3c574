"""``tiering bench nvme``: the nvme backend against a raw loop on the same disk, in interleaved pairs of one run."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console

from tiering.api import Backend
from tiering.build import namespace_of
from tiering.cli.output import table
from tiering.cli.tiers import make_backend
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError
from tiering.keys import block_keys
from tiering.memory.arena import Arena, PoolShape
from tiering.support.units import format_bytes
from tiering.types import KVLayout, Outcome

Rows: TypeAlias = npt.NDArray[np.uint8]
Item: TypeAlias = tuple[bytes, memoryview]
Run: TypeAlias = Callable[[], Awaitable[float]]
"""Moves all blocks once; the seconds it took."""
Transfer: TypeAlias = Callable[[int, memoryview, int], int]
"""Of a descriptor, a buffer and an offset; the bytes moved."""

BLOCK_SIZES: Final = (256 << 10, 1 << 20)
TOTAL_BYTES = 256 << 20
"""Written and read by each run of a pair."""
DEPTH: Final = 4
"""Threads of both sides, each with one request under way: the tier's default."""
CALL_BLOCKS: Final = 8
"""Blocks in a backend call: the default of a tier's ``batch_blocks_max``."""
CALLS_MAX: Final = 2 * DEPTH
"""Calls under way at a time: while one waits for its index records, another keeps the threads busy."""


@dataclass(frozen=True, slots=True)
class _Pair:
    ours_s: float
    raw_s: float

    @property
    def ratio(self) -> float:
        """Our rate as a share of the raw one."""
        return self.raw_s / self.ours_s


def bench(path: Path | None, pairs: int) -> dict[str, Any]:
    """Measure each block size in a fresh directory below ``path`` (None: the current one), removed afterwards.

    Raises ``ConfigError`` if the directory cannot be used.
    """
    total_bytes = TOTAL_BYTES
    with _directory(path or Path(), 4 * total_bytes) as directory:
        sizes = [asyncio.run(_bench_size(directory, size, pairs, total_bytes)) for size in BLOCK_SIZES]
    o_direct = all(size.pop("o_direct") for size in sizes)
    return {
        "ok": True,
        "sizes": sizes,
        "o_direct": o_direct,
        "pairs": pairs,
        "depth": DEPTH,
        "bytes_per_run": total_bytes,
    }


@contextmanager
def _directory(path: Path, need_bytes: int) -> Iterator[Path]:
    try:
        scratch = tempfile.TemporaryDirectory(prefix="kvtiering-bench-", dir=path)
    except OSError as error:
        raise ConfigError(f"--path {path}: {error.strerror or error}; name a directory you may write to") from None
    with scratch as name:
        free_bytes = shutil.disk_usage(name).free
        if free_bytes < need_bytes:
            raise ConfigError(
                f"--path {path}: {format_bytes(free_bytes)} are free and {format_bytes(need_bytes)} are needed;"
                " name a directory on another disk"
            )
        yield Path(name)


async def _bench_size(directory: Path, block_bytes: int, pairs: int, total_bytes: int) -> dict[str, Any]:
    blocks = total_bytes // block_bytes
    layout = KVLayout.uniform(model="tiering bench", tokens_per_block=16, block_bytes=block_bytes)
    rows = np.random.default_rng(block_bytes).integers(0, 256, (blocks, block_bytes), np.uint8)
    arena = Arena([PoolShape(blocks, block_bytes)])
    try:
        arena.prefault()
        arena.fill(0, list(range(blocks)), rows)
        views = [arena.view(0, i, block_bytes) for i in range(blocks)]
        items = list(zip(block_keys(list(range(16 * blocks)), layout), views, strict=True))
        read = partial(_read_back, arena.array(0), rows)
        stores, loads = [], []
        with _raw_file(directory / f"raw-{block_bytes}", views) as raw:
            async with _opened(directory / f"ours-{block_bytes}", layout, 2 * total_bytes) as backend:
                store, load = partial(_calls, backend.store, items), partial(_calls, backend.load, items)
                for number in range(pairs + 1):  # the first pair warms up: it allocates what the others overwrite
                    swap = number % 2 == 1
                    stores.append(await _pair(store, partial(raw.run, os.pwrite), swap))
                    loads.append(await _pair(partial(read, load), partial(read, partial(raw.run, _pread)), swap))
                    await backend.delete([key for key, _ in items])
                # The nvme backend's own, beside the contract: false from the filesystem's first refusal on.
                o_direct: bool = getattr(backend, "o_direct") and raw.direct  # noqa: B009
    finally:
        arena.close()
    return {"block_bytes": block_bytes, **_summary(stores[1:], loads[1:], total_bytes), "o_direct": o_direct}


async def _read_back(slots: Rows, rows: Rows, run: Run) -> float:
    """Seconds of ``run``, which must have filled ``slots`` with ``rows``."""
    slots[:] = 0
    taken_s = await run()
    if not np.array_equal(slots, rows):
        raise BackendError("blocks came back with other bytes", op="bench")
    return taken_s


@asynccontextmanager
async def _opened(path: Path, layout: KVLayout, capacity_bytes: int) -> AsyncIterator[Backend]:
    tier = {"type": "nvme", "path": str(path), "capacity": capacity_bytes, "threads": DEPTH}
    config = TieringConfig.from_dict({"primary": {"capacity": capacity_bytes}, "tiers": [tier]}, where="bench")
    backend = make_backend(config.tiers[0])
    try:
        await backend.open(namespace_of(layout, "bench"))
        yield backend
    finally:
        await backend.aclose(10.0)
        shutil.rmtree(path, ignore_errors=True)


async def _pair(ours: Run, raw: Run, swap: bool) -> _Pair:
    """Which side goes first alternates, so that neither always finds what the other left behind."""
    if swap:
        raw_s = await raw()
        return _Pair(await ours(), raw_s)
    ours_s = await ours()
    return _Pair(ours_s, await raw())


async def _calls(call: Callable[[Sequence[Item]], Awaitable[list[Outcome]]], items: Sequence[Item]) -> float:
    """Seconds for all items, in calls as the manager makes them."""
    batches = iter([items[at : at + CALL_BLOCKS] for at in range(0, len(items), CALL_BLOCKS)])

    async def lane() -> list[Outcome]:
        return [outcome for batch in batches for outcome in await call(batch) if not outcome.ok]

    start = time.perf_counter()
    failed = [
        outcome for lane_failed in await asyncio.gather(*(lane() for _ in range(CALLS_MAX))) for outcome in lane_failed
    ]
    taken_s = time.perf_counter() - start
    if failed:
        raise BackendError(f"{len(failed)} blocks failed: {failed[0].why or failed[0].code.value}", op="bench")
    return taken_s


def _pread(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


class _Raw:
    """The physical limit here: threads that read or write a preallocated file, block by block, and do nothing else."""

    def __init__(self, fd: int, direct: bool, views: Sequence[memoryview], pool: ThreadPoolExecutor) -> None:
        self.direct = direct
        self._fd = fd
        self._views = views
        self._pool = pool

    async def run(self, transfer: Transfer) -> float:
        """Seconds for all views. Blocks the loop: nothing else runs meanwhile."""
        work = iter(enumerate(self._views))

        def thread(_: int) -> None:
            for index, view in work:
                if transfer(self._fd, view, index * len(view)) != len(view):
                    raise BackendError("short transfer in the raw loop", op="bench")

        start = time.perf_counter()
        list(self._pool.map(thread, range(DEPTH)))
        return time.perf_counter() - start


@contextmanager
def _raw_file(path: Path, views: Sequence[memoryview]) -> Iterator[_Raw]:
    fd, direct = _open_direct(path, views[0])
    try:
        os.posix_fallocate(fd, 0, len(views) * len(views[0]))
        with ThreadPoolExecutor(DEPTH) as pool:
            yield _Raw(fd, direct, views, pool)
    finally:
        os.close(fd)
        path.unlink()


def _open_direct(path: Path, view: memoryview) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache: some filesystems refuse at open, some at the first write."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            os.pwrite(direct_fd, view, 0)
        except OSError:
            os.close(direct_fd)
            raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(fd)
            raise
        return fd, False
    os.close(fd)
    return direct_fd, True


def _summary(stores: Sequence[_Pair], loads: Sequence[_Pair], size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for op, pairs in (("store", stores), ("load", loads)):
        ratios = [pair.ratio for pair in pairs]
        quarters = statistics.quantiles(ratios, n=4)
        result[f"{op}_ratio_to_raw"] = round(statistics.median(ratios), 3)
        result[f"raw_{op}_gib_s"] = round(size / statistics.median(pair.raw_s for pair in pairs) / 2**30, 3)
        result[f"{op}_spread"] = round(quarters[2] - quarters[0], 3)
    result["spread"] = max(result["store_spread"], result["load_spread"])
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    how = "O_DIRECT" if result["o_direct"] else "the page cache: this filesystem refuses O_DIRECT"
    title = f"nvme backend against a raw loop: depth {result['depth']}, {result['pairs']} pairs, through {how}"
    console.print(title, soft_wrap=True)
    rows = table(
        "block>", "store / raw>", "load / raw>", "raw store GiB/s>", "raw load GiB/s>", "spread of the ratios>"
    )
    for size in result["sizes"]:
        names = ("store_ratio_to_raw", "load_ratio_to_raw", "raw_store_gib_s", "raw_load_gib_s")
        spread = f"{size['store_spread']} / {size['load_spread']}"
        rows.add_row(format_bytes(size["block_bytes"]), *(str(size[name]) for name in names), spread)
    console.print(rows)
