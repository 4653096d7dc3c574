"""What the driver needs of its neighbours, and the small values that it shares with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from tiering.core.events import Event
from tiering.runtime.clock import Clock

log = logging.getLogger("tiering.driver")

NoticeKind: TypeAlias = Literal["state", "worker_died", "backend_defect", "sink_failed"]


class Sink(Protocol):
    """Takes the driver's events: the gate."""

    def post(self, *events: Event) -> None:
        """Hand the events to the core, in order. Called on the I/O loop; does not block for long, does not raise."""
        ...


class SlotViews(Protocol):
    """Lends slots of the primary arena as memory: the arena."""

    def view(self, pool: int, slot: int, length: int) -> memoryview:
        """The first ``length`` bytes of the slot, writable, flat, aligned to a page. Valid while the arena is open."""
        ...


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """How the driver treats one tier. All times in seconds."""

    name: str
    deadline_s: float = 2.0
    """Of a load or probe, from ``submit`` on, queueing included. A store or delete that runs longer is a failure too."""
    ops_max: int = 4
    """Most backend calls under way at a time: so many loads and probes, and so many stores and deletes."""
    retry_max: int = 2
    """Most further tries of the items that failed in a way that may pass."""
    backoff_s: float = 0.02
    """Pause before the first retry; doubles with each, up to ``backoff_max_s``."""
    backoff_max_s: float = 0.5
    failures_max: int = 3
    """Consecutive failed calls of one kind that open a breaker."""
    cooldown_s: float = 0.5
    """From the opening of a breaker to its trial; doubles with each failed trial, up to ``cooldown_max_s``."""
    cooldown_max_s: float = 4.0
    open_deadline_s: float = 30.0
    """Of ``Backend.open`` and the scan behind it."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a metric or a person should know.

    ``state``: a tier's state changed. ``worker_died``: a task of ours ended by an exception that nobody expected; it
    was replaced. ``backend_defect``: a backend broke its contract. ``sink_failed``: ``Sink.post`` raised.
    ``tier`` is empty where no single tier is concerned.
    """

    kind: NoticeKind
    tier: str
    detail: str


class SideHealth(TypedDict):
    """One direction of a tier: "read" (loads, probes) or "write" (stores, deletes)."""

    breaker: str
    queued_ops: int
    queued_bytes: int
    """Primary-tier payload bytes lent to operations that wait."""
    running_ops: int
    running_bytes: int
    zombies: int
    """Of ``running_ops``, those past their deadline whose backend call has not returned."""


class TierHealth(TypedDict):
    """A snapshot of one tier."""

    state: str
    """The value of a ``TierState``."""
    reason: str
    """Why it is not UP, in words; "" when it is."""
    dead_tasks: int
    """Tasks of this tier that died unexpectedly since the start (each was replaced)."""
    read: SideHealth
    write: SideHealth


Run: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Start: TypeAlias = Callable[[Run, str], "asyncio.Task[None]"]
"""Starts a named task in the driver's task group. A function, since a task that is cancelled at once calls it never."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What all parts of one driver share. Everything here is used on the I/O loop alone."""

    sink: Sink
    slots: SlotViews
    pool_bytes: Sequence[int]
    """Payload bytes of a block, a pool."""
    clock: Clock
    start: Start
    notify: Callable[[Notice], None]

    def post(self, *events: Event) -> None:
        """``Sink.post``, whose failure must not take a lane down."""
        try:
            self.sink.post(*events)
        except Exception as error:
            log.exception("the sink failed; the core missed %d events", len(events))
            self.notify(Notice("sink_failed", "", repr(error)))
