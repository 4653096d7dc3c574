"""Time comes in through here, so that a test can hold it still."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the driver knows of time. ``tiering.testing.VirtualClock`` is the one that tests advance by hand."""

    def now(self) -> float:
        """Seconds since some fixed moment; never runs backwards. Any thread may call it."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once ``now()`` has grown by ``seconds``; at once, but after one turn of the loop, if that is <= 0."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
