"""Segment files and the state of each of their slots, in memory. Decides; does no I/O. Used on the I/O loop alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from backends.nvme.limits import Limits

HOLE: Final = 0
"""Not allocated on the device."""
FREE: Final = 1
"""Allocated, and nobody's."""
BUSY: Final = 2
"""Holds a block, is being written or read, or is being given back."""

RUN_SEGMENTS_TRIED: Final = 8

_HOLE_BYTE: Final = bytes((HOLE,))
_FREE_BYTE: Final = bytes((FREE,))
_BUSY_BYTE: Final = bytes((BUSY,))
_NAME: Final = re.compile(r"([0-9]+)-([0-9]+)\.seg")


class Segment:
    """One file of ``slots`` slots of one size. ``free`` and ``busy`` count states."""

    __slots__ = ("allocated_bytes", "busy", "free", "number", "path", "slot_bytes", "slots", "state")

    def __init__(self, number: int, slot_bytes: int, slots: int, path: Path) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.path = path
        self.state = bytearray(slots)
        self.free = 0
        self.busy = 0
        self.allocated_bytes = 0
        """As the filesystem last said, its own metadata included."""

    @property
    def file_bytes(self) -> int:
        return self.slots * self.slot_bytes


class Place(NamedTuple):
    segment: Segment
    slot: int


class SlotRange(NamedTuple):
    """``length`` slots from ``start`` on, side by side in one segment."""

    segment: Segment
    start: int
    length: int


def segment_name(number: int, slot_bytes: int) -> str:
    return f"{slot_bytes}-{number}.seg"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """``(number, slot_bytes)``; None if no segment is called so."""
    found = _NAME.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else None


class _SizeClass:
    """The segments of one slot size that can give something, so that finding a slot does not walk all of them."""

    __slots__ = ("free_slots", "with_free", "with_holes")

    def __init__(self) -> None:
        self.with_free: dict[int, Segment] = {}
        self.with_holes: dict[int, Segment] = {}
        self.free_slots = 0


class SegmentTable:
    """All segments of the directory. ``_changed`` alone changes counts."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.directory = directory
        self.limits = limits
        self.by_number: dict[int, Segment] = {}
        self._classes: dict[int, _SizeClass] = {}
        self._next_number = 1
        self.claimed_bytes = 0
        """Slots that are FREE or BUSY: at least what the data of all segments occupies."""
        self.allocated_bytes = 0
        """Sum over the segments of what the filesystem said."""

    @property
    def room_bytes(self) -> int:
        """What may still be claimed; negative after the capacity was lowered.

        The filesystem's own word counts where it charges more than the slots and the reserve for their extents, as one
        with blocks above 4 KiB may.
        """
        charged = max(self.claimed_bytes, self.allocated_bytes - self.limits.extents_bytes_max)
        return self.limits.data_bytes_max - charged

    def free_bytes(self, slot_bytes: int) -> int:
        """In FREE slots of that size."""
        return self._class(slot_bytes).free_slots * slot_bytes

    def new_segment(self, slot_bytes: int) -> Segment | None:
        """A segment of holes without a file yet; None if the directory has as many files as it may."""
        if len(self.by_number) >= self.limits.segments_max:
            return None
        return self.add(self._next_number, slot_bytes, self.limits.slots_per_segment(slot_bytes))

    def add(self, number: int, slot_bytes: int, slots: int) -> Segment:
        segment = Segment(number, slot_bytes, slots, self.directory / segment_name(number, slot_bytes))
        self.by_number[number] = segment
        self._next_number = max(self._next_number, number + 1)
        self._changed(segment, 0, 0)
        return segment

    def remove(self, segment: Segment) -> None:
        """The file is gone. Its number is not used again while this object lives."""
        if segment.number not in self.by_number:
            return
        self.measured(segment, 0)
        self._changed(segment, -segment.free, -segment.busy)
        del self.by_number[segment.number]
        self._class(segment.slot_bytes).with_holes.pop(segment.number, None)

    def measured(self, segment: Segment, allocated_bytes: int) -> None:
        if segment.number in self.by_number:
            self.allocated_bytes += allocated_bytes - segment.allocated_bytes
            segment.allocated_bytes = allocated_bytes

    def mark(self, slots: SlotRange, state: int) -> None:
        """Set ``slots``, which all have one state, to ``state``. Nothing happens once the segment is gone."""
        segment, start, length = slots
        if segment.number not in self.by_number:
            return
        old = segment.state[start]
        segment.state[start : start + length] = bytes((state,)) * length
        self._changed(segment, length * ((state == FREE) - (old == FREE)), length * ((state == BUSY) - (old == BUSY)))

    def count_busy(self) -> None:
        """After recovery has set the slots of its blocks BUSY, and all others are holes."""
        for segment in self:
            self._changed(segment, 0, segment.state.count(BUSY))

    def assume_allocated(self, segment: Segment, stop: int) -> None:
        """After an open: what is not BUSY below slot ``stop`` may well be allocated, and counts so."""
        part = segment.state[:stop]
        segment.state[:stop] = part.replace(_HOLE_BYTE, _FREE_BYTE)
        self._changed(segment, part.count(HOLE), 0)

    def seize(self, segment: Segment) -> None:
        """Nobody may take a slot of this segment, none of which is busy, while its file is removed."""
        segment.state[:] = segment.state.replace(_FREE_BYTE, _BUSY_BYTE)
        self._changed(segment, -segment.free, segment.free)

    def unseize(self, segment: Segment) -> None:
        """The file stays after all."""
        segment.state[:] = segment.state.replace(_BUSY_BYTE, _FREE_BYTE)
        self._changed(segment, segment.busy, -segment.busy)

    def _class(self, slot_bytes: int) -> _SizeClass:
        found = self._classes.get(slot_bytes)
        if found is None:
            found = self._classes[slot_bytes] = _SizeClass()
        return found

    def _changed(self, segment: Segment, free: int, busy: int) -> None:
        """So many slots more are FREE and BUSY."""
        segment.free += free
        segment.busy += busy
        self.claimed_bytes += (free + busy) * segment.slot_bytes
        of_size = self._class(segment.slot_bytes)
        of_size.free_slots += free
        if segment.free:
            of_size.with_free[segment.number] = segment
        else:
            of_size.with_free.pop(segment.number, None)
        if segment.free + segment.busy < segment.slots:
            of_size.with_holes[segment.number] = segment
        else:
            of_size.with_holes.pop(segment.number, None)

    def release(self, segment: Segment, slot: int) -> None:
        """The slot's block is gone for good."""
        self.mark(SlotRange(segment, slot, 1), FREE)

    def take(self, slot_bytes: int, count: int) -> list[Place]:
        """Up to ``count`` FREE slots, BUSY from now on; side by side if a few segments tried have such a run."""
        having = self._class(slot_bytes).with_free
        for segment in itertools.islice(having.values(), RUN_SEGMENTS_TRIED):
            start = segment.state.find(_FREE_BYTE * count) if segment.free >= count else -1
            if start >= 0:
                self.mark(SlotRange(segment, start, count), BUSY)
                return [Place(segment, slot) for slot in range(start, start + count)]
        taken: list[Place] = []
        while having and len(taken) < count:
            segment = next(iter(having.values()))
            start = segment.state.find(FREE)
            run = _run_length(segment.state, start, FREE, count - len(taken))
            self.mark(SlotRange(segment, start, run), BUSY)
            taken += [Place(segment, slot) for slot in range(start, start + run)]
        return taken

    def holes(self, slot_bytes: int, count: int) -> SlotRange | None:
        """Up to ``count`` holes side by side in one existing segment of that size."""
        for segment in self._class(slot_bytes).with_holes.values():
            start = segment.state.find(HOLE)
            return SlotRange(segment, start, _run_length(segment.state, start, HOLE, count))
        return None

    def segments_with_free(self) -> list[Segment]:
        """Of all sizes."""
        return [segment for of_size in self._classes.values() for segment in of_size.with_free.values()]

    def free_ranges(self, wanted_bytes: int) -> list[SlotRange]:
        """FREE slots of about ``wanted_bytes``, of whatever size; fewer if there are fewer."""
        found: list[SlotRange] = []
        for segment in self.segments_with_free():
            start = segment.state.find(FREE)
            while start >= 0 and wanted_bytes > 0:
                count = _run_length(segment.state, start, FREE, -(-wanted_bytes // segment.slot_bytes))
                found.append(SlotRange(segment, start, count))
                wanted_bytes -= count * segment.slot_bytes
                start = segment.state.find(FREE, start + count)
        return found

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.by_number.values())


def _run_length(state: bytearray, start: int, value: int, count_max: int) -> int:
    window = state[start : start + count_max]
    return len(window) - len(window.lstrip(bytes((value,))))
