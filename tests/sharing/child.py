"""A process with managers of its own on a tier that others share: ``python -m tests.sharing.child TIER_JSON MANAGERS``.

Says "ready", then answers each line on its stdin with one JSON object: ``store N`` (the chain N, by its first manager),
``load N``, and ``write FIRST LAST`` (every manager stores all these chains, all at the same time). Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from tests.chaos.load import BLOCK_BYTES, CHAIN_BLOCKS, LAYOUT, UNTOUCHED, chain, config, rows, wrong_bytes
from tiering import TieringOffloadingManager

Answer = dict[str, Any]


async def store(manager: TieringOffloadingManager, number: int) -> Answer:
    """Into the tier below, acknowledged."""
    keys = chain(number)
    report = await manager.store(keys, rows(keys))
    return {"stored": report.stored, "lost": (await manager.flush()).lost}


async def load(manager: TieringOffloadingManager, number: int) -> Answer:
    """Where the blocks were, how many came, and how many bytes were not theirs."""
    keys = chain(number)
    found = dict((await manager.match(keys)).by_tier)
    out = np.full((CHAIN_BLOCKS, BLOCK_BYTES), UNTOUCHED, np.uint8)
    loaded = await manager.load(keys, out)
    return {"by_tier": found, "loaded": loaded, "wrong_bytes": wrong_bytes(out, loaded, rows(keys))}


async def write(managers: list[TieringOffloadingManager], first: int, last: int) -> Answer:
    """The sums over all managers and chains."""
    total = {"stored": 0, "lost": 0}
    for number in range(first, last):
        for answer in await asyncio.gather(*(store(manager, number) for manager in managers)):
            total = {name: total[name] + answer[name] for name in total}
    return total


async def obey(managers: list[TieringOffloadingManager], words: list[str]) -> Answer:
    numbers = [int(word) for word in words[1:]]
    match words[0]:
        case "store":
            return await store(managers[0], *numbers)
        case "load":
            return await load(managers[0], *numbers)
        case "write":
            return await write(managers, *numbers)
    raise ValueError(f"unknown word {words[0]}")


async def main(tier: dict[str, Any], count: int) -> None:
    async with AsyncExitStack() as stack:
        managers = [TieringOffloadingManager(config(tier), LAYOUT) for _ in range(count)]
        for manager in managers:
            await stack.enter_async_context(manager)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await obey(managers, line.split())), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
