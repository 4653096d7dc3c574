"""Pins the arena's slots for a device's copy engines: piece by piece, in the background, all of it or nothing.

One call for the whole arena can take minutes, and fails on sizes that some drivers refuse. Pieces are whole slots: a copy
that reaches from one registered range into the next is refused by CUDA.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from tiering.errors import ShapeError, TieringError
from tiering.memory.arena import Arena, Rows
from tiering.support.units import format_bytes

PIECE_BYTES: Final = 256 << 20
"""About a tenth of a second a piece: close need not wait longer."""

PIN_DEADLINE_S: Final = 600.0
"""Past it the machine is busy with something else, and is let be."""

log = logging.getLogger("tiering.memory")


class Registrar(Protocol):
    """Pins and unpins ranges of memory. Both calls block, without the GIL, and raise ``OSError`` or ``TieringError``."""

    def register(self, address: int, size_bytes: int) -> None:
        """Address and size are multiples of 4096. After an error nothing of this range is pinned."""

    def unregister(self, address: int, size_bytes: int) -> None:
        """A range exactly as it was registered. No copy may need it any more."""


@dataclass(frozen=True, slots=True)
class PinReport:
    state: Literal["pinned", "pageable", "pinning"]
    pinned_bytes: int
    """What is pinned right now. Not 0 while pageable only if something could not be unpinned."""
    seconds: float
    """Since the start, or what it took."""
    error: str = ""
    """Why it is pageable; empty if it was closed."""


@dataclass(frozen=True, slots=True)
class _Piece:
    address: int
    size_bytes: int


class ArenaPinning:
    """Pins all pools of an arena in a thread of its own, from construction on.

    Slots may be used meanwhile; copies are right at every moment, and fast once ``report`` says ``pinned``. When a piece
    fails, what was pinned is unpinned again, one warning names the remedy, and the arena stays pageable. Until ``close``
    the arena's mapping is kept, so close the transfer engines first, then this, then the arena. Methods may be called
    from any thread.
    """

    def __init__(
        self,
        arena: Arena,
        registrar: Registrar,
        *,
        piece_bytes: int = PIECE_BYTES,
        deadline_s: float = PIN_DEADLINE_S,
    ) -> None:
        """Start. ``piece_bytes`` is rounded down to whole slots, at least one; past ``deadline_s`` it gives up, between two
        pieces. Raises ``ClosedError`` if the arena is closed.
        """
        if piece_bytes < 1:
            raise ShapeError(f"piece_bytes is {piece_bytes}; it must be at least 1")
        self._registrar = registrar
        self._deadline_s = deadline_s
        # The arrays keep the memory mapped while it is registered.
        self._pools = [arena.array(pool) for pool in range(len(arena.pools))]
        self._pieces = [piece for pool in self._pools for piece in _pieces_of(pool, piece_bytes)]
        self._lock = threading.Lock()
        self._pinned: list[_Piece] = []
        """In order. Touched by the thread until it ends, then by ``close``; its changes are guarded by the lock."""
        self._start_s = time.monotonic()
        self._took_s = 0.0
        self._state: Literal["pinned", "pageable", "pinning"] = "pinning"
        self._error = ""
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._main, name="tiering-pinning", daemon=True)
        self._thread.start()

    @property
    def report(self) -> PinReport:
        """How things stand."""
        with self._lock:
            seconds = time.monotonic() - self._start_s if self._state == "pinning" else self._took_s
            pinned_bytes = sum(piece.size_bytes for piece in self._pinned)
            return PinReport(self._state, pinned_bytes, seconds, self._error)

    def wait(self, timeout_s: float | None = None) -> PinReport:
        """Until it is pinned or is known to stay pageable, or ``timeout_s`` has passed: then the state is ``pinning``."""
        self._settled.wait(timeout_s)
        return self.report

    def close(self) -> None:
        """Stop after the piece under way, and unpin everything. Idempotent; raises nothing: what cannot be unpinned is
        logged and stays in ``report``, and another ``close`` tries again.
        """
        self._closing.set()
        self._thread.join()
        failures = self._unpin()
        with self._lock:
            self._state = "pageable"
        if failures:
            log.warning("the primary tier stays pinned in part: %s", failures)
        else:
            self._pools = []

    def _main(self) -> None:
        try:
            error = self._pin()
        except BaseException as death:  # whatever ends the thread: the arena must not stay half pinned
            error = f"the pinning thread died of {death!r}"
        self._settle(error)

    def _pin(self) -> str:
        """Pin piece by piece; why it did not succeed, or nothing."""
        for number, piece in enumerate(self._pieces, 1):
            name = f"piece {number} of {len(self._pieces)} ({format_bytes(piece.size_bytes)})"
            if self._closing.is_set():
                return ""
            if time.monotonic() - self._start_s > self._deadline_s:
                return f"{name} was not reached within {self._deadline_s:g} s"
            try:
                self._registrar.register(piece.address, piece.size_bytes)
            except (OSError, TieringError) as error:
                return f"{name}: {error}"
            with self._lock:
                self._pinned.append(piece)
        return ""

    def _settle(self, error: str) -> None:
        if error:
            done_bytes = sum(piece.size_bytes for piece in self._pinned)
            failures = self._unpin()
            error = f"{error}; and could not unpin: {failures}" if failures else error
            log.warning(
                "cannot pin the primary tier, which stays pageable: copies to and from the GPU are slower. %s, after %s. %s",
                error,
                format_bytes(done_bytes),
                _remedy(),
            )
        with self._lock:
            self._took_s = time.monotonic() - self._start_s
            self._state = "pageable" if error or self._closing.is_set() else "pinned"
            self._error = error
        self._settled.set()

    def _unpin(self) -> str:
        """Unpin all that is pinned, the last first; what failed."""
        failures = []
        for piece in reversed(list(self._pinned)):
            try:
                self._registrar.unregister(piece.address, piece.size_bytes)
            except (OSError, TieringError) as error:
                failures.append(str(error))
                continue
            with self._lock:
                self._pinned.remove(piece)
        return "; ".join(dict.fromkeys(failures))


def _pieces_of(pool: Rows, piece_bytes: int) -> Iterator[_Piece]:
    slots, slot_bytes = pool.shape
    step = max(1, piece_bytes // slot_bytes)
    for first in range(0, slots, step):
        piece = pool[first : first + step]
        yield _Piece(piece.ctypes.data, piece.nbytes)


def _remedy() -> str:
    """What an operator can do, and the limits as they are."""
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return (
        f"The limit on locked memory (`ulimit -l`) is {soft}, at most {hard}; the container's memory limit is "
        f"{_cgroup_limit()}. Raise them (`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, --ulimit "
        "memlock=-1 for a container), or lower primary.capacity"
    )


def _cgroup_limit() -> str:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                limit = file.read().strip()
        except OSError:
            continue
        return format_bytes(int(limit)) if limit.isdecimal() else "not set"
    return "unknown"
