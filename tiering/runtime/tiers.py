"""One tier from open to close: its backend, its state, and the trials that bring it back."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Final

from tiering.api import Backend
from tiering.core.events import TierChanged, TierScanned
from tiering.errors import BackendError, ClosedError
from tiering.runtime.alarms import TICK_S, Alarm, Alarms
from tiering.runtime.breaker import BreakerState
from tiering.runtime.counters import TierCounters
from tiering.runtime.lanes import Lane
from tiering.runtime.ports import LaneSpec, Notice, Run, TierHealth, Wiring, log
from tiering.types import Namespace, Outcome, OutcomeCode, TierState

TRIAL_KEY: Final = b"\0kvtiering-trial"
"""Looked up in a tier that was down. No block has this key; MISSING is as good an answer as OK."""

SCAN_EVENT_BLOCKS_MAX: Final = 2048
"""Most entries in one ``TierScanned``: the gate's lock is held for one event at a time."""

LANDING_SHARE: Final = 0.75
"""Of a close's deadline, the part in which what runs may land by itself; then it is cancelled."""

_REFUSALS: Final[dict[TierState, tuple[Outcome | None, Outcome | None]]] = {
    TierState.OPENING: (Outcome.failed("tier opening"), None),
    TierState.UP: (None, None),
    TierState.DEGRADED: (None, Outcome.failed("tier degraded: stores fail")),
    TierState.DOWN: (Outcome.failed("tier down"), None),
    TierState.CLOSING: (Outcome.CANCELLED, None),
    TierState.CLOSED: (Outcome.CANCELLED, None),
    TierState.ABANDONED: (Outcome.CANCELLED, None),
}
"""What a lane answers at once in each state: to every command, and to stores."""


class _Trial:
    """An attempt to open the backend, or to look up ``TRIAL_KEY`` in an open one. At most one a tier runs at a time."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.settled: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        """Its verdict: None is success. It may come before the task returns (deadline, close), and then stands."""
        self.task: asyncio.Task[None] | None = None
        self.alarm: Alarm | None = None


class Tier:
    """Owns a tier's backends (one at a time), its lane and breakers. Everything but ``health`` is for the I/O loop.

    State: OPENING until the first verdict; then DOWN while the read breaker is not closed, DEGRADED while the write
    breaker is open, else UP. Every change is posted. A backend that could not be opened is DOWN, too, and each trial
    then tries a new one.
    """

    def __init__(
        self,
        spec: LaneSpec,
        factory: Callable[[], Backend],
        wiring: Wiring,
        alarms: Alarms,
        on_death: Callable[[str, str, BaseException], None],
    ) -> None:
        """``factory`` makes a backend that was never opened. ``on_death(tier, task, exception)`` reports."""
        self.spec = spec
        self.counters = TierCounters()
        self._factory = factory
        self._wiring = wiring
        self._alarms = alarms
        self._on_death = on_death
        self._dead_tasks = 0
        self._namespace: Namespace | None = None
        self._trial: _Trial | None = None
        self._retry_alarm: Alarm | None = None
        self._turn = 0
        """Counts detaches and closes, so that a ``reopen`` notices that it was overtaken."""
        self._leaving: list[asyncio.Task[None]] = []
        """Closes of backends, until they are done."""
        self._outlasted = False
        """A backend said at its close that calls still ran."""
        self._phase: TierState | None = TierState.OPENING
        """The state while the breakers have no say: before the first verdict, and from close on."""
        self._reason = ""
        self.state = TierState.OPENING
        self._logged = TierState.UP
        self.lane = Lane(
            spec, wiring, alarms, self.counters, on_break=self._review, on_room=self._arm, on_death=self.died
        )

    def health(self) -> TierHealth:
        """A snapshot. Any thread."""
        return {
            "state": self.state.value,
            "reason": "" if self.state is TierState.UP else self._reason,
            "dead_tasks": self._dead_tasks,
            "read": self.lane.reads.health(),
            "write": self.lane.writes.health(),
        }

    def died(self, task: str, error: BaseException) -> None:
        """A task of this tier ended by an exception that nobody expected."""
        self._dead_tasks += 1
        self.counters.worker_died()
        self._on_death(self.spec.name, task, error)

    # Opening and closing.

    async def open(self, namespace: Namespace) -> Exception | None:
        """Try to open a backend for ``namespace``: None if it is UP, else why it is DOWN (and tried again).

        Takes at most ``open_deadline_s``. Cancelled, it goes on in the background; ``close`` ends it.
        """
        self._namespace = namespace
        self._phase = TierState.OPENING
        self.lane.reads.breaker.start_over(BreakerState.HALF_OPEN)
        self.lane.writes.breaker.start_over(BreakerState.CLOSED)
        self._move(TierState.OPENING)
        trial = self._begin_trial()
        await asyncio.wait((trial.settled,))
        return trial.settled.result()

    def detach(self) -> int:
        """Take no command and report no verdict from now on, until ``reopen``: at once, in one step of the loop.

        Returns the number that entitles to ``reopen``.
        """
        self._turn += 1
        if self._phase in (None, TierState.OPENING):
            self._enter(TierState.OPENING, "reopening")
        return self._turn

    async def reopen(self, namespace: Namespace, deadline_s: float, turn: int) -> Exception | None:
        """After ``detach``: close the backend within ``deadline_s``, then ``open`` a new one for ``namespace``.

        A backend that does not close in time is ABANDONED for good. Gives way to a later ``reopen`` or ``close``.
        """
        landed = self._phase is not TierState.OPENING or await self._shut(deadline_s)
        if self._phase is not TierState.OPENING or turn != self._turn:
            return ClosedError(f"{self.spec.name} is {self.state.value}; this reopening was given up")
        if not landed:
            self._abandon()
            return BackendError(self._reason, tier=self.spec.name, op="aclose")
        return await self.open(namespace)

    async def close(self, deadline_s: float) -> None:
        """Cancel what waits, let land what runs, close the backend: CLOSED, or past the deadline ABANDONED."""
        if self._phase in (TierState.CLOSED, TierState.ABANDONED):
            return
        self._turn += 1
        self._enter(TierState.CLOSING, "closing")
        if await self._shut(deadline_s):
            self._enter(TierState.CLOSED, "closed")
        else:
            self._abandon()

    def cut(self) -> None:
        """The loop ends now: end what waits. What runs is cancelled by its task group; the backend stays as it is."""
        if self._phase not in (TierState.CLOSED, TierState.ABANDONED):
            self._enter(TierState.CLOSING, "the I/O loop ended without a close")

    def _enter(self, phase: TierState, reason: str) -> None:
        self._phase, self._reason = phase, reason
        trial = self._trial
        if trial is not None and not trial.settled.done():
            trial.settled.set_result(ClosedError(f"{self.spec.name} was closed while it opened"))
            if trial.alarm is not None:
                trial.alarm.cancel()
            if trial.task is not None:
                trial.task.cancel()
        self._arm()
        self._move(phase)

    def _abandon(self) -> None:
        self._enter(TierState.ABANDONED, f"hung at close; {len(self.lane.running())} operations never returned")
        self.lane.lose_running()

    async def _shut(self, deadline_s: float) -> bool:
        """End all that runs, and the backend. False if something still hung at the deadline. Two may run at a time."""
        clock = self._wiring.clock
        until_s = clock.now() + deadline_s
        trial_tasks = [self._trial.task] if self._trial is not None and self._trial.task is not None else []
        await self._alarms.wait(self.lane.running(), until_s - (1 - LANDING_SHARE) * deadline_s)
        self.lane.cancel_running()
        backend, self.lane.backend = self.lane.backend, None
        if backend is not None:
            close = functools.partial(self._end_backend, backend, max(0.0, until_s - clock.now()))
            self._leaving.append(self._wiring.start(close, f"tiering-{self.spec.name}-aclose"))
        if not await self._alarms.wait([*self.lane.running(), *trial_tasks, *self._leaving], until_s):
            for task in self._leaving:
                # Its last chance to let go; nobody waits for it any more.
                task.cancel()
            return False
        self._leaving.clear()
        return not self._outlasted

    async def _end_backend(self, backend: Backend, deadline_s: float) -> None:
        self._outlasted |= not await self._close_backend(backend, deadline_s)

    async def _close_backend(self, backend: Backend, deadline_s: float) -> bool:
        """False if the backend says that calls outlast the deadline."""
        try:
            await backend.aclose(deadline_s)
        except BackendError as error:
            log.warning("tier %s: aclose failed: %s", self.spec.name, error)
            return False
        except Exception as error:
            what = f"{type(backend).__name__}.aclose raised {error!r}; rule 9 allows BackendError"
            log.exception("tier %s: %s", self.spec.name, what)
            self._wiring.notify(Notice("backend_defect", self.spec.name, what))
        return True

    # Trials.

    def _begin_trial(self) -> _Trial:
        self._trial = trial = _Trial(self.lane.reads.breaker.generation)
        backend = self.lane.backend
        if backend is None:
            run, limit_s, name = functools.partial(self._try_open, trial), self.spec.open_deadline_s, "open"
        else:
            self.counters.trial()
            run, limit_s, name = functools.partial(self._try_lookup, trial, backend), self.spec.deadline_s, "contains"
        guarded = functools.partial(self._run_trial, run, name)
        trial.task = self._wiring.start(guarded, f"tiering-{self.spec.name}-{name}")
        trial.task.add_done_callback(functools.partial(self._trial_returned, trial))
        late = functools.partial(self._trial_late, trial, name, limit_s)
        trial.alarm = self._alarms.at(self._wiring.clock.now() + limit_s, late)
        return trial

    async def _run_trial(self, run: Run, name: str) -> None:
        try:
            await run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.died(name, error)

    async def _try_open(self, trial: _Trial) -> None:
        backend: Backend | None = None
        try:
            backend = self._factory()
            if self._namespace is None:
                raise ClosedError("a tier was tried before it was opened")
            await backend.open(self._namespace)
            await self._report_scan(backend, trial)
        except Exception as error:
            self._settle(trial, error)
        except BaseException:
            if backend is not None:
                await self._close_backend(backend, self.spec.deadline_s)
            raise
        if trial.settled.done():
            # It failed, or success comes too late: the next trial starts with a new backend.
            if backend is not None:
                await self._close_backend(backend, self.spec.deadline_s)
            return
        self.lane.backend = backend
        self._settle(trial, None)

    async def _report_scan(self, backend: Backend, trial: _Trial) -> None:
        if not (backend.capabilities.exclusive and backend.capabilities.can_scan):
            return
        # All of it before the first part is reported: a scan that fails half way must leave no trace in the core.
        entries = [entry async for batch in backend.scan() for entry in batch]
        if trial.alarm is not None:
            # The deadline is met; the rest is ours and must not be cut short by it.
            trial.alarm.cancel()
        for start in range(0, len(entries), SCAN_EVENT_BLOCKS_MAX):
            if trial.settled.done():
                return
            part = entries[start : start + SCAN_EVENT_BLOCKS_MAX]
            self._wiring.post(TierScanned(self._wiring.clock.now(), self.spec.name, part))
            await asyncio.sleep(0)

    async def _try_lookup(self, trial: _Trial, backend: Backend) -> None:
        try:
            answer = await backend.contains([TRIAL_KEY])
            if len(answer) != 1 or answer[0].code is OutcomeCode.FAILED:
                raise BackendError(f"the trial lookup came back with {answer}", tier=self.spec.name, op="contains")
        except Exception as error:
            self._settle(trial, error)
        else:
            self._settle(trial, None)

    def _trial_late(self, trial: _Trial, op: str, limit_s: float) -> None:
        error = BackendError(f"no answer within {limit_s:g} s", tier=self.spec.name, op=op, retryable=True)
        self._settle(trial, error)
        if trial.task is not None:
            trial.task.cancel()

    def _settle(self, trial: _Trial, error: Exception | None) -> None:
        """The trial's verdict, which counts once."""
        if trial.settled.done():
            return
        if trial.alarm is not None:
            trial.alarm.cancel()
        breaker = self.lane.reads.breaker
        if error is None:
            breaker.succeeded("probe", trial.generation)
        elif breaker.failed("probe", trial.generation, self._wiring.clock.now()):
            self.counters.breaker_opened("read")
        self._phase = None
        trial.settled.set_result(error)
        self._review("" if error is None else str(error) or repr(error))

    def _trial_returned(self, trial: _Trial, _: asyncio.Task[None]) -> None:
        if self._trial is trial:
            self._trial = None
        self._settle(trial, BackendError("the trial ended without a verdict", tier=self.spec.name))
        self._arm()

    def _retry(self) -> None:
        breaker = self.lane.reads.breaker
        if breaker.half_open(self._wiring.clock.now() + TICK_S):
            self._begin_trial()
        else:
            self._review("")

    def _arm(self) -> None:
        """Set the alarm for the next trial, if one is to come. A tier without a free place gets none until one is."""
        if self._retry_alarm is not None:
            self._retry_alarm.cancel()
        if self._phase is not None or self._trial is not None:
            return
        for side in (self.lane.reads, self.lane.writes):
            if side.breaker.state is BreakerState.OPEN:
                if not self.lane.stuck(side):
                    self._retry_alarm = self._alarms.at(side.breaker.retry_at_s, self._retry)
                return

    # The verdict.

    def _review(self, reason: str) -> None:
        """A breaker moved: what is the tier now?"""
        self._reason = reason or self._reason
        if self._phase is not None:
            return
        read, write = self.lane.reads.breaker, self.lane.writes.breaker
        if read.state is not BreakerState.CLOSED:
            self._move(TierState.DOWN)
        else:
            if not self.lane.stuck(self.lane.writes):
                # Due or not, it decides; the core then offers an owed block, which is the trial.
                write.half_open(self._wiring.clock.now() + TICK_S)
            self._move(TierState.DEGRADED if write.state is BreakerState.OPEN else TierState.UP)
        self._arm()

    def _move(self, state: TierState) -> None:
        if state is not self.state:
            self.state = state
            # The core hears first, so that it offers nothing for what the lane now refuses.
            self._wiring.post(TierChanged(self._wiring.clock.now(), self.spec.name, state))
            self._wiring.notify(Notice("state", self.spec.name, state.value))
        self.lane.refuse(*_REFUSALS[state])
        self.lane.pump()
        self._log(state)

    def _log(self, state: TierState) -> None:
        """One line a change. A write trial is none: a full disk would say UP and DEGRADED at each."""
        trying = self.lane.writes.breaker.state is BreakerState.HALF_OPEN and state is TierState.UP
        if state is self._logged or state is TierState.OPENING or (trying and self._logged is TierState.DEGRADED):
            return
        self._logged = state
        bad = state in (TierState.DOWN, TierState.DEGRADED, TierState.ABANDONED)
        log.log(logging.WARNING if bad else logging.INFO, "tier %s is %s%s", self.spec.name, state.value,
                f": {self._reason}" if bad else "")  # fmt: skip
