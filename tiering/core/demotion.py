"""CPU -> secondary tiers: what is owed to whom, and the pump that turns it into commands."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from tiering.core import flush, room
from tiering.core.commands import Demote, Transfer
from tiering.core.moves import cell_of, lend, set_absent, step_cell, unlend
from tiering.core.state import Block, Op, Pool, Tier, World
from tiering.core.transitions import CellState, Move, PrimaryState
from tiering.types import BlockKey, Outcome

READY = PrimaryState.READY
STORABLE = (CellState.UNKNOWN, CellState.ABSENT, CellState.ASKING)
OWABLE = (*STORABLE, CellState.DELETING)
NO_ROOM = "full: nothing in the tier may be evicted for it"

HOPELESS_MAX = 256
"""Next victims that are in use, or that no tier took, passed over at each event."""

ANTICIPATE_SHARE = 8
"""``on_evict`` tiers get the next victims once less than this part of the slots is free."""


# -- owing ------------------------------------------------------------------------------------------------------------


def owe_after_store(world: World, blocks: Iterable[Block]) -> None:
    """New READY blocks: owed to each tier whose rule says so at once."""
    for tier in world.tiers:
        if tier.spec.demote_rule == "on_store":
            for block in blocks:
                owe(world, tier, block)


def owe_after_load(world: World, blocks: Iterable[Block]) -> None:
    """Loaded once more: owed to the tiers that ask for a number of loads."""
    for block in blocks:
        block.hits += 1
    for tier in world.tiers:
        rule = tier.spec.demote_rule
        if isinstance(rule, int):
            for block in blocks:
                if block.hits >= rule and block.state is READY:
                    owe(world, tier, block)


def owe_nearer(world: World, block: Block, source: int) -> None:
    """A promoted block fills the nearer tiers that lack it; never the one it came from, nor farther ones."""
    for tier in world.tiers[:source]:
        rule = tier.spec.demote_rule
        if rule == "on_store" or (isinstance(rule, int) and block.hits >= rule):
            owe(world, tier, block)


def owe_again(world: World, block: Block) -> None:
    """A READY block is offered once more: what failed or was dropped before gets its new chance."""
    for tier in world.tiers:
        if block.key in tier.parked or tier.spec.demote_rule == "on_store":
            owe(world, tier, block)


def owe(world: World, tier: Tier, block: Block) -> None:
    """Put the block in the tier's queue, unless the tier has it, is getting it, or takes none of its size."""
    key = block.key
    if key in tier.owed or not _takes(world, tier, block):
        return
    cell = block.cells[tier.index]
    if cell is not None and cell.state not in OWABLE:
        return
    tier.parked.pop(key, None)
    tier.owed[key] = None
    due_bytes = tier.lent_bytes + len(tier.owed) * world.pools[block.pool].spec.payload_bytes
    if not tier.writable or due_bytes > tier.spec.queue_bytes_max:
        world.counters.demote_deferred += 1


def _takes(world: World, tier: Tier, block: Block) -> bool:
    limit = tier.spec.capabilities.value_bytes_max
    return limit is None or world.pools[block.pool].spec.payload_bytes <= limit


def owed_somewhere(world: World, block: Block) -> bool:
    """A demotion is due to a tier that can take it: evicting the block now would lose it for that tier."""
    return any(tier.writable and block.key in tier.owed for tier in world.tiers) or _due_at_eviction(world, block)


def _due_at_eviction(world: World, block: Block) -> bool:
    for tier in world.tiers:
        if tier.spec.demote_rule == "on_evict" and tier.writable and block.key not in tier.parked:
            cell = block.cells[tier.index]
            if (cell is None or cell.state in OWABLE) and _takes(world, tier, block):
                return True
    return False


def owes(world: World) -> bool:
    """Some block may be due somewhere: what ``owed_somewhere`` says is worth asking."""
    return any(tier.writable and (tier.owed or tier.spec.demote_rule == "on_evict") for tier in world.tiers)


def disown(world: World, keys: Iterable[BlockKey]) -> None:
    """The blocks left the primary tier: no tier can get them from there."""
    for tier in world.tiers:
        if not (tier.owed or tier.parked):
            continue
        for key in keys:
            if tier.owed.pop(key, "") is None or tier.parked.pop(key, None) is not None:
                world.counters.demote_lost += 1
                flush.settle(world, tier, key, acknowledged=False)


def park(world: World, tier: Tier, key: BlockKey, why: str) -> None:
    """The tier did not take the block; it is offered again when others succeed."""
    tier.owed.pop(key, None)
    tier.parked[key] = why
    flush.settle(world, tier, key, acknowledged=False)


def offer_parked(tier: Tier, blocks_max: int | None = None) -> None:
    """Queue again what was parked, longest ago first."""
    for _ in range(len(tier.parked) if blocks_max is None else min(blocks_max, len(tier.parked))):
        key, _ = tier.parked.popitem(last=False)
        tier.owed[key] = None


def stopped(world: World, tier: Tier) -> None:
    """The tier takes no blocks now: flushes do not wait for what is merely owed to it."""
    if world.flushes:
        for key in tier.owed:
            flush.settle(world, tier, key, acknowledged=False)


# -- the pump ---------------------------------------------------------------------------------------------------------


def pump(world: World) -> None:
    """Turn what is owed into commands, as far as each tier's credit and room go. Called after anything that frees either."""
    for tier in world.tiers:
        if not tier.writable:
            continue
        if tier.room_bytes is not None and tier.used_bytes - tier.deleting_bytes > tier.room_bytes:
            room.make_room(world, tier)
        if tier.owed:
            _pump_tier(world, tier)


class _Pump:
    """One tier's turn: the blocks of the command to come, and whether room was looked for, which once is enough."""

    __slots__ = ("batch", "searched")

    def __init__(self) -> None:
        self.batch: list[Block] = []
        self.searched = False


def _pump_tier(world: World, tier: Tier) -> None:
    """Stretch by stretch of the queue, not the whole of it for each completion, until one cannot go on."""
    payload = min(pool.spec.payload_bytes for pool in world.pools)
    turn = _Pump()
    while tier.owed:
        before = len(tier.owed)
        n = max(0, tier.spec.queue_bytes_max - tier.lent_bytes) // payload + tier.spec.batch_blocks_max
        for key in list(islice(tier.owed, n)):
            if not _pump_block(world, tier, world.blocks[key], turn):
                break
        else:
            if len(tier.owed) < before:
                continue
        break
    if turn.batch:
        _emit(world, tier, turn.batch)


def _pump_block(world: World, tier: Tier, block: Block, turn: _Pump) -> bool:
    """Start the block's demotion, or park it, or leave it for later. False: those behind it must wait too."""
    cell = cell_of(block, tier)
    if cell.state not in STORABLE:
        if cell.state is not CellState.DELETING:  # found there meanwhile
            del tier.owed[block.key]
            flush.settle(world, tier, block.key, acknowledged=True)
        return True
    payload = world.pools[block.pool].spec.payload_bytes
    if tier.lent_bytes and tier.lent_bytes + payload > tier.spec.queue_bytes_max:
        return False
    lacking = room.lacking_bytes(world, tier, block, cell)
    if lacking:
        if not turn.searched:
            turn.searched = True
            room.make_room(world, tier, lacking)
        if tier.deleting_bytes:
            return False
        park(world, tier, block.key, NO_ROOM)
        return True
    del tier.owed[block.key]
    room.claim(world, tier, block, cell)
    step_cell(world, block, cell, Move.STORE)
    lend(world.pools[block.pool], block.slot)
    tier.lent_bytes += payload
    turn.batch.append(block)
    if len(turn.batch) == tier.spec.batch_blocks_max:
        _emit(world, tier, turn.batch)
        turn.batch.clear()
    return True


def _emit(world: World, tier: Tier, batch: list[Block]) -> None:
    op = Op(world.next_id(), "demote", tier.index, world.epoch, [])
    op.items += ((block, block.slot, cell_of(block, tier).generation) for block in batch)
    world.ops[op.op] = op
    parents = {b.key: b.parent for b in batch if b.parent is not None}
    transfers = tuple(Transfer(b.key, b.pool, b.slot) for b in batch)
    world.commands.append(Demote(op.op, tier.spec.name, transfers, parents))


def finish_demote(world: World, op: Op, outcomes: tuple[Outcome, ...]) -> bool:
    """Free the lent slots; set the verdicts; park what failed. True if some succeeded: the tier takes blocks again."""
    tier = world.tiers[op.tier]
    took_some = False
    for (block, slot, _), outcome in zip(op.items, outcomes, strict=True):
        pool = world.pools[block.pool]
        unlend(pool, slot)
        tier.lent_bytes -= pool.spec.payload_bytes
        if op.epoch != world.epoch:
            world.counters.stale_completions += 1
            continue
        cell = cell_of(block, tier)
        if outcome.ok:
            took_some = True
            step_cell(world, block, cell, Move.LAND)
            room.found(world, tier, block, cell)
            world.counters.demoted_blocks += 1
            flush.settle(world, tier, block.key, acknowledged=True)
            continue
        room.store_failed(tier, block, cell, outcome)
        set_absent(world, block, cell, Move.FAIL, ages=not tier.authoritative or cell.stored_bytes > 0)
        world.counters.demote_failures += 1
        park(world, tier, block.key, outcome.why or outcome.code.value)
    return took_some


# -- before eviction --------------------------------------------------------------------------------------------------


def anticipate_evictions(world: World) -> None:
    """For ``on_evict`` tiers: when free slots run low, the next victims are demoted first, so that eviction finds them backed."""
    tiers = [tier for tier in world.tiers if tier.spec.demote_rule == "on_evict" and tier.writable]
    if not tiers:
        return
    batch = max(tier.spec.batch_blocks_max for tier in tiers)
    for pool in world.pools:
        wanted = min(max(1, pool.spec.slots // ANTICIPATE_SHARE) - len(pool.free), 2 * batch)
        if wanted <= 0:
            continue
        for key in _next_victims(world, pool, wanted, tiers):
            for tier in tiers:
                if key not in tier.parked:
                    owe(world, tier, world.blocks[key])


def _next_victims(world: World, pool: Pool, n: int, tiers: list[Tier]) -> list[BlockKey]:
    """Not those that no tier would take: they must not hide the others, which are spared until they are demoted."""
    blocks, loads = world.blocks, pool.loads
    passed = 0

    def hopeless(key: BlockKey) -> bool:
        nonlocal passed
        if not (loads[blocks[key].slot] or all(key in tier.parked for tier in tiers)):
            return False
        passed += 1
        return passed <= HOPELESS_MAX

    return pool.policy.victims(n, hopeless)
