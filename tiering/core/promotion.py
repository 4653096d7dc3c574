"""Secondary tiers -> CPU -> caller: load jobs, the promotions they start or join, and verdicts that turn out wrong."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.core import demotion, holds, room, stores
from tiering.core.commands import Cancel, JobDone, Promote, Touch, Transfer
from tiering.core.events import LeaseRequested, LoadPlan, LoadRequested
from tiering.core.moves import (
    cell_of,
    doom,
    fail_fill,
    forget_if_idle,
    grant_all,
    land_all,
    learn_parent,
    lease_all,
    release_doomed,
    set_absent,
    unlease_all,
)
from tiering.core.state import Block, LoadJob, Op, Pool, Tier, World
from tiering.core.transitions import CellState, Move, PrimaryState, SlotState
from tiering.types import BlockKey, Outcome, OutcomeCode

ABSENT, FILLING, READY = PrimaryState.ABSENT, PrimaryState.FILLING, PrimaryState.READY


def source_of(world: World, block: Block) -> Tier | None:
    """The nearest tier that has the block and answers."""
    for tier in world.tiers:
        cell = block.cells[tier.index]
        if cell is not None and cell.state is CellState.PRESENT and tier.readable:
            return tier
    return None


# -- requests ---------------------------------------------------------------------------------------------------------


def request_load(world: World, event: LoadRequested) -> LoadPlan:
    """Lease what is READY, join fills in flight, promote the rest, as far as the pool can hold the run."""
    pool = world.pools[event.pool]
    keys = event.keys
    world.counters.query_blocks += len(keys)
    slots = _ready_run(world, pool, keys)
    if len(slots) < len(keys):
        _teach(world, keys)
    _tell_of_use(world, pool, keys)
    job = LoadJob(world.next_id(), pool.index, keys, len(keys), len(keys), len(keys), slots)
    world.loads[job.job] = job
    if len(slots) < len(keys):
        job.position = {key: i for i, key in reversed(list(enumerate(keys)))}
        job.limit = job.protect = min(fitting(world, pool, keys), _first_repeat(keys, job.position))
        job.own = job.position if job.limit == len(keys) else set(keys[: job.limit])
        del slots[job.limit :]
    lease_all(pool, slots)
    job.cursor = len(slots)
    advance(world, job)
    if job.done:
        return LoadPlan(job.job, True, tuple(job.slots))
    job.announced = True
    ready = job.slots.index(-1) if job.pending else len(job.slots)
    return LoadPlan(job.job, False, tuple(job.slots[:ready]))


def request_lease(world: World, event: LeaseRequested) -> LoadPlan:
    """Lease the leading READY run and end there."""
    pool = world.pools[event.pool]
    slots = _ready_run(world, pool, event.keys)
    n = len(slots)
    job = LoadJob(world.next_id(), pool.index, event.keys[:n], n, n, n, slots, cursor=n, done=True)
    world.loads[job.job] = job
    lease_all(pool, slots)
    return LoadPlan(job.job, True, tuple(slots))


def _ready_run(world: World, pool: Pool, keys: Sequence[BlockKey]) -> list[int]:
    """Slots of the leading READY blocks. Links that the core did not know are learned on the way."""
    get, index = world.blocks.get, pool.index
    slots: list[int] = []
    before: BlockKey | None = None
    for key in keys:
        block = get(key)
        if block is None or block.state is not READY or block.pool != index:
            break
        if block.parent is None and learn_parent(world, block, before):
            stores.tell_policies(world, block)
        slots.append(block.slot)
        before = key
    return slots


def _first_repeat(keys: tuple[BlockKey, ...], position: dict[BlockKey, int]) -> int:
    """A run that repeats a key is no prefix; what stands before the repetition is served."""
    if len(position) == len(keys):
        return len(keys)
    return next(i for i, key in enumerate(keys) if position[key] != i)


def fitting(world: World, pool: Pool, keys: Sequence[BlockKey]) -> int:
    """How long a head of ``keys`` the pool can hold at a time: m of DESIGN section 7.

    m = slots - reserve - slots in use by others; a run that is READY as it stands needs no room at all.
    """
    get, loads, demotes = world.blocks.get, pool.loads, pool.demotes
    own_busy = 0
    ready = 0
    for index, key in enumerate(keys):
        block = get(key)
        if block is None or block.state is ABSENT:
            continue
        if block.state is FILLING or loads[block.slot] or demotes[block.slot]:
            own_busy += 1
        if ready == index and block.state is READY:
            ready += 1
    room_slots = pool.spec.slots - pool.spec.reserve_slots - (pool.busy - own_busy)
    return max(ready, min(len(keys), room_slots))


def touched(world: World, pool: Pool, keys: tuple[BlockKey, ...]) -> None:
    """A request used this path, wherever it is."""
    _teach(world, keys)
    _tell_of_use(world, pool, keys)


def _teach(world: World, keys: Sequence[BlockKey]) -> None:
    """A whole path shows links that the core did not know."""
    get = world.blocks.get
    before: BlockKey | None = None
    for key in keys:
        block = get(key)
        if block is not None and block.parent is None and learn_parent(world, block, before):
            stores.tell_policies(world, block)
        before = key


def _tell_of_use(world: World, pool: Pool, keys: tuple[BlockKey, ...]) -> None:
    stores.touch(world, pool, keys)
    for tier in world.tiers:
        caps = tier.spec.capabilities
        if caps.exclusive and caps.persistent and tier.readable:
            world.commands.append(Touch(tier.spec.name, keys))


def advance(world: World, job: LoadJob) -> None:
    """Go on with the job: lease, join and promote from its cursor, until its budget, the slots or the run end."""
    if job.cursor < job.limit:
        world.starved.pop(job.job, None)
        pool = world.pools[job.pool]
        wanted = _scan(world, job, pool)
        free = _free_for(world, pool, job, len(wanted)) if wanted else 0
        short = free < len(wanted)
        _take_on(world, job, pool, job.position[wanted[free].key] if short else job.scanned, wanted[:free])
        if short and (world.ops or world.stores):
            world.starved[job.job] = job
        elif short:
            truncate(world, job, job.cursor)
    end_if_complete(world, job)


def _scan(world: World, job: LoadJob, pool: Pool) -> list[Block]:
    """Look ahead from the cursor: the ABSENT blocks to promote now. Sets ``job.scanned``, where looking stopped."""
    payload = pool.spec.payload_bytes
    budget = world.spec.load_bytes_per_request_max - job.flight_bytes
    wanted: list[Block] = []
    index = job.cursor
    while index < job.limit:
        block = world.blocks.get(job.keys[index])
        if block is None:
            break
        if block.state is ABSENT:
            if source_of(world, block) is None:
                break
            if budget < payload and (job.flight_bytes or wanted):
                job.scanned = index
                return wanted
            budget -= payload
            wanted.append(block)
        elif block.pool != pool.index:
            break
        index += 1
    job.scanned = index
    truncate(world, job, index)
    return wanted


def _free_for(world: World, pool: Pool, job: LoadJob, n: int) -> int:
    """Free slots for ``n`` promotions of the job, beyond the reserve. Its own blocks past its stop go first."""
    floor = pool.spec.reserve_slots
    if len(pool.free) - floor >= n:
        return n
    while job.tail > job.protect and len(pool.free) - floor < n:
        job.tail -= 1
        key = job.keys[job.tail]
        block = world.blocks.get(key)
        if block is None or key in job.own or block.state is not READY or block.pool != pool.index:
            continue
        if pool.loads[block.slot] or pool.demotes[block.slot]:
            continue
        if block.copies == 1 and demotion.owed_somewhere(world, block):
            continue
        stores.drop(world, pool, [key], leaves_only=pool.policy.leaf_first)
    return stores.make_free(world, pool, n, own=job.own, flow_through=False, spare_owed=False, floor=floor)


def _take_on(world: World, job: LoadJob, pool: Pool, stop: int, wanted: list[Block]) -> None:
    """Lease or await everything from the cursor to ``stop``; ``wanted`` are the ABSENT blocks among it, to promote."""
    batches: dict[int, list[Block]] = {}
    for block in wanted:
        tier = source_of(world, block)
        assert tier is not None
        batches.setdefault(tier.index, []).append(block)
    grant_all(world, pool, wanted)
    job.flight_bytes += len(wanted) * pool.spec.payload_bytes
    for index in range(job.cursor, stop):
        block = world.blocks[job.keys[index]]
        if block.state is READY:
            lease_all(pool, (block.slot,))
            job.slots.append(block.slot)
        else:
            world.waiting.setdefault(block.key, []).append(job)
            job.slots.append(-1)
            job.pending += 1
    job.cursor = stop
    for tier_index, blocks in batches.items():
        _promote(world, world.tiers[tier_index], blocks, job)


def _promote(world: World, tier: Tier, blocks: list[Block], starter: LoadJob | None) -> None:
    size = tier.spec.batch_blocks_max
    for start in range(0, len(blocks), size):
        op = Op(world.next_id(), "promote", tier.index, world.epoch, [], starter=starter)
        for block in blocks[start : start + size]:
            cell = cell_of(block, tier)
            cell.reads += 1
            op.items.append((block, block.slot, cell.generation))
        world.ops[op.op] = op
        transfers = tuple(Transfer(block.key, block.pool, slot) for block, slot, _ in op.items)
        world.commands.append(Promote(op.op, tier.spec.name, transfers))


# -- the end of a job -------------------------------------------------------------------------------------------------


def truncate(world: World, job: LoadJob, position: int) -> None:
    """Give up everything from ``position`` on: leases end, awaited fills lose a waiter; reads nobody wants are cancelled."""
    if position >= job.limit:
        return
    job.limit = position
    job.scanned = min(job.scanned, position)
    job.cursor = min(job.cursor, position)
    given_up = job.slots[position:]
    del job.slots[position:]
    unlease_all(world.pools[job.pool], [slot for slot in given_up if slot >= 0])
    unwanted = False
    for index, slot in enumerate(given_up, position):
        job.sources.pop(index, None)
        if slot < 0:
            job.pending -= 1
            unwanted |= _stop_waiting(world, job, job.keys[index])
    if unwanted:
        _cancel_unwanted(world)


def _stop_waiting(world: World, job: LoadJob, key: BlockKey) -> bool:
    """True if nobody waits for the block any more."""
    waiters = world.waiting.get(key)
    if waiters is None:
        return False
    waiters.remove(job)
    if not waiters:
        del world.waiting[key]
    return not waiters


def _cancel_unwanted(world: World) -> None:
    """Promotions that nobody waits for any more need not be read at all."""
    for op in world.ops.values():
        if op.kind != "promote" or op.cancelled or op.epoch != world.epoch:
            continue
        if not any(block.key in world.waiting for block, _, _ in op.items):
            op.cancelled = True
            world.commands.append(Cancel(op.op, world.tiers[op.tier].spec.name))


def end_if_complete(world: World, job: LoadJob) -> None:
    if job.done or job.pending or job.cursor < job.limit:
        return
    job.done = True
    world.starved.pop(job.job, None)
    counters = world.counters
    counters.hit_blocks += job.limit
    counters.miss_blocks += len(job.keys) - job.limit
    by_tier = counters.hit_blocks_by_tier
    if job.limit > len(job.sources):
        by_tier["primary"] = by_tier.get("primary", 0) + job.limit - len(job.sources)
    for source in job.sources.values():
        name = world.tiers[source].spec.name
        by_tier[name] = by_tier.get(name, 0) + 1
    if world.counts_hits:
        demotion.owe_after_load(world, [world.blocks[key] for key in job.keys[: job.limit]])
    if job.announced:
        world.commands.append(JobDone(job.job, job.limit))


def overdue(world: World, job_id: int) -> None:
    """The caller waits no longer: what is awaited, and all behind it, is a miss."""
    job = world.loads.get(job_id)
    if job is None:
        world.counters.unknown_completions += 1
    elif not job.done:
        truncate(world, job, job.slots.index(-1) if job.pending else job.cursor)
        end_if_complete(world, job)


def release(world: World, job_id: int) -> None:
    """End of a job, at any state: every lease goes back."""
    job = world.loads.pop(job_id, None)
    if job is None:
        world.counters.unknown_completions += 1
        return
    if not job.done:
        job.announced = False
        truncate(world, job, 0)
        end_if_complete(world, job)
    unlease_all(world.pools[job.pool], job.slots)
    job.slots.clear()


def retry_starved(world: World) -> None:
    """The longest starved first; where it still finds no slot, those behind it in its pool would not either."""
    dry: set[int] = set()
    for job in list(world.starved.values()):
        if job.pool not in dry:
            advance(world, job)
        if job.job in world.starved:
            dry.add(job.pool)


# -- fills ------------------------------------------------------------------------------------------------------------


def fill_landed(world: World, pool: Pool, block: Block, source: int | None = None) -> None:
    """READY: the jobs that waited for it lease it in the same step. ``source``: the tier it came from."""
    for job in world.waiting.pop(block.key, ()):
        index = job.position[block.key]
        lease_all(pool, (block.slot,))
        job.slots[index] = block.slot
        if source is not None:
            job.sources[index] = source
        job.pending -= 1
        end_if_complete(world, job)


def fill_failed(world: World, block: Block) -> None:
    """ABSENT: the jobs that waited for it end before it."""
    for job in world.waiting.pop(block.key, ()):
        truncate(world, job, job.position[block.key])
        end_if_complete(world, job)


def finish_promote(world: World, op: Op, outcomes: tuple[Outcome, ...]) -> None:
    tier = world.tiers[op.tier]
    pool = world.pools[op.items[0][0].pool]
    landed: list[Block] = []
    again: dict[int, list[Block]] = {}
    if op.starter is not None:
        op.starter.flight_bytes -= len(op.items) * pool.spec.payload_bytes
    for (block, slot, generation), outcome in zip(op.items, outcomes, strict=True):
        doomed = pool.states[slot] is SlotState.DOOMED
        if doomed:
            release_doomed(pool, slot)
            world.counters.stale_completions += 1
        if op.epoch != world.epoch:
            continue
        cell = cell_of(block, tier)
        cell.reads -= 1
        if not outcome.ok and cell.generation == generation:
            _read_failed(world, tier, block, outcome)
        if doomed:
            forget_if_idle(world, block)
        elif outcome.ok:
            landed.append(block)
        elif _may_try_again(world, op, block, outcome) and (other := source_of(world, block)) is not None:
            again.setdefault(other.index, []).append(block)
        else:
            _give_up_fill(world, pool, block)
    land_all(world, pool, landed)
    world.counters.promoted_blocks += len(landed)
    stores.admit_runs(pool, landed)
    for block in landed:
        fill_landed(world, pool, block, tier.index)
        demotion.owe_nearer(world, block, tier.index)
    if world.holders:
        holds.settled(world, landed)
    for index, blocks in again.items():
        wanted = [block for block in blocks if block.key in world.waiting]
        _promote(world, world.tiers[index], wanted, None)
        for block in blocks:
            if block.key not in world.waiting:  # its job ended with another block of this very operation
                _give_up_fill(world, pool, block)
    if op.starter is not None:
        advance(world, op.starter)


def _give_up_fill(world: World, pool: Pool, block: Block) -> None:
    fail_fill(world, pool, block)
    fill_failed(world, block)
    stores.lost_from_primary(world, (block.key,))
    forget_if_idle(world, block)


def _may_try_again(world: World, op: Op, block: Block, outcome: Outcome) -> bool:
    """A read that we cancelled and somebody joined meanwhile is read again; one that the closing driver dropped is not."""
    return block.key in world.waiting and (op.cancelled or outcome.code is not OutcomeCode.CANCELLED)


def _read_failed(world: World, tier: Tier, block: Block, outcome: Outcome) -> None:
    """The verdict "present" was wrong, or useless: rewrite it in this very step (a stale one would be asked for ever)."""
    cell = cell_of(block, tier)
    if outcome.code is OutcomeCode.CANCELLED or cell.state is not CellState.PRESENT:
        return
    world.counters.promote_failures += 1
    if outcome.code is OutcomeCode.MISSING:
        world.counters.missing_blocks += 1
        room.gone(tier, block, cell)
        set_absent(world, block, cell, Move.MISS, ages=not tier.authoritative)
        return
    set_absent(world, block, cell, Move.MISS, ages=True)
    if outcome.code is OutcomeCode.CORRUPT:
        world.counters.corrupt_blocks += 1
        if tier.spec.capabilities.can_delete and not cell.reads:
            room.discard(world, tier, block, cell)


def promote_overdue(world: World, op: Op) -> None:
    """Too late: the keys are ABSENT at once and free to take other slots; the slots wait for the bytes, DOOMED."""
    if op.epoch != world.epoch:
        return
    tier = world.tiers[op.tier]
    pool = world.pools[op.items[0][0].pool]
    for block, slot, generation in op.items:
        if pool.states[slot] is not SlotState.FILLING:  # told twice
            continue
        doom(world, pool, block)
        cell = cell_of(block, tier)
        if cell.generation == generation and cell.state is CellState.PRESENT:
            set_absent(world, block, cell, Move.MISS, ages=True)
        fill_failed(world, block)
        stores.lost_from_primary(world, (block.key,))
