"""Room in bounded tiers: whose bytes are there, what is deleted for others, and what a failed operation leaves behind.

The budget is exact: bytes are accounted before a store is asked for, and given back when the tier says that they are
gone. In between, after a failure, nobody knows; such blocks keep their bytes (``Tier.unvouched``) and go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tiering.core.commands import Delete
from tiering.core.moves import block_of, cell_of, forget_if_idle, learn_parent, occupy, set_absent, step_cell, vacate
from tiering.core.state import Block, Cell, Op, Tier, World
from tiering.core.transitions import CellState, Move, PrimaryState
from tiering.types import BlockKey, Outcome, OutcomeCode, ScanEntry

DELETE_PAUSE_S = 0.1
"""After a delete that removed nothing: so long no other is asked to make room."""

EXTRA_SHARE = 8
"""At most this part of the room is freed ahead of need."""

UNVOUCHED_STEP_MAX = 256
"""So many blocks with a failure behind them are looked at in one search for room."""


def stored_bytes(world: World, tier: Tier, block: Block) -> int:
    return tier.spec.capabilities.stored_bytes(world.pools[block.pool].spec.payload_bytes)


# -- whose bytes are there --------------------------------------------------------------------------------------------


def found(world: World, tier: Tier, block: Block, cell: Cell) -> None:
    """The block is in the tier, for certain: its bytes count, and it may be evicted by policy."""
    if tier.policy is None:
        return
    if not cell.stored_bytes:
        occupy(tier, block, cell, stored_bytes(world, tier, block))
    if tier.unvouched.pop(block.key, None) is not None:
        tier.policy.admit((block.key,), block.parent)


def claim(world: World, tier: Tier, block: Block, cell: Cell) -> None:
    """A store is about to be asked for: its bytes count from now on."""
    if tier.policy is not None and not cell.stored_bytes:
        occupy(tier, block, cell, stored_bytes(world, tier, block))


def gone(tier: Tier, block: Block, cell: Cell) -> None:
    """The block is not in the tier, for certain: its bytes, if any were accounted, are free."""
    if tier.policy is None or not cell.stored_bytes:
        return
    vacate(tier, cell)
    if tier.unvouched.pop(block.key, None) is None:
        tier.policy.forget((block.key,), evicted=False)


def store_failed(tier: Tier, block: Block, cell: Cell, outcome: Outcome) -> None:
    """A refused store left nothing; one that failed otherwise, in the dark, may have. What was there before still may be."""
    tried = tier.unvouched.get(block.key)
    if tried is None:
        return
    if outcome.code is OutcomeCode.REFUSED and not tried:
        del tier.unvouched[block.key]
        vacate(tier, cell)
    else:
        tier.unvouched[block.key] = True


def take_in(world: World, tier: Tier, entries: Sequence[ScanEntry]) -> None:
    """What a scan found. It may tell a thing twice, or what is known already: that changes nothing."""
    run: list[BlockKey] = []
    parent: BlockKey | None = None
    for entry in entries:
        key = entry.handle
        if entry.foreign:
            tier.used_bytes += entry.stored_bytes - tier.foreign.get(key, 0)
            tier.foreign[key] = entry.stored_bytes
            continue
        block = block_of(world, key, 0)
        cell = cell_of(block, tier)
        if cell.state is not CellState.UNKNOWN and cell.state is not CellState.ABSENT:
            continue
        learn_parent(world, block, entry.parent)
        step_cell(world, block, cell, Move.FOUND)
        if tier.policy is None:
            continue
        if not cell.stored_bytes:
            occupy(tier, block, cell, max(1, entry.stored_bytes))
        if tier.unvouched.pop(key, None) is None:
            continue
        if run and block.parent == run[-1]:
            run.append(key)
            continue
        if run:
            tier.policy.admit(run, parent)
        run, parent = [key], block.parent
    if run and tier.policy is not None:
        tier.policy.admit(run, parent)


# -- making room ------------------------------------------------------------------------------------------------------


def lacking_bytes(world: World, tier: Tier, block: Block, cell: Cell) -> int:
    """0 if the block fits now; else what it would occupy."""
    if tier.room_bytes is None or cell.stored_bytes:
        return 0
    need = stored_bytes(world, tier, block)
    return need if tier.used_bytes + need > tier.room_bytes else 0


def make_room(world: World, tier: Tier, need_bytes: int = 0) -> None:
    """Ask for deletes until ``need_bytes`` more will fit; if much is owed, for a few blocks more."""
    assert tier.room_bytes is not None
    excess = tier.used_bytes - tier.deleting_bytes + need_bytes - tier.room_bytes
    if excess <= 0 or world.now_s < tier.deletes_after_s:
        return
    if need_bytes:
        more = min(len(tier.owed), tier.spec.batch_blocks_max) - 1
        excess += need_bytes * min(more, tier.room_bytes // (EXTRA_SHARE * need_bytes))
    handles: list[bytes] = []
    while excess > 0 and tier.foreign:
        handle, size = tier.foreign.popitem(last=False)
        handles.append(handle)
        world.foreign_leaving[tier.index, handle] = size
        tier.deleting_bytes += size
        excess -= size
    victims: list[Block] = []
    if excess > 0:
        excess = _take_unvouched(world, tier, excess, victims)
    if excess > 0:
        _take_by_policy(world, tier, excess, victims)
    delete_blocks(world, tier, victims)
    delete_foreign(world, tier, handles)


def _take_unvouched(world: World, tier: Tier, excess: int, victims: list[Block]) -> int:
    for key in list(islice(tier.unvouched, UNVOUCHED_STEP_MAX)):
        if excess <= 0:
            break
        block = world.blocks[key]
        cell = block.cells[tier.index]
        assert cell is not None
        if _idle(world, cell):
            excess -= cell.stored_bytes
            _take(world, tier, block, cell)
            victims.append(block)
    return excess


def _idle(world: World, cell: Cell) -> bool:
    """Nothing of this cell is under way, and its last failure is some time ago."""
    if cell.reads:
        return False
    return cell.state is CellState.UNKNOWN or (cell.state is CellState.ABSENT and cell.until_s <= world.now_s)


def _take(world: World, tier: Tier, block: Block, cell: Cell) -> None:
    step_cell(world, block, cell, Move.DELETE)
    tier.deleting_bytes += cell.stored_bytes
    tier.unvouched.pop(block.key, None)


def _take_by_policy(world: World, tier: Tier, excess: int, victims: list[Block]) -> None:
    """What the tier's policy names; not the last copy of a block that has a child somewhere, if the policy cares."""
    policy, index, blocks = tier.policy, tier.index, world.blocks
    assert policy is not None
    inner: set[BlockKey] = set()

    # Such a tier would be owed again at once what the primary tier still holds: two blocks could take turns for ever.
    keeps_ready = tier.spec.demote_rule == "on_evict"

    def protected(key: BlockKey) -> bool:
        block = blocks[key]
        cell = block.cells[index]
        assert cell is not None
        if keeps_ready and block.state is PrimaryState.READY:
            return True
        return key in inner or cell.reads > 0 or cell.state not in _DELETABLE

    while excess > 0:
        named = policy.victims(-(-excess // tier.spec.capabilities.stored_bytes(tier.spec.block_bytes_min)), protected)
        if not named:
            return
        taken: list[BlockKey] = []
        for key in named:
            block = blocks[key]
            cell = block.cells[index]
            assert cell is not None
            if policy.leaf_first and cell.state is CellState.PRESENT and block.children:
                elsewhere = block.copies - 1 - (block.state is not PrimaryState.ABSENT)
                if not elsewhere:
                    inner.add(key)
                    continue
            if excess > 0:
                excess -= cell.stored_bytes
                _take(world, tier, block, cell)
                victims.append(block)
                taken.append(key)
        policy.forget(taken, evicted=True)
        world.counters.tier_evicted_blocks += len(taken)


_DELETABLE = (CellState.PRESENT, CellState.ABSENT, CellState.UNKNOWN)


def discard(world: World, tier: Tier, block: Block, cell: Cell) -> None:
    """Delete an ABSENT block that the tier may still hold, and must not."""
    if tier.policy is not None and block.key not in tier.unvouched:
        tier.policy.forget((block.key,), evicted=False)
    _take(world, tier, block, cell)
    delete_blocks(world, tier, [block])


def sweep(world: World, tier: Tier) -> None:
    """The tier works: remove what failed stores and deletes may have left, a batch at a time."""
    victims: list[Block] = []
    for key in list(islice(tier.unvouched, tier.spec.batch_blocks_max)):
        block = world.blocks[key]
        cell = block.cells[tier.index]
        assert cell is not None
        if _idle(world, cell) and key not in tier.owed and key not in tier.parked:
            _take(world, tier, block, cell)
            victims.append(block)
    delete_blocks(world, tier, victims)


# -- deletes ----------------------------------------------------------------------------------------------------------


def delete_blocks(world: World, tier: Tier, victims: list[Block]) -> None:
    """Emit deletes of blocks whose cells are DELETING."""
    size = tier.spec.batch_blocks_max
    for start in range(0, len(victims), size):
        op = Op(world.next_id(), "delete", tier.index, world.epoch, [])
        for block in victims[start : start + size]:
            cell = block.cells[tier.index]
            assert cell is not None
            op.items.append((block, -1, cell.generation))
        world.ops[op.op] = op
        world.commands.append(Delete(op.op, tier.spec.name, tuple(block.key for block, _, _ in op.items)))


def delete_foreign(world: World, tier: Tier, handles: list[bytes]) -> None:
    size = tier.spec.batch_blocks_max
    for start in range(0, len(handles), size):
        names = tuple(handles[start : start + size])
        op = Op(world.next_id(), "delete", tier.index, world.epoch, [], handles=names)
        world.ops[op.op] = op
        world.commands.append(Delete(op.op, tier.spec.name, names))


def finish_delete(world: World, op: Op, outcomes: tuple[Outcome, ...]) -> bool:
    """Bytes that are gone are free; what could not be removed stays accounted. True if anything was removed."""
    if op.epoch != world.epoch:
        world.counters.stale_completions += len(outcomes)
        return False
    tier = world.tiers[op.tier]
    removed = [outcome.ok or outcome.code is OutcomeCode.MISSING for outcome in outcomes]
    for handle, is_gone in zip(op.handles, removed[len(op.items) :], strict=True):
        size = world.foreign_leaving.pop((tier.index, handle))
        tier.deleting_bytes -= size
        if is_gone:
            tier.used_bytes -= size
        else:
            tier.foreign[handle] = size
    for (block, _, _), is_gone in zip(op.items, removed, strict=False):
        cell = block.cells[tier.index]
        assert cell is not None
        tier.deleting_bytes -= cell.stored_bytes
        set_absent(world, block, cell, Move.MISS, ages=not is_gone or not tier.authoritative)
        if is_gone:
            vacate(tier, cell)
        elif cell.stored_bytes:
            tier.unvouched[block.key] = True
        forget_if_idle(world, block)
    if not any(removed):
        tier.deletes_after_s = world.now_s + DELETE_PAUSE_S
    return any(removed)
