"""Rules 4 and 5: whose the buffers are, and whose the bytes are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tiering.testing.conformance.base import CORRUPT, MISSING, OK, Block, KitBase, Opened, Verdicts
from tiering.testing.conformance.rules import blame, require

Edit = Callable[[bytes], bytes]


class PayloadRules(KitBase):
    @pytest.mark.asyncio
    async def test_rule_04_every_payload_size_in_place(self, tmp_path: Path) -> None:
        """Lengths that are no multiple of anything too; guards beside the views, closable mappings beneath them."""
        async with self.opened(tmp_path) as s:
            for size in self.payload_sizes:
                blocks = self.blocks(3, size=size, tag=f"{size}-")
                with blame(4, f"payloads of {size} bytes"):
                    await s.store_all(blocks)
                    await s.require_loads(blocks, 4, f"payloads of {size} bytes")

    @pytest.mark.asyncio
    async def test_rule_04_views_are_given_back_by_calls_that_find_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            loaded = await s.load(self.blocks(4))
            require(loaded == [MISSING] * 4, 2, f"the medium is empty: load gave {loaded}")

    @pytest.mark.asyncio
    async def test_rule_04_src_may_be_reused_after_store(self, tmp_path: Path) -> None:
        """A store that returned has its own copy, on the medium or in memory."""
        async with self.opened(tmp_path) as s:
            for block in self.blocks(len(self.payload_sizes)):
                loan = s.lend_filled(block)
                outcomes = await s.backend.store([(block[0], loan.view())])
                require(outcomes[0].ok, 6, f"a plain store gave {outcomes}")
                loan.poison()
                await s.require_loads([block], 4, "src was overwritten after store had returned")
                await loan.close("store")

    @pytest.mark.asyncio
    async def test_rule_05_another_length_is_not_ok(self, tmp_path: Path) -> None:
        """Short and long blocks: what was stored in one size is asked for in another."""
        sizes = sorted(set(self.payload_sizes))
        async with self.opened(tmp_path) as s:
            for n, (stored, asked) in enumerate([*pairwise(sizes), (sizes[-1], sizes[0])]):
                key = b"length-%d" % n
                await s.store_all([(key, stored)])
                loaded = await s.load([(key, asked)])
                require(
                    loaded[0] in (CORRUPT, MISSING),
                    5,
                    f"{stored} bytes were stored, {asked} asked for: load gave {loaded}, not CORRUPT",
                )

    @pytest.mark.asyncio
    async def test_rule_05_no_block_gets_a_neighbours_bytes(self, tmp_path: Path) -> None:
        """Blocks of one size, alone and in batches, at a time, and in the places of deleted ones."""
        async with self.opened(tmp_path) as s:
            blocks, later = self.blocks(6, size=self.small), self.blocks(3, size=self.small, tag="later-")
            with blame(5, "blocks of one size lie side by side"):
                await s.store_all(blocks)
                await s.require_loads(blocks[::-1], 5, "loaded in another order than stored")
                await asyncio.gather(*(s.require_loads([block], 5, "loaded at a time") for block in blocks))
                if s.backend.capabilities.can_delete:
                    await s.delete(key for key, _ in blocks[::2])
                    await s.store_all(later)
                    await s.require_missing(blocks[::2], 5, "others may lie in their places")
                    await s.require_loads([*later, *blocks[1::2]], 5, "stored where others had been deleted")

    @pytest.mark.asyncio
    async def test_rule_05_another_namespace_never_sees_a_block(self, tmp_path: Path) -> None:
        blocks = self.blocks(4)
        async with self.opened(tmp_path) as s:
            await s.store_all(blocks)
        async with self.opened(tmp_path, model="another model") as s:
            await s.require_missing(blocks, 5, "stored by another model")
            await s.store_all(blocks[:2])
            await s.require_loads(blocks[:2], 5, "two models use equal keys")
        async with self.opened(tmp_path) as s:
            if s.backend.capabilities.persistent:
                await s.require_loads(blocks, 5, "another model came and went")
            else:
                await self.require_never_wrong(s, blocks)

    @pytest.mark.asyncio
    async def test_rule_05_another_epoch_misses(self, tmp_path: Path) -> None:
        """row 16: after a weight update everything misses; the old weights find their own blocks again."""
        blocks = self.blocks(4)
        async with self.opened(tmp_path, epoch="weights-1") as s:
            await s.store_all(blocks)
        async with self.opened(tmp_path, epoch="weights-2") as s:
            await s.require_missing(blocks, 5, "the weights have changed")
        async with self.opened(tmp_path, epoch="weights-1") as s:
            if s.backend.capabilities.persistent:
                await s.require_loads(blocks, 5, "the old weights are back")
            else:
                await self.require_never_wrong(s, blocks)

    @pytest.mark.asyncio
    async def test_rule_05_damaged_payloads_are_corrupt(self, tmp_path: Path) -> None:
        """row 13: flipped bits, zeroed and torn payloads. Then row 7: one bad load, a miss, and found after a new store."""
        self._require_hook()
        async with self.opened(tmp_path) as s:
            for size in sorted({self.small, self.large}):
                for name, damage in _payload_damages(size).items():
                    block = (f"{name}-{size}".encode(), size)
                    payload = s.payload(block)
                    await self._damage(s, tmp_path, block, partial(_inside, payload=payload, damage=damage))
                    loaded = await s.load([block])
                    require(loaded == [CORRUPT], 5, f"the stored payload was damaged ({name}): load gave {loaded}")
                    await self._require_healed(s, block, name)

    @pytest.mark.asyncio
    async def test_rule_05_damaged_images_are_never_served(self, tmp_path: Path) -> None:
        """row 13: truncated, over-long, empty, zero-filled; headers flipped byte by byte. Right bytes may still be OK."""
        self._require_hook()
        async with self.opened(tmp_path) as s:
            damages: dict[str, Edit] = {
                "empty": lambda raw: b"",
                "halved": lambda raw: raw[: len(raw) // 2],
                "one byte short": lambda raw: raw[:-1],
                "over-long": lambda raw: raw + raw[:512],
                "zero-filled": lambda raw: bytes(len(raw)),
                "shifted": lambda raw: raw[1:] + raw[:1],
            }
            damages |= {f"flip-{at}": _flip(at) for at in range(0, 128, 5)}
            for name, damage in damages.items():
                block = (f"image-{name}".encode(), self.small)
                await self._damage(s, tmp_path, block, damage)
                with blame(5, f"the stored block was damaged ({name})"):
                    loaded = await s.load([block])
                legal = loaded[0] in (OK, CORRUPT, MISSING)
                require(legal, 5, f"the stored block was damaged ({name}): load gave {loaded}, not CORRUPT")
                if loaded[0] is not OK:
                    await self._require_healed(s, block, name)

    @pytest.mark.asyncio
    async def test_rule_05_swapped_and_foreign_blocks_are_corrupt(self, tmp_path: Path) -> None:
        """row 13: whole, well-formed blocks in a wrong place: of another key, and of another namespace's equal key."""
        self._require_hook()
        mine, neighbour = self.blocks(2, size=self.small)
        images: dict[str, bytes] = {}
        async with self.opened(tmp_path, model="another model") as s:
            await self._damage(s, tmp_path, mine, lambda raw: images.setdefault("another namespace", raw))
        async with self.opened(tmp_path) as s:
            await self._damage(s, tmp_path, neighbour, lambda raw: images.setdefault("another key", raw))
            for name, image in images.items():
                await self._damage(s, tmp_path, mine, partial(_replace, image=image))
                loaded = await s.load([mine])
                require(loaded == [CORRUPT], 5, f"the medium holds a whole block of {name}: load gave {loaded}")
                await self._require_healed(s, mine, name)
            await s.require_loads([neighbour], 5, "its neighbour was swapped")

    @pytest.mark.asyncio
    async def test_rule_05_damage_among_good_blocks(self, tmp_path: Path) -> None:
        """rows 13 and 23"""
        self._require_hook()
        async with self.opened(tmp_path) as s:
            blocks = self.blocks(8)
            await s.store_all(blocks)
            for bad in (blocks[1], blocks[6]):
                payload = s.payload(bad)
                await self._damage(s, tmp_path, bad, partial(_inside, payload=payload, damage=_flip(17)))
            expected = Verdicts(CORRUPT if at in (1, 6) else OK for at in range(8))
            loaded = await s.load(blocks)
            require(loaded == expected, 5, f"two of eight blocks are damaged: load gave {loaded}, not {expected}")

    async def require_never_wrong(self, s: Opened, blocks: list[Block]) -> None:
        """Each block is whole or a clean miss (``load`` itself compares the bytes)."""
        loaded = await s.load(blocks)
        require(set(loaded) <= {OK, MISSING}, 5, f"load gave {loaded}; whole or MISSING are legal here")

    async def _damage(self, s: Opened, tmp_path: Path, block: Block, edit: Edit) -> None:
        await s.store_all([block])
        if not self.corrupt(tmp_path, block[0], edit):
            raise AssertionError(
                f"{type(self).__name__}.corrupt did not find block {block[0]!r}, which was just stored"
            )

    async def _require_healed(self, s: Opened, block: Block, damage: str) -> None:
        await s.require_missing([block], 5, f"a bad block ({damage}) is deleted or quarantined once it was seen")
        await s.store_all([block])
        await s.require_loads([block], 5, f"stored again after it was bad ({damage})")

    def _require_hook(self) -> None:
        if not self.corrupt_supported:
            pytest.skip(
                f"{type(self).__name__}.corrupt_supported is False: rule 5 is not proven for a medium that returns bad "
                "bytes. Override corrupt() and set it."
            )


def _flip(at: int) -> Edit:
    return lambda raw: raw[:at] + bytes((raw[at] ^ 0x40,)) + raw[at + 1 :] if at < len(raw) else raw[:-1]


def _payload_damages(size: int) -> dict[str, Edit]:
    half = size // 2
    return {
        "first bit": _flip(0),
        "middle bit": _flip(half),
        "last bit": _flip(size - 1),
        "zeroed": lambda payload: bytes(len(payload)),
        "torn": lambda payload: payload[:half] + bytes(len(payload) - half),
        "sector lost": lambda payload: payload[:512] + bytes(512) + payload[1024:],
    }


def _replace(raw: bytes, image: bytes) -> bytes:
    return image


def _inside(raw: bytes, payload: bytes, damage: Edit) -> bytes:
    """``raw`` with ``damage`` done to the payload in it. A codec may hide the payload: then to its second half."""
    at = raw.find(payload)
    if at < 0:
        at = len(raw) // 2
        payload = raw[at:]
    return raw[:at] + damage(payload) + raw[at + len(payload) :]
