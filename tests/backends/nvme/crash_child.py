"""A child to be killed: stores and deletes blocks of all sizes on the medium given, and reports each acknowledgement.

``python -m tests.backends.nvme.crash_child PATH ROUND``
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.backends.nvme import rig

CAPACITY = 12 * rig.MIB
WORKERS = 3


def size_of(number: int) -> int:
    return rig.SIZES[number % 3]


async def write(path: Path, round_: int) -> None:
    async with rig.opened(path, capacity=CAPACITY) as backend:

        async def worker(worker_: int) -> None:
            live: list[int] = []
            for turn in range(10_000):
                number = 100_000 * round_ + 10 * turn + worker_
                key = rig.key_of(number)
                if (await rig.store(backend, [key], size_of(number)))[0] is rig.OK:
                    say("stored", number)
                    live.append(number)
                while len(live) > 3:
                    oldest = live.pop(0)
                    say("deleting", oldest)
                    await backend.delete([rig.key_of(oldest)])

        await asyncio.gather(*(worker(n) for n in range(WORKERS)))


def say(what: str, number: int) -> None:
    print(what, number, flush=True)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
