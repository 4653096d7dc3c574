"""Which GPU blocks a request has: prefix search, allocation and release over all groups at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiering.connectors.reference.blocks import BlockPool, CacheKey
from tiering.connectors.reference.groups import CacheGroup, chunk_tokens
from tiering.connectors.reference.request import Request
from tiering.connectors.requests import NULL_BLOCK
from tiering.errors import ShapeError


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest prefix of a request that the engine's own cache can serve. Nothing is held yet."""

    tokens: int
    blocks: tuple[list[int], ...]
    """By group; ``NULL_BLOCK`` where no token behind the prefix looks any more."""


class BlockTables:
    """Gives requests their blocks and takes them back. A call that returns False has changed nothing."""

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, *, tokens_per_hash: int) -> None:
        for number, group in enumerate(groups):
            if group.tokens_per_block % tokens_per_hash:
                raise ShapeError(
                    f"group {number} has {group.tokens_per_block} tokens a block, no multiple of tokens_per_hash "
                    f"{tokens_per_hash}"
                )
        self.groups = tuple(groups)
        self.pool = pool
        self.chunk_tokens = chunk_tokens(groups)
        self._tokens_per_hash = tokens_per_hash

    def blocks_needed_alone(self, tokens: int, step_tokens: int) -> int:
        """The most blocks that a request of ``tokens`` ever needs at once, computed ``step_tokens`` or fewer at a time."""
        total = 0
        for group in self.groups:
            needed = group.blocks_of(tokens)
            if group.past_tokens is not None:
                # One more, as neither end of the window need lie at a block's border.
                needed = min(needed, group.blocks_of(group.past_tokens + step_tokens) + 1)
            total += needed
        return total

    def find_cached(self, request: Request) -> CachedPrefix:
        """At least one token is left to compute: its logits are the next token's."""
        bound = request.num_tokens - 1
        for number, group in enumerate(self.groups):
            if group.past_tokens is None:
                run = 0
                while (run + 1) * group.tokens_per_block <= bound and self._find(request, number, run) is not None:
                    run += 1
                bound = min(bound, run * group.tokens_per_block)
        for tokens in range(bound // self.chunk_tokens * self.chunk_tokens, 0, -self.chunk_tokens):
            found = [self._cached_blocks(request, number, tokens) for number in range(len(self.groups))]
            blocks = tuple(table for table in found if table is not None)
            if len(blocks) == len(self.groups):
                return CachedPrefix(tokens, blocks)
        return CachedPrefix(0, tuple([] for _ in self.groups))

    def block_ids(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Its blocks by group; a copy, as the tables grow."""
        return tuple(tuple(table) for table in request.blocks) or tuple(() for _ in self.groups)

    def admit(self, request: Request, cached: CachedPrefix, computed_tokens: int, new_tokens: int) -> bool:
        """First blocks: the cached ones, and room for what is loaded behind them and for ``new_tokens`` to compute.

        ``computed_tokens`` counts the cached prefix and what a load will bring.
        """
        tables, shared = [], []
        for group, blocks in zip(self.groups, cached.blocks, strict=True):
            first = group.first_block(computed_tokens)
            table = [NULL_BLOCK] * min(first, len(blocks)) + blocks[first:]
            shared += [block for block in table if block != NULL_BLOCK]
            tables.append(table + [NULL_BLOCK] * (first - len(table)))
        wanted = self._missing(tables, computed_tokens + new_tokens)
        if sum(wanted) > self.pool.free_blocks - sum(self.pool.is_free(block) for block in shared):
            return False
        self.pool.share(shared)
        request.blocks = tuple(tables)
        request.cached_blocks = [len(blocks) for blocks in cached.blocks]
        request.computed_tokens = computed_tokens
        self._grow(request, wanted)
        return True

    def extend(self, request: Request, new_tokens: int) -> bool:
        """Room for ``new_tokens`` more. Blocks that no token reads any more are given back first, whatever is returned."""
        for group, table in zip(self.groups, request.blocks, strict=True):
            first = min(group.first_block(request.computed_tokens), len(table))
            self.pool.release(table[:first])
            table[:first] = [NULL_BLOCK] * first
        wanted = self._missing(request.blocks, request.computed_tokens + new_tokens)
        if sum(wanted) > self.pool.free_blocks:
            return False
        self._grow(request, wanted)
        return True

    def release(self, request: Request) -> None:
        """Give back all its blocks; those that were cached are found until they are given away."""
        for table in request.blocks:
            self.pool.release(table)
        request.blocks = ()
        request.cached_blocks = []
        request.computed_tokens = 0

    def cache(self, request: Request) -> None:
        """Its full blocks below ``computed_tokens`` are final: from now on they serve other requests too."""
        for number, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
            full = request.computed_tokens // group.tokens_per_block
            for index in range(request.cached_blocks[number], full):
                if table[index] != NULL_BLOCK:
                    self.pool.cache(self._key(request, number, index), table[index])
            request.cached_blocks[number] = max(full, request.cached_blocks[number])

    def valid_tokens(self, request: Request, invalid_block_ids: Collection[int]) -> int:
        """How many of its computed tokens remain a prefix that the request can go on from without these blocks."""
        tokens = request.computed_tokens
        for group, table in zip(self.groups, request.blocks, strict=True):
            bad = (index for index, block in enumerate(table) if block in invalid_block_ids)
            tokens = min(tokens, next(bad, len(table)) * group.tokens_per_block)
        if tokens == request.computed_tokens:
            return tokens
        # Further back a window reads blocks that this request never had, or gave back.
        for start in range(tokens // self.chunk_tokens * self.chunk_tokens, 0, -self.chunk_tokens):
            if all(
                self._has_past(group, table, start) for group, table in zip(self.groups, request.blocks, strict=True)
            ):
                return start
        return 0

    @staticmethod
    def _has_past(group: CacheGroup, table: Sequence[int], tokens: int) -> bool:
        return NULL_BLOCK not in table[group.first_block(tokens) : group.blocks_of(tokens)]

    def _cached_blocks(self, request: Request, number: int, tokens: int) -> list[int] | None:
        group = self.groups[number]
        first = group.first_block(tokens)
        blocks = [NULL_BLOCK] * first
        for index in range(first, tokens // group.tokens_per_block):
            block = self._find(request, number, index)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _find(self, request: Request, number: int, index: int) -> int | None:
        return self.pool.find(self._key(request, number, index))

    def _key(self, request: Request, number: int, index: int) -> CacheKey:
        last_hash = (index + 1) * self.groups[number].tokens_per_block // self._tokens_per_hash - 1
        return request.block_hashes[last_hash], number

    def _missing(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """By group: blocks to add so that the tables cover ``tokens``."""
        pairs = zip(self.groups, tables, strict=True)
        return [max(0, group.blocks_of(tokens) - len(table)) for group, table in pairs]

    def _grow(self, request: Request, wanted: Sequence[int]) -> None:
        for table, count in zip(request.blocks, wanted, strict=True):
            table += self.pool.allocate(count)
