"""The bounded device pool: who is evicted, and what a held row is worth."""

from __future__ import annotations

import pytest

from tiering.cli.demo.pool import DevicePool


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_leading_run_is_found_and_a_gap_ends_it() -> None:
    pool = DevicePool(4, 8)
    rows = pool.hold_new(keys("a", "b", "d"))
    assert pool.hold_prefix(keys("a", "b", "c", "d")) == rows[:2]


def test_the_tail_of_the_least_recently_used_sequence_goes_first() -> None:
    pool = DevicePool(4, 8)
    pool.hold_new(keys("s", "a1", "a2"))
    pool.release(keys("s", "a1", "a2"))
    pool.hold_new(keys("b1", "b2"))
    assert pool.hold_prefix(keys("s", "a1")) == pool.rows_of(keys("s", "a1"))
    with pytest.raises(KeyError):
        pool.rows_of(keys("a2"))
    assert pool.evicted_blocks == 1


def test_held_blocks_are_never_evicted() -> None:
    pool = DevicePool(2, 8)
    rows = pool.hold_new(keys("a", "b"))
    with pytest.raises(RuntimeError, match="room for 0 more blocks, the sequence needs 1"):
        pool.hold_new(keys("c"))
    assert pool.rows_of(keys("a", "b")) == rows


def test_a_resident_key_keeps_its_row_while_others_move_in() -> None:
    pool = DevicePool(3, 8)
    (row,) = pool.hold_new(keys("a"))
    pool.release(keys("a"))
    assert pool.hold_new(keys("b", "a", "c"))[1] == row


def test_rows_of_one_pool_are_distinct() -> None:
    pool = DevicePool(5, 8)
    pool.hold_new(keys("a", "b", "c"))
    pool.release(keys("a", "b", "c"))
    pool.hold_new(keys("d", "e", "f", "g"))
    assert sorted(pool.rows_of(keys("a", "d", "e", "f", "g"))) == [0, 1, 2, 3, 4]
