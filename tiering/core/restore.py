"""Re-store: blocks that a caller still holds elsewhere and that the primary tier lost are offered again.

Event-driven: each way in which a held key becomes ABSENT puts just that key in its holders' queues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tiering.core import stores
from tiering.core.commands import RestoreDue
from tiering.core.events import Grant, HoldRequested, RestoreRequested, StorePlan
from tiering.core.moves import block_of, grant_all, learn_parent
from tiering.core.state import Block, Hold, StoreJob, World
from tiering.core.transitions import PrimaryState
from tiering.types import BlockKey

READY, ABSENT = PrimaryState.READY, PrimaryState.ABSENT


def request_hold(world: World, event: HoldRequested) -> int:
    """Register the holder. Held keys that are ABSENT already are due at once."""
    hold = Hold(world.next_id(), event.pool, event.keys, {key: i for i, key in reversed(list(enumerate(event.keys)))})
    world.holds[hold.hold] = hold
    for key in hold.position:
        world.holders.setdefault(key, []).append(hold)
        if _is_absent(world, key):
            hold.due[key] = None
    _notify(world, hold)
    return hold.hold


def release_hold(world: World, hold_id: int) -> None:
    """The caller holds the blocks no more."""
    hold = world.holds.pop(hold_id, None)
    if hold is None:
        world.counters.unknown_completions += 1
        return
    for key in hold.position:
        holders = world.holders.get(key)
        if holders is not None and hold in holders:
            holders.remove(hold)
            if not holders:
                del world.holders[key]


def lost(world: World, keys: Iterable[BlockKey]) -> None:
    """These keys became ABSENT: due to those that hold them."""
    for key in keys:
        for hold in world.holders.get(key, ()):
            hold.due[key] = None
            _notify(world, hold)


def rest(world: World, block: Block) -> None:
    """A copy failed: its holders do not try again at once, or a copy that always fails would be tried without end."""
    for hold in world.holders.get(block.key, ()):
        hold.rests_until_s = world.now_s + world.spec.restore_pause_s


def settled(world: World, blocks: Iterable[Block]) -> None:
    """Blocks became READY, from whatever source: they are due no more."""
    for block in blocks:
        for hold in world.holders.get(block.key, ()):
            hold.due.pop(block.key, None)


def wake(world: World) -> None:
    """Something came free: holds that could not restore may try again."""
    for hold in world.holds.values():
        if hold.due:
            _notify(world, hold)


def _notify(world: World, hold: Hold) -> None:
    """Tell the holder, once until it answers, and not while there is no point."""
    if hold.notified or not world.spec.restore or world.now_s < hold.rests_until_s or _starved(world, hold):
        return
    if hold.due and (world.pools[hold.pool].free or world.now_s >= hold.looks_again_s):
        hold.notified = True
        world.commands.append(RestoreDue(hold.hold))


def request_restore(world: World, event: RestoreRequested) -> StorePlan:
    """Grant slots to due blocks, worth most first, within the byte budget; never at the cost of a block worth as much."""
    hold = world.holds.get(event.hold)
    if hold is None:
        return StorePlan(0, (), (), 0)
    hold.notified = False
    pool = world.pools[hold.pool]
    due = [key for key in hold.due if _is_absent(world, key)]
    hold.due = OrderedDict.fromkeys(due)  # what is FILLING comes back if that fails
    worth = _worths(world, hold, due)
    due.sort(key=lambda key: (-worth[key], hold.position[key]))
    within = min(len(due), event.bytes_max // pool.spec.payload_bytes)
    blocks: list[Block] = []
    slots: list[int] = []
    for key in due[:within]:
        if not _make_one_free(world, hold, worth[key]):
            break
        index = hold.position[key]
        block = block_of(world, key, pool.index)
        learn_parent(world, block, hold.keys[index - 1] if index else None)
        slots += grant_all(world, pool, [block])
        blocks.append(block)
        del hold.due[key]
    if len(due) > within:
        _skip(world, "budget", len(due) - within)
    if len(blocks) < within:
        _skip(world, "no_slot", within - len(blocks))
        hold.looks_again_s = world.now_s + world.spec.restore_pause_s
    later = bool(hold.due)
    if not blocks:
        return StorePlan(0, (), (), len(hold.keys), retry=later)
    job = StoreJob(world.next_id(), pool.index, blocks, slots)
    world.stores[job.job] = job
    world.counters.restored_blocks += len(blocks)
    world.counters.restore_bytes += len(blocks) * pool.spec.payload_bytes
    if len(blocks) == within:
        _notify(world, hold)
    grants = tuple(Grant(hold.position[block.key], block.key, slot) for block, slot in zip(blocks, slots, strict=True))
    return StorePlan(job.job, grants, (), len(hold.keys), retry=later)


def _is_absent(world: World, key: BlockKey) -> bool:
    block = world.blocks.get(key)
    return block is None or block.state is ABSENT


def _skip(world: World, reason: str, n: int) -> None:
    skipped = world.counters.restore_skipped
    skipped[reason] = skipped.get(reason, 0) + n


def _worths(world: World, hold: Hold, due: list[BlockKey]) -> dict[BlockKey, int]:
    """Blocks regained by each: itself and the present run right behind it; missing neighbours count as one run."""
    if not due:
        return {}
    worth: dict[BlockKey, int] = {}
    wanted = set(due)
    run = 0
    for key in reversed(hold.keys):
        block = world.blocks.get(key)
        if key in wanted or (block is not None and block.state is READY):
            run += 1
        else:
            run = 0
        if key in wanted:
            worth[key] = run
    return worth


def _starved(world: World, hold: Hold) -> bool:
    """A load waits for slots: it would take again at once whatever a restore fills, and the two go on for ever."""
    return any(job.pool == hold.pool for job in world.starved.values())


def _make_one_free(world: World, hold: Hold, worth: int) -> bool:
    """A slot for a block of this worth: a free one, or that of an unheld block worth less (a leaf is worth itself, 1)."""
    pool = world.pools[hold.pool]
    if _starved(world, hold):
        return False
    if pool.free:
        return True
    if worth <= 1:
        return False

    def worth_as_much(block: Block) -> bool:
        return block.key in world.holders or block.children > 0

    free = stores.make_free(world, pool, 1, own=(), flow_through=False, spare_owed=True, also_spared=worth_as_much)
    return free == 1
