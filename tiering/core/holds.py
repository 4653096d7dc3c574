"""Holds: runs of blocks that a caller keeps elsewhere. Each way in which a held key becomes ABSENT makes just that key due.

``Hold.due`` and ``World.holders`` change here and in the sibling ``restore``, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiering.core.commands import RestoreDue
from tiering.core.events import HoldExtended, HoldRequested, HoldTrimmed
from tiering.core.state import Block, Hold, World
from tiering.core.transitions import PrimaryState
from tiering.types import BlockKey

ABSENT = PrimaryState.ABSENT


def request_hold(world: World, event: HoldRequested) -> int:
    """Register the holder. Held keys that are ABSENT already are due at once."""
    hold = Hold(world.next_id(), event.pool, event.stepped)
    world.holds[hold.hold] = hold
    _append(world, hold, event.keys)
    return hold.hold


def extend(world: World, event: HoldExtended) -> None:
    """The run goes on."""
    hold = world.holds.get(event.hold)
    if hold is None:
        world.counters.unknown_completions += 1
    elif hold.epoch == world.epoch:  # what a reset ended stays ended: nobody knows whose bytes the blocks are
        _append(world, hold, event.keys)


def _append(world: World, hold: Hold, keys: Iterable[BlockKey]) -> None:
    hold.epoch = world.epoch
    for key in keys:
        if key not in hold.position:
            hold.position[key] = len(hold.keys)
            world.holders.setdefault(key, []).append(hold)
            if is_absent(world, key):
                hold.due[key] = None
        hold.keys.append(key)
    notify(world, hold)


def trim(world: World, event: HoldTrimmed) -> None:
    """The head of the run is held no more."""
    hold = world.holds.get(event.hold)
    if hold is None:
        world.counters.unknown_completions += 1
        return
    for key in hold.keys[hold.first : event.below]:
        if hold.position.get(key, event.below) < event.below:
            del hold.position[key]
            hold.due.pop(key, None)
            _let_go(world, hold, key)
    hold.first = max(hold.first, min(event.below, len(hold.keys)))


def release_hold(world: World, hold_id: int) -> None:
    """The caller holds the blocks no more."""
    hold = world.holds.pop(hold_id, None)
    world.due_steps.pop(hold_id, None)
    if hold is None:
        world.counters.unknown_completions += 1
        return
    for key in hold.position:
        _let_go(world, hold, key)


def _let_go(world: World, hold: Hold, key: BlockKey) -> None:
    holders = world.holders.get(key)
    if holders is not None and hold in holders:
        holders.remove(hold)
        if not holders:
            del world.holders[key]


def forget_all(world: World) -> None:
    """A reset: what is held is of the old weights."""
    world.holders.clear()
    world.due_steps.clear()
    for hold in world.holds.values():
        hold.due.clear()


def lost(world: World, keys: Iterable[BlockKey]) -> None:
    """These keys became ABSENT: due to those that hold them."""
    for key in keys:
        for hold in world.holders.get(key, ()):
            hold.due[key] = None
            notify(world, hold)


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
            notify(world, hold)


def notify(world: World, hold: Hold) -> None:
    """Tell the holder, once until it answers, and not while there is no point. A stepped one is kept in mind."""
    if hold.stepped:
        if hold.due:
            world.due_steps[hold.hold] = hold
        return
    if hold.notified or not world.spec.restore or world.now_s < hold.rests_until_s:
        return
    if starved(world, hold.pool):
        return
    if hold.due and (world.pools[hold.pool].free or world.now_s >= hold.looks_again_s):
        hold.notified = True
        world.commands.append(RestoreDue(hold.hold))


def starved(world: World, pool: int) -> bool:
    """A load waits for slots: it would take again at once whatever a restore fills, and the two go on for ever."""
    return any(job.pool == pool for job in world.starved.values())


def is_absent(world: World, key: BlockKey) -> bool:
    block = world.blocks.get(key)
    return block is None or block.state is ABSENT
