"""Every bound of one directory, derived from its capacity. The one place that knows what a byte of capacity pays for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
"""Alignment of direct I/O, size of a header page, and the smallest allocation of the filesystems in use."""

SLOT_BYTES_MIN: Final = 2 * PAGE_BYTES
"""One header page and one page of payload."""

SLOTS_PER_SEGMENT_MAX: Final = 1 << 16
"""A slot's number has 16 bits in an index record."""

RECORD_BYTES: Final = 96
"""Size of one index record (``records.py``)."""

NAMESPACES_MAX: Final = 1024
"""Namespaces with blocks in one directory. One more drops the blocks of the oldest."""

MANIFEST_BYTES_MAX: Final = 16 << 10
SEGMENT_BYTES_MAX: Final = 256 << 20
CAPACITY_BYTES_MIN: Final = 1 << 20
JOURNAL_STEP_BYTES: Final = 64 << 10
"""The journal's space is allocated ahead in such steps, so that a full disk still takes the next records."""

_DIRECTORY_ENTRY_BYTES: Final = 2 * 48
"""A segment's entry in its directory, in blocks that a split left half full."""

_EXTENTS_PER_PAGE: Final = 170
"""Extents that one metadata block of ext4 holds when a split left it half full; XFS and btrfs hold more."""


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in bytes unless the name says otherwise. ``data_bytes_max + overhead_bytes == capacity_bytes``."""

    capacity_bytes: int
    segment_bytes: int
    segments_max: int
    journal_bytes_max: int
    """Of one journal file; two exist while a compaction runs, and the first step of a third after one failed."""
    snapshot_bytes_max: int
    """Of one snapshot; a second is being written while a compaction runs."""
    extents_bytes_max: int
    """What the filesystem may charge the segment files for their extents, were every page an extent of its own."""
    overhead_bytes: int

    @property
    def data_bytes_max(self) -> int:
        """What allocated slots may occupy in total."""
        return self.capacity_bytes - self.overhead_bytes

    def slots_per_segment(self, slot_bytes: int) -> int:
        return min(max(1, self.segment_bytes // slot_bytes), SLOTS_PER_SEGMENT_MAX)

    @staticmethod
    def of(capacity_bytes: int) -> Limits:
        segment_bytes = min(SEGMENT_BYTES_MAX, capacity_bytes // 4)
        segments_max = 8 + 2 * -(-capacity_bytes // segment_bytes)
        blocks_max = capacity_bytes // SLOT_BYTES_MIN
        journal = round_up(max(JOURNAL_STEP_BYTES, blocks_max * RECORD_BYTES // 8), JOURNAL_STEP_BYTES)
        records_max = blocks_max + min(blocks_max, NAMESPACES_MAX) + 2
        snapshot = round_up(records_max * RECORD_BYTES, PAGE_BYTES)
        pages = capacity_bytes // PAGE_BYTES
        extents = (segments_max + -(-pages // _EXTENTS_PER_PAGE)) * PAGE_BYTES
        directories = 3 * PAGE_BYTES + round_up(segments_max * _DIRECTORY_ENTRY_BYTES, PAGE_BYTES)
        index_files = 2 * (journal + snapshot + MANIFEST_BYTES_MAX) + JOURNAL_STEP_BYTES
        index_extents = 6 * PAGE_BYTES + round_up(index_files // _EXTENTS_PER_PAGE, PAGE_BYTES)
        overhead = directories + index_files + index_extents + extents
        return Limits(capacity_bytes, segment_bytes, segments_max, journal, snapshot, extents, overhead)
