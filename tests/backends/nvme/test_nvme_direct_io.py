"""Direct I/O, what happens where it is refused, and calls that move less than was asked."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import FAILED, OK, HookedIO, key_of

KEYS = [key_of(n) for n in range(6)]


@pytest.fixture
def no_direct_io(tmp_path: Path) -> Iterator[Path]:
    """A filesystem that has no O_DIRECT, no preallocation and no holes: ramfs."""
    path = tmp_path / "ram"
    path.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


async def test_o_direct_refused_by_the_filesystem(no_direct_io: Path, caplog: pytest.LogCaptureFixture) -> None:
    """row 31: one warning, every block stored, read, deleted and found again; space moves between sizes by whole files."""
    with caplog.at_level(logging.WARNING):
        async with rig.opened(no_direct_io, capacity="8MiB") as backend:
            assert backend.o_direct
            for key in KEYS:
                assert await rig.store(backend, [key], 1_000_000) == [OK]
            assert not backend.o_direct
            assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 6
            assert backend.counters()["buffered_fallbacks"] == 1
            await backend.delete(KEYS)
            small = [key_of(n) for n in range(100, 500)]
            assert await rig.store(backend, small) == [OK] * 400
    assert [record.name for record in caplog.records] == ["backends.nvme.transfer"]
    assert "refuses direct I/O" in caplog.text
    assert "o_direct: false" in caplog.text
    async with rig.opened(no_direct_io, capacity="8MiB", o_direct=False) as backend:
        assert await rig.load(backend, small) == [OK] * 400


@pytest.mark.parametrize("refused", ["open_direct", "write_direct", "read_direct"])
async def test_o_direct_refused_late(tmp_path: Path, refused: str, caplog: pytest.LogCaptureFixture) -> None:
    """row 31: accepted at open and refused at the first write, or at the first read: data stored, one warning."""

    def refuse(op: str, path: Path) -> None:
        if op == refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    async with rig.opened(tmp_path, io=HookedIO(refuse)) as backend:
        assert await rig.store(backend, KEYS, 1_000_000) == [OK] * 6
        assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 6
        assert (backend.o_direct, backend.counters()["buffered_fallbacks"]) == (False, 1)
    assert len(caplog.records) == 1
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 6
        assert backend.o_direct


async def test_o_direct_off_by_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops: set[str] = set()
    async with rig.opened(tmp_path, io=HookedIO(lambda op, path: ops.add(op)), o_direct=False) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 6
        assert await rig.load(backend, KEYS) == [OK] * 6
        assert not backend.o_direct
    assert not [op for op in ops if "direct" in op]
    assert not caplog.records


async def test_o_direct_and_a_misaligned_buffer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """row 31: the caller's mistake is told to the caller, and does not turn direct I/O off for everybody."""
    room = rig.buffer(3 * 4096)
    async with rig.opened(tmp_path) as backend:
        items = [(KEYS[0], rig.filled(KEYS[0], 4097)), (KEYS[1], room[100 : 100 + 8192])]
        outcomes = await backend.store(items)
        assert rig.codes(outcomes) == [OK, FAILED]
        assert "multiple of 4096" in outcomes[1].why
        assert await rig.store(backend, KEYS) == [OK] * 6
        outcomes = await backend.load([(KEYS[0], room[100 : 100 + 8192]), (KEYS[1], rig.buffer(4097))])
        assert rig.codes(outcomes) == [FAILED, OK]
        assert backend.o_direct
        assert await rig.load(backend, KEYS) == [OK] * 6
    assert not caplog.records


class DribblingIO(HookedIO):
    """Every call moves at most ``count_max`` bytes, as the kernel is free to do."""

    def __init__(self, count_max: int) -> None:
        super().__init__()
        self.count_max = count_max

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, self.first(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, self.first(buffers), offset)

    def first(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        left, some = self.count_max, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= some[-1].nbytes
            if not left:
                break
        return some


@pytest.mark.parametrize("count_max", [4096, 20480, 1_003_520])
async def test_short_reads_and_writes_are_continued(tmp_path: Path, count_max: int) -> None:
    """row 13: a short call is no error and no short block."""
    async with rig.opened(tmp_path, io=DribblingIO(count_max)) as backend:
        assert await rig.store(backend, KEYS, 1_000_000) == [OK] * 6
        assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 6
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 6


async def test_short_buffered_calls_of_odd_length(tmp_path: Path) -> None:
    async with rig.opened(tmp_path, io=DribblingIO(5000), o_direct=False) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 6
        assert await rig.load(backend, KEYS) == [OK] * 6


async def test_write_that_makes_no_progress_fails(tmp_path: Path) -> None:
    """row 18: rather than turning for ever."""
    io = DribblingIO(1 << 30)
    async with rig.opened(tmp_path, io=io, o_direct=False) as backend:
        io.count_max = 100
        outcomes = await backend.store([(KEYS[0], rig.filled(KEYS[0], 4097))])
        assert [(one.code, one.retryable) for one in outcomes] == [(FAILED, False)]
        assert "100 of 12288 bytes" in outcomes[0].why
        io.count_max = 1 << 30
        assert await rig.store(backend, KEYS) == [OK] * 6


async def test_sync_batch_syncs_data_before_the_journal(tmp_path: Path) -> None:
    """``sync: batch`` acknowledges only what would survive a power loss; ``none`` syncs nothing on the way."""
    ops: list[tuple[str, str]] = []

    def note(op: str, path: Path) -> None:
        if op in ("write", "write_direct", "sync"):
            ops.append((op.removesuffix("_direct"), path.suffix if path.suffix == ".seg" else "journal"))

    for sync, expected in (
        ("batch", [("write", ".seg"), ("sync", ".seg"), ("write", "journal"), ("sync", "journal")]),
        ("none", [("write", ".seg"), ("write", "journal")]),
    ):
        async with rig.opened(tmp_path, io=HookedIO(after=note), sync=sync, owner=sync) as backend:
            ops.clear()
            assert await rig.store(backend, KEYS[:3]) == [OK] * 3
            assert ops == expected


async def test_sync_that_fails_acknowledges_nothing(tmp_path: Path) -> None:
    """row 18"""
    broken = True

    def fail(op: str, path: Path) -> None:
        if broken and op == "sync" and path.suffix == ".seg":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with rig.opened(tmp_path, io=HookedIO(fail), sync="batch") as backend:
        assert await rig.store(backend, KEYS) == [FAILED] * 6
        assert (await backend.usage()).live_bytes == 0
        broken = False
        assert await rig.store(backend, KEYS) == [OK] * 6
