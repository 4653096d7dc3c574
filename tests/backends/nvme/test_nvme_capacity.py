"""Bytes on disk: never above the capacity at any sample, and told as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import MIB, OK, REFUSED, disk_bytes, key_of, stored_bytes
from tiering.api import OutcomeCode

CAPACITY = 12 * MIB


class Sampler:
    """The largest number of bytes that the directory ever occupied, sampled after each system call that may add some."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.highest_bytes = 0

    def __call__(self, op: str, path: Path) -> None:
        self.highest_bytes = max(self.highest_bytes, disk_bytes(self.path))

    def io(self) -> rig.HookedIO:
        return rig.HookedIO(after=self)


@pytest.mark.parametrize("o_direct", [True, False])
async def test_disk_fills_up_limit_holds_with_concurrent_writers(tmp_path: Path, o_direct: bool) -> None:
    """row 17: four writers of three sizes and a deleter offer many times what fits."""
    sampler = Sampler(tmp_path / "default")
    seen: set[OutcomeCode] = set()
    async with rig.opened(tmp_path, io=sampler.io(), capacity=CAPACITY, o_direct=o_direct) as backend:

        async def write(writer: int) -> None:
            for turn in range(7):
                size = rig.SIZES[(writer + turn) % 3]
                keys = [key_of(1000 * writer + 10 * turn + n) for n in range(6)]
                seen.update(await rig.store(backend, keys, size))
                assert set(await rig.load(backend, keys, size)) <= {OK, rig.MISSING}
                await backend.delete(keys[:4] if turn % 3 else keys)

        await asyncio.gather(*(write(writer) for writer in range(4)))
        usage = await backend.usage()
        assert usage.allocated_bytes == disk_bytes(tmp_path / "default")
    assert seen == {OK, REFUSED}
    assert 6 * MIB < sampler.highest_bytes <= CAPACITY
    async with rig.opened(tmp_path, io=sampler.io(), capacity=CAPACITY) as backend:
        assert disk_bytes(tmp_path / "default") <= CAPACITY
        await rig.store(backend, [key_of(n) for n in range(40)], MIB)
    assert sampler.highest_bytes <= CAPACITY


async def test_what_the_core_may_store_always_fits(tmp_path: Path) -> None:
    """row 17: with ``sum(stored) + overhead <= capacity`` no store is refused, whatever sizes the space held before."""
    sampler = Sampler(tmp_path / "default")
    async with rig.opened(tmp_path, io=sampler.io(), capacity=CAPACITY) as backend:
        budget = CAPACITY - backend.capabilities.overhead_bytes
        for turn, size in enumerate((MIB, 4097, 1_000_000, MIB)):
            assert backend.capabilities.stored_bytes(size) == stored_bytes(size)
            count = budget // stored_bytes(size)
            keys = [key_of(10_000 * turn + n) for n in range(count)]
            for first in range(0, count, 64):
                part = keys[first : first + 64]
                assert await rig.store(backend, part, size) == [OK] * len(part)
            assert (await backend.usage()).live_bytes == count * stored_bytes(size)
            more = await backend.store([(key_of(-1), rig.filled(key_of(-1), size))])
            assert more[0].code is REFUSED
            assert "full" in more[0].why
            # Every other slot survives for a while, so that no file is simply empty.
            assert rig.codes(await backend.delete(keys[::2])) == [OK] * len(keys[::2])
            assert await rig.store(backend, [key_of(-2 - turn)], rig.SIZES[turn % 3]) == [OK]
            await backend.delete([key_of(-2 - turn), *keys])
    assert sampler.highest_bytes <= CAPACITY


async def test_lowered_capacity_is_kept_once_the_core_has_deleted_down_to_it(tmp_path: Path) -> None:
    """row 17"""
    lower = 5 * MIB
    keys = [key_of(n) for n in range(9)]
    async with rig.opened(tmp_path, capacity=CAPACITY) as backend:
        assert await rig.store(backend, keys, 1_000_000) == [OK] * 9
        small = [key_of(n) for n in range(100, 140)]
        assert await rig.store(backend, small) == [OK] * 40
        await backend.delete(small[::2])
    sampler = Sampler(tmp_path / "default")
    async with rig.opened(tmp_path, io=sampler.io(), capacity=lower) as backend:
        listed = await rig.scanned(backend)
        assert {entry.handle for entry in listed} == {*keys, *small[1::2]}
        excess = sum(entry.stored_bytes for entry in listed) + backend.capabilities.overhead_bytes - lower
        for entry in listed:
            if excess > 0:
                await backend.delete([entry.handle])
                excess -= entry.stored_bytes
        assert disk_bytes(tmp_path / "default") <= lower
        sampler.highest_bytes = 0
        kept = [entry.handle for entry in await rig.scanned(backend)]
        assert kept
        assert await rig.load(backend, [key for key in kept if key in small]) == [OK] * len(set(kept) & set(small))
        for turn in range(8):
            await rig.store(backend, [key_of(500 + turn)], MIB)
            await backend.delete([key_of(500 + turn - 2)])
            await rig.store(backend, [key_of(600 + turn)], 4097)
        assert sampler.highest_bytes <= lower


async def test_lowered_capacity_of_many_small_blocks(tmp_path: Path) -> None:
    """row 17: the index of the larger capacity's time is larger than all that the lower one allows for it."""
    spoken = rig.namespace(1)
    keys = [key_of(n) for n in range(6000)]
    lower = 2 * MIB
    async with rig.opened(tmp_path, spoken, capacity="64MiB") as backend:
        for first in range(0, len(keys), 1000):
            assert await rig.store(backend, keys[first : first + 1000], 1) == [OK] * 1000
    assert disk_bytes(tmp_path) > 48 * MIB
    async with rig.opened(tmp_path, spoken, capacity=lower) as backend:
        listed = [entry.handle for entry in await rig.scanned(backend)]
        assert listed == keys
        keep = (lower - backend.capabilities.overhead_bytes) // stored_bytes(1)
        for first in range(0, len(keys) - keep, 500):
            await backend.delete(keys[first : min(first + 500, len(keys) - keep)])
        assert disk_bytes(tmp_path / "default") <= lower
        assert await rig.load(backend, keys[-keep:], 1) == [OK] * keep


async def test_space_is_allocated_ahead_where_there_is_room(tmp_path: Path) -> None:
    """A store that finds half a step left has the next step allocated behind its back; not at the price of the limit."""
    step = 16 * MIB // stored_bytes(MIB) * stored_bytes(MIB)
    for capacity, ahead in ((256 * MIB, step), (20 * MIB, 0)):
        async with rig.opened(tmp_path, capacity=capacity, owner=str(capacity)) as backend:
            await rig.store(backend, [key_of(n) for n in range(10)], MIB)
            at_once = backend.counters()["grown_bytes"]
            assert 10 * stored_bytes(MIB) <= at_once <= step
            assert (await backend.usage()).allocated_bytes <= capacity
            assert backend.counters()["grown_bytes"] == at_once + ahead


@pytest.mark.parametrize("capacity", [MIB, 8 * MIB])
async def test_overhead_bounds_all_that_is_not_a_slot(tmp_path: Path, capacity: int) -> None:
    """The smallest blocks, so the largest index, through several compactions: what is no live slot fits the overhead."""
    root = tmp_path / "default"
    spoken = rig.namespace(1)
    highest = 0

    def measure(op: str, path: Path) -> None:
        nonlocal highest
        slots = root / "segments"
        claimed = sum(1 for _ in slots.glob("*.seg"))  # its files may have a metadata block each
        highest = max(highest, disk_bytes(root) - disk_bytes(slots) + claimed * rig.PAGE)

    async with rig.opened(tmp_path, spoken, io=rig.HookedIO(after=measure), capacity=capacity) as backend:
        overhead = backend.capabilities.overhead_bytes
        count = (capacity - overhead) // stored_bytes(1)
        assert count > 50
        keys = [key_of(n) for n in range(count)]
        assert await rig.store(backend, keys, 1) == [OK] * count
        for turn in range(2000 // count + 2):
            await backend.delete(keys)
            assert await rig.store(backend, keys, 1) == [OK] * count
            assert disk_bytes(root) <= capacity, turn
        assert backend.counters()["compactions"] >= 2
        assert disk_bytes(root) - count * stored_bytes(1) <= overhead
    assert highest <= overhead


async def test_metrics_that_lie_usage_is_what_du_says(tmp_path: Path) -> None:
    """row 35: live is the sum of what is stored, allocated is the directory's, after each kind of change."""
    root = tmp_path / "default"
    async with rig.opened(tmp_path) as backend:
        keys = [key_of(n) for n in range(12)]
        live = 0
        for size, part in zip(rig.SIZES, (keys[:4], keys[4:8], keys[8:]), strict=True):
            await rig.store(backend, part, size)
            live += 4 * stored_bytes(size)
            usage = await backend.usage()
            assert (usage.allocated_bytes, usage.live_bytes) == (disk_bytes(root), live)
        await backend.delete([keys[0], keys[0], keys[5], keys[11]])
        live -= sum(stored_bytes(size) for size in rig.SIZES)
        usage = await backend.usage()
        assert (usage.allocated_bytes, usage.live_bytes) == (disk_bytes(root), live)
        assert sum(entry.stored_bytes for entry in await rig.scanned(backend)) == live
    async with rig.opened(tmp_path) as backend:
        usage = await backend.usage()
        assert (usage.allocated_bytes, usage.live_bytes) == (disk_bytes(root), live)


async def test_metrics_that_lie_outcomes_add_up(tmp_path: Path) -> None:
    """row 35: each block asked for is counted under exactly one outcome."""
    async with rig.opened(tmp_path) as backend:
        keys = [key_of(n) for n in range(10)]
        await rig.store(backend, [*keys[:6], *keys[:2]])
        await rig.load(backend, keys)
        await backend.store([(b"", rig.buffer(4097))])
        counters = backend.counters()
        assert {name: count for name, count in counters.items() if name.startswith(("load_", "store_"))} == {
            "store_ok": 8, "store_failed": 1, "load_ok": 6, "load_missing": 4,
        }  # fmt: skip
    assert backend.counters() == counters
