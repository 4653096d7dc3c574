"""Buffers as the driver lends them: aligned to what is promised and no more, and able to tell who still holds them."""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import mmap
import time
from typing import Final

import numpy as np

from tiering.api import Namespace
from tiering.testing.conformance.rules import require

FILL: Final = 0x5A
GUARD: Final = 0xA5
POISON: Final = 0xEE

RETURN_GRACE_S: Final = 1.0
"""A pool's thread lets go of its last call's arguments some microseconds after the caller has woken."""


@functools.lru_cache(maxsize=64)
def block_payload(namespace: Namespace, key: bytes, size_bytes: int) -> bytes:
    """The bytes of a block: a function of namespace, key and size, so that any foreign or misplaced byte shows."""
    seed = hashlib.sha256(b"%b|%b|%d" % (namespace.digest, key, size_bytes)).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big"))).bytes(size_bytes)


class Loan:
    """One lent buffer of ``size_bytes`` of payload, padded to ``alignment_bytes``, between two guard strips.

    The mapping is anonymous; ``close`` fails as long as any view of it is alive, whoever holds it.
    """

    def __init__(self, size_bytes: int, alignment_bytes: int, payload: bytes | None = None) -> None:
        self.size_bytes = size_bytes
        self.view_bytes = -(-size_bytes // alignment_bytes) * alignment_bytes
        # An odd multiple: a backend that needs a coarser alignment than it declares is found out.
        self._start = alignment_bytes * (-(-64 // alignment_bytes) | 1)
        self._stop = self._start + self.view_bytes
        self._map = mmap.mmap(-1, self._stop + self._start)
        self._map[: self._start] = bytes((GUARD,)) * self._start
        self._map[self._stop :] = bytes((GUARD,)) * self._start
        lent = bytes((FILL,)) * self.view_bytes if payload is None else payload.ljust(self.view_bytes, b"\0")
        self._map[self._start : self._stop] = lent

    def view(self) -> memoryview:
        """A new writable view; the loan itself keeps none."""
        return memoryview(self._map)[self._start : self._stop]

    @property
    def payload(self) -> bytes:
        return self._map[self._start : self._start + self.size_bytes]

    @property
    def padding(self) -> bytes:
        return self._map[self._start + self.size_bytes : self._stop]

    def poison(self) -> None:
        """Overwrite everything, as the next owner of the buffer would."""
        self._map[self._start : self._stop] = bytes((POISON,)) * self.view_bytes

    def require_poisoned(self, op: str) -> None:
        """Nothing was written since ``poison``."""
        now = self._map[self._start : self._stop]
        late = len(now) - now.count(POISON)
        require(
            late == 0,
            7,
            f"{late} bytes of a buffer changed after {op} had returned; the driver gives such a buffer to another "
            "block. Wait for your thread or request before you raise CancelledError; run_blocking does.",
        )

    def require_guards(self, op: str) -> None:
        """Nothing was written beside the view."""
        guards = self._map[: self._start] + self._map[self._stop :]
        require(guards == bytes((GUARD,)) * len(guards), 4, f"{op} wrote outside the lent view, into the next slot")

    async def close(self, op: str) -> None:
        """Unmap. Raises ``AssertionError`` if a view is still alive after ``RETURN_GRACE_S``."""
        give_up_at = time.monotonic() + RETURN_GRACE_S
        while True:
            try:
                self._map.close()
                return
            except BufferError:
                require(
                    time.monotonic() < give_up_at,
                    4,
                    f"a view (or a slice or an array over it) is still alive after {op} returned. Copy what you keep, "
                    "and drop views from caches, queues, closures and stored exceptions.",
                )
                gc.collect()
                await asyncio.sleep(0.001)
