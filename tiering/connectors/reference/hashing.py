"""Chained content hashes of a request's tokens: the names under which its blocks are cached and offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.keys import DIGEST_BYTES, block_keys
from tiering.types import KVLayout

_GROUP_0 = bytes(4)


class BlockHasher:
    """Hashes of full runs of ``tokens_per_hash`` tokens, each over all tokens before it, 32 bytes.

    Seeded from the layout's identity, the salt and the LoRA, so equal in every process. Where a group's block is
    ``tokens_per_hash`` long, hash + group number is the key that ``tiering.block_keys`` gives.
    """

    def __init__(self, layout: KVLayout, tokens_per_hash: int) -> None:
        self.tokens_per_hash = tokens_per_hash
        self._chain = KVLayout.uniform(
            model=layout.model,
            revision=layout.revision,
            dtype=layout.dtype,
            tokens_per_block=tokens_per_hash,
            block_bytes=1,
        )

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], *, salt: bytes, lora: bytes) -> None:
        """Append to ``hashes``, which cover the head of ``token_ids``, those of the tokens behind it that fill a run."""
        start = len(hashes) * self.tokens_per_hash
        if len(token_ids) - start < self.tokens_per_hash:
            return
        parent = hashes[-1] + _GROUP_0 if hashes else None
        keys = block_keys(token_ids[start:], self._chain, salt=salt, lora=lora, parent=parent)
        hashes += [key[:DIGEST_BYTES] for key in keys]
