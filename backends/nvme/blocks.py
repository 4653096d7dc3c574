"""An open directory: the meeting place of index, slots, journal and threads. Everything here runs on the I/O loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from backends.nvme.config import NvmeConfig
from backends.nvme.fileio import Descriptors, FileIO
from backends.nvme.index import KEY_BYTES_MAX, Entry
from backends.nvme.journal import Journal
from backends.nvme.limits import PAGE_BYTES, Limits, round_up
from backends.nvme.recovery import Recovered, remove_other_journals
from backends.nvme.segments import Place, Segment
from backends.nvme.space import Space, failure
from backends.nvme.transfer import Batch, Move, Transfer, in_order_of_place
from tiering.api import BlockKey, Namespace, Outcome, OutcomeCode, ScanEntry, run_blocking

CHUNK_BYTES: Final = 2 << 20
"""A batch is spread over threads in chunks of at least this size: smaller ones cost more in handing over."""

TOUCHES_LOGGED_AT: Final = 256
TOUCHES_MAX: Final = 1 << 16
TOUCH_CALLS_MAX: Final = 1024
PARENTS_MAX: Final = 1 << 16
SCAN_BATCH_BLOCKS: Final = 4096


class Blocks:
    """Not cancellable: each coroutine is run to its end, as a task that a cancelled caller waits for."""

    def __init__(
        self,
        namespace: Namespace,
        config: NvmeConfig,
        limits: Limits,
        found: Recovered,
        io: FileIO,
        executor: Executor,
        quick_executor: Executor,
    ) -> None:
        """``executor`` moves blocks; ``quick_executor`` does what blocks wait for: log records, allocate space."""
        self.index = found.index
        self.table = found.table
        self.counters: Counter[str] = Counter()
        self.io = io
        self.executor = executor
        self.quick_executor = quick_executor
        self.descriptors = Descriptors(io)
        root = config.path / config.owner
        self.space = Space(self.table, limits, io, self.descriptors, quick_executor, self.lose)
        self.journal = Journal(root, limits, io, self.index, executor, quick_executor, durable=config.sync == "batch")
        self.transfer = Transfer(
            namespace, io, self.descriptors, threads=config.threads, o_direct=config.o_direct
        )  # fmt: skip
        self._root = root
        self._threads = config.threads
        self._durable = config.sync == "batch"
        self._payload_bytes = {
            round_up(size, PAGE_BYTES): namespace.payload_of(round_up(size, PAGE_BYTES), PAGE_BYTES)
            for size in namespace.payload_bytes
        }
        """Length of a lent view -> length of the payload in it."""
        self._storing: dict[BlockKey, asyncio.Future[Outcome]] = {}
        self._doomed: list[tuple[bytes, Entry]] = []
        """Out of the index, with the DELETE record that must be in the journal before the slot is used again."""
        self._parents: dict[BlockKey, BlockKey] = {}
        self._touched: deque[tuple[BlockKey, ...]] = deque(maxlen=TOUCH_CALLS_MAX)
        """As advised, from whatever thread."""
        self._unlogged_touches: dict[BlockKey, None] = {}

    async def start(self, found: Recovered) -> None:
        """Go on with the journal. Raises ``OSError``."""
        await run_blocking(
            self.journal.start, found.journals, found.next_sequence, found.snapshot_bytes, executor=self.executor
        )
        if found.rewrite:
            # Where the disk is full this may wait: what is in memory counts, and a restart would find the same again.
            await self.journal.compact(forced=True)
        await run_blocking(remove_other_journals, self._root, self.journal.sequences, executor=self.executor)
        await self.space.trim()

    async def finish(self) -> None:
        """Log what is only in memory. What cannot be logged is lost, as after a crash."""
        await self._log_touches()
        await self._bury()

    def close(self) -> None:
        self.journal.close()
        self.descriptors.close()

    # Advice.

    def link(self, parents: Mapping[BlockKey, BlockKey]) -> None:
        for key, parent in parents.items():
            entry = self.index.entries.get(key)
            if entry is not None:
                entry.parent = parent
            else:
                self._parents[key] = parent
        while len(self._parents) > PARENTS_MAX:
            del self._parents[next(iter(self._parents))]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._touched.append(tuple(keys))

    # Blocks.

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        entries = self.index.entries
        return [Outcome.OK if key in entries and len(key) <= KEY_BYTES_MAX else Outcome.MISSING for key in keys]

    async def load(self, batch: Batch, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        self._apply_touches()
        outcomes = [Outcome.MISSING] * len(items)
        for at, (key, dest) in enumerate(items):
            entry = self.index.entries.get(key) if len(key) <= KEY_BYTES_MAX else None
            if entry is None:
                continue
            payload_bytes = self._payload_bytes.get(dest.nbytes)
            if payload_bytes is None:
                outcomes[at] = Outcome.failed(f"no block of this namespace has a buffer of {dest.nbytes} bytes")
            elif entry.segment.slot_bytes != PAGE_BYTES + dest.nbytes:
                stored_bytes = entry.segment.slot_bytes - PAGE_BYTES
                outcomes[at] = Outcome.corrupt(f"{stored_bytes} bytes are stored; the block has {dest.nbytes}")
                self._doom(key, entry)
            else:
                entry.readers += 1
                batch.moves.append(Move(at, key, dest, payload_bytes, entry))
        try:
            await self._spread(self.transfer.read, batch)
        finally:
            for move in batch.moves:
                self.leave(move.entry)
        for move in batch.moves:
            outcomes[move.at] = move.outcome
            if move.vanished:
                self._doom(move.key, move.entry)
                self.lose(move.entry.segment)
            elif move.outcome.code is OutcomeCode.CORRUPT:
                self._doom(move.key, move.entry)
        self._count("load", outcomes)
        await self._bury()
        return outcomes

    async def store(self, batch: Batch, items: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        self._apply_touches()
        outcomes = [Outcome.OK] * len(items)
        mine: dict[int, asyncio.Future[Outcome]] = {}
        others: list[tuple[int, asyncio.Future[Outcome]]] = []
        for at, (key, src) in enumerate(items):
            if not 1 <= len(key) <= KEY_BYTES_MAX:
                outcomes[at] = Outcome.failed(f"the key has {len(key)} bytes; a block key has 1 to {KEY_BYTES_MAX}")
            elif src.nbytes not in self._payload_bytes:
                outcomes[at] = Outcome.failed(f"no block of this namespace has a buffer of {src.nbytes} bytes")
            elif key in self._storing:
                others.append((at, self._storing[key]))
            elif not self._is_stored(key, src.nbytes):
                mine[at] = self._storing[key] = asyncio.get_running_loop().create_future()
        try:
            await self._store_new(batch, items, list(mine), outcomes)
        finally:
            for at, stored in mine.items():
                del self._storing[items[at][0]]
                stored.set_result(outcomes[at])
        for at, stored in others:
            outcomes[at] = await stored
        self._count("store", outcomes)
        return outcomes

    async def delete(self, handles: Sequence[bytes]) -> list[Outcome]:
        self._apply_touches()
        outcomes = [Outcome.MISSING] * len(handles)
        for at, handle in enumerate(handles):
            entry = self.index.entries.get(handle)
            if entry is not None:
                self._doom(handle, entry)
                outcomes[at] = Outcome.OK
        error = await self._bury()
        if error is None and self.journal.oversized:
            error = await self.journal.compact()
        try:
            if error is None and self.table.room_bytes < 0:
                await self.space.trim()
        except OSError as caught:
            error = caught
        if error is not None:
            why = f"gone from memory, not yet from the disk: {error.strerror or error}"
            outcomes = [Outcome.failed(why, retryable=True) if outcome.ok else outcome for outcome in outcomes]
        return outcomes

    async def scan(self) -> AsyncIterator[list[ScanEntry]]:
        self._apply_touches()
        handles = list(self.index.entries)
        for foreign in (True, False):
            part: list[ScanEntry] = []
            for handle in handles:
                entry = self.index.entries.get(handle)
                if entry is None or self.index.is_foreign(handle) is not foreign:
                    continue
                parent = None if foreign else entry.parent
                part.append(ScanEntry(handle, entry.segment.slot_bytes, parent, foreign))
                if len(part) == SCAN_BATCH_BLOCKS:
                    yield part
                    part = []
            if part:
                yield part

    # Upkeep.

    @property
    def upkeep_due(self) -> bool:
        touched = len(self._unlogged_touches) >= TOUCHES_LOGGED_AT
        return touched or self.space.growth_due or self.journal.compaction_due

    async def keep_up(self) -> None:
        if self.space.growth_due:
            await self.space.grow_ahead()
        if len(self._unlogged_touches) >= TOUCHES_LOGGED_AT:
            await self._log_touches()
        if self.journal.compaction_due:
            await self.journal.compact()

    def lose(self, segment: Segment) -> None:
        """The segment's file is gone: so are its blocks."""
        if segment.number not in self.table.by_number:
            return
        self.counters["vanished_segments"] += 1
        for handle, entry in list(self.index.entries.items()):
            if entry.segment is segment:
                self._doom(handle, entry)
        self.table.remove(segment)
        self.descriptors.forget(segment.path)

    def leave(self, entry: Entry) -> None:
        """One reader less."""
        entry.readers -= 1
        if entry.deleted and not entry.readers:
            self.table.release(entry.segment, entry.slot)

    def _is_stored(self, key: BlockKey, view_bytes: int) -> bool:
        entry = self.index.entries.get(key)
        if entry is None:
            return False
        if entry.segment.slot_bytes == PAGE_BYTES + view_bytes:
            return True
        self._doom(key, entry)  # another size cannot be the same block
        return False

    async def _store_new(
        self, batch: Batch, items: Sequence[tuple[BlockKey, memoryview]], new: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        """Write the items at ``new``. Sets their ``outcomes``, whatever happens."""
        by_slot_bytes: dict[int, list[int]] = {}
        for at in new:
            outcomes[at] = Outcome.CANCELLED
            by_slot_bytes.setdefault(PAGE_BYTES + items[at][1].nbytes, []).append(at)
        for slot_bytes, group in by_slot_bytes.items():
            places, why = await self.space.take(slot_bytes, len(group))
            for at, place in zip(group, places, strict=False):
                batch.moves.append(self._new_move(at, *items[at], place))
            for at in group[len(places) :]:
                outcomes[at] = why
        await self._spread(self.transfer.write, batch)
        await self._sync(batch)
        written: list[Move] = []
        for move in sorted(batch.moves, key=lambda one: one.at):  # the caller's order is the order of use
            outcomes[move.at] = move.outcome
            if move.vanished or move.entry.segment.number not in self.table.by_number:
                outcomes[move.at] = Outcome.failed("its segment file was removed", retryable=True)
                self.lose(move.entry.segment)
            elif move.outcome.ok:
                self.index.add(move.key, move.entry)
                written.append(move)
            else:
                self.table.release(move.entry.segment, move.entry.slot)
        error = await self._log(written)
        if error is not None:
            for move in written:
                outcomes[move.at] = failure(error)
                self._doom(move.key, move.entry)
        await self._bury()

    def _new_move(self, at: int, key: BlockKey, src: memoryview, place: Place) -> Move:
        entry = Entry(place.segment, place.slot, self.index.next_generation(), self._parents.pop(key, None))
        return Move(at, key, src, self._payload_bytes[src.nbytes], entry)

    async def _spread(self, work: Callable[[Batch, Sequence[Move]], None], batch: Batch) -> None:
        moves = batch.moves
        if not moves:
            return
        in_order_of_place(moves)
        chunks = min(self._threads, len(moves), max(1, sum(move.view.nbytes for move in moves) // CHUNK_BYTES))
        if chunks == 1:
            await run_blocking(work, batch, moves, executor=self.executor)
            return
        size = -(-len(moves) // chunks)
        results = await asyncio.gather(
            *(
                run_blocking(work, batch, moves[first : first + size], executor=self.executor)
                for first in range(0, len(moves), size)
            ),
            # The other chunks still use the callers' buffers when one fails.
            return_exceptions=True,
        )
        for error in results:
            if error is not None:
                raise error

    async def _sync(self, batch: Batch) -> None:
        written = [move for move in batch.moves if move.outcome.ok]
        if not self._durable or not written:
            return
        try:
            segments = list({move.entry.segment for move in written})
            await run_blocking(self.transfer.sync, segments, executor=self.executor)
        except OSError as error:
            for move in written:
                move.outcome = failure(error)

    async def _log(self, written: Sequence[Move]) -> OSError | None:
        records = [self.index.put_record(move.key, move.entry) for move in written]
        return await self._append_with_touches(records)

    def _doom(self, handle: bytes, entry: Entry) -> None:
        """Take the block out of the index now; ``_bury`` does the rest."""
        if self.index.entries.get(handle) is entry:
            self._doomed.append((self.index.delete_record(handle, entry), entry))
            self.index.remove(handle)

    async def _bury(self) -> OSError | None:
        """Log the deletions and free the slots. After an error they stay for the next time, and so do the slots."""
        doomed, self._doomed = self._doomed, []
        error = await self.journal.append([record for record, _ in doomed]) if doomed else None
        if error is not None:
            self._doomed = doomed + self._doomed
            return error
        for _, entry in doomed:
            entry.deleted = True
            if not entry.readers:
                self.table.release(entry.segment, entry.slot)
        return None

    def _apply_touches(self) -> None:
        while self._touched:
            for key in self._touched.popleft():
                if len(key) <= KEY_BYTES_MAX and self.index.touch(key):
                    self._unlogged_touches.pop(key, None)
                    self._unlogged_touches[key] = None
        while len(self._unlogged_touches) > TOUCHES_MAX:
            del self._unlogged_touches[next(iter(self._unlogged_touches))]

    async def _append_with_touches(self, records: list[bytes]) -> OSError | None:
        """Log these, behind what was touched since. Touches count once they are in the file."""
        touched, self._unlogged_touches = self._unlogged_touches, {}
        error = await self.journal.append(self.index.touch_records(touched) + records)
        self.counters["logged_touches"] += len(touched)
        return error

    async def _log_touches(self) -> None:
        self._apply_touches()
        await self._append_with_touches([])

    def _count(self, op: str, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.counters[f"{op}_{outcome.code.value}"] += 1
