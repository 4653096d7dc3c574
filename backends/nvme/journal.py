"""The index on disk: a journal that grows, and the snapshot that a compaction makes of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.nvme.fileio import FileIO, write_fully
from backends.nvme.index import Entry, Index
from backends.nvme.limits import JOURNAL_STEP_BYTES, RECORD_BYTES, Limits
from backends.nvme.records import JOURNAL_MARK, SNAPSHOT_MARK, Kind, pack
from tiering.api import run_blocking

GROUP_RECORDS_MAX: Final = 256
"""Records that one call puts into a group commit at a time; a journal file holds several such groups."""

COMPACTION_RECORDS_MIN: Final = 16384
"""A journal shorter than this, or than the index, is replayed quickly enough."""

SNAPSHOT = "index.snapshot"
SNAPSHOT_TEMP = "index.snapshot.tmp"
_SLICE_RECORDS: Final = 512


def journal_name(sequence: int) -> str:
    return f"journal.{sequence}"


@dataclass(slots=True)
class JournalFile:
    sequence: int
    end_bytes: int


class Journal:
    """Used on the I/O loop; its file work runs in threads. Errors are values: a full disk is not an accident.

    Order is the caller's: a PUT is given after its data was written, a slot is reused after its DELETE was taken. The
    index changes before its record is given, so a snapshot taken at any time holds all that the journals before it say.
    """

    def __init__(
        self,
        root: Path,
        limits: Limits,
        io: FileIO,
        index: Index,
        executor: Executor,
        quick_executor: Executor,
        *,
        durable: bool,
    ) -> None:
        """Snapshots are written in ``executor``, appends in ``quick_executor``: they must not queue behind blocks."""
        self.compactions = 0
        self.failed_compactions = 0
        self._root = root
        self._limits = limits
        self._io = io
        self._index = index
        self._executor = executor
        self._quick_executor = quick_executor
        self._durable = durable
        """fdatasync each group."""
        self._files: list[JournalFile] = []
        """Oldest first. A second one exists while a compaction runs, or after one failed."""
        self._fd = -1
        self._allocated_bytes = 0
        """Of the last file, as far as it was allocated ahead."""
        self._snapshot_bytes = 0
        self._groups: list[tuple[bytes, asyncio.Future[OSError | None]]] = []
        self._waiting_bytes = 0
        self._writing = asyncio.Lock()
        self._compacting = asyncio.Lock()
        self._retry_bytes = 0
        """After a failed compaction: the next attempt waits until the journal has this length."""

    # At open and close: in the executor.

    def start(self, files: Sequence[JournalFile], next_sequence: int, snapshot_bytes: int) -> None:
        """Go on with the journals that recovery found, oldest first; with a new one if there are none.

        Notes the own namespace. Raises ``OSError``.
        """
        self._files = list(files)
        self._snapshot_bytes = snapshot_bytes
        if files:
            self._open_last()
            self._io.truncate(self._fd, files[-1].end_bytes)
        else:
            self._new_file(next_sequence)
        own = self._index.own_digest
        self._append_bytes(pack(Kind.NAMESPACE, key=own, namespace=self._index.numbers[own]))

    @property
    def sequences(self) -> list[int]:
        """Of the journal files in use, oldest first."""
        return [one.sequence for one in self._files]

    def close(self) -> None:
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1

    # While open: on the loop.

    async def append(self, records: Sequence[bytes]) -> OSError | None:
        """Write ``records``, together with those of other callers. None once they are as durable as configured.

        After an error some may have been written.
        """
        for first in range(0, len(records), GROUP_RECORDS_MAX):
            error = await self._append_group(b"".join(records[first : first + GROUP_RECORDS_MAX]))
            if error is not None:
                return error
        return None

    @property
    def compaction_due(self) -> bool:
        length = self._files[-1].end_bytes
        if length < self._retry_bytes:
            return False
        if length > self._limits.journal_bytes_max // 2 or self.oversized:
            return True
        return length > max(COMPACTION_RECORDS_MIN, len(self._index.entries)) * RECORD_BYTES

    @property
    def oversized(self) -> bool:
        """The snapshot is of a larger capacity's time, and a new one would not be."""
        fits = self._snapshot_size(len(self._index.entries)) <= self._limits.snapshot_bytes_max
        return fits and self._snapshot_bytes > self._limits.snapshot_bytes_max

    async def compact(self, *, forced: bool = False, room_bytes: int = 0) -> OSError | None:
        """Replace snapshot and journals by a new snapshot: if due, ``forced``, or there is no room for ``room_bytes``.

        Appends go on meanwhile, to the next journal.
        """
        async with self._compacting:
            if not (forced or self.compaction_due or not self._has_room(room_bytes)):
                return None
            try:
                if len(self._files) == 1:
                    async with self._writing:
                        await run_blocking(self._rotate, executor=self._quick_executor)
                    await self._write_snapshot(self._files[-1].sequence)
                else:
                    # The last attempt failed and left two journals. There is no space for a third: appends wait.
                    async with self._writing:
                        await self._write_snapshot(self._files[-1].sequence + 1)
            except OSError as error:
                self.failed_compactions += 1
                self._retry_bytes = self._files[-1].end_bytes + self._limits.journal_bytes_max // 16
                return error
            self.compactions += 1
            self._retry_bytes = 0
            return None

    async def _append_group(self, data: bytes) -> OSError | None:
        while not self._has_room(self._waiting_bytes + len(data)):
            if self._waiting_bytes and self._has_room(len(data)):
                async with self._writing:
                    pass  # those that wait were written
            elif error := await self.compact(room_bytes=len(data)):
                return error
        written: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._groups.append((data, written))
        self._waiting_bytes += len(data)
        async with self._writing:
            # Whoever gets here first writes for all that wait.
            if not written.done():
                groups, self._groups = self._groups, []
                await self._write_groups(groups)
        return written.result()

    def _has_room(self, count: int) -> bool:
        return self._files[-1].end_bytes + count <= self._limits.journal_bytes_max

    async def _write_groups(self, groups: list[tuple[bytes, asyncio.Future[OSError | None]]]) -> None:
        data = b"".join(group for group, _ in groups)
        error: OSError | None = None
        try:
            await run_blocking(self._append_bytes, data, executor=self._quick_executor)
        except OSError as caught:
            error = caught
        finally:
            self._waiting_bytes -= len(data)
            for _, written in groups:
                written.set_result(error)

    async def _write_snapshot(self, sequence: int) -> None:
        entries = list(self._index.entries.items())
        self._index.unbind_unused()
        namespaces = self._index.namespace_records()
        await run_blocking(self._replace_snapshot, sequence, namespaces, entries, executor=self._executor)

    # In the executor, one at a time: under ``_writing`` or ``_compacting``.

    def _append_bytes(self, data: bytes) -> None:
        last = self._files[-1]
        end = last.end_bytes + len(data)
        if end + JOURNAL_STEP_BYTES // 2 > self._allocated_bytes < self._limits.journal_bytes_max:
            self._allocate_ahead(end)
        write_fully(self._io, self._fd, [memoryview(data)], last.end_bytes)
        if self._durable:
            self._io.fdatasync(self._fd)
        last.end_bytes = end

    def _allocate_ahead(self, end_bytes: int) -> None:
        step = -(-(end_bytes + JOURNAL_STEP_BYTES // 2) // JOURNAL_STEP_BYTES) * JOURNAL_STEP_BYTES
        upto = min(step, self._limits.journal_bytes_max)
        try:
            self._io.allocate(self._fd, self._allocated_bytes, upto - self._allocated_bytes)
        except OSError:
            if end_bytes > self._allocated_bytes:
                raise
            return  # what is allocated still lasts for this write
        self._allocated_bytes = upto

    def _new_file(self, sequence: int) -> None:
        path = self._root / journal_name(sequence)
        fd = self._io.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._io.allocate(fd, 0, JOURNAL_STEP_BYTES)
            start = pack(Kind.START, key=JOURNAL_MARK, generation=sequence)
            write_fully(self._io, fd, [memoryview(start)], 0)
        except OSError:
            self._io.close(fd)
            self._io.unlink(path)
            raise
        self.close()
        self._fd = fd
        self._allocated_bytes = JOURNAL_STEP_BYTES
        self._files.append(JournalFile(sequence, RECORD_BYTES))

    def _open_last(self) -> None:
        last = self._files[-1]
        self._fd = self._io.open(self._root / journal_name(last.sequence), os.O_RDWR)
        self._allocated_bytes = last.end_bytes // JOURNAL_STEP_BYTES * JOURNAL_STEP_BYTES

    def _drop_last(self) -> None:
        self._io.unlink(self._root / journal_name(self._files.pop().sequence))
        self.close()
        self._open_last()

    def _rotate(self) -> None:
        self._new_file(self._files[-1].sequence + 1)

    def _replace_snapshot(
        self, sequence: int, namespaces: Sequence[bytes], entries: Sequence[tuple[bytes, Entry]]
    ) -> None:
        """Write the snapshot that the journal ``sequence`` goes on from, then remove the journals before that."""
        temp = self._root / SNAPSHOT_TEMP
        new_journal = self._files[-1].sequence < sequence
        try:
            size = self._fill_snapshot(temp, sequence, namespaces, entries)
            if new_journal:
                self._new_file(sequence)
            try:
                self._io.replace(temp, self._root / SNAPSHOT)
            except OSError:
                if new_journal:
                    self._drop_last()
                raise
        except OSError:
            self._io.unlink(temp)
            raise
        self._snapshot_bytes = size
        while self._files[0].sequence < sequence:
            self._io.unlink(self._root / journal_name(self._files.pop(0).sequence))

    def _fill_snapshot(
        self, temp: Path, sequence: int, namespaces: Sequence[bytes], entries: Sequence[tuple[bytes, Entry]]
    ) -> int:
        fd = self._io.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            head = [pack(Kind.START, key=SNAPSHOT_MARK, generation=sequence), *namespaces]
            size = self._write_slice(fd, head, 0)
            for first in range(0, len(entries), _SLICE_RECORDS):
                part = [self._index.put_record(*entry) for entry in entries[first : first + _SLICE_RECORDS]]
                size = self._write_slice(fd, part, size)
                time.sleep(0)  # lets the loop's thread have the interpreter between slices
            end = pack(Kind.END, generation=len(head) + len(entries))
            size = self._write_slice(fd, [end], size)
            self._io.fdatasync(fd)
        finally:
            self._io.close(fd)
        return size

    def _write_slice(self, fd: int, records: Sequence[bytes], offset: int) -> int:
        data = b"".join(records)
        write_fully(self._io, fd, [memoryview(data)], offset)
        return offset + len(data)

    def _snapshot_size(self, blocks: int) -> int:
        return (blocks + len(self._index.digests) + 2) * RECORD_BYTES
