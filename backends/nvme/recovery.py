"""What a directory holds, read back at open. Synchronous: it runs in a thread, before anything else uses the directory."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from backends.nvme.index import KEY_BYTES_MAX, Entry, Index, foreign_handle
from backends.nvme.journal import SNAPSHOT, SNAPSHOT_TEMP, JournalFile
from backends.nvme.limits import PAGE_BYTES, RECORD_BYTES, SLOT_BYTES_MIN, SLOTS_PER_SEGMENT_MAX, Limits, round_up
from backends.nvme.manifest import MANIFEST, MANIFEST_TEMP
from backends.nvme.records import (
    JOURNAL_MARK,
    SNAPSHOT_MARK,
    Extension,
    Kind,
    Record,
    is_complete,
    parse_extension,
    starts_with,
    unpack,
)
from backends.nvme.segments import BUSY, HOLE, Segment, SegmentTable, parse_segment_name

SEGMENTS = "segments"
_JOURNAL_PREFIX: Final = "journal."
# Plain numbers: comparing with an enum's member costs a third of a replay.
_NAMESPACE, _PUT, _DELETE, _START, _END = (
    int(kind) for kind in (Kind.NAMESPACE, Kind.PUT, Kind.DELETE, Kind.START, Kind.END)
)


class Damaged(Exception):
    """``path`` does not say what it should."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


@dataclass(slots=True)
class Recovered:
    """What was found. ``rewrite``: snapshot and journal on disk do not say the same as ``index``."""

    index: Index
    table: SegmentTable
    journals: list[JournalFile] = field(default_factory=list)
    next_sequence: int = 1
    snapshot_bytes: int = 0
    rewrite: bool = False
    torn_records: int = 0
    """Index records with a wrong checksum, or cut off."""
    lost_blocks: int = 0
    """Index records of blocks whose segment or slot is gone, or belongs to a newer block."""
    header_scans: int = 0


def remove_everything(root: Path) -> None:
    """Blocks, index, manifest. The lock stays. Raises ``OSError``."""
    for path in (root / SNAPSHOT, root / MANIFEST, *_journal_paths(root).values(), *_segment_paths(root)):
        path.unlink(missing_ok=True)
    remove_leftovers(root)


def remove_leftovers(root: Path) -> None:
    """Files that a killed process was still writing. Raises ``OSError``."""
    for path in (root / SNAPSHOT_TEMP, root / MANIFEST_TEMP):
        path.unlink(missing_ok=True)


def remove_other_journals(root: Path, keep: Iterable[int]) -> None:
    """Journals whose records a snapshot has, or that nothing can read. Raises ``OSError``."""
    kept = set(keep)
    for sequence, path in _journal_paths(root).items():
        if sequence not in kept:
            path.unlink(missing_ok=True)


def recover(root: Path, own_digest: bytes, limits: Limits, *, strict: bool, threads: int) -> Recovered:
    """Read the index of ``root``; changes nothing there.

    Bad records are dropped and counted. Where snapshot and journal cannot be used at all, the header pages of the
    segments are read instead. ``strict`` raises ``Damaged`` for either. Raises ``OSError``.
    """
    found = Recovered(Index(own_digest), _list_segments(root, limits))
    try:
        _Replay(found).run(root)
        problem = None
    except Damaged as error:
        problem = error
    if strict and problem:
        raise problem
    if strict and (found.torn_records or found.lost_blocks):
        raise Damaged(root, f"{found.torn_records} index records are damaged, {found.lost_blocks} name missing slots")
    if problem:
        found = _scan_headers(root, own_digest, limits, threads)
    found.rewrite = bool(problem or found.torn_records or found.lost_blocks)
    _settle_slots(found)
    return found


class _Replay:
    """Snapshot, then the journals after it, into ``found``."""

    def __init__(self, found: Recovered) -> None:
        self._found = found
        self._names: dict[bytes, bytes] = {}
        """One object for a key and for all that name it as their parent."""
        self._gone: set[bytes] = set()
        """Blocks whose segment does not exist. Fine if a later record says that they were deleted."""

    def run(self, root: Path) -> None:
        journals = _journal_paths(root)
        first = self._snapshot(root / SNAPSHOT)
        if first is None:
            if not journals and self._found.table.by_number:
                raise Damaged(root / SNAPSHOT, "there are segments, and no snapshot or journal of them")
            first = 1
        for sequence in sorted(journals):
            # Older ones: a compaction was killed before it removed them; the snapshot has all they say.
            if sequence >= first:
                self._journal(journals[sequence], sequence, first, is_last=sequence == max(journals))
        self._found.lost_blocks += len(self._gone)
        self._found.next_sequence = max([first, *(one.sequence + 1 for one in self._found.journals)])

    def _snapshot(self, path: Path) -> int | None:
        """The sequence number of the journal that goes on from it; None if there is no snapshot."""
        data = _read(path)
        if data is None:
            return None
        records = list(unpack(data))
        sequence = starts_with(records, SNAPSHOT_MARK)
        if sequence is None:
            raise Damaged(path, "it is no snapshot of this version")
        if not is_complete(records):
            raise Damaged(path, "it is cut off")
        self._found.snapshot_bytes = len(data)
        self._apply(records, path)
        return sequence

    def _journal(self, path: Path, sequence: int, first: int, *, is_last: bool) -> None:
        data = _read(path) or b""
        if not data and is_last:
            return  # killed between making the file and writing its first record
        records = list(unpack(data))
        if starts_with(records, JOURNAL_MARK) != sequence:
            raise Damaged(path, "it is no journal of this version")
        if sequence != first + len(self._found.journals):
            raise Damaged(path, f"the journal before it, number {sequence - 1}, is missing")
        self._apply(records, path)
        self._found.journals.append(JournalFile(sequence, len(data) // RECORD_BYTES * RECORD_BYTES))

    def _apply(self, records: Iterable[Record | None], path: Path) -> None:
        index, names, gone = self._found.index, self._names, self._gone
        entries, digests, own = index.entries, index.digests, index.own_digest
        segments = self._found.table.by_number
        highest, known, digest = index.generation, -1, b""
        for record in records:
            if record is None:
                self._found.torn_records += 1
                continue
            kind, namespace, slot, number, generation, key, parent = record
            if kind == _NAMESPACE:
                index.bind(namespace, key)
                known = -1
                continue
            if kind in (_START, _END):
                continue
            if namespace != known:
                if namespace not in digests:
                    if kind == _PUT:
                        raise Damaged(path, f"no record tells what namespace number {namespace} is")
                    continue
                known, digest = namespace, digests[namespace]
            handle = key if digest == own else foreign_handle(digest, key)
            entry = entries.pop(handle, None)
            if kind == _PUT:
                if entry is not None and entry.generation > generation:
                    entries[handle] = entry
                    continue
                if generation > highest:
                    highest = generation
                segment = segments.get(number)
                if segment is None or slot >= segment.slots:
                    gone.add(handle)
                    continue
                gone.discard(handle)
                handle = names.setdefault(handle, handle)
                entries[handle] = Entry(segment, slot, generation, names.setdefault(parent, parent) or None)
            elif kind == _DELETE:
                gone.discard(handle)
                if entry is not None and entry.generation > generation:
                    entries[handle] = entry
            elif entry is not None:
                entries[handle] = entry
        index.generation = highest


def _scan_headers(root: Path, own_digest: bytes, limits: Limits, threads: int) -> Recovered:
    found = Recovered(Index(own_digest), _list_segments(root, limits), header_scans=1)
    found.next_sequence = max(_journal_paths(root), default=0) + 1
    with ThreadPoolExecutor(threads) as pool:
        scanned = list(pool.map(_scan_segment, found.table))
    blocks = sorted((block for part in scanned for block in part), key=lambda block: block[0].generation)
    index = found.index
    for extension, segment, slot in blocks:
        if extension.digest not in index.numbers:
            number = index.free_number()
            if number is None:
                found.lost_blocks += 1
                continue
            index.bind(number, extension.digest)
        handle = index.handle(extension.digest, extension.key)
        index.entries.pop(handle, None)  # an older copy, deleted since
        index.entries[handle] = Entry(segment, slot, extension.generation, extension.parent)
        index.generation = extension.generation
    return found


def _scan_segment(segment: Segment) -> list[tuple[Extension, Segment, int]]:
    """Every whole header page of the file, wherever the filesystem says that there is data at all."""
    blocks: list[tuple[Extension, Segment, int]] = []
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        slot = 0
        while (slot := _next_data(fd, slot, segment.slot_bytes)) < segment.slots:
            with contextlib.suppress(OSError):  # a bad sector is one block lost
                extension = parse_extension(os.pread(fd, PAGE_BYTES, slot * segment.slot_bytes))
                if extension and PAGE_BYTES + round_up(extension.payload_bytes, PAGE_BYTES) == segment.slot_bytes:
                    blocks.append((extension, segment, slot))
            slot += 1
    finally:
        os.close(fd)
    return blocks


def _next_data(fd: int, slot: int, slot_bytes: int) -> int:
    try:
        return os.lseek(fd, slot * slot_bytes, os.SEEK_DATA) // slot_bytes
    except OSError as error:
        if error.errno == errno.ENXIO:
            return SLOTS_PER_SEGMENT_MAX
        raise


def _settle_slots(found: Recovered) -> None:
    """Give each slot to its newest block, and count."""
    index, table = found.index, found.table
    disputed = False
    for entry in index.entries.values():
        state = entry.segment.state
        disputed |= state[entry.slot] == BUSY
        state[entry.slot] = BUSY
    if disputed:
        older = _older_of_shared_slots(index)
        for handle in older:
            del index.entries[handle]
        found.lost_blocks += len(older)
        found.rewrite = True
    _number_all(found)
    index.live_bytes = sum(entry.segment.slot_bytes for entry in index.entries.values())
    table.count_busy()


def _older_of_shared_slots(index: Index) -> list[bytes]:
    owners: dict[tuple[int, int], bytes] = {}
    older: list[bytes] = []
    for handle, entry in index.entries.items():
        place = (entry.segment.number, entry.slot)
        other = owners.setdefault(place, handle)
        if other is not handle:
            newer = entry.generation > index.entries[other].generation
            owners[place] = handle if newer else other
            older.append(other if newer else handle)
    return older


def _number_all(found: Recovered) -> None:
    """A lost DELETE may have left a block of a namespace whose number another one has since."""
    index = found.index
    unnumbered = {
        index.split(handle)[0] for handle in index.entries if len(handle) > KEY_BYTES_MAX
    } - index.numbers.keys()
    for digest in unnumbered:
        found.rewrite = True
        number = index.free_number()
        if number is not None:
            index.bind(number, digest)
            continue
        for handle in [handle for handle in index.entries if index.split(handle)[0] == digest]:
            entry = index.entries.pop(handle)
            entry.segment.state[entry.slot] = HOLE
            found.lost_blocks += 1


def _list_segments(root: Path, limits: Limits) -> SegmentTable:
    table = SegmentTable(root / SEGMENTS, limits)
    for path in _segment_paths(root):
        named = parse_segment_name(path.name)
        assert named is not None
        number, slot_bytes = named
        if slot_bytes < SLOT_BYTES_MIN or slot_bytes % PAGE_BYTES:
            continue
        status = path.stat()
        slots = max(limits.slots_per_segment(slot_bytes), status.st_size // slot_bytes)
        segment = table.add(number, slot_bytes, min(slots, SLOTS_PER_SEGMENT_MAX))
        table.measured(segment, status.st_blocks * 512)
    return table


def _segment_paths(root: Path) -> list[Path]:
    directory = root / SEGMENTS
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if parse_segment_name(path.name))


def _journal_paths(root: Path) -> dict[int, Path]:
    tails = {path: path.name.removeprefix(_JOURNAL_PREFIX) for path in root.glob(f"{_JOURNAL_PREFIX}*")}
    return {int(tail): path for path, tail in tails.items() if tail.isascii() and tail.isdigit()}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(path, error.strerror or str(error)) from error
