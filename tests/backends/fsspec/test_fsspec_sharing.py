"""Many processes, one tier: what one stores the other finds, with no coordination but the keys."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.fsspec import rig
from tests.backends.fsspec.rig import MISSING, OK, codes
from tests.backends.fsspec.sharing_child import BLOCKS, WRITERS, keys_of, layout
from tests.servers.seaweed import SeaweedServer
from tiering.types import Group, KVLayout, Namespace

ROUNDS = 3


@pytest.fixture(params=["s3", "file"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "file":
        return {"type": "fsspec", "url": f"file://{tmp_path}/kv"}
    server: SeaweedServer = request.getfixturevalue("s3")
    return {
        "type": "fsspec",
        "url": f"s3://{rig.BUCKET}/{rig.prefix_of(tmp_path)}",
        "storage_options": server.storage_options(),
    }


async def child(root: Path, medium: dict[str, Any], rounds: int, seed: int) -> dict[str, int]:
    """What became of the blocks that a process with a hash seed of its own stored."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.backends.fsspec.sharing_child",
        json.dumps(medium),
        str(rounds),
        cwd=root,
        env=os.environ | {"PYTHONHASHSEED": str(seed)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    seen: dict[str, int] = json.loads(out)
    return seen


async def test_keys_differ_between_processes_never_and_concurrent_writers_of_one_key_agree(
    root: Path, medium: dict[str, Any]
) -> None:
    """rows 15 and 22: two processes with eight writers each store the same blocks while this one reads; then all hit."""
    writers = [asyncio.create_task(child(root, medium, ROUNDS, seed)) for seed in (1, 2)]
    given = layout()
    async with rig.opened(rig.config(**_here(medium)), Namespace.of(given, epoch="0")) as backend:
        while not all(writer.done() for writer in writers):
            assert set(codes(await rig.load(backend, keys_of(given)))) <= {OK, MISSING}
        for writer in writers:
            assert await writer == {"ok": ROUNDS * WRITERS * BLOCKS}
        assert codes(await backend.contains(keys_of(given))) == [OK] * BLOCKS
        assert codes(await rig.load(backend, keys_of(given))) == [OK] * BLOCKS


async def test_namespace_too_narrow_each_field_alone_is_a_clean_miss(medium: dict[str, Any]) -> None:
    """rows 14 and 16: another model, revision, dtype, rank count, layout or epoch never sees the blocks of this one."""
    given = layout()
    keys = keys_of(given)
    async with rig.opened(rig.config(**_here(medium)), Namespace.of(given, epoch="0")) as backend:
        assert codes(await rig.store(backend, keys)) == [OK] * BLOCKS
    others = [
        Namespace.of(layout(**change), epoch="0")
        for change in (
            {"model": "other"},
            {"revision": "2"},
            {"dtype": "float16"},
            {"ranks": 2},
            {"tokens_per_block": 8},
        )
    ]
    window = KVLayout([Group("sliding_window(16)", 16, rig.SMALL)], model="shared")
    for other in (*others, Namespace.of(window, epoch="0"), Namespace.of(given, epoch="1")):
        async with rig.opened(rig.config(**_here(medium)), other) as backend:
            # The very same keys: what keeps the blocks apart is the namespace alone.
            assert codes(await backend.contains(keys)) == [MISSING] * BLOCKS
            assert codes(await rig.load(backend, keys)) == [MISSING] * BLOCKS
    async with rig.opened(rig.config(**_here(medium)), Namespace.of(given, epoch="0")) as backend:
        assert codes(await rig.load(backend, keys)) == [OK] * BLOCKS


def _here(medium: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in medium.items() if name != "type"}
