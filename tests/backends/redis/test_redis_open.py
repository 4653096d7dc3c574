"""What ``open`` finds out: what an operator must fix is a ``ConfigError`` with the remedy, what may pass is retryable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.redis.backend import RedisBackend
from tests.backends.redis import rig
from tests.backends.redis.rig import MIB, MISSING, OK, REFUSED, key_of
from tests.servers import valkey as servers
from tiering.api import BackendError, Namespace
from tiering.errors import ConfigError

SECRET = "hunter2-is-secret"


@asynccontextmanager
async def listener(greeting: bytes) -> AsyncIterator[int]:
    """The port of a server that says ``greeting`` to everybody and no more."""
    served: set[asyncio.Event] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(ended := asyncio.Event())
        with contextlib.suppress(OSError):
            writer.write(greeting)
            await reader.read()
            writer.close()
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for ended in served:
            await ended.wait()


async def refusal(url: str | servers.Valkey, spoken: Namespace | None = None, **fields: Any) -> Exception:
    """What ``open`` raises. After it the backend closes as any other."""
    backend = RedisBackend(rig.config(url, **fields))
    try:
        await backend.open(spoken or rig.namespace())
    except (BackendError, ConfigError) as error:
        return error
    finally:
        await backend.aclose(5)
    raise AssertionError("open worked")


async def config_error(url: str | servers.Valkey, spoken: Namespace | None = None, **fields: Any) -> str:
    error = await refusal(url, spoken, **fields)
    assert isinstance(error, ConfigError), repr(error)
    assert SECRET not in str(error)
    return str(error)


async def passing_error(url: str | servers.Valkey, **fields: Any) -> str:
    error = await refusal(url, **fields)
    assert isinstance(error, BackendError), repr(error)
    assert error.retryable
    assert SECRET not in str(error)
    return str(error)


@pytest.fixture(scope="module")
def guarded(directory: Path) -> Iterator[servers.Valkey]:
    """A server with a password, and with users that may do little."""
    with servers.valkey(directory / "guarded", "--requirepass", SECRET, "--proto-max-bulk-len", str(MIB)) as started:
        for user, rights in {
            "full": ["~kvtiering:*", "+@all"],
            "reader": ["~kvtiering:*", "+exists", "+get"],
            "elsewhere": ["~other:*", "+@all"],
        }.items():
            started("ACL", "SETUSER", user, "on", f">{SECRET}", *rights, password=SECRET)
        yield started


async def test_no_password(guarded: servers.Valkey) -> None:
    assert "NOAUTH" in (message := await config_error(guarded, rig.namespace(4097)))
    assert "give one in `url:` or `password:`" in message


@pytest.mark.parametrize("user", ["", "full", "nobody"])
async def test_wrong_password(guarded: servers.Valkey, user: str) -> None:
    url = f"redis://{user}:wrong@127.0.0.1:{guarded.port}"
    assert "WRONGPASS" in (message := await config_error(url))
    assert "user name or password is wrong" in message


async def test_a_password_that_nobody_asked_for(server: servers.Valkey) -> None:
    assert "user name or password is wrong" in await config_error(server, password=SECRET)


async def test_a_user_without_the_right(guarded: servers.Valkey) -> None:
    assert "NOPERM" in (message := await config_error(guarded, username="elsewhere", password=SECRET))
    assert "give it the right" in message


@pytest.mark.parametrize("where", ["url", "fields", "default user"])
async def test_the_right_password(guarded: servers.Valkey, where: str) -> None:
    spoken = rig.namespace(4097)
    fields: dict[str, Any] = {"username": "full", "password": SECRET} if where == "fields" else {}
    userinfo = {"url": f"full:{SECRET}@", "fields": "", "default user": f":{SECRET}@"}[where]
    async with rig.opened(f"redis://{userinfo}127.0.0.1:{guarded.port}", spoken, **fields) as backend:
        assert await rig.store(backend, [key_of(1)]) == [OK]
        assert await rig.load(backend, [key_of(1)]) == [OK]


async def test_a_user_who_may_only_read_loads_and_is_refused_stores(guarded: servers.Valkey) -> None:
    """INFO, CONFIG, SET and UNLINK are withheld, as managed servers and careful operators do."""
    spoken = rig.namespace(4097)
    async with rig.opened(guarded, spoken, username="full", password=SECRET) as writer:
        await rig.store(writer, [key_of(1)])
    async with rig.opened(guarded, spoken, username="reader", password=SECRET) as backend:
        assert await rig.contains(backend, [key_of(1), key_of(2)]) == [OK, MISSING]
        assert await rig.load(backend, [key_of(1)]) == [OK]
        (outcome,) = await backend.store([(key_of(2), memoryview(rig.payload_of(key_of(2), 4097)))])
        assert outcome.code is REFUSED
        assert "NOPERM" in outcome.why


async def test_blocks_larger_than_the_server_takes(guarded: servers.Valkey) -> None:
    """The limit holds for header and payload together."""
    fits, too_large = rig.namespace(MIB - 128), rig.namespace(MIB - 127)
    async with rig.opened(guarded, fits, username="full", password=SECRET) as backend:
        assert await rig.store(backend, [key_of(3)], MIB - 128) == [OK]
    message = await config_error(guarded, too_large, username="full", password=SECRET)
    assert f"a block of {MIB - 127} bytes" in message
    assert "proto-max-bulk-len" in message


async def test_a_database_that_is_not_there(server: servers.Valkey) -> None:
    message = await config_error(f"{server.url}/99")
    assert "refused SELECT 99: ERR DB index is out of range" in message


async def test_databases_are_apart(server: servers.Valkey, tmp_path: Path) -> None:
    prefix = rig.prefix_of(tmp_path)
    async with (
        rig.opened(f"{server.url}/1", prefix=prefix) as one,
        rig.opened(f"unix://{server.path}?db=2", prefix=prefix) as two,
    ):
        await rig.store(one, [key_of(1)])
        assert await rig.contains(two, [key_of(1)]) == [MISSING]
        assert server("EXISTS", rig.name_of(prefix, rig.namespace(), key_of(1)), db=1) == 1


async def test_nobody_listens(tmp_path: Path) -> None:
    """row 10: and the message names the address."""
    port = servers.free_port()
    assert f"127.0.0.1:{port} cannot be reached: " in await passing_error(f"redis://127.0.0.1:{port}")
    assert f"{tmp_path}/none.sock cannot be reached: " in await passing_error(f"unix://{tmp_path}/none.sock")
    assert "cannot be reached" in await passing_error("redis://no-such-host.invalid")


async def test_somebody_else_listens() -> None:
    async with listener(b"220 mail.example ESMTP\r\n") as port:
        assert "does not speak the Redis protocol (it sent b'220 mail.example ESMTP')" in await passing_error(
            f"redis://127.0.0.1:{port}"
        )


async def test_somebody_listens_and_says_nothing() -> None:
    """row 8"""
    async with listener(b"") as port:
        for url in (f"redis://127.0.0.1:{port}", f"rediss://127.0.0.1:{port}"):
            assert "silent for 0.1 s" in await passing_error(url, timeout="100ms")


async def test_a_member_of_a_cluster_is_not_a_single_server(cluster: list[servers.Valkey]) -> None:
    for member in cluster:
        assert "is a member of a cluster; set `mode: cluster`" in await config_error(member)


async def test_a_single_server_is_not_a_cluster(server: servers.Valkey) -> None:
    assert "is not a member of a cluster; set `mode: standalone`" in await config_error(server, mode="cluster")


async def test_a_member_without_slots_is_not_a_cluster_yet(tmp_path: Path) -> None:
    with servers.valkey(
        tmp_path / "alone", "--cluster-enabled", "yes", "--cluster-port", str(servers.free_port())
    ) as s:
        assert "knows of no slots" in await passing_error(s, mode="cluster")


async def test_a_replica_takes_no_stores(server: servers.Valkey, tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "replica", "--replicaof", f"127.0.0.1 {server.port}") as replica:
        assert "is a replica, which takes no stores; name its master" in await passing_error(replica)


async def test_tls(tls_port: int, certificates: servers.Certificates) -> None:
    """Each way of getting it wrong names the field to set."""
    url = f"rediss://127.0.0.1:{tls_port}"
    assert "set `tls_ca_file:` to who signed it" in await config_error(url)
    assert "if it wants TLS, write rediss://" in await passing_error(f"redis://127.0.0.1:{tls_port}")
    missing = certificates.ca_file.with_name("none.pem")
    assert f"tls_ca_file: {missing}" in await config_error(url, tls_ca_file=missing)
    assert f"tls_cert_file: {missing}" in await config_error(
        url, tls_ca_file=certificates.ca_file, tls_cert_file=missing
    )
    async with rig.opened(f"rediss://localhost:{tls_port}", tls_ca_file=certificates.ca_file) as backend:
        assert await rig.contains(backend, [b"none"]) == [MISSING]


async def test_tls_to_a_server_without(server: servers.Valkey) -> None:
    """Valkey waits for the rest of what it takes for a line; others answer in clear."""
    assert "if it does not speak TLS, write redis:// instead" in await passing_error(
        f"rediss://127.0.0.1:{server.port}", timeout="100ms"
    )
    async with listener(b"220 mail.example ESMTP\r\n") as port:
        message = await config_error(f"rediss://127.0.0.1:{port}")
        assert "it does not speak TLS" in message
        assert "write redis:// instead" in message


async def test_tls_with_a_certificate_for_another_name(
    server: servers.Valkey, certificates: servers.Certificates
) -> None:
    with servers.tls_proxy(server, certificates.named_file) as port:
        url = f"rediss://127.0.0.1:{port}"
        assert "`tls_server_name:` if it is made out for another name" in await config_error(
            url, tls_ca_file=certificates.ca_file
        )
        async with rig.opened(url, tls_ca_file=certificates.ca_file, tls_server_name="cache.example") as backend:
            assert await rig.contains(backend, [b"none"]) == [MISSING]


async def test_tls_where_the_server_wants_to_know_us(
    server: servers.Valkey, certificates: servers.Certificates
) -> None:
    with servers.tls_proxy(server, certificates.server_file, client_ca=certificates.ca_file) as port:
        url, ca_file = f"rediss://127.0.0.1:{port}", certificates.ca_file
        # In TLS 1.3 a client learns only by the first answer that it was not welcome.
        await refusal(url, tls_ca_file=ca_file)
        async with rig.opened(url, tls_ca_file=ca_file, tls_cert_file=certificates.client_file) as backend:
            assert await rig.contains(backend, [b"none"]) == [MISSING]


async def test_nothing_happens_before_open() -> None:
    backend = RedisBackend(rig.config("redis://no-such-host.invalid"))
    with pytest.raises(BackendError, match="contains before open"):
        await backend.contains([key_of(1)])
    await backend.aclose(1)


async def test_a_second_open_is_refused(server: servers.Valkey) -> None:
    async with rig.opened(server) as backend:
        with pytest.raises(BackendError, match="a second time"):
            await backend.open(rig.namespace())
