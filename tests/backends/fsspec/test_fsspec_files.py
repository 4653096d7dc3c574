"""Filesystems that block: a shared directory is whole at any moment, and threads are waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from pathlib import Path

import fsspec
import pytest

from backends.fsspec.backend import FsspecBackend
from tests.backends.fsspec import rig
from tests.backends.fsspec.async_directory import AsyncDirectory
from tests.backends.fsspec.disks import BROKEN, FULL, READ_ONLY, CopiesOnly, Disk
from tests.backends.fsspec.rig import CORRUPT, FAILED, LARGE, MISSING, OK, REFUSED, SMALL, codes, key_of
from tiering.api import BackendError, ClosedError, ConfigError, OutcomeCode

KEYS = [key_of(n) for n in range(40)]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    fsspec.register_implementation(Disk.protocol, Disk, clobber=True)
    return monkeypatch


def files_below(path: Path) -> set[str]:
    return {file.name for file in path.rglob("*") if file.is_file()}


def sizes_below(path: Path) -> set[int]:
    """Of the files that have a block's name and place."""
    return {file.stat().st_size for file in path.glob(f"*/[0-9a-f][0-9a-f]/{'?' * 72}")}


def damage(path: Path, key: bytes) -> None:
    (file,) = path.rglob(key.hex())
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


async def test_blocks_lie_where_the_documentation_says(tmp_path: Path) -> None:
    async with rig.opened(rig.config(f"file://{tmp_path}/a/b")) as backend:
        assert codes(await rig.store(backend, KEYS[:1])) == [OK]
    name = KEYS[0].hex()
    file = tmp_path / "a/b" / rig.namespace().digest.hex() / name[:2] / name
    assert file.read_bytes()[128:] == rig.payload_of(KEYS[0])
    assert files_below(tmp_path) == {name}, "nothing else is left"


async def test_readers_of_the_directory_see_whole_files_only(tmp_path: Path) -> None:
    """Rule 6, from outside: whatever has a block's name has a block's length, at every moment."""
    async with rig.opened(rig.config(f"file://{tmp_path}")) as backend:
        storing = asyncio.create_task(rig.store(backend, KEYS * 4, LARGE))
        seen = 0
        while not storing.done():
            sizes = sizes_below(tmp_path)
            assert sizes <= {LARGE + 128}
            seen += len(sizes)
            await asyncio.sleep(0)
        assert set(codes(await storing)) == {OK}
        assert seen


async def test_old_temporary_files_are_removed_and_young_ones_stay(tmp_path: Path) -> None:
    """row 20: killed writers leave no growth, and live writers of other processes are left alone."""
    given = rig.config(f"file://{tmp_path}")
    async with rig.opened(given):
        pass
    temporary = tmp_path / rig.namespace().digest.hex() / "tmp"
    for name, age_s in (("old", 3700), ("young", 3000)):
        (temporary / name).write_bytes(b"part")
        then = time.time() - age_s
        os.utime(temporary / name, (then, then))
    async with rig.opened(given):
        assert files_below(tmp_path) == {"young"}


async def test_a_directory_that_is_removed_meanwhile_heals(tmp_path: Path) -> None:
    """row 21: everything vanished is a miss, and the next store makes the directories again."""
    async with rig.opened(rig.config(f"file://{tmp_path}/kv")) as backend:
        await rig.store(backend, KEYS[:2])
        subprocess.run(["rm", "-r", str(tmp_path / "kv")], check=True)  # noqa: ASYNC221
        assert codes(await rig.load(backend, KEYS[:2])) == [MISSING] * 2
        assert codes(await backend.contains(KEYS[:2])) == [MISSING] * 2
        assert codes(await rig.store(backend, KEYS[:2])) == [OK] * 2
        assert codes(await rig.load(backend, KEYS[:2])) == [OK] * 2


@pytest.mark.parametrize(
    ("number", "code", "retryable"), [(FULL, REFUSED, False), (BROKEN, FAILED, True), (READ_ONLY, FAILED, False)]
)
async def test_a_disk_that_is_full_or_broken_is_reported_by_block(
    tmp_path: Path, disk: pytest.MonkeyPatch, number: int, code: OutcomeCode, retryable: bool
) -> None:
    """row 18: ENOSPC, EIO and EROFS; nothing is left behind, and it recovers."""
    async with rig.opened(rig.config(f"kvtestdisk://{tmp_path}")) as backend:
        await rig.store(backend, KEYS[:1])
        disk.setattr(Disk, "write_errno", number)
        outcomes = await rig.store(backend, KEYS[:3])
        assert codes(outcomes) == [code] * 3
        assert {outcome.retryable for outcome in outcomes} == {retryable}
        assert os.strerror(number) in outcomes[0].why
        assert codes(await rig.load(backend, KEYS[:2])) == [OK, MISSING]
        disk.setattr(Disk, "write_errno", 0)
        assert codes(await rig.store(backend, KEYS[:3])) == [OK] * 3
        assert files_below(tmp_path) == {key.hex() for key in KEYS[:3]}


async def test_silent_thread_death_is_an_outcome_and_later_calls_go_on(
    tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    """row 34: whatever a filesystem raises in a thread arrives as that block's outcome."""
    async with rig.opened(rig.config(f"kvtestdisk://{tmp_path}")) as backend:
        await rig.store(backend, KEYS[:2])
        disk.setattr(Disk, "read_error", ZeroDivisionError("in a stranger's code"))
        for _ in range(40):
            outcomes = await rig.load(backend, KEYS[:2])
            assert codes(outcomes) == [FAILED] * 2
            assert "ZeroDivisionError: in a stranger's code" in outcomes[0].why
        disk.setattr(Disk, "read_error", None)
        assert codes(await rig.load(backend, KEYS[:2])) == [OK] * 2


@pytest.mark.parametrize(
    ("error", "retryable"), [(ZeroDivisionError("in a stranger's code"), False), (asyncio.CancelledError(), True)]
)
async def test_silent_task_death_is_an_outcome_and_later_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, retryable: bool
) -> None:
    """row 34: also a cancellation that nobody asked for."""
    fsspec.register_implementation(AsyncDirectory.protocol, AsyncDirectory, clobber=True)
    async with rig.opened(rig.config(f"{AsyncDirectory.protocol}:/{tmp_path}/kv")) as backend:
        await rig.store(backend, KEYS[:3])
        with monkeypatch.context() as patch:
            patch.setattr(AsyncDirectory, "read_error", error)
            for keys in (KEYS[:1], KEYS[:3]):
                outcomes = await rig.load(backend, keys)
                assert codes(outcomes) == [FAILED] * len(keys)
                assert {outcome.retryable for outcome in outcomes} == {retryable}
        assert codes(await rig.load(backend, KEYS[:3])) == [OK] * 3


async def test_cancellation_waits_for_the_thread_and_aclose_reports_what_outlasts_it(
    tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    """Rules 7 and 9: a thread in a system call has the caller's buffer until it returns."""
    backend = FsspecBackend(rig.config(f"kvtestdisk://{tmp_path}"))
    await backend.open(rig.namespace())
    await rig.store(backend, KEYS[:1])
    gate = threading.Event()
    disk.setattr(Disk, "gate", gate)
    view = memoryview(bytearray(SMALL))
    call = asyncio.create_task(backend.load([(KEYS[0], view)]))
    await asyncio.to_thread(Disk.waiting.acquire)
    try:
        call.cancel()
        done, _ = await asyncio.wait((call,), timeout=0.05)
        assert not done, "the thread may still write"
        with pytest.raises(BackendError, match="1 calls still run"):
            await backend.aclose(0.05)
        with pytest.raises(ClosedError):
            await backend.contains(KEYS[:1])
    finally:
        gate.set()
    await asyncio.wait((call,))
    assert call.cancelled()
    await backend.aclose(5)


async def test_a_place_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for url, why in ((f"file://{tmp_path}/file/kv", "Not a directory"), ("nosuchthing://x/y", "nosuchthing")):
        backend = FsspecBackend(rig.config(url))
        with pytest.raises(ConfigError, match=why):
            await backend.open(rig.namespace())
        await backend.aclose(5)


async def test_a_filesystem_without_a_rename_is_refused() -> None:
    """Rule 6 cannot hold on it."""
    fsspec.register_implementation(CopiesOnly.protocol, CopiesOnly, clobber=True)
    backend = FsspecBackend(rig.config("kvtestcopies://x/y"))
    with pytest.raises(ConfigError, match="cannot rename"):
        await backend.open(rig.namespace())
    await backend.aclose(5)


async def test_calls_before_open_and_a_second_open_are_named(tmp_path: Path) -> None:
    backend = FsspecBackend(rig.config(f"file://{tmp_path}", name="shared"))
    with pytest.raises(BackendError, match=r"shared\.load: load before open"):
        await backend.load([])
    await backend.open(rig.namespace())
    with pytest.raises(BackendError, match="second time"):
        await backend.open(rig.namespace())
    await backend.aclose(5)
    with pytest.raises(ClosedError):
        await backend.open(rig.namespace())


async def test_a_corrupt_file_is_removed(tmp_path: Path) -> None:
    """row 13"""
    async with rig.opened(rig.config(f"file://{tmp_path}")) as backend:
        await rig.store(backend, KEYS[:2])
        damage(tmp_path, KEYS[0])
        assert codes(await rig.load(backend, KEYS[:2])) == [CORRUPT, OK]
        assert files_below(tmp_path) == {KEYS[1].hex()}
