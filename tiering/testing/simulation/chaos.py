"""The faults that come at times of their own: outages, crashes, resets, damage at rest, callers who go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tiering.core import events as ev
from tiering.testing.simulation import callers
from tiering.testing.simulation.agenda import Timer
from tiering.testing.simulation.contents import content
from tiering.testing.simulation.injection import EVENT_RATES
from tiering.testing.simulation.medium import Medium, Outage, Stored, seal_of
from tiering.testing.simulation.scenario import EPOCHS
from tiering.types import Outcome

if TYPE_CHECKING:
    from tiering.testing.simulation.run import Simulation

CALM_EVENTS = {"flushed": 2.0, "touched": 4.0}
"""Not faults; they happen in every seed. Times a virtual second."""


class Chaos:
    """Lets each kind happen at its rate, until ``end``."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._dice = sim.inject.dice
        self._timers: dict[str, Timer] = {}
        self._acts: dict[str, Callable[[], object]] = {
            "aborted": self._abort,
            "outage": lambda: self._outage("refuses"),
            "hung_outage": lambda: self._outage("hangs"),
            "full": self._full,
            "crash": lambda: self._crash(power_loss=False),
            "power_loss": lambda: self._crash(power_loss=True),
            "reset": self._reset,
            "flipped": self._flip,
            "vanished": self._vanish,
            "stranger": self._stranger,
            "stray_report": self._stray,
            "flushed": lambda: sim.spawn(self._flush()),
            "touched": self._touch,
        }
        for kind in (*EVENT_RATES, *CALM_EVENTS):
            if (rate := CALM_EVENTS.get(kind) or sim.inject.rates.get(kind)) is not None:
                self._arm(kind, rate)

    def end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for medium in self._sim.mediums.values():
            medium.trap = None

    def _arm(self, kind: str, rate: float) -> None:
        def act() -> None:
            if kind in EVENT_RATES:
                self._sim.inject.counts[kind] += 1
            self._arm(kind, rate)
            self._acts[kind]()

        self._timers[kind] = self._sim.agenda.after(self._dice.expovariate(rate), act)

    def _epoch(self) -> str:
        """Of the weights that somebody brings: mostly the same again."""
        return self._sim.process.epoch if self._dice.random() < 0.6 else self._dice.choice(EPOCHS)

    def _medium(self) -> Medium | None:
        mediums = list(self._sim.mediums.values())
        return self._dice.choice(mediums) if mediums else None

    def _crash(self, *, power_loss: bool) -> None:
        """Now, or, which is worse, while the next store is under way."""

        def crash() -> None:
            self._sim.crash(self._epoch(), power_loss=power_loss)

        disks = [m for m in self._sim.mediums.values() if m.spec.capabilities.persistent and not m.shared]
        if not disks or self._dice.random() < 0.3:
            crash()
        else:
            self._dice.choice(disks).trap = lambda: self._arm_once(crash)

    def _arm_once(self, act: Callable[[], None]) -> None:
        self._timers["trap"] = self._sim.agenda.after(self._sim.inject.latency_s(1e-4), act)

    # -- callers

    def _abort(self) -> None:
        actors = [actor for actor in self._sim.actors if not actor.ended]
        if actors:
            self._dice.choice(actors).abort()
        while sum(not actor.ended for actor in self._sim.actors) < self._sim.scenario.users:
            self._sim.new_user()

    def _reset(self) -> None:
        """New weights: most callers give up before; the others notice later."""
        for actor in self._sim.actors:
            if self._dice.random() < 0.5:
                actor.abort()
        self._sim.process.reset(self._epoch())
        self._sim.resets += 1
        for actor in self._sim.actors:
            if self._dice.random() < 0.3:
                actor.abort()
        self._abort()

    def _flush(self) -> callers.Steps[None]:
        deadline_s = self._sim.agenda.now_s + self._dice.choice([0.001, 0.05, 1.0])
        yield from callers.flush(self._sim.process, deadline_s)

    def _touch(self) -> None:
        path = self._dice.choice(list(self._sim.workload.all_paths))
        self._sim.process.handle(ev.Touched(self._sim.agenda.now_s, path.pool, path.keys))

    def _stray(self) -> None:
        """A report that was made already, or that nobody waits for: counted and ignored."""
        process, now_s = self._sim.process, self._sim.agenda.now_s
        world = process.core.world
        number = self._dice.randint(0, world.last_id + 3)
        if number not in world.ops and number not in world.stores:
            process.handle(ev.OpFinished(now_s, number, (Outcome.OK,)))
            process.handle(ev.OpOverdue(now_s, number))
            process.handle(ev.StoreFinished(now_s, number, (Outcome.OK,)))
        if number not in world.loads:
            process.handle(ev.Released(now_s, number))
            process.handle(ev.LoadOverdue(now_s, number))
        if number not in world.flushes and number not in world.holds:
            process.handle(ev.FlushOverdue(now_s, number))
            process.handle(ev.HoldReleased(now_s, number))

    # -- mediums

    def _outage(self, kind: Outage) -> None:
        medium = self._medium()
        if medium is not None and medium.outage is None:
            medium.outage = kind
            self._sim.agenda.after(self._dice.expovariate(2.0), medium.recover)

    def _full(self) -> None:
        medium = self._medium()
        if medium is None:
            return

        def room_again() -> None:
            medium.full = False

        medium.full = True
        self._sim.agenda.after(self._dice.expovariate(2.0), room_again)

    def _flip(self) -> None:
        medium = self._medium()
        if medium is not None and medium.kept:
            medium.flip(self._dice.choice(list(medium.kept)))

    def _vanish(self) -> None:
        medium = self._medium()
        if medium is not None and medium.kept:
            for name in self._dice.sample(list(medium.kept), min(len(medium.kept), 3)):
                del medium.kept[name]

    def _stranger(self) -> None:
        """Another process fills a shared tier."""
        shared = [medium for medium in self._sim.mediums.values() if medium.shared]
        if not shared:
            return
        medium, path = self._dice.choice(shared), self._dice.choice(list(self._sim.workload.all_paths))
        size = medium.spec.capabilities.stored_bytes(self._sim.scenario.core.pools[path.pool].payload_bytes)
        for key in path.keys:
            name = self._epoch(), key
            payload = content(*name)
            medium.put(name, Stored(payload, seal_of(name, payload), size, None, self._sim.agenda.now_s))
