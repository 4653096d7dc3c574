"""Looking at a directory without serving from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.nvme.backend import NvmeBackend
from tests.backends.nvme import rig
from tests.backends.nvme.rig import CORRUPT, OK, key_of, stored_bytes
from tiering.api import ConfigError, InspectedBlock


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
    ninety = slots[keys[90]]
    assert found[90] == InspectedBlock(
        namespace_digest=two.digest,
        namespace_fields=two.fields,
        key=keys[90],
        parent=None,
        stored_bytes=stored_bytes(1_000_000),
        place=f"{ninety.file.name} slot {ninety.offset // ninety.length}",
        outcome=found[90].outcome,
    )
    assert found[91].parent == keys[90]
    ninety.file.unlink()
    found = await inspected(NvmeBackend(rig.config(tmp_path)), verify=True)
    assert len(found) == 90  # the index drops what names no file
    unread = await inspected(NvmeBackend(rig.config(tmp_path)), verify=False)
    assert [(block.key, block.outcome) for block in unread] == [(key, None) for key in keys[:90]]


async def test_inspect_of_a_directory_in_use(tmp_path: Path) -> None:
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])
        for other in (NvmeBackend(rig.config(tmp_path)), backend):
            with pytest.raises(ConfigError, match="in use"):
                await inspected(other, verify=False)
        assert await rig.load(backend, [key_of(1)]) == [OK]


async def test_inspect_then_open(tmp_path: Path) -> None:
    """An inspection that is left early gives the directory back."""
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(n) for n in range(100)])
    backend = NvmeBackend(rig.config(tmp_path))
    inspection = backend.inspect(verify=True)
    assert len(await anext(inspection)) == 64
    await inspection.aclose()
    await backend.open(rig.namespace())
    assert await rig.load(backend, [key_of(99)]) == [OK]
    await backend.aclose(10)


async def test_inspect_of_a_damaged_index(tmp_path: Path) -> None:
    async with rig.opened(tmp_path) as backend:
        await rig.store(backend, [key_of(1)])
    (tmp_path / "default" / "journal.1").unlink()
    assert [block.key for block in await inspected(NvmeBackend(rig.config(tmp_path)), verify=True)] == [key_of(1)]
    with pytest.raises(ConfigError, match="recover: strict"):
        await inspected(NvmeBackend(rig.config(tmp_path, recover="strict")), verify=True)


async def test_inspect_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await inspected(NvmeBackend(rig.config(tmp_path / "absent")), verify=True)
    assert not (tmp_path / "absent").exists()
    async with rig.opened(tmp_path):
        pass
    assert await inspected(NvmeBackend(rig.config(tmp_path)), verify=True) == []
