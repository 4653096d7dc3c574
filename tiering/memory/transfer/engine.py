"""The queue of one direction: order, results and pooled resources, the same for every device."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tiering.errors import ClosedError, TieringError
from tiering.memory.arena import Arena
from tiering.memory.transfer.device import CopyError, Device, Event, Move, Stream
from tiering.memory.transfer.plan import GroupShape, plan
from tiering.memory.transfer.spec import TransferResult, TransferSpec, TransferType

STREAMS_MAX: Final = 2
"""Streams of a direction. One copy waits for the one before it; the second stream lets the next be prepared meanwhile."""

E = TypeVar("E", bound=Event)


@dataclass(slots=True, eq=False)
class _Job(Generic[E]):
    job_id: int
    bytes: int = 0
    move: Move | None = None
    start: E | None = None
    end: E | None = None
    """None: nothing was queued for it on the device, so it has ended once it is the head."""
    error: str = ""


class QueuedEngine(Generic[E]):
    """A ``TransferEngine`` on any ``Device``. One thread calls.

    Each job waits for the end of the job before it, so that results come, and bytes land, in the order of ``submit``.
    Jobs in flight are bounded by the leases of the callers: each holds slots.
    """

    def __init__(self, direction: TransferType, arena: Arena, shapes: Sequence[GroupShape], device: Device[E]) -> None:
        """The engine owns ``device`` and closes it; the arena stays the caller's, and is kept mapped while jobs run."""
        self._type = direction
        self._arena = arena
        self._shapes = tuple(shapes)
        self._device = device
        self._queue: deque[_Job[E]] = deque()
        self._waiting: dict[int, _Job[E]] = {}
        """Jobs whose result was not told yet, by id, in order."""
        self._ended: list[TransferResult] = []
        """Settled by ``close`` and not told yet."""
        self._streams: list[Stream[E]] = []
        self._taken = 0
        self._events: list[E] = []
        """Events that no job uses."""
        self._last_end: E | None = None
        """The end of the youngest job on the device; None once nothing is in flight."""
        self._closed = False

    @property
    def type(self) -> TransferType:
        return self._type

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        """Queue a copy; a spec that cannot be carried out is a failed result, after which nothing was copied.

        On a device the copy follows what the caller's current stream has been given so far. On pageable memory a device
        may copy within this call. Raises ``ClosedError`` after ``close``, and ``TieringError`` for the id of a job whose
        result has not been told.
        """
        if self._closed:
            raise ClosedError(f"the transfer engine {self._name} is closed")
        if job_id in self._waiting:
            raise TieringError(f"job {job_id} of the transfer engine {self._name} is under way; ids are used once")
        job: _Job[E] = _Job(job_id)
        self._waiting[job_id] = job
        self._queue.append(job)
        try:
            planned = plan(spec, self._type, self._shapes)
            if planned.runs:
                # Taken anew for each job: an array kept here would keep the arena mapped for good.
                job.move = Move(planned, tuple(self._arena.array(pool) for pool in range(len(self._shapes))))
                self._launch(job, job.move)
            job.bytes = planned.bytes
        except TieringError as error:
            job.error = str(error)

    def poll(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, in order; looks at the head of the queue alone. Never raises."""
        results, self._ended = self._ended, []
        while self._queue and self._has_ended(self._queue[0]):
            results.append(self._settle())
        for result in results:
            del self._waiting[result.job_id]
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these jobs ended; ``poll`` tells their results. No time limit: the device decides.

        Raises ``KeyError``, before waiting, for a job that was never submitted or whose result was told.
        """
        unknown = [job_id for job_id in job_ids if job_id not in self._waiting]
        if unknown:
            raise KeyError(
                f"jobs {unknown} of the transfer engine {self._name} were never submitted or are told already"
            )
        wanted = set(job_ids)
        last: _Job[E] | None = None
        target: _Job[E] | None = None
        for job in self._queue:
            last = job if job.end is not None else last
            target = last if job.job_id in wanted else target
        # The end of one is the end of all before it.
        if target is not None:
            self._await(target)

    def close(self) -> None:
        """Wait for what was submitted and give back streams, events and threads. Idempotent.

        ``poll`` still tells the results; later submits raise ``ClosedError``.
        """
        if self._closed:
            return
        self._closed = True
        while self._queue:
            self._await(self._queue[0])
            self._ended.append(self._settle())
        self._streams.clear()
        self._events.clear()
        self._device.close()

    @property
    def _name(self) -> str:
        return f"{self._type[0].value} -> {self._type[1].value}"

    def _launch(self, job: _Job[E], move: Move) -> None:
        """Queue the job on the device. If that fails half-way, ``job.end`` still marks the end of what was queued."""
        stream = self._stream()
        start, end = self._event(), self._event()
        try:
            stream.follow_caller()
            if self._last_end is not None:
                stream.follow(self._last_end)
            stream.record(start)
            stream.copy(move)
        except CopyError as error:
            job.error = str(error)
        # Also after a failure: copies may have been queued, and must end before the slots are used again. A device that
        # refuses even this carries out nothing any more.
        stream.record(end)
        job.start, job.end, self._last_end = start, end, end

    def _stream(self) -> Stream[E]:
        if len(self._streams) < STREAMS_MAX:
            self._streams.append(self._device.stream())
        self._taken += 1
        return self._streams[self._taken % len(self._streams)]

    def _event(self) -> E:
        return self._events.pop() if self._events else self._device.event()

    def _has_ended(self, job: _Job[E]) -> bool:
        if job.end is None:
            return True
        try:
            return job.end.done()
        except CopyError as error:
            job.error = job.error or str(error)
            return True

    def _await(self, job: _Job[E]) -> None:
        if job.end is None:
            return
        try:
            job.end.wait()
        except CopyError as error:
            job.error = job.error or str(error)

    def _settle(self) -> TransferResult:
        """Take the head, which has ended, off the queue and give back what it used."""
        job = self._queue.popleft()
        seconds = 0.0
        if job.start is not None and job.end is not None:
            if not job.error:
                try:
                    seconds = self._device.elapsed_s(job.start, job.end)
                except CopyError as error:
                    job.error = str(error)
            if job.end is self._last_end:
                self._last_end = None
            self._events += (job.start, job.end)
        job.move = job.start = job.end = None
        moved = 0 if job.error else job.bytes
        return TransferResult(job.job_id, not job.error, moved, seconds, self._type, job.error)
