"""What the benchmarks of shared tiers have in common: ways to move the same blocks, each timed in turn in one run."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from rich.console import Console

from tiering.api import Backend, BackendConfig
from tiering.build import namespace_of
from tiering.cli.output import table
from tiering.cli.tiers import make_backend
from tiering.config import TieringConfig
from tiering.errors import BackendError
from tiering.keys import block_keys
from tiering.support.units import format_bytes
from tiering.types import KVLayout, Outcome

Item: TypeAlias = tuple[bytes, memoryview]
Call: TypeAlias = Callable[[Sequence[Item]], Awaitable[list[Outcome]]]

BLOCK_SIZES: Final = (256 << 10, 1 << 20, 4 << 20)
SINGLES_MAX = 32
"""Blocks of a run that are also moved one after the other, for the latencies."""
OURS: Final = "tiering"
OPS: Final = ("store", "load")
BYTES_PER_GB: Final = 10**9


class Way(Protocol):
    """Some means to move blocks. Each call moves all of ``items``, with as much under way at a time as the means has."""

    async def store(self, items: Sequence[Item]) -> None: ...

    async def load(self, items: Sequence[Item]) -> None: ...


class TierWay:
    """A backend, in calls of ``call_blocks`` blocks, ``calls`` at a time."""

    def __init__(self, backend: Backend, *, calls: int, call_blocks: int) -> None:
        self._backend = backend
        self._calls = calls
        self._call_blocks = call_blocks

    async def store(self, items: Sequence[Item]) -> None:
        await self._each(self._backend.store, items)

    async def load(self, items: Sequence[Item]) -> None:
        await self._each(self._backend.load, items)

    async def _each(self, call: Call, items: Sequence[Item]) -> None:
        step = self._call_blocks

        async def one(batch: Sequence[Item]) -> None:
            for outcome in await call(batch):
                if not outcome.ok:
                    raise BackendError(f"a block failed: {outcome.why or outcome.code.value}", op="bench")

        await at_a_time(one, [items[at : at + step] for at in range(0, len(items), step)], self._calls)


async def at_a_time(work: Callable[[Any], Awaitable[None]], things: Sequence[Any], most: int) -> None:
    """``work`` on each of ``things``, ``most`` at a time."""
    left = iter(things)

    async def lane() -> None:
        for thing in left:
            await work(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(most, len(things))):
            group.create_task(lane())


@asynccontextmanager
async def opened(tier: Mapping[str, Any], block_bytes: int, keys: Sequence[bytes]) -> AsyncIterator[Backend]:
    """A backend of ``tier`` for blocks of one size, whose ``keys`` are removed at the end."""
    config = config_of(tier)
    backend = make_backend(config)
    try:
        await backend.open(namespace_of(layout_of(block_bytes), "bench"))
        yield backend
        await backend.delete(keys)
    finally:
        await backend.aclose(10.0)


def config_of(tier: Mapping[str, Any]) -> BackendConfig:
    """Raises ``ConfigError`` for a URL that is none."""
    return TieringConfig.from_dict({"primary": {"capacity": "1GiB"}, "tiers": [dict(tier)]}, where="--url").tiers[0]


def layout_of(block_bytes: int) -> KVLayout:
    return KVLayout.uniform(model="tiering bench", tokens_per_block=16, block_bytes=block_bytes)


def keys_of(block_bytes: int, total_bytes: int) -> list[bytes]:
    """A key for each block of a run."""
    return block_keys(list(range(16 * (total_bytes // block_bytes))), layout_of(block_bytes))


@dataclass(slots=True)
class _Taken:
    """Seconds: of whole runs, one a pair, of this process's CPU time in them, and of single blocks."""

    runs: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)


async def compare(
    ways: Mapping[str, Way], raw: str, keys: Sequence[bytes], block_bytes: int, pairs: int
) -> dict[str, Any]:
    """Each way moves the same blocks, one a key, in each round; the order rotates, so that none always finds what another left.

    The figures of one block size; ``raw`` names the way that the ratios above all others are to. Raises ``BackendError``
    if a block came back with other bytes, which is looked at outside the measured time.
    """
    rows = np.random.default_rng(block_bytes).integers(0, 256, (len(keys), block_bytes), np.uint8)
    out = np.zeros_like(rows)
    items = {
        "store": [(key, row.data) for key, row in zip(keys, rows, strict=True)],
        "load": [(key, row.data) for key, row in zip(keys, out, strict=True)],
    }
    taken = {(name, op): _Taken() for name in ways for op in OPS}
    for number in range(pairs + 1):
        for op in OPS:
            for name in _rotated(list(ways), number):
                out[:] = 0
                run_s, cpu_s, singles_s = await _timed(getattr(ways[name], op), items[op])
                if op == "load" and not np.array_equal(out, rows):
                    raise BackendError(f"blocks came back with other bytes ({name})", op="bench")
                if number:  # the first round warms up
                    taken[name, op].runs.append(run_s)
                    taken[name, op].cpu.append(cpu_s)
                    taken[name, op].singles += singles_s
    return {"block_bytes": block_bytes, **_summary(taken, list(ways), raw, rows.nbytes)}


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


async def _timed(
    move: Callable[[Sequence[Item]], Awaitable[None]], items: Sequence[Item]
) -> tuple[float, float, list[float]]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await move(items)
    run_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    singles_s = []
    for item in items[:SINGLES_MAX]:
        began_s = time.perf_counter()
        await move([item])
        singles_s.append(time.perf_counter() - began_s)
    return run_s, cpu_s, singles_s


def _summary(taken: Mapping[tuple[str, str], _Taken], names: Sequence[str], raw: str, size: int) -> dict[str, Any]:
    lines = [_line(name, op, taken[name, op], taken[OURS, op], size) for op in OPS for name in names]
    result: dict[str, Any] = {}
    for op in OPS:
        (line,) = [line for line in lines if (line["way"], line["op"]) == (raw, op)]
        result |= {f"{op}_ratio_to_raw": line["ratio"], f"{op}_spread": line["spread"]}
    return {**result, "spread": max(result["store_spread"], result["load_spread"]), "lines": lines}


def _line(name: str, op: str, taken: _Taken, ours: _Taken, size: int) -> dict[str, Any]:
    singles = sorted(taken.singles)
    line: dict[str, Any] = {
        "way": name,
        "op": op,
        "gb_per_s": round(size / statistics.median(taken.runs) / BYTES_PER_GB, 3),
        "p50_ms": round(1000 * singles[len(singles) // 2], 3),
        "p99_ms": round(1000 * singles[int(0.99 * (len(singles) - 1))], 3),
        "cpu_s_per_gb": round(statistics.median(taken.cpu) * BYTES_PER_GB / size, 3),
        "ratio": None,
        "spread": None,
    }
    if name != OURS:
        ratios = [theirs_s / ours_s for theirs_s, ours_s in zip(taken.runs, ours.runs, strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        line |= {"ratio": round(statistics.median(ratios), 3), "spread": round(quarters[2] - quarters[0], 3)}
    return line


def show(console: Console, result: dict[str, Any]) -> None:
    console.print(f"{result['server']}, {result['pairs']} rounds", soft_wrap=True)
    rows = table("block>", "op", "way", "GB/s>", "p50 ms>", "p99 ms>", "CPU s/GB>", "tiering / way>", "spread>")
    for size, line in _lines(result):
        figures = (line[name] for name in ("gb_per_s", "p50_ms", "p99_ms", "cpu_s_per_gb", "ratio", "spread"))
        cells = ["-" if figure is None else str(figure) for figure in figures]
        rows.add_row(format_bytes(size["block_bytes"]), line["op"], line["way"], *cells)
    console.print(rows)


def _lines(result: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for size in result["sizes"]:
        for line in size["lines"]:
            yield size, line
