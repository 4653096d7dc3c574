"""What the engine knows of a model's attention: its groups of layers, and how much of the past each still reads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tiering.errors import ShapeError
from tiering.types import Group, KVLayout

_WINDOW = re.compile(r"sliding_window\(([0-9]+)\)")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that attend alike. Their KV of ``tokens_per_block`` tokens is one GPU block, one page a layer."""

    kind: str
    """As ``tiering.Group.kind``."""
    tokens_per_block: int
    layers: tuple[int, ...]
    """Numbers of the model's layers."""
    token_bytes: int
    """KV of one token in one layer, on one rank."""

    @property
    def page_bytes(self) -> int:
        return self.tokens_per_block * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """One GPU block on one rank."""
        return len(self.layers) * self.page_bytes

    @property
    def past_tokens(self) -> int | None:
        """Tokens before it that the next token's computation reads. None: all of them."""
        if window := _WINDOW.fullmatch(self.kind):
            return int(window[1]) - 1
        # A recurrent layer's state lies in the block that ends where the state was taken.
        return self.tokens_per_block if self.kind == "recurrent" else None

    def first_block(self, computed_tokens: int) -> int:
        """Index of the first block that is still read once ``computed_tokens`` are computed."""
        if self.past_tokens is None:
            return 0
        return max(0, computed_tokens - self.past_tokens) // self.tokens_per_block

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold the first ``tokens`` tokens, the last one perhaps in part."""
        return -(-tokens // self.tokens_per_block)


def chunk_tokens(groups: Sequence[CacheGroup]) -> int:
    """The common multiple of the groups' block sizes: reuse begins, and a forward pass's chunk ends, at its multiples."""
    return math.lcm(*(group.tokens_per_block for group in groups))


def layout_of(
    groups: Sequence[CacheGroup], *, model: str, revision: str, dtype: str, ranks: int, blocks_per_slot: int
) -> KVLayout:
    """What the manager is told: one ``Group`` an engine group, each block ``blocks_per_slot`` GPU blocks of all ranks."""
    if blocks_per_slot < 1:
        raise ShapeError(f"blocks_per_slot is {blocks_per_slot}; it must be at least 1")
    sized = [
        Group(group.kind, group.tokens_per_block * blocks_per_slot, group.block_bytes * blocks_per_slot * ranks)
        for group in groups
    ]
    return KVLayout(sized, model=model, revision=revision, dtype=dtype, ranks=ranks)
