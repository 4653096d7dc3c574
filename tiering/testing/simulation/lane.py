"""One tier as a process sees it: the driver's lane in virtual time, with its breakers, on a simulated medium.

It keeps what the driver promises: reads and writes have places each, deadlines count from the submission, a call keeps
its place until it has let go of its slots, and each command ends by exactly one ``OpFinished``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from tiering.core import events as ev
from tiering.core.commands import IoCommand
from tiering.runtime.breaker import Breaker, BreakerState
from tiering.testing.simulation.agenda import Agenda, Timer
from tiering.testing.simulation.calls import Call
from tiering.testing.simulation.contents import Arena
from tiering.testing.simulation.injection import Injector
from tiering.testing.simulation.medium import Medium
from tiering.types import Outcome, TierState

DEADLINE: Final = Outcome.failed("deadline")
SCAN_PART: Final = 5
"""Entries in one ``TierScanned``."""

TICK_S: Final = 1e-6
"""Times are floats: what is due this soon is due."""

SHUT_S: Final = 1.0
"""A call that runs so long after its backend was told to close is given up, and the tier with it."""


@dataclass(frozen=True, slots=True)
class LanePlan:
    """How fast a tier is, and how the driver treats it. Seconds."""

    latency_s: float
    deadline_s: float
    ops_max: int
    cooldown_s: float


class Reports(Protocol):
    """Who hears of it: the process."""

    def report(self, *events: ev.Event) -> None: ...


Queue: TypeAlias = "dict[int, Call]"


@dataclass(slots=True)
class Side:
    """One direction: what waits, what runs, and the breaker."""

    breaker: Breaker
    waiting: Queue = field(default_factory=dict)
    running: Queue = field(default_factory=dict)


class Lane:
    def __init__(
        self, plan: LanePlan, medium: Medium, arena: Arena, inject: Injector, agenda: Agenda, reports: Reports
    ) -> None:
        self.plan = plan
        self.medium = medium
        self.name = medium.spec.name
        self.state = TierState.OPENING
        self.epoch = ""
        """Of the open backend; "" while there is none."""
        self._wanted_epoch = ""
        self._arena = arena
        self._inject = inject
        self._agenda = agenda
        self._reports = reports
        self.reads = Side(self._breaker("probe"))
        self.writes = Side(self._breaker("store"))
        self._opening = True
        """Breakers have no say: before the first verdict, and while it closes."""
        self._turn = 0
        """Counts reopenings: what belongs to an earlier one has no effect."""
        self._trial_runs = False
        self._retry: Timer | None = None

    def _breaker(self, trial: str) -> Breaker:
        cooldown_s = self.plan.cooldown_s
        return Breaker(trial=trial, failures_max=3, cooldown_s=cooldown_s, cooldown_max_s=8 * cooldown_s)

    @property
    def serving(self) -> bool:
        """A backend is open, and the core has heard all that its scan had to tell."""
        return bool(self.epoch) and not self._opening and self.state is not TierState.ABANDONED

    # -- what the core asks

    def submit(self, command: IoCommand, submitted_s: float) -> None:
        call = Call.of(command, self._arena, submitted_s + self.plan.deadline_s)
        refusal = self._refusal(call.kind)
        if refusal is not None:
            self._finish(call, (refusal,) * call.size)
            return
        side = self._side(call)
        side.waiting[call.op] = call
        if side is self.reads:
            call.alarm = self._agenda.after(call.due_s - self._agenda.now_s, lambda: self._read_overdue(call))
        self._pump()

    def cancel(self, op: int) -> None:
        for side in (self.reads, self.writes):
            if (call := side.waiting.pop(op, None)) is not None:
                self._finish(call, (Outcome.CANCELLED,) * call.size)

    def _side(self, call: Call) -> Side:
        return self.reads if call.kind in ("probe", "promote") else self.writes

    def _refusal(self, kind: str) -> Outcome | None:
        if self.state is TierState.UP:
            return None
        if self.state is TierState.DEGRADED:
            return Outcome.failed("tier degraded") if kind == "demote" else None
        if self.state is TierState.ABANDONED:
            return Outcome.CANCELLED
        return Outcome.failed(f"tier {self.state.value}")

    # -- running calls

    def _pump(self) -> None:
        for side in (self.reads, self.writes):
            while self.epoch and len(side.running) < self.plan.ops_max and (call := self._next(side)) is not None:
                del side.waiting[call.op]
                self._start(side, call)

    def _next(self, side: Side) -> Call | None:
        """Deletes before stores; of a half-open breaker one store at a time."""
        calls = list(side.waiting.values())
        if side is self.reads:
            return calls[0] if calls else None
        held = side.breaker.state is BreakerState.HALF_OPEN and any(c.kind == "demote" for c in side.running.values())
        return next((c for c in calls if c.kind == "delete"), next((c for c in calls if not held), None))

    def _start(self, side: Side, call: Call) -> None:
        side.running[call.op] = call
        call.generation = side.breaker.generation
        call.start(self.medium, self.epoch, self._inject)
        latency_s = self._inject.latency_s(self.plan.latency_s)
        if self._inject.strikes("slow"):
            latency_s *= 30
        if self._inject.strikes("hung"):
            latency_s += 5 * self.plan.deadline_s
        call.stubborn = self._inject.strikes("stubborn")
        if side is self.writes:
            call.alarm = self._agenda.after(self.plan.deadline_s, lambda: self._write_overdue(call))
        call.landing = self._agenda.after(latency_s, lambda: self._arrive(side, call))

    def _arrive(self, side: Side, call: Call) -> None:
        """The call has got to the medium."""
        if self.medium.outage == "hangs" and call.op in side.running and call.verdict is None:
            self.medium.waiting.append(lambda: self._arrive(side, call))
        elif call.op in side.running:
            self._land(side, call)

    def _land(self, side: Side, call: Call) -> None:
        del side.running[call.op]
        failed = self.medium.outage is not None or self._inject.strikes("call_failed")
        outcomes = call.land(self.medium, self.epoch, self._agenda.now_s, self._inject, failed=failed)
        if not call.lost:
            self._judge(side, call, failed=bool(outcomes) and all(o.code.value == "failed" for o in outcomes))
            self._finish(call, outcomes)
        self._arm()
        self._pump()

    def _finish(self, call: Call, outcomes: tuple[Outcome, ...], *before: ev.Event) -> None:
        if call.alarm is not None:
            call.alarm.cancel()
        self._reports.report(*before, ev.OpFinished(self._agenda.now_s, call.op, outcomes))

    def _read_overdue(self, call: Call) -> None:
        overdue = ev.OpOverdue(self._agenda.now_s, call.op)
        if self.reads.waiting.pop(call.op, None) is not None:
            self._finish(call, (DEADLINE,) * call.size, overdue)
            return
        call.overdue = True
        self._judge(self.reads, call, failed=True)
        self._reports.report(overdue)
        if not call.stubborn:
            self._tell(self.reads, call, DEADLINE)

    def _write_overdue(self, call: Call) -> None:
        call.overdue, call.judged = True, False
        self._judge(self.writes, call, failed=True)
        call.alarm = self._agenda.after(self.plan.deadline_s, lambda: self._write_overdue(call))

    def _tell(self, side: Side, call: Call, verdict: Outcome) -> None:
        """Ask the backend to let go: it does, soon, and the call ends with the verdict."""
        if call.landing is not None:
            call.landing.cancel()
        call.verdict = verdict
        delay_s = self._inject.latency_s(self.plan.latency_s / 4)
        call.landing = self._agenda.after(delay_s, lambda: self._arrive(side, call))

    # -- breakers, states and trials

    def _judge(self, side: Side, call: Call, *, failed: bool) -> None:
        if call.judged:
            return
        call.judged = True
        kind = call.kind if call.kind in ("probe", "delete") else "store" if side is self.writes else "load"
        if failed:
            changed = side.breaker.failed(kind, call.generation, self._agenda.now_s)
        else:
            changed = side.breaker.succeeded(kind, call.generation)
        if changed:
            self._review()

    def _review(self) -> None:
        """A breaker moved: what is the tier now?"""
        if self._opening:
            return
        if self.reads.breaker.state is not BreakerState.CLOSED:
            self._move(TierState.DOWN)
        else:
            if not self._stuck(self.writes):
                self.writes.breaker.half_open(self._agenda.now_s + TICK_S)
            self._move(TierState.DEGRADED if self.writes.breaker.state is BreakerState.OPEN else TierState.UP)
        self._arm()

    def _move(self, state: TierState) -> None:
        if state is not self.state:
            self.state = state
            self._reports.report(ev.TierChanged(self._agenda.now_s, self.name, state))
        for side in (self.reads, self.writes):
            for call in list(side.waiting.values()):
                refusal = self._refusal(call.kind)
                if refusal is not None and side.waiting.pop(call.op, None) is not None:
                    self._finish(call, (refusal,) * call.size)
        self._pump()

    def _stuck(self, side: Side) -> bool:
        return sum(call.overdue for call in side.running.values()) >= self.plan.ops_max

    def _arm(self) -> None:
        """Have the next trial come, if one is to come. A tier without a free place gets none until one is."""
        if self._retry is not None:
            self._retry.cancel()
        if self._opening or self._trial_runs:
            return
        for side in (self.reads, self.writes):
            if side.breaker.state is BreakerState.OPEN:
                if not self._stuck(side):
                    delay_s = max(0.0, side.breaker.retry_at_s - self._agenda.now_s)
                    self._retry = self._agenda.after(delay_s, self._try)
                return

    def _try(self) -> None:
        if not self.reads.breaker.half_open(self._agenda.now_s + TICK_S):
            self._review()
        elif self.epoch:
            self._trial(self._tried)
        else:
            self._trial(self._opened)

    def _trial(self, then: Callable[[int, bool], None]) -> None:
        self._trial_runs = True
        turn = self._turn

        def arrive() -> None:
            if self.medium.outage == "hangs":
                self.medium.waiting.append(arrive)
            else:
                then(turn, self.medium.outage is None)

        self._agenda.after(self._inject.latency_s(self.plan.latency_s), arrive)

    def _tried(self, turn: int, good: bool) -> None:
        if turn != self._turn:
            return
        self._trial_runs = False
        self._opening = False
        breaker = self.reads.breaker
        if good:
            breaker.succeeded("probe", breaker.generation)
        else:
            breaker.failed("probe", breaker.generation, self._agenda.now_s)
        self._review()

    # -- opening and closing

    def open(self, epoch: str) -> None:
        """Open a backend for the namespace. It takes a while, and may have to be tried again."""
        self._wanted_epoch = epoch
        self._opening = True
        self.reads.breaker.start_over(BreakerState.HALF_OPEN)
        self.writes.breaker.start_over(BreakerState.CLOSED)
        self._trial(self._opened)

    def _opened(self, turn: int, good: bool) -> None:
        if turn != self._turn:
            return
        if not good or self._inject.strikes("open_failed"):
            self._tried(turn, False)
            return
        caps = self.medium.spec.capabilities
        entries = self.medium.scan(self._wanted_epoch) if caps.exclusive and caps.can_scan else []
        parts = [entries[start : start + SCAN_PART] for start in range(0, len(entries), SCAN_PART)]

        def go_on() -> None:
            if turn != self._turn:
                return
            if parts:
                self._reports.report(ev.TierScanned(self._agenda.now_s, self.name, tuple(parts.pop(0))))
                self._agenda.after(0, go_on)
            else:
                self.epoch = self._wanted_epoch
                self._tried(turn, True)

        go_on()

    def detach(self) -> None:
        """Take no command and give no verdict from now on; what waits is refused, what runs will land or be let go."""
        self._turn += 1
        self._trial_runs = False
        if self.state is not TierState.ABANDONED:
            self._opening = True
            self._arm()
            self._move(TierState.OPENING)

    def reopen(self, epoch: str) -> None:
        """After ``detach``: once nothing runs any more, open a backend for the namespace."""
        if self.state is TierState.ABANDONED:
            return
        turn, until_s = self._turn, self._agenda.now_s + SHUT_S
        asked = False

        def look() -> None:
            nonlocal asked
            if turn != self._turn:
                return
            running = [(side, call) for side in (self.reads, self.writes) for call in side.running.values()]
            if not running:
                self.epoch = ""
                self.medium.close()
                self.open(epoch)
            elif self._agenda.now_s >= until_s:
                self._abandon()
            else:
                if not asked and self._agenda.now_s >= until_s - SHUT_S / 2:
                    asked = True
                    for side, call in running:
                        if not call.stubborn:
                            self._tell(side, call, Outcome.CANCELLED)
                self._agenda.after(SHUT_S / 20, look)

        look()

    def _abandon(self) -> None:
        """What still runs may land, in slots that are lost, and is not reported."""
        self._inject.counts["abandoned"] += 1
        for side in (self.reads, self.writes):
            for call in side.running.values():
                call.lost = True
                if call.alarm is not None:
                    call.alarm.cancel()
        self._move(TierState.ABANDONED)

    def die(self) -> None:
        """The process is gone: what it was writing is there, torn, or not."""
        self._turn += 1
        if self._retry is not None:
            self._retry.cancel()
        for call in self.writes.running.values():
            call.cut_short(self.medium, self.epoch, self._agenda.now_s)
        for side in (self.reads, self.writes):
            for call in (*side.waiting.values(), *side.running.values()):
                for timer in (call.alarm, call.landing):
                    if timer is not None:
                        timer.cancel()
        self.medium.close()
