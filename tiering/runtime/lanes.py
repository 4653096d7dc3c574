"""The lane of one tier: what waits, what runs, and for how long.

Reads (probes, loads) and writes (deletes before stores) have a queue and ``ops_max`` places each, so neither starves
the other. A running operation is one task, which makes one backend call and, for items that failed in a way that may
pass, some more. It keeps its place until the last call has returned, however late that is: until then the backend may
touch the lent slots.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Final

from tiering.api import Backend
from tiering.core.commands import IoCommand
from tiering.core.events import Event, OpFinished, OpOverdue
from tiering.runtime.alarms import Alarms
from tiering.runtime.breaker import Breaker, BreakerState
from tiering.runtime.counters import Kind, TierCounters
from tiering.runtime.jobs import DEADLINE, Job, Reply, ask
from tiering.runtime.ports import LaneSpec, Notice, Wiring, log
from tiering.runtime.sides import Side
from tiering.types import BlockKey, Outcome

BLAME_SHARE: Final = 0.5
"""Of the deadline: a tier that was asked and gave no answer for so long is at fault when a deadline passes."""

LOGGED_DEFECTS_MAX: Final = 64
"""Kinds of defects of a backend that get a log line; every defect is a notice and is counted."""


class Lane:
    """Queues, places and deadlines of one tier. Everything but ``Side.health`` happens on the I/O loop.

    The lane finishes each command by one ``OpFinished``, except those that ``lose_running`` gave up. Breakers are fed
    here and acted upon by the tier, through ``on_break``; ``on_room`` tells it that a place came free that a late call
    had held.
    """

    def __init__(
        self,
        spec: LaneSpec,
        wiring: Wiring,
        alarms: Alarms,
        counters: TierCounters,
        *,
        on_break: Callable[[str], None],
        on_room: Callable[[], None],
        on_death: Callable[[str, BaseException], None],
    ) -> None:
        self._spec = spec
        self._wiring = wiring
        self._alarms = alarms
        self._counters = counters
        self._on_break = on_break
        self._on_room = on_room
        self._on_death = on_death
        self.reads = Side(("probe", "load"), breaker=self._breaker("probe"))
        self.writes = Side(("delete",), ("store",), breaker=self._breaker("store"))
        self.backend: Backend | None = None
        self._refusal: Outcome | None = Outcome.failed("tier opening")
        """What every command ends with at once; None: they are taken."""
        self._store_refusal: Outcome | None = None
        self._logged_defects: set[str] = set()

    # What the core asks.

    def submit(self, command: IoCommand, submitted_s: float) -> None:
        """Take a command. Its outcomes come by ``OpFinished``, at once if the tier is not up."""
        job = Job(command, submitted_s + self._spec.deadline_s, self._wiring.pool_bytes)
        self._counters.submitted(job.kind, len(job.keys))
        refusal = self._refusal or (self._store_refusal if job.kind == "store" else None)
        if refusal is not None:
            self._refuse(job, refusal)
            return
        if job.kind in ("probe", "load"):
            self.reads.enqueue(job, submitted_s)
            job.alarm = self._alarms.at(job.due_s, functools.partial(self._read_overdue, job))
        else:
            self.writes.enqueue(job, submitted_s)
        self.pump()

    def cancel(self, op: int) -> None:
        """Drop ``op`` if it waits; if it runs, let it land, but try it no further. Unknown: it ended already."""
        for side in (self.reads, self.writes):
            if (waiting := side.drop(op)) is not None:
                waiting.settle(Outcome.CANCELLED)
                self._finish(waiting)
            elif (job := side.running.get(op)) is not None:
                job.unwanted = True
                if job.resting:
                    self._tell(job, Outcome.CANCELLED)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Pass on the advice, if there is a backend to hear it."""
        if self.backend is None or self._refusal is not None:
            return
        try:
            self.backend.touch(keys)
        except Exception as error:
            self._defect(f"{type(self.backend).__name__}.touch raised {error!r}")

    # What the tier asks.

    def refuse(self, everything: Outcome | None, stores: Outcome | None = None) -> None:
        """From now on end every command (or every store) with this outcome at once, and those that wait. None: take them."""
        self._refusal, self._store_refusal = everything, stores
        for side in (self.reads, self.writes):
            if everything is not None:
                for job in side.drop_all():
                    self._refuse(job, everything)
            elif stores is not None:
                for job in side.drop_all("store"):
                    self._refuse(job, stores)
            for job in side.running.values():
                if job.resting and (everything or (stores if job.kind == "store" else None)):
                    # Its items keep the outcomes of their last try.
                    self._tell(job, None)

    def pump(self) -> None:
        """Start what may start: reads first."""
        if self.backend is None:
            return
        for side in (self.reads, self.writes):
            while len(side.running) < self._spec.ops_max:
                job = side.next(held="store" if side is self.writes and self._trial_runs() else None)
                if job is None:
                    break
                self._start(side, job, self.backend)

    def cancel_running(self) -> None:
        """Ask the backend to give up what runs. It still counts as running until it has."""
        for side in (self.reads, self.writes):
            for job in list(side.running.values()):
                self._tell(job, Outcome.CANCELLED)

    def running(self) -> list[asyncio.Task[None]]:
        jobs = [*self.reads.running.values(), *self.writes.running.values()]
        return [job.task for job in jobs if job.task is not None]

    def stuck(self, side: Side) -> bool:
        """Every place is held by a call past its deadline, so a further one could not start."""
        return side.zombies >= self._spec.ops_max

    def lose_running(self) -> None:
        """Report nothing of what runs now: the tier was abandoned, and what still lands touches slots that are given up."""
        for side in (self.reads, self.writes):
            for job in side.running.values():
                job.lost = True
                if job.alarm is not None:
                    job.alarm.cancel()

    # Running one job.

    def _trial_runs(self) -> bool:
        """A half-open breaker lets one store through; its result decides about the others."""
        breaker = self.writes.breaker
        return breaker.state is BreakerState.HALF_OPEN and any(
            job.kind == "store" and job.generation == breaker.generation for job in self.writes.running.values()
        )

    def _start(self, side: Side, job: Job, backend: Backend) -> None:
        job.generation = side.breaker.generation
        side.start(job)
        name = f"tiering-{self._spec.name}-{job.kind}-{job.op}"
        job.task = self._wiring.start(functools.partial(self._run, side, job, backend), name)
        job.task.add_done_callback(functools.partial(self._landed, side, job))

    async def _run(self, side: Side, job: Job, backend: Backend) -> None:
        try:
            await self._tries(side, job, backend)
        except asyncio.CancelledError:
            if not job.told:
                raise
        except BaseException as error:
            job.died = f"driver worker died: {error!r}"
            self._on_death(f"{job.kind} worker", error)

    def _landed(self, side: Side, job: Job, _: asyncio.Task[None]) -> None:
        """The task is over, however it ended: report, and give its place to the next."""
        try:
            side.land(job)
            job.settle(Outcome.failed(job.died) if job.died else job.verdict)
            self._finish(job)
            if job.overdue:
                self._on_room()
        except Exception as error:
            self._on_death(f"{job.kind} worker", error)
        finally:
            self.pump()

    async def _tries(self, side: Side, job: Job, backend: Backend) -> None:
        if side is self.writes:
            job.due_s = self._wiring.clock.now() + self._spec.deadline_s
        pause_s = self._spec.backoff_s
        for tries_left in range(self._spec.retry_max, -1, -1):
            await self._try(side, job, backend)
            if not job.todo or not tries_left or not self._may_retry(side, job, pause_s):
                return
            job.resting = True
            try:
                await self._wiring.clock.sleep(pause_s)
            finally:
                job.resting = False
            self._counters.retry()
            pause_s = min(2 * pause_s, self._spec.backoff_max_s)

    def _may_retry(self, side: Side, job: Job, pause_s: float) -> bool:
        if job.overdue or job.unwanted or self._refusal is not None:
            return False
        in_time = self._wiring.clock.now() + pause_s < job.due_s
        return in_time and side.breaker.state is BreakerState.CLOSED

    async def _try(self, side: Side, job: Job, backend: Backend) -> None:
        """One backend call: time it, watch its deadline, tell the breaker."""
        clock = self._wiring.clock
        started_s = clock.now()
        job.generation, job.judged = side.breaker.generation, False
        if side is self.writes:
            due_s = started_s + self._spec.deadline_s
            job.alarm = self._alarms.at(due_s, functools.partial(self._write_overdue, job))
        self._counters.called(job.kind)
        try:
            reply = await ask(backend, job, self._wiring.slots)
        finally:
            if side is self.writes and job.alarm is not None:
                job.alarm.cancel()
        side.answered_s = clock.now()
        if reply.error is None or reply.error == "failed":
            self._counters.returned(job.kind, side.answered_s - started_s)
        if reply.error is not None:
            self._counters.error(reply.error)
        if reply.defect:
            self._defect(reply.defect)
        job.take(reply.outcomes)
        self._judge(side, job, reply)

    # Deadlines and verdicts.

    def _read_overdue(self, job: Job) -> None:
        now_s = self._wiring.clock.now()
        if self.reads.drop(job.op) is None:
            self.reads.overdue(job)
            self._counters.timeout("timeout")
            self._wiring.post(OpOverdue(now_s, job.op))
            self._blame(job, now_s)
            self._tell(job, DEADLINE)
            return
        self._counters.timeout("queue_timeout")
        job.settle(DEADLINE)
        self._finish(job, OpOverdue(now_s, job.op))
        job.generation = self.reads.breaker.generation
        self._blame(job, now_s)

    def _blame(self, job: Job, now_s: float) -> None:
        """A read's deadline passed: the tier's fault if it answered nothing for a while, else that of a long queue.

        A call that began just before its deadline says little, and one that still waited says something: that the
        places before it were held.
        """
        if now_s - self.reads.answered_s >= BLAME_SHARE * self._spec.deadline_s:
            self._judge(self.reads, job, None)

    def _write_overdue(self, job: Job) -> None:
        """Nothing is cancelled; each deadline that it hangs through counts, so that even one hung place is noticed."""
        if not job.overdue:
            self.writes.overdue(job)
            self._counters.timeout("timeout")
        job.judged = False
        self._judge(self.writes, job, None)
        due_s = self._wiring.clock.now() + self._spec.deadline_s
        job.alarm = self._alarms.at(due_s, functools.partial(self._write_overdue, job))

    def _judge(self, side: Side, job: Job, reply: Reply | None) -> None:
        """Count the call for the breaker, once. ``reply`` is None when its deadline passed."""
        if job.judged:
            return
        job.judged = True
        if reply is None or reply.failed:
            changed = side.breaker.failed(job.kind, job.generation, self._wiring.clock.now())
            why = "deadline passed" if reply is None else reply.outcomes[0].why or "failed without a reason"
        else:
            changed = side.breaker.succeeded(job.kind, job.generation)
            why = ""
        if changed and why:
            self._counters.breaker_opened("read" if side is self.reads else "write")
        if changed:
            self._on_break(f"{job.kind}: {why}" if why else "")

    def _tell(self, job: Job, verdict: Outcome | None) -> None:
        """Cancel the job's task, once; ``verdict`` is for the items still to do, None leaves them their last outcome."""
        if job.told or job.task is None:
            return
        job.told, job.verdict = True, verdict
        job.task.cancel()

    # Ends.

    def _refuse(self, job: Job, refusal: Outcome) -> None:
        if refusal is not Outcome.CANCELLED:
            self._counters.error("refused_down")
        job.settle(refusal)
        self._finish(job)

    def _finish(self, job: Job, *before: Event) -> None:
        if job.alarm is not None:
            job.alarm.cancel()
        outcomes = job.final()
        self._counters.finished(job.kind, outcomes, job.ok_bytes)
        if not job.lost:
            self._wiring.post(*before, OpFinished(self._wiring.clock.now(), job.op, outcomes))

    def _defect(self, what: str) -> None:
        self._wiring.notify(Notice("backend_defect", self._spec.name, what))
        # One line a defect, not one a call: what may differ between calls stands behind the first bracket.
        kind = what.split("(")[0]
        if kind not in self._logged_defects and len(self._logged_defects) < LOGGED_DEFECTS_MAX:
            self._logged_defects.add(kind)
            log.error("tier %s: %s; reported once", self._spec.name, what)

    def _breaker(self, trial: Kind) -> Breaker:
        spec = self._spec
        return Breaker(
            trial=trial,
            failures_max=spec.failures_max,
            cooldown_s=spec.cooldown_s,
            cooldown_max_s=spec.cooldown_max_s,
        )
