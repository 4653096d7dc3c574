"""Bad bytes in each place where they can stand, and files that vanish. The kit has the rest of the kinds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import rig
from tests.backends.nvme.rig import CORRUPT, FAILED, MISSING, OK, Found, disk_bytes, key_of, stored_bytes
from tiering.api import BackendError, ConfigError

PLACES = {
    "first byte of the header": 0,
    "key in the header": 70,
    "header's own checksum": 121,
    "first byte of the payload": 4096,
    "last byte of the payload": 4096 + 999_999,
}
SIZE = 1_000_000


@pytest.mark.parametrize("place", PLACES)
async def test_wrong_bytes_served_never_in_a_run_of_neighbours(tmp_path: Path, place: str) -> None:
    """rows 13 and 23: one flipped bit among blocks that one system call reads; deleted, counted, stored again."""
    keys = [key_of(n) for n in range(5)]
    async with rig.opened(tmp_path, threads=1) as backend:
        await rig.store(backend, keys, SIZE)
        flip(rig.slot_of(backend.root, keys[2]), PLACES[place])
        assert await rig.load(backend, keys, SIZE) == [OK, OK, CORRUPT, OK, OK]
        assert await rig.load(backend, keys, SIZE) == [OK, OK, MISSING, OK, OK]
        assert rig.codes(await backend.contains(keys)) == [OK, OK, MISSING, OK, OK]
        assert backend.counters()["corrupt"] == 1
        assert (await backend.usage()).live_bytes == 4 * stored_bytes(SIZE)
        assert await rig.store(backend, keys, SIZE) == [OK] * 5
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, keys, SIZE) == [OK] * 5


async def test_what_the_checksum_does_not_cover_does_no_harm(tmp_path: Path) -> None:
    """row 13: bits flipped in the padding and in the unused part of the header page; the padding comes back as zeros."""
    key = key_of(1)
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key], SIZE)
        slot = rig.slot_of(backend.root, key)
        flip(slot, 4000)
        flip(slot, 4096 + SIZE)
        flip(slot, slot.length - 1)
        assert await rig.load(backend, [key], SIZE) == [OK]


async def test_a_block_of_another_size_is_corrupt(tmp_path: Path) -> None:
    """row 13: the caller expects another length than was stored under the key."""
    key = key_of(1)
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key], 4097)
        assert await rig.load(backend, [key], rig.MIB) == [CORRUPT]
        assert await rig.load(backend, [key], 4097) == [MISSING]
        await rig.store(backend, [key], 4097)
        assert await rig.store(backend, [key], rig.MIB) == [OK]
        assert await rig.load(backend, [key], rig.MIB) == [OK]
        assert (await backend.usage()).live_bytes == stored_bytes(rig.MIB)
        assert rig.codes(await backend.load([(key, rig.buffer(3 * rig.MIB))])) == [FAILED]
        assert await rig.load(backend, [key], rig.MIB) == [OK]


def _unlink(file: Path) -> None:
    file.unlink()


def _replace(file: Path) -> None:
    """As a copy or restore would: another file of the same name."""
    file.unlink()
    file.touch()


@pytest.mark.parametrize("vanish", [_unlink, _replace])
async def test_vanished_file_is_a_miss(tmp_path: Path, vanish: Callable[[Path], None]) -> None:
    """row 21: the segment of one size is gone under the open backend; the other's blocks stay, new ones are stored."""
    large, small = [key_of(n) for n in range(3)], [key_of(n) for n in range(10, 14)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, large, SIZE)
        await rig.store(backend, small)
        vanish(rig.slot_of(backend.root, large[0]).file)
        assert await rig.load(backend, large, SIZE) == [MISSING] * 3
        assert await rig.load(backend, small) == [OK] * 4
        assert rig.codes(await backend.contains(large)) == [MISSING] * 3
        usage = await backend.usage()
        assert usage.live_bytes == 4 * stored_bytes(4097)
        assert usage.allocated_bytes == disk_bytes(backend.root)
        assert await rig.store(backend, large, SIZE) == [OK] * 3
        assert await rig.load(backend, large, SIZE) == [OK] * 3
        assert backend.counters()["vanished_segments"] == 1
    async with rig.opened(tmp_path, recover="strict") as backend:
        assert await rig.load(backend, large, SIZE) == [OK] * 3


async def test_vanished_file_is_noticed_by_a_store(tmp_path: Path) -> None:
    """row 21: no block is written into a file that has no name any more."""
    keys = [key_of(n) for n in range(8)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys[:2], SIZE)
        rig.slot_of(backend.root, keys[0]).file.unlink()
        first = await backend.store([(key, rig.filled(key, SIZE)) for key in keys[2:4]])
        assert [(outcome.code, outcome.retryable) for outcome in first] == [(FAILED, True)] * 2
        assert await rig.store(backend, keys[2:], SIZE) == [OK] * 6
        assert await rig.load(backend, keys, SIZE) == [MISSING] * 2 + [OK] * 6


async def test_vanished_directory(tmp_path: Path) -> None:
    """row 21: somebody removes it all under the open backend. Misses and failures, in words; a restart begins anew."""
    keys = [key_of(n) for n in range(3)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys)
        shutil.rmtree(backend.root)
        assert await rig.load(backend, keys) == [MISSING] * 3
        outcomes = await backend.store([(key, rig.filled(key, 4097)) for key in keys])
        assert rig.codes(outcomes) == [FAILED] * 3
        assert "No such file or directory" in outcomes[0].why
        with pytest.raises(BackendError, match=r"nvme.usage: .*No such file"):
            await backend.usage()
        assert rig.codes(await backend.delete(keys)) == [MISSING] * 3
    async with rig.opened(tmp_path) as backend:
        assert await rig.store(backend, keys) == [OK] * 3


async def test_vanished_file_between_two_runs(tmp_path: Path) -> None:
    """row 21: the index names a segment that is gone at open; ``strict`` says so."""
    keys = [key_of(n) for n in range(4)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys[:2], SIZE)
        await rig.store(backend, keys[2:])
        file = rig.slot_of(backend.root, keys[0]).file
    file.unlink()
    with pytest.raises(ConfigError, match="2 name missing slots"):
        await NvmeBackend(rig.config(tmp_path, recover="strict")).open(rig.namespace())
    async with rig.opened(tmp_path) as backend:
        assert backend.counters()["lost_blocks"] == 2
        assert await rig.load(backend, keys[:2], SIZE) == [MISSING] * 2
        assert await rig.load(backend, keys[2:]) == [OK] * 2


async def test_truncated_file(tmp_path: Path) -> None:
    """rows 13 and 23: the file ends in the middle of a block, while it is open, and before it is opened."""
    keys = [key_of(n) for n in range(6)]
    async with rig.opened(tmp_path, threads=1) as backend:
        await rig.store(backend, keys, SIZE)
        third = rig.slot_of(backend.root, keys[2])
        os.truncate(third.file, third.offset + third.length - 1)
        assert await rig.load(backend, keys, SIZE) == [OK] * 2 + [CORRUPT] * 4
        assert await rig.store(backend, keys, SIZE) == [OK] * 6
        assert await rig.load(backend, keys, SIZE) == [OK] * 6
        file = rig.slot_of(backend.root, keys[0]).file
    os.truncate(file, rig.slot_of(tmp_path / "default", keys[4]).offset + 5000)
    survivors = {
        slot.key for slot in rig.slots_on_disk(tmp_path / "default") if slot.offset + slot.length <= file.stat().st_size
    }
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, keys, SIZE) == [OK if key in survivors else CORRUPT for key in keys]


def flip(slot: Found, at: int) -> None:
    image = bytearray(slot.read())
    image[at] ^= 0x10
    slot.write(bytes(image))
