"""When to stop asking a tier that fails, and when to ask again. Pure: the caller brings the time."""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    CLOSED = "closed"
    """Calls go through and are counted."""
    OPEN = "open"
    """No calls, until the cooldown is over."""
    HALF_OPEN = "half_open"
    """One trial decides: closed again, or open again for twice the time."""


class Breaker:
    """Opens after ``failures_max`` consecutive failures of one kind of call, and closes by a successful trial.

    Failures are counted a kind: a disk that is full fails its stores and does its deletes, which must not hide it.
    Each call takes ``generation`` along when it starts. A result of an older generation changes nothing: it was
    asked before the breaker moved, so it says nothing about the tier as it is now.

    Times are seconds of the caller's clock. One breaker belongs to one loop; it has no lock.
    """

    def __init__(self, *, trial: str, failures_max: int, cooldown_s: float, cooldown_max_s: float) -> None:
        """``trial``: the kind of call whose success closes a half-open breaker."""
        self._trial = trial
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._cooldown_max_s = cooldown_max_s
        self._next_cooldown_s = cooldown_s
        self._failures: dict[str, int] = {}
        self._opened_by = trial
        self.state = BreakerState.CLOSED
        self.generation = 0
        """Counts the changes of ``state``."""
        self.retry_at_s = 0.0
        """While OPEN: when the trial is due."""

    def succeeded(self, kind: str, generation: int) -> bool:
        """A call of ``kind`` worked. True if that changed the state."""
        if generation != self.generation:
            return False
        if self.state is BreakerState.HALF_OPEN and kind == self._trial:
            self._move(BreakerState.CLOSED)
            changed = True
        else:
            changed = False
        if self.state is BreakerState.CLOSED:
            self._failures.pop(kind, None)
            # Only a call of the kind that failed proves that the fault is gone: where lookups work and loads do not,
            # the pauses keep growing.
            if kind == self._opened_by:
                self._next_cooldown_s = self._cooldown_s
        return changed

    def failed(self, kind: str, generation: int, now_s: float) -> bool:
        """A call of ``kind`` raised, timed out, or failed every item. True if that changed the state."""
        if generation != self.generation or self.state is BreakerState.OPEN:
            return False
        self._failures[kind] = self._failures.get(kind, 0) + 1
        if self.state is BreakerState.CLOSED and self._failures[kind] < self._failures_max:
            return False
        self._opened_by = kind if self.state is BreakerState.CLOSED else self._opened_by
        self._move(BreakerState.OPEN)
        self.retry_at_s = now_s + self._next_cooldown_s
        self._next_cooldown_s = min(2 * self._next_cooldown_s, self._cooldown_max_s)
        return True

    def half_open(self, now_s: float) -> bool:
        """Begin the trial if one is due. True if that changed the state."""
        if self.state is not BreakerState.OPEN or now_s < self.retry_at_s:
            return False
        self._move(BreakerState.HALF_OPEN)
        return True

    def start_over(self, state: BreakerState) -> None:
        """Forget everything: a new backend, of which nothing is known yet. HALF_OPEN if a trial begins right now."""
        self._next_cooldown_s = self._cooldown_s
        self._opened_by = self._trial
        self._move(state)

    def _move(self, state: BreakerState) -> None:
        self.state = state
        self.generation += 1
        self._failures.clear()
