"""A runner without a model: what it writes, and what it says next, follows from the tokens by sha256 alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiering.connectors.reference.groups import CacheGroup, chunk_tokens, layout_of
from tiering.connectors.reference.pages import PagedMemory
from tiering.connectors.reference.request import Request
from tiering.connectors.reference.runner import Sample, Work, chunks
from tiering.connectors.requests import NULL_BLOCK, ScheduledRequest
from tiering.errors import ShapeError
from tiering.types import KVLayout, encode_fields

_TOKEN_BYTES_MAX = 32
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WrongBlock:
    """A block that a request read and that did not hold what its tokens stand for."""

    request_id: str
    group: int
    index: int
    """In the request's table."""
    block_id: int


class ContentRunner:
    """Stands in for a model where only the bytes matter: thousands of steps in seconds, every byte read is checked.

    The KV of a token, in each layer and rank, is a hash over the token and all before it; so a block is right if and only
    if it holds exactly the bytes of its tokens. A forward pass checks all that attention would read. What it computes
    follows from the bytes that it found: from wrong ones come wrong blocks and wrong tokens, as with a model, and
    ``wrong_blocks`` names the blocks of the last step that were wrong. ``expected_tokens`` says what is right.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_gpu_blocks: int,
        name: str = "content",
        blocks_per_slot: int = 1,
        ranks: int = 1,
        vocabulary: int = 1000,
    ) -> None:
        for group in groups:
            if not 1 <= group.token_bytes <= _TOKEN_BYTES_MAX:
                raise ShapeError(f"token_bytes is {group.token_bytes}; a hash gives 1 to {_TOKEN_BYTES_MAX}")
        self.memory = PagedMemory(groups, num_gpu_blocks=num_gpu_blocks, ranks=ranks)
        self.layout: KVLayout = layout_of(
            groups, model=name, revision="", dtype="uint8", ranks=ranks, blocks_per_slot=blocks_per_slot
        )
        self.weights = b""
        """Part of what everything is hashed from. Changed, every block written before is wrong, as with new weights."""
        self.wrong_blocks: list[WrongBlock] = []
        self._chunk_tokens = chunk_tokens(groups)
        self._vocabulary = vocabulary
        self._rows = [
            [self.memory.blocks(rank, number).numpy() for number in range(len(groups))] for rank in range(ranks)
        ]

    def forward(self, work: Work) -> dict[str, Sample]:
        self.wrong_blocks = []
        samples = {}
        for request, scheduled in work:
            end = scheduled.computed_tokens + scheduled.scheduled_tokens
            chain = self._chain(request.token_ids[:end], request.salt, request.lora)
            wrong = self._check(request, scheduled, chain)
            self.wrong_blocks += wrong
            if wrong:
                # As in a model: all that is computed from wrong KV is wrong.
                chain = [hashlib.sha256(b"wrong" + digest).digest() for digest in chain]
            for first, last in chunks(scheduled.computed_tokens, end, self._chunk_tokens):
                self._write(scheduled, chain, first, last)
            if end == request.num_tokens:
                samples[request.request_id] = Sample(self._next(chain[-1]))
        return samples

    def expected_tokens(self, prompt: Sequence[int], count: int, *, salt: bytes = b"", lora: bytes = b"") -> list[int]:
        """The ``count`` tokens that follow ``prompt`` if every block is right."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self._next(self._chain(tokens, salt, lora)[-1]))
        return tokens[len(prompt) :]

    def block_content(
        self,
        token_ids: Sequence[int],
        index: int,
        *,
        group: int = 0,
        rank: int = 0,
        salt: bytes = b"",
        lora: bytes = b"",
    ) -> Bytes:
        """The right bytes of GPU block ``index`` of a sequence that fills it: ``(block_bytes,)``."""
        tokens = self.memory.groups[group].tokens_per_block
        digests = self._chain(token_ids[: (index + 1) * tokens], salt, lora)[index * tokens :]
        return self._tokens_kv(group, rank, digests).reshape(-1)

    def _check(self, request: Request, scheduled: ScheduledRequest, chain: Sequence[bytes]) -> list[WrongBlock]:
        """Of the tokens computed before this step, those that attention reads from here on."""
        wrong = []
        for number, group in enumerate(self.memory.groups):
            for index in range(
                group.first_block(scheduled.computed_tokens), group.blocks_of(scheduled.computed_tokens)
            ):
                block = scheduled.block_ids[number][index]
                start = index * group.tokens_per_block
                digests = chain[start : min(start + group.tokens_per_block, scheduled.computed_tokens)]
                if block == NULL_BLOCK or not self._holds(number, block, digests):
                    wrong.append(WrongBlock(request.request_id, number, index, block))
        return wrong

    def _holds(self, number: int, block: int, digests: Sequence[bytes]) -> bool:
        return all(
            np.array_equal(self._pages(rank, number)[block, :, : len(digests)], self._tokens_kv(number, rank, digests))
            for rank in range(self.memory.ranks)
        )

    def _write(self, scheduled: ScheduledRequest, chain: Sequence[bytes], first: int, last: int) -> None:
        for number, group in enumerate(self.memory.groups):
            positions = np.arange(first, last)
            blocks = np.array(scheduled.block_ids[number])[positions // group.tokens_per_block]
            for rank in range(self.memory.ranks):
                kv = self._tokens_kv(number, rank, chain[first:last])
                self._pages(rank, number)[blocks, :, positions % group.tokens_per_block] = kv.transpose(1, 0, 2)

    def _pages(self, rank: int, number: int) -> Bytes:
        """``(blocks, layers, tokens, token_bytes)``, an alias."""
        group = self.memory.groups[number]
        rows = self._rows[rank][number]
        shape = (len(rows), len(group.layers), group.tokens_per_block, group.token_bytes)
        strides = (rows.strides[0], group.page_bytes, group.token_bytes, 1)
        return np.lib.stride_tricks.as_strided(rows, shape, strides)

    def _tokens_kv(self, number: int, rank: int, digests: Sequence[bytes]) -> Bytes:
        """``(layers, tokens, token_bytes)``."""
        group = self.memory.groups[number]
        raw = b"".join(
            hashlib.sha256(digest + bytes((number, layer, rank))).digest()[: group.token_bytes]
            for layer in group.layers
            for digest in digests
        )
        return np.frombuffer(raw, np.uint8).reshape(len(group.layers), len(digests), group.token_bytes)

    def _next(self, digest: bytes) -> int:
        return int.from_bytes(digest[:8], "big") % self._vocabulary

    def _chain(self, token_ids: Sequence[int], salt: bytes, lora: bytes) -> list[bytes]:
        """For each token a digest of it and of all before it."""
        digest = hashlib.sha256(encode_fields("content", self.weights, salt, lora)).digest()
        out = []
        for token in token_ids:
            digest = hashlib.sha256(digest + token.to_bytes(4, "big")).digest()
            out.append(digest)
        return out
