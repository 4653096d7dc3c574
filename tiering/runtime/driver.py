"""Carries out what the core asks: one loop, one lane a tier, and every outcome reported back.

The gate appends commands from any thread; the I/O loop takes them, in order, to the tiers' lanes. Nothing here decides
what a block is worth: the driver knows queues, deadlines, retries and breakers, and turns whatever a backend does
(answer, fail, hang, break its contract) into exactly one ``OpFinished`` a command, or none if the tier was abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from tiering.api import Backend
from tiering.core.commands import Cancel, Command, Delete, Demote, Probe, Promote, Touch
from tiering.core.events import OpFinished
from tiering.errors import ClosedError, TieringError
from tiering.runtime.alarms import Alarms
from tiering.runtime.clock import Clock
from tiering.runtime.counters import TierCounts
from tiering.runtime.ports import LaneSpec, Notice, Run, Sink, SlotViews, TierHealth, Wiring, log
from tiering.runtime.tiers import Tier
from tiering.types import Namespace, Outcome, TierState, Usage

__all__ = ["Driver", "LaneSpec", "Notice", "Sink", "SlotViews", "TierCounts", "TierHealth"]

LOGGED_DEATHS_MAX: Final = 64
"""Kinds of deaths that get a log line; every death is a notice and is counted."""


class Driver:
    """Runs the tiers of one manager on one loop: that on which ``open`` is called.

    ``submit``, ``health`` and ``counters`` may be called from any thread, the coroutines on that loop only. All tasks
    are children of one task group. One that dies of something unexpected is reported (``worker_died``) and replaced.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        slots: SlotViews,
        pool_bytes: Sequence[int],
        clock: Clock,
        on_notice: Callable[[Notice], None],
    ) -> None:
        """``pool_bytes``: payload bytes of a block, a pool. ``on_notice`` is called on the I/O loop; it must not block."""
        self._clock = clock
        self._on_notice = on_notice
        self._wiring = Wiring(sink, slots, tuple(pool_bytes), clock, self._start, self._notify)
        self._alarms = Alarms(clock, self._start, functools.partial(self._died, ""))
        self._tiers: dict[str, Tier] = {}
        self._inbox: deque[tuple[float, tuple[Command, ...]]] = deque()
        self._woken = False
        """A ``_drain`` is on its way to the loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._logged_deaths: set[tuple[str, str, str]] = set()
        self._closing: asyncio.Task[None] | None = None

    def add_tier(self, spec: LaneSpec, factory: Callable[[], Backend]) -> None:
        """Before ``open``. ``factory`` makes a new, unopened backend: at open, at reopen, and for each retry of an open."""
        if spec.name in self._tiers:
            raise ValueError(f"two tiers are named {spec.name!r}; give one of them another name")
        self._tiers[spec.name] = Tier(spec, factory, self._wiring, self._alarms, self._died)

    def submit(self, commands: Sequence[Command]) -> None:
        """Take commands, in the order of the calls. Any thread; never blocks, never reports from within the call.

        Those that address no tier are the gate's own and are passed over. Deadlines count from here. Once the loop is
        closed nothing is taken or answered any more.
        """
        if not commands:
            return
        self._inbox.append((self._clock.now(), tuple(commands)))
        loop = self._loop
        if self._woken or loop is None:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            # The loop is closed: there is nobody to answer, and nobody who could still touch a slot.
            self._inbox.clear()
            self._woken = False

    async def open(self, namespace: Namespace) -> dict[str, Exception | None]:
        """Open every tier at the same time: None for one that is UP now, else why not.

        Each takes at most its ``open_deadline_s``. A tier that failed is DOWN and tried again at the breaker's pace,
        with a new backend, until ``aclose``; whether a ``ConfigError`` is fatal is for the caller to say. Cancelled,
        it leaves the tiers to ``aclose``.
        """
        if self._loop is not None or self._stopped.is_set():
            raise ClosedError("the driver was opened before; make a new one")
        self._loop = asyncio.get_running_loop()
        entered = self._loop.create_future()
        # The one task without a group: it is the group's own.
        self._root = self._loop.create_task(self._supervise(entered), name="tiering-driver")
        await asyncio.shield(entered)
        if self._stopped.is_set() or self._closing is not None:
            raise ClosedError("the driver was closed while it opened")
        self._drain()
        return await self._each(lambda tier: tier.open(namespace), None)

    async def reopen(
        self, namespace: Namespace, deadline_s: float, switch: Callable[[], None] | None = None
    ) -> dict[str, Exception | None]:
        """Close every backend and open new ones for ``namespace``. Result as of ``open``; returns within ``deadline_s``.

        ``switch`` runs after the last tier was detached and before the first is opened: the place for the core's
        ``Reset``. Then no verdict or scan of the old backends can reach the core behind it, and no command from before
        it a new backend. A backend that hangs is ABANDONED for good; an open that outlasts the deadline goes on in the
        background and is reported by ``TierChanged``. Cancelled, all of it goes on.
        """
        if self._group is None or self._closing is not None:
            raise ClosedError("the driver is not open")
        until_s = self._clock.now() + deadline_s
        turns = {name: tier.detach() for name, tier in self._tiers.items()}
        if switch is not None:
            switch()
        self._drain()
        return await self._each(lambda tier: tier.reopen(namespace, deadline_s, turns[tier.spec.name]), until_s)

    async def aclose(self, deadline_s: float) -> list[str]:
        """Close every tier; the names of those that hung and were ABANDONED. Returns within ``deadline_s``.

        What waits ends CANCELLED. What runs may land until three quarters of the deadline, is then cancelled, and
        has the rest of it to let go. Commands of an abandoned tier that run never finish: their slots are lost.
        Idempotent: a further call joins the first. Cancelled, it goes on in the background.
        """
        if self._group is None or self._root is None or self._root.done():
            self._stopped.set()
            if self._root is not None:
                await asyncio.wait((self._root,))
            return self._abandoned()
        if self._closing is None:
            self._drain()
            self._closing = self._start(functools.partial(self._close_tiers, deadline_s), "tiering-close")
        await asyncio.wait((self._closing,))
        if not self._abandoned():
            await asyncio.wait((self._root,))
        return self._abandoned()

    async def usage(self) -> dict[str, Usage | None]:
        """What each tier's backend says it occupies; None if it is not open, cannot tell, or not by its deadline."""
        found: dict[str, Usage | None] = dict.fromkeys(self._tiers)

        async def ask(name: str, backend: Backend) -> None:
            with contextlib.suppress(TieringError):
                found[name] = await backend.usage()

        for name, tier in self._tiers.items():
            if tier.lane.backend is not None:
                task = self._start(functools.partial(ask, name, tier.lane.backend), f"tiering-{name}-usage")
                await self._alarms.wait([task], self._clock.now() + tier.spec.deadline_s)
        return found

    def health(self) -> dict[str, TierHealth]:
        """A snapshot of each tier. Any thread."""
        return {name: tier.health() for name, tier in self._tiers.items()}

    def counters(self) -> dict[str, TierCounts]:
        """A snapshot of each tier's counters, which only grow. Any thread."""
        return {name: tier.counters.snapshot() for name, tier in self._tiers.items()}

    # The loop's side.

    async def _supervise(self, entered: asyncio.Future[None]) -> None:
        async with asyncio.TaskGroup() as self._group:
            entered.set_result(None)
            try:
                await self._stopped.wait()
            except asyncio.CancelledError:
                # The loop is taken down without a close. Nobody may wait for an answer that cannot come any more, and
                # nothing may be started behind the group's back.
                for tier in self._tiers.values():
                    tier.cut()
                raise

    def _start(self, run: Run, name: str) -> asyncio.Task[None]:
        if self._group is None:
            raise ClosedError("the driver is not open")
        return self._group.create_task(self._guarded(run, name), name=name)

    async def _guarded(self, run: Run, name: str) -> None:
        # An exception that leaves a child would end the whole group, and with it every tier.
        try:
            await run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._died("", name, error)

    def _drain(self) -> None:
        """Hand what was submitted to the lanes."""
        self._woken = False
        while self._inbox:
            submitted_s, commands = self._inbox.popleft()
            for command in commands:
                try:
                    self._route(command, submitted_s)
                except Exception as error:
                    self._died("", "drain", error)
                    if isinstance(command, Probe | Promote | Demote | Delete):
                        self._fail(command, repr(error))

    def _route(self, command: Command, submitted_s: float) -> None:
        if not isinstance(command, Probe | Promote | Demote | Delete | Cancel | Touch):
            return
        tier = self._tiers.get(command.tier)
        if tier is None:
            raise LookupError(f"no tier is named {command.tier!r}")
        match command:
            case Cancel():
                tier.lane.cancel(command.op)
            case Touch():
                tier.lane.touch(command.keys)
            case _:
                tier.lane.submit(command, submitted_s)

    def _fail(self, command: Probe | Promote | Demote | Delete, why: str) -> None:
        count = len(command.items) if isinstance(command, Promote | Demote) else len(command.keys)
        outcomes = (Outcome.failed(f"driver worker died: {why}"),) * count
        self._wiring.post(OpFinished(self._clock.now(), command.op, outcomes))

    async def _each(
        self, act: Callable[[Tier], Coroutine[Any, Any, Exception | None]], until_s: float | None
    ) -> dict[str, Exception | None]:
        """``act`` on every tier at the same time, in the group; a caller that is cancelled or late leaves it running."""
        results: dict[str, Exception | None] = {}

        async def note(name: str, tier: Tier) -> None:
            results[name] = await act(tier)

        tasks = [
            self._start(functools.partial(note, name, tier), f"tiering-{name}-opening")
            for name, tier in self._tiers.items()
        ]
        if tasks and until_s is None:
            await asyncio.wait(tasks)
        elif until_s is not None:
            await self._alarms.wait(tasks, until_s)
        late = TimeoutError("no verdict yet; the tier's state will tell")
        return {name: results.get(name, late) for name in self._tiers}

    async def _close_tiers(self, deadline_s: float) -> None:
        tasks = [
            self._start(functools.partial(tier.close, deadline_s), f"tiering-{name}-closing")
            for name, tier in self._tiers.items()
        ]
        if tasks:
            await asyncio.wait(tasks)
        self._alarms.finish()
        self._stopped.set()

    def _abandoned(self) -> list[str]:
        return [name for name, tier in self._tiers.items() if tier.state is TierState.ABANDONED]

    def _notify(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("on_notice failed on %r", notice)

    def _died(self, tier: str, task: str, error: BaseException) -> None:
        kind = (tier, task, type(error).__name__)
        if kind not in self._logged_deaths and len(self._logged_deaths) < LOGGED_DEATHS_MAX:
            self._logged_deaths.add(kind)
            log.error("task %r of tier %r died and is replaced; reported once", task, tier, exc_info=error)
        self._notify(Notice("worker_died", tier, f"{task}: {error!r}"))
