"""A writer in a process of its own: ``python -m tests.backends.fsspec.sharing_child CONFIG_JSON ROUNDS``.

Prints one line: how many stores had which outcome.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from backends.fsspec.config import FsspecConfig
from tests.backends.fsspec import rig
from tiering.keys import block_keys
from tiering.types import KVLayout, Namespace

TOKENS_PER_BLOCK = 16
BLOCKS = 12
WRITERS = 8


def layout(**fields: object) -> KVLayout:
    return KVLayout.uniform(
        **{"model": "shared", "tokens_per_block": TOKENS_PER_BLOCK, "block_bytes": rig.SMALL, **fields}  # type: ignore[arg-type]
    )


def keys_of(given: KVLayout) -> list[bytes]:
    """Content-addressed: every process that sees the tokens has the same keys."""
    return block_keys(list(range(TOKENS_PER_BLOCK * BLOCKS)), given)


async def main(config: FsspecConfig, rounds: int) -> None:
    given = layout()
    keys = keys_of(given)
    seen: Counter[str] = Counter()
    async with rig.opened(config, Namespace.of(given, epoch="0")) as backend:
        for _ in range(rounds):
            calls = await asyncio.gather(*(rig.store(backend, keys) for _ in range(WRITERS)))
            seen.update(outcome.code.value for outcomes in calls for outcome in outcomes)
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(FsspecConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])))
