"""The newest KV events, for whoever follows them. Bounded: a follower that is too slow sees a jump in the sequence."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from tiering.core.state import PRIMARY, Change
from tiering.runtime.waiting import Pulse
from tiering.types import KvEvent, KvEventBatch


class EventLog:
    """Filled under the gate's lock, so that batches have the order of what they tell; read from any thread."""

    def __init__(self, tier_names: Sequence[str], batches_max: int) -> None:
        self._names = {PRIMARY: "primary", **dict(enumerate(tier_names))}
        self._batches: deque[KvEventBatch] = deque(maxlen=batches_max)
        self._next = 0
        self._lock = threading.Condition()
        self._closed = False
        self.pulse = Pulse()
        """Beats when there is something new, or the log is closed."""

    def append(self, changes: Sequence[Change]) -> None:
        """What one step changed. Never blocks for longer than a reader copies references."""
        self._put(_events_of(changes, self._names))

    def cleared(self) -> None:
        """A reset."""
        self._put((KvEvent("cleared"),))

    def _put(self, events: tuple[KvEvent, ...]) -> None:
        with self._lock:
            self._batches.append(KvEventBatch(self._next, time.time(), events))
            self._next += 1
            self._lock.notify_all()

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next batch."""
        return self._next

    def since(self, sequence: int) -> list[KvEventBatch]:
        """The batches from ``sequence`` on that are still kept, oldest first."""
        with self._lock:
            skip = max(0, len(self._batches) - max(0, self._next - sequence))
            return [self._batches[index] for index in range(skip, len(self._batches))]

    def wait(self, sequence: int, timeout_s: float) -> bool:
        """Block until there is a batch ``sequence`` or a later one. False after ``timeout_s``, and once the log is closed."""
        with self._lock:
            self._lock.wait_for(lambda: self._next > sequence or self._closed, timeout_s)
            return self._next > sequence

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Nothing more will come; whoever waits is let go."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self.pulse.beat()


def _events_of(changes: Sequence[Change], names: dict[int, str]) -> tuple[KvEvent, ...]:
    """Changes as events, in their order; neighbours of one kind and tier, and stored blocks of one prefix, share an event."""
    events: list[KvEvent] = []
    run: list[Change] = []
    for change in changes:
        if run and not _joins(run[-1], change):
            events.append(_event_of(run, names))
            run = []
        run.append(change)
    if run:
        events.append(_event_of(run, names))
    return tuple(events)


def _joins(last: Change, change: Change) -> bool:
    same = (last.tier, last.stored, last.pool) == (change.tier, change.stored, change.pool)
    return same and (not change.stored or change.parent == last.key)


def _event_of(run: Sequence[Change], names: dict[int, str]) -> KvEvent:
    first = run[0]
    kind, parent = ("stored", first.parent) if first.stored else ("removed", None)
    return KvEvent(kind, names[first.tier], first.pool, tuple(change.key for change in run), parent)
