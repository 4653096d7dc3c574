"""The engine's GPU blocks: who uses which, which are free, and what cached content the free ones still have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tiering.connectors.requests import NULL_BLOCK
from tiering.errors import ShapeError

CacheKey: TypeAlias = tuple[bytes, int]
"""(hash of the block's last token, group)."""


class BlockPool:
    """Blocks 1 to ``num_gpu_blocks - 1``, for all groups; block 0 is the null block and belongs to nobody.

    A free block keeps its cached content until it is given away: the free queue is the engine's prefix cache, least
    recently used first. Ids only; the bytes are the runner's.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        if num_gpu_blocks < 2:
            raise ShapeError(f"num_gpu_blocks is {num_gpu_blocks}; block 0 is the null block, so give at least 2")
        self.num_gpu_blocks = num_gpu_blocks
        self._users = [0] * num_gpu_blocks
        """Requests that have the block in their table."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        """Exactly the blocks without users, the next to be given away first."""
        self._block_of: dict[CacheKey, int] = {}
        self._key_of: dict[int, CacheKey] = {}
        """The inverse of ``_block_of``."""
        self._given_away: set[int] = set()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        return len(self._block_of)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def allocate(self, count: int) -> list[int]:
        """Give away ``count`` free blocks; their old content is no longer found. Raises ``RuntimeError`` if too few are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} GPU blocks wanted, {len(self._free)} are free; ask `free_blocks` first")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
            self._forget(block)
        self._given_away.update(blocks)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """One more request uses these blocks, which were found with ``find``."""
        for block in block_ids:
            self._users[block] += 1
            self._free.pop(block, None)

    def release(self, block_ids: Sequence[int]) -> None:
        """A request uses these blocks of its table no more. Of those now free, the last one is given away first.

        So of a prefix that nobody extends, the tail goes before its head. Null blocks are passed over.
        """
        for block in reversed(block_ids):
            if block == NULL_BLOCK:
                continue
            if not self._users[block]:
                raise RuntimeError(f"GPU block {block} is released and nobody uses it")
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def cache(self, key: CacheKey, block_id: int) -> None:
        """The block holds what ``key`` stands for, final and complete. A key that another block holds keeps that one."""
        if key not in self._block_of:
            self._forget(block_id)
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def find(self, key: CacheKey) -> int | None:
        return self._block_of.get(key)

    def forget_all(self) -> None:
        """No content is found any more. Users keep their blocks."""
        self._block_of.clear()
        self._key_of.clear()

    def take_given_away(self) -> frozenset[int]:
        """Blocks that ``allocate`` gave away since the last call."""
        given, self._given_away = frozenset(self._given_away), set()
        return given

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]
