"""What the queue of an engine needs from a device: streams that copy in order, and events that tell how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from tiering.errors import TieringError
from tiering.memory.arena import Rows
from tiering.memory.transfer.plan import CopyPlan

E = TypeVar("E", bound="Event")
E_contra = TypeVar("E_contra", bound="Event", contravariant=True)


class CopyError(TieringError):
    """The device refused or failed a copy. Never raised to a caller of an engine: it becomes a failed result."""


@dataclass(frozen=True, slots=True)
class Move:
    """A job as a stream gets it. It keeps the arena's mapping alive until the copies have ended."""

    plan: CopyPlan
    pools: tuple[Rows, ...]
    """Each pool of the arena, ``uint8 (slots, slot_bytes)``."""


class Event(Protocol):
    """A point in a stream. Recorded again, it is a new point."""

    def done(self) -> bool:
        """Whether the stream has passed it; does not block. Raises ``CopyError`` if what was before it failed."""

    def wait(self) -> None:
        """Block until the stream has passed it. Raises ``CopyError`` as ``done`` does."""


class Stream(Protocol[E_contra]):
    """Copies and events in order. A call only queues; ``CopyError`` says that it could not."""

    def follow_caller(self) -> None:
        """What comes next waits for all that the caller's current stream has been given so far."""

    def follow(self, event: E_contra) -> None:
        """What comes next waits for ``event`` as it was last recorded."""

    def record(self, event: E_contra) -> None: ...

    def copy(self, move: Move) -> None: ...


class Device(Protocol[E]):
    """Makes streams and events; ``close`` after everything queued has ended, once."""

    def stream(self) -> Stream[E]: ...

    def event(self) -> E: ...

    def elapsed_s(self, start: E, end: E) -> float:
        """Between two points passed, on the device's clock. Raises ``CopyError``."""

    def close(self) -> None: ...
