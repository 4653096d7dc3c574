"""The memory behind the engine's GPU blocks: one storage a rank, in which a block's layer pages lie next to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiering.connectors.reference.groups import CacheGroup
from tiering.memory.transfer.blocks import DeviceBlocks


class PagedMemory:
    """``num_gpu_blocks`` rows for each of ``ranks``; block b is row b, whichever group uses it, so rows fit the largest.

    Zeroed, and the null block stays so: a null position reads as zeros. Raises ``RuntimeError`` if the device has not
    that much memory.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_gpu_blocks: int,
        ranks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = tuple(groups)
        self.num_gpu_blocks = num_gpu_blocks
        self.ranks = ranks
        row_bytes = max(group.block_bytes for group in self.groups)
        self._rows = [
            torch.zeros((num_gpu_blocks, row_bytes), dtype=torch.uint8, device=device) for _ in range(self.ranks)
        ]

    def blocks(self, rank: int, group: int) -> torch.Tensor:
        """``(num_gpu_blocks, block_bytes)`` uint8: the group's blocks, one layer's page after another. An alias."""
        return self._rows[rank][:, : self.groups[group].block_bytes]

    def device_blocks(self, rank: int) -> DeviceBlocks:
        """What the rank's worker half registers: the page of each layer, by group. Aliases; the memory stays here."""
        return DeviceBlocks(
            tuple(
                tuple(torch.split(self.blocks(rank, number), group.page_bytes, dim=1))
                for number, group in enumerate(self.groups)
            )
        )
