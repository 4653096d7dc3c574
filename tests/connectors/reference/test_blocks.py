"""The block pool against a model that keeps a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiering.connectors.reference.blocks import BlockPool
from tiering.connectors.requests import NULL_BLOCK

BLOCKS = 7
KEYS = [(bytes([n]), group) for n in range(4) for group in range(2)]


class PoolMachine(RuleBasedStateMachine):
    """Tables of several requests, and what each block holds, kept apart from the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.free = list(range(1, BLOCKS))
        self.content: dict[int, tuple[bytes, int]] = {}
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(RuntimeError, match="are free"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert taken == self.free[:count]
        del self.free[:count]
        for block in taken:
            self.content.pop(block, None)
        assert self.pool.take_given_away() == frozenset(taken)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def cache(self, data: st.DataObject, key: tuple[bytes, int]) -> None:
        table = data.draw(st.sampled_from(self.tables))
        fresh = [block for block in table if block not in self.content]
        if fresh:
            self.pool.cache(key, fresh[0])
            if key not in self.content.values():
                self.content[fresh[0]] = key

    @rule(key=st.sampled_from(KEYS))
    def share(self, key: tuple[bytes, int]) -> None:
        found = self.pool.find(key)
        if found is not None:
            self.pool.share([found])
            if found in self.free:
                self.free.remove(found)
            self.tables.append([NULL_BLOCK, found])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        used = {block for other in self.tables for block in other}
        self.free += [block for block in reversed(table) if block != NULL_BLOCK and block not in used]

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_blocks == len(self.free)
        assert [block for block in range(BLOCKS) if self.pool.is_free(block)] == sorted(self.free)
        assert self.pool.cached_blocks == len(self.content)
        for key in KEYS:
            found = self.pool.find(key)
            assert found is None if key not in self.content.values() else self.content[found or 0] == key


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30)


def test_the_tail_of_a_finished_request_is_given_away_first() -> None:
    pool = BlockPool(6)
    first = pool.allocate(3)
    second = pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(5) == [3, 2, 1, 5, 4]


def test_a_block_that_nobody_uses_cannot_be_released() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="nobody uses it"):
        pool.release([block])
