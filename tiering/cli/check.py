"""``tiering check``: does this configuration work here, how much fits, how fast is it."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tiering import registry
from tiering.api import Backend, BackendConfig
from tiering.build import namespace_of, pool_shapes, slot_bytes_of
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError, TieringError
from tiering.keys import block_keys
from tiering.memory.arena import Arena, PoolShape
from tiering.support.units import format_bytes
from tiering.types import KVLayout, OutcomeCode

PROBE_BYTES = 32 << 20
"""About how much is written to and read from each tier."""
ROUNDS = 3
CLOSE_S = 5.0


def layout_of(block_bytes: int, tokens_per_block: int) -> KVLayout:
    """The layout that capacities are told for. Its model name keeps the probe's blocks apart from everybody else's."""
    return KVLayout.uniform(model="tiering check", tokens_per_block=tokens_per_block, block_bytes=block_bytes)


def check(path: Path, layout: KVLayout) -> dict[str, Any]:
    """Open and probe every tier. Raises ``ConfigError`` for what must be fixed; an unreachable tier makes ``ok`` false."""
    config = TieringConfig.from_yaml(path)
    group = layout.groups[0]
    slots = pool_shapes(config, layout)[0].slots
    n = max(1, min(16, PROBE_BYTES // group.block_bytes))
    arena = Arena([PoolShape(2 * n, slot_bytes_of(group.block_bytes))])
    try:
        arena.prefault()
        rows = _probe_rows(n, group.block_bytes)
        primary = {
            "name": "primary",
            "type": "cpu",
            "capacity_bytes": config.primary.capacity_bytes,
            "blocks": slots,
            "tokens": slots * group.tokens_per_block,
            "ok": True,
            **_probe_arena(arena, rows),
        }
        tiers = [primary]
        for name, tier in zip(config.tier_names, config.tiers, strict=True):
            tiers.append(asyncio.run(_check_tier(name, tier, layout, arena, rows)))
    finally:
        arena.close()
    return {
        "ok": all(tier["ok"] for tier in tiers),
        "config": str(path),
        "block_bytes": group.block_bytes,
        "tokens_per_block": group.tokens_per_block,
        "probe_blocks": n,
        "tiers": tiers,
    }


def _probe_rows(n: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (n, block_bytes), np.uint8)


def _probe_arena(arena: Arena, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, Any]:
    slots = list(range(len(rows)))
    out = np.empty_like(rows)
    times: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        arena.fill(0, slots, rows)
        middle = time.perf_counter()
        arena.take(0, slots, out)
        times["store"].append(middle - start)
        times["load"].append(time.perf_counter() - middle)
    return _bandwidths(times, rows.nbytes)


def _bandwidths(times: dict[str, list[float]], size: int) -> dict[str, Any]:
    return {f"{op}_gib_s": round(size / statistics.median(taken) / 2**30, 3) for op, taken in times.items()}


async def _check_tier(
    name: str, config: BackendConfig, layout: KVLayout, arena: Arena, rows: np.ndarray[Any, np.dtype[np.uint8]]
) -> dict[str, Any]:
    backend: Backend = registry.backend_class(config)(config)  # type: ignore[call-arg]
    group = layout.groups[0]
    result: dict[str, Any] = {"name": name, "type": config.type, "capacity_bytes": config.capacity_bytes}
    result.update(_capacity(backend, config, layout))
    try:
        await backend.open(namespace_of(layout, "check"))
        times = await _probe_backend(backend, arena, rows, group.tokens_per_block, layout)
        usage = await backend.usage()
        if usage is not None:
            result["allocated_bytes"], result["live_bytes"] = usage.allocated_bytes, usage.live_bytes
        result.update(_bandwidths(times, rows.nbytes), ok=True)
    except ConfigError:
        raise
    except TieringError as error:
        result.update(ok=False, error=str(error))
    finally:
        await backend.aclose(CLOSE_S)
    return result


def _capacity(backend: Backend, config: BackendConfig, layout: KVLayout) -> dict[str, Any]:
    caps, group = backend.capabilities, layout.groups[0]
    if config.capacity_bytes is None:
        return {"blocks": None, "tokens": None}
    blocks = max(0, config.capacity_bytes - caps.overhead_bytes) // caps.stored_bytes(group.block_bytes)
    if not blocks:
        raise ConfigError(
            f"tier {config.name or config.type!r}: its capacity holds no block of {group.block_bytes} bytes"
        )
    return {"blocks": blocks, "tokens": blocks * group.tokens_per_block}


async def _probe_backend(
    backend: Backend,
    arena: Arena,
    rows: np.ndarray[Any, np.dtype[np.uint8]],
    tokens_per_block: int,
    layout: KVLayout,
) -> dict[str, list[float]]:
    """Store, load, compare and delete the probe's blocks; raises ``BackendError`` if anything is not as it must be."""
    n, size = rows.shape
    keys = block_keys(list(range(n * tokens_per_block)), layout)
    alignment = backend.capabilities.alignment_bytes
    length = -(-size // alignment) * alignment
    arena.fill(0, list(range(n)), rows)
    sources = [(key, arena.view(0, i, length)) for i, key in enumerate(keys)]
    targets = [(key, arena.view(0, n + i, length)) for i, key in enumerate(keys)]
    times: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        stored = await backend.store(sources)
        middle = time.perf_counter()
        _expect(stored, "store")
        loaded = await backend.load(targets)
        times["store"].append(middle - start)
        times["load"].append(time.perf_counter() - middle)
        _expect(loaded, "load")
        out = np.empty_like(rows)
        arena.take(0, list(range(n, 2 * n)), out)
        if not np.array_equal(out, rows):
            raise BackendError("blocks came back with other bytes", op="load")
        if backend.capabilities.can_delete:
            _expect(await backend.delete(keys), "delete")
    return times


def _expect(outcomes: Any, op: str) -> None:
    for outcome in outcomes:
        if outcome.code is not OutcomeCode.OK:
            raise BackendError(f"{outcome.code.value}: {outcome.why}", op=op)


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"{result['config']}, blocks of {format_bytes(result['block_bytes'])}, "
                        f"{result['tokens_per_block']} tokens each")  # fmt: skip
    for column in ("tier", "type", "capacity", "blocks", "tokens", "store GiB/s", "load GiB/s", "state"):
        table.add_column(column, justify="left" if column in ("tier", "type", "state") else "right")
    for tier in result["tiers"]:
        capacity = "-" if tier["capacity_bytes"] is None else format_bytes(tier["capacity_bytes"])
        blocks, tokens = (("-" if tier[name] is None else f"{tier[name]:,}") for name in ("blocks", "tokens"))
        speeds = [str(tier.get(f"{op}_gib_s", "-")) for op in ("store", "load")]
        table.add_row(tier["name"], tier["type"], capacity, blocks, tokens, *speeds, tier.get("error", "ok"))
    console.print(table)
