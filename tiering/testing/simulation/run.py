"""The run of one seed: a stretch of life with faults, then a healthy phase in which everything must drain."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Final

from tiering.core.machine import TieringCore
from tiering.core.state import TierSpec
from tiering.errors import InvariantViolation
from tiering.testing.simulation import audit, callers
from tiering.testing.simulation.agenda import Aborted, Actor, Agenda, Script, SimulationFailure
from tiering.testing.simulation.chaos import Chaos
from tiering.testing.simulation.injection import Injector
from tiering.testing.simulation.medium import Medium
from tiering.testing.simulation.process import CoreFactory, Process, Surroundings
from tiering.testing.simulation.scenario import EPOCHS, Path, Workload, scenario
from tiering.testing.simulation.watch import Tally
from tiering.types import TierState

REST_STEPS_MAX: Final = 5_000
"""The healthy phase must come to rest within so many steps, each time. Sound runs take below 1,000."""

CHECK_EVERY: Final = 8

MediumFactory = Callable[..., Medium]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a seed. ``failure`` is "" if nothing was found; ``journal`` then holds the last life's events."""

    seed: int
    steps: int
    failure: str
    journal: str
    calm: bool
    virtual_s: float
    lives: int
    resets: int
    tally: Tally
    faults: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.failure

    def as_dict(self) -> dict[str, object]:
        """Plain values, without the journal."""
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "journal"}
        tally = {field.name: getattr(self.tally, field.name) for field in fields(self.tally)}
        return {"ok": self.ok, **document, "tally": tally}


class Simulation:
    """Runs once. ``core`` and ``medium`` make the parts under test; tests give broken ones, to see them found out."""

    def __init__(
        self,
        seed: int,
        steps: int,
        *,
        core: CoreFactory = TieringCore,
        medium: MediumFactory = Medium,
        check_every: int = 1,
    ) -> None:
        self.seed = seed
        self.steps = steps
        self.scenario = scenario(seed)
        self.agenda = Agenda()
        self.inject = Injector(seed, self.scenario.rates)
        self.tally = Tally()
        self.workload = Workload(seed, self.scenario.core.pools)
        self.dice = Random(f"{seed}/callers")
        self.closing = False
        self.lives = 0
        self.resets = 0
        self.actors: list[Actor] = []
        self.mediums = {
            tier.name: medium(tier, self.inject, blocks, server_evicts=evicts)
            for tier in self.scenario.core.tiers
            for blocks, evicts in [self.scenario.server_blocks[tier.name]]
        }
        lanes = self.scenario.lanes
        self._around = Surroundings(self.agenda, self.inject, self.tally, self.mediums, lanes, core, check_every)
        self._spec = self.scenario.core
        self.process: Process = self._boot(EPOCHS[0])

    def run(self) -> Result:
        failure = ""
        try:
            self._live()
            self._heal()
        except (SimulationFailure, InvariantViolation) as found:
            failure = f"{type(found).__name__}: {found}"
        except Exception:
            failure = traceback.format_exc()
        self.process.alive = False
        for actor in self.actors:
            actor.kill()
        return Result(
            self.seed,
            self.steps,
            failure,
            self.process.journal.dump() if failure else "",
            self.scenario.calm,
            self.agenda.now_s,
            self.lives,
            self.resets,
            self.tally,
            dict(sorted(self.inject.counts.items())),
        )

    # -- a life with faults

    def _boot(self, epoch: str) -> Process:
        self.lives += 1
        self.process = Process(self._spec, self._around, epoch)
        self.actors = []
        for _ in range(self.scenario.users):
            self.spawn(self._user())
        return self.process

    def spawn(self, script: Script) -> Actor:
        """Start a script of the present process."""
        actor = Actor(self.agenda, f"actor {len(self.actors)}", script)
        self.actors = [other for other in self.actors if not other.ended]
        self.actors.append(actor)
        return actor

    def _live(self) -> None:
        chaos = Chaos(self)
        while self.agenda.steps < self.steps and self.agenda.step():
            pass
        chaos.end()

    def _user(self) -> Script:
        """One turn after the other, whatever becomes of each."""
        while not self.closing:
            yield self.inject.latency_s(self.scenario.think_s or 1e-4)
            try:
                yield from self._turn(self.workload.turn())
            except Aborted:
                return  # somebody else comes: see Chaos

    def _turn(self, path: Path) -> callers.Steps[None]:
        """What an engine does for a request: look, load what is there, compute the rest, store it, hold it."""
        process, pool, keys, dice = self.process, path.pool, path.keys, self.dice
        turn = process.resets
        short = self.inject.strikes("short_deadline")
        patience_s = self.inject.latency_s(0.01) if short else 3.0
        if dice.random() < 0.8:
            yield from callers.match(process, pool, keys, self.agenda.now_s + patience_s)
        there = 0
        if dice.random() < 0.85:
            there = yield from callers.load(process, pool, keys, self.agenda.now_s + patience_s)
        yield self.inject.latency_s(self.scenario.think_s or 1e-4)
        if turn != process.resets:
            return
        if self.inject.strikes("orphan"):
            there = dice.randrange(len(keys))
        parent = keys[there - 1] if there and dice.random() < 0.8 else None
        patient = dice.random() < 0.5
        deadline_s = self.agenda.now_s + patience_s
        yield from callers.store(process, pool, keys[there:], parent, deadline_s, patient=patient)
        if dice.random() < 0.3 and turn == process.resets:
            payload_bytes = self.scenario.core.pools[pool].payload_bytes
            until_s = self.agenda.now_s + self.inject.latency_s(0.3)
            budget_bytes = dice.choice([0, 1, 2, 8]) * payload_bytes
            yield from callers.hold(process, pool, keys, until_s, budget_bytes)

    def new_user(self) -> None:
        self.spawn(self._user())

    def crash(self, epoch: str | None = None, *, power_loss: bool = False) -> None:
        """The process dies at once, and a new one starts, perhaps with a smaller budget."""
        for actor in self.actors:
            actor.kill()
        self.process.die()
        for medium in self.mediums.values():
            if power_loss:
                medium.lose_power(self.agenda.now_s)
        if self.inject.strikes("capacity_lowered"):
            self._spec = replace(self._spec, tiers=tuple(_smaller(tier) for tier in self._spec.tiers))
            for tier in self._spec.tiers:
                self.mediums[tier.name].spec = tier
        self._boot(epoch or self.process.epoch)

    # -- the healthy phase

    def _heal(self) -> None:
        """Faults off: all that was asked ends, all that is owed goes where it belongs, and every byte read is right."""
        self.closing = True
        self.inject.on = False
        for medium in self.mediums.values():
            medium.full = False
            medium.recover()
        self.rest()
        if any(lane.state is TierState.ABANDONED for lane in self.process.lanes):
            self.crash()  # as an operator would: such a tier stays away until the process is started again
            self.rest()
        audit.tiers_are_back(self.process)
        self._do(_pause(2 * self._spec.verdict_ttl_s))  # what failed lately is left alone for so long
        self._do(callers.flush(self.process, self.agenda.now_s + 60))
        audit.drained(self.process)
        audit.flushed(self.process, self._do(callers.flush(self.process, self.agenda.now_s + 60)))
        self._read_back()
        audit.takes_new_blocks(self.process, self._do)
        audit.books_are_right(self.process, exact=self.scenario.calm)
        self.crash()
        self.rest()
        audit.tiers_are_back(self.process)
        audit.found_again(self.process)
        audit.restored(self.process, self._do, [(path.pool, path.keys) for path in list(self.workload.all_paths)[-2:]])
        self._read_back()
        self.process.die()

    def rest(self) -> None:
        """Let everything that is under way come to its end."""
        self.agenda.run_dry(REST_STEPS_MAX)

    def _do(self, steps: callers.Steps[callers.T]) -> callers.T:
        """Run one caller alone, to the end, and all that follows from it."""
        result: list[callers.T] = []

        def script() -> Script:
            result.append((yield from steps))

        self.spawn(script())
        self.rest()
        if not result:
            raise SimulationFailure("a caller waits for ever")
        return result[0]

    def _read_back(self) -> None:
        """Every path that was ever used, once more."""
        self._do(_pause(2 * self._spec.verdict_ttl_s))
        for path in self.workload.all_paths:
            world = self.process.core.world
            deadline_s = self.agenda.now_s + 60
            match = self._do(callers.match(self.process, path.pool, path.keys, deadline_s))
            certain = len(world.remote) < self._spec.verdicts_max and not audit.stuck(world, world.pools[path.pool])
            reads, failed = self.tally.items["promote"], self.tally.reads_failed
            n = self._do(callers.load(self.process, path.pool, path.keys, deadline_s + 60))
            reads, failed = self.tally.items["promote"] - reads, self.tally.reads_failed - failed
            audit.read_back(path.keys, match if certain else None, n, reads, failed)
            audit.drained(self.process)


def _pause(seconds: float) -> callers.Steps[bool]:
    return (yield seconds)


def _smaller(tier: TierSpec) -> TierSpec:
    if tier.capacity_bytes is None:
        return tier
    least = tier.capabilities.stored_bytes(tier.block_bytes_min)
    return replace(tier, capacity_bytes=max(least, tier.capacity_bytes // 2))


def simulate(seed: int, steps: int, *, core: CoreFactory = TieringCore, medium: MediumFactory = Medium) -> Result:
    """Run a seed for ``steps`` steps with faults, then to rest without. Raises nothing: see ``Result.failure``.

    The invariants are recounted now and then; if they fail, the seed is run again with a recount after every event, so
    that the journal ends where it went wrong.
    """
    result = Simulation(seed, steps, core=core, medium=medium, check_every=CHECK_EVERY).run()
    if result.failure.startswith(InvariantViolation.__name__):
        return Simulation(seed, steps, core=core, medium=medium).run()
    return result
