"""``TieringOffloadingManager``: the async face. ``sync`` is the non-blocking face for schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, overload

from tiering import flows
from tiering.build import Parts, build, namespace_of
from tiering.config import TieringConfig
from tiering.core import events as ev
from tiering.errors import ClosedError, ConfigError, ShapeError
from tiering.memory.buffers import as_rows
from tiering.metrics import MetricsServer
from tiering.runtime.clock import Clock, SystemClock
from tiering.runtime.waiting import wait_until
from tiering.stats import collect_stats
from tiering.sync import SyncFace
from tiering.types import KEY_BYTES_MAX, BlockKey, FlushReport, KVLayout, PrefixMatch, StoreReport, Usage

Keys: TypeAlias = Sequence[BlockKey]
KeysByGroup: TypeAlias = Mapping[int, Sequence[BlockKey]]
T = TypeVar("T")

STORE_DEADLINE_S = 30.0
"""Default of ``store``: how long it waits, all in all, for demotions to make room."""
LOAD_DEADLINE_S = 30.0
"""Default of ``load`` and ``prefetch``. Each read has its tier's deadline besides."""
FLUSH_DEADLINE_S = 60.0
OPEN_TRIM_S = 30.0
"""How long ``open`` waits for an exclusive tier whose capacity was lowered to shrink to it."""
CLOSE_DEADLINE_S = 10.0
"""How long a close, or a reset, waits for calls in flight before it gives a hung tier up."""


class TieringOffloadingManager:
    """Keeps KV-cache blocks in a CPU tier and in secondary tiers behind it.

    Use it as ``async with``, or call ``open`` and ``aclose``. Calls may come from any one event loop at a time; all I/O
    runs on a loop of the manager's own. Buffers stay the caller's: a call that was given one returns, or raises on
    cancellation, only when nothing of ours touches it.
    """

    def __init__(
        self, config: TieringConfig, layout: KVLayout, *, epoch: str | None = None, clock: Clock | None = None
    ) -> None:
        """Nothing is mapped, opened or started before ``open``. ``epoch`` (default: the configuration's) names the weights in use."""
        self._config = config
        self._layout = layout
        self._epoch = config.epoch if epoch is None else epoch
        self._clock = SystemClock() if clock is None else clock
        self._parts: Parts | None = None
        self._metrics: MetricsServer | None = None
        self._closed = False
        self._active = 0
        self._sync = SyncFace(self)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], layout: KVLayout, *, epoch: str | None = None
    ) -> TieringOffloadingManager:
        """A manager configured by a YAML file. Raises ``ConfigError`` that names the place and the remedy."""
        return cls(TieringConfig.from_yaml(path), layout, epoch=epoch)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> TieringConfig:
        return self._config

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def epoch(self) -> str:
        """The weight epoch in use."""
        return self._epoch

    @property
    def sync(self) -> SyncFace:
        """The non-blocking face for an engine's scheduler."""
        return self._sync

    @property
    def parts(self) -> Parts:
        """The organs, for connectors and tools. Raises ``ClosedError`` unless the manager is open."""
        if self._parts is None or self._closed:
            raise ClosedError("the manager is closed" if self._closed else "the manager is not open: use `async with`")
        return self._parts

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Map the arena, start the I/O thread, open every tier and learn what it holds.

        Raises ``ConfigError`` for what an operator must fix. A tier that is merely unreachable stays DOWN and is tried
        again in the background. After an error, or a cancellation, everything is closed again.
        """
        if self._closed or self._parts is not None:
            raise ClosedError("a manager opens once; make a new one")
        parts = self._parts = build(self._config, self._layout, self._clock)
        parts.io.start()
        try:
            failures = await self._on_io(parts.driver.open(namespace_of(self._layout, self._epoch)))
            _raise_config_error(failures)
            await flows.trim(parts, self._clock.now() + OPEN_TRIM_S)
            metrics = self._config.metrics
            if metrics.prometheus_port is not None:
                self._metrics = MetricsServer(self.stats, metrics.host, metrics.prometheus_port)
        except BaseException:
            await self.aclose(flush=False)
            raise

    async def aclose(self, *, deadline_s: float = CLOSE_DEADLINE_S, flush: bool = True) -> list[str]:
        """Stop admitting, flush if configured, wait for what runs, close the tiers; names of tiers given up as hung.

        Idempotent. The arena is unmapped only if no transfer can touch it any more. Finishes even if cancelled.
        """
        parts = self._parts
        if self._closed or parts is None:
            self._closed = True
            return []
        self._closed = True
        closing = asyncio.ensure_future(self._close(parts, deadline_s, flush))
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    async def _close(self, parts: Parts, deadline_s: float, flush: bool) -> list[str]:
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if flush and self._config.flush_on_close_s > 0:
            await flows.flush(parts, self._clock.now() + self._config.flush_on_close_s)
        abandoned = list(await self._on_io(parts.driver.aclose(deadline_s)))
        until_s = self._clock.now() + deadline_s
        while self._active:
            seen = parts.progress.beats
            if self._active and not await wait_until(self._clock, parts.progress.after(seen), until_s):
                break
        await asyncio.to_thread(parts.io.stop, deadline_s)
        parts.copies.shutdown(wait=False)
        parts.arena.close(abandon=bool(abandoned) or self._active > 0)
        return abandoned

    async def _on_io(self, work: Any) -> Any:
        """Run a coroutine on the I/O loop and wait for it here, also when we are cancelled."""
        assert self._parts is not None
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._parts.io.loop))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.cancel()
            await asyncio.wait({future})
            raise

    @contextlib.contextmanager
    def _call(self) -> Iterator[Parts]:
        """One call of the caller's: refused when closed, waited for by ``aclose``."""
        parts = self.parts
        self._active += 1
        try:
            yield parts
        finally:
            self._active -= 1
            if self._closed:
                parts.progress.beat()

    # -- blocks -------------------------------------------------------------------------------------------------------

    async def store(
        self,
        keys: Keys | KeysByGroup,
        source: Any,
        *,
        parent: BlockKey | Mapping[int, BlockKey | None] | None = None,
        deadline_s: float = STORE_DEADLINE_S,
    ) -> StoreReport:
        """Copy the blocks of one contiguous run into the primary tier; demotion follows in the background.

        ``source``: uint8 ``(len(keys), block_bytes)``, a CPU tensor, array or buffer; it may be reused on return.
        ``parent``: the key before ``keys[0]`` in its prefix; without it the parent already known is kept. Where not all
        fit, the head is kept and the tail refused. With several groups all three are mappings by group. Raises
        ``ShapeError`` before anything is copied.
        """
        with self._call() as parts:
            until_s = self._clock.now() + deadline_s
            runs = self._runs(keys, source, "source", writable=False)
            stored = 0
            outcomes = []
            for group, run, rows in runs:
                before = parent.get(group) if isinstance(parent, Mapping) else parent
                if before is not None:
                    _check_keys((before,), "parent")
                part, copied = await flows.store_run(parts, group, run, rows, before, until_s)
                outcomes += part
                stored += copied
            good = sum(outcome.ok for outcome in outcomes)
            return StoreReport(stored, good - stored, len(outcomes) - good, tuple(outcomes))

    async def match(self, keys: Keys | KeysByGroup, *, deadline_s: float | None = None) -> PrefixMatch:
        """The longest run that some tier has. Looks only: takes no slot, loads nothing; asks tiers that do not know.

        Waits for such answers up to the slowest tier's deadline, or ``deadline_s``. With several groups: the run that
        every group has, in tokens; ``blocks`` then counts the blocks of the group that ends first.
        """
        with self._call() as parts:
            limit_s = max((tier.deadline_s for tier in self._config.tiers), default=0.0)
            until_s = self._clock.now() + (limit_s if deadline_s is None else deadline_s)
            matches = [await flows.match_run(parts, group, run, until_s) for group, run in self._key_runs(keys)]
            return min(matches, key=lambda match: match.tokens)

    @overload
    async def load(self, keys: Keys, out: Any, *, deadline_s: float = ...) -> int: ...
    @overload
    async def load(self, keys: KeysByGroup, out: Mapping[int, Any], *, deadline_s: float = ...) -> dict[int, int]: ...
    async def load(
        self, keys: Keys | KeysByGroup, out: Any, *, deadline_s: float = LOAD_DEADLINE_S
    ) -> int | dict[int, int]:
        """Fill ``out[:n]`` with the leading blocks that can be had in time and return n; the rest of ``out`` is untouched.

        ``out``: writable uint8 with at least ``len(keys)`` rows of ``block_bytes``. What is not in the primary tier is
        promoted, as far as it fits. With several groups: mappings by group, and n for each, cut to the tokens that all
        groups have. Cancellation drops queued reads.
        """
        with self._call() as parts:
            until_s = self._clock.now() + deadline_s
            loaded = {
                group: await flows.load_run(parts, group, run, rows, until_s)
                for group, run, rows in self._runs(keys, out, "out", writable=True)
            }
            return self._aligned(loaded) if isinstance(keys, Mapping) else loaded[0]

    async def prefetch(self, keys: Keys | KeysByGroup, *, deadline_s: float = LOAD_DEADLINE_S) -> int:
        """Promote the leading run into the primary tier, as far as it fits, and take nothing out; blocks now there."""
        with self._call() as parts:
            until_s = self._clock.now() + deadline_s
            total = 0
            for group, run in self._key_runs(keys):
                async with flows.leased_run(parts, group, run, until_s) as slots:
                    total += len(slots)
            return total

    @contextlib.asynccontextmanager
    async def holding(self, keys: Keys | KeysByGroup, source: Any) -> AsyncIterator[None]:
        """While the block runs the caller still holds these blocks in ``source`` (as in ``store``).

        What the primary tier lacks of them, now or after an eviction, is copied again from ``source``, as far as idle
        room allows (``restore`` in the configuration). ``source`` may be reused once the block has ended.
        """
        with self._call() as parts:
            async with contextlib.AsyncExitStack() as stack:
                for group, run, rows in self._runs(keys, source, "source", writable=False):
                    await stack.enter_async_context(flows.held_run(parts, group, run, rows))
                yield

    # -- the whole ----------------------------------------------------------------------------------------------------

    async def flush(self, *, deadline_s: float = FLUSH_DEADLINE_S) -> FlushReport:
        """Offer every owed demotion and wait until each is acknowledged or lost, at most ``deadline_s``."""
        with self._call() as parts:
            return await flows.flush(parts, self._clock.now() + deadline_s)

    async def reset(self, epoch: str, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """The weights changed: from now on every tier misses, until blocks of ``epoch`` are stored (or were, earlier).

        Reads in flight end as misses. Bounded: a tier that hangs for ``deadline_s`` is given up.
        """
        with self._call() as parts:
            self._epoch = epoch

            def switch() -> None:
                parts.gate.handle(ev.Reset(self._clock.now()))

            failures = await self._on_io(parts.driver.reopen(namespace_of(self._layout, epoch), deadline_s, switch))
            _raise_config_error(failures)
            await flows.trim(parts, self._clock.now() + deadline_s)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain values: the numbers that the metrics page shows."""
        return collect_stats(self.parts)

    async def usage(self) -> dict[str, Usage | None]:
        """What each tier itself says it occupies; None where it cannot tell."""
        with self._call() as parts:
            usage: dict[str, Usage | None] = await self._on_io(parts.driver.usage())
            return usage

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _key_runs(self, keys: Keys | KeysByGroup) -> list[tuple[int, tuple[BlockKey, ...]]]:
        by_group = keys if isinstance(keys, Mapping) else {0: keys}
        groups = len(self._layout.groups)
        if groups > 1 and set(by_group) != set(range(groups)):
            raise ShapeError(f"keys: the layout has groups 0..{groups - 1}; give a mapping with a key list for each")
        if set(by_group) - set(range(groups)):
            raise ShapeError(f"keys: no such group in {sorted(by_group)}; the layout has {groups}")
        runs = [(group, tuple(by_group[group])) for group in sorted(by_group)]
        for _, run in runs:
            _check_keys(run, "keys")
        return runs

    def _runs(
        self, keys: Keys | KeysByGroup, buffers: Any, name: str, *, writable: bool
    ) -> list[tuple[int, tuple[BlockKey, ...], flows.Rows]]:
        by_group = buffers if isinstance(keys, Mapping) else {0: buffers}
        if not isinstance(by_group, Mapping):
            raise ShapeError(f"{name}: keys come by group, so {name} must be a mapping by group too")
        runs = []
        for group, run in self._key_runs(keys):
            if group not in by_group:
                raise ShapeError(f"{name}: nothing for group {group}")
            size = self._layout.groups[group].block_bytes
            runs.append((group, run, as_rows(by_group[group], len(run), size, writable=writable, name=name)))
        return runs

    def _aligned(self, loaded: Mapping[int, int]) -> dict[int, int]:
        """Blocks a group that stand for the same tokens: the most that all groups have."""
        sizes = {group: self._layout.groups[group].tokens_per_block for group in loaded}
        step = math.lcm(*sizes.values())
        tokens = min(n * sizes[group] for group, n in loaded.items()) // step * step
        return {group: tokens // size for group, size in sizes.items()}


def _raise_config_error(failures: Mapping[str, Exception | None]) -> None:
    for failure in failures.values():
        if isinstance(failure, ConfigError):
            raise failure


def _check_keys(keys: Sequence[object], name: str) -> None:
    for index, key in enumerate(keys):
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ShapeError(f"{name}[{index}]: a block key is 1 to {KEY_BYTES_MAX} bytes; got {what}")
