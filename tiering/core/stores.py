"""GPU -> CPU: granting slots to a run of blocks, evicting for it, and what follows when the copy has landed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat

from tiering.core import demotion, holds, promotion
from tiering.core.events import Grant, StorePlan, StoreRequested
from tiering.core.moves import (
    evict_all,
    fail_fill,
    forget_if_idle,
    grant_all,
    land_all,
    learn_parent,
    note_remote,
    records_of,
    release_doomed,
)
from tiering.core.state import Block, Pool, StoreJob, World
from tiering.core.transitions import CellState, PrimaryState, SlotState
from tiering.types import BlockKey, Outcome

READY, ABSENT = PrimaryState.READY, PrimaryState.ABSENT

ORPHAN = "orphan: the stated parent is in no tier"
NO_SLOT = "no free slot in the primary tier"

PASS_MAX = 4096
"""Blocks in use or owed that one search passes over: it may not hold the lock for long, whatever the policy."""

BACKED_STEP_MAX = 2048
"""Blocks looked at in one search for those that another tier holds: about a millisecond."""


def request_store(world: World, event: StoreRequested) -> StorePlan:
    """Grant slots to the longest head that fits; what is there or on its way needs none."""
    pool, keys, parent = world.pools[event.pool], event.keys, event.parent
    counters = world.counters
    if keys and parent is not None and _is_orphan(world, parent, keys[0]):
        counters.refused_blocks += len(keys)
        return StorePlan(0, (), (), 0, ORPHAN)
    own = set(keys)
    missing, present = _sort(world, keys, repeats=len(own) < len(keys))
    if parent is not None:
        own.add(parent)
    room = make_free(world, pool, len(missing), own=own, flow_through=True, spare_owed=event.patient)
    lacking = len(missing) - room
    stop = missing[room] if lacking else len(keys)
    del missing[room:]
    job, grants = _grant(world, pool, event, missing)
    if present or world.tiers:
        touch(world, pool, keys)
    served = bisect_left(present, stop)
    # Not those behind the stop: a patient caller comes back for them, and a tier that refuses would be asked without end.
    _offer_again(world, event, present[:served])
    counters.present_blocks += served
    retry = False
    if lacking and event.patient:
        demotion.anticipate_evictions(world)
        retry = _may_free(world, pool)
    if retry:
        world.retry_wanted = True
    else:
        counters.refused_blocks += lacking
    return StorePlan(job, grants, tuple(present), stop, NO_SLOT if lacking else "", retry)


def _is_orphan(world: World, parent: BlockKey, first: BlockKey) -> bool:
    """The parent is known to be in no tier (an unasked shared tier gets the benefit of the doubt)."""
    block = world.blocks.get(parent)
    if block is not None and block.copies:
        return False
    head = world.blocks.get(first)
    if head is not None and head.state is not ABSENT:
        return False
    for tier in world.tiers:
        cell = block.cells[tier.index] if block is not None else None
        if cell is None:
            if not tier.authoritative:
                return False
        elif cell.state in (CellState.UNKNOWN, CellState.ASKING):
            return False
    return True


def _sort(world: World, keys: Sequence[BlockKey], *, repeats: bool) -> tuple[list[int], list[int]]:
    """Positions that need a slot, and positions that are READY or FILLING. A repeated key needs one slot."""
    missing: list[int] = []
    present: list[int] = []
    if world.blocks.keys().isdisjoint(keys):
        missing += range(len(keys))
    else:
        get = world.blocks.get
        for index, key in enumerate(keys):
            block = get(key)
            (missing if block is None or block.state is ABSENT else present).append(index)
    if repeats:
        missing = sorted({keys[index]: index for index in reversed(missing)}.values())
    return missing, present


def _grant(world: World, pool: Pool, event: StoreRequested, granted: list[int]) -> tuple[int, tuple[Grant, ...]]:
    """Records, chain links and slots for these positions; the job (0: none) and its grants."""
    if not granted:
        return 0, ()
    blocks = records_of(world, pool, event.keys, granted, event.parent)
    slots = grant_all(world, pool, blocks)
    job = StoreJob(world.next_id(), pool.index, blocks, slots)
    world.stores[job.job] = job
    items = zip(granted, [block.key for block in blocks], slots, strict=True)
    return job.job, tuple(map(tuple.__new__, repeat(Grant), items))


def _offer_again(world: World, event: StoreRequested, present: Sequence[int]) -> None:
    """Offered once more: links that were not known, and demotions that failed, get their new chance."""
    keys = event.keys
    for index in present:
        block = world.blocks[keys[index]]
        if block.parent is None and learn_parent(world, block, keys[index - 1] if index else event.parent):
            tell_policies(world, block)
        if block.state is READY:
            demotion.owe_again(world, block)


def _may_free(world: World, pool: Pool) -> bool:
    """Something in flight or owed will free a slot, or make a block evictable, without anybody's help."""
    return bool(pool.busy or world.ops) or any(tier.writable and tier.owed for tier in world.tiers)


# -- what policies hear -----------------------------------------------------------------------------------------------


def touch(world: World, pool: Pool, keys: Sequence[BlockKey]) -> None:
    """A request used the path, in every tier: without it the far tiers forget what the near ones serve."""
    pool.policy.touch(keys)
    for tier in world.tiers:
        if tier.policy is not None:
            tier.policy.touch(keys)


def tell_policies(world: World, block: Block) -> None:
    """The block's parent has become known: those that hold it link it."""
    if block.state is READY:
        world.pools[block.pool].policy.admit((block.key,), block.parent)
    for tier in world.tiers:
        cell = block.cells[tier.index]
        if tier.policy is None or cell is None or not cell.stored_bytes:
            continue
        if cell.state is not CellState.DELETING and block.key not in tier.unvouched:
            tier.policy.admit((block.key,), block.parent)


def admit_runs(pool: Pool, blocks: Sequence[Block]) -> None:
    """Tell the policy of new residents, one call for each contiguous run."""
    keys = [block.key for block in blocks]
    parents = [block.parent for block in blocks]
    if parents[1:] == keys[:-1]:
        cuts = [0, len(keys)] if keys else []
    else:
        cuts = [i for i in range(len(keys)) if not i or parents[i] != keys[i - 1]] + [len(keys)]
    for first, end in pairwise(cuts):
        pool.policy.admit(keys[first:end], parents[first])


# -- eviction ---------------------------------------------------------------------------------------------------------


def make_free(
    world: World,
    pool: Pool,
    n: int,
    *,
    own: Container[BlockKey],
    flow_through: bool,
    spare_owed: bool,
    floor: int = 0,
    also_spared: Callable[[Block], bool] | None = None,
) -> int:
    """Evict until ``n`` slots beyond ``floor`` are free, as far as idle blocks go; how many of the ``n`` there are.

    Passes, each less picky: idle blocks of others; with ``flow_through`` those of ``own`` that another tier holds (a
    chain longer than the primary tier flows through it); any that another tier holds, leaf or not; at last, unless
    ``spare_owed``, blocks still owed to a tier.
    """
    have = len(pool.free) - floor
    if have >= n:
        return n
    if len(pool.free) + pool.busy == pool.spec.slots:
        return max(0, have)
    owing = demotion.owes(world)
    search = _Search(world, pool, own, False, owing, also_spared)
    have += _evict(search, n - have)
    if have < n and flow_through:
        search = _Search(world, pool, own, True, owing, also_spared)
        have += _evict(search, n - have)
    if have < n and world.tiers and pool.policy.leaf_first:
        have += _evict_backed(search, n - have)
    if have < n and owing and not spare_owed:
        have += _evict(_Search(world, pool, own, flow_through, False, also_spared), n - have)
    return max(0, min(n, have))


@dataclass(slots=True)
class _Search:
    """What one pass of eviction leaves alone."""

    world: World
    pool: Pool
    own: Container[BlockKey]
    own_may_go: bool
    """If another tier holds them."""
    spare_owed: bool
    also_spared: Callable[[Block], bool] | None
    inner: set[BlockKey] = field(default_factory=set)
    """Blocks with children that the policy cannot see: FILLING, or in another tier alone."""
    passed: int = 0
    """Blocks passed over so far. Past ``PASS_MAX`` any answer will do that ends the search."""

    def spared(self) -> Callable[[BlockKey], bool]:
        world, blocks, loads, demotes = self.world, self.world.blocks, self.pool.loads, self.pool.demotes
        own, own_may_go, spare_owed, also_spared = self.own, self.own_may_go, self.spare_owed, self.also_spared
        inner = self.inner

        def spared(key: BlockKey) -> bool:
            block = blocks[key]
            slot = block.slot
            if not (
                loads[slot]
                or demotes[slot]
                or (key in own and (not own_may_go or block.copies == 1))
                or (inner and key in inner)
                or (also_spared is not None and also_spared(block))
                # Owed to a slow tier but held by another is not lost: the slow one must not keep the slot from the fast one.
                or (spare_owed and block.copies == 1 and demotion.owed_somewhere(world, block))
            ):
                return False
            self.passed += 1
            return self.passed <= PASS_MAX

        return spared

    def sift(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that are not spared."""
        self.passed = -len(keys)
        spared = self.spared()
        return [key for key in keys if not spared(key)]


def _evict(search: _Search, n: int) -> int:
    """Evict up to ``n`` blocks that the policy names; how many went."""
    pool, went = search.pool, 0
    while went < n:
        named = pool.policy.victims(n - went, search.spared())
        tired = search.passed > PASS_MAX
        if tired:
            named = search.sift(named)
        gone = drop(search.world, pool, named, leaves_only=pool.policy.leaf_first)
        went += len(gone)
        if tired or len(gone) == len(named):
            break
        search.inner.update(set(named).difference(gone))
    return went


def _evict_backed(search: _Search, n: int) -> int:
    """Evict up to ``n`` blocks that another tier holds, also where others behind them stay; how many went.

    The policy's order is kept: it is asked as if all might go. Bounded, because it may have much to say in vain.
    """
    order = search.pool.policy.victims(BACKED_STEP_MAX, lambda key: False)
    backed = search.sift([key for key in order if search.world.blocks[key].copies > 1])
    return len(drop(search.world, search.pool, backed[:n], leaves_only=False))


def drop(world: World, pool: Pool, victims: Sequence[BlockKey], *, leaves_only: bool) -> list[BlockKey]:
    """Evict these idle blocks from the primary tier; with ``leaves_only`` no last copy of a block with children."""
    if not victims:
        return []
    gone = evict_all(world, pool, victims, leaves_only=leaves_only)
    pool.policy.forget(gone, evicted=True)
    world.counters.evicted_blocks += len(gone)
    lost_from_primary(world, gone)
    return gone


def lost_from_primary(world: World, keys: Sequence[BlockKey]) -> None:
    """What follows whenever keys become ABSENT in the primary tier, however it came about."""
    demotion.disown(world, keys)
    if world.remote_tiers:
        for key in keys:
            if (block := world.blocks.get(key)) is not None:
                note_remote(world, block)
    if world.holders:
        holds.lost(world, keys)


# -- completion -------------------------------------------------------------------------------------------------------


def finish_store(world: World, job_id: int, outcomes: tuple[Outcome, ...]) -> None:
    """The copies ended: READY and admitted, or ABSENT again; waiting loads and owed tiers learn of it."""
    job = world.stores.pop(job_id, None)
    if job is None:
        world.counters.unknown_completions += 1
        return
    if len(outcomes) != len(job.blocks):
        outcomes = (Outcome.failed(f"{len(outcomes)} outcomes for {len(job.blocks)} blocks"),) * len(job.blocks)
    pool = world.pools[job.pool]
    landed = job.blocks
    if outcomes.count(Outcome.OK) < len(outcomes) or pool.states[job.slots[0]] is SlotState.DOOMED:
        landed = _sort_out(world, pool, job, outcomes)
    land_all(world, pool, landed)
    world.counters.stored_blocks += len(landed)
    admit_runs(pool, landed)
    if world.waiting:
        for block in landed:
            promotion.fill_landed(world, pool, block)
    demotion.owe_after_store(world, landed)
    if world.holders:
        holds.settled(world, landed)


def _sort_out(world: World, pool: Pool, job: StoreJob, outcomes: tuple[Outcome, ...]) -> list[Block]:
    """Deal with the fills that nobody wants any more, and with those that failed; the others."""
    landed: list[Block] = []
    for block, slot, outcome in zip(job.blocks, job.slots, outcomes, strict=True):
        if pool.states[slot] is SlotState.DOOMED:
            release_doomed(pool, slot)
            world.counters.stale_completions += 1
        elif outcome.ok:
            landed.append(block)
        else:
            fail_fill(world, pool, block)
            world.counters.failed_fills += 1
            promotion.fill_failed(world, block)
            holds.rest(world, block)
            lost_from_primary(world, (block.key,))
            forget_if_idle(world, block)
    return landed
