"""The errors a user of this package may see. Expected conditions (missing, full, corrupt) are values, not errors."""

from __future__ import annotations

from collections.abc import Sequence


class TieringError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TieringError):
    """The configuration cannot be used. The message names the place (file and key path) and the remedy."""


class ClosedError(TieringError):
    """The manager or backend was closed; the call had no effect."""


class ShapeError(TieringError, ValueError):
    """A source, destination or key list has the wrong shape, dtype or length. Nothing was read or written."""


class NamespaceMismatch(TieringError):
    """Stored data belongs to another model, layout, codec or weight epoch than the one that asks for it."""


class BackendError(TieringError):
    """A whole backend call failed.

    ``retryable`` tells the driver whether the same call may succeed a little later (a dropped connection) or not
    (wrong credentials). ``tier`` and ``op`` name the place.
    """

    def __init__(self, message: str, *, tier: str = "", op: str = "", retryable: bool = False) -> None:
        place = ".".join(part for part in (tier, op) if part)
        super().__init__(f"{place}: {message}" if place else message)
        self.tier = tier
        self.op = op
        self.retryable = retryable


class InvariantViolation(TieringError):
    """The control state contradicts itself: a defect of ours. ``history`` holds the recent events of the block.

    It never reaches an engine: the gate turns it into the fuse (misses from then on), one log line and a metric.
    """

    def __init__(self, message: str, history: Sequence[str] = ()) -> None:
        lines = "".join(f"\n  {line}" for line in history)
        super().__init__(message + (f"\nrecent events of this block:{lines}" if lines else ""))
        self.history = tuple(history)
