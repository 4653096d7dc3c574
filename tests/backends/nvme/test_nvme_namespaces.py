"""Many models and weight epochs in one directory, under one budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import MISSING, OK, disk_bytes, key_of, stored_bytes
from tiering.api import Namespace
from tiering.types import KVLayout

KEYS = [key_of(n) for n in range(4)]


async def test_stale_weights_miss_and_the_old_ones_are_found_again(tmp_path: Path) -> None:
    """row 16: equal keys under two epochs are two blocks; neither is served for the other, none is dropped."""
    one, two = rig.namespace(epoch="1"), rig.namespace(epoch="2")
    async with rig.opened(tmp_path, one) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 4
    async with rig.opened(tmp_path, two) as backend:
        assert await rig.load(backend, KEYS) == [MISSING] * 4
        assert rig.codes(await backend.contains(KEYS)) == [MISSING] * 4
        assert await rig.store(backend, KEYS[:2], 1_000_000) == [OK] * 2
        assert await rig.load(backend, KEYS[:2], 1_000_000) == [OK] * 2
        assert (await backend.usage()).live_bytes == 4 * stored_bytes(4097) + 2 * stored_bytes(1_000_000)
    async with rig.opened(tmp_path, one) as backend:
        assert await rig.load(backend, KEYS) == [OK] * 4
    async with rig.opened(tmp_path, two) as backend:
        assert await rig.load(backend, KEYS, 1_000_000) == [OK] * 2 + [MISSING] * 2


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "tokens", "size", "ranks", "epoch"])
async def test_namespace_too_narrow(tmp_path: Path, field: str) -> None:
    """row 14: one field differs, equal sizes and keys: a clean miss."""
    fields: dict[str, object] = {
        "model": "m", "revision": "a", "dtype": "fp16", "tokens": 16, "size": 4097, "ranks": 1, "epoch": "0",
    }  # fmt: skip

    def spoken(values: dict[str, object]) -> Namespace:
        layout = KVLayout.uniform(
            model=str(values["model"]), revision=str(values["revision"]), dtype=str(values["dtype"]),
            tokens_per_block=int(str(values["tokens"])), block_bytes=int(str(values["size"])), ranks=int(str(values["ranks"])),
        )  # fmt: skip
        return Namespace.of(layout, epoch=str(values["epoch"]))

    other = fields | {field: fields[field] + 1 if isinstance(fields[field], int) else "other"}  # type: ignore[operator]
    async with rig.opened(tmp_path, spoken(fields)) as backend:
        assert await rig.store(backend, KEYS, 4097) == [OK] * 4
    async with rig.opened(tmp_path, spoken(other)) as backend:
        assert await rig.load(backend, KEYS, int(str(other["size"]))) == [MISSING] * 4
    async with rig.opened(tmp_path, spoken(fields)) as backend:
        assert await rig.load(backend, KEYS, 4097) == [OK] * 4


async def test_foreign_blocks_are_listed_first_oldest_first_and_deleted_by_handle(tmp_path: Path) -> None:
    """Over a restart with a third namespace; the handle is digest, four zero bytes and the key."""
    one, two, three = (rig.namespace(model=name) for name in "abc")
    async with rig.opened(tmp_path, two) as backend:
        await rig.store(backend, KEYS[:2])
        backend.touch([KEYS[0]])
    async with rig.opened(tmp_path, one) as backend:
        await rig.store(backend, KEYS[1:3], 1_000_000)
    async with rig.opened(tmp_path, three) as backend:
        await rig.store(backend, KEYS[3:])
        expected = [
            (two.digest + bytes(4) + KEYS[1], 4097, True), (two.digest + bytes(4) + KEYS[0], 4097, True),
            (one.digest + bytes(4) + KEYS[1], 1_000_000, True), (one.digest + bytes(4) + KEYS[2], 1_000_000, True),
            (KEYS[3], 4097, False),
        ]  # fmt: skip
        listed = await rig.scanned(backend)
        assert [(e.handle, e.stored_bytes, e.foreign) for e in listed] == [
            (handle, stored_bytes(size), foreign) for handle, size, foreign in expected
        ]
        gone = [expected[1][0], expected[2][0]]
        assert rig.codes(await backend.delete(gone)) == [OK] * 2
        assert rig.codes(await backend.delete(gone)) == [MISSING] * 2
        assert rig.codes(await backend.contains(gone)) == [MISSING] * 2
        assert [e.handle for e in await rig.scanned(backend)] == [expected[n][0] for n in (0, 3, 4)]
        # A handle is no key: nothing of another namespace can be read.
        assert await rig.load(backend, [expected[0][0]]) == [MISSING]
    async with rig.opened(tmp_path, two) as backend:
        assert await rig.load(backend, KEYS) == [MISSING, OK, MISSING, MISSING]
    async with rig.opened(tmp_path, one) as backend:
        assert await rig.load(backend, KEYS, 1_000_000) == [MISSING, MISSING, OK, MISSING]
        assert (await backend.usage()).allocated_bytes == disk_bytes(tmp_path / "default")


async def test_more_namespaces_than_the_index_numbers(tmp_path: Path) -> None:
    """The 1,025th with blocks drops the oldest one's; their order of age is kept all along."""
    first = rig.namespace(1, epoch="0")
    async with rig.opened(tmp_path, first, capacity="32MiB") as backend:
        await rig.store(backend, KEYS[:1], 1)
    root = tmp_path / "default"
    journal = root / "journal.1"
    # Blocks of 1,023 more namespaces, by the format's own rules; their slots need not exist for this.
    others = [rig.namespace(1, epoch=str(n)).digest for n in range(1, 1024)]
    with journal.open("ab") as file:
        for number, digest in enumerate(others, 1):
            file.write(rig.record(2, key=digest, namespace=number))
            file.write(rig.record(3, key=KEYS[0], segment=1, slot=number, generation=1 + number, namespace=number))
    async with rig.opened(tmp_path, rig.namespace(1, epoch="new"), capacity="32MiB") as backend:
        listed = await rig.scanned(backend)
        assert [entry.handle[:32] for entry in listed] == others
        await rig.store(backend, KEYS[:1], 1)
        await backend.delete([entry.handle for entry in listed[:3]])
    async with rig.opened(tmp_path, first, capacity="32MiB") as backend:
        assert await rig.load(backend, KEYS[:1], 1) == [MISSING]
        digests = [entry.handle[:32] for entry in await rig.scanned(backend)]
        assert digests == [*others[3:], rig.namespace(1, epoch="new").digest]


async def test_manifest_names_the_namespaces_for_people(tmp_path: Path) -> None:
    """Bounded, whatever the fields hold."""
    for n in range(40):
        async with rig.opened(tmp_path, rig.namespace(model=f"model-{n}-" + "x" * 3000)):
            pass
    text = (tmp_path / "default" / "manifest.json").read_text()
    assert len(text) <= 16384
    names = [fields["model"][:9] for fields in json.loads(text)["namespaces"].values()]
    assert names[-1] == "model-39-"
    assert len(names) > 10
    assert json.loads(text)["slot_bytes"] == [stored_bytes(size) for size in rig.SIZES]
