"""``configs/full.yaml`` as it is shipped: CPU, NVMe, Redis and S3 in one manager, on real servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.load import BLOCK_BYTES, CHAIN_BLOCKS, LAYOUT, chain, config, rows
from tests.cli.command import Done
from tests.servers.http_proxy import HttpProxy, http_proxy
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.servers.valkey import Valkey, valkey
from tests.sharing.conftest import BUCKET
from tiering import TieringOffloadingManager
from tiering.cli.main import main

ALL = CHAIN_BLOCKS
SLOTS = 4 * ALL
NEVER = 1 << 60
"""Times that a planned fault may strike: what is left of them tells how often it did."""


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Valkey]:
    with valkey(tmp_path / "redis") as started:
        yield started


@pytest.fixture
async def door(s3_server: SeaweedServer) -> AsyncIterator[HttpProxy]:
    async with http_proxy(s3_server.endpoint_url) as opened:
        yield opened


@pytest.fixture
def environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_redis: Valkey, door: HttpProxy
) -> pytest.MonkeyPatch:
    """What the file asks the environment for."""
    monkeypatch.setenv("KV_NVME", str(tmp_path / "nvme"))
    monkeypatch.setenv("KV_REDIS_URL", own_redis.url)
    monkeypatch.setenv("KV_S3_URL", s3_url(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", door.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return monkeypatch


def s3_url(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def smaller(root: Path, tmp_path: Path, **deadlines: str) -> Path:
    """The shipped file, for a CPU tier of a few chains; with other deadlines where a test must not depend on them."""
    text = (root / "configs/full.yaml").read_text()
    # As the CPU tier, from 8 GiB to 2 MiB, and a little more: two blocks.
    assert text.count("queue_bytes: 256MiB") == 2
    text = text.replace("queue_bytes: 256MiB", "queue_bytes: 128KiB")
    changes = {"capacity: 8GiB": f"capacity: {SLOTS * 65_536}", "capacity: 200GiB": "capacity: 256MiB", **deadlines}
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "full.yaml"
    path.write_text(text)
    return path


def patient(root: Path, tmp_path: Path) -> Path:
    return smaller(root, tmp_path, **{f"deadline: {one}": "deadline: 60s" for one in ("200ms", "500ms", "2s")})


def full(path: Path) -> TieringOffloadingManager:
    return TieringOffloadingManager.from_yaml(path, LAYOUT)


async def loaded(manager: TieringOffloadingManager, keys: list[bytes]) -> int:
    """Blocks that came, byte for byte."""
    out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
    n = await manager.load(keys, out)
    assert np.array_equal(out[:n], rows(keys)[:n])
    return n


async def push_out(manager: TieringOffloadingManager, first: int) -> None:
    """The primary tier is full of others, which every tier has that wants them."""
    for number in range(first, first + SLOTS // ALL):
        await manager.store(chain(number), rows(chain(number)))
    assert (await manager.flush()).lost == 0


async def test_no_fill_of_nearer_tiers_and_echo_never(
    root: Path, tmp_path: Path, environment: pytest.MonkeyPatch, own_redis: Valkey, door: HttpProxy
) -> None:
    """rows 6 and 30: what another machine left in S3 is read from there once, then from the disk; asked for twice it is in
    Redis, for the next machine; and it is never written back to where it came from."""
    keys = chain(1)
    s3 = {"type": "fsspec", "name": "s3", "url": s3_url(tmp_path)}
    async with TieringOffloadingManager(config(s3), LAYOUT) as another:
        await another.store(keys, rows(keys))
        assert (await another.flush()).lost == 0
    for key in keys:
        door.plan("PUT", times=NEVER, status=500, path=key.hex())
    echoes = list(door.faults)

    async with full(patient(root, tmp_path)) as manager:
        assert dict((await manager.match(keys)).by_tier) == {"s3": ALL}
        gets = door.requests["GET"]
        assert await loaded(manager, keys) == ALL
        assert door.requests["GET"] == gets + ALL
        await push_out(manager, 10)
        assert dict((await manager.match(keys)).by_tier) == {"nvme": ALL}
        assert own_redis("EXISTS", *_names(own_redis, keys)) == 0
        gets = door.requests["GET"]
        assert await loaded(manager, keys) == ALL
        assert door.requests["GET"] == gets, "the near tier serves it"
        await push_out(manager, 20)
        assert len(_names(own_redis, keys)) == ALL, "two hits: Redis has it"

    environment.setenv("KV_NVME", str(tmp_path / "another machine's disk"))
    async with full(patient(root, tmp_path)) as manager:
        assert dict((await manager.match(keys)).by_tier) == {"redis": ALL}
        gets = door.requests["GET"]
        assert await loaded(manager, keys) == ALL
        assert door.requests["GET"] == gets
    assert [fault.times for fault in echoes] == [NEVER] * ALL, "it was stored back to S3"


def _names(server: Valkey, keys: list[bytes]) -> list[bytes]:
    """Of those blocks that the server has; any name, so that EXISTS has one to deny."""
    found = server("KEYS", "kvtiering:*")
    assert isinstance(found, list)
    return [name for name in found if any(name.endswith(key) for key in keys)] or [b"none"]


@pytest.mark.parametrize("how", ["frozen", "dead"])
async def test_slow_tier_costs_the_near_ones_nothing(
    root: Path,
    tmp_path: Path,
    environment: pytest.MonkeyPatch,
    own_redis: Valkey,
    door: HttpProxy,
    s3_server: SeaweedServer,
    how: str,
) -> None:
    """rows 8 and 11: with Redis and S3 frozen, and a patience of 60 s with each, everything that the CPU and the NVMe tier
    hold is loaded, and new chains are stored, before either of the far ones has answered anything."""
    cold, hot = chain(1), chain(2)
    async with full(patient(root, tmp_path)) as manager:
        await manager.store(cold, rows(cold))
        await push_out(manager, 10)
        await manager.store(hot, rows(hot))
        await manager.flush()
        act, heal = _faults(how, own_redis, s3_server, door)
        await act()
        try:
            async with asyncio.timeout(30):
                asking = asyncio.create_task(manager.match(chain(3)))
                for n in range(4):
                    assert await loaded(manager, hot) == ALL
                    assert dict((await manager.match(cold)).by_tier) == {"nvme" if n == 0 else "primary": ALL}
                    assert await loaded(manager, cold) == ALL
                for number in range(30, 34):
                    assert (await manager.store(chain(number), rows(chain(number)))).stored == ALL
                for number in range(10, 14):
                    assert await loaded(manager, chain(number)) == ALL
            assert how == "dead" or not asking.done(), "a frozen server answered"
        finally:
            await heal()
        assert (await asking).blocks == 0


Act = Callable[[], Awaitable[None]]


def _faults(how: str, redis: Valkey, s3: SeaweedServer, door: HttpProxy) -> tuple[Act, Act]:
    async def freeze() -> None:
        redis.freeze()
        s3.freeze()

    async def thaw() -> None:
        redis.thaw()
        s3.thaw()

    async def die() -> None:
        await asyncio.to_thread(redis.kill)
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            door.plan(method, times=NEVER, drop=True)

    async def live() -> None:
        door.faults.clear()
        await asyncio.to_thread(redis.start)

    return (freeze, thaw) if how == "frozen" else (die, live)


def check(path: Path, capfd: pytest.CaptureFixture[str]) -> Done:
    capfd.readouterr()
    code = main(["check", str(path), "--block-bytes", "64KiB"])
    return Done(code, *capfd.readouterr())


async def test_check_says_that_all_is_well(
    root: Path, tmp_path: Path, environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # In a thread: the S3 server is reached through this very loop.
    done = await asyncio.to_thread(check, smaller(root, tmp_path), capfd)
    assert (done.code, done.err) == (0, "")
    assert done.out.count(" ok") == 4


def test_check_names_each_server_that_is_not_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the addresses, and the system's own words for what is wrong; the near tiers are checked all the same."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("KV_NVME", str(tmp_path / "nvme"))
        monkeypatch.setenv("KV_REDIS_URL", f"redis://{nowhere}")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{nowhere}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        done = check(smaller(root, tmp_path), capfd)
    assert done.code == 1
    assert f"redis: redis.open: {nowhere} cannot be reached: Connection refused\n" in done.out
    assert f"s3: s3.open: bucket kv-cache: LIST: http://{nowhere}: Connection refused\n" in done.out
    assert done.out.count(" ok") == 2


def test_check_says_where_credentials_come_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KV_NVME", str(tmp_path / "nvme"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    done = check(smaller(root, tmp_path), capfd)
    assert done.code == 2
    assert "(s3): storage_options: no credentials were found; give `key` and `secret` there" in done.err


def test_each_tier_has_its_own_rules(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_S3_URL", raising=False)
    tiers: tuple[Any, ...] = full(root / "configs/full.yaml").config.tiers
    assert [(tier.type, tier.load_when, tier.deadline_s) for tier in tiers] == [
        ("nvme", "always", 0.2),
        ("redis", "always", 0.5),
        ("fsspec", "always", 2.0),
    ]
    assert tiers[0].demote_when == "on_store"
    assert tiers[1].demote_when.after_hits == 2
    assert tiers[2].demote_when == "on_evict"
