from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ShapeError
from tiering.keys import block_keys
from tiering.types import Group, KVLayout, sliding_window

LAYOUT = KVLayout.uniform(model="demo", tokens_per_block=4, block_bytes=64)
TOKENS = [0, 1, 2, 3, 1 << 31, (1 << 32) - 1, 7, 7, 9, 10, 11, 12, 13]


def _field(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack(">Q", len(body)) + body


def _text(value: str) -> bytes:
    return _field(b"s", value.encode())


def _by_hand(
    tokens: Sequence[int],
    *,
    model: str = "demo",
    revision: str = "",
    dtype: str = "uint8",
    tokens_per_block: int = 4,
    salt: bytes = b"",
    lora: bytes = b"",
    group: int = 0,
) -> list[bytes]:
    layout = _text(model) + _text(revision) + _text(dtype)
    layout += _field(b"i", bytes(8) + struct.pack(">q", tokens_per_block))
    seed = _text("kvtiering block key") + _field(b"b", layout) + _field(b"b", salt) + _field(b"b", lora)
    digest = hashlib.sha256(seed).digest()
    keys = []
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        block = tokens[end - tokens_per_block : end]
        digest = hashlib.sha256(digest + struct.pack(f"<{tokens_per_block}I", *block)).digest()
        keys.append(digest + struct.pack(">I", group))
    return keys


def test_keys_are_the_documented_chain() -> None:
    keys = block_keys(TOKENS, LAYOUT)
    assert keys == _by_hand(TOKENS)
    assert len(keys) == 3
    assert all(len(key) == 36 for key in keys)


def test_salt_lora_and_group_may_be_positional() -> None:
    layout = KVLayout([Group("full", 4, 64), Group(sliding_window(8), 4, 64)], model="demo")
    assert block_keys(TOKENS, layout, b"s", b"l", 1) == _by_hand(TOKENS, salt=b"s", lora=b"l", group=1)
    assert block_keys(TOKENS, layout, salt=b"s", lora=b"l", group=1) == block_keys(TOKENS, layout, b"s", b"l", 1)


@pytest.mark.parametrize("count", range(14))
def test_only_full_blocks_have_a_key(count: int) -> None:
    assert block_keys(TOKENS[:count], LAYOUT) == _by_hand(TOKENS)[: count // 4]


class _Lazy(Sequence[int]):
    """A sequence that is neither list nor tuple, as engines have them."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return TOKENS[index]

    def __len__(self) -> int:
        return len(TOKENS)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda ids: _Lazy(),
        lambda ids: [np.uint32(token) for token in ids],
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.repeat(np.array(ids), 2)[::2],
        lambda ids: torch.tensor(ids, dtype=torch.int64),
        lambda ids: torch.tensor(ids, dtype=torch.uint32),
        lambda ids: torch.tensor([ids, ids]).T[:, 1],
    ],
)
def test_every_integer_container_gives_the_same_keys(make: Callable[[list[int]], Any]) -> None:
    assert block_keys(make(TOKENS), LAYOUT) == _by_hand(TOKENS)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
def test_narrow_integer_types_are_widened(dtype: type) -> None:
    small = [1, 2, 3, 100, 5, 6, 7, 8]
    assert block_keys(np.array(small, dtype), LAYOUT) == _by_hand(small)
    assert block_keys(range(8), LAYOUT) == _by_hand(range(8))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([1, 2, -3], r"token_ids\[2\] is -3"),
        ([1, 1 << 32], r"token_ids\[1\] is 4294967296"),
        ([1, 1 << 70], r"token_ids\[1\] is 1180591620717411303424"),
        ([1, True], r"token_ids\[1\] is True"),
        ([1, 2.0], r"token_ids\[1\] is 2.0"),
        ([1, "2"], r"token_ids\[1\] is '2'"),
        ([1, None], r"token_ids\[1\] is None"),
        ([[1, 2]], r"token_ids\[0\] is \[1, 2\]"),
        ([1, torch.tensor(2.5)], r"token_ids\[1\] is tensor"),
        (np.array([1, -1, -2]), r"token_ids\[1\] is -1"),
        (np.array([5, 1 << 32]), r"token_ids\[1\] is 4294967296"),
        (np.array([0, (1 << 64) - 1], np.uint64), r"token_ids\[1\] is 18446744073709551615"),
        (torch.tensor([0, 0, -9]), r"token_ids\[2\] is -9"),
        (np.zeros((2, 4), np.int32), r"shape \(2, 4\)"),
        (np.array(3), r"shape \(\)"),
        (torch.zeros((1, 4), dtype=torch.int32), r"shape \(1, 4\)"),
        (np.zeros(4), "array of float64"),
        (np.zeros(4, bool), "array of bool"),
        (torch.zeros(4), r"tensor of torch.float32"),
        (torch.zeros(4, dtype=torch.bfloat16), r"tensor of torch.bfloat16"),
        (torch.zeros(4, dtype=torch.bool), "array of bool"),
        (b"abcd", "is a bytes"),
        ("abcd", "is a str"),
        ({1, 2, 3, 4}, "is a set"),
        (7, "is a int"),
    ],
)
def test_what_is_no_token_is_refused_by_place(bad: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        block_keys(bad, LAYOUT)


@pytest.mark.parametrize("group", [-1, 1])
def test_a_group_that_the_layout_has_not_is_refused(group: int) -> None:
    with pytest.raises(ShapeError, match=f"group is {group}"):
        block_keys(TOKENS, LAYOUT, group=group)


@pytest.mark.parametrize("name", ["salt", "lora"])
def test_text_for_a_salt_is_refused(name: str) -> None:
    text: Any = {name: "tenant"}
    with pytest.raises(ShapeError, match=f"{name} is 'tenant'; pass bytes"):
        block_keys(TOKENS, LAYOUT, **text)


def test_namespace_too_narrow() -> None:
    """FAULTS row 14: every field that may make the bytes differ changes every key, alone, and no two fields can swap."""
    variants = {
        "base": block_keys(TOKENS, LAYOUT),
        "model": block_keys(TOKENS, KVLayout([Group("full", 4, 64)], model="demo2")),
        "revision": block_keys(TOKENS, KVLayout([Group("full", 4, 64)], model="demo", revision="r")),
        "dtype": block_keys(TOKENS, KVLayout([Group("full", 4, 64)], model="demo", dtype="float16")),
        "model and dtype shifted": block_keys(TOKENS, KVLayout([Group("full", 4, 64)], model="demou", dtype="int8")),
        "tokens_per_block": block_keys(TOKENS, KVLayout([Group("full", 2, 64)], model="demo")),
        "group": block_keys(TOKENS, KVLayout([Group("full", 4, 64)] * 2, model="demo"), group=1),
        "salt": block_keys(TOKENS, LAYOUT, salt=b"a"),
        "lora": block_keys(TOKENS, LAYOUT, lora=b"a"),
        "salt ab": block_keys(TOKENS, LAYOUT, salt=b"ab"),
        "salt a, lora b": block_keys(TOKENS, LAYOUT, salt=b"a", lora=b"b"),
        "lora ab": block_keys(TOKENS, LAYOUT, lora=b"ab"),
        "salt zero": block_keys(TOKENS, LAYOUT, salt=b"\0"),
        "first token": block_keys([99, *TOKENS[1:]], LAYOUT),
    }
    every_key = [key for keys in variants.values() for key in keys]
    assert len(set(every_key)) == len(every_key)
    assert variants["dtype"] == _by_hand(TOKENS, dtype="float16")
    assert variants["revision"] == _by_hand(TOKENS, revision="r")
    assert variants["tokens_per_block"] == _by_hand(TOKENS, tokens_per_block=2)


def test_a_changed_token_changes_its_block_and_all_behind_it() -> None:
    base = block_keys(TOKENS, LAYOUT)
    for position in range(12):
        changed = block_keys([*TOKENS[:position], 55, *TOKENS[position + 1 :]], LAYOUT)
        assert changed[: position // 4] == base[: position // 4]
        assert not set(changed[position // 4 :]) & set(base)


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.integers(1, 5), st.integers(0, 40), st.binary(max_size=3)
)
def test_a_growing_conversation_hashes_its_new_tokens_alone(
    tokens: list[int], tokens_per_block: int, blocks: int, salt: bytes
) -> None:
    layout = KVLayout.uniform(model="demo", tokens_per_block=tokens_per_block, block_bytes=64)
    whole = block_keys(tokens, layout, salt=salt)
    assert whole == _by_hand(tokens, tokens_per_block=tokens_per_block, salt=salt)
    known = min(blocks, len(whole))
    parent = whole[known - 1] if known else None
    grown = block_keys(tokens[known * tokens_per_block :], layout, salt=salt, parent=parent)
    assert whole[:known] + grown == whole


@pytest.mark.parametrize("parent", [b"", bytes(32), bytes(35) + b"\1", bytes(37)])
def test_a_parent_that_is_no_key_of_this_group_is_refused(parent: bytes) -> None:
    with pytest.raises(ShapeError, match=r"parent .* group 0"):
        block_keys(TOKENS, LAYOUT, parent=parent)


def test_keys_differ_between_processes() -> None:
    """FAULTS row 15: the hash seed of a process has no say."""
    script = (
        "from tiering.keys import block_keys; from tiering.types import KVLayout\n"
        "layout = KVLayout.uniform(model='demo', tokens_per_block=4, block_bytes=64)\n"
        "print(hash('x'), b''.join(block_keys(list(range(64)), layout, salt=b's', lora=b'l')).hex())"
    )
    command = [sys.executable, "-c", script]
    started = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    try:
        answers = [process.communicate(timeout=60)[0].split() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert answers[0][0] != answers[1][0]
    expected = b"".join(_by_hand(range(64), salt=b"s", lora=b"l")).hex()
    assert answers[0][1] == answers[1][1] == expected
