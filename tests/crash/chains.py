"""What both the child that is killed and the parent that looks know: which chains there are, and their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tiering import KVLayout, TieringConfig, block_keys

BLOCK_BYTES = 65_000
"""Not a multiple of a page: padding is part of what must survive."""
LAYOUT = KVLayout.uniform(model="crash", tokens_per_block=4, block_bytes=BLOCK_BYTES)


def chain(round_: int, number: int) -> list[bytes]:
    """Chain ``number`` of a round: 4 to 11 blocks."""
    return block_keys(list(range(4 * (4 + number % 8))), LAYOUT, salt=f"{round_}/{number}".encode())


def rows(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """The one right content of each key."""
    seeds = [int.from_bytes(hashlib.sha256(key).digest()[:8], "big") for key in keys]
    return np.stack([np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8) for seed in seeds])


def config(directory: str, capacity_bytes: int) -> TieringConfig:
    return TieringConfig.from_dict(
        {
            "primary": {"capacity": 24 * 65_536},
            "tiers": [{"type": "nvme", "path": directory, "capacity": capacity_bytes}],
            "flush_on_close": 0,
        }
    )
