"""What keeps blocks apart on a tier that everybody uses: one field changed at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.chaos.load import config, content
from tests.sharing.conftest import Medium
from tiering import KVLayout, TieringOffloadingManager, block_keys
from tiering.types import Group

BLOCKS = 4
TOKENS = list(range(64))
SIZE = 4096


@dataclass(frozen=True)
class Speaker:
    """An engine with its model, its weights, its tenant and its adapter."""

    kind: str = "full"
    tokens_per_block: int = 16
    block_bytes: int = SIZE
    epoch: str = "0"
    salt: bytes = b""
    lora: bytes = b""
    model: dict[str, Any] = field(default_factory=lambda: {"model": "m", "revision": "1", "dtype": "bfloat16"})

    @property
    def layout(self) -> KVLayout:
        return KVLayout([Group(self.kind, self.tokens_per_block, self.block_bytes)], **self.model)

    @property
    def keys(self) -> list[bytes]:
        """Of the same tokens, whoever speaks."""
        return block_keys(TOKENS, self.layout, salt=self.salt, lora=self.lora)[:BLOCKS]

    def manager(self, tier: dict[str, Any]) -> TieringOffloadingManager:
        return TieringOffloadingManager(config(tier), self.layout, epoch=self.epoch)

    def rows(self, keys: list[bytes], tag: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.stack([content(tag + key, self.block_bytes) for key in keys])


PLAIN = Speaker()
CHANGES: dict[str, Speaker] = {
    "model": replace(PLAIN, model={**PLAIN.model, "model": "n"}),
    "revision": replace(PLAIN, model={**PLAIN.model, "revision": "2"}),
    "dtype": replace(PLAIN, model={**PLAIN.model, "dtype": "float16"}),
    "ranks": replace(PLAIN, model={**PLAIN.model, "ranks": 2}),
    "kind": replace(PLAIN, kind="sliding_window(64)"),
    "tokens_per_block": replace(PLAIN, tokens_per_block=8),
    "block_bytes": replace(PLAIN, block_bytes=2 * SIZE),
    "epoch": replace(PLAIN, epoch="1"),
}
TENANTS = {"salt": replace(PLAIN, salt=b"t"), "lora": replace(PLAIN, lora=b"l"), "both": replace(PLAIN, salt=b"tl")}


async def hits(manager: TieringOffloadingManager, who: Speaker, keys: list[bytes], tag: bytes) -> int:
    """Blocks that were loaded, all of them with the bytes that ``who`` stored under ``tag``."""
    assert (await manager.match(keys)).blocks in (0, len(keys))
    out = np.zeros((len(keys), who.block_bytes), np.uint8)
    n = await manager.load(keys, out)
    assert np.array_equal(out[:n], who.rows(keys, tag)[:n])
    assert not out[n:].any()
    return n


@pytest.mark.parametrize("field_name", CHANGES)
async def test_namespace_too_narrow_never_one_field_is_a_clean_miss(medium: Medium, field_name: str) -> None:
    """rows 14, 15 and 16: by its own keys and by the very same keys another speaker misses, damages nothing, and can
    store under these keys beside the first one's blocks."""
    other, keys = CHANGES[field_name], PLAIN.keys
    async with PLAIN.manager(medium.here) as manager:
        await manager.store(keys, PLAIN.rows(keys, b"plain"))
        assert (await manager.flush()).lost == 0
    async with other.manager(medium.there) as manager:
        assert await hits(manager, other, other.keys, b"other") == 0
        assert await hits(manager, other, keys, b"other") == 0
        await manager.store(keys, other.rows(keys, b"other"))
        assert (await manager.flush()).lost == 0
        assert manager.stats()["corrupt_blocks"] == 0
    for who, tag in ((PLAIN, b"plain"), (other, b"other")):
        async with who.manager(medium.here) as manager:
            assert await hits(manager, who, keys, tag) == BLOCKS
            assert manager.stats()["corrupt_blocks"] == 0


async def test_namespace_too_narrow_never_tenants_and_adapters_miss_by_their_keys(medium: Medium) -> None:
    """rows 14 and 15: salt and LoRA are part of the key; no two of the four share one."""
    everybody = {"plain": PLAIN, **TENANTS}
    assert len({key for who in everybody.values() for key in who.keys}) == BLOCKS * len(everybody)
    async with PLAIN.manager(medium.here) as manager:
        await manager.store(PLAIN.keys, PLAIN.rows(PLAIN.keys, b""))
        assert (await manager.flush()).lost == 0
    async with PLAIN.manager(medium.there) as manager:
        for name, who in everybody.items():
            assert await hits(manager, who, who.keys, b"") == (BLOCKS if name == "plain" else 0), name
