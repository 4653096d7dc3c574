"""Steps in which vLLM schedules nothing, because requests wait for us."""

from __future__ import annotations

import time
from typing import Final

PAUSE_S: Final = 0.0005
"""vLLM takes the next step at once, and a thread that spins keeps the GIL from those that load: each time they need it
they would wait for a whole switch interval, ten times as long as this."""
EMPTY_STEP_S: Final = 0.001
"""A step that computes takes longer."""


def pause() -> None:
    """Let the threads run that this step waits for."""
    time.sleep(PAUSE_S)


class EmptySteps:
    """For those who are not told whether a step computes: two that follow each other this closely did not."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def step(self, *, waiting: bool) -> None:
        """Call once a step; pauses if something is ``waiting`` and the step before computed nothing."""
        empty = time.monotonic() - self._last_s < EMPTY_STEP_S
        if waiting and empty:
            pause()
        self._last_s = time.monotonic()
