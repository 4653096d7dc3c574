"""What can go wrong between us and a server, and what it means for a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiering.api import Outcome


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server answered with, such as ``OOM command not allowed ...``."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


class RedisFailure(Exception):
    """Something failed that is not about one block. ``retryable``: it may pass by itself."""

    def __init__(self, why: str, *, retryable: bool = True) -> None:
        super().__init__(why)
        self.retryable = retryable


class Unreachable(RedisFailure):
    """No connection could be made."""


class ConnectionLost(RedisFailure):
    """A connection broke, or what came over it made no sense.

    ``silent``: the server just did not answer. ``progress``: part of the work was done, and the rest needs a new one.
    """

    def __init__(self, why: str, *, silent: bool = False, progress: bool = False) -> None:
        super().__init__(why)
        self.silent = silent
        self.progress = progress


class Rejected(RedisFailure):
    """The server, or its certificate, is not what the configuration says. ``retryable`` is False if an operator must act."""


_PASSING: Final = frozenset(
    ["BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "NOTBUSY", "READONLY", "TRYAGAIN", "UNBLOCKED"]
)
"""Errors of a server that may answer better a little later."""

_NO_ROOM: Final = frozenset(["OOM", "MISCONF"])
"""Out of memory, or out of order for writes until an operator has looked at its disk: it still serves what it has."""

MOVED_AWAY: Final = frozenset(["CLUSTERDOWN", "MASTERDOWN", "READONLY"])
"""Errors after which another server may be the right one to ask."""


def outcome_of(error: ErrorReply, *, store: bool = False) -> Outcome:
    """What an error reply to one block's command means for the block."""
    if store and (error.code in _NO_ROOM or error.code == "NOPERM"):
        return Outcome.refused(error.text)
    return Outcome.failed(error.text, retryable=error.code in _PASSING or is_crowded(error))


def is_crowded(error: ErrorReply) -> bool:
    """The server has all the clients that it takes."""
    return "max number of clients" in error.text


def is_passing(error: ErrorReply) -> bool:
    return error.code in _PASSING or is_crowded(error)
