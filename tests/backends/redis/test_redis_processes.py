"""Several processes on one server, with nothing between them but the keys."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from pathlib import Path

import xxhash

from tests.backends.redis import child, rig
from tests.backends.redis.rig import CORRUPT, MISSING, OK, name_of, payload_of
from tests.servers import valkey as servers
from tiering.types import Namespace

WRITERS = 4


def sealed(spoken: Namespace, key: bytes, payload: bytes) -> bytes:
    """A block as the format's description has it: header and payload."""
    body = struct.pack(
        "<8sIIQQ32s36s20x", b"KVTBLOCK", 1, len(key), len(payload), xxhash.xxh3_64_intdigest(payload),
        spoken.digest, key,
    )  # fmt: skip
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + payload


def start(root: Path, url: str, prefix: str, hash_seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.backends.redis.child", url, prefix, str(WRITERS)]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip


async def test_keys_differ_between_processes_never_and_concurrent_writers_of_one_key_agree(
    root: Path, server: servers.Valkey, tmp_path: Path
) -> None:
    """rows 15 and 22: two processes with different hash seeds, eight writers of the same blocks at a time, and a
    reader beside them: every store is OK, no load is wrong, and what is on the server is what the format says."""
    prefix = rig.prefix_of(tmp_path)
    children = [start(root, server.url, prefix, seed) for seed in (1, 2)]
    try:
        async with rig.opened(server, child.SPOKEN, prefix=prefix) as backend:
            for process in children:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
            for process in children:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            ends = [asyncio.create_task(asyncio.to_thread(process.communicate)) for process in children]
            seen = set()
            while not all(end.done() for end in ends):
                seen |= set(await rig.load(backend, child.block_names(), child.BLOCK_BYTES))
            words = [(await end)[0].split() for end in ends]
            assert [said[1:] for said in words] == [["OK"], ["OK"]]
            assert words[0][0] != words[1][0], "the hash seeds make no difference"
            assert seen <= {OK, MISSING}
            assert await rig.load(backend, child.block_names(), child.BLOCK_BYTES) == [OK] * child.BLOCKS
    finally:
        for process in children:
            process.kill()
            process.wait()
    with server.client() as client:
        for key in child.block_names():
            image = client.get(name_of(prefix, child.SPOKEN, key))
            assert image == sealed(child.SPOKEN, key, payload_of(key, child.BLOCK_BYTES))


async def test_namespace_too_narrow_never(server: servers.Valkey, tmp_path: Path) -> None:
    """rows 13, 14 and 16: another namespace's whole block, under our key's very name, is CORRUPT and removed."""
    prefix, ours, theirs = rig.prefix_of(tmp_path), rig.namespace(), rig.namespace(epoch="weights-2")
    key = rig.key_of(1)
    payload = payload_of(key, 4097)
    async with rig.opened(server, ours, prefix=prefix) as backend:
        for spoken, written_key, expected in ((ours, key, OK), (theirs, key, CORRUPT), (ours, b"other", CORRUPT)):
            server("SET", name_of(prefix, ours, key), sealed(spoken, written_key, payload))
            assert await rig.load(backend, [key]) == [expected]
            assert server("EXISTS", name_of(prefix, ours, key)) == (expected is OK)
