"""The last events, bounded by their number and by the keys they name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tiering.core.events import Event


class EventRing:
    """Keeps the newest events; ``dropped`` counts the older ones that had to go."""

    def __init__(self, events_max: int, keys_max: int) -> None:
        self._events: deque[tuple[Event, int]] = deque()
        self._events_max = events_max
        self._keys_max = keys_max
        self._keys = 0
        self.dropped = 0

    def append(self, event: Event) -> None:
        named = getattr(event, "keys", None) or getattr(event, "entries", None) or ()
        weight = len(named)
        events = self._events
        events.append((event, weight))
        self._keys += weight
        while len(events) > self._events_max or (self._keys > self._keys_max and len(events) > 1):
            self._keys -= events.popleft()[1]
            self.dropped += 1

    def __iter__(self) -> Iterator[Event]:
        return (event for event, _ in self._events)

    def __len__(self) -> int:
        return len(self._events)
