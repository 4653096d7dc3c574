"""The tier as a user of the manager meets it: two managers, a server that comes and goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backends.redis import rig
from tests.manager.world import LAYOUT, blank, eventually, keys_of, rows
from tests.servers import valkey as servers
from tiering import TieringConfig, TieringOffloadingManager

BLOCKS = 8


@pytest.fixture
def own(tmp_path: Path) -> Iterator[servers.Valkey]:
    with servers.valkey(tmp_path / "own") as started:
        yield started


def manager_of(server: servers.Valkey, epoch: str = "0", **fields: object) -> TieringOffloadingManager:
    primary = {"capacity": BLOCKS * LAYOUT.groups[0].block_bytes, "store_reserve": "0%"}
    config = TieringConfig.from_dict({"primary": primary, "tiers": [rig.config(server, **fields)]})
    return TieringOffloadingManager(config, LAYOUT, epoch=epoch)


async def test_what_one_manager_stores_another_hits(server: servers.Valkey, tmp_path: Path) -> None:
    """Rows 14 and 16 beside it: another epoch misses on the same server, and the first one hits again."""
    keys, prefix = keys_of(BLOCKS), rig.prefix_of(tmp_path)
    async with manager_of(server, prefix=prefix) as one, manager_of(server, prefix=prefix) as two:
        await one.store(keys, rows(keys))
        assert (await one.flush()).lost == 0
        assert (await two.match(keys)).by_tier == {"redis": BLOCKS}
        out = blank(BLOCKS)
        assert await two.load(keys, out) == BLOCKS
        assert np.array_equal(out, rows(keys))
        await two.reset(epoch="weights-2")
        assert (await two.match(keys)).blocks == 0
        await two.reset(epoch="0")
        assert (await two.match(keys)).blocks == BLOCKS


async def test_breaker_that_never_closes_and_dead_connection(own: servers.Valkey) -> None:
    """rows 9 and 10: the server dies and returns empty: the tier is down, CPU hits go on, then it is up by itself, and
    what was stored before and during the outage is owed to it, stored, and found."""
    keys, later = keys_of(BLOCKS // 2), keys_of(BLOCKS // 2, salt=b"later")
    numbers = itertools.count()
    async with manager_of(own) as manager:

        def state() -> object:
            return manager.stats()["tiers"]["redis"]["state"]

        async def is_state(wanted: str) -> bool:
            # A lookup of something new gives the tier something to fail at, or to answer.
            await manager.match(keys_of(1, salt=b"probe %d" % next(numbers)))
            return state() == wanted

        await manager.store(keys, rows(keys))
        assert (await manager.flush()).lost == 0
        assert state() == "up"
        own.kill()
        await eventually(lambda: is_state("down"))
        assert await manager.load(keys, blank(len(keys))) == len(keys)
        await manager.store(later, rows(later))
        own.start()
        await eventually(lambda: is_state("up"))
        assert (await manager.flush()).lost == 0
        assert own("DBSIZE") == len(later)
        async with manager_of(own) as other:
            out = blank(len(later))
            assert await other.load(later, out) == len(later)
            assert np.array_equal(out, rows(later))
