"""A cluster of three masters under a manager with load: one dies, an empty one takes its place at another address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.load import LAYOUT, QUEUE_BYTES, config
from tests.chaos.phases import End, Run
from tests.servers.valkey import Valkey, bus_port, cluster, free_port, is_agreed, until, valkey
from tiering import TieringOffloadingManager

SLOTS = range(16384 // 3, 2 * 16384 // 3)
"""Of the second of three members, as the fixture splits them."""
NODE_TIMEOUT = ("--cluster-node-timeout", "500")


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Valkey]]:
    with cluster(tmp_path / "cluster", options=[*NODE_TIMEOUT, "--cluster-require-full-coverage", "no"]) as started:
        yield started


async def test_dead_connection_a_cluster_member_is_killed_and_replaced_under_load(
    members: list[Valkey], tmp_path: Path
) -> None:
    """rows 8, 9, 10 and 13: no wrong byte, no request that hangs, and the new member gives hits without a word from us."""
    url = "redis://" + ",".join(f"127.0.0.1:{member.port}" for member in members)
    tier = {"type": "redis", "mode": "cluster", "url": url, "deadline": "500ms", "queue_bytes": QUEUE_BYTES}
    fresh: list[Valkey] = []
    with ExitStack() as stack:

        def replace() -> None:
            survivors = [members[0], members[2]]
            common = ("--cluster-enabled", "yes", *NODE_TIMEOUT, "--cluster-port", str(free_port()))
            new = stack.enter_context(valkey(tmp_path / "new", *common))
            new("CLUSTER", "ADDSLOTSRANGE", SLOTS[0], SLOTS[-1])
            new("CLUSTER", "SET-CONFIG-EPOCH", 9)
            for survivor in survivors:
                survivor("CLUSTER", "FORGET", identity)
            new("CLUSTER", "MEET", "127.0.0.1", survivors[0].port, bus_port(survivors[0]))
            until(lambda: all(is_agreed(member, 3) for member in (*survivors, new)), "the cluster is whole again")
            fresh.append(new)

        identity = await asyncio.to_thread(members[1], "CLUSTER", "MYID")

        async def kill() -> End:
            await asyncio.to_thread(members[1].kill)
            return lambda: asyncio.to_thread(replace)

        async with TieringOffloadingManager(config(tier), LAYOUT) as manager:
            run = Run(manager, "redis", seed=0)
            async with run.running() as seen:
                await run.undisturbed(0.5)
                await run.fault("killed and replaced", kill, 0.5)
                # Blocks that the new member holds now can only have been stored and loaded through the manager.
                given = fresh[0]
                async with asyncio.timeout(30):
                    while not await asyncio.to_thread(given.info, "keyspace_hits"):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert (seen.wrong_bytes, seen.hung_requests) == (0, 0)
            assert seen.loaded_blocks > 0
            assert manager.stats()["tiers"]["redis"]["state"] == "up"
            assert manager.stats()["corrupt_blocks"] == 0
