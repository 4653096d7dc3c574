"""The transition tables, the functions that write their rows out, and the page that is made from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import pytest

from tests.core.worlds import exclusive, shared, spec_of
from tiering.core import moves, transitions
from tiering.core.moves import IllegalMove
from tiering.core.state import Block, Pool, World
from tiering.core.transitions import CELL, PRIMARY, SLOT, CellState, Move, PrimaryState, SlotState

COMMAND = ".venv/bin/python -m tiering.core.transitions > docs/states.md"

BATCHES: dict[Move, Callable[[World, Pool, Block], object]] = {
    Move.GRANT: lambda world, pool, block: moves.grant_all(world, pool, [block]),
    Move.LAND: lambda world, pool, block: moves.land_all(world, pool, [block]),
    Move.EVICT: lambda world, pool, block: moves.evict_all(world, pool, [block.key], leaves_only=True),
    Move.FAIL: lambda world, pool, block: moves.fail_fill(world, pool, block),
    Move.DOOM: lambda world, pool, block: moves.doom(world, pool, block),
    Move.CONDEMN: lambda world, pool, block: moves.condemn(world, pool, block),
}
SLOT_OF = {
    PrimaryState.ABSENT: SlotState.FREE,
    PrimaryState.FILLING: SlotState.FILLING,
    PrimaryState.READY: SlotState.HELD,
}


def _placed(primary: PrimaryState, slot: SlotState) -> tuple[World, Pool, Block]:
    """A world of one slot and one block, put into these states by hand."""
    world = World(spec_of(1))
    (pool,) = world.pools
    block = moves.block_of(world, b"k", 0)
    block.state = primary
    pool.states[0] = slot
    if primary is not PrimaryState.ABSENT:
        block.slot = 0
        block.copies = 1
        pool.owner[0] = block
        pool.free.clear()
    return world, pool, block


@pytest.mark.parametrize(("move", "state"), list(itertools.product(BATCHES, PrimaryState)))
def test_what_is_written_out_agrees_with_the_table_of_keys(move: Move, state: PrimaryState) -> None:
    world, pool, block = _placed(state, SLOT_OF[state])
    if (state, move) in PRIMARY:
        BATCHES[move](world, pool, block)
        assert block.state is PRIMARY[state, move]
    else:
        with pytest.raises(IllegalMove, match=f"{move.name} while {state.name}"):
            BATCHES[move](world, pool, block)


@pytest.mark.parametrize(("move", "state"), list(itertools.product(BATCHES, SlotState)))
def test_what_is_written_out_agrees_with_the_table_of_slots(move: Move, state: SlotState) -> None:
    before = {Move.GRANT: PrimaryState.ABSENT, Move.EVICT: PrimaryState.READY, Move.CONDEMN: PrimaryState.READY}
    world, pool, block = _placed(before.get(move, PrimaryState.FILLING), state)
    if (state, move) in SLOT:
        BATCHES[move](world, pool, block)
        assert pool.states[0] is SLOT[state, move]
    else:
        with pytest.raises(IllegalMove, match=f"slot 0/0: {move.name} while {state.name}"):
            BATCHES[move](world, pool, block)


@pytest.mark.parametrize("state", SlotState)
def test_only_a_doomed_slot_is_released_by_its_landing(state: SlotState) -> None:
    _, pool, _ = _placed(PrimaryState.ABSENT, state)
    pool.free.clear()
    if state is SlotState.DOOMED:
        moves.release_doomed(pool, 0)
        assert pool.states[0] is SLOT[state, Move.RELEASE]
        assert pool.free == [0]
    else:
        with pytest.raises(IllegalMove, match=f"RELEASE while {state.name}"):
            moves.release_doomed(pool, 0)


@pytest.mark.parametrize("state", SlotState)
def test_the_last_user_frees_a_condemned_slot(state: SlotState) -> None:
    _, pool, _ = _placed(PrimaryState.ABSENT, state)
    pool.free.clear()
    pool.loads[0] = 1
    pool.busy = 1
    if state is SlotState.CONDEMNED:
        moves.unlease_all(pool, [0])
        assert pool.states[0] is SLOT[state, Move.RELEASE]
        assert pool.free == [0]
    elif state is SlotState.HELD:
        moves.unlease_all(pool, [0])
        assert pool.states[0] is SlotState.HELD
    else:
        with pytest.raises(IllegalMove, match=f"RELEASE while {state.name}"):
            moves.unlease_all(pool, [0])


@pytest.mark.parametrize("release", [lambda pool: moves.unlease_all(pool, [0]), lambda pool: moves.unlend(pool, 0)])
def test_a_slot_released_more_often_than_taken_is_a_contradiction(release: object) -> None:
    _, pool, _ = _placed(PrimaryState.READY, SlotState.HELD)
    with pytest.raises(IllegalMove, match="released more often than taken"):
        release(pool)  # type: ignore[operator]


def test_a_block_in_use_is_not_evicted() -> None:
    world, pool, block = _placed(PrimaryState.READY, SlotState.HELD)
    moves.lease_all(pool, [0])
    with pytest.raises(IllegalMove, match="EVICT"):
        moves.evict_all(world, pool, [block.key], leaves_only=True)


def test_bytes_are_accounted_once() -> None:
    world = World(spec_of(1, exclusive()))
    block = moves.block_of(world, b"k", 0)
    cell = moves.cell_of(block, world.tiers[0])
    moves.occupy(world.tiers[0], block, cell, 8192)
    with pytest.raises(IllegalMove, match="accounted twice"):
        moves.occupy(world.tiers[0], block, cell, 8192)


def test_a_step_of_a_cell_that_stands_in_no_table_is_a_contradiction() -> None:
    world = World(spec_of(1, shared()))
    block = moves.block_of(world, b"k", 0)
    with pytest.raises(IllegalMove, match="LAND while UNKNOWN"):
        moves.step_cell(world, block, moves.cell_of(block, world.tiers[0]), Move.LAND)


@pytest.mark.parametrize(
    ("states", "table"), [(PrimaryState, PRIMARY), (SlotState, SLOT), (CellState, CELL)], ids=["key", "slot", "cell"]
)
def test_every_state_can_be_reached_and_left(states: type[IntEnum], table: dict[tuple[IntEnum, Move], IntEnum]) -> None:
    assert set(table.values()) == set(states)
    assert {old for old, _ in table} == set(states)


def test_the_page_of_states_is_made_from_the_tables(root: Path) -> None:
    assert (root / "docs" / "states.md").read_text() == transitions.diagram(), f"make it again: {COMMAND}"
