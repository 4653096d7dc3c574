"""A process of its own on a shared medium: ``python -m tests.backends.fsspec.sharing_child CONFIG_JSON OP ROUNDS``.

Prints one line: how many blocks had which outcome. Loads compare every byte.
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


async def main(config: FsspecConfig, op: str, rounds: int) -> None:
    given = layout()
    keys = keys_of(given)
    seen: Counter[str] = Counter()
    async with rig.opened(config, Namespace.of(given, epoch="0")) as backend:
        for _ in range(rounds):
            call = rig.store if op == "store" else rig.load
            calls = await asyncio.gather(*(call(backend, keys) for _ in range(WRITERS if op == "store" else 1)))
            seen.update(outcome.code.value for outcomes in calls for outcome in outcomes)
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(FsspecConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
