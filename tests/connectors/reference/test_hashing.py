"""Block hashes: the chain that the documents describe, grown token by token."""

from __future__ import annotations

import hashlib

from tiering import KVLayout
from tiering.connectors.reference.hashing import BlockHasher
from tiering.types import encode_fields

LAYOUT = KVLayout.uniform(model="m", revision="r", dtype="float16", tokens_per_block=16, block_bytes=64)


def chain(tokens: list[int], salt: bytes, lora: bytes) -> list[bytes]:
    digest = hashlib.sha256(
        encode_fields("kvtiering block key", encode_fields("m", "r", "float16", 4), salt, lora)
    ).digest()
    out = []
    for start in range(0, len(tokens) // 4 * 4, 4):
        digest = hashlib.sha256(digest + b"".join(t.to_bytes(4, "little") for t in tokens[start : start + 4])).digest()
        out.append(digest)
    return out


def test_hashes_grow_with_the_tokens_and_never_change() -> None:
    hasher = BlockHasher(LAYOUT, tokens_per_hash=4)
    tokens = list(range(100, 123))
    hashes: list[bytes] = []
    for count in range(len(tokens) + 1):
        hasher.extend(hashes, tokens[:count], salt=b"s", lora=b"l")
        assert hashes == chain(tokens[:count], b"s", b"l")


def test_salt_lora_and_identity_are_part_of_every_hash() -> None:
    tokens = list(range(8))
    seen = set()
    for layout in (
        LAYOUT,
        KVLayout.uniform(model="n", revision="r", dtype="float16", tokens_per_block=16, block_bytes=64),
    ):
        for salt, lora in ((b"", b""), (b"a", b""), (b"", b"a")):
            hashes: list[bytes] = []
            BlockHasher(layout, tokens_per_hash=4).extend(hashes, tokens, salt=salt, lora=lora)
            seen |= set(hashes)
    assert len(seen) == 12
