"""A process that shares a server with others: ``python -m tests.backends.redis.child URL PREFIX WRITERS``.

Says "ready", waits for a line on stdin, lets each of its writers store all blocks at the same time, and prints the hash
of a text (which depends on PYTHONHASHSEED) and what became of the blocks.
"""

from __future__ import annotations

import asyncio
import sys

from tests.backends.redis import rig
from tiering import KVLayout, block_keys
from tiering.types import Namespace

BLOCK_BYTES = 64 * rig.KIB
BLOCKS = 12
LAYOUT = KVLayout.uniform(model="shared", tokens_per_block=4, block_bytes=BLOCK_BYTES)
SPOKEN = Namespace.of(LAYOUT, epoch="0")


def block_names() -> list[bytes]:
    """A chain of keys from token ids, as an engine has them."""
    return block_keys(list(range(4 * BLOCKS)), LAYOUT)


async def write(url: str, prefix: str, writers: int) -> list[str]:
    async with rig.opened(url, SPOKEN, prefix=prefix) as backend:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        stored = await asyncio.gather(*(rig.store(backend, block_names(), BLOCK_BYTES) for _ in range(writers)))
        loaded = await rig.load(backend, block_names(), BLOCK_BYTES)
        return sorted({code.name for codes in [*stored, loaded] for code in codes})


if __name__ == "__main__":
    print(hash("kvtiering"), *asyncio.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
