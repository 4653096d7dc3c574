"""One direction of a lane: its queues, its places, and how much of the primary tier both hold."""

from __future__ import annotations

from collections import OrderedDict

from tiering.runtime.breaker import Breaker
from tiering.runtime.counters import Kind
from tiering.runtime.jobs import Job
from tiering.runtime.ports import SideHealth


class Side:
    """Jobs that wait, by kind and age, and jobs that run. The loop changes it; ``health`` may be asked by any thread.

    The sums are kept beside the jobs because another thread must not walk a dict that the loop changes.
    """

    def __init__(self, *order: tuple[Kind, ...], breaker: Breaker) -> None:
        """``order``: groups of kinds that share a queue; an earlier queue goes before a later one."""
        self._queues: tuple[OrderedDict[int, Job], ...] = tuple(OrderedDict() for _ in order)
        self._queue_of = {kind: queue for kinds, queue in zip(order, self._queues, strict=True) for kind in kinds}
        self.running: dict[int, Job] = {}
        self.breaker = breaker
        self._queued_bytes = 0
        self._running_bytes = 0
        self.answered_s = 0.0
        """When the backend last answered a call, or when it last had nothing to do, whichever is later."""
        self.zombies = 0
        """Running jobs past their deadline."""

    def enqueue(self, job: Job, now_s: float) -> None:
        if not self.running:
            # Then nothing waits either.
            self.answered_s = now_s
        self._queue_of[job.kind][job.op] = job
        self._queued_bytes += job.lent_bytes

    def drop(self, op: int) -> Job | None:
        """Take ``op`` out of its queue; None if it does not wait here."""
        for queue in self._queues:
            if (job := queue.pop(op, None)) is not None:
                self._queued_bytes -= job.lent_bytes
                return job
        return None

    def drop_all(self, kind: Kind | None = None) -> list[Job]:
        """Take out every waiting job (of one kind), queue by queue."""
        jobs = [job for queue in self._queues for job in queue.values() if kind is None or job.kind == kind]
        for job in jobs:
            self.drop(job.op)
        return jobs

    def next(self, held: Kind | None = None) -> Job | None:
        """Take out the job whose turn it is. Kind ``held`` must wait (it has a queue of its own)."""
        for queue in self._queues:
            if queue and (held is None or queue is not self._queue_of[held]):
                _, job = queue.popitem(last=False)
                self._queued_bytes -= job.lent_bytes
                return job
        return None

    def start(self, job: Job) -> None:
        self.running[job.op] = job
        self._running_bytes += job.lent_bytes

    def overdue(self, job: Job) -> None:
        """``job`` runs and is late from now on."""
        if not job.overdue:
            job.overdue = True
            self.zombies += 1

    def land(self, job: Job) -> None:
        del self.running[job.op]
        self._running_bytes -= job.lent_bytes
        self.zombies -= job.overdue

    def health(self) -> SideHealth:
        return {
            "breaker": self.breaker.state.value,
            "queued_ops": sum(len(queue) for queue in self._queues),
            "queued_bytes": self._queued_bytes,
            "running_ops": len(self.running),
            "running_bytes": self._running_bytes,
            "zombies": self.zombies,
        }
