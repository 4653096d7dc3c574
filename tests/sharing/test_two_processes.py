"""Two processes, two network addresses, one tier, and nothing between them but the keys."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.chaos.load import CHAIN_BLOCKS, LAYOUT, config
from tests.servers.valkey import Valkey
from tests.sharing.child import load, store
from tests.sharing.conftest import ADDRESSES, Medium
from tests.sharing.other import other
from tiering import TieringOffloadingManager

ALL = CHAIN_BLOCKS
WRITERS_EACH = 4
CHAINS = 12


def manager_of(tier: dict[str, Any]) -> TieringOffloadingManager:
    return TieringOffloadingManager(config(tier), LAYOUT)


async def test_keys_differ_between_processes_never_what_one_stores_the_other_hits(medium: Medium) -> None:
    """row 15: both ways, whole and byte for byte, though hash seeds and addresses differ."""
    async with other(medium.there, hash_seed=7) as there, manager_of(medium.here) as here:
        assert await there.ask("store", 1) == {"stored": ALL, "lost": 0}
        hit = {"by_tier": {medium.name: ALL}, "loaded": ALL, "wrong_bytes": 0}
        assert await load(here, 1) == hit
        assert await store(here, 2) == {"stored": ALL, "lost": 0}
        assert await there.ask("load", 2) == hit
        # And nobody made up what nobody stored.
        assert await there.ask("load", 3) == await load(here, 3) == {"by_tier": {}, "loaded": 0, "wrong_bytes": 0}


async def test_the_two_processes_reach_the_server_at_different_addresses(redis_server: Valkey) -> None:
    """What the other tests are about: the server itself says so."""
    url = "redis://{}:" + str(redis_server.port)
    here, there = ({"type": "redis", "url": url.format(address), "prefix": "two"} for address in ADDRESSES)
    async with other(there) as far, manager_of(here) as near:
        await far.ask("store", 1)
        await load(near, 1)
        with redis_server.client() as client:
            seen = {entry["laddr"].partition(":")[0] for entry in client.client_list() if entry["cmd"] != "client|list"}
    assert seen == set(ADDRESSES)


async def test_concurrent_writers_of_one_key_agree(medium: Medium) -> None:
    """row 22: eight managers in two processes store the same chains at the same time, and a reader looks on: nothing is
    lost, no byte is wrong, and in the end everybody hits everything."""
    async with (
        other(medium.there, managers=WRITERS_EACH, hash_seed=1) as one,
        other(medium.here, managers=WRITERS_EACH, hash_seed=2) as two,
    ):
        writing = [asyncio.create_task(process.ask("write", 0, CHAINS)) for process in (one, two)]
        wrong = 0
        while not all(task.done() for task in writing):
            # A new manager each time: nothing that it gives comes from its own memory.
            async with manager_of(medium.here) as reader:
                for number in range(CHAINS):
                    wrong += (await load(reader, number))["wrong_bytes"]
        expected = {"stored": WRITERS_EACH * CHAINS * ALL, "lost": 0}
        assert [await task for task in writing] == [expected, expected]
        assert wrong == 0
    async with manager_of(medium.there) as reader:
        for number in range(CHAINS):
            answer = await load(reader, number)
            assert answer == {"by_tier": {medium.name: ALL}, "loaded": ALL, "wrong_bytes": 0}
        assert reader.stats()["corrupt_blocks"] == 0
