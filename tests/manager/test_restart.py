"""A manager over a real NVMe directory, closed and opened again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.manager.world import BLOCK_BYTES, LAYOUT, TOKENS, blank, config, eventually, is_blank, keys_of, rows
from tiering import ConfigError, Group, KVLayout, TieringConfig, TieringOffloadingManager, block_keys

CAPACITY_BYTES = 8 << 20


def _config(path: Path, slots: int = 8, capacity: int = CAPACITY_BYTES, **options: Any) -> TieringConfig:
    return config(slots, {"type": "nvme", "path": str(path), "capacity": capacity, **options})


async def _fill(path: Path, keys: list[bytes], layout: KVLayout = LAYOUT, **options: Any) -> None:
    async with TieringOffloadingManager(_config(path), layout, **options) as manager:
        report = await manager.store(keys, rows(keys, layout.groups[0].block_bytes))
        assert report.refused == 0
        assert (await manager.flush()).lost == 0


def _allocated(path: Path) -> int:
    """What the owner's directory occupies, by the file system's own word. Files may vanish while we look."""
    total = 0
    owner = path / "default"
    for entry in [owner, *owner.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            total += entry.lstat().st_blocks * 512
    return total


async def test_lost_on_restart_found_again_with_one_read_a_block(tmp_path: Path) -> None:
    """rows 1, 19: after a restart a chain of four times the slots loads its head: n = slots, n reads, right bytes."""
    slots = 8
    keys = keys_of(4 * slots)
    await _fill(tmp_path, keys)
    async with TieringOffloadingManager(_config(tmp_path, slots), LAYOUT) as manager:
        match = await manager.match(keys)
        assert (match.blocks, match.loadable_blocks, match.by_tier) == (4 * slots, slots, {"nvme": 4 * slots})
        out = blank(4 * slots)
        assert await manager.load(keys, out) == slots
        assert np.array_equal(out[:slots], rows(keys[:slots]))
        assert is_blank(out[slots:])
        assert manager.stats()["tiers"]["nvme"]["io"]["submitted_blocks"]["load"] == slots
        assert manager.stats()["tiers"]["nvme"]["used_bytes"] == 4 * slots * (BLOCK_BYTES + 4096)


def test_lost_on_restart_in_another_process(tmp_path: Path) -> None:
    """rows 15, 19: another process with another hash seed makes the same keys and finds the blocks."""
    asyncio.run(_fill(tmp_path, keys_of(4)))
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.manager.test_restart import found_in; print(asyncio.run(found_in(Path(sys.argv[1]))))"
    )
    environment = {"PYTHONHASHSEED": "4711", "PATH": "/usr/bin:/bin"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "4"


async def found_in(path: Path) -> int:
    """How many of four blocks a manager over ``path`` loads rightly. For a process of its own."""
    keys = keys_of(4)
    async with TieringOffloadingManager(_config(path), LAYOUT) as manager:
        out = blank(4)
        n = await manager.load(keys, out)
        return n if np.array_equal(out[:n], rows(keys[:n])) else -1


VARIANTS = {
    "model": KVLayout.uniform(model="other", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES),
    "revision": KVLayout.uniform(model="test", revision="r2", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES),
    "dtype": KVLayout.uniform(model="test", dtype="float8", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES),
    "ranks": KVLayout.uniform(model="test", ranks=2, tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES),
    "tokens": KVLayout.uniform(model="test", tokens_per_block=TOKENS * 2, block_bytes=BLOCK_BYTES),
    "kind": KVLayout([Group("recurrent", TOKENS, BLOCK_BYTES)], model="test"),
    "bytes": KVLayout.uniform(model="test", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES - 1),
}


@pytest.mark.parametrize("field", VARIANTS)
async def test_namespace_too_narrow_one_field_changed_is_a_clean_miss(tmp_path: Path, field: str) -> None:
    """row 14: with any one field of the layout changed, even the very same keys miss; changed back, they hit."""
    keys = keys_of(4)
    await _fill(tmp_path, keys)
    layout = VARIANTS[field]
    async with TieringOffloadingManager(_config(tmp_path), layout) as manager:
        assert (await manager.match(keys)).blocks == 0
        out = blank(4, layout.groups[0].block_bytes)
        assert await manager.load(keys, out) == 0
        assert is_blank(out)
    assert await found_in(tmp_path) == 4


async def test_namespace_salt_and_lora_are_part_of_the_key(tmp_path: Path) -> None:
    """row 14: the same tokens under another salt or adapter miss."""
    tokens = list(range(4 * TOKENS))
    plain = block_keys(tokens, LAYOUT)
    await _fill(tmp_path, plain)
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT) as manager:
        for other in (block_keys(tokens, LAYOUT, salt=b"t"), block_keys(tokens, LAYOUT, lora=b"t")):
            assert (await manager.match(other)).blocks == 0
        assert (await manager.match(plain)).blocks == 4


async def test_stale_weights_epoch_survives_neither_change_nor_restart(tmp_path: Path) -> None:
    """row 16: a new epoch misses, in the same process and in the next; the old epoch, opened again, hits."""
    keys = keys_of(4)
    await _fill(tmp_path, keys, epoch="weights-1")
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT, epoch="weights-1") as manager:
        assert (await manager.match(keys)).blocks == 4
        await manager.reset("weights-2")
        assert (await manager.match(keys)).blocks == 0
        await manager.store(keys, rows(keys))
        await manager.flush()
        await manager.reset("weights-1")
        out = blank(4)
        assert await manager.load(keys, out) == 4
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT, epoch="weights-3") as manager:
        assert (await manager.match(keys)).blocks == 0
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT, epoch="weights-2") as manager:
        assert (await manager.match(keys)).blocks == 4


async def test_wrong_bytes_served_never_whatever_happened_to_the_files(tmp_path: Path) -> None:
    """row 13: a flipped byte in each segment costs the blocks that it hit, and nothing else; they are counted and deleted."""
    keys = keys_of(8)
    await _fill(tmp_path, keys)
    (segment,) = (tmp_path / "default").rglob("*.seg")
    damaged = bytearray(segment.read_bytes())
    slot = BLOCK_BYTES + 4096
    damaged[3 * slot + 4096 + 100] ^= 1
    segment.write_bytes(damaged)
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT) as manager:
        out = blank(8)
        n = await manager.load(keys, out)
        assert n < 8
        assert np.array_equal(out[:n], rows(keys[:n]))
        assert is_blank(out[n:])
        assert manager.stats()["corrupt_blocks"] == 1
        await manager.store(keys, rows(keys))
        assert await manager.load(keys, out) == 8
        assert np.array_equal(out, rows(keys))


async def test_vanished_file_is_a_miss(tmp_path: Path) -> None:
    """row 21: the segment files are gone under an open manager: a miss, no error, and blocks can be stored again."""
    keys = keys_of(4)
    await _fill(tmp_path, keys)
    async with TieringOffloadingManager(_config(tmp_path), LAYOUT) as manager:
        for segment in (tmp_path / "default").rglob("*.seg"):
            segment.unlink()
        out = blank(4)
        n = await manager.load(keys, out)
        assert np.array_equal(out[:n], rows(keys[:n]))
        await manager.store(keys, rows(keys))
        assert await manager.load(keys, out) == 4
        assert np.array_equal(out, rows(keys))


async def test_disk_fills_up_never_past_the_capacity_also_when_it_is_lowered(tmp_path: Path) -> None:
    """row 17: at every sample the directory occupies no more than the capacity: full, restarted, lowered."""
    high, low = 4 << 20, 2 << 20
    for capacity in (high, high, low):
        async with TieringOffloadingManager(_config(tmp_path, 16, capacity), LAYOUT) as manager:
            assert _allocated(tmp_path) <= capacity
            for number in range(60):
                keys = keys_of(12, salt=f"{capacity}/{number}".encode())
                await manager.store(keys, rows(keys))
                assert _allocated(tmp_path) <= capacity
            await manager.flush()

            async def told_is_true() -> bool:
                """Upkeep may allocate between the two looks, so the first equal pair counts."""
                usage = (await manager.usage())["nvme"]
                assert usage is not None
                assert manager.stats()["tiers"]["nvme"]["used_bytes"] == usage.live_bytes
                return usage.allocated_bytes == _allocated(tmp_path)

            await eventually(told_is_true)
            assert _allocated(tmp_path) <= capacity
            assert manager.stats()["tier_evicted_blocks"] > 0


async def test_prefix_evicted_head_first_what_remains_on_disk_is_a_head(tmp_path: Path) -> None:
    """row 28: when chains overflow the disk tier, what it keeps of each is found: its head."""
    capacity = 2 << 20
    chains = [keys_of(40, salt=bytes([i])) for i in range(12)]
    async with TieringOffloadingManager(_config(tmp_path, 16, capacity), LAYOUT) as manager:
        for chain in chains:
            await manager.store(chain, rows(chain))
        await manager.flush()
        found = [(await manager.match(chain)).blocks for chain in chains]
        held = manager.stats()["tiers"]["nvme"]["used_bytes"] // (BLOCK_BYTES + 4096)
    async with TieringOffloadingManager(_config(tmp_path, 16, capacity), LAYOUT) as manager:
        on_disk = [(await manager.match(chain)).blocks for chain in chains]
    assert sum(on_disk) == held
    assert all(now <= before for now, before in zip(on_disk, found, strict=True))


async def test_the_same_owner_twice_is_refused_and_another_owner_is_not(tmp_path: Path) -> None:
    keys = keys_of(2)
    async with TieringOffloadingManager(_config(tmp_path, owner="rank-0"), LAYOUT) as first:
        await first.store(keys, rows(keys))
        with pytest.raises(ConfigError, match="owner"):
            await TieringOffloadingManager(_config(tmp_path, owner="rank-0"), LAYOUT).open()
        async with TieringOffloadingManager(_config(tmp_path, owner="rank-1"), LAYOUT) as second:
            await second.store(keys, rows(keys))
        assert (await first.match(keys)).blocks == 2
