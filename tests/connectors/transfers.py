"""A transfer engine whose copies happen when a test says so, as late as a device might do them, and fail on command."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tiering.memory.transfer.spec import TransferEngine, TransferResult, TransferSpec, TransferType


class HeldEngine:
    """A ``TransferEngine`` around a real one: each copy is made, whole, at the moment of its release or of a ``wait``.

    So a copy reads what is there at the last possible moment: bytes that were overwritten before it was waited for are
    copied wrong. ``held`` False: every poll releases all. The inner engine is owned, and closed.
    """

    def __init__(self, inner: TransferEngine) -> None:
        self._inner = inner
        self.held = True
        self.fail_next = 0
        """So many of the next copies fail, and move nothing."""
        self.waited: set[int] = set()
        """Jobs that somebody blocked for."""
        self.log: list[tuple[int, TransferSpec]] = []
        """All that was submitted, in order."""
        self._queue: deque[tuple[int, TransferSpec]] = deque()
        self._ended: list[TransferResult] = []

    @property
    def type(self) -> TransferType:
        return self._inner.type

    @property
    def waiting(self) -> list[int]:
        """Jobs submitted and not copied yet."""
        return [job_id for job_id, _ in self._queue]

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        self.log.append((job_id, spec))
        self._queue.append((job_id, spec))

    def release(self, jobs: int = 1) -> None:
        """Make the next ``jobs`` copies."""
        for _ in range(min(jobs, len(self._queue))):
            job_id, spec = self._queue.popleft()
            if self.fail_next:
                self.fail_next -= 1
                self._ended.append(TransferResult(job_id, False, 0, 0.0, self.type, "injected"))
                continue
            self._inner.submit(job_id, spec)
            self._inner.wait([job_id])
            self._ended += self._inner.poll()

    def poll(self) -> list[TransferResult]:
        if not self.held:
            self.release(len(self._queue))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        self.waited.update(job_ids)
        while any(job_id in job_ids for job_id, _ in self._queue):
            self.release()

    def close(self) -> None:
        self.release(len(self._queue))
        self._inner.close()
