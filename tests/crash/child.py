"""Stores, loads and evicts until it is killed. ``python -m tests.crash.child DIRECTORY ROUND CAPACITY``."""

from __future__ import annotations

import asyncio
import sys

from tests.crash.chains import LAYOUT, chain, config, rows
from tiering import TieringOffloadingManager


async def store_until_killed(directory: str, round_: int, capacity_bytes: int) -> None:
    async with TieringOffloadingManager(config(directory, capacity_bytes), LAYOUT) as manager:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        number = 0
        while True:
            keys = chain(round_, number)
            await manager.store(keys, rows(keys))
            if number % 5 == 4:
                older = chain(round_, number - 3)
                await manager.load(older, bytearray(rows(older).nbytes))
            number += 1


if __name__ == "__main__":
    asyncio.run(store_until_killed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
