"""A master, its replica, and a Sentinel that knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tests.backends.redis.rig import FAILED, MISSING, OK, key_of
from tests.servers import valkey as servers
from tiering.api import BackendError
from tiering.errors import ConfigError

SERVICE = "kv-cache"
SECRET = "hunter2-is-secret"
KEYS = [key_of(n) for n in range(10)]


@dataclass(frozen=True)
class Group:
    master: servers.Valkey
    replica: servers.Valkey
    sentinel: servers.Valkey


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with (
        servers.valkey(tmp_path / "master") as master,
        servers.valkey(tmp_path / "replica", "--replicaof", f"127.0.0.1 {master.port}") as replica,
        servers.sentinel(tmp_path / "sentinel", master, SERVICE, f"requirepass {SECRET}") as sentinel,
    ):
        servers.until(lambda: replica.info("master_link_status") == "up", "the replica is in step")
        yield Group(master, replica, sentinel)


def knows_replica(sentinel: servers.Valkey) -> bool:
    with sentinel.client(password=SECRET) as client:
        return any("disconnected" not in str(entry["flags"]) for entry in client.sentinel_slaves(SERVICE))


def master_port(sentinel: servers.Valkey) -> int:
    with sentinel.client(password=SECRET) as client:
        return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])


async def test_dead_connection_after_a_failover(group: Group) -> None:
    """row 10: the master dies, the Sentinel makes the replica its master, and we follow with no word from anybody."""
    dead = servers.free_port()
    url = f"redis://127.0.0.1:{dead},127.0.0.1:{group.sentinel.port}"
    fields: dict[str, Any] = {"mode": "sentinel", "sentinel_service": SERVICE, "sentinel_password": SECRET}
    async with rig.opened(url, **fields) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 10
        assert group.master("WAIT", 1, 5000) == 1
        assert group.master("DBSIZE") == 10
        servers.until(lambda: knows_replica(group.sentinel), "the Sentinel sees the replica")
        group.master.kill()
        assert await rig.load(backend, KEYS) == [FAILED] * 10
        servers.until(lambda: master_port(group.sentinel) == group.replica.port, "the Sentinel has decided")
        servers.until(lambda: group.replica.info("role") == "master", "the replica is the master")
        assert await rig.load(backend, KEYS) == [OK] * 10
        assert await rig.store(backend, [b"new"]) == [OK]
        assert group.replica("DBSIZE") == 11


async def test_a_master_that_was_made_a_replica_is_left(tmp_path: Path) -> None:
    """It still answers, so that no connection breaks: what it refuses tells us to ask again."""
    with (
        servers.valkey(tmp_path / "one") as one,
        servers.valkey(tmp_path / "other") as other,
        servers.sentinel(tmp_path / "sentinel", one, SERVICE) as sentinel,
    ):
        url = f"redis://127.0.0.1:{sentinel.port}"
        async with rig.opened(url, mode="sentinel", sentinel_service=SERVICE) as backend:
            assert await rig.store(backend, KEYS) == [OK] * 10
            one("REPLICAOF", "127.0.0.1", other.port)
            sentinel("SENTINEL", "REMOVE", SERVICE)
            sentinel("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", other.port, 1)
            (outcome,) = await backend.store([(b"first", memoryview(rig.payload_of(b"first", 4097)))])
            assert outcome.retryable
            assert outcome.why.startswith("READONLY")
            assert await rig.store(backend, [b"second"]) == [OK]
            assert await rig.contains(backend, [b"second", b"absent"]) == [OK, MISSING]
            assert other("EXISTS", rig.name_of("kvtiering", rig.namespace(), b"second")) == 1


@pytest.fixture
def sentinel(tmp_path: Path, server: servers.Valkey) -> Iterator[servers.Valkey]:
    with servers.sentinel(tmp_path / "sentinel", server, SERVICE, f"requirepass {SECRET}") as started:
        yield started


async def test_what_is_wrong_at_open(sentinel: servers.Valkey, server: servers.Valkey) -> None:
    url = f"redis://127.0.0.1:{sentinel.port}"

    async def refusal(url: str, **fields: object) -> Exception:
        fields = {"mode": "sentinel", "sentinel_service": SERVICE, "sentinel_password": SECRET, **fields}
        backend = RedisBackend(rig.config(url, **fields))
        with pytest.raises((ConfigError, BackendError)) as caught:
            await backend.open(rig.namespace())
        await backend.aclose(1)
        assert SECRET not in str(caught.value)
        return caught.value

    for error, kind, words in (
        (await refusal(url, sentinel_service="other"), ConfigError, "knows no 'other'; correct `sentinel_service:`"),
        (await refusal(url, sentinel_password=None), ConfigError, "NOAUTH"),
        (await refusal(url, sentinel_password="wrong"), ConfigError, "WRONGPASS"),
        (await refusal(server.url, sentinel_password=None), ConfigError, "is no Sentinel; set `mode: standalone`"),
        (await refusal(f"redis://127.0.0.1:{servers.free_port()}"), BackendError, "cannot be reached"),
    ):
        assert isinstance(error, kind)
        assert words in str(error)
    backend = RedisBackend(rig.config(f"redis://:{SECRET}@127.0.0.1:{sentinel.port}"))
    with pytest.raises(ConfigError, match="is a Sentinel; set `mode: sentinel`"):
        await backend.open(rig.namespace())
    await backend.aclose(1)
