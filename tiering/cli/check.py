"""``tiering check``: does this configuration work here, how much fits, how fast is it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console

from tiering.api import Backend, BackendConfig
from tiering.build import build, namespace_of, pool_shapes, slot_bytes_of
from tiering.cli.output import table
from tiering.cli.tiers import bounded, hung, io_thread, make_backend, run_on
from tiering.config import TieringConfig
from tiering.errors import BackendError, ConfigError, TieringError
from tiering.keys import block_keys
from tiering.memory.arena import Arena, PoolShape
from tiering.runtime.clock import SystemClock
from tiering.support.units import format_bytes, format_seconds
from tiering.types import KVLayout, Outcome, OutcomeCode, Usage

Rows: TypeAlias = npt.NDArray[np.uint8]
Item: TypeAlias = tuple[bytes, memoryview]

MODEL: Final = "tiering check"
"""Its namespace keeps the probe's blocks apart from everybody else's."""

PROBE_BYTES: Final = 32 << 20
"""About how much is written to and read from each tier in one round."""
PROBE_BLOCKS_MAX: Final = 16
ROUNDS: Final = 3
ENOUGH_S: Final = 5.0
"""No further round is begun after this time: a slow tier is known by then."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a hung tier can cost, in seconds."""

    open_s: float = 30.0
    """As long as an engine waits for it."""
    probe_s: float = 60.0
    close_s: float = 5.0
    unwind_s: float = 1.0
    """What a call gets to return after it was cancelled."""

    @property
    def tier_s(self) -> float:
        """For a backend that blocks the loop itself, where no other limit works."""
        return self.open_s + self.probe_s + self.close_s + 4 * self.unwind_s


LIMITS = Limits()


@dataclass(slots=True)
class Times:
    """Of each round, in seconds; ``slowest_load_s`` is that of one backend call."""

    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    slowest_load_s: float = 0.0

    def bandwidths(self, size: int) -> dict[str, float]:
        return {
            f"{op}_gib_s": round(size / statistics.median(taken) / 2**30, 3)
            for op, taken in (("store", self.store), ("load", self.load))
        }


def layout_of(block_bytes: int, tokens_per_block: int) -> KVLayout:
    """The layout that capacities are told for."""
    return KVLayout.uniform(model=MODEL, tokens_per_block=tokens_per_block, block_bytes=block_bytes)


def check(path: Path, layout: KVLayout) -> dict[str, Any]:
    """Open and probe every tier. Raises ``ConfigError`` for what must be fixed; a tier that fails makes ``ok`` false.

    The probe's blocks are removed again, and nobody else's are touched. A tier that hangs costs ``LIMITS``.
    """
    config = TieringConfig.from_yaml(path)
    group = layout.groups[0]
    slots = _primary_slots(path, config, layout)
    n = max(1, min(PROBE_BLOCKS_MAX, PROBE_BYTES // group.block_bytes))
    rows = np.random.default_rng(0).integers(0, 256, (n, group.block_bytes), np.uint8)
    results = [_check_primary(config, slots, group.tokens_per_block, rows)]
    problems: list[str] = []
    for index, (name, tier) in enumerate(zip(config.tier_names, config.tiers, strict=True)):
        try:
            results.append(_check_tier(name, tier, layout, rows))
        except ConfigError as error:
            problems.append(f"{path}: tiers[{index}] ({name}): {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return {
        "ok": all(result["ok"] for result in results),
        "config": str(path),
        "block_bytes": group.block_bytes,
        "tokens_per_block": group.tokens_per_block,
        "tiers": results,
    }


def _primary_slots(path: Path, config: TieringConfig, layout: KVLayout) -> int:
    """Put everything together as an engine's start would, down to mapping the arena; nothing is opened."""
    try:
        # First: what else is built grows with the slots, and would fill the memory for a capacity that is not there.
        Arena(pool_shapes(config, layout)).close()
        parts = build(config, layout, SystemClock())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    slots = len(parts.arena.array(0))
    parts.copies.shutdown()
    parts.arena.close()
    return slots


def _result(name: str, type_: str, capacity_bytes: int | None, blocks: int | None, tokens: int) -> dict[str, Any]:
    return {
        "name": name,
        "type": type_,
        "ok": True,
        "error": None,
        "note": None,
        "capacity_bytes": capacity_bytes,
        "blocks": blocks,
        "tokens": None if blocks is None else blocks * tokens,
        "allocated_bytes": None,
        "live_bytes": None,
        "probe_blocks": 0,
        "store_gib_s": None,
        "load_gib_s": None,
    }


def _check_primary(config: TieringConfig, slots: int, tokens_per_block: int, rows: Rows) -> dict[str, Any]:
    result = _result("primary", "cpu", config.primary.capacity_bytes, slots, tokens_per_block)
    numbers, out, times = list(range(len(rows))), np.empty_like(rows), Times()
    arena = Arena([PoolShape(len(rows), slot_bytes_of(rows.shape[1]))])
    try:
        arena.prefault()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            arena.fill(0, numbers, rows)
            middle = time.perf_counter()
            arena.take(0, numbers, out)
            times.store.append(middle - start)
            times.load.append(time.perf_counter() - middle)
    finally:
        arena.close()
    return result | times.bandwidths(rows.nbytes) | {"probe_blocks": len(rows)}


def _check_tier(name: str, config: BackendConfig, layout: KVLayout, rows: Rows) -> dict[str, Any]:
    backend = make_backend(_keeping(config))
    caps, group = backend.capabilities, layout.groups[0]
    blocks = None
    if config.capacity_bytes is not None:
        blocks = max(0, config.capacity_bytes - caps.overhead_bytes) // caps.stored_bytes(group.block_bytes)
    result = _result(name, config.type, config.capacity_bytes, blocks, group.tokens_per_block)
    arena = Arena([PoolShape(2 * len(rows), slot_bytes_of(group.block_bytes))])
    before = len(hung)
    try:
        arena.prefault()
        probe = _Probe(
            backend, config, arena, rows, block_keys(list(range(len(rows) * group.tokens_per_block)), layout)
        )
        with io_thread(f"tiering-check-{name}", 2 * LIMITS.unwind_s) as io:
            return result | run_on(io, _open_and_probe(probe, layout), LIMITS.tier_s)
    except TimeoutError:
        return result | {"ok": False, "error": f"it does not answer, and blocks whoever asks ({LIMITS.tier_s:g} s)"}
    finally:
        # What never returned may still write to its slots.
        arena.close(abandon=len(hung) > before)


def _keeping(config: BackendConfig) -> BackendConfig:
    """The configuration, but with nothing removed at open: that is for the engine's start, not for a check."""
    return config.model_copy(update={"recover": "quiet"}) if getattr(config, "recover", "") == "none" else config


async def _open_and_probe(probe: _Probe, layout: KVLayout) -> dict[str, Any]:
    failure: Exception | None = None
    found: dict[str, Any] = {}
    backend = probe.backend
    try:
        await bounded("open", backend.open(namespace_of(layout, "check")), LIMITS.open_s, LIMITS.unwind_s)
        found = await bounded("probe", probe.run(), LIMITS.probe_s, LIMITS.unwind_s)
    except Exception as error:  # a plug-in may raise anything, and the other tiers are still to be checked
        failure = error
    finally:
        try:
            await bounded("aclose", backend.aclose(LIMITS.close_s), LIMITS.close_s, LIMITS.unwind_s)
        except Exception as error:
            failure = failure or error
    if isinstance(failure, ConfigError):
        raise failure
    if failure is not None:
        text = str(failure) if isinstance(failure, TieringError) else f"{type(failure).__name__}: {failure}"
        found |= {"ok": False, "error": text}
    return found


class _Probe:
    """Stores, loads, compares and deletes a few blocks, in calls like an engine's."""

    def __init__(
        self, backend: Backend, config: BackendConfig, arena: Arena, rows: Rows, keys: Sequence[bytes]
    ) -> None:
        """The first half of ``arena`` is the source, the second the destination."""
        self.backend = backend
        self._config = config
        self._arena = arena
        self._rows = rows
        self._keys = keys

    async def run(self) -> dict[str, Any]:
        """What was found, for the tier's result. Raises ``BackendError`` if anything is not as it must be."""
        # An earlier check may have been killed; what it left would make these stores look fast.
        await self._delete()
        usage = await self.backend.usage()
        n, note = self._fitting_blocks(usage)
        try:
            times = await self._measure(n) if n else Times()
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what must be told
                await self._delete()
            raise
        found: dict[str, Any] = {"note": note, "probe_blocks": n}
        if usage is not None:
            found |= {"allocated_bytes": usage.allocated_bytes, "live_bytes": usage.live_bytes}
        if n:
            found |= times.bandwidths(n * self._rows.shape[1])
        if times.slowest_load_s > self._config.deadline_s:
            slowest, deadline = format_seconds(times.slowest_load_s), format_seconds(self._config.deadline_s)
            found["note"] = f"a load took {slowest}; past the tier's deadline of {deadline} it is a miss"
        return found

    def _fitting_blocks(self, usage: Usage | None) -> tuple[int, str | None]:
        """How many blocks of the probe find room beside what is there, and what to say if none does."""
        n, capacity_bytes, caps = len(self._rows), self._config.capacity_bytes, self.backend.capabilities
        if not caps.exclusive or capacity_bytes is None or usage is None or not usage.live_bytes:
            return n, None
        room_bytes = capacity_bytes - caps.overhead_bytes - usage.live_bytes
        n = min(n, max(0, room_bytes) // caps.stored_bytes(self._rows.shape[1]))
        return n, None if n else f"full ({format_bytes(usage.live_bytes)} of blocks): its speed was not measured"

    async def _measure(self, n: int) -> Times:
        alignment = self.backend.capabilities.alignment_bytes
        length = -(-self._rows.shape[1] // alignment) * alignment
        source, target = self._arena.array(0)[: len(self._rows)], self._arena.array(0)[len(self._rows) :]
        self._arena.fill(0, list(range(n)), self._rows[:n])
        stores = [(key, self._arena.view(0, i, length)) for i, key in enumerate(self._keys[:n])]
        loads = [(key, self._arena.view(0, len(source) + i, length)) for i, key in enumerate(self._keys[:n])]
        times = Times()
        while len(times.load) < ROUNDS and sum(times.store + times.load) < ENOUGH_S:
            target[:] = 0
            taken_s, _ = await self._calls("store", self.backend.store, stores)
            times.store.append(taken_s)
            taken_s, slowest_s = await self._calls("load", self.backend.load, loads)
            times.load.append(taken_s)
            times.slowest_load_s = max(times.slowest_load_s, slowest_s)
            if not np.array_equal(target[:n], source[:n]):
                raise BackendError("blocks came back with other bytes", op="load")
            if not await self._delete():
                break
        return times

    async def _calls(
        self, op: str, call: Callable[[Sequence[Item]], Awaitable[list[Outcome]]], items: Sequence[Item]
    ) -> tuple[float, float]:
        """Seconds of all calls together, and of the slowest one."""
        size = min(self._config.batch_blocks_max, self.backend.capabilities.batch_blocks_max)
        turn = asyncio.Semaphore(self._config.ops_max)

        async def one(batch: Sequence[Item]) -> float:
            async with turn:
                start = time.perf_counter()
                _require_ok(op, await call(batch))
                return time.perf_counter() - start

        start = time.perf_counter()
        batches = [items[at : at + size] for at in range(0, len(items), size)]
        # All are waited for, also when one fails: they use the arena.
        taken = await asyncio.gather(*map(one, batches), return_exceptions=True)
        total_s, slowest_s = time.perf_counter() - start, 0.0
        for result in taken:
            if isinstance(result, BaseException):
                raise result
            slowest_s = max(slowest_s, result)
        return total_s, slowest_s

    async def _delete(self) -> bool:
        """Remove the probe's blocks; false if the tier cannot."""
        if not self.backend.capabilities.can_delete:
            return False
        outcomes = await self.backend.delete(self._keys)
        _require_ok("delete", [outcome for outcome in outcomes if outcome.code is not OutcomeCode.MISSING])
        return True


def _require_ok(op: str, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.ok:
            raise BackendError(f"{outcome.code.value}: {outcome.why}" if outcome.why else outcome.code.value, op=op)


def show(console: Console, result: dict[str, Any]) -> None:
    title = (
        f"{result['config']}, blocks of {format_bytes(result['block_bytes'])}, {result['tokens_per_block']} tokens each"
    )
    console.print(title, soft_wrap=True)
    rows = table("tier", "type", "capacity>", "blocks>", "tokens>", "store GiB/s>", "load GiB/s>", "state")
    for tier in result["tiers"]:
        capacity = "-" if tier["capacity_bytes"] is None else format_bytes(tier["capacity_bytes"])
        blocks, tokens = (("-" if tier[name] is None else f"{tier[name]:,}") for name in ("blocks", "tokens"))
        speeds = ["-" if tier[f"{op}_gib_s"] is None else str(tier[f"{op}_gib_s"]) for op in ("store", "load")]
        state = "ok" if tier["ok"] else "FAILED"
        rows.add_row(tier["name"], tier["type"], capacity, blocks, tokens, *speeds, state)
    console.print(rows)
    for tier in result["tiers"]:
        for text in (tier["error"], tier["note"]):
            if text is not None:
                console.print(f"{tier['name']}: {text}", soft_wrap=True)
