"""Re-store: slots for blocks that a caller still holds elsewhere and that the primary tier lost (``holds`` knows which)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiering.core import holds, stores
from tiering.core.events import Grant, RestorePlan, RestoreRequested, RestoreStep, StorePlan
from tiering.core.moves import block_of, grant_all, learn_parent
from tiering.core.state import Block, Hold, Pool, StoreJob, World
from tiering.core.transitions import PrimaryState
from tiering.types import BlockKey

READY = PrimaryState.READY

BUDGET, NO_SLOT, RESTING = "budget", "no_slot", "resting"
"""Why a due block got nothing."""

DUE_STEP_MAX = 2048
"""Due blocks looked at in one step: it may not hold the lock for long. Those that got nothing go behind the others."""

RUN_MAX = 4096
"""How far the present run behind a missing block is followed to learn its worth."""


@dataclass(slots=True)
class _Batch:
    """What one hold gets in a step."""

    hold: Hold
    blocks: list[Block] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


def request_restore(world: World, event: RestoreRequested) -> StorePlan:
    """Grant slots to the hold's due blocks, worth most first, within the byte budget."""
    hold = world.holds.get(event.hold)
    if hold is None:
        return StorePlan(0, (), (), 0)
    hold.notified = False
    due = [key for key in hold.due if holds.is_absent(world, key)]
    hold.due = OrderedDict.fromkeys(due)  # what is FILLING comes back if that fails
    pool = world.pools[hold.pool]
    ranked = _ranked(world, [(hold, key) for key in due])
    batches, skipped = _grant(world, ranked, event.bytes_max, ranked_only=True)
    later = bool(hold.due)
    if skipped == NO_SLOT:
        hold.looks_again_s = world.now_s + world.spec.restore_pause_s
    if not batches:
        return StorePlan(0, (), (), len(hold.keys), retry=later)
    plan = _plan(world, pool, batches[hold.hold], later)
    if skipped != NO_SLOT:
        holds.notify(world, hold)
    return plan


def request_step(world: World, event: RestoreStep) -> RestorePlan:
    """Grant slots to what is due in these holds, ranked over all of them, within the byte budget."""
    if not world.spec.restore:
        return RestorePlan()
    due: list[tuple[Hold, BlockKey]] = []
    seen: set[BlockKey] = set()
    resting = dry = 0
    for hold in _asked(world, event.holds):
        if world.now_s < hold.rests_until_s:
            resting += len(hold.due)
            continue
        if not world.pools[hold.pool].free and world.now_s < hold.looks_again_s:
            dry += len(hold.due)
            continue
        if hold.stepped and len(due) + len(hold.due) > DUE_STEP_MAX and hold.hold in world.due_steps:
            world.due_steps[hold.hold] = world.due_steps.pop(hold.hold)  # the others come first in the next step
        for key in list(islice(hold.due, max(0, DUE_STEP_MAX - len(due)))):
            world.counters.restore_examined += 1
            hold.due.move_to_end(key)
            if key not in seen and holds.is_absent(world, key):
                seen.add(key)
                due.append((hold, key))
    _skip(world, RESTING, resting)
    _skip(world, NO_SLOT, dry)
    order = _ranked(world, due) if event.ranked else [(hold, key, 0) for hold, key in due]
    batches, skipped = _grant(world, order, event.bytes_max, ranked_only=event.ranked)
    if skipped == NO_SLOT:
        # Until a slot is free, or some time has passed, another look would find the same.
        for hold, key in due:
            if key in hold.due and not world.pools[hold.pool].free:
                hold.looks_again_s = world.now_s + world.spec.restore_pause_s
    plans = tuple(
        (number, _plan(world, world.pools[batch.hold.pool], batch, bool(batch.hold.due)))
        for number, batch in batches.items()
    )
    return RestorePlan(plans, skipped or (NO_SLOT if dry else ""))


def _asked(world: World, numbers: tuple[int, ...] | None) -> list[Hold]:
    """Those of the holds that have something due."""
    for hold in [hold for hold in world.due_steps.values() if not hold.due]:
        del world.due_steps[hold.hold]
    if numbers is None:
        return list(world.due_steps.values())
    return [world.due_steps[number] for number in numbers if number in world.due_steps]


def _ranked(world: World, due: Sequence[tuple[Hold, BlockKey]]) -> list[tuple[Hold, BlockKey, int]]:
    """Worth most first, in tokens regained; of one prefix, head first."""
    wanted = {key for _, key in due}
    order: list[tuple[Hold, BlockKey, int]] = []
    memo: dict[int, dict[int, int]] = {}
    for hold, key in sorted(due, key=lambda item: -item[0].position[item[1]]):
        worth = _run_behind(world, hold, hold.position[key], wanted, memo.setdefault(hold.hold, {}))
        order.append((hold, key, worth * world.pools[hold.pool].spec.tokens_per_block))
    order.sort(key=lambda item: (-item[2], item[0].position[item[1]]))
    return order


def _run_behind(world: World, hold: Hold, at: int, wanted: set[BlockKey], known: dict[int, int]) -> int:
    """Blocks regained: itself and what is present, or wanted too, right behind it. ``known``: of later positions."""
    run, position = 1, at + 1
    while position < len(hold.keys) and run < RUN_MAX:
        if position in known:
            run += known[position]
            break
        key = hold.keys[position]
        block = world.blocks.get(key)
        if key not in wanted and (block is None or block.state is not READY):
            break
        run += 1
        position += 1
    world.counters.restore_examined += position - at
    known[at] = run
    return run


def _grant(
    world: World, order: Sequence[tuple[Hold, BlockKey, int]], bytes_max: int, *, ranked_only: bool
) -> tuple[dict[int, _Batch], str]:
    """Slots in this order, until the bytes or the slots of a pool are used up; and what ended it ("" if nothing did)."""
    batches: dict[int, _Batch] = {}
    bytes_left, over_budget = bytes_max, 0
    dry: dict[int, int] = {}
    for hold, key, worth in order:
        pool = world.pools[hold.pool]
        if pool.spec.payload_bytes > bytes_left:
            over_budget += 1
            continue
        if pool.index in dry or not _make_one_free(world, pool, worth, ranked_only):
            dry[pool.index] = dry.get(pool.index, 0) + 1
            continue
        bytes_left -= pool.spec.payload_bytes
        block = block_of(world, key, pool.index)
        index = hold.position[key]
        learn_parent(world, block, hold.keys[index - 1] if index else None)
        batch = batches.setdefault(hold.hold, _Batch(hold))
        batch.slots += grant_all(world, pool, [block])
        batch.blocks.append(block)
        del hold.due[key]
    _skip(world, BUDGET, over_budget)
    _skip(world, NO_SLOT, sum(dry.values()))
    return batches, NO_SLOT if dry else BUDGET if over_budget else ""


def _plan(world: World, pool: Pool, batch: _Batch, later: bool) -> StorePlan:
    """The store job of a batch, and what its holder is told."""
    hold = batch.hold
    job = StoreJob(world.next_id(), pool.index, batch.blocks, batch.slots)
    world.stores[job.job] = job
    world.counters.restored_blocks += len(batch.blocks)
    world.counters.restore_bytes += len(batch.blocks) * pool.spec.payload_bytes
    items = zip(batch.blocks, batch.slots, strict=True)
    grants = tuple(Grant(hold.position[block.key], block.key, slot) for block, slot in items)
    return StorePlan(job.job, grants, (), len(hold.keys), retry=later)


def _skip(world: World, reason: str, n: int) -> None:
    if n:
        skipped = world.counters.restore_skipped
        skipped[reason] = skipped.get(reason, 0) + n


def _make_one_free(world: World, pool: Pool, worth: int, ranked: bool) -> bool:
    """A slot for a block of this worth: a free one, or that of an unheld block worth less (a leaf is worth itself)."""
    if holds.starved(world, pool.index):
        return False
    if pool.free:
        return True
    if not ranked:
        return stores.make_free(world, pool, 1, own=(), flow_through=False, spare_owed=False) == 1
    if worth <= pool.spec.tokens_per_block:
        return False

    def worth_as_much(block: Block) -> bool:
        return block.key in world.holders or block.children > 0

    free = stores.make_free(world, pool, 1, own=(), flow_through=False, spare_owed=True, also_spared=worth_as_much)
    return free == 1
