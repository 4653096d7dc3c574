"""A disk that is full, over quota or failing: told per block, nothing leaks, and it works again when it can."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import rig
from tests.backends.nvme.rig import FAILED, MIB, OK, disk_bytes, key_of, stored_bytes
from tiering.api import BackendError
from tiering.errors import ConfigError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


async def test_enospc_is_reported_per_block_and_passes(small_disk: Path) -> None:
    """row 18: others fill the disk; what was stored stays, and stores work again as soon as there is room."""
    filler = small_disk / "filler"
    keys = [key_of(n) for n in range(16)]
    async with rig.opened(small_disk, capacity="64MiB") as backend:
        assert await rig.store(backend, keys[:3], MIB) == [OK] * 3
        fill(filler)
        outcomes = await backend.store([(key, rig.filled(key, MIB)) for key in keys[3:]])
        failed = [outcome for outcome in outcomes if not outcome.ok]
        assert failed
        for outcome in failed:
            assert outcome.code is FAILED
            assert outcome.retryable
            assert "No space left" in outcome.why
        stored = [*keys[:3], *(key for key, outcome in zip(keys[3:], outcomes, strict=True) if outcome.ok)]
        assert await rig.load(backend, stored, MIB) == [OK] * len(stored)
        assert (await backend.usage()).live_bytes == len(stored) * stored_bytes(MIB)
        filler.unlink()
        rest = [key for key in keys[:7] if key not in stored]
        assert await rig.store(backend, rest, MIB) == [OK] * len(rest)
        usage = await backend.usage()
        assert usage.allocated_bytes == disk_bytes(small_disk / "default")
        stored += rest
    async with rig.opened(small_disk, capacity="64MiB") as backend:
        assert await rig.load(backend, stored, MIB) == [OK] * len(stored)


async def test_full_disk_still_deletes_and_moves_space_between_sizes(small_disk: Path) -> None:
    """row 18: no byte is free for others' sake; a delete is logged, and its space serves blocks of another size."""
    keys = [key_of(n) for n in range(8)]
    async with rig.opened(small_disk, capacity="64MiB") as backend:
        stored = [key for key in keys if await rig.store(backend, [key], MIB) == [OK]]
        fill(small_disk / "filler")
        assert rig.codes(await backend.delete(stored[:2])) == [OK, OK]
        small = [key_of(n) for n in range(100, 120)]
        assert await rig.store(backend, small) == [OK] * 20
    async with rig.opened(small_disk, capacity="64MiB") as backend:
        assert await rig.load(backend, small) == [OK] * 20
        assert await rig.load(backend, stored, MIB) == [rig.MISSING] * 2 + [OK] * (len(stored) - 2)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)


def write_for_ever(file: FileIO) -> None:
    while True:
        file.write(bytes(4096))


@pytest.mark.parametrize(
    ("code", "retryable"), [(errno.EIO, False), (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EMFILE, True)]
)
async def test_a_failing_write_costs_its_block_alone(tmp_path: Path, code: int, retryable: bool) -> None:
    """row 18: in the middle of a run of neighbours; the slot is not lost, the next try succeeds."""
    fail_at = {2, 5}  # the run of eight, then the fourth of the eight single writes
    writes = 0

    def before(op: str, path: Path) -> None:
        nonlocal writes
        if path.suffix == ".seg" and op == "write_direct":
            writes += 1
            if writes in fail_at:
                raise OSError(code, os.strerror(code))

    keys = [key_of(n) for n in range(9)]
    async with rig.opened(tmp_path, io=rig.HookedIO(before=before), threads=1) as backend:
        assert await rig.store(backend, keys[8:]) == [OK]
        outcomes = await backend.store([(key, rig.filled(key, 4097)) for key in keys[:8]])
        bad = [outcome for outcome in outcomes if not outcome.ok]
        assert [(outcome.code, outcome.retryable) for outcome in bad] == [(FAILED, retryable)]
        assert os.strerror(code) in bad[0].why
        before_usage = await backend.usage()
        assert before_usage.live_bytes == 8 * stored_bytes(4097)
        assert await rig.store(backend, keys) == [OK] * 9
        assert await rig.load(backend, keys) == [OK] * 9
        # The failed block's slot was used again.
        assert (await backend.usage()).allocated_bytes == before_usage.allocated_bytes


async def test_a_failing_read_costs_its_block_alone(tmp_path: Path) -> None:
    """rows 18 and 23: EIO is FAILED, not a miss, and the block is tried again when asked for again."""
    broken = {0, 3}
    reads = 0

    def before(op: str, path: Path) -> None:
        nonlocal reads
        if op == "read_direct":
            if reads in broken:
                reads += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            reads += 1

    keys = [key_of(n) for n in range(6)]
    async with rig.opened(tmp_path, io=rig.HookedIO(before=before), threads=1) as backend:
        await rig.store(backend, keys)
        assert await rig.load(backend, keys) == [OK, OK, FAILED, OK, OK, OK]
        assert await rig.load(backend, keys) == [OK] * 6


async def test_journal_that_cannot_be_written_loses_no_slot(tmp_path: Path) -> None:
    """row 18: a store or delete that cannot be logged is not acknowledged; afterwards everything works and is found."""
    broken = False

    def before(op: str, path: Path) -> None:
        if broken and path.name.startswith(("journal", "index")) and op in ("write", "allocate"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    keys = [key_of(n) for n in range(8)]
    async with rig.opened(tmp_path, io=rig.HookedIO(before=before), capacity=2 * MIB) as backend:
        assert await rig.store(backend, keys[:4]) == [OK] * 4
        broken = True
        assert await rig.store(backend, keys[4:]) == [FAILED] * 4
        assert rig.codes(await backend.delete(keys[:2])) == [FAILED] * 2
        assert await rig.load(backend, keys) == [rig.MISSING, rig.MISSING, OK, OK] + [rig.MISSING] * 4
        broken = False
        assert rig.codes(await backend.delete(keys[:2])) == [rig.MISSING] * 2
        fits = (2 * MIB - backend.capabilities.overhead_bytes) // stored_bytes(4097)
        more = [key_of(n) for n in range(100, 100 + fits - 2)]
        assert await rig.store(backend, more) == [OK] * len(more)
    async with rig.opened(tmp_path, capacity=2 * MIB) as backend:
        assert {entry.handle for entry in await rig.scanned(backend)} == {*keys[2:4], *more}
        assert await rig.load(backend, more) == [OK] * len(more)


async def test_compaction_that_fails_is_tried_again(tmp_path: Path) -> None:
    """row 18: while snapshots cannot be written the journal serves; no file is left over, and later all is compacted."""
    broken = True

    def before(op: str, path: Path) -> None:
        if broken and op == "replace":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    root = tmp_path / "default"
    keys = [key_of(n) for n in range(40)]
    refused = 0
    async with rig.opened(tmp_path, io=rig.HookedIO(before=before), capacity=2 * MIB) as backend:
        for _ in range(40):
            refused += (await rig.store(backend, keys)).count(FAILED)
            await backend.delete(keys)
            assert disk_bytes(root) <= 2 * MIB
        assert backend.counters()["compactions"] == 0
        assert backend.counters()["failed_compactions"] > 0
        assert not list(root.glob("*.tmp"))
        assert len(list(root.glob("journal.*"))) <= 2
        broken = False
        for _ in range(20):
            await rig.store(backend, keys)
            await backend.delete(keys[:20])
        assert await rig.store(backend, keys) == [OK] * 40
        assert backend.counters()["compactions"] > 0
    assert refused  # both journals were full
    async with rig.opened(tmp_path, capacity=2 * MIB) as backend:
        assert await rig.load(backend, keys) == [OK] * 40


def test_file_size_limit_of_the_process(tmp_path: Path) -> None:
    """row 18: EFBIG from a real limit. Run in a child, since the limit stays with a process."""
    script = f"""
        import asyncio, resource
        from pathlib import Path
        from tests.backends.nvme import rig
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        async def main():
            async with rig.opened(Path({str(tmp_path)!r}), capacity="64MiB") as backend:
                outcomes = await backend.store([(rig.key_of(1), rig.filled(rig.key_of(1), rig.MIB))])
                print(outcomes[0].code.name, outcomes[0].retryable, outcomes[0].why)
                print((await backend.usage()).live_bytes)
        asyncio.run(main())
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = [sys.executable, "-c", textwrap.dedent(script)]
    out = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    first, live = out.stdout.splitlines()
    assert first.startswith("FAILED False File too large")
    assert live == "0"


async def test_hung_device_keeps_the_directory_until_it_answers(tmp_path: Path) -> None:
    """Rule 9: past the deadline ``aclose`` says so and releases nothing; a later one completes."""
    gate = rig.Gate("write_direct", ".seg")
    backend = NvmeBackend(rig.config(tmp_path), io=rig.HookedIO(before=gate))
    await backend.open(rig.namespace())
    gate.close()
    storing = asyncio.create_task(rig.store(backend, [key_of(1)]))
    await gate.reached()
    with pytest.raises(BackendError, match="outlast the deadline"):
        await backend.aclose(0.01)
    with pytest.raises(ConfigError, match="in use by another backend"):
        await NvmeBackend(rig.config(tmp_path)).open(rig.namespace())
    gate.open()
    assert await storing == [OK]
    await backend.aclose(10)
    async with rig.opened(tmp_path) as again:
        assert await rig.load(again, [key_of(1)]) == [OK]
