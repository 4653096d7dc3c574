"""Tokens, engine blocks and our blocks: which blocks of a group a prefix needs, and which part of the GPU's table they are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tiering.connectors.requests import NULL_BLOCK
from tiering.errors import ShapeError
from tiering.types import BlockKey, KVLayout

KEY_GROUP_BYTES = 4
HASH_BYTES_MAX = 32


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group of layers. A block of ours spans ``span`` blocks of the engine's."""

    group: int
    tokens_per_block: int
    span: int
    window_tokens: int | None
    """Tokens that its attention reaches back, itself included; None: all."""
    recurrent: bool

    @property
    def windowed(self) -> bool:
        """A prefix needs its end alone."""
        return self.recurrent or self.window_tokens is not None

    @property
    def gpu_tokens_per_block(self) -> int:
        return self.tokens_per_block // self.span

    def first_needed(self, tokens: int) -> int:
        """The first block that the token behind a prefix of ``tokens`` (whole blocks) needs."""
        if self.recurrent:
            return max(0, tokens // self.tokens_per_block - 1)
        if self.window_tokens is None:
            return 0
        return max(0, tokens - self.window_tokens + 1) // self.tokens_per_block

    def to_load(self, computed_tokens: int, tokens: int) -> range:
        """Blocks to load so that a prefix of ``computed_tokens`` on the GPU becomes one of ``tokens``."""
        end = tokens // self.tokens_per_block
        return range(min(end, max(self.first_needed(tokens), computed_tokens // self.tokens_per_block)), end)

    def gpu_blocks(self, table: Sequence[int], block: int) -> tuple[int, ...] | None:
        """The engine's blocks of one of ours; None if some is not there: a partly null span is never stored."""
        ids = tuple(table[block * self.span : (block + 1) * self.span])
        return None if len(ids) < self.span or NULL_BLOCK in ids else ids


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of a layout under one engine."""

    groups: tuple[GroupGeometry, ...]
    tokens_per_hash: int

    @staticmethod
    def of(layout: KVLayout, gpu_tokens_per_block: Sequence[int], tokens_per_hash: int) -> Geometry:
        """Raises ``ShapeError`` if the layout's blocks are no multiples of the engine's."""
        if len(gpu_tokens_per_block) != len(layout.groups):
            raise ShapeError(
                f"gpu_tokens_per_block names {len(gpu_tokens_per_block)} groups; the layout has {len(layout.groups)}"
            )
        groups = []
        for index, (group, gpu_tokens) in enumerate(zip(layout.groups, gpu_tokens_per_block, strict=True)):
            tokens = group.tokens_per_block
            for unit, what in ((gpu_tokens, f"gpu_tokens_per_block[{index}]"), (tokens_per_hash, "tokens_per_hash")):
                if unit < 1 or tokens % unit:
                    raise ShapeError(
                        f"{what} is {unit}; group {index}'s tokens_per_block {tokens} is no multiple of it"
                    )
            window = re.fullmatch(r"sliding_window\((\d+)\)", group.kind)
            reach = int(window[1]) if window else None
            groups.append(GroupGeometry(index, tokens, tokens // gpu_tokens, reach, group.kind == "recurrent"))
        return Geometry(tuple(groups), tokens_per_hash)

    @property
    def step_tokens(self) -> int:
        """A hit that every group can serve is a multiple of this."""
        return math.lcm(*(group.tokens_per_block for group in self.groups))

    def extend_keys(self, keys: list[BlockKey], group: GroupGeometry, block_hashes: Sequence[bytes]) -> None:
        """Append the keys of the blocks that ``block_hashes`` complete: the hash of a block's last token, and the group."""
        per_block = group.tokens_per_block // self.tokens_per_hash
        suffix = group.group.to_bytes(KEY_GROUP_BYTES, "big")
        for block in range(len(keys), len(block_hashes) // per_block):
            content = block_hashes[(block + 1) * per_block - 1]
            if not 0 < len(content) <= HASH_BYTES_MAX:
                raise ShapeError(f"block_hashes: a hash is 1 to {HASH_BYTES_MAX} bytes; got {len(content)}")
            keys.append(bytes(content) + suffix)
