"""``TieringOffloadingManager``: the async face. ``sync`` is the non-blocking face for schedulers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import operator
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, overload

from tiering import flows
from tiering.build import Parts, build, namespace_of
from tiering.config import TieringConfig
from tiering.core import events as ev
from tiering.errors import ClosedError, ConfigError, ShapeError, TieringError
from tiering.memory.buffers import as_rows
from tiering.metrics import MetricsServer
from tiering.publisher import EventPublisher
from tiering.runtime.clock import Clock, SystemClock
from tiering.runtime.event_log import EventLog
from tiering.runtime.gate import KEYS_PER_HOLD_MAX, check_keys
from tiering.runtime.waiting import outcome_of
from tiering.stats import collect_stats
from tiering.sync import SyncFace
from tiering.types import BlockKey, FlushReport, KvEventBatch, KVLayout, PrefixMatch, StoreReport, TierState, Usage

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
OPEN_ANSWER_S = 60.0
"""How long ``open`` waits for the I/O thread. Each tier has a deadline of its own; past this one something blocks the loop."""
ANSWER_MARGIN_S = 2.0
"""How long past its deadline the I/O thread may stay silent before it counts as blocked, in real seconds."""
HUNG_THREADS_S = 1.0
"""How long a close waits for threads of tiers that were given up as hung, in real seconds."""


class TieringOffloadingManager:
    """Keeps KV-cache blocks in a CPU tier and in secondary tiers behind it.

    Use it as ``async with``, or call ``open`` and ``aclose``. Calls may come from any one event loop at a time; all I/O
    runs on a loop of the manager's own. Buffers stay the caller's: a call that was given one returns, or raises on
    cancellation, only when nothing of ours touches it.
    """

    def __init__(
        self,
        config: TieringConfig,
        layout: KVLayout,
        *,
        epoch: str | None = None,
        clock: Clock | None = None,
        shared_arena: bool = False,
    ) -> None:
        """Nothing is mapped, opened or started before ``open``. ``epoch`` (default: the configuration's) names the weights in use.

        ``shared_arena``: an engine's workers in other processes map the slots too. Such memory has no huge pages on most
        kernels, so that direct I/O is slower; without it the arena is this process's own.
        """
        self._config = config
        self._layout = layout
        self._epoch = config.epoch if epoch is None else epoch
        self._clock = SystemClock() if clock is None else clock
        self._shared_arena = shared_arena
        self._lock = threading.Lock()
        """Guards the step from one stage to the next: not open, open (``_parts``), closing (``_closing``)."""
        self._parts: Parts | None = None
        self._closing: concurrent.futures.Future[list[str]] | None = None
        self._closer: threading.Thread | None = None
        self._metrics: MetricsServer | None = None
        self._publisher: EventPublisher | None = None
        self._resets = 0
        """Resets under way."""
        self._sync = SyncFace(self)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], layout: KVLayout, *, epoch: str | None = None, shared_arena: bool = False
    ) -> TieringOffloadingManager:
        """A manager configured by a YAML file. Raises ``ConfigError`` that names the place and the remedy."""
        return cls(TieringConfig.from_yaml(path), layout, epoch=epoch, shared_arena=shared_arena)

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
        if self._closing is not None:
            raise ClosedError("the manager is closed")
        return self.organs

    @property
    def organs(self) -> Parts:
        """As ``parts``, but after a close too: for reports and releases, which must not fail then."""
        if self._parts is None:
            raise ClosedError("the manager is not open: use `async with`")
        return self._parts

    @property
    def metrics_port(self) -> int | None:
        """The TCP port of the metrics page (the configured port may be 0); None while there is none."""
        return None if self._metrics is None else self._metrics.port

    @property
    def events_endpoint(self) -> str | None:
        """The ZeroMQ address where events are published (a configured port may be ``*``); None while there is none."""
        return None if self._publisher is None else self._publisher.endpoint

    @property
    def events_replay_endpoint(self) -> str | None:
        """The ZeroMQ address where missed events are asked for; None while there is none."""
        return None if self._publisher is None else self._publisher.replay_endpoint

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
        with self._lock:
            if self._closing is not None or self._parts is not None:
                raise ClosedError("a manager opens once; make a new one")
            parts = self._parts = build(self._config, self._layout, self._clock, shared_arena=self._shared_arena)
        try:
            parts.io.start()
            metrics = self._config.metrics
            if metrics.prometheus_port is not None:
                self._metrics = MetricsServer(lambda: collect_stats(parts), metrics.host, metrics.prometheus_port)
            if parts.events is not None and self._config.events.zmq_endpoint is not None:
                self._publisher = _publisher_of(parts, parts.events)
            opening = parts.driver.open(namespace_of(self._layout, self._epoch))
            _raise_config_error(await self._on_io(parts, opening, OPEN_ANSWER_S))
            await flows.trim(parts, self._clock.now() + OPEN_TRIM_S)
            if self._closing is not None:
                raise ClosedError("the manager was closed while it opened")
        except BaseException:
            await self.aclose(flush=False)
            raise

    async def aclose(self, *, deadline_s: float = CLOSE_DEADLINE_S, flush: bool = True) -> list[str]:
        """Stop admitting, flush if configured, wait for what runs, close the tiers; names of tiers given up as hung.

        Calls under way end soon, with what they have. Idempotent: a further call joins the first. The arena is unmapped
        only if no transfer can touch it any more. Finishes even if cancelled.
        """
        closing = self.begin_close(deadline_s=deadline_s, flush=flush)
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await outcome_of(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        self.end_close()
        if cancelled is not None:
            raise cancelled
        return closing.result()

    def begin_close(
        self, *, deadline_s: float = CLOSE_DEADLINE_S, flush: bool = True
    ) -> concurrent.futures.Future[list[str]]:
        """``aclose`` for callers without a loop: does not wait. The close does not depend on any loop of the caller's."""
        with self._lock:
            if self._closing is None:
                self._closing = concurrent.futures.Future()
                if self._parts is None:
                    self._closing.set_result([])
                else:
                    args = (self._closing, self._parts, deadline_s, flush)
                    self._closer = threading.Thread(target=self._close, args=args, name="kvtiering-close")
                    self._closer.start()
            return self._closing

    def end_close(self) -> None:
        """After ``begin_close``: block until nothing of the manager is left, not even the thread that closes it."""
        if self._closer is not None:
            self._closer.join()

    def _close(
        self, closing: concurrent.futures.Future[list[str]], parts: Parts, deadline_s: float, flush: bool
    ) -> None:
        try:
            closing.set_result(self._close_parts(parts, deadline_s, flush))
        except BaseException as error:
            closing.set_exception(error)

    def _close_parts(self, parts: Parts, deadline_s: float, flush: bool) -> list[str]:
        """Blocks; every wait in it is bounded, whatever state the parts are in."""
        flush_s = self._config.flush_on_close_s if flush else 0.0
        hung: list[str] = []
        flows.stop_admitting(parts)
        try:
            limit_s = flush_s + deadline_s + ANSWER_MARGIN_S
            hung = parts.io.run(flows.wind_down(parts, deadline_s, flush_s), limit_s)
        except (ClosedError, TimeoutError):  # its thread died, or a backend blocks it: no tier could be closed
            closed = TierState.CLOSED.value
            hung = [name for name, health in parts.driver.health().items() if health["state"] != closed]
            parts.gate.end_flushes(self._clock.now())
            asyncio.run(parts.calls.zero(self._clock, self._clock.now() + deadline_s))
        finally:
            if self._metrics is not None:
                self._metrics.close()
            if parts.events is not None:
                parts.events.close()
            if self._publisher is not None:
                self._publisher.close()
            left = parts.io.stop(HUNG_THREADS_S if hung else deadline_s)
            in_use = bool(hung or left or parts.calls.count or parts.gate.busy_slots())
            parts.copies.shutdown(wait=not parts.calls.count)
            parts.arena.close(abandon=in_use)
        return hung

    async def _on_io(self, parts: Parts, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine on the I/O loop and wait for it here. If we are cancelled, it goes on there by itself."""
        try:
            return await outcome_of(parts.io.submit(work), limit_s)
        except concurrent.futures.CancelledError:
            raise ClosedError("the I/O thread ended before the call did") from None

    @contextlib.contextmanager
    def _call(self) -> Iterator[Parts]:
        """One call of the caller's: refused when closed, waited for by a close."""
        parts = self.parts
        with parts.calls.one():
            yield parts

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
            until_s, epoch = self._clock.now() + deadline_s, self._turn(parts)
            runs = self._runs(keys, source, "source", writable=False)
            parents = parent if isinstance(parent, Mapping) else dict.fromkeys((group for group, _, _ in runs), parent)
            check_keys((before for before in parents.values() if before is not None), "parent")
            stored = 0
            outcomes = []
            for group, run, rows in runs:
                part, copied = await flows.store_run(parts, group, run, rows, parents.get(group), until_s, epoch)
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
            until_s, epoch = self._clock.now() + deadline_s, self._turn(parts)
            loaded = {
                group: await flows.load_run(parts, group, run, rows, until_s, epoch)
                for group, run, rows in self._runs(keys, out, "out", writable=True)
            }
            return self._aligned(loaded) if isinstance(keys, Mapping) else loaded[0]

    async def prefetch(self, keys: Keys | KeysByGroup, *, deadline_s: float = LOAD_DEADLINE_S) -> int:
        """Promote the leading run into the primary tier, as far as it fits, and take nothing out; blocks now there."""
        with self._call() as parts:
            until_s, epoch = self._clock.now() + deadline_s, self._turn(parts)
            total = 0
            for group, run in self._key_runs(keys):
                async with flows.leased_run(parts, group, run, until_s, epoch) as slots:
                    total += len(slots)
            return total

    @contextlib.asynccontextmanager
    async def holding(self, keys: Keys | KeysByGroup, source: Any) -> AsyncIterator[None]:
        """While the block runs the caller still holds these blocks in ``source`` (as in ``store``).

        What the primary tier lacks of them, now or after an eviction, is copied again from ``source``, as far as idle
        room allows (``restore`` in the configuration), until the block ends, or a reset or close comes. ``source`` may
        be reused once the block has ended.
        """
        parts = self.parts
        epoch = self._turn(parts)
        async with contextlib.AsyncExitStack() as stack:
            for group, run, rows in self._runs(keys, source, "source", writable=False):
                for start in range(0, len(run), KEYS_PER_HOLD_MAX):
                    part = slice(start, start + KEYS_PER_HOLD_MAX)
                    await stack.enter_async_context(flows.held_run(parts, group, run[part], rows[part], epoch))
            yield

    # -- the whole ----------------------------------------------------------------------------------------------------

    async def flush(self, *, deadline_s: float = FLUSH_DEADLINE_S) -> FlushReport:
        """Offer every owed demotion and wait until each is acknowledged or lost, at most ``deadline_s``."""
        with self._call() as parts:
            return await flows.flush(parts, self._clock.now() + deadline_s)

    async def reset(self, epoch: str, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """The weights changed: from now on every tier misses, until blocks of ``epoch`` are stored (or were, earlier).

        Loads under way end as misses, or have returned before this does; stores under way are refused. So are calls
        that begin before it returns. Bounded: a tier that hangs for ``deadline_s`` is given up. Cancelled, it takes
        effect at once all the same, and the tiers follow in the background.
        """
        with self._call() as parts, self._resetting():
            until_s = self._clock.now() + deadline_s
            switched = False

            def switch() -> None:
                nonlocal switched
                switched = True
                parts.gate.handle(ev.Reset(self._clock.now()))
                self._epoch = epoch

            reopening = parts.driver.reopen(namespace_of(self._layout, epoch), deadline_s, switch)
            failures: Mapping[str, Exception | None] = {}
            try:
                failures = await self._on_io(parts, reopening, deadline_s + ANSWER_MARGIN_S)
            except BaseException as error:
                # Whatever becomes of the tiers, the primary one must forget the old weights.
                if not switched:
                    switch()
                if not isinstance(error, TieringError) or self._closing is not None or parts.io.alive:
                    raise
            if not await parts.reads.zero(self._clock, until_s):
                raise TieringError(f"a load still copied blocks of the old weights after {deadline_s:g} s")
            _raise_config_error(failures)
            await flows.trim(parts, until_s)

    @contextlib.contextmanager
    def _resetting(self) -> Iterator[None]:
        self._resets += 1
        try:
            yield
        finally:
            self._resets -= 1

    async def events(self, *, since: int | None = None) -> AsyncIterator[KvEventBatch]:
        """What comes to tiers and goes from them, in order, until the manager closes. Needs ``events`` in the configuration.

        ``since``: begin with this sequence number, as far as it is kept (None: with what happens next). A follower that
        falls behind by more than ``batches_max`` sees the sequence jump. Raises ``ConfigError`` if events are not recorded.
        """
        parts = self.parts
        if parts.events is None:
            raise ConfigError("events are not recorded; set `events: {enabled: true}` in the configuration")
        log = parts.events
        sequence = log.next_sequence if since is None else since
        while True:
            seen = log.pulse.beats
            for batch in log.since(sequence):
                sequence = batch.sequence + 1
                yield batch
            if log.closed:
                return
            if log.next_sequence <= sequence:
                await log.pulse.beyond(seen, self._clock)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain values: the numbers that the metrics page shows."""
        return collect_stats(self.parts)

    async def usage(self) -> dict[str, Usage | None]:
        """What each tier itself says it occupies; None where it cannot tell."""
        with self._call() as parts:
            limit_s = sum(tier.deadline_s for tier in self._config.tiers) + ANSWER_MARGIN_S
            return await self._on_io(parts, parts.driver.usage(), limit_s)

    def _turn(self, parts: Parts) -> int:
        """The gate's epoch for a call that begins now. During a reset nobody can tell whose bytes a call is about: none."""
        return flows.NO_EPOCH if self._resets else parts.gate.epoch

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _key_runs(self, keys: Keys | KeysByGroup) -> list[tuple[int, tuple[BlockKey, ...]]]:
        by_group = keys if isinstance(keys, Mapping) else {0: keys}
        groups = len(self._layout.groups)
        if set(by_group) != set(range(groups)):
            raise ShapeError(f"keys: the layout has groups 0..{groups - 1}; give a mapping with a key list for each")
        runs = [(group, tuple(by_group[group])) for group in range(groups)]
        for _, run in runs:
            check_keys(run, "keys")
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


def _publisher_of(parts: Parts, log: EventLog) -> EventPublisher:
    shared = frozenset(tier.spec.name for tier in parts.core.world.tiers if tier.spec.capabilities.shared)
    died = functools.partial(operator.setitem, parts.notices, "events_publisher_died", 1)
    return EventPublisher(log, parts.config.events, parts.layout, shared, died)
