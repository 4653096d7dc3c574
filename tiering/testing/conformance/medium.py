"""What the declared capabilities promise: sizes, usage, scans, restarts, several processes, a killed writer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tiering.api import Backend, Namespace, Usage
from tiering.errors import ConfigError
from tiering.testing.conformance.base import MISSING, OK, Block, KitBase, Opened, Verdicts, close
from tiering.testing.conformance.crash import kill_a_writer
from tiering.testing.conformance.rules import require
from tiering.types import KEY_BYTES_MAX, Group, KVLayout, ScanEntry

ALIGNMENT_BYTES_MAX = 4096


def promise(kept: bool, capability: str, message: str) -> None:
    if not kept:
        raise AssertionError(f"capability {capability}: {message}")


class MediumRules(KitBase):
    @pytest.mark.asyncio
    async def test_capabilities_are_consistent(self, tmp_path: Path) -> None:
        declared = self.make_backend(tmp_path).capabilities
        async with self.opened(tmp_path) as s:
            promise(s.backend.capabilities == declared, "all", "they changed at open; they are fixed in __init__")
        alignment = declared.alignment_bytes
        legal = 1 <= alignment <= ALIGNMENT_BYTES_MAX and alignment & (alignment - 1) == 0
        promise(legal, "alignment_bytes", f"{alignment} is not a power of two of at most {ALIGNMENT_BYTES_MAX}")
        promise(declared.batch_blocks_max >= 1, "batch_blocks_max", f"{declared.batch_blocks_max} is below 1")
        promise(not (declared.shared and declared.exclusive), "shared", "a tier is shared or exclusive, not both")
        owned = declared.exclusive
        promise(
            declared.can_delete or not owned, "can_delete", "an exclusive tier is kept within its capacity by deletes"
        )
        known = declared.can_scan or not (owned and declared.persistent)
        promise(known, "can_scan", "nobody else knows what the last process left in an exclusive, persistent tier")
        for size in self.payload_sizes:
            stored = declared.stored_bytes(size)
            promise(stored >= size, "stored_bytes", f"a payload of {size} bytes cannot occupy {stored}")

    @pytest.mark.asyncio
    async def test_capability_value_bytes_max_is_checked_at_open(self, tmp_path: Path) -> None:
        limit = self.make_backend(tmp_path).capabilities.value_bytes_max
        if limit is None:
            return
        fits = all(size <= limit for size in self.payload_sizes)
        promise(fits, "value_bytes_max", f"it is {limit}; give the kit payload_sizes up to that")
        backend = self.make_backend(tmp_path)
        layout = KVLayout([Group("full", 16, limit + 1)], model=f"too large {tmp_path}")
        try:
            await backend.open(Namespace.of(layout, epoch="0"))
        except ConfigError:
            return
        finally:
            await close(backend)
        promise(False, "value_bytes_max", f"open took blocks of {limit + 1} bytes; raise ConfigError with the limit")

    @pytest.mark.asyncio
    async def test_capability_usage_is_real(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as s:
            before = await s.backend.usage()
            if before is None:
                return
            blocks = self.blocks(8)
            await s.store_all(blocks)
            full = await _usage(s)
            stored = sum(s.backend.capabilities.stored_bytes(size) for _, size in blocks)
            if s.backend.capabilities.exclusive:
                grown = full.live_bytes - before.live_bytes
                promise(grown == stored, "usage", f"8 blocks of {stored} stored bytes raised live_bytes by {grown}")
                await s.store_all(blocks)
                again = await _usage(s)
                same = again.live_bytes == full.live_bytes
                promise(
                    same, "usage", f"storing them again took live_bytes from {full.live_bytes} to {again.live_bytes}"
                )
            if s.backend.capabilities.exclusive and s.backend.capabilities.can_delete:
                await s.delete(key for key, _ in blocks)
                after = await _usage(s)
                freed = after.live_bytes == before.live_bytes
                promise(freed, "usage", f"live_bytes was {before.live_bytes}, is {after.live_bytes} after deleting all")

    @pytest.mark.asyncio
    async def test_capability_persistent_blocks_are_found_again(self, tmp_path: Path) -> None:
        """row 19, a clean restart; a tier that is not persistent may have lost them, but serves nothing wrong."""
        blocks = self.blocks(12)
        async with self.opened(tmp_path) as s:
            await s.store_all(blocks)
            can_delete = s.backend.capabilities.can_delete
            if can_delete:
                await s.delete(key for key, _ in blocks[:2])
            before = await s.backend.usage()
        kept, gone = (blocks[2:], blocks[:2]) if can_delete else (blocks, [])
        for _ in range(2):
            async with self.opened(tmp_path) as s:
                await s.require_missing(gone, 2, "deleted before a restart")
                if s.backend.capabilities.persistent:
                    await s.require_loads(kept, 6, "after a clean restart (capabilities say persistent)")
                else:
                    loaded = await s.load(kept)
                    require(set(loaded) <= {OK, MISSING}, 5, f"after a restart load gave {loaded}")
                if before is not None and s.backend.capabilities.persistent and s.backend.capabilities.exclusive:
                    now = await _usage(s)
                    same = now.live_bytes == before.live_bytes
                    promise(same, "usage", f"live_bytes was {before.live_bytes}, is {now.live_bytes} after a restart")

    @pytest.mark.asyncio
    async def test_capability_scan_lists_what_is_stored(self, tmp_path: Path) -> None:
        """row 19: what the core accounts after a restart is what is there, least recently used first."""
        blocks = self.blocks(6)
        async with self.opened(tmp_path) as s:
            if not s.backend.capabilities.can_scan:
                with pytest.raises(NotImplementedError):
                    s.backend.scan()
                return
            promise(await _scan(s.backend) == [], "can_scan", "the medium is empty, but scan lists blocks")
            for block in blocks:
                await s.store_all([block])
        async with self.opened(tmp_path) as s:
            listed = await _scan(s.backend)
            capabilities = s.backend.capabilities
            expected = [
                ScanEntry(key, capabilities.stored_bytes(size)) for key, size in blocks if capabilities.persistent
            ]
            plain = [ScanEntry(entry.handle, entry.stored_bytes, foreign=entry.foreign) for entry in listed]
            promise(
                sorted(plain, key=repr) == sorted(expected, key=repr), "can_scan", f"{plain} listed, not {expected}"
            )
            if capabilities.exclusive:
                promise(plain == expected, "can_scan", f"{plain} is not in the order of use, {expected}")

    @pytest.mark.asyncio
    async def test_capability_scan_tells_foreign_blocks(self, tmp_path: Path) -> None:
        """Another namespace's blocks count in the budget; they can be deleted by their handles and no other way."""
        blocks = self.blocks(4)
        async with self.opened(tmp_path, model="another model") as s:
            if not s.backend.capabilities.can_scan:
                return
            await s.store_all(blocks)
        async with self.opened(tmp_path) as s:
            listed = await _scan(s.backend)
            own = [entry for entry in listed if not entry.foreign]
            promise(not own, "can_scan", f"{own} belong to another namespace; mark them foreign")
            short = [entry.handle for entry in listed if len(entry.handle) <= KEY_BYTES_MAX]
            promise(
                not short, "can_scan", f"foreign handles {short} could be keys; use more than {KEY_BYTES_MAX} bytes"
            )
            deleted = await s.delete(entry.handle for entry in listed)
            promise(deleted == [OK] * len(listed), "can_scan", f"delete of foreign handles gave {deleted}")
            promise(await _scan(s.backend) == [], "can_scan", "foreign blocks are still listed after their delete")
        async with self.opened(tmp_path, model="another model") as s:
            if listed:
                await s.require_missing(blocks, 2, "deleted by foreign handles")

    @pytest.mark.asyncio
    async def test_capability_shared_backends_see_each_other(self, tmp_path: Path) -> None:
        """Two owners of one medium. Row 21: what one deletes is a miss for the other, who had seen it."""
        if not self.make_backend(tmp_path).capabilities.shared:
            return
        blocks = self.blocks(4)
        async with self.opened(tmp_path) as one, self.opened(tmp_path) as two:
            await one.store_all(blocks)
            await two.require_loads(blocks, 6, "stored by another process")
            await asyncio.gather(one.store_all(blocks), two.store_all(blocks))
            await asyncio.gather(*(s.require_loads(blocks, 6, "stored by two processes at a time") for s in (one, two)))
            if one.backend.capabilities.can_delete:
                await two.delete([blocks[0][0]])
                loaded = await one.load(blocks)
                expected = Verdicts([MISSING, OK, OK, OK])
                require(loaded == expected, 2, f"another process deleted the first block: load gave {loaded}")

    @pytest.mark.asyncio
    async def test_capability_exclusive_second_owner_does_no_harm(self, tmp_path: Path) -> None:
        """A second owner is refused with ``ConfigError``, or gets a place of its own; the first one's blocks stay."""
        if not self.make_backend(tmp_path).capabilities.exclusive:
            return
        blocks = self.blocks(4)
        async with self.opened(tmp_path) as first:
            await first.store_all(blocks)
            second = self.make_backend(tmp_path)
            try:
                await second.open(first.namespace)
            except ConfigError:
                pass
            else:
                await Opened(second, first.namespace, self.call_timeout_s).store_all(self.blocks(4, tag="second-"))
                await first.require_loads(blocks, 6, "beside a second owner")
            finally:
                await close(second)
            await first.require_loads(blocks, 6, "after a second owner")

    @pytest.mark.asyncio
    async def test_rule_06_a_killed_writer_leaves_whole_blocks_only(self, tmp_path: Path) -> None:
        """rows 19 and 20: SIGKILL amid stores. Acknowledged blocks of a persistent tier are there, no part is served."""
        if not self.crash_supported:
            pytest.skip(f"{type(self).__name__}.crash_supported is False: rule 6 is not proven for a killed process.")
        for attempt, stores in enumerate((3, 10)):
            story = await asyncio.to_thread(kill_a_writer, type(self), tmp_path, attempt, stores)
            async with self.opened(tmp_path) as s:
                if s.backend.capabilities.persistent:
                    await s.require_loads(story.acknowledged, 6, "acknowledged before SIGKILL")
                # Whatever says OK has been compared with the true bytes by load itself.
                await s.load(story.attempted)
                fresh: list[Block] = self.blocks(4, tag=f"after-{attempt}-")
                await s.store_all(fresh)
                await s.require_loads(fresh, 6, "stored after a writer was killed")


async def _usage(s: Opened) -> Usage:
    usage = await s.backend.usage()
    if usage is None:
        raise AssertionError("capability usage: it told a number before and None now")
    inside = 0 <= usage.live_bytes <= usage.allocated_bytes
    promise(inside, "usage", f"{usage}: live blocks are a part of what is allocated")
    return usage


async def _scan(backend: Backend) -> list[ScanEntry]:
    return [entry async for batch in backend.scan() for entry in batch]
