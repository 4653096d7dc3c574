"""What ``TieringSpec`` sends to its workers: slots, and where the arena is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from tiering.connectors.wire import ArenaAddress


class SlotsLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the arena, the groups one after another, in the order of the keys they were planned for."""

    def __init__(self, slots: Sequence[int], arena: ArenaAddress) -> None:
        super().__init__(list(slots))
        self.block_ids = np.asarray(slots, dtype=np.int64)
        self.arena = arena
