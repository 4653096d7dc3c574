"""Moves blocks between callers' buffers and slots. Runs in the backend's threads; touches no index and no slot state."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from backends.nvme.fileio import Descriptors, FileIO, read_fully, write_fully
from backends.nvme.index import Entry
from backends.nvme.limits import PAGE_BYTES
from backends.nvme.records import Extension, header_page
from backends.nvme.segments import Segment
from backends.nvme.space import failure
from tiering.api import HEADER_BYTES, Namespace, Outcome, seal, verify

log = logging.getLogger(__name__)

RUN_BLOCKS_MAX: Final = 32
"""Most blocks in one system call: each is two entries of its vector, which has 1,024 at most."""


class Move:
    """One block on its way. The threads set ``outcome`` and ``vanished``, everything else is fixed."""

    __slots__ = ("at", "entry", "key", "outcome", "payload_bytes", "vanished", "view")

    def __init__(self, at: int, key: bytes, view: memoryview, payload_bytes: int, entry: Entry) -> None:
        self.at = at
        """Its position in the caller's batch."""
        self.key = key
        self.view = view
        """The caller's buffer: payload and padding."""
        self.payload_bytes = payload_bytes
        self.entry = entry
        self.outcome = Outcome.CANCELLED
        self.vanished = False
        """The segment's file was found gone."""


class Batch:
    """The moves of one call. ``cancelled`` makes the threads skip what they have not begun."""

    __slots__ = ("cancelled", "moves")

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.cancelled = False


class PagePool:
    """Aligned header pages, one set for each thread that may need one at a time."""

    def __init__(self, sets: int) -> None:
        self._memory = mmap.mmap(-1, sets * RUN_BLOCKS_MAX * PAGE_BYTES)
        self._view = memoryview(self._memory)
        self.free: queue.SimpleQueue[list[memoryview]] = queue.SimpleQueue()
        for first in range(0, sets * RUN_BLOCKS_MAX, RUN_BLOCKS_MAX):
            self.free.put([self._page(number) for number in range(first, first + RUN_BLOCKS_MAX)])

    def _page(self, number: int) -> memoryview:
        return self._view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


class Transfer:
    """Thread-safe. One system call reads or writes a run of neighbouring slots, header pages included."""

    def __init__(
        self, namespace: Namespace, io: FileIO, descriptors: Descriptors, *, threads: int, o_direct: bool
    ) -> None:
        self.o_direct = o_direct
        """False from the first refusal on."""
        self.fallbacks = 0
        self._namespace = namespace
        self._io = io
        self._descriptors = descriptors
        self._pages = PagePool(threads)
        self._falling_back = threading.Lock()

    def write(self, batch: Batch, moves: Sequence[Move]) -> None:
        """Seal and write ``moves``, which are in order of place."""
        self._each_run(batch, moves, self._write_run)

    def read(self, batch: Batch, moves: Sequence[Move]) -> None:
        """Read and verify ``moves``, which are in order of place."""
        self._each_run(batch, moves, self._read_run)

    def sync(self, segments: Sequence[Segment]) -> None:
        """``fdatasync`` each. Raises ``OSError``."""
        for segment in segments:
            with self._descriptors.lend(segment.path, direct=self.o_direct) as fd:
                self._io.fdatasync(fd)

    def _each_run(self, batch: Batch, moves: Sequence[Move], run_of: Callable[[Sequence[Move]], None]) -> None:
        for run in _runs(moves):
            if batch.cancelled:
                return
            error = self._attempt(run, run_of)
            if error is not None and len(run) > 1:
                # One bad sector or a disk that fills up in the middle costs its block, not the run.
                for move in run:
                    self._settle([move], self._attempt([move], run_of))
            else:
                self._settle(run, error)

    def _attempt(self, run: Sequence[Move], run_of: Callable[[Sequence[Move]], None]) -> OSError | None:
        direct = self.o_direct
        try:
            run_of(run)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct or _misaligned(run):
                return error
            self._fall_back(run[0].entry.segment, error)
            return self._attempt(run, run_of)
        return None

    def _settle(self, run: Sequence[Move], error: OSError | None) -> None:
        if error is None:
            return
        for move in run:
            if isinstance(error, FileNotFoundError):
                move.vanished = True
                move.outcome = Outcome.MISSING
            elif error.errno == errno.EINVAL and (why := _misaligned([move])):
                move.outcome = Outcome.failed(why)
            else:
                move.outcome = failure(error)

    def _fall_back(self, segment: Segment, error: OSError) -> None:
        with self._falling_back:
            if self.o_direct:
                self.o_direct = False
                self.fallbacks += 1
                log.warning(
                    "%s refuses direct I/O (%s): going on through the page cache, which is slower and uses memory;"
                    " set o_direct: false to accept that, or move the tier's path to another filesystem",
                    segment.path.parent, error.strerror,
                )  # fmt: skip

    def _write_run(self, run: Sequence[Move]) -> None:
        pages = self._pages.free.get()
        try:
            buffers: list[memoryview] = []
            for move, page in zip(run, pages, strict=False):
                sealed = seal(self._namespace, move.key, move.view[: move.payload_bytes])
                entry = move.entry
                extension = Extension(
                    self._namespace.digest, move.key, entry.parent, entry.generation, move.payload_bytes
                )
                page[:] = header_page(sealed, extension)
                buffers += (page, move.view)
            segment = run[0].entry.segment
            with self._descriptors.lend(segment.path, direct=self.o_direct) as fd:
                write_fully(self._io, fd, buffers, run[0].entry.slot * segment.slot_bytes)
        finally:
            self._pages.free.put(pages)
        for move in run:
            move.outcome = Outcome.OK

    def _read_run(self, run: Sequence[Move]) -> None:
        pages = self._pages.free.get()
        try:
            buffers = [buffer for move, page in zip(run, pages, strict=False) for buffer in (page, move.view)]
            segment = run[0].entry.segment
            with self._descriptors.lend(segment.path, direct=self.o_direct) as fd:
                count = read_fully(self._io, fd, buffers, run[0].entry.slot * segment.slot_bytes)
            for move, page in zip(run, pages, strict=False):
                if count < segment.slot_bytes:
                    move.outcome = Outcome.corrupt(f"the file ends {segment.slot_bytes - max(0, count)} bytes early")
                else:
                    payload = move.view[: move.payload_bytes]
                    move.outcome = verify(self._namespace, move.key, page[:HEADER_BYTES], payload)
                    if move.payload_bytes < move.view.nbytes:
                        # The checksum covers the payload alone; what pads it is zero whatever the medium says.
                        move.view[move.payload_bytes :] = bytes(move.view.nbytes - move.payload_bytes)
                count -= segment.slot_bytes
        finally:
            self._pages.free.put(pages)


def in_order_of_place(moves: list[Move]) -> None:
    moves.sort(key=lambda move: (move.entry.segment.number, move.entry.slot))


def _runs(moves: Sequence[Move]) -> list[list[Move]]:
    runs: list[list[Move]] = []
    for before, move in itertools.pairwise((None, *moves)):
        assert move is not None
        if (
            before is not None
            and before.entry.segment is move.entry.segment
            and before.entry.slot + 1 == move.entry.slot
            and len(runs[-1]) < RUN_BLOCKS_MAX
        ):
            runs[-1].append(move)
        else:
            runs.append([move])
    return runs


def _misaligned(run: Sequence[Move]) -> str | None:
    """Why the caller's buffers cannot be used for direct I/O, if so: a defect of the caller, not of the filesystem."""
    for move in run:
        address = np.frombuffer(move.view, np.uint8).__array_interface__["data"][0]
        if address % PAGE_BYTES:
            return f"the buffer's address {address:#x} is not a multiple of {PAGE_BYTES}"
    return None
