"""Rules 6, 7 and 8: atomic stores, cancellation at many points, and calls that overlap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from tiering.api import Outcome
from tiering.testing.conformance.base import MISSING, OK, Block, KitBase
from tiering.testing.conformance.buffers import Loan
from tiering.testing.conformance.rules import blame, broken, require

CANCEL_AFTER_TURNS: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32, 64, 128, 256, 512)
"""How many turns of the loop a call gets before it is cancelled. A call that ends earlier ends the series."""

THREADS_MAX: Final = 64
OVERLAPPING_CALLS: Final = 160

Call: TypeAlias = Coroutine[Any, Any, list[Outcome]]
StartCall: TypeAlias = Callable[[Block, list[Loan]], Call]


class ConcurrencyRules(KitBase):
    @pytest.mark.asyncio
    async def test_rule_06_store_is_idempotent(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(4)
            for _ in range(3):
                await s.store_all(blocks)
                await s.require_loads(blocks, 6, "stored again")

    @pytest.mark.asyncio
    async def test_rule_06_readers_see_all_or_nothing(self, tmp_path: Path) -> None:
        """Readers poll while writers store and store again; no load is wrong, and CORRUPT means that a part was seen."""
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(4, size=self.large)
            done = False

            async def read(block: Block) -> None:
                while not done:
                    loaded = await s.load([block])
                    seen = f"a reader beside a writer of the same block got {loaded}"
                    require(loaded[0] in (OK, MISSING), 6, f"{seen}; publish a block only when it is whole")
                    await asyncio.sleep(0)

            readers = [asyncio.create_task(read(block), name="kit-reader") for block in blocks]
            try:
                for _ in range(4):
                    await asyncio.gather(*(s.store_all([block]) for block in blocks))
                    await asyncio.sleep(0)
            finally:
                done = True
                results = await asyncio.gather(*readers, return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
            await s.require_loads(blocks, 6, "after concurrent readers and writers")

    @pytest.mark.asyncio
    async def test_rule_06_concurrent_writers_of_one_block_all_succeed(self, tmp_path: Path) -> None:
        """row 22"""
        async with self.opened(tmp_path) as s:
            for block in self.blocks(len(self.payload_sizes)):
                stored = await asyncio.gather(*(s.store([block]) for _ in range(16)), return_exceptions=True)
                bad = [answer for answer in stored if answer != [OK]]
                require(not bad, 6, f"{len(bad)} of 16 concurrent stores of one block failed: {bad[:2]}")
                await s.require_loads([block], 6, "sixteen writers at a time")

    @pytest.mark.asyncio
    async def test_rule_07_a_cancelled_load_leaves_dest_alone(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            loans: list[Loan] = []

            def start(block: Block, fresh: list[Loan]) -> Call:
                return s.backend.load([(block[0], loan.view()) for loan in fresh])

            for size in {self.small, self.large}:
                block = (b"load-%d" % size, size)
                await s.store_all([block])

                def make(n: int, block: Block = block) -> tuple[Block, list[Loan]]:
                    return block, [s.lend(block[1]), s.lend(block[1])]

                loans += await _cancel_often(make, start, self.call_timeout_s)
            await self.others_run(s)
        await _require_left_alone(loans, "load")

    @pytest.mark.asyncio
    async def test_rule_07_a_cancelled_store_leaves_src_alone(self, tmp_path: Path) -> None:
        """The block of a cancelled store is whole or missing; bytes that src holds later never get in."""
        async with self.opened(tmp_path) as s:
            loans: list[Loan] = []
            blocks: list[Block] = []

            def start(block: Block, fresh: list[Loan]) -> Call:
                blocks.append(block)
                return s.backend.store([(block[0], loan.view()) for loan in fresh])

            for size in {self.small, self.large}:

                def make(n: int, size: int = size) -> tuple[Block, list[Loan]]:
                    block = (b"store-%d-%d" % (size, n), size)
                    return block, [s.lend_filled(block)]

                loans += await _cancel_often(make, start, self.call_timeout_s)
            await self.others_run(s)
            with blame(7, "stores were cancelled and their src was reused"):
                loaded = await s.load(blocks)
            legal = set(loaded) <= {OK, MISSING}
            require(legal, 7, f"blocks whose store was cancelled load as {loaded}; whole or MISSING are legal")
        await _require_left_alone(loans, "store")
        async with self.opened(tmp_path) as s:
            with blame(7, "stores were cancelled and their src was reused"):
                loaded = await s.load(blocks)
            require(set(loaded) <= {OK, MISSING}, 7, f"after a reopen cancelled stores load as {loaded}")

    @pytest.mark.asyncio
    async def test_rule_07_cancelled_lookups_and_deletes_leave_the_backend_usable(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            block = self.blocks(1)[0]

            def contains(block: Block, _: list[Loan]) -> Call:
                return s.backend.contains([block[0]] * 8)

            def delete(block: Block, _: list[Loan]) -> Call:
                return s.backend.delete([block[0]])

            calls = [contains, delete] if s.backend.capabilities.can_delete else [contains]
            for start in calls:
                await s.store_all([block])
                await _cancel_often(lambda n: (block, []), start, self.call_timeout_s)
                await s.store_all([block])
                await s.require_loads([block], 7, f"after cancelled calls of {start.__name__}")
            await self.others_run(s)

    @pytest.mark.asyncio
    async def test_rule_08_calls_overlap(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            stored, new = self.blocks(8, tag="old"), self.blocks(8, tag="new")
            await s.store_all(stored)
            calls = [s.require_loads(stored[n : n + 4], 8, "loads overlap") for n in range(0, 8, 2) for _ in range(3)]
            calls += [s.store_all(new[n : n + 2]) for n in range(0, 8, 2) for _ in range(2)]
            calls += [s.require_missing([(b"absent-%d" % n, self.small)], 8, "calls overlap") for n in range(8)]
            with blame(8, "calls overlap"):
                await asyncio.gather(*calls)
            await s.require_loads(stored + new, 8, "after overlapping calls")

    @pytest.mark.asyncio
    async def test_rule_08_deletes_and_loads_of_one_block_overlap(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            if not s.backend.capabilities.can_delete:
                return
            block = (b"contended", self.large)
            for _ in range(4):
                await s.store_all([block])
                *loaded, deleted = await asyncio.gather(*(s.load([block]) for _ in range(4)), s.delete([block[0]]))
                legal = all(answer[0] in (OK, MISSING) for answer in loaded) and deleted == [OK]
                require(legal, 8, f"four loads of one block beside its delete gave {loaded} and {deleted}")
                await s.require_missing([block], 8, "deleted while it was loaded")

    @pytest.mark.asyncio
    async def test_rule_08_fan_out_is_bounded(self, tmp_path: Path) -> None:
        """The driver bounds its calls; a thread a call would still multiply by every tier and process."""
        async with self.opened(tmp_path) as s:
            block = (b"wanted", self.small)
            await s.store_all([block])
            before = threading.active_count()
            calls = [asyncio.create_task(s.load([block])) for _ in range(OVERLAPPING_CALLS)]
            most = 0
            while not all(call.done() for call in calls):
                most = max(most, threading.active_count() - before)
                await asyncio.sleep(0)
            bad = [call.result() for call in calls if call.result() != [OK]]
            require(not bad, 8, f"{len(bad)} of {OVERLAPPING_CALLS} overlapping loads failed: {bad[:2]}")
            message = f"{OVERLAPPING_CALLS} overlapping loads ran on {most} new threads; at most {THREADS_MAX} are fine"
            require(most <= THREADS_MAX, 8, message)


async def _require_left_alone(loans: list[Loan], op: str) -> None:
    for loan in loans:
        loan.require_poisoned(f"the cancelled {op}")
        await loan.close(f"the cancelled {op}")


async def _cancel_often(
    make: Callable[[int], tuple[Block, list[Loan]]], start: StartCall, timeout_s: float
) -> list[Loan]:
    """Start calls and cancel each after ever more turns, once and twice; their loans, poisoned as they returned."""
    used: list[Loan] = []
    for n, (turns, times) in enumerate((turns, times) for turns in CANCEL_AFTER_TURNS for times in (1, 2)):
        block, loans = make(n)
        used += loans
        task = asyncio.create_task(start(block, loans), name="kit-cancelled")
        for _ in range(turns):
            await asyncio.sleep(0)
        ended_by_itself = task.done()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((task,), timeout=timeout_s)
        require(task.done(), 7, f"cancelled after {turns} turns, a call still runs {timeout_s} s later")
        for loan in loans:
            loan.poison()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise broken(7, f"cancelled after {turns} turns, a call raised {error!r}") from error
        if ended_by_itself:
            break
    return used
