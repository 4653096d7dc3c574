"""Three masters: who has which key, slots that move, members that die, freeze and come back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.crc
from hypothesis import given
from hypothesis import strategies as st

from backends.redis.batch import Redirect, redirect_of
from backends.redis.cluster import slot_of
from backends.redis.failures import ErrorReply
from backends.redis.url import Address
from tests.backends.redis import rig
from tests.backends.redis.rig import FAILED, KIB, MISSING, OK, key_of, name_of
from tests.servers import valkey as servers

KEYS = [key_of(n) for n in range(60)]
TAGGED = [b"{a}", b"{}a", b"a{b}c", b"{{a}}", b"a{b}{c}", b"}{a", b"{a", b"a}{", b"", b"\0{\xff}"]


@pytest.mark.parametrize("key", [*TAGGED, *KEYS[:3]])
def test_hash_slots_are_the_servers(cluster: list[servers.Valkey], key: bytes) -> None:
    assert slot_of(key) == cluster[0]("CLUSTER", "KEYSLOT", key)


@given(st.binary(max_size=60) | st.text("{}ab", max_size=12).map(str.encode))
def test_hash_slots_are_those_of_the_redis_package(key: bytes) -> None:
    assert slot_of(key) == redis.crc.key_slot(key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MOVED 7 10.0.0.1:7000", Redirect(Address("10.0.0.1", 7000), False)),
        ("ASK 7 cache.example:7000", Redirect(Address("cache.example", 7000), True)),
        ("MOVED 7 ::1:7000", Redirect(Address("::1", 7000), False)),
        ("MOVED 7 :7000", Redirect(Address("", 7000), False)),
        ("MOVED 7 ?:0", None),
        ("MOVED 7", None),
        ("ASK", None),
        ("MOVED x y z", None),
        ("ERR MOVED 7 a:1", None),
    ],
)
def test_redirects(text: str, expected: Redirect | None) -> None:
    assert redirect_of(ErrorReply(text)) == expected


def seeds(members: list[servers.Valkey]) -> str:
    return "redis://" + ",".join(f"127.0.0.1:{member.port}" for member in members)


def owner_of(members: list[servers.Valkey], name: bytes) -> servers.Valkey:
    """By the even split that the fixture makes."""
    slot = redis.crc.key_slot(name)
    return members[max(n for n in range(3) if n * 16384 // 3 <= slot)]


async def test_blocks_lie_on_all_members_and_any_member_is_a_seed(
    cluster: list[servers.Valkey], tmp_path: Path
) -> None:
    prefix, spoken = rig.prefix_of(tmp_path), rig.namespace()
    async with rig.opened(cluster[2], mode="cluster", prefix=prefix) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 60
        mixed = [*KEYS[::7], b"absent", *KEYS[3::9]]
        expected = [OK if key in KEYS else MISSING for key in mixed]
        assert await rig.contains(backend, mixed) == expected
        assert await rig.load(backend, mixed) == expected
    for key in KEYS:
        name = name_of(prefix, spoken, key)
        assert owner_of(cluster, name)("EXISTS", name) == 1
    assert {owner_of(cluster, name_of(prefix, spoken, key)).port for key in KEYS} == {m.port for m in cluster}
    async with rig.opened(seeds(cluster[:2]), mode="cluster", prefix=prefix) as backend:
        assert await rig.load(backend, KEYS) == [OK] * 60
        assert await rig.delete(backend, KEYS) == [OK] * 60
        assert await rig.contains(backend, KEYS) == [MISSING] * 60


async def test_a_dead_seed_is_passed_over(cluster: list[servers.Valkey], tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{servers.free_port()},127.0.0.1:{cluster[1].port}"
    async with rig.opened(url, mode="cluster", prefix=rig.prefix_of(tmp_path)) as backend:
        assert await rig.store(backend, KEYS) == [OK] * 60


async def test_a_slot_on_the_move_and_moved(cluster: list[servers.Valkey], tmp_path: Path) -> None:
    """ASK while some of a slot's keys have gone ahead, MOVED after, each for every kind of call; then back again."""
    prefix, spoken = rig.prefix_of(tmp_path), rig.namespace()
    # Braces choose the slot: these blocks, and the one that is never stored, share one.
    keys = [b"{move}" + bytes([n]) for n in range(6)]
    names = [name_of(prefix, spoken, key) for key in keys]
    slot = redis.crc.key_slot(names[0])
    source = owner_of(cluster, names[0])
    target = next(member for member in cluster if member is not source)
    ids = {member.port: member("CLUSTER", "MYID") for member in cluster}
    async with rig.opened(seeds(cluster), mode="cluster", prefix=prefix) as backend:
        assert await rig.store(backend, keys[:4]) == [OK] * 4
        target("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        source("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
        source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", names[0], names[2])
        try:
            assert await rig.load(backend, keys) == [OK] * 4 + [MISSING] * 2
            assert await rig.contains(backend, keys) == [OK] * 4 + [MISSING] * 2
            assert await rig.store(backend, [keys[4], keys[0]]) == [OK, OK]
            assert await rig.delete(backend, [keys[2], keys[5]]) == [OK, MISSING]
            assert await rig.load(backend, keys) == [OK, OK, MISSING, OK, OK, MISSING]
            source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", names[1], names[3])
            for member in (target, source):
                member("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
            assert await rig.load(backend, keys) == [OK, OK, MISSING, OK, OK, MISSING]
            assert await rig.store(backend, keys) == [OK] * 6
            assert target("CLUSTER", "COUNTKEYSINSLOT", slot) == 6
            told = source.info("errorstat_MOVED")
            assert await rig.load(backend, keys) == [OK] * 6
            assert source.info("errorstat_MOVED") == told, "the new map is not remembered"
        finally:
            for name in names:
                if target("CLUSTER", "COUNTKEYSINSLOT", slot):
                    with target.client() as client:
                        client.delete(name)
            for member in (source, target):
                member("CLUSTER", "SETSLOT", slot, "NODE", ids[source.port])
        assert await rig.store(backend, keys) == [OK] * 6
        assert source("CLUSTER", "COUNTKEYSINSLOT", slot) == 6
        assert await rig.load(backend, keys) == [OK] * 6


@pytest.fixture(scope="module")
def own(directory: Path) -> Iterator[list[servers.Valkey]]:
    """A cluster to be broken; the last test leaves it with another member than it found."""
    with servers.cluster(directory / "own", options=["--cluster-require-full-coverage", "no"]) as started:
        yield started


async def test_no_deadline_and_dead_connection_of_one_member_leave_the_others_alone(
    own: list[servers.Valkey],
) -> None:
    """rows 8, 10 and 22's kind: one member is frozen, killed and started anew, empty; the rest serves on, and hits
    come back."""
    spoken = rig.namespace()
    async with rig.opened(seeds(own), mode="cluster", timeout="200ms") as backend:
        assert await rig.store(backend, KEYS) == [OK] * 60
        owners = [owner_of(own, name_of("kvtiering", spoken, key)) for key in KEYS]
        victim = own[1]

        def but_victim(code: object) -> list[object]:
            return [code if owner is victim else OK for owner in owners]

        victim.freeze()
        assert await rig.load(backend, KEYS) == but_victim(FAILED)
        others = [key for key, owner in zip(KEYS, owners, strict=True) if owner is not victim]
        held = asyncio.create_task(rig.load(backend, KEYS))
        assert await rig.load(backend, others) == [OK] * len(others)
        assert not held.done()
        assert await held == but_victim(FAILED)
        victim.thaw()
        assert await rig.load(backend, KEYS) == [OK] * 60
        victim.kill()
        for _ in range(2):
            assert await rig.load(backend, KEYS) == but_victim(FAILED)
            assert await rig.contains(backend, KEYS) == but_victim(FAILED)
        victim.start()
        servers.until(lambda: all(servers.is_agreed(member, 3) for member in own), "the member is back")
        assert await rig.load(backend, KEYS) == but_victim(MISSING)
        assert await rig.store(backend, KEYS) == [OK] * 60
        assert await rig.load(backend, KEYS) == [OK] * 60


async def test_a_member_that_is_replaced_at_another_address(own: list[servers.Valkey], tmp_path: Path) -> None:
    """row 10: a replica takes a dead master's slots over; without a word from us, its blocks are found again."""
    victim = own[0]
    common = ["--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-port", str(servers.free_port())]
    with servers.valkey(tmp_path / "replica", *common) as replica:
        replica("CLUSTER", "MEET", "127.0.0.1", victim.port, servers.bus_port(victim))
        servers.until(lambda: all(servers.is_agreed(s, 4) for s in [*own, replica]), "four agree")
        replica("CLUSTER", "REPLICATE", victim("CLUSTER", "MYID"))
        servers.until(lambda: replica.info("master_link_status") == "up", "the replica is in step")
        async with rig.opened(seeds(own), mode="cluster", timeout="1s") as backend:
            assert await rig.store(backend, KEYS, 4097) == [OK] * 60
            assert victim("WAIT", 1, 5000) == 1
            victim.kill()
            failed = await rig.load(backend, KEYS)
            assert set(failed) == {OK, FAILED}
            assert replica("CLUSTER", "FAILOVER", "TAKEOVER") == b"OK"
            servers.until(lambda: replica.info("role") == "master", "the replica has taken over")
            servers.until(
                lambda: all(servers.knows_master(member, replica) for member in own[1:]), "the others know of it"
            )
            assert await rig.load(backend, KEYS) == [OK] * 60
            assert await rig.store(backend, KEYS, 256 * KIB) == [OK] * 60
