"""Virtual time, and scripts that live in it. One thread: one thing after the other, in an order that the seed fixes.

A script is a generator. It yields how long it waits (seconds, or ``Until`` a pulse beats) and goes on afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

STILL_STEPS_MAX: Final = 20_000
"""So much may happen at one instant; beyond it something answers itself for ever."""


class SimulationFailure(Exception):
    """The simulation found something that must not be."""


class Aborted(Exception):
    """Thrown into a script whose caller gives up. It cleans up, waiting where it must, and ends."""


class Timer:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        self.act = None


class Agenda:
    """What is to happen, by time; what is due at the same time, in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._asked = 0
        self._still = 0
        """Steps since time last moved."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Timer:
        timer = Timer(act)
        self._asked += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._asked, timer))
        return timer

    def step(self) -> bool:
        """Let the next thing happen. False if nothing is to come."""
        while self._heap:
            time_s, _, timer = heapq.heappop(self._heap)
            if timer.act is None:
                continue
            self._still = 0 if time_s > self.now_s else self._still + 1
            if self._still > STILL_STEPS_MAX:
                raise SimulationFailure(f"livelock: {self._still} steps without time going on")
            self.now_s = max(self.now_s, time_s)
            self.steps += 1
            act, timer.act = timer.act, None
            act()
            return True
        return False

    def run_dry(self, steps_max: int) -> None:
        """Go on until nothing is to come. Raises ``SimulationFailure`` if that takes more than ``steps_max`` steps."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise SimulationFailure(f"it does not come to rest: still busy after {steps_max} steps")


class Pulse:
    """Beats, and wakes whoever waits for the next beat."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiters: list[Callable[[], None]] = []
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            self._agenda.after(0, wake)

    def call(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at the next beat."""
        self._waiters.append(wake)


@dataclass(frozen=True, slots=True)
class Until:
    """Wait until ``pulse`` has beaten since ``seen``: the script is sent True, or False at ``deadline_s``."""

    pulse: Pulse
    seen: int
    deadline_s: float


Wait: TypeAlias = "float | Until"
Script: TypeAlias = Generator[Wait, bool, None]


class Actor:
    """Runs one script. It starts at once."""

    def __init__(self, agenda: Agenda, name: str, script: Script) -> None:
        self.name = name
        self.ended = False
        self._agenda = agenda
        self._script = script
        self._aborted = False
        self._turn = 0
        """Counts resumptions, so that only the first of two wake-ups counts."""
        self._alarm: Timer | None = None
        self._resume(lambda: next(script))

    def abort(self) -> None:
        """The caller gives up, now, wherever the script stands. A second time changes nothing."""
        if not self.ended and not self._aborted:
            self._aborted = True
            self._resume(lambda: self._script.throw(Aborted()))

    def kill(self) -> None:
        """The process died: the script runs no further. Its ``finally`` blocks run, and reach a dead process."""
        if not self.ended:
            self._turn += 1
            self.ended = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._script.close()

    def _resume(self, go: Callable[[], Wait]) -> None:
        self._turn += 1
        if self._alarm is not None:
            self._alarm.cancel()
        try:
            wait = go()
        except (StopIteration, Aborted):
            self.ended = True
            return
        turn = self._turn
        if isinstance(wait, Until):
            if wait.pulse.beats != wait.seen:
                self._agenda.after(0, lambda: self._wake(turn, True))
                return
            wait.pulse.call(lambda: self._wake(turn, True))
            delay_s = max(0.0, wait.deadline_s - self._agenda.now_s)
            self._alarm = self._agenda.after(delay_s, lambda: self._wake(turn, False))
        else:
            self._alarm = self._agenda.after(wait, lambda: self._wake(turn, True))

    def _wake(self, turn: int, value: bool) -> None:
        if turn == self._turn and not self.ended:
            self._resume(lambda: self._script.send(value))
