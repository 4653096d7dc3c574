"""Looking at a directory without serving from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.nvme.backend import NvmeBackend
from backends.nvme.inspect import InspectedBlock
from tests.backends.nvme import rig
from tests.backends.nvme.rig import CORRUPT, MISSING, OK, key_of, stored_bytes
from tiering.errors import ConfigError


async def inspected(backend: NvmeBackend, *, verify: bool) -> list[InspectedBlock]:
    return [block async for part in backend.inspect(verify=verify) for block in part]


async def test_inspect_verifies_every_namespace_and_changes_nothing(tmp_path: Path) -> None:
    one, two = rig.namespace(epoch="1"), rig.namespace(epoch="2")
    keys = [key_of(n) for n in range(100)]
    root = tmp_path / "default"
    async with rig.opened(tmp_path, one) as backend:
        await rig.store(backend, keys[:90])
    async with rig.opened(tmp_path, two) as backend:
        backend.link({keys[91]: keys[90]})
        await rig.store(backend, keys[90:93], 1_000_000)
    places = {keys[3]: 70, keys[91]: 4096 + 77, keys[92]: 140}
    slots = {key: rig.slot_of(root, key) for key in (*places, keys[90])}
    for key, at in places.items():
        image = bytearray(slots[key].read())
        image[at] ^= 1
        slots[key].write(bytes(image))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = await inspected(NvmeBackend(rig.config(tmp_path)), verify=True)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert [block.key for block in found] == keys[:93]
    assert [block.namespace_digest for block in found] == [one.digest] * 90 + [two.digest] * 3
    bad = {block.key for block in found if block.outcome is not None and block.outcome.code is CORRUPT}
    assert bad == set(places)
    assert all(block.outcome and block.outcome.ok for block in found if block.key not in bad)
    ninety = found[90]
    assert ninety == InspectedBlock(
        two.digest + bytes(4) + keys[90], two.digest, keys[90], None, slots[keys[90]].file.name,
        slots[keys[90]].offset // slots[keys[90]].length, stored_bytes(1_000_000), slots[keys[90]].generation, ninety.outcome,
    )  # fmt: skip
    assert found[91].parent == keys[90]


async def test_inspect_of_an_open_backend(tmp_path: Path) -> None:
    keys = [key_of(n) for n in range(70)]
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, keys)
        found = await inspected(backend, verify=True)
        assert [(block.handle, block.key) for block in found] == [(key, key) for key in keys]
        assert all(block.outcome and block.outcome.ok for block in found)
        assert all(block.outcome is None for block in await inspected(backend, verify=False))
        rig.slot_of(backend.root, keys[0]).file.unlink()
        assert {block.outcome.code for block in await inspected(backend, verify=True) if block.outcome} == {MISSING}
        with pytest.raises(ConfigError, match="in use"):
            await inspected(NvmeBackend(rig.config(tmp_path)), verify=False)
    async with rig.opened(tmp_path) as backend:
        assert await rig.store(backend, keys) == [OK] * 70


async def test_inspect_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await inspected(NvmeBackend(rig.config(tmp_path / "absent")), verify=True)
    assert not (tmp_path / "absent").exists()
    async with rig.opened(tmp_path):
        pass
    assert await inspected(NvmeBackend(rig.config(tmp_path)), verify=True) == []
