"""Gives out slots, and moves the device's space between slot sizes as they are needed, always within the capacity."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from backends.nvme.fileio import Descriptors, FileIO
from backends.nvme.limits import Limits
from backends.nvme.segments import BUSY, FREE, HOLE, Place, Segment, SegmentTable, SlotRange
from tiering.api import Outcome, run_blocking

GROW_STEP_BYTES: Final = 16 << 20
"""Space is allocated in such steps: direct writes into it need no allocation of their own."""

_OUT_OF_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_RETRYABLE: Final = (*_OUT_OF_SPACE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def failure(error: OSError) -> Outcome:
    """FAILED in words; a full disk and exhausted descriptors may pass, a bad sector does not."""
    where = f" ({error.filename})" if error.filename else ""
    return Outcome.failed(f"{error.strerror or error}{where}", retryable=error.errno in _RETRYABLE)


@dataclass(slots=True)
class SpaceCounters:
    reclaimed_bytes: int = 0
    """Allocated space given back to the filesystem."""
    grown_bytes: int = 0


class Space:
    """Used on the I/O loop; its file work runs in ``executor``. A cancelled call may leave slots BUSY: do not cancel."""

    def __init__(
        self,
        table: SegmentTable,
        limits: Limits,
        io: FileIO,
        descriptors: Descriptors,
        executor: Executor,
        lost: Callable[[Segment], None],
    ) -> None:
        """``lost`` is told of a segment whose file was found gone; it takes it out of the table."""
        self.table = table
        self.counters = SpaceCounters()
        self._limits = limits
        self._io = io
        self._descriptors = descriptors
        self._executor = executor
        self._lost = lost
        self._taken_of: set[int] = set()
        """Slot sizes asked for since the last look ahead."""
        self._changing = asyncio.Lock()
        """One change of what is allocated at a time, so that each sees what the last one left."""

    async def take(self, slot_bytes: int, count: int) -> tuple[list[Place], Outcome]:
        """Up to ``count`` BUSY slots, and why there are no more: OK, REFUSED (the capacity), FAILED (the device)."""
        self._taken_of.add(slot_bytes)
        places = self.table.take(slot_bytes, count)
        if len(places) == count:
            return places, Outcome.OK
        async with self._changing:
            while True:
                places += self.table.take(slot_bytes, count - len(places))
                missing = count - len(places)
                if not missing:
                    return places, Outcome.OK
                try:
                    why = await self._grow(slot_bytes, missing)
                except OSError as error:
                    return places, failure(error)
                if not why.ok:
                    return places, why

    @property
    def growth_due(self) -> bool:
        """Whether ``grow_ahead`` has something to do."""
        return any(self._may_grow_ahead(slot_bytes) for slot_bytes in self._taken_of)

    async def grow_ahead(self) -> None:
        """Allocate the next step of each size in use before stores must wait for it. Room alone is used for it."""
        async with self._changing:
            for slot_bytes in list(self._taken_of):
                if self._may_grow_ahead(slot_bytes):
                    # The disk may be full: the store that needs the space will say so.
                    with contextlib.suppress(OSError):
                        await self._allocate_holes(slot_bytes, GROW_STEP_BYTES // slot_bytes)
            self._taken_of.clear()

    def _may_grow_ahead(self, slot_bytes: int) -> bool:
        low = self.table.free_bytes(slot_bytes) < GROW_STEP_BYTES // 2
        return low and slot_bytes <= GROW_STEP_BYTES <= self.table.room_bytes

    async def trim(self) -> None:
        """Give free space back until the capacity is kept, as far as it goes. Raises ``OSError``."""
        async with self._changing:
            if self.table.room_bytes < 0:
                await self._reclaim(-self.table.room_bytes)

    async def _grow(self, slot_bytes: int, missing: int) -> Outcome:
        """Turn holes into free slots: at least one, or say why not. Raises ``OSError``."""
        if self.table.room_bytes < missing * slot_bytes:
            await self._reclaim(missing * slot_bytes - self.table.room_bytes)
        affordable = self.table.room_bytes // slot_bytes
        if affordable < 1:
            return Outcome.refused(f"full: no room for {slot_bytes} bytes within {self._limits.capacity_bytes}")
        count = min(max(missing, GROW_STEP_BYTES // slot_bytes), affordable)
        try:
            return await self._allocate_holes(slot_bytes, count)
        except OSError as error:
            # Somebody else filled the disk. Settle for one slot, from free space of ours if need be.
            if error.errno not in _OUT_OF_SPACE:
                raise
            await self._reclaim(missing * slot_bytes)
            return await self._allocate_holes(slot_bytes, 1)

    async def _allocate_holes(self, slot_bytes: int, count: int) -> Outcome:
        slots = self.table.holes(slot_bytes, count) or await self._holes_of_new_segment(slot_bytes, count)
        if slots is None:
            return Outcome.refused(
                f"full: the directory has {self._limits.segments_max} segment files, the most it may"
            )
        try:
            await self._allocate(slots)
        except FileNotFoundError:
            # The next round finds other holes, at the latest in a file of its own.
            self._lost(slots.segment)
        return Outcome.OK

    async def _holes_of_new_segment(self, slot_bytes: int, count: int) -> SlotRange | None:
        segment = self.table.new_segment(slot_bytes)
        if segment is None:
            await self._unlink([segment for segment in self.table if not segment.busy])
            segment = self.table.new_segment(slot_bytes)
            if segment is None:
                return None
        try:
            await run_blocking(self._make_file, segment, executor=self._executor)
        except OSError:
            self.table.remove(segment)
            raise
        return SlotRange(segment, 0, min(count, segment.slots))

    async def _allocate(self, slots: SlotRange) -> None:
        # Claimed first: no sample may find allocated what is not accounted for.
        self.table.mark(slots, BUSY)
        state = HOLE
        try:
            allocated_bytes = await run_blocking(self._allocate_file, slots, executor=self._executor)
            self.table.measured(slots.segment, allocated_bytes)
            state = FREE
            self.counters.grown_bytes += slots.length * slots.segment.slot_bytes
        finally:
            self.table.mark(slots, state)

    async def _reclaim(self, wanted_bytes: int) -> None:
        """Give back free slots of about ``wanted_bytes``, whole files first. Raises ``OSError``."""
        before = self.table.claimed_bytes
        empty: list[Segment] = []
        for segment in self.table.segments_with_free():
            if sum(one.free * one.slot_bytes for one in empty) >= wanted_bytes:
                break
            if not segment.busy:
                empty.append(segment)
        await self._unlink(empty)
        ranges = self.table.free_ranges(wanted_bytes - (before - self.table.claimed_bytes))
        for slots in ranges:
            self.table.mark(slots, BUSY)
        done: set[SlotRange] = set()
        try:
            await run_blocking(self._punch_files, ranges, done, executor=self._executor)
        finally:
            for slots in ranges:
                self.table.mark(slots, HOLE if slots in done else FREE)
        for segment in {slots.segment for slots in ranges}:
            try:
                allocated_bytes = await run_blocking(self._allocated, segment, executor=self._executor)
            except FileNotFoundError:
                self._lost(segment)
            else:
                self.table.measured(segment, allocated_bytes)
        self.counters.reclaimed_bytes += before - self.table.claimed_bytes

    async def _unlink(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if segment.busy:
                continue  # taken while an earlier file was unlinked
            self.table.seize(segment)
            try:
                await run_blocking(self._unlink_file, segment, executor=self._executor)
            except OSError:
                self.table.unseize(segment)
                raise
            self.table.remove(segment)

    # Below: in the executor.

    def _make_file(self, segment: Segment) -> None:
        fd = self._io.open(segment.path, os.O_RDWR | os.O_CREAT)
        try:
            # Its full length at once: writes that never extend the file need no lock on it, and get no more than asked.
            self._io.truncate(fd, segment.file_bytes)
        except OSError:
            self._io.unlink(segment.path)
            raise
        finally:
            self._io.close(fd)

    def _allocate_file(self, slots: SlotRange) -> int:
        segment = slots.segment
        offset, length = slots.start * segment.slot_bytes, slots.length * segment.slot_bytes
        with self._descriptors.lend(segment.path, direct=False) as fd:
            try:
                self._io.allocate(fd, offset, length)
            except OSError:
                self._io.punch(fd, offset, length)  # a part may have been allocated
                raise
            return self._io.stat(fd).st_blocks * 512

    def _punch_files(self, ranges: Iterable[SlotRange], done: set[SlotRange]) -> None:
        for slots in ranges:
            size = slots.segment.slot_bytes
            try:
                with self._descriptors.lend(slots.segment.path, direct=False) as fd:
                    if not self._io.punch(fd, slots.start * size, slots.length * size):
                        return
            except FileNotFoundError:
                continue  # found again, and told, when it is measured
            done.add(slots)

    def _allocated(self, segment: Segment) -> int:
        with self._descriptors.lend(segment.path, direct=False) as fd:
            return self._io.stat(fd).st_blocks * 512

    def _unlink_file(self, segment: Segment) -> None:
        self._descriptors.forget(segment.path)
        self._io.unlink(segment.path)
