"""What must hold between any two events, checked from scratch. For tests and for the simulator: slow, and reads only.

The state's docstrings say each of these beside the field that it is about.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiering.core.demotion import OWABLE
from tiering.core.state import NEVER_S, Cell, Pool, Tier, World
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


def _require(holds: object, what: str, *where: object) -> None:
    if not holds:
        raise InvariantViolation(what.format(*map(_name, where)))


def _same(found: object, expected: object, what: str, *where: object) -> None:
    if found != expected:
        raise InvariantViolation(f"{what.format(*map(_name, where))}: {found!r}, but by the recount {expected!r}")


def _name(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else getattr(value, "name", value)


# -- the primary tier -------------------------------------------------------------------------------------------------


def _check_slots(world: World, pool: Pool) -> None:
    states, index = pool.states, pool.index
    _same(len(pool.free), len(set(pool.free)), "pool {}: free slots, each once", index)
    _same(
        set(pool.free), {s for s, state in enumerate(states) if state is SlotState.FREE}, "pool {}: free slots", index
    )
    leases, lent, fills = [0] * len(states), [0] * len(states), [0] * len(states)
    for load in world.loads.values():
        if load.pool == index:
            _count(leases, (slot for slot in load.slots if slot >= 0))
    for op in world.ops.values():
        if op.kind in ("demote", "promote"):
            slots = (slot for block, slot, _ in op.items if block.pool == index)
            _count(lent if op.kind == "demote" else fills, slots)
    for store in world.stores.values():
        if store.pool == index:
            _count(fills, store.slots)
    busy = ready = 0
    for slot, state in enumerate(states):
        owner, loads, demotes = pool.owner[slot], pool.loads[slot], pool.demotes[slot]
        _same(loads, leases[slot], "pool {}, slot {} ({}): leases", index, slot, state)
        _same(demotes, lent[slot], "pool {}, slot {} ({}): loans to demotions", index, slot, state)
        in_motion = state in (SlotState.FILLING, SlotState.DOOMED)
        _same(fills[slot], int(in_motion), "pool {}, slot {} ({}): fills in flight", index, slot, state)
        used = bool(loads or demotes)
        if state is SlotState.CONDEMNED:
            _require(used, "pool {}, slot {}: condemned, but nobody uses it", index, slot)
        elif state is not SlotState.HELD:
            _require(not used, "pool {}, slot {} ({}): in use though it holds no block", index, slot, state)
        busy += in_motion or used
        _same(
            owner is not None,
            state in (SlotState.FILLING, SlotState.HELD),
            "pool {}, slot {} ({}): owned",
            index,
            slot,
            state,
        )
        if owner is not None:
            ready += state is SlotState.HELD
            _same((owner.slot, owner.pool), (slot, index), "pool {}, slot {}: where its owner says it is", index, slot)
            _require(world.blocks.get(owner.key) is owner, "pool {}, slot {}: its owner has no record", index, slot)
            _same(
                owner.state,
                FILLING if in_motion else READY,
                "pool {}, slot {} ({}): its owner's state",
                index,
                slot,
                state,
            )
    _same(pool.busy, busy, "pool {}: busy slots", index)
    _same(len(pool.policy), ready, "pool {}: blocks that the policy knows", index)


def _count(counts: list[int], slots: Iterable[int]) -> None:
    for slot in slots:
        counts[slot] += 1


def _check_blocks(world: World) -> None:
    children: dict[BlockKey, int] = {}
    for key, block in world.blocks.items():
        _same(block.key, key, "block {}: its record's key", key)
        held = block.state is not ABSENT
        _same(block.slot >= 0, held, "block {} ({}): has a slot", key, block.state)
        _require(not held or world.pools[block.pool].owner[block.slot] is block, "block {}: does not own its slot", key)
        copies = held + sum(cell is not None and cell.state is CellState.PRESENT for cell in block.cells)
        _same(block.copies, copies, "block {}: copies", key)
        if copies and block.parent is not None:
            children[block.parent] = children.get(block.parent, 0) + 1
    for key, block in world.blocks.items():
        _same(block.children, children.pop(key, 0), "block {}: children", key)
        if not (block.copies or block.children):
            speaks = any(map(_says_something, world.tiers, block.cells))
            _require(speaks, "block {}: a record that says nothing", key)
    for pool in world.pools:
        holes = sum(b.children > 0 and not b.copies for b in world.blocks.values() if b.pool == pool.index)
        _same(pool.holes, holes, "pool {}: holes", pool.index)
    _require(not children, "parents without a record: {}", list(children))
    for key, waiters in world.waiting.items():
        _require(waiters, "block {}: an empty list of waiters", key)
        _require(key in world.blocks and world.blocks[key].state is FILLING, "block {}: awaited but not FILLING", key)


def _says_something(tier: Tier, cell: Cell | None) -> bool:
    if cell is None:
        return False
    default = CellState.ABSENT if tier.authoritative else CellState.UNKNOWN
    return cell.state is not default or bool(cell.reads or cell.stored_bytes) or cell.until_s != NEVER_S


# -- the secondary tiers ----------------------------------------------------------------------------------------------

_IN_FLIGHT = {CellState.ASKING: "probe", CellState.STORING: "demote", CellState.DELETING: "delete"}


def _check_cells(world: World, tier: Tier) -> None:
    name = tier.spec.name
    reads: dict[BlockKey, int] = {}
    in_flight: set[tuple[str, BlockKey, int]] = set()
    for op in world.ops.values():
        if op.tier == tier.index and op.epoch == world.epoch:
            for block, _, generation in op.items:
                in_flight.add((op.kind, block.key, generation))
                reads[block.key] = reads.get(block.key, 0) + (op.kind == "promote")
    residents = 0
    for key, block in world.blocks.items():
        cell = block.cells[tier.index]
        if cell is None:
            continue
        state = cell.state
        _same(cell.reads, reads.pop(key, 0), "tier {}, block {} ({}): reads", name, key, state)
        if (kind := _IN_FLIGHT.get(state)) is not None:
            found = (kind, key, cell.generation) in in_flight
            _require(found, "tier {}, block {} ({}): nothing is in flight for it", name, key, state)
        if state is not CellState.ABSENT:
            _same(cell.until_s, NEVER_S, "tier {}, block {} ({}): expires", name, key, state)
        if tier.policy is None:
            _same(cell.stored_bytes, 0, "tier {}, block {}: bytes in a tier without a budget", name, key)
        elif state in (CellState.PRESENT, CellState.STORING):
            _require(cell.stored_bytes > 0, "tier {}, block {} ({}): its bytes are not accounted", name, key, state)
        if key in tier.unvouched:
            _require(cell.stored_bytes > 0, "tier {}, block {}: unvouched, but without bytes", name, key)
            settled = state in (CellState.PRESENT, CellState.DELETING)
            _require(not settled, "tier {}, block {} ({}): unvouched", name, key, state)
        elif cell.stored_bytes and state is not CellState.DELETING:
            residents += 1
    _require(not any(reads.values()), "tier {}: reads of blocks without a cell", name)
    if tier.policy is not None:
        _same(len(tier.policy), residents, "tier {}: blocks that the policy knows", name)


def _check_tier(world: World, tier: Tier) -> None:
    name, spec = tier.spec.name, tier.spec
    _same(tier.index, world.tier_index[name], "tier {}: index", name)
    ours = deleting = lent = loans = asked = 0
    for block in world.blocks.values():
        cell = block.cells[tier.index]
        if cell is not None:
            ours += cell.stored_bytes
            deleting += cell.stored_bytes if cell.state is CellState.DELETING else 0
    for op in world.ops.values():
        if op.tier == tier.index and op.kind == "probe":
            asked += len(op.items)
        elif op.tier == tier.index and op.kind == "demote":
            loans += len(op.items)
            lent += sum(world.pools[block.pool].spec.payload_bytes for block, _, _ in op.items)
    leaving = sum(size for (index, _), size in world.foreign_leaving.items() if index == tier.index)
    _same(tier.used_bytes, ours + sum(tier.foreign.values()) + leaving, "tier {}: bytes used", name)
    _same(tier.deleting_bytes, deleting + leaving, "tier {}: bytes being deleted", name)
    _same(tier.lent_bytes, lent, "tier {}: bytes lent", name)
    _require(lent <= spec.queue_bytes_max or loans == 1, "tier {}: {} bytes lent are too many", name, lent)
    _same(tier.asking, asked, "tier {}: keys being asked about", name)
    _require(asked <= world.spec.probe_keys_max, "tier {}: {} keys being asked about are too many", name, asked)
    _require(not tier.owed.keys() & tier.parked.keys(), "tier {}: blocks both owed and parked", name)
    for key in (*tier.owed, *tier.parked):
        owed = world.blocks.get(key)
        _require(owed is not None and owed.state is READY, "tier {}, block {}: owed but not READY", name, key)
        cell = owed.cells[tier.index] if owed is not None else None
        open_ = cell is None or cell.state in (*OWABLE, CellState.PRESENT)
        _require(open_, "tier {}, block {}: owed while {}", name, key, cell and cell.state)
    _require(world.blocks.keys() >= tier.unvouched.keys(), "tier {}: unvouched blocks without a record", name)


# -- jobs -------------------------------------------------------------------------------------------------------------


def _check_loads(world: World) -> None:
    awaited: dict[tuple[int, BlockKey], int] = {}
    for job in world.loads.values():
        in_order = len(job.slots) == job.cursor <= job.limit <= len(job.keys)
        _require(in_order, "load job {}: its positions are out of order", job.job)
        _same(job.pending, job.slots.count(-1), "load job {}: awaited positions", job.job)
        _same(job.done, not job.pending and job.cursor >= job.limit, "load job {}: done", job.job)
        for index, slot in enumerate(job.slots):
            if slot < 0:
                awaited[job.job, job.keys[index]] = 1
        _require(all(index < job.limit for index in job.sources), "load job {}: sources beyond its limit", job.job)
        blocks = sum(len(op.items) for op in world.ops.values() if op.starter is job)
        payload = world.pools[job.pool].spec.payload_bytes
        _same(job.flight_bytes, blocks * payload, "load job {}: bytes in flight", job.job)
        goes_on = job.done or job.pending > 0 or job.job in world.starved or job.flight_bytes > 0
        _require(goes_on, "load job {}: it waits for nothing and would never end", job.job)
    for job_id, job in world.starved.items():
        _require(world.loads.get(job_id) is job and not job.done, "load job {}: starved, but not open", job_id)
        _require(world.ops or world.stores, "load job {}: starved, and nothing is in flight", job_id)
    waiting: dict[tuple[int, BlockKey], int] = {}
    for key, waiters in world.waiting.items():
        for job in waiters:
            waiting[job.job, key] = waiting.get((job.job, key), 0) + 1
    _same(waiting, awaited, "load jobs that wait")


def _check_flushes_and_holds(world: World) -> None:
    demoting: set[tuple[int, BlockKey]] = set()
    for op in world.ops.values() if world.flushes else ():
        if op.kind == "demote" and op.epoch == world.epoch:
            demoting.update((op.tier, block.key) for block, _, _ in op.items)
    for flush in world.flushes.values():
        _require(flush.remaining, "flush {}: done, but not reported", flush.job)
        for index, key in flush.remaining:
            owed = world.tiers[index].writable and key in world.tiers[index].owed
            _require(owed or (index, key) in demoting, "flush {}: waits in vain for {}", flush.job, key)
    for key, holders in world.holders.items():
        ids = [hold.hold for hold in holders]
        _require(ids and len(set(ids)) == len(ids), "block {}: its holders are {}", key, ids)
        _require(world.holds.keys() >= set(ids), "block {}: held by {}, some of which are over", key, ids)
    _require(
        world.holds.keys() >= world.due_steps.keys(), "holds that are over are kept in mind: {}", list(world.due_steps)
    )
    for hold in world.holds.values():
        kept = not hold.due or not hold.stepped or hold.hold in world.due_steps
        _require(kept, "hold {}: something is due, and no step would look", hold.hold)
        for key in hold.due:
            block = world.blocks.get(key)
            _require(block is None or block.state is not READY, "hold {}: {} is due, but READY", hold.hold, key)
            _require(hold in world.holders.get(key, ()), "hold {}: {} is due, but not held", hold.hold, key)


def _check_counters(world: World) -> None:
    c = world.counters
    open_blocks = sum(len(job.keys) for job in world.loads.values() if not job.done)
    _same(c.query_blocks, c.hit_blocks + c.miss_blocks + open_blocks, "counters: queries")
    _same(c.hit_blocks, sum(c.hit_blocks_by_tier.values()), "counters: hits by tier")
    _require(c.promote_failures >= c.corrupt_blocks + c.missing_blocks, "counters: more kinds of failure than failures")
    _same(c.resets, world.epoch, "counters: resets")
