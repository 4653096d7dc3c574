"""What an operator may write, and what the backend says about what it cannot use."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from backends.nvme.backend import NvmeBackend
from backends.nvme.config import NvmeConfig
from tests.backends.nvme import rig
from tests.backends.nvme.rig import MIB, OK, key_of
from tiering.api import BackendError
from tiering.errors import ConfigError

GOOD = {"type": "nvme", "path": "/mnt/nvme/kv", "capacity": "200GiB"}


def test_defaults_and_units() -> None:
    config = NvmeConfig.model_validate(GOOD)
    assert config.capacity_bytes == 200 << 30
    assert (config.owner, config.sync, config.recover, config.threads, config.o_direct) == (
        "default", "none", "quiet", 4, True,
    )  # fmt: skip
    assert config.path == Path("/mnt/nvme/kv")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("capactiy", "1GiB", "Extra inputs are not permitted"),
        ("capacity", "1000KiB", "at least 1048576"),
        ("capacity", "lots", "capacity"),
        ("owner", "../other", "owner"),
        ("owner", "", "owner"),
        ("owner", ".", "owner"),
        ("sync", "always", "'none' or 'batch'"),
        ("recover", "loud", "'none', 'quiet' or 'strict'"),
        ("threads", 0, "threads"),
        ("threads", 17, "threads"),
    ],
)
def test_configuration_ignored_never(field: str, value: object, words: str) -> None:
    """row 36: an unknown or illegal field is an error that names it."""
    with pytest.raises(ValidationError, match=words):
        NvmeConfig.model_validate(GOOD | {field: value})


@pytest.mark.parametrize("field", ["path", "capacity"])
def test_required_fields(field: str) -> None:
    """row 36"""
    with pytest.raises(ValidationError, match=f"{field}\n  Field required"):
        NvmeConfig.model_validate({name: value for name, value in GOOD.items() if name != field})


async def test_nothing_happens_before_open(tmp_path: Path) -> None:
    backend = NvmeBackend(rig.config(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(BackendError, match="contains before open"):
        await backend.contains([key_of(1)])
    await backend.aclose(1)
    assert not (tmp_path / "new").exists()


async def test_path_that_is_a_file(tmp_path: Path) -> None:
    """row 36"""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"path: {path}: cannot use .*; name a directory"):
            await NvmeBackend(rig.config(path)).open(rig.namespace())


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


async def test_path_on_a_read_only_filesystem(read_only: Path) -> None:
    """row 36"""
    with pytest.raises(ConfigError, match="Read-only file system; name a directory that this user may write to"):
        await NvmeBackend(rig.config(read_only)).open(rig.namespace())


async def test_capacity_without_room_for_one_block(tmp_path: Path) -> None:
    """row 36: found at open, with the numbers that the operator needs."""
    backend = NvmeBackend(rig.config(tmp_path, capacity=2 * MIB))
    with pytest.raises(ConfigError, match=r"nvme.capacity: 2097152 bytes, .*no block of 2101248 bytes; raise"):
        await backend.open(rig.namespace(2 * MIB))
    await backend.aclose(1)


async def test_second_owner_in_this_process(tmp_path: Path) -> None:
    """The message names the directory, and both ways out work."""
    async with rig.opened(tmp_path) as first:
        await rig.store(first, [key_of(1)])
        second = NvmeBackend(rig.config(tmp_path))
        with pytest.raises(ConfigError, match=rf"{tmp_path}/default is in use by another backend.*`owner:`"):
            await second.open(rig.namespace())
        await second.aclose(1)
        async with rig.opened(tmp_path, owner="engine-2") as third:
            assert await rig.load(third, [key_of(1)]) == [rig.MISSING]
            assert await rig.store(third, [key_of(1)]) == [OK]
        assert await rig.load(first, [key_of(1)]) == [OK]
    async with rig.opened(tmp_path) as again:
        assert await rig.load(again, [key_of(1)]) == [OK]


async def test_second_owner_in_another_process(tmp_path: Path) -> None:
    script = f"""
        import asyncio
        from pathlib import Path
        from backends.nvme.backend import NvmeBackend
        from tests.backends.nvme import rig
        from tiering.errors import ConfigError
        async def main():
            try:
                await NvmeBackend(rig.config(Path({str(tmp_path)!r}))).open(rig.namespace())
            except ConfigError as error:
                print(error)
        asyncio.run(main())
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    async with rig.opened(tmp_path):
        child = [sys.executable, "-c", textwrap.dedent(script)]
        out = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=60)  # noqa: ASYNC221
    assert "in use by another backend, of this process or of another one" in out.stdout, out.stderr


async def test_written_by_a_later_version(tmp_path: Path) -> None:
    """It is neither read nor removed; ``recover: none`` is the way out."""
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])
    manifest = tmp_path / "default" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match=r"later version \(format 2, this one reads 1\).*recover: none"):
        await NvmeBackend(rig.config(tmp_path)).open(rig.namespace())
    assert rig.slots_on_disk(tmp_path / "default")
    async with rig.opened(tmp_path, recover="none") as backend:
        assert await rig.scanned(backend) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', "\xff\xfe", '{"format": "x", "namespaces": {}, "slot_bytes": []}']
)
async def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    """row 20: names for people are lost with it, no block is; ``strict`` refuses."""
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])
    manifest = tmp_path / "default" / "manifest.json"
    manifest.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"strict: .*manifest.json"):
        await NvmeBackend(rig.config(tmp_path, recover="strict")).open(rig.namespace())
    async with rig.opened(tmp_path) as backend:
        assert await rig.load(backend, [key_of(1)]) == [OK]
    assert stat.S_ISREG(manifest.stat().st_mode)
    assert '"model": "m"' in manifest.read_text()


async def test_files_that_this_user_may_not_use(tmp_path: Path) -> None:
    """row 36: root may always, so the refusal is injected."""
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])

    def refuse(op: str, path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    backend = NvmeBackend(rig.config(tmp_path), io=rig.HookedIO(refuse))
    with pytest.raises(ConfigError, match=r"path: .*\.seg: Permission denied; give this user the right"):
        await backend.open(rig.namespace())
    await backend.aclose(1)


async def test_failed_open_leaves_nothing_behind(tmp_path: Path) -> None:
    """After each of its system calls failed once, the directory can be opened, and no descriptor leaked."""
    open_files = len(os.listdir("/proc/self/fd"))
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])
    for countdown in range(1, 30):
        left = countdown

        def fail(op: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise OSError(5, "Input/output error", str(path))

        backend = NvmeBackend(rig.config(tmp_path), io=rig.HookedIO(fail))
        try:
            await backend.open(rig.namespace())
        except BackendError as error:
            assert "nvme.open: " in str(error)  # noqa: PT017
            assert "Input/output error" in str(error)  # noqa: PT017
            await backend.aclose(1)
            assert len(os.listdir("/proc/self/fd")) == open_files
        else:
            assert left > 0
            left = 0
            assert await rig.load(backend, [key_of(1)]) == [OK]
            await backend.aclose(1)
            break
    assert countdown > 3
    assert len(os.listdir("/proc/self/fd")) == open_files
