"""Rules 1, 2 and 3: the shape of a batch and of its outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering.errors import ShapeError
from tiering.testing.conformance.base import CORRUPT, MISSING, OK, KitBase, Verdicts
from tiering.testing.conformance.rules import require
from tiering.types import KEY_BYTES_MAX, OutcomeCode


class BatchRules(KitBase):
    @pytest.mark.asyncio
    async def test_rule_01_outcomes_stand_in_the_order_of_the_batch(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(12)
            await s.store_all(blocks[::2])
            mixed = [blocks[at] for at in (7, 0, 4, 1, 10, 3, 2, 11, 6, 5, 8, 9)]
            expected = Verdicts(OK if blocks.index(block) % 2 == 0 else MISSING for block in mixed)
            found = await s.contains(key for key, _ in mixed)
            require(found == expected, 1, f"contains gave {found}, the batch's order asks for {expected}")
            loaded = await s.load(mixed)
            require(loaded == expected, 1, f"load gave {loaded}, the batch's order asks for {expected}")
            if s.backend.capabilities.can_delete:
                deleted = await s.delete(key for key, _ in mixed)
                require(deleted == expected, 1, f"delete gave {deleted}, the batch's order asks for {expected}")

    @pytest.mark.asyncio
    async def test_rule_01_empty_batches_are_legal(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            empty = [await s.contains([]), await s.load([]), await s.store([]), await s.delete([])]
            require(empty == [[], [], [], []], 1, f"empty batches gave {empty}")

    @pytest.mark.asyncio
    async def test_rule_01_repeated_keys_are_legal(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            a, b, absent = self.blocks(3)
            stored = await s.store([a, b, a, a])
            require(stored == [OK] * 4, 1, f"a store that names one block three times gave {stored}")
            found = await s.contains([a[0], absent[0], a[0], b[0]])
            require(found == [OK, MISSING, OK, OK], 1, f"contains with a repeated key gave {found}")
            loaded = await s.load([a, b, a, absent, a])
            require(loaded == [OK, OK, OK, MISSING, OK], 1, f"load with a repeated key gave {loaded}")
            if s.backend.capabilities.can_delete:
                deleted = await s.delete([a[0], a[0]])
                legal = deleted[0] is OK and deleted[1] in (OK, MISSING)
                require(
                    legal, 1, f"delete with a repeated key gave {deleted}; the block is gone once, and that is fine"
                )
                await s.require_missing([a], 1, "deleted by a repeated key")

    @pytest.mark.asyncio
    async def test_rule_01_a_whole_batch_at_the_declared_limit(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(min(64, s.backend.capabilities.batch_blocks_max), size=self.small)
            await s.store_all(blocks)
            await s.require_loads(list(reversed(blocks)), 1, f"{len(blocks)} blocks in one batch")

    @pytest.mark.asyncio
    async def test_rule_01_keys_are_opaque_bytes(self, tmp_path: Path) -> None:
        """Names of files, URLs and protocol lines must not leak into what a key may be."""
        keys = [
            b"\0", b"\1", b"\1\0", b"\1\0\0", b"/", b".", b"..", b"a/b", b"a", b"A", b"a ", b" a", b"\r\n", b"%2F", b"*",
            b"\xff" * KEY_BYTES_MAX, b"\xff" * (KEY_BYTES_MAX - 1), b"\0" * KEY_BYTES_MAX, bytes(range(KEY_BYTES_MAX)),
        ]  # fmt: skip
        async with self.opened(tmp_path) as s:
            for key in keys:
                await s.require_missing([(key, self.small)], 1, f"key {key!r} was never stored, only others were")
                await s.store_all([(key, self.small)])
            await s.require_loads([(key, self.small) for key in keys], 1, "keys of any bytes and of 1 to 36 of them")

    @pytest.mark.asyncio
    async def test_rule_02_missing_is_a_value(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(4)
            await s.require_missing(blocks, 2, "the medium is empty")
            if s.backend.capabilities.can_delete:
                deleted = await s.delete(key for key, _ in blocks)
                require(deleted == [MISSING] * 4, 2, f"delete of blocks that are not there gave {deleted}")

    @pytest.mark.asyncio
    async def test_rule_02_a_deleted_block_is_missing_and_can_be_stored_again(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            if not s.backend.capabilities.can_delete:
                return
            blocks = self.blocks(4)
            for _ in range(2):
                await s.store_all(blocks)
                deleted = await s.delete(key for key, _ in blocks[:3])
                require(deleted == [OK] * 3, 2, f"delete of stored blocks gave {deleted}")
                await s.require_missing(blocks[:3], 2, "deleted")
                await s.require_loads(blocks[3:], 2, "its neighbours were deleted")

    @pytest.mark.asyncio
    async def test_rule_03_missing_blocks_do_not_spoil_the_batch(self, tmp_path: Path) -> None:
        """row 23"""
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(8)
            good = [block for at, block in enumerate(blocks) if at not in (0, 3, 7)]
            await s.store_all(good)
            expected = Verdicts(OK if block in good else MISSING for block in blocks)
            loaded = await s.load(blocks)
            require(loaded == expected, 3, f"good blocks among missing ones: load gave {loaded}, not {expected}")

    @pytest.mark.asyncio
    async def test_rule_03_bad_blocks_do_not_spoil_the_batch(self, tmp_path: Path) -> None:
        """A block that is asked for in another length than it was stored in is bad; the blocks behind it are not."""
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(6, size=self.small)
            await s.store_all(blocks)
            asked = [(key, self.large if at == 2 else size) for at, (key, size) in enumerate(blocks)]
            loaded = await s.load(asked)
            legal = loaded[2] in (CORRUPT, MISSING) and loaded[:2] + loaded[3:] == [OK] * 5
            require(legal, 3, f"the third block has a wrong length: load gave {loaded}")

    @pytest.mark.asyncio
    async def test_rule_03_a_refused_block_does_not_spoil_the_batch(self, tmp_path: Path) -> None:
        """A view that fits no block of the namespace is refused alone, or the call raises and stores nothing at all."""
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(4, size=self.small)
            good = blocks[:1] + blocks[2:]
            unfit = s.lend(self.large + 7 * s.alignment_bytes)
            loans = [unfit if at == 1 else s.lend_filled(block) for at, block in enumerate(blocks)]
            items = [(key, loan.view()) for (key, _), loan in zip(blocks, loans, strict=True)]
            try:
                stored = Verdicts(await s.checked("store", 4, s.backend.store(items)))
            except ShapeError:
                await s.require_missing(blocks, 3, "store raised ShapeError")
            else:
                refused = stored[1] in (OutcomeCode.REFUSED, OutcomeCode.FAILED)
                legal = refused and stored[:1] + stored[2:] == [OK] * 3
                require(legal, 3, f"the second block has a length of no block: store gave {stored}")
                await s.require_loads(good, 3, "stored beside a refused block")
            del items
            for loan in loans:
                await loan.close("store")
