"""Tokens, blocks and windows, against the definition of what a token's attention reads."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering import Group, KVLayout, ShapeError
from tiering.connectors.geometry import Geometry, GroupGeometry
from tiering.connectors.requests import NULL_BLOCK


def _geometry(*kinds: tuple[str, int], gpu_tokens: int = 4, tokens_per_hash: int = 4) -> Geometry:
    layout = KVLayout(groups=[Group(kind, tokens, 64) for kind, tokens in kinds], model="g")
    return Geometry.of(layout, [gpu_tokens] * len(kinds), tokens_per_hash)


def _read(kind: str, tokens: int, size: int) -> set[int]:
    """Blocks that the computation of the token behind a prefix of ``tokens`` reads."""
    if kind == "recurrent":
        return {tokens // size - 1} if tokens else set()
    reach = int(kind[15:-1]) if kind.startswith("sliding_window") else tokens + 1
    # A window of n tokens: the token itself and the n - 1 before it.
    return {position // size for position in range(max(0, tokens - reach + 1), tokens)}


kinds = st.one_of(st.just("full"), st.just("recurrent"), st.integers(1, 40).map("sliding_window({})".format))


@given(kind=kinds, span=st.integers(1, 4), computed_blocks=st.integers(0, 60), blocks=st.integers(0, 20))
def test_what_is_loaded_is_what_is_read_and_not_on_the_gpu(
    kind: str, span: int, computed_blocks: int, blocks: int
) -> None:
    """Row 32: just the window, and just what the GPU lacks."""
    size = 4 * span
    (group,) = _geometry((kind, size)).groups
    computed, tokens = computed_blocks * 4, blocks * size
    read = _read(kind, tokens, size)
    if read:  # a window of one token reads that token alone
        assert group.first_needed(tokens) == min(read)
    if tokens > computed:
        assert set(group.to_load(computed, tokens)) == {block for block in read if (block + 1) * size > computed}
    else:
        assert len(group.to_load(computed, tokens)) == 0


@given(table=st.lists(st.integers(0, 3), max_size=12), span=st.integers(1, 4), block=st.integers(0, 6))
def test_a_block_is_there_if_all_of_its_span_is(table: list[int], span: int, block: int) -> None:
    (group,) = _geometry(("full", 4 * span)).groups
    positions = [block * span + n for n in range(span)]
    there = all(position < len(table) and table[position] != NULL_BLOCK for position in positions)
    assert group.gpu_blocks(table, block) == (tuple(table[position] for position in positions) if there else None)


@pytest.mark.parametrize("tokens_per_hash", [2, 4])
def test_keys_are_the_hash_of_a_blocks_last_token_and_the_group(tokens_per_hash: int) -> None:
    geometry = _geometry(("full", 4), ("recurrent", 12), tokens_per_hash=tokens_per_hash)
    hashes = [hashlib.sha256(bytes([n])).digest() for n in range(20)]
    keys: list[list[bytes]] = [[], []]
    for known in (0, 1, 5, 6, 13, 20, 20):
        for group, part in zip(geometry.groups, keys, strict=True):
            geometry.extend_keys(part, group, hashes[:known])
            per_block = group.tokens_per_block // tokens_per_hash
            last = range(per_block - 1, known, per_block)
            assert part == [hashes[n] + bytes([0, 0, 0, group.group]) for n in last]


@pytest.mark.parametrize("content", [b"", bytes(33)])
def test_a_hash_that_makes_no_key_is_an_error(content: bytes) -> None:
    geometry = _geometry(("full", 4))
    with pytest.raises(ShapeError, match="1 to 32 bytes"):
        geometry.extend_keys([], geometry.groups[0], [content])


def test_step_tokens_is_what_all_groups_share() -> None:
    assert _geometry(("full", 8), ("sliding_window(9)", 12), ("recurrent", 4)).step_tokens == 24


@pytest.mark.parametrize(
    ("gpu_tokens", "tokens_per_hash", "named"),
    [
        ([4], 4, "2"),
        ([4, 4, 4], 4, "2"),
        ([3, 4], 4, r"gpu_tokens_per_block\[0\]"),
        ([4, 0], 4, r"\[1\]"),
        ([4, 4], 3, "tokens_per_hash"),
    ],
)
def test_blocks_that_are_no_multiples_are_refused(gpu_tokens: list[int], tokens_per_hash: int, named: str) -> None:
    layout = KVLayout(groups=[Group("full", 4, 64), Group("recurrent", 8, 64)], model="g")
    with pytest.raises(ShapeError, match=named):
        Geometry.of(layout, gpu_tokens, tokens_per_hash)


def test_a_group_knows_its_own_engine_blocks() -> None:
    group: GroupGeometry = _geometry(("sliding_window(10)", 12)).groups[0]
    assert (group.span, group.gpu_tokens_per_block, group.window_tokens, group.windowed) == (3, 4, 10, True)
