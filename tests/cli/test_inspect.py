"""``tiering inspect``: it shows what is there, finds what is damaged, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.backends.nvme import rig
from tests.backends.nvme.rig import PAGE, slot_of
from tests.cli.command import Done, nvme, run, write_config
from tiering import KVLayout, TieringOffloadingManager, block_keys

Command = Callable[..., Done]

TOKENS = 4
ONE = KVLayout.uniform(model="Ünïcode/model", revision="r1", dtype="bf16", tokens_per_block=TOKENS, block_bytes=4096)
TWO = KVLayout.uniform(model="other", tokens_per_block=TOKENS, block_bytes=5000)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "c.yaml", nvme(tmp_path / "kv"))


def fill(config: Path, layout: KVLayout, n: int, *, salt: bytes = b"", epoch: str = "0") -> list[bytes]:
    """A chain of ``n`` blocks, stored as an engine stores them."""

    async def store() -> None:
        async with TieringOffloadingManager.from_yaml(config, layout, epoch=epoch) as manager:
            await manager.store(keys, np.full((n, layout.groups[0].block_bytes), 7, np.uint8))
            assert (await manager.flush()).lost == 0

    keys = block_keys(list(range(TOKENS * n)), layout, salt=salt)
    asyncio.run(store())
    return keys


def flip(root: Path, key: bytes, at: int) -> str:
    """Change one bit of the stored block; where it lies, as people are told."""
    slot = slot_of(root, key)
    image = bytearray(slot.read())
    image[at] ^= 1
    slot.write(bytes(image))
    return f"{slot.file.name} slot {slot.offset // slot.length}"


def test_every_namespace_is_shown_with_what_it_holds(tiering: Command, config: Path, tmp_path: Path) -> None:
    """FAULTS row 35: the numbers are those of the blocks that were stored."""
    fill(config, ONE, 5)
    fill(config, ONE, 2, salt=b"tenant")
    fill(config, ONE, 1, epoch="step-2")
    fill(config, TWO, 3)
    done = tiering("inspect", config, "nvme", "--json")
    assert (done.code, done.err) == (0, "")
    result = done.object
    digests = [space.pop("digest") for space in result["namespaces"]]
    assert len({bytes.fromhex(digest) for digest in digests}) == 3
    one = {"model": "Ünïcode/model", "revision": "r1", "dtype": "bf16", "epoch": "0"}
    spaces = [
        (one, 7, 7 * (PAGE + 4096), 2),
        (one | {"epoch": "step-2"}, 1, PAGE + 4096, 1),
        ({"model": "other", "revision": "", "dtype": "uint8", "epoch": "0"}, 3, 3 * (PAGE + 8192), 1),
    ]
    shown = [
        ({name: space["fields"][name] for name in one}, space["blocks"], space["stored_bytes"], space["roots"])
        for space in result["namespaces"]
    ]
    assert shown == spaces
    assert (result["ok"], result["verified"], result["bad_blocks"], result["bad"]) == (True, False, 0, [])
    assert (result["config"], result["tier"], result["type"]) == (str(config), "nvme", "nvme")
    assert (result["blocks"], result["stored_bytes"]) == (11, 8 * 8192 + 3 * 12288)

    text = tiering("inspect", config, "nvme").out
    assert text.splitlines()[0] == "tier nvme: 11 blocks, 100 KiB"
    assert text.splitlines()[-1].split() == [digests[-1][:8], "other", "uint8", "0", "3", "1", "36", "KiB"]


def test_a_damaged_block_is_found_and_named_and_stays(config: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv/default"
    keys = fill(config, ONE, 20)
    fill(config, TWO, 3)
    place = flip(root, keys[4], PAGE + 1000)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    done = run("inspect", config, "nvme", "--verify", "--json", cwd=tmp_path)
    assert (done.code, done.err) == (1, "")
    result = done.object
    assert (result["ok"], result["verified"], result["blocks"], result["bad_blocks"]) == (False, True, 23, 1)
    (bad,) = result["bad"]
    assert (bad["key"], bad["place"]) == (keys[4].hex(), place)
    assert bad["namespace"] == next(s["digest"] for s in result["namespaces"] if s["fields"]["dtype"] == "bf16")
    assert bad["why"].startswith("corrupt: ")
    text = run("inspect", config, "nvme", "--verify", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert text.code == 1
    assert f"  {place}: key {keys[4].hex()}: {bad['why']}\n" in text.out
    assert "verified: 1 of 23 blocks are not whole\n" in text.out
    assert "\\xdcn\\xefcode/model" in text.out
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    # Without --verify nothing is read.
    assert run("inspect", config, "nvme", "--json", cwd=tmp_path).code == 0


def test_all_damaged_blocks_are_counted_and_a_hundred_named(tiering: Command, config: Path, tmp_path: Path) -> None:
    for key in fill(config, ONE, 103):
        flip(tmp_path / "kv/default", key, PAGE)
    result = tiering("inspect", config, "nvme", "--verify", "--json").object
    assert (result["bad_blocks"], len(result["bad"])) == (103, 100)
    assert tiering("inspect", config, "nvme", "--verify").out.endswith("  and 3 more\n")


def test_a_tier_without_blocks(tiering: Command, config: Path, tmp_path: Path) -> None:
    async def open_once() -> None:
        async with rig.opened(tmp_path / "kv"):
            pass

    asyncio.run(open_once())
    done = tiering("inspect", config, "nvme", "--verify", "--json")
    assert (done.code, done.object["blocks"], done.object["namespaces"]) == (0, 0, [])
    assert tiering("inspect", config, "nvme") == Done(0, "tier nvme holds no blocks\n", "")


def test_a_directory_that_is_not_there_is_not_made(tiering: Command, config: Path, tmp_path: Path) -> None:
    done = tiering("inspect", config, "nvme")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {config}: tier 'nvme': path: {tmp_path}/kv: ")
    assert "No such file or directory" in done.err
    assert not (tmp_path / "kv").exists()


def test_a_tier_that_an_engine_has_open_is_refused(config: Path, tmp_path: Path) -> None:
    async def while_open() -> Done:
        async with TieringOffloadingManager.from_yaml(config, ONE):
            return run("inspect", config, "nvme", "--json", cwd=tmp_path)

    done = asyncio.run(while_open())
    assert done.code == 2
    assert f"tier 'nvme': path: {tmp_path}/kv/default is in use by another" in done.object["error"]


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("nvem", 'unknown tier "nvem"; did you mean "nvme"? (known: memory, nvme)'),
        ("memory", "tier 'memory': a tier of type 'memory' keeps nothing that could be looked at from outside"),
        ("primary", 'unknown tier "primary" (known: memory, nvme)'),
    ],
)
def test_a_tier_that_cannot_be_shown_is_explained(tiering: Command, tier: str, message: str, tmp_path: Path) -> None:
    tiers = nvme(tmp_path / "kv"), {"type": "memory", "capacity": "1MiB"}
    config = write_config(tmp_path / "c.yaml", *tiers)
    done = tiering("inspect", config, tier)
    assert done == Done(2, "", f"error: {config}: {message}\n")
