"""The elementary changes of state: each one steps its table, keeps the counts that depend on it, and does no policy.

Counts kept here and nowhere else: ``Pool.busy``, ``Pool.free``, ``Pool.holes``, ``Block.copies``, ``Block.children``,
``Tier.used_bytes``.
What happens to every block of every request (grant, land, evict, lease) works on whole batches, with the table's rows
written out; a test compares them with the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiering.core.state import NEVER_S, Block, Cell, Change, Pool, Tier, World
from tiering.core.state import PRIMARY as PRIMARY_TIER
from tiering.core.transitions import CELL, PRIMARY, SLOT, CellState, Move, PrimaryState, SlotState
from tiering.errors import InvariantViolation
from tiering.types import BlockKey

ABSENT, FILLING, READY = PrimaryState.ABSENT, PrimaryState.FILLING, PrimaryState.READY
SLOT_FREE, SLOT_FILLING, SLOT_HELD = SlotState.FREE, SlotState.FILLING, SlotState.HELD

EXPIRE_STEP_MAX = 512
"""Verdicts forgotten an event: no event brings more of them, and none is to take long."""


class IllegalMove(InvariantViolation):
    """A change that no table allows. ``key`` lets the machine look up the block's history."""

    def __init__(self, message: str, key: bytes | None) -> None:
        super().__init__(message)
        self.key = key


def _illegal(block: Block, move: Move) -> IllegalMove:
    return IllegalMove(f"block {block.key.hex()}: {move.name} while {block.state.name}", block.key)


def _illegal_slot(pool: Pool, slot: int, move: Move) -> IllegalMove:
    owner = pool.owner[slot]
    state = pool.states[slot].name
    return IllegalMove(f"slot {pool.index}/{slot}: {move.name} while {state}", owner.key if owner else None)


def _step_primary(block: Block, move: Move) -> None:
    new = PRIMARY.get((block.state, move))
    if new is None:
        raise _illegal(block, move)
    block.state = new


def _step_slot(pool: Pool, slot: int, move: Move) -> None:
    new = SLOT.get((pool.states[slot], move))
    if new is None:
        raise _illegal_slot(pool, slot, move)
    pool.states[slot] = new


# -- blocks and their links -------------------------------------------------------------------------------------------


def block_of(world: World, key: BlockKey, pool: int) -> Block:
    """The record of ``key``, made if there is none."""
    block = world.blocks.get(key)
    if block is None:
        block = world.blocks[key] = Block(key, pool, len(world.tiers))
    return block


def learn_parent(world: World, block: Block, parent: BlockKey | None) -> bool:
    """Remember the chain link. The first one known stays: a key's parent is part of its hash. True if it is news."""
    if parent is None or block.parent is not None or parent == block.key:
        return False
    block.parent = parent
    if block.copies:
        _add_child(world, block_of(world, parent, block.pool))
    return True


def _add_child(world: World, block: Block) -> None:
    block.children += 1
    if block.children == 1 and not block.copies:
        world.pools[block.pool].holes += 1


def _drop_child(world: World, block: Block) -> None:
    block.children -= 1
    if not block.children and not block.copies:
        world.pools[block.pool].holes -= 1


def belongs_to(world: World, block: Block, pool: int) -> None:
    """The block has no slot, and is now known to be one of this pool."""
    if block.pool != pool and block.children and not block.copies:
        world.pools[block.pool].holes -= 1
        world.pools[pool].holes += 1
    block.pool = pool


def add_copy(world: World, block: Block) -> None:
    block.copies += 1
    if block.copies > 1:
        return
    if block.children:
        world.pools[block.pool].holes -= 1
    if block.parent is not None:
        _add_child(world, block_of(world, block.parent, block.pool))


def drop_copy(world: World, block: Block) -> None:
    block.copies -= 1
    if block.copies:
        return
    if block.children:
        world.pools[block.pool].holes += 1
    if block.parent is not None:
        parent = world.blocks[block.parent]
        _drop_child(world, parent)
        forget_if_idle(world, parent)


def forget_if_idle(world: World, block: Block) -> None:
    """Drop the record of a block that nothing holds or wants and that says no more than the default verdicts."""
    if block.copies or block.children or world.blocks.get(block.key) is not block:
        return
    for tier, cell in zip(world.tiers, block.cells, strict=True):
        if cell is None:
            continue
        default = CellState.ABSENT if tier.authoritative else CellState.UNKNOWN
        if cell.state is not default or cell.reads or cell.stored_bytes or cell.until_s != NEVER_S:
            return
    del world.blocks[block.key]


def records_of(
    world: World, pool: Pool, keys: Sequence[BlockKey], positions: Sequence[int], parent: BlockKey | None
) -> list[Block]:
    """The records of the keys at these positions of a run behind ``parent``, made where there are none, and linked.

    No position repeats a key.
    """
    records, index, tiers = world.blocks, pool.index, len(world.tiers)
    blocks: list[Block] = []
    if parent == keys[0]:
        parent = None
    for at in positions:
        key = keys[at]
        before = keys[at - 1] if at else parent
        block = records.get(key)
        if block is None:
            block = records[key] = Block(key, index, tiers)
            block.parent = before
        elif block.parent is None:
            learn_parent(world, block, before)
        blocks.append(block)
    return blocks


# -- the primary tier -------------------------------------------------------------------------------------------------


def grant_all(world: World, pool: Pool, blocks: Sequence[Block]) -> list[int]:
    """Give a FREE slot to each ABSENT block, as many as there must be; bytes are in motion from now on."""
    free, states, owner, index, records = pool.free, pool.states, pool.owner, pool.index, world.blocks
    slots: list[int] = []
    before: Block | None = None
    for block in blocks:
        if block.state is not ABSENT:
            raise _illegal(block, Move.GRANT)
        slot = free.pop()
        if states[slot] is not SLOT_FREE:
            raise _illegal_slot(pool, slot, Move.GRANT)
        states[slot] = SLOT_FILLING
        block.state = FILLING
        block.slot = slot
        owner[slot] = block
        block.copies += 1
        parent = block.parent
        if block.copies == 1:
            if block.children:
                world.pools[block.pool].holes -= 1
            if parent is not None:
                if before is None or before.key != parent:
                    before = records.get(parent) or block_of(world, parent, index)
                if before.copies:
                    before.children += 1
                else:
                    _add_child(world, before)
        block.pool = index
        before = block
        slots.append(slot)
    pool.busy += len(slots)
    return slots


def land_all(world: World, pool: Pool, blocks: Sequence[Block]) -> None:
    """The fills succeeded: READY, unused."""
    states = pool.states
    for block in blocks:
        if block.state is not FILLING:
            raise _illegal(block, Move.LAND)
        slot = block.slot
        if states[slot] is not SLOT_FILLING:
            raise _illegal_slot(pool, slot, Move.LAND)
        block.state = READY
        states[slot] = SLOT_HELD
    pool.busy -= len(blocks)
    if world.changes is not None:
        _note(world.changes, PRIMARY_TIER, True, blocks)


def _note(changes: list[Change], tier: int, stored: bool, blocks: Sequence[Block]) -> None:
    changes += [Change(tier, stored, block.pool, block.key, block.parent) for block in blocks]


def evict_all(world: World, pool: Pool, keys: Sequence[BlockKey], *, leaves_only: bool) -> list[BlockKey]:
    """Drop idle READY blocks, in this order; with ``leaves_only`` none whose last copy it is while it still has children.

    Returns those that went.
    """
    records, free, states, owner = world.blocks, pool.free, pool.states, pool.owner
    loads, demotes, alone, changes = pool.loads, pool.demotes, not world.tiers, world.changes
    gone: list[BlockKey] = []
    above: Block | None = None
    for key in keys:
        block = above if above is not None and above.key is key else records[key]
        slot = block.slot
        if block.state is not READY or loads[slot] or demotes[slot]:
            raise _illegal(block, Move.EVICT)
        if states[slot] is not SLOT_HELD:
            raise _illegal_slot(pool, slot, Move.EVICT)
        copies = block.copies - 1
        if not copies and leaves_only and block.children:
            continue
        states[slot] = SLOT_FREE
        owner[slot] = None
        free.append(slot)
        block.state = ABSENT
        block.slot = -1
        block.copies = copies
        gone.append(key)
        if changes is not None:
            _note(changes, PRIMARY_TIER, False, (block,))
        above = None
        if copies:
            continue
        if block.parent is not None:
            above = records[block.parent]
            above.children -= 1
            if not (above.children or above.copies):
                world.pools[above.pool].holes -= 1
                forget_if_idle(world, above)
        if block.children:
            pool.holes += 1
            continue
        if alone:
            del records[key]
        else:
            forget_if_idle(world, block)
    return gone


def fail_fill(world: World, pool: Pool, block: Block) -> None:
    """The fill failed: the slot is FREE, the key ABSENT."""
    slot = block.slot
    _step_primary(block, Move.FAIL)
    _step_slot(pool, slot, Move.FAIL)
    pool.owner[slot] = None
    pool.free.append(slot)
    pool.busy -= 1
    block.slot = -1
    drop_copy(world, block)


def doom(world: World, pool: Pool, block: Block) -> None:
    """Give the key up while its bytes are in motion: the slot stays taken until ``release_doomed``."""
    slot = block.slot
    _step_primary(block, Move.DOOM)
    _step_slot(pool, slot, Move.DOOM)
    pool.owner[slot] = None
    block.slot = -1
    world.counters.doomed_slots += 1
    drop_copy(world, block)


def release_doomed(pool: Pool, slot: int) -> None:
    """The bytes that nobody wants have landed."""
    if pool.states[slot] is not SlotState.DOOMED:
        raise _illegal_slot(pool, slot, Move.RELEASE)
    _step_slot(pool, slot, Move.RELEASE)
    pool.free.append(slot)
    pool.busy -= 1


def condemn(world: World, pool: Pool, block: Block) -> None:
    """Invalidate a READY block that is in use: its slot is freed by the last user."""
    slot = block.slot
    _step_primary(block, Move.CONDEMN)
    _step_slot(pool, slot, Move.CONDEMN)
    pool.owner[slot] = None
    block.slot = -1
    world.counters.condemned_slots += 1
    if world.changes is not None:
        _note(world.changes, PRIMARY_TIER, False, (block,))
    drop_copy(world, block)


def lease_all(pool: Pool, slots: Sequence[int]) -> None:
    """A load reads the slots."""
    loads, demotes = pool.loads, pool.demotes
    fresh = 0
    for slot in slots:
        users = loads[slot]
        if not users and not demotes[slot]:
            fresh += 1
        loads[slot] = users + 1
    pool.busy += fresh


def unlease_all(pool: Pool, slots: Sequence[int]) -> None:
    """A load reads the slots no more."""
    loads, demotes, states = pool.loads, pool.demotes, pool.states
    idle = 0
    for slot in slots:
        users = loads[slot] - 1
        loads[slot] = users
        if users or demotes[slot]:
            if users < 0:
                raise _released_too_often(pool, slot)
        elif states[slot] is SLOT_HELD:
            idle += 1
        else:
            _free_condemned(pool, slot)
    pool.busy -= idle


def lend(pool: Pool, slot: int) -> None:
    """A demotion reads the slot."""
    if not pool.loads[slot] and not pool.demotes[slot]:
        pool.busy += 1
    pool.demotes[slot] += 1


def unlend(pool: Pool, slot: int) -> None:
    """A demotion reads the slot no more."""
    users = pool.demotes[slot] - 1
    pool.demotes[slot] = users
    if users or pool.loads[slot]:
        if users < 0:
            raise _released_too_often(pool, slot)
    elif pool.states[slot] is SLOT_HELD:
        pool.busy -= 1
    else:
        _free_condemned(pool, slot)


def _free_condemned(pool: Pool, slot: int) -> None:
    if pool.states[slot] is not SlotState.CONDEMNED:
        raise _illegal_slot(pool, slot, Move.RELEASE)
    _step_slot(pool, slot, Move.RELEASE)
    pool.free.append(slot)
    pool.busy -= 1


def _released_too_often(pool: Pool, slot: int) -> IllegalMove:
    return IllegalMove(f"slot {pool.index}/{slot}: released more often than taken", None)


# -- the secondary tiers ----------------------------------------------------------------------------------------------


def cell_of(block: Block, tier: Tier) -> Cell:
    """The block's cell in ``tier``, made with the tier's default verdict if there is none."""
    cell = block.cells[tier.index]
    if cell is None:
        cell = block.cells[tier.index] = Cell(CellState.ABSENT if tier.authoritative else CellState.UNKNOWN)
    return cell


def step_cell(world: World, block: Block, cell: Cell, move: Move) -> None:
    """One step of the cell's table; keeps ``copies``, the generation and what is told of changes."""
    old = cell.state
    new = CELL.get((old, move))
    if new is None:
        raise IllegalMove(f"block {block.key.hex()}: {move.name} while {old.name} in a tier", block.key)
    cell.state = new
    cell.generation += 1
    cell.until_s = NEVER_S
    # A verdict that is forgotten is no block that went.
    if world.changes is not None and move is not Move.EXPIRE and CellState.PRESENT in (old, new):
        _note(world.changes, block.cells.index(cell), new is CellState.PRESENT, (block,))
    if new is CellState.PRESENT:
        add_copy(world, block)
    elif old is CellState.PRESENT:
        drop_copy(world, block)


def set_absent(world: World, block: Block, cell: Cell, move: Move, *, ages: bool) -> None:
    """A step that ends ABSENT. ``ages``: the verdict is asked again after ``verdict_ttl_s`` (it may be wrong, or change)."""
    step_cell(world, block, cell, move)
    if ages:
        cell.until_s = world.now_s + world.spec.verdict_ttl_s
        world.expiring.append((cell.until_s, block.key))


def occupy(tier: Tier, block: Block, cell: Cell, stored_bytes: int) -> None:
    """Account the block's bytes in a bounded tier. Nobody vouches yet that they are there."""
    if cell.stored_bytes:
        raise IllegalMove(f"tier {tier.spec.name}: block {block.key.hex()}: bytes accounted twice", block.key)
    cell.stored_bytes = stored_bytes
    tier.used_bytes += stored_bytes
    tier.unvouched[block.key] = False


def vacate(tier: Tier, cell: Cell) -> None:
    """The block's bytes are given back to the tier's budget."""
    tier.used_bytes -= cell.stored_bytes
    cell.stored_bytes = 0


# -- forgetting -------------------------------------------------------------------------------------------------------


def note_remote(world: World, block: Block) -> None:
    """The primary tier lacks the block, so that its record may be all that a shared tier's copy leaves here."""
    for index in world.remote_tiers:
        cell = block.cells[index]
        if cell is not None and cell.state is CellState.PRESENT:
            world.remote.append(block.key)
            return


def expire(world: World) -> None:
    """Forget verdicts whose time is over, or which are too many, so that their records do not accumulate."""
    limit = world.spec.verdicts_max
    absent, remote = world.expiring, world.remote
    for _ in range(EXPIRE_STEP_MAX):
        if not absent or (absent[0][0] > world.now_s and len(absent) <= limit):
            break
        until_s, key = absent.popleft()
        if (block := world.blocks.get(key)) is not None:
            _expire_absent(world, block, max(until_s, world.now_s))
    for _ in range(EXPIRE_STEP_MAX):
        if len(remote) <= limit:
            break
        if (block := world.blocks.get(remote.popleft())) is not None and block.state is ABSENT:
            _expire_remote(world, block)


def _expire_absent(world: World, block: Block, until_s: float) -> None:
    for cell in block.cells:
        if cell is not None and cell.state is CellState.ABSENT and cell.until_s <= until_s:
            step_cell(world, block, cell, Move.EXPIRE)
    forget_if_idle(world, block)


def _expire_remote(world: World, block: Block) -> None:
    for index in world.remote_tiers:
        cell = block.cells[index]
        if cell is not None and cell.state is CellState.PRESENT and not cell.reads:
            step_cell(world, block, cell, Move.EXPIRE)
    forget_if_idle(world, block)
