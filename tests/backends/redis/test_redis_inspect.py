"""Looking at servers without serving from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tests.backends.redis.rig import CORRUPT, HEADER_BYTES, key_of, name_of
from tests.servers import valkey as servers
from tiering.api import BackendError, InspectedBlock


async def inspected(url: str, *, verify: bool, **fields: object) -> list[InspectedBlock]:
    backend = RedisBackend(rig.config(url, **fields))
    return [block async for part in backend.inspect(verify=verify) for block in part]


@pytest.mark.parametrize("mode", ["standalone", "cluster"])
async def test_inspect_verifies_every_namespace_and_changes_nothing(
    server: servers.Valkey, cluster: list[servers.Valkey], tmp_path: Path, mode: str
) -> None:
    members = cluster if mode == "cluster" else [server]
    prefix = rig.prefix_of(tmp_path)
    one, two = rig.namespace(epoch="1"), rig.namespace(epoch="2")
    keys = [key_of(n) for n in range(700)]
    for spoken, part, size in ((one, keys[:600], 4097), (two, keys[600:], 4097), (two, [b"\r\n*"], 1 << 20)):
        async with rig.opened(members[0], spoken, prefix=prefix, mode=mode) as backend:
            await rig.store(backend, part, size)
    sizes = {(one.digest, key): 4097 for key in keys[:600]} | {(two.digest, key): 4097 for key in keys[600:]}
    sizes[two.digest, b"\r\n*"] = 1 << 20
    damaged = [(one, keys[3]), (two, keys[650])]
    for spoken, key in damaged:
        name = name_of(prefix, spoken, key)
        member = _owner(cluster, name) if mode == "cluster" else server
        member("SETRANGE", name, 2000, b"damage")
    if mode == "standalone":
        server("SET", f"{prefix}:no-digest:key", "x")
        server("SET", f"{prefix}:{one.digest.hex()}", "x")
    found = await inspected(members[0].url, verify=True, prefix=prefix, mode=mode)
    assert {(b.namespace_digest, b.key): b.stored_bytes - HEADER_BYTES for b in found} == sizes
    assert len(found) == len(sizes)
    bad = {(b.namespace_digest, b.key) for b in found if b.outcome is not None and b.outcome.code is CORRUPT}
    assert bad == {(spoken.digest, key) for spoken, key in damaged}
    assert all(b.outcome and b.outcome.ok for b in found if (b.namespace_digest, b.key) not in bad)
    places = {f"127.0.0.1:{member.port}" for member in members}
    assert {b.place.split()[0] for b in found} == places
    unread = await inspected(members[0].url, verify=False, prefix=prefix, mode=mode)
    assert {(b.namespace_digest, b.key) for b in unread} == set(sizes)
    assert all(b.outcome is None for b in unread)


def _owner(members: list[servers.Valkey], name: bytes) -> servers.Valkey:
    slot = members[0]("CLUSTER", "KEYSLOT", name)
    return members[max(n for n in range(3) if n * 16384 // 3 <= int(str(slot)))]


async def test_inspect_of_a_server_that_is_down() -> None:
    with pytest.raises(
        BackendError, match=r"redis\.inspect: 127\.0\.0\.1:[0-9]+ cannot be reached: Connection refused"
    ):
        await inspected(f"redis://127.0.0.1:{servers.free_port()}", verify=False)
