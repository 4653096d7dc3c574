"""What must hold between any two events, checked from scratch. For tests and for the simulator: slow, and reads only.

The state's docstrings say each of these beside the field that it is about.
"""

from __future__ import annotations

from collections import Counter

from tiering.core.demotion import OWABLE
from tiering.core.state import NEVER_S, Block, Cell, Pool, Tier, World
from tiering.core.transitions import CellState, PrimaryState, SlotState
from tiering.errors import InvariantViolation
from tiering.types import BlockKey

ABSENT, FILLING, READY = PrimaryState.ABSENT, PrimaryState.FILLING, PrimaryState.READY


def check(world: World) -> None:
    """Raises ``InvariantViolation`` that says what does not agree with what."""
    for pool in world.pools:
        _check_slots(world, pool)
    _check_blocks(world)
    for tier in world.tiers:
        _check_cells(world, tier)
        _check_tier(world, tier)
    _check_loads(world)
    _check_flushes_and_holds(world)
    _check_counters(world)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolation(what)


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise InvariantViolation(f"{what}: {found!r}, but by the recount {expected!r}")


# -- the primary tier -------------------------------------------------------------------------------------------------


def _check_slots(world: World, pool: Pool) -> None:
    name = f"pool {pool.index}"
    states = pool.states
    _same(len(pool.free), len(set(pool.free)), f"{name}: free slots, each once")
    _same(set(pool.free), {s for s, state in enumerate(states) if state is SlotState.FREE}, f"{name}: free slots")
    leases = Counter(s for job in world.loads.values() if job.pool == pool.index for s in job.slots if s >= 0)
    lent = Counter(
        slot
        for op in world.ops.values()
        if op.kind == "demote"
        for b, slot, _ in op.items
        if _pool_of(world, b) is pool
    )
    fills = Counter(slot for job in world.stores.values() if job.pool == pool.index for slot in job.slots)
    for op in world.ops.values():
        if op.kind == "promote":
            fills.update(slot for block, slot, _ in op.items if _pool_of(world, block) is pool)
    busy = 0
    for slot, state in enumerate(states):
        where = f"{name}, slot {slot} ({state.name})"
        owner, loads, demotes = pool.owner[slot], pool.loads[slot], pool.demotes[slot]
        _same(loads, leases[slot], f"{where}: leases")
        _same(demotes, lent[slot], f"{where}: loans to demotions")
        in_motion = state in (SlotState.FILLING, SlotState.DOOMED)
        _same(fills[slot], int(in_motion), f"{where}: fills in flight")
        if state is SlotState.CONDEMNED:
            _require(bool(loads or demotes), f"{where}: nobody uses it")
        elif state is not SlotState.HELD:
            _require(not loads and not demotes, f"{where}: in use though it holds no block")
        busy += in_motion or bool(loads or demotes)
        if state in (SlotState.FILLING, SlotState.HELD):
            _require(owner is not None, f"{where}: no owner")
            assert owner is not None
            _same((owner.slot, owner.pool), (slot, pool.index), f"{where}: where its owner says it is")
            _require(world.blocks.get(owner.key) is owner, f"{where}: its owner has no record")
            _same(owner.state, FILLING if in_motion else READY, f"{where}: its owner's state")
        else:
            _require(owner is None, f"{where}: has an owner")
    _same(pool.busy, busy, f"{name}: busy slots")
    _same(len(pool.policy), sum(b is not None and b.state is READY for b in pool.owner), f"{name}: the policy's blocks")


def _pool_of(world: World, block: Block) -> Pool:
    return world.pools[block.pool]


def _check_blocks(world: World) -> None:
    children: Counter[BlockKey] = Counter()
    for key, block in world.blocks.items():
        where = f"block {key.hex()}"
        _same(block.key, key, f"{where}: its record's key")
        held = block.state is not ABSENT
        _same(block.slot >= 0, held, f"{where} ({block.state.name}): has a slot")
        if held:
            _require(world.pools[block.pool].owner[block.slot] is block, f"{where}: does not own its slot")
        _same(
            block.copies,
            held + sum(c is not None and c.state is CellState.PRESENT for c in block.cells),
            f"{where}: copies",
        )
        if block.copies and block.parent is not None:
            children[block.parent] += 1
    for key, block in world.blocks.items():
        _same(block.children, children.pop(key, 0), f"block {key.hex()}: children")
        _require(
            bool(block.copies or block.children) or any(map(_says_something, world.tiers, block.cells)),
            f"block {key.hex()}: a record that says nothing",
        )
    _require(not children, f"parents without a record: {[key.hex() for key in children]}")
    for key, waiters in world.waiting.items():
        _require(bool(waiters), f"block {key.hex()}: an empty list of waiters")
        _require(
            key in world.blocks and world.blocks[key].state is FILLING, f"block {key.hex()}: awaited but not FILLING"
        )


def _says_something(tier: Tier, cell: Cell | None) -> bool:
    if cell is None:
        return False
    default = CellState.ABSENT if tier.authoritative else CellState.UNKNOWN
    return cell.state is not default or bool(cell.reads or cell.stored_bytes) or cell.until_s != NEVER_S


# -- the secondary tiers ----------------------------------------------------------------------------------------------


def _check_cells(world: World, tier: Tier) -> None:
    ops = [op for op in world.ops.values() if op.tier == tier.index and op.epoch == world.epoch]
    reads = Counter(block.key for op in ops if op.kind == "promote" for block, _, _ in op.items)
    in_flight = {
        state: {(block.key, generation) for op in ops if op.kind == kind for block, _, generation in op.items}
        for state, kind in ((CellState.ASKING, "probe"), (CellState.STORING, "demote"), (CellState.DELETING, "delete"))
    }
    residents = 0
    for key, block in world.blocks.items():
        cell = block.cells[tier.index]
        if cell is None:
            _same(0, reads[key], f"tier {tier.spec.name}, block {key.hex()}: reads without a cell")
            continue
        where = f"tier {tier.spec.name}, block {key.hex()} ({cell.state.name})"
        _same(cell.reads, reads[key], f"{where}: reads")
        if cell.state in in_flight:
            _require((key, cell.generation) in in_flight[cell.state], f"{where}: nothing is in flight for it")
        if cell.state is not CellState.ABSENT:
            _same(cell.until_s, NEVER_S, f"{where}: expires")
        if tier.policy is None:
            _same(cell.stored_bytes, 0, f"{where}: bytes in a tier without a budget")
        elif cell.state in (CellState.PRESENT, CellState.STORING):
            _require(cell.stored_bytes > 0, f"{where}: its bytes are not accounted")
        if key in tier.unvouched:
            _require(cell.stored_bytes > 0, f"{where}: unvouched, but without bytes")
            _require(cell.state not in (CellState.PRESENT, CellState.DELETING), f"{where}: unvouched")
        elif cell.stored_bytes and cell.state is not CellState.DELETING:
            residents += 1
    if tier.policy is not None:
        _same(len(tier.policy), residents, f"tier {tier.spec.name}: the policy's blocks")


def _check_tier(world: World, tier: Tier) -> None:
    name, spec = f"tier {tier.spec.name}", tier.spec
    _same(tier.index, world.tier_index[spec.name], f"{name}: index")
    cells = [(key, cell) for key, block in world.blocks.items() if (cell := block.cells[tier.index]) is not None]
    leaving = sum(size for (index, _), size in world.foreign_leaving.items() if index == tier.index)
    ours = sum(cell.stored_bytes for _, cell in cells)
    _same(tier.used_bytes, ours + sum(tier.foreign.values()) + leaving, f"{name}: bytes used")
    deleting = sum(cell.stored_bytes for _, cell in cells if cell.state is CellState.DELETING)
    _same(tier.deleting_bytes, deleting + leaving, f"{name}: bytes being deleted")
    payloads = [
        _pool_of(world, block).spec.payload_bytes
        for op in world.ops.values()
        if op.kind == "demote" and op.tier == tier.index
        for block, _, _ in op.items
    ]
    _same(tier.lent_bytes, sum(payloads), f"{name}: bytes lent")
    _require(tier.lent_bytes <= spec.queue_bytes_max or len(payloads) == 1, f"{name}: {tier.lent_bytes} bytes lent")
    asked = sum(len(op.items) for op in world.ops.values() if op.kind == "probe" and op.tier == tier.index)
    _same(tier.asking, asked, f"{name}: keys being asked about")
    _require(asked <= world.spec.probe_keys_max, f"{name}: {asked} keys being asked about")
    _require(not tier.owed.keys() & tier.parked.keys(), f"{name}: blocks both owed and parked")
    for key in (*tier.owed, *tier.parked):
        block = world.blocks.get(key)
        _require(block is not None and block.state is READY, f"{name}, block {key.hex()}: owed but not READY")
        cell = block.cells[tier.index] if block is not None else None
        settled = cell is not None and cell.state not in (*OWABLE, CellState.PRESENT)
        _require(not settled, f"{name}, block {key.hex()}: owed while {cell and cell.state.name}")
    for key in tier.unvouched:
        _require(key in world.blocks, f"{name}, block {key.hex()}: unvouched without a record")


# -- jobs -------------------------------------------------------------------------------------------------------------


def _check_loads(world: World) -> None:
    awaited: Counter[tuple[int, BlockKey]] = Counter()
    for job in world.loads.values():
        where = f"load job {job.job}"
        _require(len(job.slots) == job.cursor <= job.limit <= len(job.keys), f"{where}: its positions are out of order")
        _same(job.pending, job.slots.count(-1), f"{where}: awaited positions")
        _same(job.done, not job.pending and job.cursor >= job.limit, f"{where}: done")
        for index, slot in enumerate(job.slots):
            if slot < 0:
                awaited[job.job, job.keys[index]] += 1
        _require(all(index < job.limit for index in job.sources), f"{where}: sources beyond its limit")
        flight = sum(
            _pool_of(world, block).spec.payload_bytes
            for op in world.ops.values()
            if op.starter is job
            for block, _, _ in op.items
        )
        _same(job.flight_bytes, flight, f"{where}: bytes in flight")
        _require(
            job.done or job.pending > 0 or job.job in world.starved or job.flight_bytes > 0,
            f"{where}: it waits for nothing and would never end",
        )
    for job_id, job in world.starved.items():
        _require(world.loads.get(job_id) is job and not job.done, f"load job {job_id}: starved, but not open")
        _require(bool(world.ops or world.stores), f"load job {job_id}: starved, and nothing is in flight")
    waiting = Counter((job.job, key) for key, waiters in world.waiting.items() for job in waiters)
    _same(waiting, awaited, "load jobs that wait")


def _check_flushes_and_holds(world: World) -> None:
    demoting = {
        (op.tier, b.key)
        for op in world.ops.values()
        if op.kind == "demote" and op.epoch == world.epoch
        for b, _, _ in op.items
    }
    for flush in world.flushes.values():
        _require(bool(flush.remaining), f"flush {flush.job}: done, but not reported")
        for index, key in flush.remaining:
            tier = world.tiers[index]
            owed = tier.writable and key in tier.owed
            _require(owed or (index, key) in demoting, f"flush {flush.job}: waits in vain for {key.hex()}")
    held = Counter((key, hold.hold) for key, holders in world.holders.items() for hold in holders)
    for (key, hold_id), times in held.items():
        _require(times == 1 and hold_id in world.holds, f"block {key.hex()}: held by {hold_id}, {times} times")
    for hold in world.holds.values():
        for key in hold.due:
            block = world.blocks.get(key)
            _require(block is None or block.state is not READY, f"hold {hold.hold}: {key.hex()} is due, but READY")
            _require((key, hold.hold) in held, f"hold {hold.hold}: {key.hex()} is due, but not held")


def _check_counters(world: World) -> None:
    c = world.counters
    open_blocks = sum(len(job.keys) for job in world.loads.values() if not job.done)
    _same(c.query_blocks, c.hit_blocks + c.miss_blocks + open_blocks, "counters: queries")
    _same(c.hit_blocks, sum(c.hit_blocks_by_tier.values()), "counters: hits by tier")
    _require(c.promote_failures >= c.corrupt_blocks + c.missing_blocks, "counters: more kinds of failure than failures")
    _require(c.resets == world.epoch, "counters: resets")
