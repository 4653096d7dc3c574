"""Stores blocks through a manager, or loads them in a new process: ``child.py store|load CONFIG``. Prints one JSON object."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import numpy as np

from tiering import KVLayout, TieringOffloadingManager, block_keys

BLOCK_BYTES = 65_536
BLOCKS = 24
LAYOUT = KVLayout.uniform(model="an example", tokens_per_block=16, block_bytes=BLOCK_BYTES)


async def main(step: str, config: str) -> None:
    keys = block_keys(list(range(16 * BLOCKS)), LAYOUT, salt=b"", lora=b"", group=0)
    blocks = np.random.default_rng(7).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    told: dict[str, object]
    async with TieringOffloadingManager.from_yaml(config, LAYOUT) as manager:
        if step == "store":
            report = await manager.store(keys, blocks)
            flushed = await manager.flush()
            told = {"stored": report.stored, "acknowledged": flushed.acknowledged, "lost": flushed.lost}
        else:
            match = await manager.match(keys)
            out = np.zeros_like(blocks)
            loaded = await manager.load(keys, out)
            told = {"loaded": loaded, "by_tier": dict(match.by_tier), "sha256": hashlib.sha256(out.data).hexdigest()}
        module = type(manager.config.tiers[0]).__module__
        print(json.dumps({**told, "from": sys.modules[module].__file__}))


asyncio.run(main(*sys.argv[1:]))
